"""Arrays on disk, in pieces, so that neither writing nor reading holds more than a few of them.

All arrays of one dtype lie one behind the other in one flat array in the zarr 3 format: uncompressed, since weights do
not compress, in chunks that end in their CRC-32C, which is verified when they are read. Orbax would store the same
chunks, but it copies whole trees first: 2.9 times a tree while saving, 2.5 times while restoring.
"""

from __future__ import annotations

import collections
import concurrent.futures
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import google_crc32c
import numpy as np
import tensorstore as ts

from megatrain_jax.watchdog import progressed, waiting

# Bytes of a chunk: enough for the speed of any disk, and with its CRC more than what malloc keeps when it is freed.
PIECE = 32 << 20
SMALLEST = 1 << 20  # bytes of a chunk, however small the arrays are
IN_FLIGHT = 4  # chunks on their way at once


class FlatArray(NamedTuple):
    """Where arrays of one dtype are on disk.

    Attributes:
      path: the folder.
      dtype: NumPy name, such as "float32".
      size: elements.
      chunk: elements in each file. The last file is padded.
    """

    path: Path
    dtype: str
    size: int
    chunk: int

    @property
    def files(self) -> list[Path]:
        """A file for each chunk, in order."""
        return [self.path / str(i) for i in range(math.ceil(self.size / self.chunk))]

    @property
    def metadata(self) -> Path:
        """What tells other programs what the array is."""
        return self.path / "zarr.json"

    @property
    def stored_bytes(self) -> int:
        return len(self.files) * (self.chunk * np.dtype(self.dtype).itemsize + 4)


def chunk_bytes(largest: int) -> int:
    """Bytes of a chunk where the largest array has `largest` bytes."""
    return min(PIECE, max(SMALLEST, largest))


class Writer:
    """Writes one `FlatArray` from its beginning to its end.

    Args:
      array: where; its folder must not exist.
      limit: bytes that may be on their way, besides the chunk that is being filled; at least one chunk may be.

    Every method raises ValueError, with the cause, if something cannot be stored.
    """

    def __init__(self, array: FlatArray, limit: int):
        self._array, self._store = array, _create(array)
        self._in_flight = max(1, min(IN_FLIGHT, limit // (array.chunk * np.dtype(array.dtype).itemsize)))
        self._flying: collections.deque[ts.Future] = collections.deque()
        self._start, self._filled, self._buffer = 0, 0, np.empty(0, array.dtype)

    def next_piece(self, most: int) -> np.ndarray:
        """Memory for the next elements, at most `most`; they must be filled in before the next call."""
        if self._filled == self._buffer.size:
            self._send()
            self._buffer = np.empty(min(self._array.chunk, self._array.size - self._start), self._array.dtype)
        piece = self._buffer[self._filled : self._filled + most]
        self._filled += piece.size
        return piece

    def flush(self) -> None:
        """Returns when everything is on disk."""
        self._send()
        while self._flying:
            self._land()

    def settle(self) -> None:
        """Returns when nothing is on its way any more, well or not."""
        for future in self._flying:
            future.exception()
        self._flying.clear()

    def _send(self) -> None:
        if not self._filled:
            return
        while len(self._flying) >= self._in_flight:
            self._land()
        target = self._store[self._start : self._start + self._filled]
        self._flying.append(target.write(self._buffer, can_reference_source_data_indefinitely=True))
        self._start, self._filled, self._buffer = self._start + self._filled, 0, np.empty(0, self._array.dtype)

    def _land(self) -> None:
        with waiting(f"the disk to take a part of '{self._array.path}'"):
            self._flying.popleft().result()
        progressed()


class Reader:
    """Reads one `FlatArray` from an element on; chunks to come are read and verified meanwhile, in threads.

    Not through TensorStore, which takes four seconds of a processor for each GB of such chunks.

    Args:
      array: where.
      limit: bytes that may be on their way, besides the chunk that is being used; at least one chunk may be.
      start: the first element.
      count: how many will be read; None is all that follow.
    """

    def __init__(self, array: FlatArray, limit: int, start: int = 0, count: int | None = None):
        self._array = array
        stop = array.size if count is None else start + count
        self._chunks = iter(range(start // array.chunk, math.ceil(stop / array.chunk)))
        in_flight = max(1, min(IN_FLIGHT, limit // (array.chunk * np.dtype(array.dtype).itemsize)))
        self._threads = concurrent.futures.ThreadPoolExecutor(in_flight, thread_name_prefix="megatrain-restore")
        self._coming: collections.deque[concurrent.futures.Future[np.ndarray]] = collections.deque()
        self._spare, self._piece = np.empty(array.chunk, array.dtype), np.empty(0, array.dtype)
        for _ in range(in_flight):
            self._request(np.empty(array.chunk, array.dtype))
        self._skip = start % array.chunk

    def read(self, count: int) -> Iterator[np.ndarray]:
        """The next `count` elements, in pieces; each is overwritten after the next one was asked for.

        Raises:
          ValueError: a chunk is damaged or cannot be read; the message names its file.
        """
        while count:
            if not self._piece.size:
                self._request(self._spare)
                self._spare = self._coming.popleft().result()
                self._piece, self._skip = self._spare[self._skip :], 0
            piece, self._piece = self._piece[:count], self._piece[count:]
            count -= piece.size
            yield piece

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _request(self, buffer: np.ndarray) -> None:
        if (chunk := next(self._chunks, None)) is not None:
            self._coming.append(self._threads.submit(_read_chunk, self._array.path / str(chunk), buffer))


def _read_chunk(path: Path, out: np.ndarray) -> np.ndarray:
    """Fills `out` with a chunk and returns it. Raises ValueError unless its CRC-32C, the last four bytes, is right."""
    data = out.view(np.uint8)
    try:
        with open(path, "rb") as file:
            length, tail = file.readinto(data), file.read()
    except OSError as error:
        raise ValueError(f"'{path}' cannot be read ({error.strerror})") from None
    if length != data.size or tail != google_crc32c.value(data).to_bytes(4, "little"):
        raise ValueError(f"'{path}' does not have the content that was written")
    return out


def read_range(array: FlatArray, start: int, out: np.ndarray) -> None:
    """Fills `out` with the elements from `start` on; raises as `Reader.read`."""
    at = 0
    with Reader(array, out.nbytes, start, out.size) as reader:
        for piece in reader.read(out.size):
            out[at : at + piece.size] = piece
            at += piece.size


def _create(array: FlatArray) -> ts.TensorStore:
    metadata = {
        "shape": [array.size],
        "data_type": array.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [array.chunk]}},
        "chunk_key_encoding": {"name": "v2", "configuration": {"separator": "."}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        "fill_value": 0,
    }
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(array.path)}, "metadata": metadata}
    # Zeros are stored like everything else, so that a chunk without a file is a damage and never a zero. No cache: every
    # byte is used once.
    mode = {"create": True, "store_data_equal_to_fill_value": True}
    return ts.open(spec | mode, context=ts.Context({"cache_pool": {"total_bytes_limit": 0}})).result()
