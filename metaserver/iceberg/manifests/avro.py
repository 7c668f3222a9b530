"""The container of an Avro object file (Avro 1.12 specification, "Object Container Files"), as manifests use it.

A header with the writer's schema, then blocks of rows, each compressed on its own and closed by the file's sync marker.
This file takes the container apart and inflates the blocks into one piece of memory, the *heap*; what the rows mean is
`_manifest.pyx`'s. Nothing in the file is believed: every length is held against the bytes that are there, and the
inflated size against a limit, so that hostile input costs no more than honest input of its size. Inflating releases
the GIL.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

from metaserver.errors import Corrupt
from metaserver.iceberg.manifests._memory import Memory

_MAGIC = b"Obj\x01"
_SYNC_BYTES = 16
_ISAL_ERROR: type[Exception] = isal_zlib.IsalError  # type: ignore[assignment]  # its stub takes the class for one of it

_Inflate: TypeAlias = Callable[[memoryview, int], bytes | memoryview]
"""(compressed block, limit in bytes) -> the block. Raises OverflowError when it is larger than the limit."""


@dataclass(frozen=True, slots=True)
class Container:
    metadata: dict[str, str]
    """The header's entries that are UTF-8 text; `avro.schema` is always there."""
    heap: NDArray[np.uint8]
    """All blocks, inflated, one after the other."""
    edges: NDArray[np.int64]
    """Block i is heap[edges[i]:edges[i + 1]]; shape (blocks + 1,)."""
    counts: NDArray[np.int64]
    """Rows that each block claims to hold; not negative, otherwise unchecked."""


def read_container(data: bytes | memoryview, location: str, *, inflated_limit_bytes: int) -> Container:
    """Take a whole file apart. Raises Corrupt naming `location` for anything that the specification does not allow."""
    reader = _Reader(memoryview(data).cast("B"), location)
    if bytes(reader.take(len(_MAGIC), "the magic number")) != _MAGIC:
        raise reader.corrupt("does not begin as an Avro file does")
    metadata = _metadata(reader)
    if "avro.schema" not in metadata:
        raise reader.corrupt("has no schema in its header")
    codec = metadata.get("avro.codec", "null")
    inflate = _CODECS.get(codec)
    if inflate is None:
        raise reader.corrupt(f"is compressed with {codec!r}; codecs that can be read: {', '.join(sorted(_CODECS))}")
    sync = bytes(reader.take(_SYNC_BYTES, "the sync marker"))
    blocks: list[bytes | memoryview] = []
    edges, counts, size = [0], [], 0
    while not reader.at_end():
        count = reader.length("a block's row count")
        packed = reader.take(reader.length("a block's size"), "a block")
        if reader.take(_SYNC_BYTES, "a sync marker") != sync:
            raise reader.corrupt(f"block {len(blocks)} does not end with the file's sync marker")
        try:
            block = inflate(packed, inflated_limit_bytes - size)
        except OverflowError:
            raise reader.corrupt(f"inflates to more than {inflated_limit_bytes} bytes") from None
        except (_ISAL_ERROR, OSError, ValueError, EOFError) as error:
            raise reader.corrupt(f"block {len(blocks)} cannot be inflated ({codec}): {error}") from error
        size += len(block)
        blocks.append(block)
        edges.append(size)
        counts.append(count)
    return Container(metadata, _joined(blocks, size), np.array(edges, np.int64), np.array(counts, np.int64))


def _joined(blocks: Sequence[bytes | memoryview], size: int) -> NDArray[np.uint8]:
    heap = np.frombuffer(memoryview(Memory(size)), np.uint8) if size else np.empty(0, np.uint8)
    view, at = heap.data, 0
    for block in blocks:
        view[at : at + len(block)] = block
        at += len(block)
    return heap


class _Reader:
    """A cursor over the file that never leaves it."""

    def __init__(self, data: memoryview, location: str) -> None:
        self._data = data
        self._location = location
        self._at = 0

    def corrupt(self, what: str) -> Corrupt:
        return Corrupt(f"{self._location}: {what}")

    def at_end(self) -> bool:
        return self._at == len(self._data)

    def take(self, size: int, what: str) -> memoryview:
        end = self._at + size
        if end > len(self._data):
            raise self.corrupt(f"ends in the middle of {what}: {size} bytes at {self._at}, of {len(self._data)}")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def long(self, what: str) -> int:
        """A zig-zag varint of at most 64 bits."""
        value = shift = 0
        for byte in self._data[self._at : self._at + 10]:
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                if value >= 1 << 64:
                    break
                self._at += shift // 7
                return (value >> 1) ^ -(value & 1)
        if shift == 70:
            raise self.corrupt(f"{what} at {self._at} is no 64-bit number")
        raise self.corrupt(f"ends in the middle of {what}")

    def length(self, what: str) -> int:
        value = self.long(what)
        if value < 0:
            raise self.corrupt(f"{what} is negative: {value}")
        return value


def _metadata(reader: _Reader) -> dict[str, str]:
    """The header's map of strings to bytes. Entries that are not text are left out: nobody here asks for one."""
    found: dict[str, str] = {}
    while count := reader.long("the header's entry count"):
        if count < 0:  # then its size in bytes follows, which only a reader that skips needs
            count = -count
            reader.length("the header's size")
        for _ in range(count):  # every entry takes bytes, so the end of the file ends a count that is too large
            key = bytes(reader.take(reader.length("a key's length"), "a key of the header"))
            value = bytes(reader.take(reader.length("a value's length"), "a value of the header"))
            try:
                found[key.decode()] = value.decode()
            except UnicodeDecodeError:
                continue
    return found


def _plain(block: memoryview, limit: int) -> memoryview:
    if len(block) > limit:
        raise OverflowError
    return block


def _deflate(block: memoryview, limit: int) -> bytes:
    inflater = isal_zlib.decompressobj(wbits=-15)
    inflated: bytes = inflater.decompress(block, limit + 1)
    if len(inflated) > limit:
        raise OverflowError
    if not inflater.eof:
        raise EOFError("the compressed data end too early")
    return inflated


# pyarrow is looked up when a block needs it: it costs each process a tenth of a second and 40 MB, and almost every
# manifest is deflated.
def _zstandard(block: memoryview, limit: int) -> bytes:
    pyarrow = importlib.import_module("pyarrow")
    pieces: list[bytes] = []
    size = 0
    # A stream, because Java's writers leave the inflated size out of the frame.
    with pyarrow.CompressedInputStream(pyarrow.BufferReader(block), "zstd") as stream:
        while piece := stream.read(max(65_536, 4 * len(block))):
            pieces.append(piece)
            size += len(piece)
            if size > limit:
                raise OverflowError
    return b"".join(pieces)


def _snappy(block: memoryview, limit: int) -> bytes:
    """Snappy's own block format, then four bytes: the big-endian CRC32 of the inflated data."""
    if len(block) < 5:
        raise EOFError("a snappy block has at least 5 bytes")
    packed, checksum = block[:-4], int.from_bytes(block[-4:], "big")
    size = 0
    for i, byte in enumerate(packed[:5]):
        size |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            break
    if size > _SNAPPY_RATIO_MAX * len(packed):
        raise ValueError(f"{len(packed)} bytes cannot hold {size}")
    if size > limit:
        raise OverflowError
    inflated: bytes = importlib.import_module("pyarrow").Codec("snappy").decompress(packed, size, asbytes=True)
    if zlib.crc32(inflated) != checksum:
        raise ValueError("the checksum does not match")
    return inflated


_SNAPPY_RATIO_MAX = 22
"""A copy of 64 bytes, the longest, takes three."""

_CODECS: dict[str, _Inflate] = {"null": _plain, "deflate": _deflate, "snappy": _snappy, "zstandard": _zstandard}
