"""Delete files read from object storage once and kept for a while.

The rule it keeps is that of `index/keys/delete_files.py`: a delete file is understood whole or not at all
(`Unreadable`, with a reason for people). Who asks about rows then knows that they may be deleted, and says so. Storage
that does not answer is no such reason: it is asked again later. A deletion vector is read by its bytes alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from cache.memory import MemoryCache
from cache.single_flight import SingleFlight
from metaserver.errors import BadRequest, StorageError, TooLarge
from metaserver.iceberg.files.budget import Budget
from metaserver.iceberg.files.parquet import Unreadable
from metaserver.index.blocks.block import Block
from metaserver.index.blocks.packing import MISSING
from metaserver.index.keys.delete_files import EQUALITY, Columns, Content, DeleteFile, decoded
from metaserver.objects.port import ObjectStore
from metaserver.planner.view.view import TableView

FILE_LIMIT_BYTES = 64 << 20
"""Of one delete file, or deletion vector."""
KEPT_BYTES = 128 << 20
DECODED_AT_ONCE = 2
"""Of all requests: a file may take `decoded_limit_bytes` while it is decoded."""
AT_ONCE = 16
"""Delete files of one request that are being read at a time."""


def delete_files_at(view: TableView, rows: Iterable[int]) -> dict[int, DeleteFile]:
    """By their rows among the view's deletes."""
    compared: dict[str, list[list[int] | None]] = {}
    found = {}
    for row in rows:
        block, local = view.locate_delete(row)
        content = block.long("content", local)
        if content == EQUALITY and block.location not in compared:
            compared[block.location] = block.lists_of("equality_ids")
        columns = compared[block.location][local] if content == EQUALITY else None
        found[row] = DeleteFile(
            path=block.text("file_path", local) or "",
            format=(block.text("file_format", local) or "").lower(),
            content=content or 0,
            size_bytes=_number(block, "file_size_in_bytes", local),
            records=_number(block, "record_count", local),
            referenced=block.text("referenced_data_file", local),
            offset=_number(block, "content_offset", local),
            length=_number(block, "content_size_in_bytes", local),
            columns=tuple(sorted(set(columns or ()))),
        )
    return found


def _number(block: Block, name: str, row: int) -> int:
    found = block.long(name, row)
    return MISSING if found is None else found


class DeleteFiles:
    """Belongs to one event loop."""

    def __init__(self, objects: ObjectStore, decoded_bytes: int) -> None:
        self._objects = objects
        self._decoded_bytes = decoded_bytes
        self._decoding = asyncio.Semaphore(DECODED_AT_ONCE)
        self._kept: MemoryCache[tuple[object, ...], Content] = MemoryCache(KEPT_BYTES)
        self._reading: SingleFlight[tuple[object, ...], Content] = SingleFlight()

    async def read_all(
        self, wanted: Iterable[tuple[int, DeleteFile, Columns]], budget: Budget
    ) -> dict[int, Content | Unreadable]:
        """By the number that comes with each: what it says, or why that is not known. The columns are those of an
        equality delete's keys. What is returned is taken from the budget."""
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(file: DeleteFile, columns: Columns) -> Content | Unreadable:
            async with gate:
                try:
                    content = await self._content(file, columns)
                    budget.take(content.size_bytes, file.path)
                    return content
                except Unreadable as error:
                    return error

        given = list(wanted)
        found = await asyncio.gather(*(one(file, columns) for _, file, columns in given))
        return {number: content for (number, _, _), content in zip(given, found, strict=True)}

    async def _content(self, file: DeleteFile, columns: Columns) -> Content:
        key = (file.path, file.offset, columns)
        kept = self._kept.get(key)
        if kept is not None:
            return kept
        if not 0 <= file.read_bytes <= FILE_LIMIT_BYTES:
            size = "an unknown number of" if file.read_bytes < 0 else f"{file.read_bytes:,}"
            raise Unreadable(file.path, f"it has {size} bytes; at most {FILE_LIMIT_BYTES:,} are read")
        return await self._reading.run(key, lambda: self._fetch(key, file, columns))

    async def _fetch(self, key: tuple[object, ...], file: DeleteFile, columns: Columns) -> Content:
        try:
            if file.is_vector:
                data = await self._objects.read_range(file.path, max(0, file.offset), file.length)
            else:
                data = await self._objects.read(file.path, limit_bytes=FILE_LIMIT_BYTES)
        except (BadRequest, StorageError, TooLarge) as error:  # outside of the warehouse, gone, not allowed
            raise Unreadable(file.path, error.message) from None
        async with self._decoding:
            content = await asyncio.to_thread(decoded, data, file, columns, limit_bytes=self._decoded_bytes)
        self._kept.put(key, content, content.size_bytes)
        return content
