"""Key sets of dimension tables: the values that their columns have in the rows that match a filter.

A key set is always complete, but may have more keys than necessary: deletes are not applied, and a predicate that
cannot be evaluated counts as true. The cache keys are immutable objects. The cache key of a column is its data file, so
only new data files are read after a commit. The cache key of a key set is the manifest list and the filter. The rows,
the bytes and the time for one table are limited. The bytes for all tables together are also limited. If a limit is
exceeded, there are no keys (`DimensionSkipped`), and the plan does not use the join. If the work finishes too late for
a plan, the next plan uses the result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from seamark.cache.memory import MemoryCache
from seamark.formats.iceberg.expressions.expression import Expression
from seamark.formats.iceberg.files.parquet import Unreadable
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.name_mapping import NameMapping, read_name_mapping, select_columns
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.index.keys.key_set import KeySet
from seamark.formats.index.keys.keys import Mask, has_codes
from seamark.formats.index.packing import Longs
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import SeamarkError
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.planner.joins.dimension_columns import (
    Columns,
    DimensionColumn,
    FileColumn,
    find_rows_where,
    intersect_masks,
    iterate_filtered_columns,
    union_keys,
)
from seamark.metaserver.planner.joins.like_predicates import AnyLike, list_like_columns, match_rows_by_like
from seamark.metaserver.planner.joins.ranges import (
    RankedColumn,
    compute_spans,
    convert_spans_to_key_sets,
    find_ranked_spans,
    merge_spans,
)
from seamark.metaserver.planner.lookup.lookup import find_files_at
from seamark.metaserver.planner.plan.planner import Planner
from seamark.metaserver.planner.rows.data_columns import DataRows
from seamark.metaserver.planner.scan.request import BoundScan
from seamark.metaserver.planner.scan.scan_plan import ScanPlan
from seamark.metaserver.runtime.gathering import gather
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import Entry

T = TypeVar("T")

_CONCURRENT_FILES_MAX = 4
"""The maximum number of data files of one table that are read concurrently."""
_CONCURRENT_TABLES_MAX = 2
"""The maximum number of tables that are read and evaluated concurrently. Further tables wait, to save memory."""
_KEY_BYTES_PER_CHARACTER = 8
"""The estimated memory of a cache key for each character of its filter."""
_KEYS_DIVISOR = 4
"""Key sets use at most the memory of the dimensions divided by this number."""


class DimensionSkipped(Exception):
    """Raised if the keys of a dimension table cannot be used. `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class DimensionLimits(NamedTuple):
    """The limits for reading the rows of dimension tables."""

    rows_max: int
    """The maximum number of rows of one table that remain after its plan."""
    read_bytes_max: int
    """The maximum number of bytes that one request reads from the files of one table."""
    memory_bytes_max: int
    """The maximum memory of the cached columns and keys of all tables."""
    decoded_bytes_max: int
    """The maximum memory of the decoded columns of one table's files."""


def get_dimension_limits(settings: Settings) -> DimensionLimits:
    return DimensionLimits(
        settings.join_rows_limit, settings.join_read_bytes, settings.join_memory_bytes, settings.decoded_limit_bytes
    )


class ListedFile(NamedTuple):
    """A data file as its manifest lists it."""

    path: str
    size: int
    records: int
    format: str
    identity: frozenset[int]
    """The ids of the columns with identity partitioning. The data file may lack these columns."""


@dataclass(frozen=True)
class DimensionRequest:
    """A request for the keys of the values that columns have in the rows that match a scan.

    Attributes:
        columns: The columns, each with the type of its keys.
        likes: LIKE predicates that the rows must satisfy.
        operators: Comparison operators. If there are any, the request is for spans (`ranges.py`). Each operator
            compares a column of the planned table with one of `columns`. The keys are the starts and the ends of the
            spans.
    """

    bound_scan: BoundScan
    entry: Entry
    columns: tuple[tuple[DimensionColumn, str], ...]
    likes: tuple[AnyLike, ...] = ()
    operators: tuple[str, ...] = ()

    @property
    def read_columns(self) -> tuple[DimensionColumn, ...]:
        """The columns to read from a data file: the columns of the keys, of the filters and of LIKE."""
        return tuple(
            dict.fromkeys(
                (
                    *(column for column, _ in self.columns),
                    *iterate_filtered_columns(self.bound_scan.bound, self.bound_scan.dynamic_filters),
                    *list_like_columns(self.likes),
                )
            )
        )

    @property
    def key(self) -> Hashable:
        """The key under which the key sets of the request are cached.

        It contains everything on which the result depends: the snapshot, the filter, the columns, and the defaults
        and names of columns that files may lack.
        """
        snapshot = self.bound_scan.snapshot
        snapshot_key = None if snapshot is None else (snapshot.snapshot_id, snapshot.manifest_list)
        metadata = self.bound_scan.metadata
        mapping = read_name_mapping(metadata.properties)
        sources = tuple(_find_default_and_names(metadata, mapping, column) for column in self.read_columns)
        scan = (self.entry.uuid, snapshot_key, self.bound_scan.schema.id, self.bound_scan.text)
        return *scan, self.columns, self.likes, sources, self.operators


class Dimensions:
    """Reads and caches the key sets of dimension tables.

    An instance belongs to one event loop.
    """

    def __init__(self, planner: Planner, objects: ObjectStore, clock: Clock, limits: DimensionLimits) -> None:
        self._planner = planner
        self._objects = objects
        self._clock = clock
        self._limits = limits
        keys_bytes = limits.memory_bytes_max // _KEYS_DIVISOR
        self._columns: MemoryCache[tuple[str, DimensionColumn, Hashable], FileColumn] = MemoryCache(
            limits.memory_bytes_max - keys_bytes, "join-columns"
        )
        self._keys: MemoryCache[Hashable, tuple[KeySet, ...]] = MemoryCache(keys_bytes, "join-keys")
        self._tasks: dict[Hashable, asyncio.Task[tuple[KeySet, ...]]] = {}
        self._concurrency = asyncio.Semaphore(_CONCURRENT_TABLES_MAX)

    async def find_keys(self, request: DimensionRequest, until_s: float) -> tuple[KeySet, ...]:
        """Return the keys of each column. Null is not among the keys.

        If the request has operators, the result has the starts and the ends of spans instead. The method waits at most
        until `until_s`, in monotonic seconds. After that, the keys are still computed for later requests.

        Raises:
            DimensionSkipped: The keys cannot be determined, or are not ready in time.
        """
        key = request.key
        cached_keys = self._keys.get(key)
        if cached_keys is not None:
            return cached_keys
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(self._compute_key_sets(request, key), name="dimension")
            task.add_done_callback(partial(self._forget_task, key))
        await asyncio.wait([task], timeout=max(0.0, until_s - self._clock.monotonic()))
        if not task.done():
            raise DimensionSkipped("the table is still being read; retry the request")
        try:
            return task.result()
        except SeamarkError as error:
            raise DimensionSkipped(error.message) from None

    async def derive_condition(
        self, bound_scan: BoundScan, entry: Entry, read_value: Callable[[ScanPlan], Expression], until_s: float
    ) -> Expression:
        """Plan the scan, and return the condition that `read_value` derives from the plan in a thread.

        The method waits at most until `until_s`, in monotonic seconds.

        Raises:
            DimensionSkipped: No condition can be derived, or it is not ready in time.
        """

        async def plan() -> Expression:
            scan = await self._planner.plan(bound_scan, entry)
            return await asyncio.to_thread(read_value, scan)

        try:
            return await asyncio.wait_for(plan(), max(0.0, until_s - self._clock.monotonic()))
        except TimeoutError:
            raise DimensionSkipped("the table is still being read; retry the request") from None
        except ValueError as error:
            raise DimensionSkipped(str(error)) from None
        except SeamarkError as error:
            raise DimensionSkipped(error.message) from None

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _forget_task(self, key: Hashable, task: asyncio.Task[tuple[KeySet, ...]]) -> None:
        del self._tasks[key]
        if not task.cancelled():
            # Retrieve the error, so that asyncio logs no warning. The waiting request reports the error.
            task.exception()

    async def _compute_key_sets(self, request: DimensionRequest, key: Hashable) -> tuple[KeySet, ...]:
        """Read the columns of the request, and return the keys of the rows that may match.

        Raises:
            DimensionSkipped: A limit is exceeded, the number of rows of a file is unknown, or a data file cannot be
                read.
        """
        scan = await self._planner.plan(request.bound_scan, request.entry)
        files = await asyncio.to_thread(list_files_at, scan, scan.entry_ids)
        rows = sum(file.records for file in files)
        if any(file.records < 0 for file in files):
            raise DimensionSkipped("the number of rows of a data file is unknown")
        if rows > self._limits.rows_max:
            raise DimensionSkipped(f"the table has {rows:,} rows; the limit is {self._limits.rows_max:,} rows")
        dynamic_filters, bound = request.bound_scan.dynamic_filters, request.bound_scan.bound
        async with self._concurrency:
            try:
                file_columns = await self._read_columns(scan.metadata, files, request.read_columns)
            except Unreadable as error:
                raise DimensionSkipped(f"a data file cannot be read: {error}") from None

            def compute() -> tuple[KeySet, ...]:
                masks = [
                    intersect_masks(
                        find_rows_where(bound, dynamic_filters, columns), match_rows_by_like(request.likes, columns)
                    )
                    for columns in file_columns
                ]
                if request.operators:  # Comparisons by < and > need only the ranges of values, not all keys.
                    return _collect_spans(request, file_columns, masks)
                return tuple(_collect_keys(column, kind, file_columns, masks) for column, kind in request.columns)

            key_sets = await asyncio.to_thread(compute)
        if scan.complete:
            # The cache key contains the text of the filter, and the predicates that were parsed from it.
            key_bytes = _KEY_BYTES_PER_CHARACTER * len(request.bound_scan.text)
            self._keys.put(key, key_sets, sum(key_set.size_bytes for key_set in key_sets) + key_bytes)
        return key_sets

    async def _read_columns(
        self, metadata: TableMetadata, files: Sequence[ListedFile], needed_columns: Sequence[DimensionColumn]
    ) -> list[Columns]:
        """Return the columns of each data file, from the cache if possible.

        Raises:
            Unreadable: A data file cannot be read within the limits.
        """
        mapping = read_name_mapping(metadata.properties)
        loop = asyncio.get_running_loop()
        rows = DataRows(self._objects, loop, mapping, self._limits.read_bytes_max, self._limits.decoded_bytes_max)
        sources = {column: _find_default_and_names(metadata, mapping, column) for column in needed_columns}

        async def read(file: ListedFile) -> Columns:
            columns = {ref: self._columns.get((file.path, ref, sources[ref])) for ref in needed_columns}
            uncached_refs = [ref for ref, column in columns.items() if column is None]
            if uncached_refs:
                new_columns = await asyncio.to_thread(read_file_columns, rows, metadata, file, uncached_refs)
                for ref, column in new_columns.items():
                    key = file.path, ref, sources[ref]
                    self._columns.put(key, column, column.size_bytes + len(file.path))
                    columns[ref] = column
            return {ref: column for ref, column in columns.items() if column is not None}

        return await gather([partial(read, file) for file in files], _CONCURRENT_FILES_MAX)


def list_files_at(scan: ScanPlan, entry_ids: Longs) -> list[ListedFile]:
    """Return the data files with these entry ids in the view of a scan, in the order of `entry_ids`."""
    columns = find_files_at(scan.view, entry_ids)
    paths, formats = (columns.read_texts(name).list_values() for name in ("file_path", "file_format"))
    sizes, records = (columns.read_longs(name).tolist() for name in ("file_size_in_bytes", "record_count"))
    specs = columns.repeat_by_segment([segment.block.spec_id for segment in columns.segments]).tolist()
    identity = {spec: _find_identity_columns(scan.metadata, spec) for spec in set(specs)}
    return [
        ListedFile((path or b"").decode(), size, record_count, (format_ or b"").decode().lower(), identity[spec])
        for path, size, record_count, format_, spec in zip(paths, sizes, records, formats, specs, strict=True)
    ]


def _find_identity_columns(metadata: TableMetadata, spec_id: int) -> frozenset[int]:
    """Return the source columns of the identity fields of a partition spec."""
    spec = metadata.spec(spec_id)
    fields = () if spec is None else spec.fields
    return frozenset(
        field.source_id for field in fields if field.transform == "identity" and field.source_id is not None
    )


def read_file_columns(
    rows: DataRows, metadata: TableMetadata, file: ListedFile, needed_columns: Sequence[DimensionColumn]
) -> dict[DimensionColumn, FileColumn]:
    """Read columns of a data file. The function is called in a thread.

    Raises:
        Unreadable: The file cannot be read within the budget of `rows`.
    """
    if file.format != "parquet":
        raise Unreadable(file.path, f"the format is {file.format or 'unknown'}; only parquet is supported")
    schemas = _sort_newest_first(metadata)
    columns = {}
    with rows.read_all(file.path, file.size, file.records, [ref.column_id for ref in needed_columns]) as arrays:
        for ref in needed_columns:
            array = arrays.get(ref.column_id)
            try:
                if array is not None:
                    columns[ref] = FileColumn.from_array(array, ref.kind)
                elif ref.column_id in file.identity:
                    raise Unreadable(
                        file.path,
                        "the file lacks a column with identity partitioning, whose value is in the partition alone",
                    )
                else:
                    columns[ref] = FileColumn.make_absent(schemas, ref, file.records, file.path)
            except ValueError as error:
                raise Unreadable(file.path, str(error)) from None
    # The columns count towards the budget until the keys of all files are computed.
    for column in columns.values():
        rows.decoded.take(column.size_bytes, file.path)
    return columns


def _sort_newest_first(metadata: TableMetadata) -> list[Schema]:
    """Return all schemas: first the current schema, then the others by descending id.

    The current schema may have a smaller id than others, if the table has returned to an earlier schema.
    """
    return sorted(
        metadata.schemas, key=lambda schema: (schema.id == metadata.current_schema_id, schema.id), reverse=True
    )


def _find_default_and_names(
    metadata: TableMetadata, mapping: NameMapping | None, column_ref: DimensionColumn
) -> tuple[str, Hashable]:
    """Return the column's value in files that lack it, and its names in files without field ids.

    Both are part of the keys of cached columns. Tables that are registered from the same metadata file share files and
    column ids, but may define different defaults for a new column, and a name mapping can change.
    """
    columns = (schema.column(column_ref.column_id) for schema in _sort_newest_first(metadata))
    default = repr(next((column.initial_default for column in columns if column is not None), None))
    return default, None if mapping is None else select_columns(mapping, [column_ref.column_id])


def _collect_keys(
    column_ref: DimensionColumn, kind: str, file_columns: Sequence[Columns], rows: Sequence[Mask | None]
) -> KeySet:
    """Return the distinct keys of a column in the selected rows of all files.

    Args:
        column_ref: The column of the dimension table.
        kind: The type of the planned table's column, to which the keys are converted.
        file_columns: The columns of each file.
        rows: The selected rows of each file, or None for all rows.

    Raises:
        DimensionSkipped: The keys cannot be converted to the type `kind`.
    """
    parts = [columns[column_ref].collect_keys(mask) for columns, mask in zip(file_columns, rows, strict=True)]
    try:
        key_set = KeySet(column_ref.kind, union_keys(parts, column_ref.kind)).convert_to_kind(kind)
    except ValueError as error:
        raise DimensionSkipped(str(error)) from None
    # Compute the digest here, because this runs off the event loop.
    _ = key_set.digest
    return key_set


def _collect_spans(
    request: DimensionRequest, columns_by_file: Sequence[Columns], rows: Sequence[Mask | None]
) -> tuple[KeySet, KeySet]:
    """Return the spans of values that the planned table's column may have, as their starts and their ends.

    Each selected row allows a span, as in `t.day BETWEEN d.first AND d.last`.

    Args:
        request: The request, with the compared columns and the operators.
        columns_by_file: The columns of each file of the dimension table.
        rows: The selected rows of each file, or None for all rows.

    Raises:
        DimensionSkipped: The values cannot be converted to the type of the planned table's column.
    """
    kind = request.columns[0][1]
    try:
        return (_collect_code_spans if has_codes(kind) else _collect_ranked_spans)(request, columns_by_file, rows, kind)
    except ValueError as error:
        raise DimensionSkipped(str(error)) from None


def _collect_code_spans(
    request: DimensionRequest, columns_by_file: Sequence[Columns], rows: Sequence[Mask | None], kind: str
) -> tuple[KeySet, KeySet]:
    """Return the ranges of values that match a row, for a type whose keys are codes, which are integers.

    The ranges of each file are computed alone and then merged.

    Returns:
        The starts of the ranges, and their ends.
    """
    starts, ends = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for columns, mask in zip(columns_by_file, rows, strict=True):
        compared_columns = []
        for ref, _ in request.columns:
            codes, is_present = columns[ref].codes
            compared_columns.append((codes, is_present if mask is None else is_present & mask, ref.kind))
        file_starts, file_ends = compute_spans(compared_columns, request.operators, kind)
        starts.append(file_starts)
        ends.append(file_ends)
    return convert_spans_to_key_sets(*merge_spans(np.concatenate(starts), np.concatenate(ends)), kind)


def _collect_ranked_spans(
    request: DimensionRequest, columns_by_file: Sequence[Columns], rows: Sequence[Mask | None], kind: str
) -> tuple[KeySet, KeySet]:
    """Return the ranges of values that match a row, for a type whose keys are bytes.

    Such keys are compared by their ranks among the keys of all files.

    Returns:
        The starts of the ranges, and their ends.
    """
    files = []
    for columns, mask in zip(columns_by_file, rows, strict=True):
        ranked_columns = [RankedColumn(*columns[ref].ranked) for ref, _ in request.columns]
        if mask is not None:
            ranked_columns = [column._replace(present=column.present & mask) for column in ranked_columns]
        files.append(ranked_columns)
    return find_ranked_spans(files, request.operators, kind)
