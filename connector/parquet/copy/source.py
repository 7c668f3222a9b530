"""Opens a Parquet file whose column chunks are copied, and checks that its footer is consistent with its bytes.

The footer is not trusted. Chunks must be within the file and must not overlap. When a chunk is copied, its page headers
are checked: the pages must fill the chunk and have the number of values in the footer. If a check fails, Unreadable is
raised, and the bytes that were already written must not be used.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from seamark.connector.client.storage import Storage
from seamark.connector.parquet.copy.leaves import list_leaves
from seamark.connector.parquet.copy.reencryption import EncryptedChunk, MovedPages, reencrypt
from seamark.connector.parquet.copy.sinks import Sink
from seamark.connector.parquet.encryption.footers import FileKeys, OpenedFooter, is_signed, open_footer, strip_padding
from seamark.connector.parquet.encryption.kms import KeyUnavailable
from seamark.connector.parquet.encryption.modules import LENGTH_BYTES, ChunkCipher, Module
from seamark.formats.iceberg.files import thrift
from seamark.formats.iceberg.files.footer import (
    ENCRYPTED_MAGIC,
    END_BYTES,
    MAGIC,
    PAGE_HEADER_MAX_BYTES,
    PageWalk,
    ParquetFooter,
    RowGroup,
    read_footer,
)
from seamark.formats.iceberg.files.parquet import Unreadable

FOOTER_BYTES_MAX = 64 << 20
BLOCK_BYTES = 8 << 20
"""The size of one read from a remote storage."""
INDEX_BYTES_MAX, BLOOM_BYTES_MAX = 64 << 20, 128 << 20
"""The maximum size of one page index, and of one Bloom filter."""
_TAIL_BYTES = 64 << 10
"""The number of bytes at the end of the file that are read first. Most footers fit into them."""
_BLOOM_HEADER_BYTES_MAX = 1 << 10


class Run(NamedTuple):
    """The bytes [begin, end) of a file, which consist of whole chunks.

    Attributes:
        page_walks: For each chunk, in ascending order, an object that reads the page headers of the chunk and compares
            them with the footer.
        read_ahead_end: The end of the copied bytes that follow this run without a gap. The file may be read ahead up to
            this position.
    """

    begin: int
    end: int
    page_walks: Sequence[PageWalk]
    read_ahead_end: int


class SourceFile:
    """An open Parquet file with a checked footer. As a context manager, it closes the file on exit."""

    def __init__(
        self,
        location: str,
        storage: Storage | pa.NativeFile | None,
        data: bytes | None = None,
        keys: FileKeys | None = None,
    ) -> None:
        """Open the file and check its footer.

        Args:
            location: The location of the file.
            storage: The storage, or the open file, which the caller closes.
            data: The content of the file if it is in memory, or None.
            keys: The keys of encrypted files. If it is None, encrypted files are refused.
        """
        self.location, self.is_in_memory = location, data is not None
        self.encryption: OpenedFooter | None = None
        """The encryption of the file, or None. `footer` always has the form of an unencrypted footer."""
        self._keys = keys
        self._window = b""
        self._window_at = 0
        self._bytes: mmap.mmap | bytes | None = data
        self._fd = -1
        self._remote_file: Any = None
        self._caller_file: Any = None
        try:
            if data is not None or storage is None:
                self.size_bytes = len(data or b"")
            elif isinstance(storage, pa.NativeFile):
                self._caller_file, self.size_bytes = storage, storage.size()
            else:
                self._open(location, storage)
            self.footer = self._read_footer()
            self._read_leaves_and_check_footer()
        except (OSError, pa.ArrowException) as error:
            self.close()
            raise self.make_unreadable_error(
                f"the file cannot be read: {(str(error).splitlines() or [''])[0][:200]}"
            ) from None
        except KeyUnavailable as error:
            self.close()
            raise self.make_unreadable_error(f"the key is unknown: {error}") from None
        except ValueError as error:
            self.close()
            raise self.make_unreadable_error(f"the footer is damaged: {error}") from None
        except BaseException:
            self.close()
            raise

    def _open(self, location: str, storage: Storage) -> None:
        local = storage.find_local_path(location)
        if local is None:
            self._remote_file = storage.open_input_file(location)
            self.size_bytes = self._remote_file.size()
            return
        self._fd = local.open_file()
        self.size_bytes = os.fstat(self._fd).st_size
        if self.size_bytes:
            self._bytes = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)

    def __enter__(self) -> SourceFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if isinstance(self._bytes, mmap.mmap):
            # The traceback of an exception may refer to the mapped memory, which is then unmapped only after the
            # traceback is deleted.
            with suppress(BufferError):
                self._bytes.close()
        self._bytes = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._remote_file is not None:
            self._remote_file.close()
            self._remote_file = None

    def make_unreadable_error(self, reason: str) -> Unreadable:
        return Unreadable(self.location, reason)

    def read(self, at: int, size: int) -> bytes:
        """Read bytes of the file.

        Raises:
            ValueError: The bytes are outside of the file.
        """
        if at < 0 or size < 0 or at + size > self.size_bytes:
            raise ValueError(f"{size:,} bytes at {at:,} are outside of the file, which has {self.size_bytes:,} bytes")
        if self._bytes is not None:
            return self._bytes[at : at + size]
        data = bytes((self._remote_file or self._caller_file).read_at(size, at)) if size else b""
        if len(data) != size:
            raise ValueError(f"the file ends before the {size:,} bytes at {at:,}")
        return data

    def _read_footer(self) -> ParquetFooter:
        if self.size_bytes < END_BYTES + len(MAGIC):
            raise ValueError(f"the file has only {self.size_bytes} bytes, too few for a Parquet file")
        tail = self.read(max(0, self.size_bytes - _TAIL_BYTES), min(self.size_bytes, _TAIL_BYTES))
        # A file ends with the length of the footer (4 bytes) and the magic number (4 bytes).
        footer_length, magic = tail[-END_BYTES : -len(MAGIC)], tail[-len(MAGIC) :]
        is_encrypted = magic == ENCRYPTED_MAGIC
        if not is_encrypted and magic != MAGIC:
            raise ValueError("the file does not end with PAR1 or PARE")
        length = int.from_bytes(footer_length, "little")
        if length > min(FOOTER_BYTES_MAX, self.size_bytes - END_BYTES - len(MAGIC)):
            raise ValueError(f"the footer has {length:,} bytes, but the file has {self.size_bytes:,}")
        self.data_end = self.size_bytes - END_BYTES - length
        is_in_tail = length + END_BYTES <= len(tail)
        encoded_footer = tail[-END_BYTES - length :] if is_in_tail else self.read(self.data_end, length + END_BYTES)
        plain_footer = encoded_footer[:-END_BYTES]
        if is_encrypted or is_signed(plain_footer):
            if self._keys is None:
                raise self.make_unreadable_error(
                    "the file is encrypted, and this process has no key; set SEAMARK_PARQUET_KEY_FILE or "
                    "SEAMARK_PARQUET_KMS"
                )
            self.encryption = open_footer(plain_footer, self._keys, encrypted=is_encrypted)
            plain_footer = self.encryption.plain
        # Chunks are copied without decoding, so a chunk that readers cannot decode must be refused here.
        pq.read_metadata(pa.BufferReader(MAGIC + plain_footer + struct.pack("<I", len(plain_footer)) + MAGIC))
        return read_footer(plain_footer)

    def _read_leaves_and_check_footer(self) -> None:
        """Set `leaves` to the leaf columns, and check the numbers of rows and the positions of the column chunks.

        Raises:
            ValueError: The footer contradicts itself.
        """
        footer = self.footer
        self.leaves = list_leaves(footer)
        group_rows = sum(group.rows for group in footer.groups)
        if footer.rows != group_rows:
            raise ValueError(f"the footer states {footer.rows} rows, but the row groups have {group_rows} rows")
        # Row groups without rows have no pages, and are never copied.
        groups = [group for group in footer.groups if group.rows]
        for group in groups:
            self._check_group(group)
        if groups:
            begins = np.concatenate([group.begins for group in groups])
            ends = np.concatenate([group.ends for group in groups])
            order = np.argsort(begins, kind="stable")
            if np.any(ends[order][:-1] > begins[order][1:]):
                raise ValueError("column chunks overlap")

    def _check_group(self, group: RowGroup) -> None:
        if group.rows < 0:
            raise ValueError(f"a row group has {group.rows} rows, a negative number")
        for name in ("data_page", "values", "plain_bytes", "packed_bytes", "type", "codec", "path"):
            if not group.has(name).all():
                raise ValueError(f"a column chunk does not have the field {name}")
        if group.has("encrypted").any():
            raise ValueError("a column chunk is encrypted, but its file is not")
        if group.has("file_path").any():
            raise ValueError(
                "a column chunk refers to a different file; its pages must be in the same file as the footer"
            )
        if (group.read_values("packed_bytes") < 0).any() or (group.read_values("values") < 0).any():
            raise ValueError("a column chunk has a negative size")
        if (group.begins < len(MAGIC)).any() or (group.ends > self.data_end).any():
            raise ValueError("a column chunk is outside of the file's data")

    def find_cipher(self, group: RowGroup, column: int) -> ChunkCipher | None:
        """Return the cipher of a chunk, or None if the chunk is not encrypted."""
        cipher = None if self.encryption is None else self.encryption.ciphers[group.ordinal][column]
        return None if cipher is None else cipher.create_chunk_cipher(group.ordinal, column)

    def read_offset_index(self, group: RowGroup, column: int) -> bytes | None:
        return self._read_index(group, column, "offset_index", Module.OFFSET_INDEX)

    def read_column_index(self, group: RowGroup, column: int) -> bytes | None:
        return self._read_index(group, column, "column_index", Module.COLUMN_INDEX)

    def _read_index(self, group: RowGroup, column: int, name: str, module: Module) -> bytes | None:
        if not (group.has(name)[column] and group.has(f"{name}_length")[column]):
            return None
        offset, size = int(group.read_values(name)[column]), int(group.read_values(f"{name}_length")[column])
        if size <= 0 or size > INDEX_BYTES_MAX:
            raise ValueError(f"a page index has {size:,} bytes; it must have 1 to {INDEX_BYTES_MAX:,}")
        data, cipher = self.read(offset, size), self.find_cipher(group, column)
        return data if cipher is None else strip_padding(cipher.decrypt(module, memoryview(data)))

    def read_bloom(self, group: RowGroup, column: int) -> tuple[bytes, bytes] | None:
        """Return the header and the bits of a Bloom filter, or None if the chunk has no Bloom filter.

        Older writers do not store the length of a Bloom filter in the footer. The length is then taken from the header.
        The header and the bits of an encrypted Bloom filter are encrypted separately.
        """
        if not group.has("bloom")[column]:
            return None
        offset, cipher = int(group.read_values("bloom")[column]), self.find_cipher(group, column)
        if cipher is not None:
            header, header_size = self._read_bloom_part(offset, Module.BLOOM_HEADER, cipher)
            return strip_padding(header), self._read_bloom_part(offset + header_size, Module.BLOOM_BITSET, cipher)[0]
        head = self.read(offset, min(_BLOOM_HEADER_BYTES_MAX, max(0, self.size_bytes - offset)))
        header_size, size = _read_bloom_sizes(head)
        if group.has("bloom_length")[column]:
            size = int(group.read_values("bloom_length")[column]) - header_size
        if size <= 0 or size > BLOOM_BYTES_MAX:
            raise ValueError(f"a Bloom filter has {size:,} bytes")
        return head[:header_size], self.read(offset + header_size, size)

    def _read_bloom_part(self, offset: int, module: Module, cipher: ChunkCipher) -> tuple[bytes, int]:
        """Return an encrypted part of a Bloom filter, and its size in the file."""
        size = LENGTH_BYTES + int.from_bytes(self.read(offset, LENGTH_BYTES), "little")
        if size > BLOOM_BYTES_MAX:
            raise ValueError(f"a Bloom filter has {size:,} bytes")
        return cipher.decrypt(module, memoryview(self.read(offset, size))), size

    def reencrypt(
        self, group: RowGroup, column: int, new: ChunkCipher | None, sink: Sink, *, read_ahead_end: int = 0
    ) -> MovedPages:
        """Copy a chunk to the sink with a new encryption.

        Args:
            group: The row group of the chunk.
            column: The index of the chunk in the row group.
            new: The new cipher, or None if the copy is not encrypted.
            sink: The new file.
            read_ahead_end: The end of the bytes that may be read ahead, because later calls copy them.

        Raises:
            ValueError: An ordinal of the chunk is too large for encryption.
            Unreadable: The file cannot be read.
        """
        begin, first = int(group.begins[column]), int(group.read_values("data_page")[column])
        chunk = EncryptedChunk(
            begin,
            int(group.ends[column]),
            int(group.read_values("values")[column]),
            has_dictionary=begin < first,  # Only a dictionary page can precede the first data page.
            old_cipher=self.find_cipher(group, column),
            new_cipher=new,
        )
        try:
            return reencrypt(chunk, partial(self._view, end=read_ahead_end), sink)
        except ValueError as error:
            raise self.make_unreadable_error(str(error)) from None

    @contextmanager
    def _view(self, offset: int, size: int, *, end: int) -> Iterator[memoryview]:
        """Yield bytes of the file. A remote object is read forward in blocks that do not extend beyond `end`."""
        if self._bytes is not None:
            if offset < 0 or offset + size > self.size_bytes:
                raise ValueError(f"{size:,} bytes at {offset:,} are outside of the file")
            with memoryview(self._bytes) as file_view, file_view[offset : offset + size] as part:
                yield part
            return
        if not self._window_at <= offset <= offset + size <= self._window_at + len(self._window):
            self._window = self.read(offset, max(size, min(BLOCK_BYTES, end - offset)))
            self._window_at = offset
            if len(self._window) < size:
                raise ValueError(f"{size:,} bytes at {offset:,} are outside of the file")
        with memoryview(self._window)[offset - self._window_at :][:size] as part:
            yield part

    def copy(self, run: Run, sink: Sink) -> None:
        """Copy a run, which consists of whole column chunks, to the sink, and check its pages.

        The pages of each chunk are checked by a `PageWalk`, which reads the page headers: the pages must fill the chunk
        and have its number of values.

        Raises:
            Unreadable: The file cannot be read.
        """
        try:
            if self._bytes is None:
                self._copy_remote(run, sink)
                return
            with memoryview(self._bytes) as view:
                for walk in run.page_walks:
                    with view[walk.position : walk.end] as chunk:
                        walk.read_page_headers(chunk, walk.position)
                    walk.check()
            if self._fd >= 0:
                sink.copy(self._fd, run.begin, run.end - run.begin)
            else:
                sink.write(self._bytes[run.begin : run.end])
        except ValueError as error:
            raise self.make_unreadable_error(str(error)) from None

    def _copy_remote(self, run: Run, sink: Sink) -> None:
        """Copy a run of a remote file to the new file in blocks of `BLOCK_BYTES`, and check its pages.

        Each `PageWalk` reads the page headers of one chunk in the blocks, and compares them with the footer.

        Raises:
            ValueError: The pages contradict the footer.
        """
        pending_walks = deque(run.page_walks)
        for begin in range(run.begin, run.end, BLOCK_BYTES):
            block = self.read(begin, min(BLOCK_BYTES, run.end - begin))
            sink.write(block)
            end = begin + len(block)
            while pending_walks and pending_walks[0].position < end:
                walk = pending_walks[0]
                stop = min(end, walk.end)
                walk.read_page_headers(memoryview(block)[: stop - begin], begin)
                while walk.position < stop:  # A page header may extend into the next block.
                    head = self.read(walk.position, min(PAGE_HEADER_MAX_BYTES, walk.end - walk.position))
                    walk.read_page_headers(memoryview(head), walk.position)
                if walk.position < walk.end:
                    break
                walk.check()
                pending_walks.popleft()
        for walk in pending_walks:
            walk.check()


def _read_bloom_sizes(header_bytes: bytes) -> tuple[int, int]:
    """Return the number of bytes of the header and of the bits of a Bloom filter.

    The header (BloomFilterHeader) has the number of bits in field 1, numBytes.
    """
    fields, size = thrift.read_structure(header_bytes)
    kind, value = fields.get(1, (0, 0))
    if kind != thrift.I32:
        raise ValueError("a Bloom filter has no size")
    return size, int(value)
