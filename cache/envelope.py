"""The envelope of a stored value: a read returns exactly the value that was put under the key, or is refused.

The rule: a reader trusts only the envelope, and not the file's name, its length or the usage database. Files may
therefore be torn, swapped, corrupted or left over from a crash, and nothing is synced to the disk.

    bytes  0–7   magic, with a line end that a transfer in text mode would break
    bytes  8–11  version of this layout
    bytes 12–15  zero
    bytes 16–23  payload length
    bytes 24–55  BLAKE2b-256 of the key
    bytes 56–59  CRC-32 of the payload
    bytes 60–63  CRC-32 of bytes 0–59
    bytes 64–    payload

All numbers are little-endian. The header has 64 bytes so that arrays inside a mapped payload are aligned to cache
lines. CRC-32 by isal runs at 12 GB/s (zlib: 3.7; measured at 0.4 and 40 MB), is already a dependency for inflating, and
releases the GIL. The checksum protects against accidents, not against an attacker with write access to the folder. The
functions have no side effects, and do not access files.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from isal import isal_zlib

HEADER_BYTES = 64
VERSION = 1
_MAGIC = b"SMKBLK\r\n"
_LAYOUT = struct.Struct("<8sIIQ32sI")
_CHECK = struct.Struct("<I")


class Damaged(Exception):
    """The bytes are not a complete envelope for this key. The message names the cause."""


def compute_key_digest(key: str) -> bytes:
    """Return the digest of a key, 32 bytes. Keys may contain lone surrogates."""
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=32).digest()


def make_header(digest: bytes, parts: Sequence[memoryview]) -> bytes:
    """Return the header (64 bytes) of the file of a cached value, with checksums of the key and the payload.

    Args:
        digest: The BLAKE2b-256 of the key.
        parts: The buffers whose concatenation is the payload. Each has itemsize 1.
    """
    checksum = 0
    for part in parts:
        checksum = isal_zlib.crc32(part, checksum)
    head = _LAYOUT.pack(_MAGIC, VERSION, 0, sum(len(part) for part in parts), digest, checksum)
    return head + _CHECK.pack(isal_zlib.crc32(head))


def extract_payload(digest: bytes, data: memoryview, *, check_payload: bool = True) -> memoryview:
    """Return the payload, a slice of `data`, after a comparison with the header at the start of `data`.

    Args:
        digest: The BLAKE2b-256 of the key.
        data: The bytes of the file.
        check_payload: Whether to compare the payload's checksum. If False, only the key and the length are compared,
            and the payload must have its own checksums.

    Raises:
        Damaged: The header differs from that of `make_header` for this key, or the payload does not match it.
    """
    if len(data) < HEADER_BYTES:
        raise Damaged(f"the file has {len(data)} bytes, which are too few for a header")
    head = data[: _LAYOUT.size]
    if _CHECK.unpack_from(data, _LAYOUT.size)[0] != isal_zlib.crc32(head):
        raise Damaged("the header's checksum does not match")
    magic, version, zero, length, stored_digest, checksum = _LAYOUT.unpack(head)
    if magic != _MAGIC or version != VERSION or zero != 0:
        raise Damaged(f"the layout has version {version}; this program reads version {VERSION}")
    if stored_digest != digest:
        raise Damaged("the entry belongs to another key")
    payload = data[HEADER_BYTES:]
    if len(payload) != length:
        raise Damaged(f"the payload has {len(payload)} bytes, but the header states {length}")
    if check_payload and isal_zlib.crc32(payload) != checksum:
        raise Damaged("the payload's checksum does not match")
    return payload
