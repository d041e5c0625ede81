"""The quickstart, once the environment is there: fetch, ask, train, ask again. Run it as scripts/quickstart."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

import fetch_quickstart
import numpy as np

from megatrain_jax.config import Config, UserError, load_config
from megatrain_jax.data.tokenizer import load_tokenizer
from megatrain_jax.report.metrics import read_metrics
from megatrain_jax.train import settle_environment

ROOT = Path(__file__).resolve().parent.parent
HELD_OUT_PROMPTS = ("Good morning, how are you?", "what is capitalism", "you are dull")
HELD_OUT_SHARE = 10  # one question of this many
ANSWER_TOKENS = 32
PAD = 32  # prompts are padded to a multiple, so that a template is compiled for a few lengths instead of for every one
SHORT = ("training.num_steps=8", "training.warmup_steps=2", "eval.eval_steps=8", "eval.max_eval_batches=3")


def split(dialogues: Iterable[Sequence[dict]]) -> tuple[list, list]:
    """Dialogues to learn from and dialogues held out: every tenth question, and those that are shown.

    Many dialogues open with the same question. It and all its answers go to one side, and a dialogue that repeats a
    held-out question in a later turn is on neither.
    """
    dialogues = [d for d in dialogues if d]
    questions = list(dict.fromkeys(_key(d[0]["content"]) for d in dialogues))
    held_out = set(questions[::HELD_OUT_SHARE]) | {_key(prompt) for prompt in HELD_OUT_PROMPTS}
    evaluated = [d for d in dialogues if _key(d[0]["content"]) in held_out]
    learnt = [d for d in dialogues if held_out.isdisjoint(_key(message["content"]) for message in d)]
    return learnt, evaluated


def _key(text: str) -> str:
    """A question without case, punctuation and blanks."""
    return "".join(c for c in text.casefold() if c.isalnum())


def write_split(dialogues: Path) -> None:
    """Writes train.jsonl and eval.jsonl beside the file of dialogues."""
    lines = dialogues.read_text(encoding="utf-8").splitlines()
    parts = split(json.loads(line)["messages"] for line in lines)
    for name, part in zip(("train.jsonl", "eval.jsonl"), parts, strict=True):
        aside = dialogues.with_name(f"{name}.writing")
        aside.write_text("".join(json.dumps({"messages": d}) + "\n" for d in part), encoding="utf-8")
        os.replace(aside, dialogues.with_name(name))


def answers(folder: Path, config: Config, prompts: Sequence[str]) -> list[str]:
    """The most probable answer to each prompt, token by token; one that is not done in time ends in "..."."""
    import megatrain_jax as mt

    model = mt.load(folder, dtype=config.model.dtype, device=config.model.device)
    tokenizer = load_tokenizer(folder)
    rows = []
    for prompt in prompts:
        asked = tokenizer.render([{"role": "user", "content": prompt}], add_generation_prompt=True).text
        rows.append(tokenizer.encode(asked))
    starts, open_rows = [len(row) for row in rows], set(range(len(rows)))
    for _ in range(ANSWER_TOKENS):
        # Attention is causal: what stands behind a row's last token does not reach it.
        length = -(-max(map(len, rows)) // PAD) * PAD
        logits = model.logits(np.stack([np.pad(row, (0, length - len(row))) for row in rows]))
        for i in sorted(open_rows):
            rows[i].append(int(logits[i, len(rows[i]) - 1].argmax()))
        open_rows = {i for i in open_rows if rows[i][-1] != tokenizer.eos_id}
        if not open_rows:
            break
    texts = [tokenizer.decode(row[start:]).strip() for row, start in zip(rows, starts, strict=True)]
    return [f"{text}..." if i in open_rows else text for i, text in enumerate(texts)]


def show_answers(when: str, texts: Sequence[str]) -> None:
    """Prints what was answered to `HELD_OUT_PROMPTS`."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 110)
    print(f"\nanswers {when}, to questions that are not in the training data")
    for prompt, text in zip(HELD_OUT_PROMPTS, texts, strict=True):
        print(f"  {prompt}")
        print(textwrap.fill(" ".join(text.split()), width, initial_indent="    > ", subsequent_indent="      "))
    print(flush=True)


def run(overrides: Sequence[str], short: bool) -> None:
    """Everything, with `configs/quickstart.yaml` and some overrides."""
    cache = fetch_quickstart.DEFAULT_CACHE
    cache.mkdir(parents=True, exist_ok=True)
    print("fetching SmolLM2-135M-Instruct and dialogues (93 MB, once)", flush=True)
    folder = fetch_quickstart.fetch_model(cache)
    write_split(fetch_quickstart.fetch_dialogues(cache))
    config = load_config(ROOT / "configs" / "quickstart.yaml", [*(SHORT if short else ()), *overrides])
    settle_environment(config)

    import megatrain_jax as mt

    show_answers("before", answers(folder, config, HELD_OUT_PROMPTS))
    summary = mt.Trainer(config).fit()
    if summary.interrupted:
        return
    show_answers("after", answers(summary.model_dir, config, HELD_OUT_PROMPTS))
    out = Path(config.output_dir)
    first, *_, last = (record["eval_loss"] for record in read_metrics(out / "metrics.jsonl") if "eval_loss" in record)
    print(f"held-out loss   {first:.3f} before, {last:.3f} after")
    for what, path in {"model": summary.model_dir, "metrics": out / "metrics.jsonl", "plot": out / "loss.png"}.items():
        print(f"{what:<15} {os.path.relpath(path)}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/quickstart", description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="a few steps only, to see that everything works")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="replaces a value of the configuration"
    )
    options = parser.parse_intermixed_args()
    os.chdir(ROOT)
    try:
        run(options.overrides, options.short)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
