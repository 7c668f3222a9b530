"""Finds stored rows by key in one snapshot of a table, for flushes and fresh files.

As for upserts, the connector's code locates the rows. It runs in a thread, and calls `StoredRows`, which runs the
planner and the look-ups in record indexes on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.index.definitions import read_definitions
from seamark.formats.protocol.wire import encode_json
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import TooLarge
from seamark.metaserver.index.files.indexes import Indexes
from seamark.metaserver.index.files.usage import Usage
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.planner.answer.answer import ScanTaskWriter, TaskForm
from seamark.metaserver.planner.indexes.resolver import IndexResolver
from seamark.metaserver.planner.lookup.lookup import find_files_at
from seamark.metaserver.planner.plan.planner import Planner
from seamark.metaserver.planner.rows.lookup_keys import build_keys, extract_term_arrays
from seamark.metaserver.planner.rows.record_lookup import Locator
from seamark.metaserver.planner.rows.row_deletes import RowDeletes
from seamark.metaserver.planner.scan.request import PinnedRequest, ScanRequest
from seamark.metaserver.planner.view.view import TableView
from seamark.metaserver.store.model import Entry

T = TypeVar("T")


class FoundRows(NamedTuple):
    """The rows that a record index has for some keys.

    Attributes:
        rows: A table with the columns `key` (index of the key), `file_path`, `position`, and `undecided`, which is true
            for a row that may be deleted.
        uncovered: The paths of live files that the index does not cover. They may contain more rows.
        undecided: The number of undecided rows.
    """

    rows: pa.Table
    uncovered: tuple[str, ...]
    undecided: int

    @property
    def uncovered_files(self) -> int:
        return len(self.uncovered)


class RowSearch:
    """Opens `StoredRows` of tables. An instance belongs to one event loop."""

    def __init__(
        self, planner: Planner, objects: ObjectStore, indexes: Indexes, usage: Usage, clock: Clock, decoded_bytes: int
    ) -> None:
        self.planner = planner
        self.objects = objects
        self.locator = Locator(IndexResolver(indexes), RowDeletes(objects, decoded_bytes), usage, clock)

    def open(self, entry: Entry, metadata: TableMetadata) -> StoredRows:
        """Return access to the rows of the current snapshot. The method must be called on the event loop."""
        return StoredRows(self, entry, metadata, asyncio.get_running_loop())


class StoredRows:
    """Access to the stored rows of the current snapshot of a table.

    The methods block, so they must not be called on the event loop.
    """

    def __init__(
        self, search: RowSearch, entry: Entry, metadata: TableMetadata, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._search = search
        self._entry = entry
        self._metadata = metadata
        self._loop = loop

    def plan(self, body: Mapping[str, Any], files_max: int | None = None) -> bytes:
        """Plan a scan with a filter, and return its scan tasks as a page of a plan in JSON.

        The method blocks, so a thread must call it, and not the event loop.

        Args:
            body: The PlanTableScanRequest of the connector. Only its filter is used.
            files_max: The maximum number of data files, or None for no limit.

        Raises:
            TooLarge: The plan has more files.
        """
        request = PinnedRequest(
            snapshot_id=self._metadata.current_snapshot_id,
            schema_id=self._metadata.current_schema_id,
            filter_json=encode_json(body["filter"]) if "filter" in body else b"",
            residuals=False,
        )
        bound = request.bind(self._metadata)
        scan = self._run(self._search.planner.plan(bound, self._entry))
        if files_max is not None and len(scan.entry_ids) > files_max:
            raise TooLarge(f"The rows may be in {len(scan.entry_ids):,} files; the limit is {files_max:,}")
        writer = ScanTaskWriter(scan, form=TaskForm(residuals=False))
        tasks = b"".join(writer.write_tasks(scan.entry_ids))
        deletes = b"".join(writer.write_delete_files())
        return b'{"file-scan-tasks":[' + tasks + b'],"delete-files":[' + deletes + b"]}"

    def lookup(self, keys: pa.Table, index: str) -> FoundRows:
        """Return the rows that a record index has for the keys, and the files that it does not cover."""
        definition = read_definitions(self._metadata).by_name[index]
        arrays, _ = extract_term_arrays(definition.terms, keys)
        columns = build_keys(definition.terms, arrays)
        return self._run(self._look_up(columns, index))

    async def _look_up(self, columns: Any, index: str) -> FoundRows:
        definition = read_definitions(self._metadata).by_name[index]
        request = ScanRequest(snapshot_id=self._metadata.current_snapshot_id)
        scan = await self._search.planner.bind_and_plan(self._metadata, request)
        located_rows = await self._search.locator.locate(scan, definition, columns, None, self._entry)
        data_files = np.unique(located_rows.data_file)
        numbers = np.searchsorted(data_files, located_rows.data_file).astype(np.int32)
        paths = pa.array(_list_paths(scan.view, data_files), pa.string())
        rows = pa.table(
            {
                "key": pa.array(located_rows.query),
                "file_path": pa.DictionaryArray.from_arrays(pa.array(numbers), paths),
                "position": pa.array(located_rows.position),
                "undecided": pa.array(located_rows.undecided),
            }
        )
        undecided_count = int(np.count_nonzero(located_rows.undecided))
        return FoundRows(rows, tuple(_list_paths(scan.view, located_rows.uncovered)), undecided_count)

    def read(self, location: str, start: int = 0, length: int | None = None) -> bytes:
        """Return the content of an object, or `length` bytes of it from `start`."""
        objects = self._search.objects
        return self._run(objects.read(location) if length is None else objects.read_range(location, start, length))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop, and wait for its result. The caller must be another thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _list_paths(view: TableView, positions: Any) -> list[str]:
    """Return the paths of data files in a view, which is the list of a snapshot's files in memory.

    Args:
        view: The view.
        positions: The positions of the files in the view, in ascending order.
    """
    texts = (
        find_files_at(view, view.find_entry_ids(positions)).read_texts("file_path").list_values()
        if len(positions)
        else []
    )
    return [(text or b"").decode("utf-8", "replace") for text in texts]
