"""What lies where in the safetensors files of a folder, and a tensor of the model made of it.

Everything is decided from the headers, before a value is read. Experts may be stored one by one, tensors may be quantised
(MXFP4, FP8), and the names may be those of a base model or of a larger one.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from megatrain_jax.checkpoint import fp8, mxfp4
from megatrain_jax.checkpoint.finite import all_finite
from megatrain_jax.config import UserError
from megatrain_jax.models.names import Part, Spelling

INDEX_FILE = "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

# What takes the place of "model." in a base model, and in models of which the language model is a part.
_PREFIXES = ("model.", "", "model.language_model.", "language_model.model.")
_READABLE = ("BF16", "F16", "F32")
_FP8 = "F8_E4M3"
_CHUNK = 1 << 22  # values that are compared at once


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where a tensor lies, `start` being the byte in the file, and what its header says of it."""

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str
    start: int


class Piece(NamedTuple):
    """A part of a tensor of the model, and where it lies: in one place, or in two if it is quantised.

    Attributes:
      fp8_block: rows and columns that share a scale, if the places are of FP8 and of its scales.
    """

    part: Part
    places: tuple[Stored, ...]
    fp8_block: tuple[int, int] | None = None


def read_headers(folder: Path) -> dict[str, Stored]:
    """Every tensor of the folder's weight files, by its name on file."""
    stored: dict[str, Stored] = {}
    for file in _weight_files(folder):
        with open_file(file), open(file, "rb") as stream:  # the one has checked what the other reads
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
        for key, tensor in header.items():
            if key == "__metadata__":
                continue
            if key in stored:
                raise UserError(f"{file}: tensor '{key}' is also in '{stored[key].file.name}'; remove one of them")
            start = 8 + length + tensor["data_offsets"][0]
            stored[key] = Stored(file, key, tuple(tensor["shape"]), tensor["dtype"], start)
    return stored


def _weight_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise UserError(f"model.name: no such folder '{folder}'; give a local Hugging Face folder")
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            files = [folder / name for name in names]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{index}: not an index of safetensors files; get the file again") from None
        for file in files:
            if not file.is_file():
                raise UserError(f"{index}: names '{file.name}', which is not there; get that file")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files and any(folder.glob("*.bin")):
        raise UserError(
            f"'{folder}' holds only PyTorch pickles (.bin), which are not read because they can run code; "
            "save the model again with transformers' save_pretrained"
        )
    if not files:
        raise UserError(f"model.name: no *.safetensors in '{folder}'; is the download complete?")
    return files


def open_file(file: Path) -> safe_open:
    """Opens a file; its header is checked against its size."""
    try:
        return safe_open(file, framework="np")
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{file}: broken or cut short ({reason}); get the file again") from None


def match(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, Stored],
    spellings: Mapping[str, Sequence[Spelling]],
    fp8_block: tuple[int, int] | None,
) -> dict[str, list[Piece]]:
    """name -> where every tensor of `shapes` lies, checked; in the order of `shapes`."""
    rename = _renaming(shapes, stored)
    found, missing = {}, []
    for name in shapes:
        ways = [
            [(part, _keys(part, rename)) for part in spelling] for spelling in spellings.get(name, ((Part(name),),))
        ]
        absent = [[key for _, keys in way for key in keys if key not in stored] for way in ways]
        # Of a tensor that is stored in pieces, some of which are there, the others are what is missing.
        best = min(range(len(ways)), key=lambda i: len(absent[i]) / sum(len(keys) for _, keys in ways[i]))
        missing += absent[best]
        if not absent[best]:
            found[name] = [
                _with_scales(Piece(part, tuple(stored[key] for key in keys)), stored, fp8_block)
                for part, keys in ways[best]
            ]
    if missing == [HEAD]:
        raise UserError(
            f"'{folder}': no tensor '{HEAD}', yet config.json says that the head is not tied to the embedding; "
            "set tie_word_embeddings: true in model.config_overrides if it is"
        )
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"'{folder}': no tensor '{missing[0]}'{more} in its files; is the download complete?")
    for name, pieces in found.items():
        for piece in pieces:
            _check(piece, tuple(shapes[name]))
    for key, place in stored.items():
        weight = stored.get(key.removesuffix(fp8.SCALES))
        if key.endswith(fp8.SCALES) and (weight is None or weight.dtype != _FP8):
            what = "no weight" if weight is None else f"a weight of dtype {weight.dtype}, which needs none"
            raise UserError(f"{place.file}: tensor '{key}' holds scales and there is {what}; get the files again")
    return found


def _with_scales(piece: Piece, stored: Mapping[str, Stored], block: tuple[int, int] | None) -> Piece:
    """The piece and, if it is stored in FP8, the place of its scales."""
    weight = piece.places[0]
    if weight.dtype != _FP8 or len(weight.shape) < 2:
        return piece
    if block is None:
        raise UserError(
            f"{weight.file}: tensor '{weight.key}' has dtype {_FP8}, yet config.json has no quantization_config with "
            "quant_method fp8; get the config.json of these files"
        )
    scales = stored.get(weight.key + fp8.SCALES)
    if scales is None:
        raise UserError(
            f"{weight.file}: tensor '{weight.key}' has dtype {_FP8} and there is no '{weight.key + fp8.SCALES}' with "
            "its scales; is the download complete?"
        )
    return piece._replace(places=(weight, scales), fp8_block=block)


def _keys(part: Part, rename: Callable[[str], str]) -> tuple[str, ...]:
    """Names in the files."""
    key = rename(part.key)
    return (f"{key}_blocks", f"{key}_scales") if part.mxfp4 else (key,)


def _check(piece: Piece, shape: tuple[int, ...]) -> None:
    """Raises UserError if what is stored is not what a tensor of `shape` needs there."""
    if piece.part.mxfp4:
        experts, width, out = shape
        scales = (experts, out, width // mxfp4.BLOCK)
        expected = [((*scales, mxfp4.BLOCK // 2), ("U8",)), (scales, ("U8",))]
    else:
        needed = np.broadcast_to(np.empty(()), shape)[piece.part.where].shape
        expected = [(needed, _READABLE)]
        if piece.fp8_block is not None:
            expected = [(needed, (_FP8,)), (fp8.scales_shape(needed, piece.fp8_block), _READABLE)]
    for place, (needed, dtypes) in zip(piece.places, expected, strict=True):
        if place.shape != needed:
            raise UserError(
                f"{place.file}: tensor '{place.key}' has shape {list(place.shape)} where config.json "
                f"asks for {list(needed)}; do the two belong together?"
            )
        if place.dtype not in dtypes:
            raise UserError(
                f"{place.file}: tensor '{place.key}' has dtype {place.dtype}; supported: {', '.join(dtypes)}"
            )


def assemble(pieces: Sequence[Piece], shape: tuple[int, ...], tensors: Mapping[Path, Any]) -> np.ndarray:
    """A tensor of the model from its pieces in the files."""

    def stored_as_it_is(place: Stored) -> np.ndarray:
        return _finite(place, tensors[place.file].get_tensor(place.key))

    def read(piece: Piece) -> np.ndarray:
        weight = piece.places[0]
        if piece.fp8_block is None:
            return stored_as_it_is(weight)
        # safetensors has no NumPy array for this dtype.
        bits = np.fromfile(weight.file, np.uint8, math.prod(weight.shape), offset=weight.start).reshape(weight.shape)
        return _finite(weight, fp8.dequantise(bits, stored_as_it_is(piece.places[1]), piece.fp8_block))

    if pieces[0].part.mxfp4:
        blocks, scales = (tensors[place.file].get_slice(place.key) for place in pieces[0].places)
        out = np.empty(shape, ml_dtypes.bfloat16)
        for expert in range(shape[0]):
            out[expert] = _finite(pieces[0].places[1], mxfp4.dequantise(blocks[expert], scales[expert]))
        return out
    if not pieces[0].part.where:
        return read(pieces[0])
    out: np.ndarray | None = None
    for piece in pieces:
        array = read(piece)
        if out is None:
            same = len({piece.places[0].dtype for piece in pieces}) == 1
            out = np.empty(shape, array.dtype if same else np.float32)
        out[piece.part.where] = array
    return out


def _finite(place: Stored, array: np.ndarray) -> np.ndarray:
    """`array`. Raises UserError, which names where it was stored, if a value is infinite or not a number."""
    if not all_finite(array):
        raise UserError(f"{place.file}: tensor '{place.key}' has values that are not finite; get the file again")
    return array


def _renaming(shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, Stored]) -> Callable[[str], str]:
    """name -> name on file: as it is, of a base model, or of the language model within a larger one."""
    names = [name for name in shapes if name != HEAD]
    for prefix in _PREFIXES:
        if any(prefix + name.removeprefix("model.") in stored for name in names):
            head = next((key for key in (HEAD, f"language_model.{HEAD}") if key in stored), HEAD)
            return lambda name: head if name == HEAD else prefix + name.removeprefix("model.")  # noqa: B023
    return lambda name: name


def differ(embedding: Stored, head: Stored) -> bool:
    """Whether the two tensors hold other values; compared in pieces of rows."""
    if embedding.shape != head.shape or embedding.dtype != head.dtype:
        return True
    count, width = embedding.shape
    rows = max(1, _CHUNK // width)
    with open_file(embedding.file) as one, open_file(head.file) as other:
        left, right = one.get_slice(embedding.key), other.get_slice(head.key)
        pieces = [slice(at, min(at + rows, count)) for at in range(0, count, rows)]
        return any(left[piece].tobytes() != right[piece].tobytes() for piece in pieces)
