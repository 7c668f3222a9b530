"""Reads the rows of one data file that match a filter, with the columns of a scan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
import pyarrow.parquet as pq

from seamark.connector.arrow.arrays import Longs, Mask, combine_to_array
from seamark.connector.parquet.coded_strings import decode_strings, select_coded_columns, should_read_codes
from seamark.connector.parquet.pages import Pages
from seamark.connector.parquet.projection import FileProjection
from seamark.connector.parquet.row_groups import RowGroups
from seamark.connector.read.deleted_rows import Deletes
from seamark.connector.read.lineage import InheritedLineage
from seamark.connector.read.read_plan import BATCH_ROWS, FILE, POSITION, ReadCounts, ReadPlan
from seamark.connector.read.tables import ScanTask
from seamark.formats.iceberg.expressions.arrow_filters import evaluate_filter
from seamark.formats.iceberg.expressions.expression import Expression, collect_predicates
from seamark.formats.iceberg.files.parquet import apply_name_mapping
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.partition import PartitionSpec
from seamark.formats.iceberg.types.schema import Field, Schema, StructType
from seamark.formats.iceberg.types.transforms import IDENTITY, canonicalize_transform, compute_result_type
from seamark.formats.iceberg.types.values import Value, decode_json

_ColumnPath = tuple[int, tuple[int, ...]]


@dataclass
class FileRowReader:
    """Reads the matching rows of one open file."""

    read_plan: ReadPlan
    task: ScanTask
    where: Expression
    file: pq.ParquetFile
    pages: Pages
    coded: Callable[[Sequence[str]], pq.ParquetFile]
    """A function that opens the file again, so that the given columns are read as codes instead of strings."""
    mapping: Any
    deletes: Deletes
    threads: bool
    _column_paths: dict[int, _ColumnPath] = field(default_factory=dict)

    def __post_init__(self) -> None:
        task, read_plan = self.task, self.read_plan
        self._deleted_rows = self.deletes.load(task.path, task.deletes)
        self._removed = None if task.removed_by is None else self.deletes.load(task.path, task.removed_by)
        tested_columns = {predicate.column_id for predicate in collect_predicates(self.where)}
        for row_set in (self._deleted_rows, self._removed):
            tested_columns |= set() if row_set is None else row_set.column_ids
        tested_fields: dict[int, Field] = {}
        for column_id in tested_columns:
            root, steps = _find_path(column_id, read_plan.schema, read_plan.metadata.schemas)
            tested_fields[root.id] = root
            self._column_paths[column_id] = (root.id, steps)
        self._inherited_lineage = InheritedLineage.from_file(task.file) if read_plan.lineage else None
        outputs = read_plan.fields if self._inherited_lineage is None else [*read_plan.fields, *read_plan.lineage]
        fields = apply_name_mapping(list(self.file.schema_arrow), self.mapping)
        needed_fields = {field.id: field for field in (*outputs, *tested_fields.values())}
        self._projection = FileProjection(fields, needed_fields.values(), _read_identity_values(read_plan, task))
        self._tested_ids = list(tested_fields)
        self._tested_outputs = [field.id for field in outputs if field.id in tested_fields]
        self._other_outputs = [field.id for field in outputs if field.id not in tested_fields]
        self._groups = RowGroups(self.file.metadata, fields, self.where)
        self._files_by_coded_names: dict[tuple[str, ...], pq.ParquetFile] = {}

    def read_batches(self, row_numbers: Longs | None, counts: ReadCounts) -> Iterator[pa.RecordBatch]:
        first = 0
        for number in range(self.file.metadata.num_row_groups):
            rows = self.file.metadata.row_group(number).num_rows
            if self._is_in_span(number):
                mask = self._select_candidates(row_numbers, first, rows)
                may_match = mask is None or bool(mask.any())
                is_read = False
                if may_match and self._groups.may_match(number):
                    for batch in self._read_group(number, first, rows, mask, counts):
                        is_read = True
                        yield batch
                counts.row_groups += is_read
                counts.row_groups_skipped += not is_read
            first += rows

    def _is_in_span(self, number: int) -> bool:
        if self.task.span is None:
            return True
        chunk = self.file.metadata.row_group(number).column(0)
        begin = chunk.data_page_offset
        if chunk.has_dictionary_page:
            begin = min(begin, chunk.dictionary_page_offset)
        start, end = self.task.span
        return (start is None or start <= begin) and (end is None or begin < end)

    def _select_candidates(self, row_numbers: Longs | None, first: int, rows: int) -> Mask | None:
        """Return a mask of the rows that are selected by position and are not deleted.

        The mask is bool[rows], or None for all rows. If the task requests only removed rows (`ScanTask.removed_by`),
        other rows are left out, unless they were also removed by key, which is checked later.

        Args:
            row_numbers: The ascending positions of the selected rows in the file, or None for all rows.
            first: The position of the first of the `rows` rows.
        """
        mask = None
        if row_numbers is not None:
            start, end = np.searchsorted(row_numbers, (first, first + rows)).tolist()
            mask = np.zeros(rows, dtype=np.bool_)
            mask[row_numbers[start:end] - first] = True
        deleted_mask = self._deleted_rows.mark_deleted_positions(first, rows)
        if deleted_mask is not None:
            mask = ~deleted_mask if mask is None else mask & ~deleted_mask
        if self._removed is not None and not self._removed.keys:
            removed_mask = self._removed.mark_deleted_positions(first, rows)
            removed_mask = np.zeros(rows, dtype=np.bool_) if removed_mask is None else removed_mask
            mask = removed_mask if mask is None else mask & removed_mask
        return mask

    def _read_group(
        self, number: int, first: int, rows: int, mask: Mask | None, counts: ReadCounts
    ) -> Iterator[pa.RecordBatch]:
        """Yield the matching rows of a row group.

        The columns of the filter and of equality deletes are read first, and the other columns only for rows that
        remain.

        Args:
            number: The number of the row group.
            first: The position of its first row in the file.
            rows: The number of its rows.
            mask: The rows that are selected by position and not deleted, as bool[rows], or None for all rows.
            counts: The counts of the scan, which are increased.
        """
        filtered_arrays: dict[int, list[pa.Array]] = {column_id: [] for column_id in self._tested_outputs}
        if self._tested_ids:
            masks = []
            start = 0
            for batch, size in self._read_columns(number, rows, self._tested_ids):
                mask_slice = None if mask is None else mask[start : start + size]
                columns = self._projection.project_columns(batch, self._tested_ids, size)
                matches = self._match_rows(columns, first + start, size, mask_slice)
                masks.append(matches)
                for column_id in self._tested_outputs:
                    filtered_arrays[column_id].append(columns[column_id].filter(pa.array(matches)))
                start += size
            mask = np.concatenate(masks) if masks else np.zeros(0, dtype=np.bool_)
            if not mask.any():
                return
        start = matched_rows = 0
        tested_values = {column_id: pa.chunked_array(parts) for column_id, parts in filtered_arrays.items()}
        names = self._projection.list_names(self._other_outputs)
        page_batch = self.pages.read(number, names, np.flatnonzero(mask)) if mask is not None and names else None
        if page_batch is not None:
            counts.row_groups_by_pages += 1
            columns = self._projection.project_columns(page_batch, self._other_outputs, page_batch.num_rows)
            assembled_batch = self._assemble_batch(
                columns | {column_id: combine_to_array(parts) for column_id, parts in tested_values.items()},
                first,
                rows,
                mask,
            )
            yield from (
                assembled_batch.slice(matched_rows, BATCH_ROWS)
                for matched_rows in range(0, page_batch.num_rows, BATCH_ROWS)
            )
            return
        is_few = mask is not None and should_read_codes(mask)
        for batch, size in self._read_columns(number, rows, self._other_outputs, few=is_few):
            mask_slice = None if mask is None else mask[start : start + size]
            count = size if mask_slice is None else int(np.count_nonzero(mask_slice))
            if count:
                if mask_slice is not None and count < size and batch is not None:
                    batch = batch.filter(pa.array(mask_slice))
                batch = None if batch is None else decode_strings(batch, self.file.schema_arrow)
                columns = self._projection.project_columns(batch, self._other_outputs, count)
                columns |= {
                    column_id: combine_to_array(parts.slice(matched_rows, count))
                    for column_id, parts in tested_values.items()
                }
                yield self._assemble_batch(columns, first + start, size, mask_slice)
            start, matched_rows = start + size, matched_rows + count

    def _read_columns(
        self, number: int, rows: int, column_ids: Sequence[int], *, few: bool = False
    ) -> Iterator[tuple[pa.RecordBatch | None, int]]:
        """Yield batches with the requested columns that the file has, each with its number of rows.

        A batch is None if the file has none of the columns.

        Args:
            number: The index of the row group.
            rows: The number of rows of the row group.
            column_ids: The ids of the columns.
            few: Whether only few of the rows are used. If so, strings may be returned as codes (`decode_strings`).
        """
        names = self._projection.list_names(column_ids)
        if not names:
            for start in range(0, rows, BATCH_ROWS):
                yield None, min(BATCH_ROWS, rows - start)
            return
        coded_names = tuple(select_coded_columns(self.file, number, names)) if few else ()
        if coded_names and coded_names not in self._files_by_coded_names:
            self._files_by_coded_names[coded_names] = self.coded(coded_names)
        file = self._files_by_coded_names[coded_names] if coded_names else self.file
        for batch in file.iter_batches(BATCH_ROWS, [number], names, use_threads=self.threads):
            yield batch, batch.num_rows

    def _match_rows(self, columns: Mapping[int, pa.Array], first: int, rows: int, mask: Mask | None) -> Mask:
        values = {
            column_id: _extract_nested(columns[root], steps) for column_id, (root, steps) in self._column_paths.items()
        }
        matches = evaluate_filter(self.where, values, rows)
        matches = matches if mask is None else matches & mask
        if self._deleted_rows.keys:
            matches = matches & ~self._deleted_rows.mark_deleted_keys(values, rows)
        if self._removed is not None and self._removed.keys:
            removed_mask = self._removed.mark_deleted_keys(values, rows)
            by_position = self._removed.mark_deleted_positions(first, rows)
            matches = matches & (removed_mask if by_position is None else removed_mask | by_position)
        return matches

    def _assemble_batch(
        self, columns: Mapping[int, pa.Array], first: int, size: int, mask: Mask | None
    ) -> pa.RecordBatch:
        """Return a batch with the columns of the read plan, in its order.

        Args:
            columns: The columns of the rows that `mask` keeps, by column id.
            first: The position of the first of the `size` rows in the file.
            mask: The rows that are returned, as bool[size], or None for all rows.
        """
        ids = {field.name: field.id for field in self.read_plan.fields}
        lineage = {field.name: field.id for field in self.read_plan.lineage}
        count = size if mask is None else int(np.count_nonzero(mask))
        arrays: list[pa.Array] = []
        positions = np.zeros(0, dtype=np.int64)
        needs_positions = self.read_plan.positions or POSITION in self.read_plan.names
        # Positions are computed only if the scan or the row lineage needs them.
        if needs_positions or self._inherited_lineage is not None:
            positions = np.arange(first, first + size)
            positions = positions if mask is None else positions[mask]
        for name in self.read_plan.names:
            if name in ids:
                arrays.append(columns[ids[name]])
            elif name == FILE:
                arrays.append(pa.repeat(pa.scalar(self.task.path), count))
            elif name == POSITION:
                arrays.append(pa.array(positions))
            elif self._inherited_lineage is None:
                arrays.append(pa.nulls(count, pa.int64()))
            else:
                arrays.append(self._inherited_lineage.fill(lineage[name], columns[lineage[name]], positions))
        if self.read_plan.positions:
            arrays.append(pa.array(positions))
        return _build_batch(arrays, self.read_plan.arrow, count)


def _build_batch(arrays: list[pa.Array], schema: pa.Schema, rows: int) -> pa.RecordBatch:
    if arrays:
        return pa.RecordBatch.from_arrays(arrays, schema=schema)
    # The rows have no columns.
    return pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))


def _find_path(column_id: int, schema: Schema, schemas: Iterable[Schema]) -> tuple[Field, tuple[int, ...]]:
    """Return the top-level column that contains a column, and the positions of the struct fields on the path to it.

    If the schema does not have the column, the other schemas are searched, in descending order of their ids.

    Raises:
        ValueError: The column is unknown, inside a list or map, or dropped from an existing struct.
    """
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
            raise ValueError(f"column {column_id} was dropped from {current.name} and cannot be read")
        return root, tuple(steps)
    raise ValueError(f"no schema of the table has the column {column_id}")


def _extract_nested(column: pa.Array, steps: Iterable[int]) -> pa.Array:
    for step in steps:
        column = pc.struct_field(column, [step])  # The value is null where the struct is null.
    return column


def find_spec(metadata: TableMetadata, task: ScanTask) -> PartitionSpec:
    """Return the partition spec of a task's file.

    Raises:
        ValueError: The table metadata does not have the spec.
    """
    spec = metadata.spec(task.spec_id)
    if spec is None:
        raise ValueError(f"the partition spec {task.spec_id} is not in the table's metadata")
    return spec


def read_partition(read_plan: ReadPlan, task: ScanTask) -> dict[int, Value | None]:
    """Return the file's partition values by field id, for columns of the schema.

    Fields with several sources, and fields of columns that the schema no longer has, are left out.

    Raises:
        ValueError: The values are invalid, or the table metadata do not have the partition spec.
    """
    spec, partition = find_spec(read_plan.metadata, task), task.file.get("partition") or ()
    if len(partition) != len(spec.fields):
        raise ValueError(
            f"the plan has {len(partition)} partition values, but the partition spec has {len(spec.fields)} fields"
        )
    values: dict[int, Value | None] = {}
    for spec_field, json in zip(spec.fields, partition, strict=True):
        column = read_plan.schema.column(spec_field.sources[0]) if len(spec_field.sources) == 1 else None
        if column is not None and isinstance(column.type, str) and spec_field.field_id is not None:
            values[spec_field.field_id] = decode_json(
                compute_result_type(canonicalize_transform(spec_field.transform), column.type), json
            )
    return values


def _read_identity_values(read_plan: ReadPlan, task: ScanTask) -> dict[int, Value | None]:
    """Return the values of identity partition fields, by column id.

    Raises:
        ValueError: The values are invalid, or the table metadata do not have the partition spec.
    """
    values = read_partition(read_plan, task)
    fields = [field for field in find_spec(read_plan.metadata, task).fields if field.field_id in values]
    return {
        field.sources[0]: values[field.field_id or 0]
        for field in fields
        if canonicalize_transform(field.transform) == IDENTITY
    }
