"""Reader of the descriptions of index files, which are the footer and the files table, with range reads.

The number of reads does not depend on the size of the index file. Coverage and registration use the description.
Plans open whole index files (`indexes.py`). The ids of the data files are cached, 16 bytes each, because every listing
and every page of a build needs them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from seamark.cache.memory import MemoryCache
from seamark.cache.sizes import measure_object_bytes
from seamark.formats.iceberg.files.puffin import FOOTER_LIMIT_BYTES, TAIL_BYTES, read_footer_size
from seamark.formats.index.index_file import IndexHeader, read_files, read_header
from seamark.formats.runtime.errors import Corrupt
from seamark.metaserver.objects.port import ObjectStore

_BUDGET_BYTES = 64 << 20
"""The memory of the cache."""
_TAIL_BYTES = 32 << 10
"""The size of the first read from the end of the file. Most footers are smaller."""
_FILES_LIMIT_BYTES = 1 << 30
"""The maximum size of a files table."""


class IndexFileSummary(NamedTuple):
    """The header of an index file, and the ids of its data files."""

    header: IndexHeader
    ids: npt.NDArray[np.uint64]
    """uint64[n, 2]: the ids of the data files (`hashing.compute_file_ids`)."""


class IndexReader:
    """Reads and caches the descriptions of index files.

    An instance belongs to one event loop.
    """

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._cache: MemoryCache[str, IndexFileSummary] = MemoryCache(_BUDGET_BYTES, "index-headers")

    async def describe(self, location: str, size_bytes: int) -> IndexFileSummary:
        """Return the header of an index file and the ids of its data files.

        Raises:
            Corrupt: The object is not a valid index file of this size.
            ObjectMissing: The file does not exist.
            UnknownVersion: This program cannot read the format version of the file.
            RetryLater: The storage does not answer.
        """
        cached_summary = self._cache.get(location)
        if cached_summary is not None and cached_summary.header.size_bytes == size_bytes:
            return cached_summary
        header = await self._read_header(location, size_bytes)
        if header.files_length > _FILES_LIMIT_BYTES:
            raise Corrupt(
                f"{location}: the files table has {header.files_length:,} bytes; "
                f"the limit is {_FILES_LIMIT_BYTES:,} bytes"
            )
        table = read_files(await self._objects.read_range(location, header.files_offset, header.files_length), header)
        summary = IndexFileSummary(header, table.ids.copy())
        self._cache.put(location, summary, measure_object_bytes(summary))
        return summary

    async def _read_header(self, location: str, size_bytes: int) -> IndexHeader:
        """Return the header of an index file, with a second request if its footer is long."""
        tail = await self._read_tail(location, size_bytes, _TAIL_BYTES)
        needed_bytes = read_footer_size(tail, location)
        if len(tail) < needed_bytes <= min(size_bytes, FOOTER_LIMIT_BYTES):
            tail = await self._read_tail(location, size_bytes, needed_bytes)
        return read_header(tail, size_bytes, location)

    async def _read_tail(self, location: str, size_bytes: int, length: int) -> bytes:
        """Return at least the last `length` bytes of the file, and at least `TAIL_BYTES` unless the file is shorter.

        The method requests one byte more, to detect a file that is longer than `size_bytes`.

        Raises:
            Corrupt: The size of the file is not `size_bytes`.
        """
        start = max(0, size_bytes - max(length, TAIL_BYTES))
        tail = await self._objects.read_range(location, start, size_bytes - start + 1)
        if len(tail) != size_bytes - start:
            raise Corrupt(f"{location}: the size is not {size_bytes} bytes")
        return tail
