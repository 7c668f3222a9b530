"""Locates the stored rows that a statement can change, by keys or by a filter, and reads their needed columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from seamark.connector.arrow.arrays import Longs
from seamark.connector.client.client import SeamarkClient
from seamark.connector.read.chosen_rows import read_chosen
from seamark.connector.read.read_plan import plan_read
from seamark.connector.read.scans import TaskReader
from seamark.connector.read.tables import OpenTable, ScanTask, plan, restrict_to_rows
from seamark.connector.spark.statements.targets import MustRunInIceberg
from seamark.connector.write.row_locations import BatchKeys, MatchedRows, find_record_index, locate
from seamark.formats.iceberg.expressions.expression import TRUE, Expression
from seamark.formats.iceberg.types.schema import Field
from seamark.formats.iceberg.types.values import FLOATS

PLACE = "_pos"
"""The column with the index of a row among the located rows. In Spark's query, it has the position in the file."""


@dataclass(frozen=True)
class StatementLimits:
    """The limits of a statement whose rows are located: their files and positions are known before it runs.

    A statement that exceeds a limit runs in Iceberg.

    Attributes:
        rows: The maximum number of located rows, and of rows of a source. Both are in memory.
        read_rows: The maximum number of rows in the files that are read to locate rows without a record index.
    """

    rows: int = 200_000
    read_rows: int = 5_000_000


DEFAULT_LIMITS = StatementLimits()
_FILTER_VALUES_MAX = 1_000
"""The maximum number of keys that the filter of a plan lists."""


@dataclass(frozen=True)
class CandidateRows:
    """The stored rows that a statement can change. Row r is the row `positions[r]` of the file `tasks[files[r]]`.

    Attributes:
        values: The needed columns, and the column `PLACE` with the index r of each row.
        read: The paths of the files that were read to locate rows.
    """

    tasks: tuple[ScanTask, ...]
    files: Longs
    positions: Longs
    values: pa.Table
    read: frozenset[str]
    keys: Longs | None = None
    """The index of each row's key among the keys that located the rows, as int64[rows]. None if there are no keys."""

    def group_by_file(self, rows: Longs) -> list[MatchedRows]:
        """Return the located rows with these indexes, grouped by file."""
        chosen_rows = np.unique(rows)
        order = chosen_rows[np.lexsort((self.positions[chosen_rows], self.files[chosen_rows]))]
        matched_rows = []
        for number in np.unique(self.files[order]):
            positions = self.positions[order[self.files[order] == number]]
            # The caller uses only the positions, so the indexes of the keys are not set.
            matched_rows.append(MatchedRows(self.tasks[int(number)], positions, keys=np.zeros_like(positions)))
        return matched_rows


def locate_by_keys(
    client: SeamarkClient, source_table: OpenTable, keys: BatchKeys, names: Sequence[str], limits: StatementLimits
) -> CandidateRows:
    """Return the stored rows with these keys.

    The values of key columns are taken from the keys, so that only the other columns are read from files.

    Args:
        client: The client of the table's server.
        source_table: The table.
        keys: The keys.
        names: The columns to return.
        limits: The limits of the statement.

    Raises:
        MustRunInIceberg: Too many rows would have to be read, or an index has rows that are not stored.
    """
    if keys.count and find_record_index(source_table.metadata, keys.fields) is None:
        _check_read(
            plan(
                client, source_table, keys.filter_expression(_FILTER_VALUES_MAX, source_table.metadata.partition_specs)
            ),
            limits,
        )
    located_keys = locate(client, source_table, keys)
    count = sum(len(file.positions) for file in located_keys.files)
    _check_rows(count, limits)
    key_columns = {field.name: column for field, column in _find_exact_columns(keys) if field.name in names}
    names_to_read = [name for name in names if name not in key_columns]
    ordinals = _concatenate([file.keys for file in located_keys.files])
    positions = _concatenate([file.positions for file in located_keys.files])
    files = np.repeat(np.arange(len(located_keys.files)), [len(file.positions) for file in located_keys.files])
    read_plan = plan_read(source_table, names_to_read, TRUE)
    values = read_plan.arrow.empty_table()
    if names_to_read:
        positions_by_task = [(file.task, file.positions) for file in located_keys.files]
        batch_lists = read_chosen(read_plan, source_table.storage, positions_by_task)
        values = pa.Table.from_batches([batch for batches in batch_lists for batch in batches], read_plan.arrow)
        if len(values) != count:
            raise MustRunInIceberg("the index contains rows that are not stored")
    columns = {name: values[name] for name in names_to_read} | {
        name: column.take(pa.array(ordinals)) for name, column in key_columns.items()
    }
    table = pa.table({**{name: columns[name] for name in names}, PLACE: np.arange(count)})
    return CandidateRows(
        tuple(file.task for file in located_keys.files), files, positions, table, located_keys.read, ordinals
    )


def locate_by_filter(
    client: SeamarkClient, source_table: OpenTable, where: Expression, names: Sequence[str], limits: StatementLimits
) -> CandidateRows:
    """Return the rows that match the filter.

    Raises:
        MustRunInIceberg: Too many rows match, or would have to be read.
    """
    tasks = _check_read(restrict_to_rows(client, source_table, where, plan(client, source_table, where)), limits)
    read_plan = plan_read(source_table, names, where, positions=True)
    reader = TaskReader(read_plan, source_table.storage)
    batches: list[pa.RecordBatch] = []
    files: list[Longs] = []
    count = 0
    for number, task in enumerate(tasks):
        for batch in reader.read(task):
            count += batch.num_rows
            _check_rows(count, limits)
            batches.append(batch)
            files.append(np.full(batch.num_rows, number))
    rows = pa.Table.from_batches(batches, read_plan.arrow)
    positions = rows.column(len(names)).to_numpy()
    values = rows.select(list(range(len(names)))).append_column(PLACE, pa.array(np.arange(count)))
    return CandidateRows(tuple(tasks), _concatenate(files), positions, values, frozenset(task.path for task in tasks))


def _find_exact_columns(keys: BatchKeys) -> Iterator[tuple[Field, pa.Array]]:
    """Yield the key columns except floats, because floats that compare as equal may be different: zeros and NaNs."""
    for field, column in zip(keys.fields, keys.columns, strict=True):
        if str(field.type) not in FLOATS:
            yield field, column


def _check_read(tasks: Iterator[ScanTask], limits: StatementLimits) -> list[ScanTask]:
    """Return the tasks.

    Raises:
        MustRunInIceberg: Their files have more than `limits.read_rows` rows.
    """
    checked_tasks, rows = [], 0
    for task in tasks:
        checked_tasks.append(task)
        rows += task.records
        if rows > limits.read_rows:
            raise MustRunInIceberg(
                f"no index locates its rows: files with more than {limits.read_rows:,} rows would have to be read"
            )
    return checked_tasks


def _check_rows(count: int, limits: StatementLimits) -> None:
    if count > limits.rows:
        raise MustRunInIceberg(f"the statement can change more than {limits.rows:,} stored rows")


def _concatenate(parts: Sequence[Longs]) -> Longs:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
