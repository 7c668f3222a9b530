"""Reader and cache of delete files in object storage.

A delete file is either decoded completely or `Unreadable`, with a reason (`index/keys/delete_files.py`). If it is
`Unreadable`, the caller reports that rows may be deleted. If the storage does not answer, nothing is cached, and a
later request reads the file again. A deletion vector is read with a range request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from seamark.cache.memory import MemoryCache
from seamark.cache.single_flight import SingleFlight
from seamark.cache.sizes import measure_object_bytes
from seamark.formats.iceberg.files.budget import Budget
from seamark.formats.iceberg.files.parquet import Unreadable
from seamark.formats.index.keys.delete_files import EQUALITY, Columns, Content, DeleteFile, decode_delete_content
from seamark.formats.index.packing import MISSING
from seamark.formats.runtime.errors import BadRequest, StorageError, TooLarge
from seamark.metaserver.index.blocks.block import Block
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.planner.view.view import TableView

FILE_LIMIT_BYTES = 64 << 20
"""The maximum size of one delete file or deletion vector."""
CACHED_DELETES_BYTES = 128 << 20
"""The maximum memory for the cached content of delete files."""
CONCURRENT_DECODES_MAX = 2
"""The maximum number of delete files that all requests together decode concurrently.

Each decoding may use the memory of `decoded_bytes`.
"""
FILES_CONCURRENT_MAX = 16
"""The maximum number of delete files that one request reads concurrently."""


def list_delete_files_at(view: TableView, rows: Iterable[int]) -> dict[int, DeleteFile]:
    """Return delete files by their delete row, which is the number of a delete file in the view.

    A block decodes the equality columns of all its rows at once, so this is done only once for each block.
    """
    equality_ids: dict[str, list[list[int] | None]] = {}
    delete_files = {}
    for row in rows:
        block, local = view.locate_delete(row)
        content = block.read_long("content", local)
        if content == EQUALITY and block.location not in equality_ids:
            equality_ids[block.location] = block.read_lists("equality_ids")
        columns = equality_ids[block.location][local] if content == EQUALITY else None
        delete_files[row] = DeleteFile(
            path=block.read_text("file_path", local) or "",
            format=(block.read_text("file_format", local) or "").lower(),
            content=content or 0,
            size_bytes=_read_number(block, "file_size_in_bytes", local),
            records=_read_number(block, "record_count", local),
            referenced=block.read_text("referenced_data_file", local),
            offset=_read_number(block, "content_offset", local),
            length=_read_number(block, "content_size_in_bytes", local),
            columns=tuple(sorted(set(columns or ()))),
        )
    return delete_files


def _read_number(block: Block, name: str, row: int) -> int:
    value = block.read_long(name, row)
    return MISSING if value is None else value


class DeleteFiles:
    """Reads and caches delete files.

    An instance belongs to one event loop.
    """

    def __init__(self, objects: ObjectStore, decoded_bytes: int) -> None:
        self._objects = objects
        self._decoded_bytes = decoded_bytes
        self._decode_slots = asyncio.Semaphore(CONCURRENT_DECODES_MAX)
        self._contents: MemoryCache[tuple[object, ...], Content] = MemoryCache(CACHED_DELETES_BYTES, "delete-files")
        self._reads: SingleFlight[tuple[object, ...], Content] = SingleFlight()

    async def read_all(
        self, requests: Iterable[tuple[int, DeleteFile, Columns]], budget: Budget
    ) -> dict[int, Content | Unreadable]:
        """Return the content of each delete file, or the reason why it is unreadable.

        The memory of the results is charged to the budget.

        Args:
            requests: For each delete file: a number, the file, and its key columns if the file is an equality delete.
            budget: The memory that all results of the request may use.

        Returns:
            The content or the reason, by the number in the request.
        """
        limit = asyncio.Semaphore(FILES_CONCURRENT_MAX)

        async def read(file: DeleteFile, columns: Columns) -> Content | Unreadable:
            async with limit:
                try:
                    content = await self._get_content(file, columns)
                    budget.take(measure_object_bytes(content), file.path)
                    return content
                except Unreadable as error:
                    return error

        all_requests = list(requests)
        contents = await asyncio.gather(*(read(file, columns) for _, file, columns in all_requests))
        return {number: content for (number, _, _), content in zip(all_requests, contents, strict=True)}

    async def _get_content(self, file: DeleteFile, columns: Columns) -> Content:
        """Return the content of a delete file from the cache, or read it. Concurrent requests share one read.

        Raises:
            Unreadable: The file is too large, cannot be read, or is invalid.
        """
        key = (file.path, file.offset, columns)
        cached_content = self._contents.get(key)
        if cached_content is not None:
            return cached_content
        if not 0 <= file.read_bytes <= FILE_LIMIT_BYTES:
            size = "an unknown number of" if file.read_bytes < 0 else f"{file.read_bytes:,}"
            raise Unreadable(file.path, f"the file has {size} bytes; the limit is {FILE_LIMIT_BYTES:,} bytes")
        return await self._reads.run(key, lambda: self._fetch_content(key, file, columns))

    async def _fetch_content(self, key: tuple[object, ...], file: DeleteFile, columns: Columns) -> Content:
        """Read and decode a delete file, and cache its content.

        Raises:
            Unreadable: The file cannot be read, or is invalid.
        """
        try:
            if file.is_vector:
                data = await self._objects.read_range(file.path, max(0, file.offset), file.length)
            else:
                data = await self._objects.read(file.path, limit_bytes=FILE_LIMIT_BYTES)
        except (BadRequest, StorageError, TooLarge) as error:
            # The file is missing or outside the warehouse, or access is denied.
            raise Unreadable(file.path, error.message) from None
        async with self._decode_slots:
            content = await asyncio.to_thread(
                decode_delete_content, data, file, columns, limit_bytes=self._decoded_bytes
            )
        self._contents.put(key, content, measure_object_bytes(content))
        return content
