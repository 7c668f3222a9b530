"""A plan's tasks as Arrow record batches: the rows of a table, with nothing between them and their files but this.

    for batch in scan(client, "db.events", ["id", "ts"], where="country = 'FR' AND ts >= '2026-01-01'"):
        ...

The rule it keeps: the rows are those that every reader of the table sees, or reading stops with an error that names the
file (`Unreadable`). Columns are found by field id, of today's types (`parquet/projecting.py`); the filter is applied to
each row exactly (`filtering.py`); deletes of all kinds are (`deleted.py`).

What need not be read is not: files that the server's plan leaves out; row groups without a row that bitmap indexes
chose, that deletes left, or that the footer's statistics allow; and of the others first the columns that the filter and
equality deletes look at, and the rest only where a row is left: where few are, the pages that hold them
(`parquet/pages.py`). Held at a time are a batch, and the filter's columns of the rows of one row group that match.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
import pyarrow.parquet as pq
import pyroaring

from seamark.connector.arrow.filters import Mask, check_filter, matching
from seamark.connector.arrow.predicates import exactly
from seamark.connector.client.client import CURRENT, At, Name, SeamarkClient
from seamark.connector.client.errors import BadRequest
from seamark.connector.client.storage import Storage
from seamark.connector.parquet.pages import Pages
from seamark.connector.parquet.projection import Projected, identified, parse_name_mapping
from seamark.connector.parquet.row_groups import RowGroups
from seamark.connector.read.deleted_rows import Deletes
from seamark.connector.read.lineage import LINEAGE, NAMES, Inherited
from seamark.connector.read.tables import OpenTable, ScanTask, open_table, plan, with_rows
from seamark.metaserver.iceberg.expressions.arrow import plain_type
from seamark.metaserver.iceberg.expressions.expression import FALSE, TRUE, Expression, predicates_of
from seamark.metaserver.iceberg.expressions.residuals import Residuals
from seamark.metaserver.iceberg.files.parquet import InDoubt, Unreadable
from seamark.metaserver.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.iceberg.metadata.partition import PartitionSpec
from seamark.metaserver.iceberg.types.schema import Field, Schema, StructType
from seamark.metaserver.iceberg.types.transforms import IDENTITY, canonical, result_type
from seamark.metaserver.iceberg.types.values import Value, decode_json

FILE, POSITION = "_file", "_pos"
"""Metadata columns (Iceberg spec: "Reserved Field IDs"): the data file's path, and the row's position in it. Those of
row lineage are columns like them. A column of the table goes before one of its name."""
BATCH_ROWS = 65_536
_HOLE_BYTES, _HOLE_BYTES_AFAR = 16 << 10, 1 << 20
"""Between pages that are read at once: what takes about as long to read as to ask for another."""
NAME_MAPPING = "schema.name-mapping.default"

_METADATA = {FILE: pa.string(), POSITION: pa.int64(), **dict.fromkeys(NAMES, pa.int64())}
_PATH = tuple[int, tuple[int, ...]]
Longs = npt.NDArray[np.int64]


@dataclass
class ReadCounts:
    """What reading took so far."""

    files: int = 0
    row_groups: int = 0
    row_groups_skipped: int = 0
    """Of the files read: of which nothing was, or no more than what the filter looks at."""
    row_groups_by_pages: int = 0
    """Of which not all pages were read, but for what the filter looks at."""
    rows: int = 0


@dataclass(frozen=True)
class ReadPlan:
    """What is read of every task. Picklable. `where` is bound to `schema`, and `metadata` that of the table.

    `names` are columns of the schema and metadata columns, in the order wanted. `positions`, int64, are one more column
    behind them: whoever needs positions takes these, as a table may have a column of the name `_pos`.
    """

    metadata: TableMetadata
    schema: Schema
    names: tuple[str, ...]
    where: Expression = TRUE
    positions: bool = False

    def __post_init__(self) -> None:
        """BadRequest for a column that there is not, or of a type that is not read; or for a filter like that."""
        known = {one.name for one in self.schema.fields}
        for name in self.names:
            if name not in known and name not in _METADATA:
                raise BadRequest(f"Cannot read {name!r}: the table's columns are {', '.join(sorted(known))}")
        if len(set(self.names)) != len(self.names):
            raise BadRequest(f"A column is named twice: {', '.join(self.names)}")
        try:
            check_filter(self.where)
            _ = self.arrow
        except ValueError as error:
            raise BadRequest(f"Cannot read this: {error}") from None

    @cached_property
    def fields(self) -> list[Field]:
        """Of the columns that are the table's."""
        by_name = {one.name: one for one in self.schema.fields}
        return [by_name[name] for name in self.names if name in by_name]

    @cached_property
    def lineage(self) -> list[Field]:
        """Of the columns of row lineage."""
        known = {one.name for one in self.fields}
        return [one for one in LINEAGE if one.name in self.names and one.name not in known]

    @cached_property
    def arrow(self) -> pa.Schema:
        kinds = _METADATA | {one.name: plain_type(one.type) for one in self.fields}
        fields = [pa.field(name, kinds[name]) for name in self.names]
        return pa.schema([*fields, *([pa.field(POSITION, pa.int64())] if self.positions else [])])


def wanted_of(
    table: OpenTable, columns: Sequence[str] | None, where: Expression, *, positions: bool = False
) -> ReadPlan:
    """All columns by default."""
    names = [one.name for one in table.schema.fields] if columns is None else columns
    return ReadPlan(table.metadata, table.schema, tuple(names), where, positions)


def bound_filter(where: str | Any | None, table: OpenTable) -> Expression:
    """SQL text, or an Iceberg expression in JSON, over the columns of the table's schema; without one all rows.
    BadRequest as of `exactly`."""
    return TRUE if where is None else exactly(where, table.schema)


class TableScan:
    """Rows of a table, read when they are asked for: iterate over batches, take a `reader()`, or all `to_arrow()`."""

    def __init__(
        self,
        storage: Storage,
        wanted: ReadPlan,
        tasks: Callable[[], Iterator[ScanTask]],
        limit: int | None,
        snapshot_id: int | None = None,
    ) -> None:
        self.schema: pa.Schema = wanted.arrow
        self.snapshot_id = snapshot_id
        """That is read; None where the table has none."""
        self.counts = ReadCounts()
        self._storage, self._wanted, self._tasks, self._limit = storage, wanted, tasks, limit

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        reader = TaskReader(self._wanted, self._storage, counts=self.counts)
        return limited(reader.read_all(self._tasks()), self._limit)

    def reader(self) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(self.schema, iter(self))

    def to_arrow(self) -> pa.Table:
        return pa.Table.from_batches(list(self), self.schema)


def scan(
    client: SeamarkClient,
    table: Name,
    columns: Sequence[str] | None = None,
    where: str | Any | None = None,
    *,
    at: At = CURRENT,
    limit: int | None = None,
    bitmaps: bool = True,
) -> TableScan:
    """The rows of a table that a predicate, in SQL or as an Iceberg expression in JSON, is true for; at most `limit`.

    Planned by the server, with all its indexes. Where the table has a bitmap index on a column of the predicate, rows
    are chosen by it, unless `bitmaps` is false. BadRequest for what cannot be read or chosen by exactly.
    """
    opened = open_table(client, table, at)
    bound = bound_filter(where, opened)
    wanted = wanted_of(opened, columns, bound)

    def tasks() -> Iterator[ScanTask]:
        found = plan(client, opened, bound, least_rows=limit)
        return with_rows(client, opened, bound, found) if bitmaps else found

    return TableScan(opened.storage, wanted, tasks, limit, opened.snapshot_id)


def limited(batches: Iterator[pa.RecordBatch], limit: int | None) -> Iterator[pa.RecordBatch]:
    """The first rows; no batch is asked for beyond them."""
    left = limit
    while left is None or left > 0:
        batch = next(batches, None)
        if batch is None:
            return
        yield batch if left is None else batch.slice(0, left)
        left = None if left is None else left - batch.num_rows


class TaskReader:
    """Reads tasks of one table, one after the other; delete files that several share are read once."""

    def __init__(
        self, wanted: ReadPlan, storage: Storage, *, counts: ReadCounts | None = None, threads: bool = True
    ) -> None:
        """`threads`: whether columns are decoded at the same time."""
        self.counts = counts or ReadCounts()
        self._wanted, self._storage, self._threads = wanted, storage, threads
        self._deletes = Deletes(storage, wanted.metadata)
        self._residuals: dict[int, Residuals] = {}
        text = wanted.metadata.properties.get(NAME_MAPPING)
        self._mapping = None if text is None else parse_name_mapping(text)

    def read_all(self, tasks: Iterable[ScanTask]) -> Iterator[pa.RecordBatch]:
        for task in tasks:
            yield from self.read(task)

    def read(self, task: ScanTask, positions: Longs | None = None) -> Iterator[pa.RecordBatch]:
        """Rows of one task, of the schema `wanted.arrow`; of these `positions` alone, int64[] ascending. Unreadable."""
        with _telling(task.path):
            where = self._residual(task)
        chosen = _chosen(task) if positions is None else positions
        if where == FALSE or (chosen is not None and not len(chosen)):
            return
        with _telling(task.path), _opened(task, self._storage) as (file, pages):
            self.counts.files += 1
            rows = _FileRows(self._wanted, task, where, file, pages, self._mapping, self._deletes, self._threads)
            for batch in _gathered(rows.batches(chosen, self.counts)):
                self.counts.rows += batch.num_rows
                yield batch

    def _residual(self, task: ScanTask) -> Expression:
        """What is left of the filter for a file, given its partition. The plan tells it, too, by names that may be
        those of another schema by now."""
        wanted, spec_id = self._wanted, task.spec_id
        if task.exact:
            return TRUE
        if spec_id not in self._residuals:
            self._residuals[spec_id] = Residuals(wanted.where, _spec(wanted.metadata, task))
        return self._residuals[spec_id](_partition_of(wanted, task))


def _chosen(task: ScanTask) -> Longs | None:
    if task.rows is None:
        return None
    return np.asarray(pyroaring.BitMap.deserialize(task.rows).to_array(), dtype=np.uint32).astype(np.int64)


@contextmanager
def _opened(task: ScanTask, storage: Storage) -> Iterator[tuple[pq.ParquetFile, Pages]]:
    kind = str(task.file.get("file-format", "")).lower()
    if kind != "parquet":
        raise Unreadable(task.path, f"data files of format {kind!r} are not read here; Parquet files are")
    if task.file.get("key-metadata"):
        raise Unreadable(task.path, "it is encrypted, and such files are not read here")
    filesystem, path = storage.open(task.path)
    with (
        filesystem.open_input_file(path) as source,
        pq.ParquetFile(source, pre_buffer=True, coerce_int96_timestamp_unit="us") as file,
    ):
        if file.metadata.num_rows != task.records:
            raise Unreadable(task.path, f"it has {file.metadata.num_rows} rows; its manifest says {task.records}")
        near = isinstance(filesystem, pa.fs.LocalFileSystem)
        yield file, Pages(source, file, hole_bytes=_HOLE_BYTES if near else _HOLE_BYTES_AFAR)


@contextmanager
def _telling(path: str) -> Iterator[None]:
    try:
        yield
    except InDoubt as error:
        raise Unreadable(path, str(error)) from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Unreadable(path, f"it cannot be read: {(str(error).splitlines() or [''])[0][:200]}") from error


@dataclass
class _FileRows:
    """The rows of one open file that are wanted."""

    wanted: ReadPlan
    task: ScanTask
    where: Expression
    file: pq.ParquetFile
    pages: Pages
    mapping: Any
    deletes: Deletes
    threads: bool
    _paths: dict[int, _PATH] = field(default_factory=dict)

    def __post_init__(self) -> None:
        task, wanted = self.task, self.wanted
        self._gone = self.deletes.of(task.path, task.deletes)
        self._taken = None if task.removed_by is None else self.deletes.of(task.path, task.removed_by)
        asked = {one.column_id for one in predicates_of(self.where)}
        for gone in (self._gone, self._taken):
            asked |= set() if gone is None else gone.column_ids
        tested: dict[int, Field] = {}
        for column_id in asked:
            root, steps = _place(column_id, wanted.schema, wanted.metadata.schemas)
            tested[root.id] = root
            self._paths[column_id] = (root.id, steps)
        self._inherited = Inherited.of(task.file) if wanted.lineage else None
        outputs = wanted.fields if self._inherited is None else [*wanted.fields, *wanted.lineage]
        fields = identified(list(self.file.schema_arrow), self.mapping)
        every = {one.id: one for one in (*outputs, *tested.values())}
        self._projected = Projected(fields, every.values(), _identities(wanted, task))
        self._tested = list(tested)
        self._both = [one.id for one in outputs if one.id in tested]
        self._rest = [one.id for one in outputs if one.id not in tested]
        self._groups = RowGroups(self.file.metadata, fields, self.where)

    def batches(self, chosen: Longs | None, counts: ReadCounts) -> Iterator[pa.RecordBatch]:
        first = 0
        for number in range(self.file.metadata.num_row_groups):
            rows = self.file.metadata.row_group(number).num_rows
            if self._is_mine(number):
                mask = self._candidates(chosen, first, rows)
                possible = mask is None or bool(mask.any())
                read = False
                if possible and self._groups.may_match(number):
                    for batch in self._group(number, first, rows, mask, counts):
                        read = True
                        yield batch
                counts.row_groups += read
                counts.row_groups_skipped += not read
            first += rows

    def _is_mine(self, number: int) -> bool:
        if self.task.span is None:
            return True
        chunk = self.file.metadata.row_group(number).column(0)
        begins = chunk.data_page_offset
        if chunk.has_dictionary_page:
            begins = min(begins, chunk.dictionary_page_offset)
        return bool(self.task.span[0] <= begins < self.task.span[1])

    def _candidates(self, chosen: Longs | None, first: int, rows: int) -> Mask | None:
        """bool[rows] of those that positions leave; None for all."""
        mask = None
        if chosen is not None:
            start, end = np.searchsorted(chosen, (first, first + rows)).tolist()
            mask = np.zeros(rows, dtype=np.bool_)
            mask[chosen[start:end] - first] = True
        gone = self._gone.by_position(first, rows)
        if gone is not None:
            mask = ~gone if mask is None else mask & ~gone
        if self._taken is not None and not self._taken.keys:
            taken = self._taken.by_position(first, rows)
            taken = np.zeros(rows, dtype=np.bool_) if taken is None else taken
            mask = taken if mask is None else mask & taken
        return mask

    def _group(
        self, number: int, first: int, rows: int, mask: Mask | None, counts: ReadCounts
    ) -> Iterator[pa.RecordBatch]:
        kept: dict[int, list[pa.Array]] = {one: [] for one in self._both}
        if self._tested:
            found = []
            start = 0
            for batch, size in self._read(number, rows, self._tested):
                part = None if mask is None else mask[start : start + size]
                columns = self._projected.columns(batch, self._tested, size)
                held = self._test(columns, first + start, size, part)
                found.append(held)
                for one in self._both:
                    kept[one].append(columns[one].filter(pa.array(held)))
                start += size
            mask = np.concatenate(found) if found else np.zeros(0, dtype=np.bool_)
            if not mask.any():
                return
        start = at = 0
        whole = {one: pa.chunked_array(parts) for one, parts in kept.items()}
        names = self._projected.names(self._rest)
        few = self.pages.read(number, names, np.flatnonzero(mask)) if mask is not None and names else None
        if few is not None:
            counts.row_groups_by_pages += 1
            columns = self._projected.columns(few, self._rest, few.num_rows)
            made = self._made(columns | {one: _joined(parts) for one, parts in whole.items()}, first, rows, mask)
            yield from (made.slice(at, BATCH_ROWS) for at in range(0, few.num_rows, BATCH_ROWS))
            return
        for batch, size in self._read(number, rows, self._rest):
            part = None if mask is None else mask[start : start + size]
            count = size if part is None else int(np.count_nonzero(part))
            if count:
                if part is not None and count < size and batch is not None:
                    batch = batch.filter(pa.array(part))
                columns = self._projected.columns(batch, self._rest, count)
                columns |= {one: _joined(parts.slice(at, count)) for one, parts in whole.items()}
                yield self._made(columns, first + start, size, part)
            start, at = start + size, at + count

    def _read(self, number: int, rows: int, column_ids: Sequence[int]) -> Iterator[tuple[pa.RecordBatch | None, int]]:
        """Batches of the columns that are in the file; None, and how many rows, where none of them is."""
        names = self._projected.names(column_ids)
        if not names:
            for start in range(0, rows, BATCH_ROWS):
                yield None, min(BATCH_ROWS, rows - start)
            return
        for batch in self.file.iter_batches(BATCH_ROWS, [number], names, use_threads=self.threads):
            yield batch, batch.num_rows

    def _test(self, columns: Mapping[int, pa.Array], first: int, rows: int, mask: Mask | None) -> Mask:
        values = {column_id: _at(columns[root], steps) for column_id, (root, steps) in self._paths.items()}
        held = matching(self.where, values, rows)
        held = held if mask is None else held & mask
        if self._gone.keys:
            held = held & ~self._gone.by_key(values, rows)
        if self._taken is not None and self._taken.keys:
            taken = self._taken.by_key(values, rows)
            by_position = self._taken.by_position(first, rows)
            held = held & (taken if by_position is None else taken | by_position)
        return held

    def _made(self, columns: Mapping[int, pa.Array], first: int, size: int, mask: Mask | None) -> pa.RecordBatch:
        ids = {one.name: one.id for one in self.wanted.fields}
        lineage = {one.name: one.id for one in self.wanted.lineage}
        count = size if mask is None else int(np.count_nonzero(mask))
        arrays: list[pa.Array] = []
        spots = np.zeros(0, dtype=np.int64)
        asked = self.wanted.positions or POSITION in self.wanted.names
        if asked or self._inherited is not None:  # else nobody looks at positions
            spots = np.arange(first, first + size)
            spots = spots if mask is None else spots[mask]
        for name in self.wanted.names:
            if name in ids:
                arrays.append(columns[ids[name]])
            elif name == FILE:
                arrays.append(pa.repeat(pa.scalar(self.task.path), count))
            elif name == POSITION:
                arrays.append(pa.array(spots))
            elif self._inherited is None:
                arrays.append(pa.nulls(count, pa.int64()))
            else:
                arrays.append(self._inherited.filled(lineage[name], columns[lineage[name]], spots))
        if self.wanted.positions:
            arrays.append(pa.array(spots))
        return _batch(arrays, self.wanted.arrow, count)


def _batch(arrays: list[pa.Array], schema: pa.Schema, rows: int) -> pa.RecordBatch:
    if arrays:
        return pa.RecordBatch.from_arrays(arrays, schema=schema)
    return pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))  # of no columns, yet of rows


def _joined(column: pa.ChunkedArray) -> pa.Array:
    found = column.combine_chunks()
    return found if isinstance(found, pa.Array) else pa.concat_arrays(found.chunks)


def _gathered(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Small ones joined: a filter may leave few rows of each."""
    held: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        if not held and batch.num_rows >= BATCH_ROWS // 2:
            yield batch
            continue
        held.append(batch)
        rows += batch.num_rows
        if rows >= BATCH_ROWS // 2:
            yield pa.concat_batches(held)
            held, rows = [], 0
    if held:
        yield pa.concat_batches(held)


def _place(column_id: int, schema: Schema, schemas: Iterable[Schema]) -> tuple[Field, tuple[int, ...]]:
    """The column at the root of a schema that a column is in, and the places of the fields from there to it."""
    for one in (schema, *sorted(schemas, key=lambda one: one.id, reverse=True)):
        path = []
        at: int | None = column_id
        while at is not None and (column := one.column(at)) is not None:
            path.append(column.id)
            at = column.parent
        if not path:
            continue
        root = next(each for each in one.fields if each.id == path[-1])
        steps, kind = [], root.type
        for inner in reversed(path[:-1]):
            if not isinstance(kind, StructType):
                raise ValueError(f"column {column_id} is inside a list or map")
            place = [each.id for each in kind.fields].index(inner)
            steps.append(place)
            kind = kind.fields[place].type
        now = next((each for each in schema.fields if each.id == root.id), None)
        if now is not None and one is not schema:
            raise ValueError(f"column {column_id} was dropped from within {now.name}, and is not read any more")
        return root, tuple(steps)
    raise ValueError(f"no schema of the table has the column {column_id}")


def _at(column: pa.Array, steps: Iterable[int]) -> pa.Array:
    for step in steps:
        column = pc.struct_field(column, [step])  # null where the struct is
    return column


def _spec(metadata: TableMetadata, task: ScanTask) -> PartitionSpec:
    found = metadata.spec(task.spec_id)
    if found is None:
        raise ValueError(f"its partition spec {task.spec_id} is none of the table's")
    return found


def _partition_of(wanted: ReadPlan, task: ScanTask) -> dict[int, Value | None]:
    """The file's partition values by field id, those of columns that the schema has. ValueError for what is none."""
    spec, given = _spec(wanted.metadata, task), task.file.get("partition") or ()
    if len(given) != len(spec.fields):
        raise ValueError(f"the plan tells {len(given)} partition values of {len(spec.fields)}")
    found: dict[int, Value | None] = {}
    for one, json in zip(spec.fields, given, strict=True):
        column = wanted.schema.column(one.sources[0]) if len(one.sources) == 1 else None
        if column is not None and isinstance(column.type, str) and one.field_id is not None:
            found[one.field_id] = decode_json(result_type(canonical(one.transform), column.type), json)
    return found


def _identities(wanted: ReadPlan, task: ScanTask) -> dict[int, Value | None]:
    """The values that the partition has by identity, by column id."""
    values = _partition_of(wanted, task)
    fields = [one for one in _spec(wanted.metadata, task).fields if one.field_id in values]
    return {one.sources[0]: values[one.field_id or 0] for one in fields if canonical(one.transform) == IDENTITY}
