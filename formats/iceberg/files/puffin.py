"""Puffin files: named blobs, and a footer with their positions (Iceberg's Puffin spec, version 1).

    PFA1, the blobs, PFA1, payload (JSON, may be an LZ4 frame), size of the payload (int32), flags (4 bytes), PFA1

The writer yields parts, so that a large blob is neither copied nor kept in memory. A reader first reads the end of the
file: `read_footer_size` returns the footer's size, and `read_footer` its content. Then the reader reads blobs by range.
Input is untrusted: offsets are checked against the file size, and inflated sizes against a limit. If a check fails,
Corrupt is raised with the file's location. The functions have no side effects.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
import pyarrow as pa

from seamark.formats.runtime.decoding import convert_json
from seamark.formats.runtime.errors import Corrupt

Part = bytes | bytearray | memoryview
"""Contiguous bytes to write, with an itemsize of 1."""

MAGIC = b"PFA1"
TAIL_BYTES = 12
"""The size in bytes of the end of the file, which contains the footer's size."""
FOOTER_LIMIT_BYTES = 64 << 20
"""The maximum size of a footer in bytes. A footer has a few hundred bytes per blob; a larger one is damaged or
malicious.
"""
NO_SNAPSHOT = -1
"""The snapshot id and sequence number of a blob that belongs to no snapshot, as the spec defines for deletion vectors.
"""

_TAIL = struct.Struct("<iI4s")
_COMPRESSED = 1
"""The flag of a footer whose payload is an LZ4 frame."""


class PuffinBlobMetadata(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", omit_defaults=True):
    """The entry of a blob in the footer of a Puffin file, Iceberg's format for statistics and indexes.

    Attributes:
        offset: The position of the blob in the file.
        length: The number of bytes of the blob in the file, after compression.
    """

    type: str
    fields: tuple[int, ...]
    snapshot_id: int
    sequence_number: int
    offset: int
    length: int
    compression_codec: str | None = None
    properties: dict[str, str] = msgspec.field(default_factory=dict)


class Footer(msgspec.Struct, frozen=True, omit_defaults=True):
    blobs: tuple[PuffinBlobMetadata, ...]
    properties: dict[str, str] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Blob:
    """A blob to write.

    Attributes:
        type: The type of the blob.
        parts: The parts whose concatenation is the blob. Writing consumes them.
        fields: The field ids of the blob's columns.
        codec: None, or "zstd" to compress the blob.
        properties: The properties of the blob.
    """

    type: str
    parts: Iterable[Part]
    fields: tuple[int, ...] = ()
    codec: str | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    snapshot_id: int = NO_SNAPSHOT
    sequence_number: int = NO_SNAPSHOT


def write_puffin(blobs: Iterable[Blob], properties: Mapping[str, str]) -> Iterator[Part]:
    """Yield the parts of a file.

    The blobs follow each other without gaps, in the given order. Parts without compression are yielded unchanged.
    """
    yield MAGIC
    offset = len(MAGIC)
    written_blobs = []
    for blob in blobs:
        start = offset
        for part in blob.parts if blob.codec is None else (_compress_blob(blob),):
            if len(part):
                yield part
                offset += len(part)
        written_blobs.append(
            PuffinBlobMetadata(
                type=blob.type,
                fields=blob.fields,
                snapshot_id=blob.snapshot_id,
                sequence_number=blob.sequence_number,
                offset=start,
                length=offset - start,
                compression_codec=blob.codec,
                properties=dict(blob.properties),
            )
        )
    payload = msgspec.json.encode(Footer(tuple(written_blobs), dict(properties)))
    yield MAGIC + payload + _TAIL.pack(len(payload), 0, MAGIC)


def _compress_blob(blob: Blob) -> bytes:
    if blob.codec != "zstd":
        raise ValueError(f"Blobs can be written without compression or with zstd, but not with {blob.codec!r}")
    # The spec requires one frame, which must contain the size of its content.
    return bytes(pa.Codec("zstd").compress(b"".join(blob.parts), asbytes=True))


def read_footer_size(tail: Part, location: str) -> int:
    """Return the size of a Puffin file's footer in bytes, with the magic bytes before and after its content.

    Args:
        tail: The last TAIL_BYTES or more bytes of the file.
        location: The location of the file, for errors.

    Raises:
        Corrupt: The file does not end like a Puffin file.
    """
    size, flags, magic = _read_tail(tail, location)
    if magic != MAGIC:
        raise Corrupt(f"{location}: does not end with Puffin's magic bytes")
    if flags & ~_COMPRESSED:
        raise Corrupt(f"{location}: the footer has flags {flags:#x}, of which only 0x1 is supported")
    if not 0 < size <= FOOTER_LIMIT_BYTES:
        raise Corrupt(f"{location}: the footer states an invalid size of {size} bytes")
    return len(MAGIC) + size + TAIL_BYTES


def _read_tail(tail: Part, location: str) -> tuple[int, int, bytes]:
    """Return the size of the footer's payload, the flags, and the magic bytes at the end of the file."""
    if len(tail) < TAIL_BYTES:
        raise Corrupt(f"{location}: a Puffin file cannot have only {len(tail)} bytes")
    size, flags, magic = _TAIL.unpack_from(tail, len(tail) - TAIL_BYTES)
    return size, flags, magic


def read_footer(tail: Part, file_size: int, location: str) -> Footer:
    """Return the footer of a file of `file_size` bytes.

    Args:
        tail: The last bytes of the file, at least as many as `read_footer_size` returns.
        file_size: The size of the file in bytes.
        location: The location of the file, for errors.

    Raises:
        Corrupt: The footer is invalid, or states a blob outside the file.
    """
    footer_bytes = read_footer_size(tail, location)
    start = file_size - footer_bytes
    if start < len(MAGIC) or footer_bytes > len(tail):
        raise Corrupt(
            f"{location}: a footer of {footer_bytes} bytes does not fit into the {min(len(tail), file_size)} bytes "
            "that were read"
        )
    footer = memoryview(tail)[len(tail) - footer_bytes :]
    if footer[: len(MAGIC)] != MAGIC:
        raise Corrupt(f"{location}: the footer does not start with Puffin's magic bytes")
    payload = footer[len(MAGIC) : -TAIL_BYTES]
    _, flags, _ = _read_tail(tail, location)
    if flags & _COMPRESSED:
        payload = memoryview(_inflate_lz4(payload, FOOTER_LIMIT_BYTES, f"{location}: the footer"))
    try:
        decoded_footer = convert_json(payload, Footer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(f"{location}: the footer cannot be read: {error}") from None
    for blob in decoded_footer.blobs:
        if blob.offset < len(MAGIC) or blob.length < 0 or blob.offset + blob.length > start:
            claim = f"{blob.length} bytes at {blob.offset}"
            raise Corrupt(f"{location}: blob {blob.type!r} states {claim}, but the footer begins at {start}")
    return decoded_footer


def _inflate_lz4(frame: Part, limit_bytes: int, subject: str) -> bytes:
    """Decompress an LZ4 frame to at most `limit_bytes` bytes.

    The frame is decompressed as a stream, because the content size in its header is not trusted. One byte more than the
    limit is requested, to detect a longer content.

    Raises:
        Corrupt: The frame is invalid, or its content is longer than the limit.
    """
    try:
        with pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(frame)), "lz4") as stream:
            content = bytes(stream.read(limit_bytes + 1))
    except OSError as error:
        raise Corrupt(f"{subject} cannot be inflated: {error}") from None
    if len(content) > limit_bytes:
        raise Corrupt(f"{subject} inflates to more than {limit_bytes} bytes")
    return content
