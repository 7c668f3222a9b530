"""Mapped files, and memory for a payload that a mapped file can replace at the same address.

A value that was just computed is in private memory, and its file on the disk has the same bytes. The file is then
mapped over the memory. Addresses in it stay valid, and the private pages are freed. After that, only pages of the file
that are read again use memory, and processes share them.

The kernel replaces the mapping in one step: a thread that reads at that moment waits, and then reads the same bytes.

Files are mapped over existing memory, because CPython before 3.13 keeps a descriptor open for each mapping, and there
are thousands of mappings. Arrow's mappings have no descriptor either, but Arrow cannot advise the kernel about them.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Sequence

from seamark.cache.envelope import HEADER_BYTES

_MAP_FIXED = 0x10
"""The flag of mmap on Linux that replaces the memory at the given address. Python's module mmap does not have it."""
_SMALL_PAGES: int | None = getattr(mmap, "MADV_NOHUGEPAGE", None)
_FAILED = ctypes.c_void_p(-1).value
"""The result of mmap after an error."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


class Region:
    """Memory for a payload that a mapped file with the same payload can replace later.

    The payload is a copy of `parts`. It begins after the bytes of a file header, so it has the same position in its
    page as in the file. A value that refers to the memory keeps its addresses when the file replaces the memory.
    """

    __slots__ = ("_pages", "payload", "size_bytes")

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self.size_bytes = HEADER_BYTES + sum(len(part) for part in parts)
        """The size of a file with the same payload."""
        self._pages = mmap.mmap(-1, self.size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        region_view = memoryview(self._pages)
        end = HEADER_BYTES
        for part in parts:
            start, end = end, end + len(part)
            region_view[start:end] = part
        self.payload = region_view[HEADER_BYTES:].toreadonly()
        """The copy of the parts, without the header. The view keeps the memory alive."""

    def map_over(self, descriptor: int) -> None:
        """Replace the memory by a mapped file that has the same payload.

        Raises:
            OSError: The file has another size than the region, or cannot be mapped.
        """
        if (file_bytes := os.fstat(descriptor).st_size) != self.size_bytes:
            raise OSError(f"the file has {file_bytes:,} bytes, but the region has {self.size_bytes:,}")
        _replace_by_file(self._pages, descriptor)


def map_file(descriptor: int) -> memoryview:
    """Return a read-only view of the bytes of a file that is not empty.

    The view keeps the mapping alive, so the caller can close the descriptor.

    Raises:
        OSError: The file cannot be mapped.
    """
    # Python's own mapping of a file would keep a copy of the descriptor open. Anonymous memory has none.
    pages = mmap.mmap(-1, os.fstat(descriptor).st_size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _replace_by_file(pages, descriptor)
    return memoryview(pages).toreadonly()


def _replace_by_file(pages: mmap.mmap, descriptor: int) -> None:
    """Replace the memory of `pages` by a read-only mapping of the file, at the same address.

    Raises:
        OSError: The file cannot be mapped.
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    flags = mmap.MAP_SHARED | _MAP_FIXED
    # After a failure, the old pages may be gone. The kernel checks for most errors before it replaces them.
    if _libc.mmap(address, len(pages), mmap.PROT_READ, flags, descriptor, 0) == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if _SMALL_PAGES is not None:
        # Without this advice, a read of one page can map 2 MiB of the file, of which a column is a small part.
        with contextlib.suppress(OSError):  # The kernel has no huge pages.
            pages.madvise(_SMALL_PAGES)
