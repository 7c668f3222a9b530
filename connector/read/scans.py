"""Reads the tasks of a plan as Arrow record batches.

    for batch in scan(client, "db.events", ["id", "ts"], where="country = 'FR' AND ts >= '2026-01-01'"):
        ...

The rows are those that all readers of the table see; otherwise Unreadable is raised, with the path of the file. Columns
are projected to the schema by field id (`parquet/projection.py`), the filter is evaluated on each row
(`arrow/filters.py`), and deletes of all kinds are applied (`deleted_rows.py`).

Row groups are skipped if bitmap indexes, deletes or the footer's statistics leave no row in them. In other row groups,
the columns of the filter and of equality deletes are read first. The other columns are read only if rows remain; for
few rows, only the pages that contain them are read (`parquet/pages.py`). The memory contains one batch, and the tested
columns of the matching rows of one row group.
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
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import BadRequest
from seamark.connector.client.names import Name
from seamark.connector.client.storage import Storage
from seamark.connector.client.values import CURRENT, At
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
"""Metadata columns (Iceberg spec: "Reserved Field IDs"): the path of the data file, and the position of the row in it.
The columns of row lineage are also metadata columns. A table's column with such a name takes precedence."""
BATCH_ROWS = 65_536
_HOLE_BYTES, _HOLE_BYTES_REMOTE = 16 << 10, 1 << 20
"""Maximum gap between pages that are read in one request, for local and remote files: reading the gap takes about as
long as a further request."""
NAME_MAPPING = "schema.name-mapping.default"

_METADATA = {FILE: pa.string(), POSITION: pa.int64(), **dict.fromkeys(NAMES, pa.int64())}
_ColumnPath = tuple[int, tuple[int, ...]]
Longs = npt.NDArray[np.int64]


@dataclass
class ReadCounts:
    """The work of a scan so far."""

    files: int = 0
    row_groups: int = 0
    row_groups_skipped: int = 0
    """Row groups of read files of which no column, or only columns of the filter and of deletes, were read."""
    row_groups_by_pages: int = 0
    """Row groups of which only some pages were read, except for columns of the filter and of deletes."""
    rows: int = 0


@dataclass(frozen=True)
class ReadPlan:
    """What to read of each task. Picklable. `where` is bound to `schema`; `metadata` is the table's.

    `names`: columns of the schema and metadata columns, in the order of the result. With `positions`, the row positions
    follow as a last column, int64; unlike `_pos`, it cannot be confused with a column of the table.
    """

    metadata: TableMetadata
    schema: Schema
    names: tuple[str, ...]
    where: Expression = TRUE
    positions: bool = False

    def __post_init__(self) -> None:
        """BadRequest for an unknown column, or a column or filter of an unsupported type."""
        known = {field.name for field in self.schema.fields}
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
        """The fields of the table's columns among `names`."""
        by_name = {field.name: field for field in self.schema.fields}
        return [by_name[name] for name in self.names if name in by_name]

    @cached_property
    def lineage(self) -> list[Field]:
        """The fields of the columns of row lineage among `names`."""
        known = {field.name for field in self.fields}
        return [field for field in LINEAGE if field.name in self.names and field.name not in known]

    @cached_property
    def arrow(self) -> pa.Schema:
        kinds = _METADATA | {field.name: plain_type(field.type) for field in self.fields}
        fields = [pa.field(name, kinds[name]) for name in self.names]
        return pa.schema([*fields, *([pa.field(POSITION, pa.int64())] if self.positions else [])])


def wanted_of(
    table: OpenTable, columns: Sequence[str] | None, where: Expression, *, positions: bool = False
) -> ReadPlan:
    """The read plan for these columns; for None, all columns."""
    names = [field.name for field in table.schema.fields] if columns is None else columns
    return ReadPlan(table.metadata, table.schema, tuple(names), where, positions)


def bound_filter(where: str | Any | None, table: OpenTable) -> Expression:
    """Binds a filter, SQL text or Iceberg expression JSON, to the table's schema; TRUE for None. BadRequest as in
    `exactly`."""
    return TRUE if where is None else exactly(where, table.schema)


class TableScan:
    """A lazy scan of a table: iterate over batches, or use `reader()` or `to_arrow()`."""

    def __init__(
        self,
        storage: Storage,
        read_plan: ReadPlan,
        tasks: Callable[[], Iterator[ScanTask]],
        limit: int | None,
        snapshot_id: int | None = None,
    ) -> None:
        self.schema: pa.Schema = read_plan.arrow
        self.snapshot_id = snapshot_id
        """The snapshot that is read; None for a table without snapshots."""
        self.counts = ReadCounts()
        self._storage, self._read_plan, self._tasks, self._limit = storage, read_plan, tasks, limit

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        reader = TaskReader(self._read_plan, self._storage, counts=self.counts)
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
    """The rows for which a predicate, in SQL or as Iceberg expression JSON, is true; at most `limit` rows.

    The server plans the scan with its indexes. If the table has a bitmap index on a column of the predicate, it also
    selects rows, unless `bitmaps` is False. BadRequest for columns that cannot be read and predicates that cannot be
    evaluated exactly.
    """
    opened = open_table(client, table, at)
    bound = bound_filter(where, opened)
    read_plan = wanted_of(opened, columns, bound)

    def tasks() -> Iterator[ScanTask]:
        tasks_of_plan = plan(client, opened, bound, least_rows=limit)
        return with_rows(client, opened, bound, tasks_of_plan) if bitmaps else tasks_of_plan

    return TableScan(opened.storage, read_plan, tasks, limit, opened.snapshot_id)


def limited(batches: Iterator[pa.RecordBatch], limit: int | None) -> Iterator[pa.RecordBatch]:
    """The first `limit` rows; requests no further batch."""
    rows_left = limit
    while rows_left is None or rows_left > 0:
        batch = next(batches, None)
        if batch is None:
            return
        yield batch if rows_left is None else batch.slice(0, rows_left)
        rows_left = None if rows_left is None else rows_left - batch.num_rows


class TaskReader:
    """Reads tasks of one table, one after the other. Delete files that tasks share are cached."""

    def __init__(
        self, read_plan: ReadPlan, storage: Storage, *, counts: ReadCounts | None = None, threads: bool = True
    ) -> None:
        """`threads`: decode columns concurrently."""
        self.counts = counts or ReadCounts()
        self._read_plan, self._storage, self._threads = read_plan, storage, threads
        self._deletes = Deletes(storage, read_plan.metadata)
        self._residuals: dict[int, Residuals] = {}
        text = read_plan.metadata.properties.get(NAME_MAPPING)
        self._mapping = None if text is None else parse_name_mapping(text)

    def read_all(self, tasks: Iterable[ScanTask]) -> Iterator[pa.RecordBatch]:
        for task in tasks:
            yield from self.read(task)

    def read(self, task: ScanTask, positions: Longs | None = None) -> Iterator[pa.RecordBatch]:
        """The rows of one task with the schema `ReadPlan.arrow`, or only those at `positions`: int64[], ascending.
        Unreadable."""
        with _naming_file(task.path):
            where = self._residual(task)
        chosen = _chosen_positions(task) if positions is None else positions
        if where == FALSE or (chosen is not None and not len(chosen)):
            return
        with _naming_file(task.path), _open_file(task, self._storage) as (file, pages):
            self.counts.files += 1
            rows = _FileRows(self._read_plan, task, where, file, pages, self._mapping, self._deletes, self._threads)
            for batch in _coalesced(rows.batches(chosen, self.counts)):
                self.counts.rows += batch.num_rows
                yield batch

    def _residual(self, task: ScanTask) -> Expression:
        """The residual of the filter for the file's partition. The residuals of the plan are not used: they refer to
        columns by names, which may belong to another schema."""
        read_plan, spec_id = self._read_plan, task.spec_id
        if task.exact:
            return TRUE
        if spec_id not in self._residuals:
            self._residuals[spec_id] = Residuals(read_plan.where, _spec(read_plan.metadata, task))
        return self._residuals[spec_id](_partition_of(read_plan, task))


def _chosen_positions(task: ScanTask) -> Longs | None:
    if task.rows is None:
        return None
    return np.asarray(pyroaring.BitMap.deserialize(task.rows).to_array(), dtype=np.uint32).astype(np.int64)


@contextmanager
def _open_file(task: ScanTask, storage: Storage) -> Iterator[tuple[pq.ParquetFile, Pages]]:
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
        yield file, Pages(source, file, hole_bytes=_HOLE_BYTES if near else _HOLE_BYTES_REMOTE)


@contextmanager
def _naming_file(path: str) -> Iterator[None]:
    try:
        yield
    except InDoubt as error:
        raise Unreadable(path, str(error)) from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Unreadable(path, f"it cannot be read: {(str(error).splitlines() or [''])[0][:200]}") from error


@dataclass
class _FileRows:
    """Reads the rows of one open file."""

    read_plan: ReadPlan
    task: ScanTask
    where: Expression
    file: pq.ParquetFile
    pages: Pages
    mapping: Any
    deletes: Deletes
    threads: bool
    _column_paths: dict[int, _ColumnPath] = field(default_factory=dict)

    def __post_init__(self) -> None:
        task, read_plan = self.task, self.read_plan
        self._deleted = self.deletes.of(task.path, task.deletes)
        self._removed = None if task.removed_by is None else self.deletes.of(task.path, task.removed_by)
        tested_columns = {predicate.column_id for predicate in predicates_of(self.where)}
        for row_set in (self._deleted, self._removed):
            tested_columns |= set() if row_set is None else row_set.column_ids
        tested: dict[int, Field] = {}
        for column_id in tested_columns:
            root, steps = _path_to(column_id, read_plan.schema, read_plan.metadata.schemas)
            tested[root.id] = root
            self._column_paths[column_id] = (root.id, steps)
        self._inherited = Inherited.of(task.file) if read_plan.lineage else None
        outputs = read_plan.fields if self._inherited is None else [*read_plan.fields, *read_plan.lineage]
        fields = identified(list(self.file.schema_arrow), self.mapping)
        needed = {field.id: field for field in (*outputs, *tested.values())}
        self._projected = Projected(fields, needed.values(), _identities(read_plan, task))
        self._tested_ids = list(tested)
        self._tested_outputs = [field.id for field in outputs if field.id in tested]
        self._other_outputs = [field.id for field in outputs if field.id not in tested]
        self._groups = RowGroups(self.file.metadata, fields, self.where)

    def batches(self, chosen: Longs | None, counts: ReadCounts) -> Iterator[pa.RecordBatch]:
        first = 0
        for number in range(self.file.metadata.num_row_groups):
            rows = self.file.metadata.row_group(number).num_rows
            if self._is_in_span(number):
                mask = self._candidates(chosen, first, rows)
                possible = mask is None or bool(mask.any())
                read = False
                if possible and self._groups.may_match(number):
                    for batch in self._read_group(number, first, rows, mask, counts):
                        read = True
                        yield batch
                counts.row_groups += read
                counts.row_groups_skipped += not read
            first += rows

    def _is_in_span(self, number: int) -> bool:
        if self.task.span is None:
            return True
        chunk = self.file.metadata.row_group(number).column(0)
        begins = chunk.data_page_offset
        if chunk.has_dictionary_page:
            begins = min(begins, chunk.dictionary_page_offset)
        return bool(self.task.span[0] <= begins < self.task.span[1])

    def _candidates(self, chosen: Longs | None, first: int, rows: int) -> Mask | None:
        """bool[rows]: rows that remain after positional selection and deletes; None: all rows."""
        mask = None
        if chosen is not None:
            start, end = np.searchsorted(chosen, (first, first + rows)).tolist()
            mask = np.zeros(rows, dtype=np.bool_)
            mask[chosen[start:end] - first] = True
        deleted = self._deleted.by_position(first, rows)
        if deleted is not None:
            mask = ~deleted if mask is None else mask & ~deleted
        if self._removed is not None and not self._removed.keys:
            removed = self._removed.by_position(first, rows)
            removed = np.zeros(rows, dtype=np.bool_) if removed is None else removed
            mask = removed if mask is None else mask & removed
        return mask

    def _read_group(
        self, number: int, first: int, rows: int, mask: Mask | None, counts: ReadCounts
    ) -> Iterator[pa.RecordBatch]:
        filtered: dict[int, list[pa.Array]] = {column_id: [] for column_id in self._tested_outputs}
        if self._tested_ids:
            masks = []
            start = 0
            for batch, size in self._read(number, rows, self._tested_ids):
                mask_slice = None if mask is None else mask[start : start + size]
                columns = self._projected.columns(batch, self._tested_ids, size)
                matches = self._matches(columns, first + start, size, mask_slice)
                masks.append(matches)
                for column_id in self._tested_outputs:
                    filtered[column_id].append(columns[column_id].filter(pa.array(matches)))
                start += size
            mask = np.concatenate(masks) if masks else np.zeros(0, dtype=np.bool_)
            if not mask.any():
                return
        start = taken = 0
        tested_values = {column_id: pa.chunked_array(parts) for column_id, parts in filtered.items()}
        names = self._projected.names(self._other_outputs)
        from_pages = self.pages.read(number, names, np.flatnonzero(mask)) if mask is not None and names else None
        if from_pages is not None:
            counts.row_groups_by_pages += 1
            columns = self._projected.columns(from_pages, self._other_outputs, from_pages.num_rows)
            assembled = self._assemble(
                columns | {column_id: _single_array(parts) for column_id, parts in tested_values.items()},
                first,
                rows,
                mask,
            )
            yield from (assembled.slice(taken, BATCH_ROWS) for taken in range(0, from_pages.num_rows, BATCH_ROWS))
            return
        for batch, size in self._read(number, rows, self._other_outputs):
            mask_slice = None if mask is None else mask[start : start + size]
            count = size if mask_slice is None else int(np.count_nonzero(mask_slice))
            if count:
                if mask_slice is not None and count < size and batch is not None:
                    batch = batch.filter(pa.array(mask_slice))
                columns = self._projected.columns(batch, self._other_outputs, count)
                columns |= {
                    column_id: _single_array(parts.slice(taken, count)) for column_id, parts in tested_values.items()
                }
                yield self._assemble(columns, first + start, size, mask_slice)
            start, taken = start + size, taken + count

    def _read(self, number: int, rows: int, column_ids: Sequence[int]) -> Iterator[tuple[pa.RecordBatch | None, int]]:
        """Yields (batch, rows) with those of the columns that the file has; the batch is None if it has none of
        them."""
        names = self._projected.names(column_ids)
        if not names:
            for start in range(0, rows, BATCH_ROWS):
                yield None, min(BATCH_ROWS, rows - start)
            return
        for batch in self.file.iter_batches(BATCH_ROWS, [number], names, use_threads=self.threads):
            yield batch, batch.num_rows

    def _matches(self, columns: Mapping[int, pa.Array], first: int, rows: int, mask: Mask | None) -> Mask:
        values = {
            column_id: _nested_value(columns[root], steps) for column_id, (root, steps) in self._column_paths.items()
        }
        matches = matching(self.where, values, rows)
        matches = matches if mask is None else matches & mask
        if self._deleted.keys:
            matches = matches & ~self._deleted.by_key(values, rows)
        if self._removed is not None and self._removed.keys:
            removed = self._removed.by_key(values, rows)
            by_position = self._removed.by_position(first, rows)
            matches = matches & (removed if by_position is None else removed | by_position)
        return matches

    def _assemble(self, columns: Mapping[int, pa.Array], first: int, size: int, mask: Mask | None) -> pa.RecordBatch:
        ids = {field.name: field.id for field in self.read_plan.fields}
        lineage = {field.name: field.id for field in self.read_plan.lineage}
        count = size if mask is None else int(np.count_nonzero(mask))
        arrays: list[pa.Array] = []
        positions = np.zeros(0, dtype=np.int64)
        needs_positions = self.read_plan.positions or POSITION in self.read_plan.names
        if needs_positions or self._inherited is not None:  # otherwise positions are not used
            positions = np.arange(first, first + size)
            positions = positions if mask is None else positions[mask]
        for name in self.read_plan.names:
            if name in ids:
                arrays.append(columns[ids[name]])
            elif name == FILE:
                arrays.append(pa.repeat(pa.scalar(self.task.path), count))
            elif name == POSITION:
                arrays.append(pa.array(positions))
            elif self._inherited is None:
                arrays.append(pa.nulls(count, pa.int64()))
            else:
                arrays.append(self._inherited.filled(lineage[name], columns[lineage[name]], positions))
        if self.read_plan.positions:
            arrays.append(pa.array(positions))
        return _batch(arrays, self.read_plan.arrow, count)


def _batch(arrays: list[pa.Array], schema: pa.Schema, rows: int) -> pa.RecordBatch:
    if arrays:
        return pa.RecordBatch.from_arrays(arrays, schema=schema)
    return pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))  # rows without columns


def _single_array(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return combined if isinstance(combined, pa.Array) else pa.concat_arrays(combined.chunks)


def _coalesced(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Concatenates small batches, which selective filters leave."""
    pending: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        if not pending and batch.num_rows >= BATCH_ROWS // 2:
            yield batch
            continue
        pending.append(batch)
        rows += batch.num_rows
        if rows >= BATCH_ROWS // 2:
            yield pa.concat_batches(pending)
            pending, rows = [], 0
    if pending:
        yield pa.concat_batches(pending)


def _path_to(column_id: int, schema: Schema, schemas: Iterable[Schema]) -> tuple[Field, tuple[int, ...]]:
    """The top-level column that contains a column, and the positions of the struct fields on the path to it.

    A column that the schema lacks is looked up in the other schemas, the highest id first. ValueError if it is unknown,
    inside a list or map, or dropped from an existing struct."""
    for candidate in (schema, *sorted(schemas, key=lambda candidate: candidate.id, reverse=True)):
        path = []
        parent_id: int | None = column_id
        while parent_id is not None and (column := candidate.column(parent_id)) is not None:
            path.append(column.id)
            parent_id = column.parent
        if not path:
            continue
        root = next(field for field in candidate.fields if field.id == path[-1])
        steps, kind = [], root.type
        for inner in reversed(path[:-1]):
            if not isinstance(kind, StructType):
                raise ValueError(f"column {column_id} is inside a list or map")
            position = [field.id for field in kind.fields].index(inner)
            steps.append(position)
            kind = kind.fields[position].type
        current = next((field for field in schema.fields if field.id == root.id), None)
        if current is not None and candidate is not schema:
            raise ValueError(f"column {column_id} was dropped from within {current.name}, and is not read any more")
        return root, tuple(steps)
    raise ValueError(f"no schema of the table has the column {column_id}")


def _nested_value(column: pa.Array, steps: Iterable[int]) -> pa.Array:
    for step in steps:
        column = pc.struct_field(column, [step])  # null where the struct is null
    return column


def _spec(metadata: TableMetadata, task: ScanTask) -> PartitionSpec:
    spec = metadata.spec(task.spec_id)
    if spec is None:
        raise ValueError(f"its partition spec {task.spec_id} is none of the table's")
    return spec


def _partition_of(read_plan: ReadPlan, task: ScanTask) -> dict[int, Value | None]:
    """The file's partition values by field id, for columns of the schema. ValueError for invalid values."""
    spec, partition = _spec(read_plan.metadata, task), task.file.get("partition") or ()
    if len(partition) != len(spec.fields):
        raise ValueError(f"the plan tells {len(partition)} partition values of {len(spec.fields)}")
    values: dict[int, Value | None] = {}
    for spec_field, json in zip(spec.fields, partition, strict=True):
        column = read_plan.schema.column(spec_field.sources[0]) if len(spec_field.sources) == 1 else None
        if column is not None and isinstance(column.type, str) and spec_field.field_id is not None:
            values[spec_field.field_id] = decode_json(result_type(canonical(spec_field.transform), column.type), json)
    return values


def _identities(read_plan: ReadPlan, task: ScanTask) -> dict[int, Value | None]:
    """The values of identity partition fields, by column id."""
    values = _partition_of(read_plan, task)
    fields = [field for field in _spec(read_plan.metadata, task).fields if field.field_id in values]
    return {field.sources[0]: values[field.field_id or 0] for field in fields if canonical(field.transform) == IDENTITY}
