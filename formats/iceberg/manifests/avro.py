"""Reader of Avro object container files (Avro 1.12 specification, "Object Container Files"), for manifests.

A file has a header with the writer's schema, then blocks of rows. Each block is compressed separately and followed by
the sync marker. This module parses the container and inflates the blocks into one buffer, the *heap*; `_manifest.pyx`
decodes the rows. Input is untrusted: every length is checked against the available bytes, and the inflated size against
a limit. So malicious input costs at most as much as valid input of the same size. Inflating releases the GIL.
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

from seamark.formats.iceberg.manifests._memory import Memory
from seamark.formats.runtime.errors import Corrupt

_MAGIC = b"Obj\x01"
_SYNC_BYTES = 16
_RAW_DEFLATE_BITS = -15
"""The parameter of zlib for deflate without a header and a checksum."""
_VARINT_BYTES_MAX = 10
"""The maximum size of a number of 64 bits, with seven bits in each byte."""
_SNAPPY_CHECKSUM_BYTES, _SNAPPY_SIZE_BYTES_MAX = 4, 5
"""The size of the checksum after a block in Snappy's format, and the maximum size of the inflated size in the block."""
_PIECE_BYTES_MIN = 65_536
"""The minimum size of the pieces in which a block is inflated."""
_ISAL_ERROR: type[Exception] = isal_zlib.IsalError  # type: ignore[assignment]  # The stub declares an instance.

_Inflate: TypeAlias = Callable[[memoryview, int], bytes | memoryview]
"""A function that decompresses a block, given the block and a limit in bytes.

If the result exceeds the limit, it raises OverflowError.
"""


@dataclass(frozen=True, slots=True)
class Container:
    """The parsed content of an Avro file: its header, and its blocks of rows."""

    metadata: dict[str, str]
    """The header entries that are UTF-8 text. They always contain `avro.schema`."""
    heap: NDArray[np.uint8]
    """All inflated blocks, concatenated."""
    edges: NDArray[np.int64]
    """The edges of the blocks in the heap, int64[blocks + 1]: block i is heap[edges[i]:edges[i + 1]]."""
    counts: NDArray[np.int64]
    """The number of rows that each block states, int64[blocks]. It is only checked not to be negative."""


def read_container(data: bytes | memoryview, location: str, *, inflated_limit_bytes: int) -> Container:
    """Parse a complete Avro file: its header, and its blocks of rows, which are decompressed but not decoded.

    Args:
        data: The bytes of the file.
        location: The location of the file, for errors.
        inflated_limit_bytes: The maximum size of all decompressed blocks together.

    Raises:
        Corrupt: The file violates the specification. The message names `location`.
    """
    reader = _Reader(memoryview(data).cast("B"), location)
    if bytes(reader.take(len(_MAGIC), "the magic number")) != _MAGIC:
        raise reader.make_error("does not start with Avro's magic bytes")
    metadata = _read_metadata(reader)
    if "avro.schema" not in metadata:
        raise reader.make_error("has no schema in its header")
    codec = metadata.get("avro.codec", "null")
    inflate = _CODECS.get(codec)
    if inflate is None:
        raise reader.make_error(f"is compressed with {codec!r}; codecs that can be read: {', '.join(sorted(_CODECS))}")
    sync = bytes(reader.take(_SYNC_BYTES, "the sync marker"))
    blocks: list[bytes | memoryview] = []
    edges, counts, size = [0], [], 0
    while not reader.is_at_end():
        count = reader.read_length("a block's row count")
        compressed_block = reader.take(reader.read_length("a block's size"), "a block")
        if reader.take(_SYNC_BYTES, "a sync marker") != sync:
            raise reader.make_error(f"block {len(blocks)} does not end with the file's sync marker")
        try:
            block = inflate(compressed_block, inflated_limit_bytes - size)
        except OverflowError:
            raise reader.make_error(f"inflates to more than {inflated_limit_bytes} bytes") from None
        except (_ISAL_ERROR, OSError, ValueError, EOFError) as error:
            raise reader.make_error(f"block {len(blocks)} cannot be inflated ({codec}): {error}") from error
        size += len(block)
        blocks.append(block)
        edges.append(size)
        counts.append(count)
    return Container(metadata, _join_blocks(blocks, size), np.array(edges, np.int64), np.array(counts, np.int64))


def read_header(data: bytes | memoryview, location: str) -> dict[str, str]:
    """Return the header entries of a file that are UTF-8 text, without reading its blocks.

    Raises:
        Corrupt: The file violates the specification. The message names `location`.
    """
    reader = _Reader(memoryview(data).cast("B"), location)
    if bytes(reader.take(len(_MAGIC), "the magic number")) != _MAGIC:
        raise reader.make_error("does not start with Avro's magic bytes")
    return _read_metadata(reader)


def _join_blocks(blocks: Sequence[bytes | memoryview], size: int) -> NDArray[np.uint8]:
    heap = np.frombuffer(memoryview(Memory(size)), np.uint8) if size else np.empty(0, np.uint8)
    view, offset = heap.data, 0
    for block in blocks:
        view[offset : offset + len(block)] = block
        offset += len(block)
    return heap


class _Reader:
    """A reader with a position in the file, which checks all lengths."""

    def __init__(self, data: memoryview, location: str) -> None:
        self._data = data
        self._location = location
        self._position = 0

    def make_error(self, problem: str) -> Corrupt:
        return Corrupt(f"{self._location}: {problem}")

    def is_at_end(self) -> bool:
        return self._position == len(self._data)

    def take(self, size: int, field: str) -> memoryview:
        end = self._position + size
        if end > len(self._data):
            raise self.make_error(
                f"ends in the middle of {field}: {size} bytes at {self._position}, but the file has {len(self._data)}"
            )
        piece = self._data[self._position : end]
        self._position = end
        return piece

    def read_long(self, field: str) -> int:
        """Read a zig-zag varint of at most 64 bits: seven bits per byte, the lowest first. The lowest bit is the sign.

        Args:
            field: What the number is, for errors.

        Raises:
            Corrupt: The data end within the number, or the number has more than 64 bits.
        """
        value = shift = 0
        for byte in self._data[self._position : self._position + _VARINT_BYTES_MAX]:
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                if value >= 1 << 64:
                    break
                self._position += shift // 7
                return (value >> 1) ^ -(value & 1)
        if shift == 7 * _VARINT_BYTES_MAX:
            raise self.make_error(f"{field} at {self._position} is not a 64-bit number")
        raise self.make_error(f"ends in the middle of {field}")

    def read_length(self, field: str) -> int:
        value = self.read_long(field)
        if value < 0:
            raise self.make_error(f"{field} is negative: {value}")
        return value


def _read_metadata(reader: _Reader) -> dict[str, str]:
    """Read the header's map of strings to bytes.

    Entries that are not UTF-8 text are omitted, because no caller uses them.
    """
    entries: dict[str, str] = {}
    while count := reader.read_long("the header's entry count"):
        if count < 0:  # The block's size in bytes follows, for readers that skip it.
            count = -count
            reader.read_length("the header's size")
        for _ in range(count):  # Each entry takes bytes, so an invalid count cannot exceed the end of the file.
            key = bytes(reader.take(reader.read_length("a key's length"), "a key of the header"))
            value = bytes(reader.take(reader.read_length("a value's length"), "a value of the header"))
            try:
                entries[key.decode()] = value.decode()
            except UnicodeDecodeError:
                continue
    return entries


def _check_block_size(block: memoryview, limit: int) -> memoryview:
    if len(block) > limit:
        raise OverflowError
    return block


def _inflate_deflate(block: memoryview, limit: int) -> bytes:
    inflater = isal_zlib.decompressobj(wbits=_RAW_DEFLATE_BITS)
    content: bytes = inflater.decompress(block, limit + 1)
    if len(content) > limit:
        raise OverflowError
    if not inflater.eof:
        raise EOFError("the compressed data are truncated")
    return content


# pyarrow is imported on first use, because the import takes a tenth of a second and 40 MB in each process, and nearly
# all manifests use deflate.
def _inflate_zstandard(block: memoryview, limit: int) -> bytes:
    pyarrow = importlib.import_module("pyarrow")
    pieces: list[bytes] = []
    size = 0
    # Decompress the block as a stream, because Java's writers omit the inflated size from the frame.
    with pyarrow.CompressedInputStream(pyarrow.BufferReader(block), "zstd") as stream:
        while piece := stream.read(max(_PIECE_BYTES_MIN, 4 * len(block))):
            pieces.append(piece)
            size += len(piece)
            if size > limit:
                raise OverflowError
    return b"".join(pieces)


def _inflate_snappy(block: memoryview, limit: int) -> bytes:
    """Decompress a block in Snappy's format. The big-endian CRC32 of the result follows the block.

    A block begins with its decompressed size, seven bits per byte. The size is checked before memory is allocated.

    Raises:
        OverflowError: The block has more than `limit` bytes after decompression.
        ValueError: The block is damaged.
        EOFError: The block is too short.
    """
    if len(block) < 1 + _SNAPPY_CHECKSUM_BYTES:
        raise EOFError("a snappy block has at least 5 bytes")
    compressed = block[:-_SNAPPY_CHECKSUM_BYTES]
    checksum = int.from_bytes(block[-_SNAPPY_CHECKSUM_BYTES:], "big")
    size = 0
    for index, byte in enumerate(compressed[:_SNAPPY_SIZE_BYTES_MAX]):
        size |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            break
    if size > _SNAPPY_RATIO_MAX * len(compressed):
        raise ValueError(f"{len(compressed)} compressed bytes cannot contain the stated {size} bytes")
    if size > limit:
        raise OverflowError
    content: bytes = importlib.import_module("pyarrow").Codec("snappy").decompress(compressed, size, asbytes=True)
    if zlib.crc32(content) != checksum:
        raise ValueError("the checksum does not match the inflated data")
    return content


_SNAPPY_RATIO_MAX = 22
"""The maximum ratio of inflated to compressed bytes: the longest copy has 64 bytes, and takes three bytes."""

_CODECS: dict[str, _Inflate] = {
    "null": _check_block_size,
    "deflate": _inflate_deflate,
    "snappy": _inflate_snappy,
    "zstandard": _inflate_zstandard,
}
