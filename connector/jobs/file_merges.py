"""An implementation of `MERGE FILES` and `DROP COLUMNS`: merges data files, and removes columns from data files.

Both rewrite the partitions that a condition selects, and copy row groups if possible (`write/copies.py`). A merge
changes no row. A drop removes columns from the files, so readers see null in these partitions, but the table's schema
does not change. A drop changes rows, so its commits have the operation `overwrite`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from msgspec import structs

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.names import Name
from seamark.connector.parquet.copy.source import SourceFile
from seamark.connector.parquet.encryption.keys import ParquetKeys, read_table_keys
from seamark.connector.parquet.metrics import find_float_columns, list_leaves
from seamark.connector.read.file_rows import find_spec, read_partition
from seamark.connector.read.read_plan import plan_read
from seamark.connector.read.scans import bind_filter
from seamark.connector.read.tables import OpenTable, ScanTask, plan
from seamark.connector.write.compaction import BATCH_BYTES, BATCH_FILES, divide_tasks, group_by_partition, rewrite_rows
from seamark.connector.write.copies import CopyPolicy
from seamark.connector.write.replacements import (
    OVERWRITE,
    REPLACE,
    Batches,
    BatchRunner,
    RewriteReport,
    RewrittenFiles,
    open_rewritable,
    replace_batches,
    run_here,
    select_rewritable,
)
from seamark.connector.write.target import WriteTarget, create_target
from seamark.formats.iceberg.expressions.expression import FALSE, TRUE, collect_predicates
from seamark.formats.iceberg.expressions.residuals import Residuals
from seamark.formats.iceberg.metadata.column_ttl import DROPPED_COLUMNS, explain_retention
from seamark.formats.iceberg.metadata.properties import TARGET_FILE_BYTES
from seamark.formats.iceberg.metadata.snapshot import MAIN
from seamark.formats.iceberg.types.schema import Column, Field, Schema, StructType

GOOD_SIZE_FRACTION = 0.75
"""The minimum size of a file without deleted rows that is not rewritten, as a fraction of the target size."""


def merge_files(
    client: SeamarkClient,
    table: Name,
    *,
    where: str | Mapping[str, Any] | None = None,
    target_bytes: int | None = None,
    dry_run: bool = False,
    branch: str = MAIN,
    utc: bool = True,
    runner: BatchRunner = run_here,
) -> RewriteReport:
    """Merge the files of each selected partition into files of the target size, and apply their deletes.

    A file of about the target size, or a small file that is alone in its partition, changes only if it has deletes.

    Args:
        where: The condition that selects the partitions, or None for all partitions.
        target_bytes: The target size. The default is the target size in the table's properties.
        utc: Whether times without a zone in `where` are in UTC. If not, a condition on a time is refused.
        runner: A function that runs the rewrites, in this process or elsewhere.

    Raises:
        InvalidRequest: The condition does not select whole partitions, or the table has format version 1.
    """
    source_table, target = _open(client, table, branch)
    if target_bytes is not None:
        target = replace(target, properties={**target.properties, TARGET_FILE_BYTES: str(target_bytes)})
    policy = CopyPolicy.from_properties(target.properties)
    tasks = list(plan(client, source_table, stats=find_float_columns(source_table.schema)))
    selected_tasks = []
    tasks_to_merge = _select_tasks(source_table, select_rewritable(tasks), where, utc=utc)
    for members in group_by_partition(tasks_to_merge):
        due_tasks = [
            task for task in members if task.deletes or task.size_bytes < GOOD_SIZE_FRACTION * policy.target_bytes
        ]
        if len(due_tasks) > 1 or any(task.deletes for task in due_tasks):
            selected_tasks.append(due_tasks)
    work = _PartitionRewrite(source_table, source_table, target, policy if target.ordering is None else None)
    return replace_batches(
        client,
        source_table,
        tasks,
        work.list_batches(selected_tasks),
        target_bytes=policy.target_bytes,
        dry_run=dry_run,
        branch=branch,
        runner=runner,
        operation=REPLACE,
        summary={"merged-by": "seamark"},
    )


def drop_columns(
    client: SeamarkClient,
    table: Name,
    columns: Sequence[str],
    *,
    where: str | Mapping[str, Any] | None = None,
    dry_run: bool = False,
    branch: str = MAIN,
    utc: bool = True,
    whole_partitions: bool = False,
    runner: BatchRunner = run_here,
) -> RewriteReport:
    """Remove these columns from the files of the selected partitions, and merge small files.

    The schema does not change, and readers see null in the columns. Files without the columns do not change, so a
    repeat does nothing.

    Args:
        where: The condition that selects the partitions, or None for all partitions.
        dry_run: Whether to report the files that would be replaced, and commit nothing. The reported size of the new
            files is the size of the old files without the columns.
        utc: See `merge_files`.
        whole_partitions: Whether to leave out partitions that `where` selects only in part. If False, these partitions
            cause an error.
        runner: See `merge_files`.

    Raises:
        InvalidRequest: A column cannot be null or is needed by the table's layout, the condition does not select whole
            partitions, files are encrypted or not Parquet, or the table has format version 1.
    """
    source_table, target = _open(client, table, branch)
    ids = [_find_droppable(source_table, name) for name in columns]
    if not ids:
        raise InvalidRequest("Name at least one column to drop")
    dropped_columns = _DroppedColumns.from_ids(source_table.schema, frozenset(ids))
    sorted_policy = replace(CopyPolicy.from_properties(target.properties), copied_min_bytes=1, keep_order=True)
    policy = CopyPolicy.from_properties(target.properties) if target.ordering is None else sorted_policy
    keys = read_table_keys(source_table.name)
    select = partial(_select_tasks, source_table, where=where, utc=utc, whole_partitions=whole_partitions)
    if whole_partitions:  # Most runs of the column TTL policy find no files to rewrite.
        bound = bind_filter(where, source_table)
        candidates = select(plan(client, source_table, bound, stats=dropped_columns.names))
        if not any(dropped_columns.measure_columns(source_table, task, keys) for task in candidates):
            return RewriteReport()
    tasks = list(
        plan(
            client, source_table, stats=[*dropped_columns.names, *find_float_columns(dropped_columns.remaining_schema)]
        )
    )
    selected_tasks = list(select(tasks))
    _check_rewritable(selected_tasks)
    dropped_bytes = {task.path: dropped_columns.measure_columns(source_table, task, keys) for task in selected_tasks}
    tasks_to_rewrite = [task for task in selected_tasks if dropped_bytes[task.path]]
    trimmed_table = replace(source_table, schema=dropped_columns.remaining_schema)
    work = _PartitionRewrite(
        source_table,
        trimmed_table,
        replace(target, schema=dropped_columns.remaining_schema),
        policy,
        dropped_columns.leaves,
    )
    report = replace_batches(
        client,
        source_table,
        tasks,
        work.list_batches(group_by_partition(tasks_to_rewrite)),
        target_bytes=policy.target_bytes,
        dry_run=dry_run,
        branch=branch,
        runner=runner,
        operation=OVERWRITE,
        summary={DROPPED_COLUMNS: ",".join(columns)},
    )
    if dry_run:
        report.bytes_after -= sum(dropped_bytes.values())
    return report


@dataclass(frozen=True)
class _PartitionRewrite:
    """A rewrite of partitions for a merge or a drop.

    Attributes:
        table: The table.
        read_table: The table with the schema of the new files.
        target: A target with the schema of the new files.
        policy: The rules by which row groups are copied, or None to encode all rows.
    """

    table: OpenTable
    read_table: OpenTable
    target: WriteTarget
    policy: CopyPolicy | None
    null_leaves: frozenset[int] = frozenset()
    """The ids of the leaf columns that the new files do not have."""

    def list_batches(self, partitions: Iterable[Sequence[ScanTask]]) -> Batches:
        """Return the files of each commit, with a function that rewrites them."""
        for batch in divide_tasks(chain.from_iterable(partitions), BATCH_BYTES, BATCH_FILES):
            yield batch, partial(self._rewrite, batch)

    def _rewrite(self, batch: Sequence[ScanTask]) -> RewrittenFiles:
        rewritten_files = rewrite_rows(self.read_table, self.target, batch, self.policy)
        files = tuple(_mark_as_null(file, self.null_leaves) for file in rewritten_files.written.files)
        # The commit reads and writes deletes of concurrent commits with the table's current schema.
        return replace(rewritten_files, table=self.table, written=replace(rewritten_files.written, files=files))


def _mark_as_null(file: dict[str, Any], leaves: frozenset[int]) -> dict[str, Any]:
    """Return the ContentFile with counts that mark these columns as null in all rows.

    Plans can then prune the file by conditions on these columns, and the next drop does not need to open the file.
    """
    rows, new_file = file["record-count"], dict(file)
    for name in ("value-counts", "null-value-counts"):
        counts = new_file.get(name) or {"keys": [], "values": []}
        count_by_id = dict(zip(counts["keys"], counts["values"], strict=True)) | dict.fromkeys(sorted(leaves), rows)
        new_file[name] = {"keys": list(count_by_id), "values": list(count_by_id.values())}
    return new_file


class _DroppedColumns(NamedTuple):
    """The columns that a drop removes.

    Attributes:
        ids: The ids of the columns and of all fields in them.
        leaves: The ids of the dropped leaf columns with counts in manifests, which are not inside lists or maps.
        names: The names of `leaves`, or no names if leaf columns without counts are also dropped.
        remaining_schema: The schema without the columns.
    """

    ids: frozenset[int]
    leaves: frozenset[int]
    names: tuple[str, ...]
    remaining_schema: Schema

    @staticmethod
    def from_ids(schema: Schema, ids: frozenset[int]) -> _DroppedColumns:
        """Return the dropped columns with these ids.

        Raises:
            InvalidRequest: The columns are all columns of the table or of a struct.
        """
        remaining = _drop_columns(schema, ids)
        structs_left = [field.type for field in _list_fields(remaining.fields) if isinstance(field.type, StructType)]
        if not remaining.fields or not all(kind.fields for kind in structs_left):
            raise InvalidRequest(
                "These are all columns of the table or of a struct; drop the struct or the table instead"
            )
        dropped_leaves = [
            leaf for leaf in list_leaves(schema) if leaf.id not in {leaf.id for leaf in list_leaves(remaining)}
        ]
        # Null counts do not exist for leaves inside lists and maps. `names` is empty if there is such a leaf.
        counted_ids = frozenset(leaf.id for leaf in dropped_leaves if not leaf.repeated)
        columns = schema.index.by_id
        names = (
            tuple(columns[leaf.id].name for leaf in dropped_leaves) if len(counted_ids) == len(dropped_leaves) else ()
        )
        return _DroppedColumns(frozenset({*ids, *(leaf.id for leaf in dropped_leaves)}), counted_ids, names, remaining)

    def measure_columns(self, source_table: OpenTable, task: ScanTask, keys: ParquetKeys | None) -> int:
        """Return the size of the columns in a file, in bytes.

        The size is 0 if the file does not have the columns, or if they are null in all rows. A file without field ids
        is assumed to have the columns.

        Raises:
            Unreadable: The file cannot be read.
        """
        counts = task.file.get("null-value-counts") or {"keys": [], "values": []}
        nulls = dict(zip(counts["keys"], counts["values"], strict=True))
        if self.names and all(nulls.get(leaf) == task.records for leaf in self.leaves):
            return 0
        with SourceFile(task.path, source_table.storage, keys=keys) as source:
            columns = [number for number, leaf in enumerate(source.leaves) if self.ids.intersection(leaf.ids)]
            # Without field ids, the columns are unknown. The first column is measured so that the size is not 0.
            if any(leaf.ids[0] is None for leaf in source.leaves):
                columns = columns or [0]
            return int(
                sum(group.read_values("packed_bytes")[columns].sum() for group in source.footer.groups if group.rows)
            )


def _open(client: SeamarkClient, table: Name, branch: str) -> tuple[OpenTable, WriteTarget]:
    source_table = open_rewritable(client, table, branch)
    return source_table, create_target(source_table.metadata, source_table.storage, source_table.name)


def _select_tasks(
    source_table: OpenTable,
    tasks: Iterable[ScanTask],
    where: str | Mapping[str, Any] | None,
    *,
    utc: bool,
    whole_partitions: bool = False,
) -> Iterator[ScanTask]:
    """Yield the files of the partitions that the condition selects.

    The residual is the part of the condition that the partition values do not decide. If it is TRUE, the whole
    partition is selected.

    Args:
        utc: Whether the session's time zone is UTC. Otherwise, conditions on timestamps are refused.
        whole_partitions: Whether to leave out a partition that the condition selects only in part.

    Raises:
        InvalidRequest: The condition selects a part of a partition, and `whole_partitions` is False. Or it compares a
            timestamp, and `utc` is False.
    """
    bound_filter = bind_filter(where, source_table)
    if not utc and any(predicate.kind.startswith("timestamp") for predicate in collect_predicates(bound_filter)):
        raise InvalidRequest(
            "The session's time zone is not UTC, so times in the condition are ambiguous; set it to UTC, or compare "
            "dates"
        )
    read_plan = plan_read(source_table, [], TRUE)
    residuals: dict[int, Residuals] = {}
    for task in tasks:
        spec = find_spec(source_table.metadata, task)
        if task.spec_id not in residuals:
            residuals[task.spec_id] = Residuals(bound_filter, spec)
        residual = residuals[task.spec_id](read_partition(read_plan, task))
        if residual == TRUE:
            yield task
        elif residual != FALSE and not whole_partitions:
            raise InvalidRequest(
                f"The condition selects a part of the partition of {task.path}; use a condition on the columns of the "
                "partition spec so that it selects whole partitions"
            )


def _check_rewritable(tasks: Sequence[ScanTask]) -> None:
    """Check that all files can be rewritten without the dropped columns.

    Otherwise, readers would still find the values of these columns in the remaining files.

    Raises:
        InvalidRequest: A file cannot be rewritten.
    """
    rewritable_paths = {task.path for task in select_rewritable(tasks)}
    unsupported_paths = [task.path for task in tasks if task.path not in rewritable_paths]
    if unsupported_paths:
        raise InvalidRequest(
            f"Columns cannot be dropped from {len(unsupported_paths):,} of {len(tasks):,} files, because they are not "
            f"Parquet, are encrypted by Iceberg's table encryption, or are in the table twice; the first is "
            f"{unsupported_paths[0]}"
        )


def _find_droppable(source_table: OpenTable, name: str) -> int:
    """Return the id of a column, after a check that all its values may be null.

    Raises:
        InvalidRequest: The table has no column with this name, or its values cannot be dropped.
    """
    schema, metadata = source_table.schema, source_table.metadata
    column = _find_column(schema, name)
    if column is None:
        raise InvalidRequest(
            f"There is no column {name!r}: the table's columns are {', '.join(_list_names(schema))[:500]}"
        )
    path = _find_path(schema.fields, column.id)
    if path is None:
        raise InvalidRequest(f"{name} is inside a list or map; drop the whole column")
    field = path[-1]
    if reason := explain_retention(metadata, field):
        raise InvalidRequest(f"{name} {reason}; its values cannot be dropped from files")
    parent = path[-2].type if len(path) > 1 else StructType(schema.fields)
    if isinstance(parent, StructType) and len(parent.fields) == 1:
        raise InvalidRequest(f"{name} is the only column; drop the struct or the table that contains it")
    return field.id


def _find_column(schema: Schema, name: str) -> Column | None:
    """Return the column with this name, or the only column with this name if case is ignored, or None.

    Raises:
        InvalidRequest: Several columns have this name if case is ignored.
    """
    if (column := schema.find_column_by_name(name)) is not None:
        return column
    matching_ids = {number for other, number in schema.index.by_name.items() if other.lower() == name.lower()}
    if len(matching_ids) > 1:
        raise InvalidRequest(
            f"{name!r} matches several columns that differ in case; write the name as the table has it"
        )
    return schema.column(matching_ids.pop()) if matching_ids else None


def _list_fields(fields: Iterable[Field]) -> Iterator[Field]:
    """Yield the fields and, recursively, the fields of their structs."""
    for field in fields:
        yield field
        if isinstance(field.type, StructType):
            yield from _list_fields(field.type.fields)


def _list_names(schema: Schema) -> list[str]:
    return [field.name for field in schema.fields]


def _find_path(fields: Sequence[Field], column_id: int) -> list[Field] | None:
    """Return the fields on the path through structs to a column, or None if there is no such path."""
    for field in fields:
        if field.id == column_id:
            return [field]
        if isinstance(field.type, StructType) and (inner_path := _find_path(field.type.fields, column_id)):
            return [field, *inner_path]
    return None


def _drop_columns(schema: Schema, ids: frozenset[int]) -> Schema:
    """Return a schema without these columns that has the same id."""
    return Schema(_drop_fields(schema.fields, ids), schema.schema_id, schema.identifier_field_ids)


def _drop_fields(fields: Sequence[Field], ids: frozenset[int]) -> tuple[Field, ...]:
    remaining = []
    for field in fields:
        if field.id not in ids:
            kind = field.type
            inner = StructType(_drop_fields(kind.fields, ids)) if isinstance(kind, StructType) else kind
            remaining.append(field if inner == kind else structs.replace(field, type=inner))
    return tuple(remaining)
