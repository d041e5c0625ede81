"""Bytes of files as lines or characters, decompressed on the way, a little at a time."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import importlib.util
import io
import pathlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

from megatrain_jax.config import UserError
from megatrain_jax.data.records import BadRecord

_CHUNK = 1 << 18  # bytes
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_IS_UTF_16, _NOT_UTF_8 = "UTF-16 text; convert the file to UTF-8", "not UTF-8 text; convert the file to UTF-8"


def lines(file: pathlib.Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines with their ends, decompressed.

    Raises:
      BadRecord: the compressed stream is damaged or ends early.
    """
    number = 0
    with _open(file) as stream, _undamaged(file, lambda: number + 1):
        for number, line in enumerate(stream, 1):
            yield number, line


def characters(file: pathlib.Path) -> Iterator[str]:
    """The text in stretches of some 100,000 characters, decompressed.

    Raises:
      BadRecord: it is not UTF-8, or the compressed stream is damaged or ends early.
    """
    line, data = 1, b""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    with _open(file) as stream, _undamaged(file, lambda: line):
        while True:
            is_first, data = not data, stream.read1(_CHUNK)
            if is_first and data.startswith(_UTF_16):
                raise BadRecord(f"{file}:1", _IS_UTF_16)
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                before = error.object[: error.start].decode()
                yield before
                line += before.count("\n")
                raise BadRecord(f"{file}:{line}", _NOT_UTF_8) from None
            yield text
            line += text.count("\n")
            if not data:
                return


def decoded(line: bytes, where: str, number: int) -> str:
    """Line `number` of a file as text, the first one without a byte order mark.

    Raises:
      BadRecord: it is not UTF-8.
    """
    if number == 1:
        if line.startswith(_UTF_16):
            raise BadRecord(where, _IS_UTF_16)
        line = line.removeprefix(codecs.BOM_UTF8)
    try:
        return line.decode()
    except UnicodeDecodeError:
        raise BadRecord(where, _NOT_UTF_8) from None


def line_of(error: BadRecord) -> int:
    """The line that a fault of a file is at."""
    return int(error.where.rpartition(":")[2])


@contextlib.contextmanager
def _undamaged(file: pathlib.Path, line: Callable[[], int]) -> Iterator[None]:
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        fault = f"the {file.suffix} stream ends early or is damaged ({error}); fetch the file again"
        raise BadRecord(f"{file}:{line()}", fault) from None


def _open(file: pathlib.Path) -> BinaryIO:
    if file.suffix == ".gz":
        return gzip.open(file, "rb")
    if file.suffix == ".zst":
        return io.BufferedReader(_Pieces(_decompressed(file)))
    return open(file, "rb")


def _decompressed(file: pathlib.Path) -> Iterator[bytes]:
    if importlib.util.find_spec("zstandard") is None:
        raise UserError(f"{file}: .zst files need zstandard: pip install zstandard")
    import zstandard

    frame = None
    with open(file, "rb") as stream:
        try:
            while piece := stream.read(1 << 17):
                while piece:
                    frame = frame or zstandard.ZstdDecompressor().decompressobj()
                    yield frame.decompress(piece)
                    piece, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
        except zstandard.ZstdError as error:
            raise zlib.error(str(error)) from None
    if frame is not None:
        raise EOFError("no end of frame")


class _Pieces(io.RawIOBase):
    """A stream of what an iterator of bytes gives."""

    def __init__(self, pieces: Iterable[bytes]):
        self._pieces, self._left = iter(pieces), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._left:
            self._left = next(self._pieces, None)
            if self._left is None:
                self._left = b""
                return 0
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count
