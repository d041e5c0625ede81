"""Draws docs/images/benchmarks.png, the bars of the README, from what the runs in docs/benchmarks/ printed.

python scripts/plot_benchmarks.py
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parents[1] / "docs"
BARS = (  # file, clipped at, label
    ("7b-wide-14-32x1024", 0, "megatrain_jax"),
    ("7b-wide-14-32x1024", 1, "same, clipped"),
    ("7b-wide-14-streamed-32x1024", 0, "same, every block streamed"),
    ("7b-wide-14-streamed-32x1024", 1, "same, every block streamed, clipped"),
    ("deepspeed-7b-wide-14", 1, "DeepSpeed ZeRO-3 offload, clipped"),
    ("fsdp2-7b-wide-14", 1, "PyTorch FSDP2 offload, clipped"),
)
TOKENS = 32 * 1024  # of a step
OURS, PEER, INK = "#1f5fa8", "#9aa5b1", "#1f2933"


def main() -> None:
    results = []
    for name, clip, label in BARS:
        path = DOCS / "benchmarks" / f"{name}.json"
        found = json.loads(path.read_text()) if path.is_file() else []  # what was not measured has no bar
        results += [(label, r) for r in found if (r["clip"], r["tokens_per_step"]) == (clip, TOKENS)]
    with matplotlib.rc_context({"font.family": "DejaVu Sans", "font.size": 11, "text.color": INK}):
        figure = Figure(figsize=(10, 0.62 * len(results) + 0.9), dpi=150, layout="constrained")
        axes = figure.subplots()
        for y, (_, result) in enumerate(reversed(results)):
            rate = result["tokens_per_second"]
            axes.barh(y, rate, color=PEER if "system" in result else OURS, height=0.66)
            memory = f"{result['device_peak_gib']:.0f} GiB of the device"
            axes.text(rate, y, f" {rate:,.0f}   ({memory})", va="center", ha="left", fontsize=10)
        axes.set_yticks(range(len(results)), [label for label, _ in reversed(results)])
        axes.set_xlim(0, 1.5 * max(result["tokens_per_second"] for _, result in results))
        axes.set_xticks([])
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        first = results[0][1]
        title = f"tokens/s, {first['parameters'] / 1e9:.2f} B parameters, 32 x 1024 tokens a step, one H200"
        axes.set_title(title, loc="left", fontsize=12)
        figure.savefig(DOCS / "images" / "benchmarks.png")


if __name__ == "__main__":
    main()
