"""The keys of tables that others are joined with: which values their columns have in the rows that a filter leaves.

The rules it keeps. Never a key too few: deletes are not applied, a predicate that cannot be told is true. What is kept
is kept by immutable things: a column by its data file, so that a commit costs its new files alone, keys by the
snapshot's manifest list and the filter. All has a bound: rows, bytes and time of one table, bytes of all; past it there
are no keys (`DimensionSkipped`), and a plan goes without. Work that comes too late serves the next plan.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

from cache.memory import MemoryCache
from metaserver.clock import Clock
from metaserver.errors import SeamarkError
from metaserver.gathering import gathered
from metaserver.iceberg.files.parquet import Unreadable
from metaserver.iceberg.metadata.metadata import TableMetadata
from metaserver.iceberg.types.schema import Schema
from metaserver.index.keys.key_set import KeySet
from metaserver.index.keys.keys import Mask
from metaserver.objects.port import ObjectStore
from metaserver.planner.joins.dimension_columns import (
    Columns,
    DimensionColumn,
    FileColumn,
    distinct_keys,
    rows_where,
    wanted_of,
)
from metaserver.planner.lookup.lookup import files_at
from metaserver.planner.plan.planner import Planner
from metaserver.planner.rows.data_columns import DataRows
from metaserver.planner.scan.request import BoundScan
from metaserver.planner.scan.scan import Scan
from metaserver.settings import Settings
from metaserver.store.port import Entry

T = TypeVar("T")

_READ_AT_ONCE = 4
"""Data files of one table."""
_FOUND_AT_ONCE = 2
"""Tables whose columns are being read and compared at a time; others wait, so that the memory for it is bounded."""
_KEYS_SHARE = 4
"""This part of the memory may be of finished key sets."""


class DimensionSkipped(Exception):
    """There are no keys: `reason`, for people."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Limits(NamedTuple):
    rows: int
    """Of one table, after its plan."""
    read_bytes: int
    """Fetched of one table's files for one request."""
    memory_bytes: int
    decoded_bytes: int
    """What decoded columns of one table's files may take in memory."""


def limits_of(settings: Settings) -> Limits:
    return Limits(
        settings.join_rows_limit, settings.join_read_bytes, settings.join_memory_bytes, settings.decoded_limit_bytes
    )


class _File(NamedTuple):
    path: str
    size: int
    records: int
    format: str
    identity: frozenset[int]
    """Columns whose value the file's partition tells, and which the file may lack for that."""


@dataclass(frozen=True)
class DimensionRequest:
    """The values of these columns in the rows that the question leaves, as keys of the type beside each."""

    bound_scan: BoundScan
    entry: Entry
    columns: tuple[tuple[DimensionColumn, str], ...]

    @property
    def key(self) -> Hashable:
        snapshot = self.bound_scan.snapshot
        at = None if snapshot is None else (snapshot.snapshot_id, snapshot.manifest_list)
        read = (*(one for one, _ in self.columns), *wanted_of(self.bound_scan.bound, self.bound_scan.dynamic_filters))
        defaults = tuple(_default(self.bound_scan.metadata, one) for one in read)
        return self.entry.uuid, at, self.bound_scan.schema.id, self.bound_scan.text, self.columns, defaults


class Dimensions:
    """Belongs to one event loop."""

    def __init__(self, planner: Planner, objects: ObjectStore, clock: Clock, limits: Limits) -> None:
        self._planner = planner
        self._objects = objects
        self._clock = clock
        self._limits = limits
        keys_bytes = limits.memory_bytes // _KEYS_SHARE
        self._columns: MemoryCache[tuple[str, DimensionColumn, str], FileColumn] = MemoryCache(
            limits.memory_bytes - keys_bytes
        )
        self._keys: MemoryCache[Hashable, tuple[KeySet, ...]] = MemoryCache(keys_bytes)
        self._under_way: dict[Hashable, asyncio.Task[tuple[KeySet, ...]]] = {}
        self._gate = asyncio.Semaphore(_FOUND_AT_ONCE)
        self.files_read = 0
        """Data files, since the start."""

    async def keys(self, asked: DimensionRequest, until_s: float) -> tuple[KeySet, ...]:
        """The keys of each column, not null. LeftOut where there are none; until then, in monotonic time, they are
        waited for."""
        key = asked.key
        kept = self._keys.get(key)
        if kept is not None:
            return kept
        task = self._under_way.get(key)
        if task is None:
            task = self._under_way[key] = asyncio.create_task(self._find(asked, key), name="dimension")
            task.add_done_callback(partial(self._done, key))
        await asyncio.wait([task], timeout=max(0.0, until_s - self._clock.monotonic()))
        if not task.done():
            raise DimensionSkipped("it is still being read; ask again")
        try:
            return task.result()
        except SeamarkError as error:
            raise DimensionSkipped(error.message) from None

    async def close(self) -> None:
        for task in self._under_way.values():
            task.cancel()
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)

    def _done(self, key: Hashable, task: asyncio.Task[tuple[KeySet, ...]]) -> None:
        del self._under_way[key]
        if not task.cancelled():
            task.exception()  # whoever waited was told

    async def _find(self, asked: DimensionRequest, key: Hashable) -> tuple[KeySet, ...]:
        scan = await self._planner.plan(asked.bound_scan, asked.entry)
        files = await asyncio.to_thread(_files, scan)
        rows = sum(file.records for file in files)
        if rows > self._limits.rows or any(file.records < 0 for file in files):
            raise DimensionSkipped(f"it has {rows:,} rows; at most {self._limits.rows:,} are read")
        dynamic_filters, bound = asked.bound_scan.dynamic_filters, asked.bound_scan.bound
        columns = [column for column, _ in asked.columns]
        wanted = tuple(dict.fromkeys((*columns, *wanted_of(bound, dynamic_filters))))
        async with self._gate:
            try:
                read = await self._read(scan.metadata, files, wanted)
            except Unreadable as error:
                raise DimensionSkipped(f"a data file cannot be read: {error}") from None

            def find() -> tuple[KeySet, ...]:
                rows = [rows_where(bound, dynamic_filters, one) for one in read]
                return tuple(_keys_of(one, kind, read, rows) for one, kind in asked.columns)

            found = await asyncio.to_thread(find)
        if scan.complete:
            self._keys.put(key, found, sum(one.size_bytes for one in found) + 8 * len(asked.bound_scan.text))
        return found

    async def _read(
        self, metadata: TableMetadata, files: Sequence[_File], wanted: Sequence[DimensionColumn]
    ) -> list[Columns]:
        """The columns of each file."""
        rows = DataRows(self._objects, asyncio.get_running_loop(), self._limits.read_bytes, self._limits.decoded_bytes)
        defaults = {one: _default(metadata, one) for one in wanted}

        async def read(file: _File) -> Columns:
            found = {one: self._columns.get((file.path, one, defaults[one])) for one in wanted}
            missing = [one for one, column in found.items() if column is None]
            if missing:
                fresh = await asyncio.to_thread(_columns, rows, metadata, file, missing)
                self.files_read += 1
                for one, column in fresh.items():
                    key = file.path, one, defaults[one]
                    self._columns.put(key, column, column.size_bytes + len(file.path))
                    found[one] = column
            return {one: column for one, column in found.items() if column is not None}

        return await gathered([partial(read, file) for file in files], _READ_AT_ONCE)


def _files(scan: Scan) -> list[_File]:
    found = files_at(scan.view, scan.rows)
    paths, formats = (found.texts(name).values() for name in ("file_path", "file_format"))
    sizes, records = (found.longs(name).tolist() for name in ("file_size_in_bytes", "record_count"))
    specs = found.by_segment([segment.block.spec_id for segment in found.segments]).tolist()
    identity = {spec: _identity(scan.metadata, spec) for spec in set(specs)}
    return [
        _File((path or b"").decode(), size, count, (kind or b"").decode().lower(), identity[spec])
        for path, size, count, kind, spec in zip(paths, sizes, records, formats, specs, strict=True)
    ]


def _identity(metadata: TableMetadata, spec_id: int) -> frozenset[int]:
    spec = metadata.spec(spec_id)
    fields = () if spec is None else spec.fields
    return frozenset(one.source_id for one in fields if one.transform == "identity" and one.source_id is not None)


def _columns(
    rows: DataRows, metadata: TableMetadata, file: _File, wanted: Sequence[DimensionColumn]
) -> dict[DimensionColumn, FileColumn]:
    if file.format != "parquet":
        raise Unreadable(file.path, f"it is of the format {file.format or 'unknown'}")
    schemas = _newest_first(metadata)
    found = {}
    with rows.read_all(file.path, file.size, file.records, [one.column_id for one in wanted]) as arrays:
        for one in wanted:
            array = arrays.get(one.column_id)
            try:
                if array is not None:
                    found[one] = FileColumn.of(array, one.kind)
                elif one.column_id in file.identity:
                    raise Unreadable(file.path, "it lacks a column of its partition")
                else:
                    found[one] = FileColumn.absent(schemas, one, file.records, file.path)
            except ValueError as error:
                raise Unreadable(file.path, str(error)) from None
    for column in found.values():  # until the keys of all files are found
        rows.decoded.take(column.size_bytes, file.path)
    return found


def _newest_first(metadata: TableMetadata) -> list[Schema]:
    """The current one before all."""
    return sorted(metadata.schemas, key=lambda one: (one.id == metadata.current_schema_id, one.id), reverse=True)


def _default(metadata: TableMetadata, wanted: DimensionColumn) -> str:
    """What the column is in a file that lacks it. Tables that were registered from one metadata file share files and
    ids of columns, and may give a new one different defaults."""
    columns = (schema.column(wanted.column_id) for schema in _newest_first(metadata))
    return repr(next((column.initial_default for column in columns if column is not None), None))


def _keys_of(wanted: DimensionColumn, kind: str, read: Sequence[Columns], rows: Sequence[Mask | None]) -> KeySet:
    parts = [columns[wanted].keys_of_rows(mine) for columns, mine in zip(read, rows, strict=True)]
    try:
        found = KeySet(wanted.kind, distinct_keys(parts, wanted.kind)).of_kind(kind)
    except ValueError as error:
        raise DimensionSkipped(str(error)) from None
    _ = found.digest  # here, beside the event loop
    return found
