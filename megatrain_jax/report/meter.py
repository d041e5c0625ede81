"""What steps cost and learned, gathered between two records."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any


class Meter:
    """Means over the steps since the last record. Tokens are real ones, padding is never counted.

    Args:
      carried: what `carried` gave when the run was interrupted between two records.
    """

    def __init__(self, carried: Mapping[str, Any] | None = None):
        self._sums = dict(carried or {})
        self._began = time.perf_counter()

    def start(self) -> None:
        """A step begins: it waits for its data."""
        self._began = time.perf_counter()

    def data_ready(self) -> None:
        self._add("seconds.data_wait", time.perf_counter() - self._began)

    def finish(
        self,
        *,
        loss: float,
        grad_norm: float,
        tokens: int,
        supervised_tokens: int,
        seconds: Mapping[str, float],
        router_loss: float | None = None,
    ) -> None:
        """The step is done; `seconds` are those of its parts, and its whole is measured here.

        `router_loss` is the part of the loss that balances experts, where there is one.
        """
        self._add("seconds.step", time.perf_counter() - self._began)
        for part, value in seconds.items():
            self._add(f"seconds.{part}", value)
        self._add("steps", 1)
        self._add("tokens", tokens)
        self._add("supervised_tokens", supervised_tokens)
        if math.isfinite(loss):  # one skipped step must not hide the loss of the others
            self._add("loss", loss)
            self._add("losses", 1)
            if router_loss is not None:
                self._add("router_loss", router_loss)
        self._sums["grad_norm"] = grad_norm

    def record(self) -> dict[str, Any]:
        """The mean loss (NaN if none was finite), the last norm, tokens a second, seconds a step; starts anew."""
        sums, self._sums = self._sums, {}
        router = {"router_loss": sums["router_loss"] / sums["losses"]} if "router_loss" in sums else {}
        return {
            "loss": sums["loss"] / sums["losses"] if "losses" in sums else math.nan,
            **router,
            "grad_norm": sums["grad_norm"],
            "tokens_per_second": sums["tokens"] / sums["seconds.step"],
            "supervised_share": sums["supervised_tokens"] / max(sums["tokens"], 1),
            "seconds": {k.removeprefix("seconds."): v / sums["steps"] for k, v in sums.items() if "seconds." in k},
        }

    def carried(self) -> dict[str, Any]:
        """Plain values from which another meter goes on."""
        return dict(self._sums)

    def _add(self, what: str, value: float) -> None:
        self._sums[what] = self._sums.get(what, 0) + value
