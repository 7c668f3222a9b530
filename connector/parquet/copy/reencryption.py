"""Copies a column chunk whose encryption changes. Each page is decrypted and encrypted again, but not decoded.

Sizes, page headers and offsets change with the encryption. The CRC of a page is computed from its bytes in the file. It
is verified before it is replaced. In encrypted data pages of version 2, parquet-java leaves the repetition and
definition levels unencrypted, while Arrow encrypts the whole page. The copy has the layout of the original page.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np

from seamark.connector.arrow.arrays import Longs
from seamark.connector.parquet.copy.sinks import Sink
from seamark.connector.parquet.encryption.footers import strip_padding
from seamark.connector.parquet.encryption.modules import LENGTH_BYTES, ChunkCipher, Module
from seamark.formats.iceberg.files import _footer
from seamark.formats.iceberg.files.footer import PAGE_HEADER_MAX_BYTES

View = Callable[[int, int], AbstractContextManager[memoryview]]
"""A function that returns bytes of a file. Its arguments are their offset and their number."""

PAGE_BYTES_MAX = 256 << 20
"""The maximum size of an encrypted page, which must be in memory as a whole."""
_PACKED_MAX = (1 << 31) - 1
"""The maximum size of a page, which its header stores as a signed 32-bit integer."""
_DATA_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_2 = 0, 2, 3
_JOINED_BYTES = 64 << 10
"""The maximum size of a page that is joined with its header for one write."""


@dataclass(frozen=True)
class EncryptedChunk:
    """A chunk of a file, in the bytes [begin, end).

    Attributes:
        values: The number of values in its data pages.
        has_dictionary: Whether it begins with a dictionary page.
        old_cipher: The cipher of the chunk in the old file, or None if the chunk is not encrypted in it.
        new_cipher: The cipher of the chunk in the new file, or None if the chunk is not encrypted in it.
    """

    begin: int
    end: int
    values: int
    has_dictionary: bool
    old_cipher: ChunkCipher | None
    new_cipher: ChunkCipher | None


@dataclass
class MovedPages:
    """The pages of a chunk that was encrypted again.

    Attributes:
        pages: For each page in ascending order: the old offset, the new offset, and the new size including the header.
        headers_grown: The number of bytes by which the page headers have grown.
    """

    pages: list[tuple[int, int, int]] = field(default_factory=list)
    headers_grown: int = 0

    def to_array(self) -> Longs:
        """Return `pages` as int64[pages, 3]: the old offset, the new offset and the new size of each page."""
        return np.array(self.pages, dtype=np.int64).reshape(-1, 3)

    def translate_offset(self, offset: int) -> int:
        """Return the new offset of a page.

        Raises:
            ValueError: No page has the old offset.
        """
        for old, new, _ in self.pages:
            if old == offset:
                return new
        raise ValueError(f"a column chunk has no page at {offset}, although its footer has one there")


def reencrypt(chunk: EncryptedChunk, view: View, sink: Sink) -> MovedPages:
    """Write the chunk to the sink with the new encryption.

    Raises:
        ValueError: The pages contradict their headers or the footer, or an ordinal is too large for encryption.
        Undecryptable: A page cannot be decrypted.
    """
    moved_pages = MovedPages()
    offset, values, page = chunk.begin, chunk.values, 0
    while offset < chunk.end:
        begin, is_first = offset, offset == chunk.begin
        expects_dictionary = is_first and chunk.has_dictionary
        header, header_size = _read_header(chunk, view, offset, None if expects_dictionary else page)
        offset += header_size
        _, kind, packed_bytes, count, crc, levels = _footer.page_details(header)
        packed_bytes += 0 if chunk.old_cipher is None else chunk.old_cipher.uncounted_bytes
        if (kind == _DICTIONARY_PAGE) != expects_dictionary:
            raise ValueError(f"the page at {begin} is not of the type that its position in the column chunk requires")
        if kind not in (_DATA_PAGE, _DATA_PAGE_2, _DICTIONARY_PAGE):
            raise ValueError(f"the page at {begin} has the unknown type {kind}")
        if packed_bytes > min(chunk.end - offset, PAGE_BYTES_MAX):
            raise ValueError(
                f"the page at {begin} has {packed_bytes:,} bytes; "
                f"its column chunk has {chunk.end - offset:,}, and the limit is "
                f"{PAGE_BYTES_MAX:,}"
            )
        ordinal = None if kind == _DICTIONARY_PAGE else page
        with view(offset, packed_bytes) as body:
            # The header stores the CRC as a signed 32-bit integer.
            if crc is not None and zlib.crc32(body) != crc & 0xFFFFFFFF:
                raise ValueError(f"the CRC of the page at {begin} differs from the CRC in its header")
            data = _reencrypt_page(chunk, body, ordinal, levels if kind == _DATA_PAGE_2 else 0)
        offset += packed_bytes
        if len(data) > _PACKED_MAX:
            raise ValueError(f"the page at {begin} has more than {_PACKED_MAX:,} bytes when it is encrypted")
        new_begin = sink.position
        new_header = _footer.resized_header(header, len(data), _compute_signed_crc(data) if crc is not None else 0)
        if chunk.new_cipher is not None:
            new_header = chunk.new_cipher.encrypt(_get_header_module(ordinal), new_header, ordinal)
        if len(data) < _JOINED_BYTES:
            sink.write(b"".join((new_header, data)))
        else:
            sink.write(new_header)
            sink.write(data)
        moved_pages.pages.append((begin, new_begin, sink.position - new_begin))
        moved_pages.headers_grown += len(new_header) - header_size
        if ordinal is not None:
            page, values = page + 1, values - count
    if offset != chunk.end:
        raise ValueError(f"the pages of a column chunk end at {offset}, but the chunk ends at {chunk.end}")
    if values:
        raise ValueError(
            f"the pages of a column chunk have {chunk.values - values:,} values, but the footer states {chunk.values:,}"
        )
    return moved_pages


def _read_header(chunk: EncryptedChunk, view: View, offset: int, page: int | None) -> tuple[bytes, int]:
    """Return the page header at `offset`, and its size in the file.

    The size of an encrypted header is stored before the header. The end of an unencrypted header follows only from its
    decoding.

    Args:
        chunk: The chunk that contains the page.
        view: Returns a view of bytes of the file.
        offset: The offset of the header in the file.
        page: The ordinal of the page, or None for a dictionary page.

    Raises:
        ValueError: The header does not fit into the rest of the chunk, or is invalid.
    """
    remaining_bytes = chunk.end - offset
    if chunk.old_cipher is None:
        with view(offset, min(PAGE_HEADER_MAX_BYTES, remaining_bytes)) as data:
            size, *_ = _footer.page_details(data)
            return bytes(data[:size]), size
    if remaining_bytes < LENGTH_BYTES:
        raise ValueError(f"the column chunk ends within a page header at {offset}")
    with view(offset, LENGTH_BYTES) as data:
        size = LENGTH_BYTES + struct.unpack("<I", data)[0]
    if size > min(remaining_bytes, PAGE_HEADER_MAX_BYTES):
        raise ValueError(f"the page header at {offset} has {size:,} bytes; its column chunk has {remaining_bytes:,}")
    with view(offset, size) as data:
        return strip_padding(chunk.old_cipher.decrypt(_get_header_module(page), data, page)), size


def _reencrypt_page(chunk: EncryptedChunk, body: memoryview, page: int | None, levels_bytes: int) -> bytes:
    """Decrypt the body of a page with the old cipher, and return it encrypted with the new cipher.

    Some writers do not encrypt the repetition and definition levels at the start of a page of version 2. The new page
    has the same layout.

    Args:
        chunk: The chunk of the page, with both ciphers.
        body: The page without its header.
        page: The ordinal of the page, or None for a dictionary page.
        levels_bytes: The number of bytes of the levels in a page of version 2, otherwise 0.
    """
    module = Module.DICTIONARY_PAGE if page is None else Module.DATA_PAGE
    plain_levels_bytes = 0  # The number of unencrypted bytes at the start of the page, which are copied unchanged.
    if chunk.old_cipher is None:
        plain_body: bytes | memoryview = body
    else:
        if levels_bytes and not _is_module(body) and _is_module(body[levels_bytes:]):
            plain_levels_bytes = levels_bytes
        plain_body = chunk.old_cipher.decrypt(module, body[plain_levels_bytes:], page)
    if chunk.new_cipher is None:
        return b"".join((body[:plain_levels_bytes], plain_body))
    data = chunk.new_cipher.encrypt(module, plain_body, page)
    return b"".join((body[:plain_levels_bytes], data)) if plain_levels_bytes else data


def _is_module(data: memoryview) -> bool:
    return len(data) >= LENGTH_BYTES and struct.unpack_from("<I", data)[0] == len(data) - LENGTH_BYTES


def _get_header_module(page: int | None) -> Module:
    return Module.DICTIONARY_PAGE_HEADER if page is None else Module.DATA_PAGE_HEADER


def _compute_signed_crc(data: bytes) -> int:
    """Return the CRC as a signed 32-bit integer, as Thrift stores it."""
    crc = zlib.crc32(data)
    return crc - (1 << 32) if crc >= 1 << 31 else crc
