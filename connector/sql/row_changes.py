"""Runs INSERT, UPDATE and DELETE: Seamark reads the files, DuckDB computes the rows, and Seamark commits them.

DuckDB's own Iceberg extension is not used. Its rules for pruning files by partitions and bounds differ from Iceberg's
(`docs/how-to/connect-duckdb.md`), so its changes could miss rows. In this module, each row that DuckDB computes has a
place: the index of its file in the plan, and its position in the file. Only rows at these places are changed.

After a conflict with another commit, UPDATE and DELETE run again on the current snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from seamark.connector.arrow.arrays import Longs
from seamark.connector.arrow.casting import Unwritable
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import InvalidRequest, ServerFailed
from seamark.connector.plans.async_client import Name
from seamark.connector.read.lineage import NAMES, ROW_ID_NAME, has_lineage
from seamark.connector.read.read_plan import ReadPlan, plan_read
from seamark.connector.read.scans import TaskReader
from seamark.connector.read.tables import OpenTable, ScanTask
from seamark.connector.sql.duckdb_engine import POSITION_BITS
from seamark.connector.sql.reads import PlannedTableRead
from seamark.connector.write.appends import append
from seamark.connector.write.row_changes import COMMIT_ATTEMPTS_MAX, Report, RowChange, commit_row_change
from seamark.connector.write.row_locations import LocatedKeys, MatchedRows
from seamark.connector.write.target import WriteTarget
from seamark.connector.write.upserts import MERGE_ON_READ, MODES, RowDifference, write_change
from seamark.formats.iceberg.expressions.expression import TRUE, Expression
from seamark.formats.iceberg.files.parquet import EncryptedFile, Unreadable
from seamark.formats.iceberg.metadata.snapshot import MAIN


@dataclass(frozen=True)
class ComputedRows:
    """The rows that an UPDATE or DELETE changes, as DuckDB has computed them.

    Attributes:
        read: The read of the changed table.
        rows: The place of each changed row (the number of its file and its position, see `_group_by_file`), and its new
            values in columns with the names of the columns that UPDATE sets.
        scope: A filter that matches the rows of the table that the statement has read.
    """

    read: PlannedTableRead
    rows: pa.Table
    scope: Expression


def insert_rows(client: SeamarkClient, table: Name, rows: pa.RecordBatchReader) -> int:
    """Append rows to a table with one commit, and return the number of rows.

    Raises:
        InvalidRequest: The rows do not fit the table.
        ClientError: The commit fails, or reading `rows` fails.
    """
    count = 0

    def count_rows() -> Iterator[pa.RecordBatch]:
        nonlocal count
        for batch in rows:
            count += batch.num_rows
            yield batch

    with _convert_client_errors():
        append(client, table, count_rows())
    return count


def change_rows(client: SeamarkClient, table: Name, kind: str, compute: Callable[[OpenTable], ComputedRows]) -> Report:
    """Delete or update rows of a table with one commit.

    Args:
        client: The client of the catalog.
        table: The table that is changed.
        kind: `update` or `delete`. The table property `write.{kind}.mode` selects copy-on-write or
            merge-on-read, which is the default.
        compute: A function that computes the changed rows, for the table as an attempt has opened it.

    Raises:
        InvalidRequest: The new values do not fit the table, or the table cannot be changed.
        Conflict: Concurrent commits conflicted in every attempt.
    """

    def prepare(source_table: OpenTable, target: WriteTarget) -> RowChange:
        mode = target.properties.get(f"write.{kind}.mode", MERGE_ON_READ).lower()
        if mode not in MODES:
            raise Unwritable(f"write.{kind}.mode is {mode!r}; it must be {' or '.join(MODES)}")
        computed_rows = compute(source_table)
        return write_change(
            client, _compute_difference(computed_rows, source_table), computed_rows.scope, source_table, target, mode
        )

    with _convert_client_errors():
        return commit_row_change(
            client, table, prepare, branch=MAIN, producer=None, summary=None, attempts=COMMIT_ATTEMPTS_MAX
        )


@dataclass(frozen=True)
class _UpdatedRows(RowDifference):
    """The new rows of an UPDATE: new values in the columns that it sets, and stored values in the other columns.

    The stored columns are read file by file while the new rows are written, so only the new values are in memory.
    """

    table: OpenTable | None = None
    values: pa.Table | None = None
    """The new values, in columns with the names of the table's columns. The rows are in the order of `located`."""

    def iter_rows(self) -> Iterator[pa.RecordBatch]:
        if self.values is None or self.table is None:
            return
        names = [field.name for field in self.table.schema.fields if field.name not in self.values.column_names]
        names += [ROW_ID_NAME] if self.tracked else []
        read_plan, first_row = plan_read(self.table, names, TRUE), 0
        reader = TaskReader(read_plan, self.table.storage, keys=self.table.keys)
        for file in self.located.files:
            values = self.values.slice(first_row, len(file.positions))
            first_row += len(file.positions)
            yield from (
                _add_stored_columns(values, read_plan, reader.read(file.task, file.positions), file.task)
                if names
                else (values.to_batches())
            )


def _add_stored_columns(
    values: pa.Table, read_plan: ReadPlan, stored_batches: Iterable[pa.RecordBatch], task: ScanTask
) -> Iterator[pa.RecordBatch]:
    """Yield the new values together with the stored columns of the same rows.

    Raises:
        Unreadable: The file no longer contains all rows.
    """
    row_count = 0
    for batch in stored_batches:
        rows = pa.Table.from_batches([batch], read_plan.arrow)
        for name in values.column_names:
            rows = rows.append_column(name, values[name].slice(row_count, batch.num_rows))
        row_count += batch.num_rows
        yield from rows.to_batches()
    if row_count != len(values):
        raise Unreadable(
            task.path, f"only {row_count} of {len(values)} rows could be read again, because the file has changed"
        )


def _compute_difference(computed_rows: ComputedRows, source_table: OpenTable) -> RowDifference:
    """Return the rows that a DELETE or UPDATE deletes, and the new rows of an UPDATE.

    Raises:
        ServerFailed: DuckDB returned a row of the table twice.
    """
    tasks, rows = computed_rows.read.tasks, computed_rows.rows
    places = rows.column(0).to_numpy().astype(np.int64)
    order = np.argsort(places, kind="stable")
    places = places[order]
    if len(places) and not (np.diff(places) > 0).all():
        raise ServerFailed("DuckDB returned a row of the table twice, so nothing is changed", status=500)
    located_keys = LocatedKeys(tuple(_group_by_file(tasks, places)), frozenset(task.path for task in tasks))
    count, files_read = len(places), len(tasks)
    values = rows.remove_column(0)
    if not values.num_columns:
        return RowDifference(located_keys, (), Report(deleted=count, files_read=files_read))
    # With row lineage, new rows keep their row ids, unless the table has its own column with a name of the lineage.
    has_row_ids = has_lineage(source_table.metadata) and not any(
        field.name in NAMES for field in source_table.schema.fields
    )
    report = Report(updated=count, files_read=files_read)
    # `new` is empty, because `_UpdatedRows.iter_rows` computes the new rows.
    return _UpdatedRows(located_keys, (), report, has_row_ids, source_table, values.take(pa.array(order)))


def _group_by_file(tasks: Sequence[ScanTask], places: Longs) -> Iterator[MatchedRows]:
    """Yield the rows at the ascending `places`, grouped by file.

    The high bits of a place are the index of the scan task of the file, and the low bits are the position of the row.
    """
    numbers, starts = np.unique(places >> POSITION_BITS, return_index=True)
    parts = np.split(places & (1 << POSITION_BITS) - 1, starts[1:]) if len(places) else ()
    for number, positions in zip(numbers.tolist(), parts, strict=True):
        yield MatchedRows(tasks[number], positions, np.zeros_like(positions))


@contextmanager
def _convert_client_errors() -> Iterator[None]:
    """Convert errors of the reader and the writer to client errors.

    Raises:
        InvalidRequest: The new rows cannot be written, or the files are encrypted.
        ServerFailed: A file of the table cannot be read.
    """
    try:
        yield
    except Unwritable as error:
        raise InvalidRequest(f"The statement fails: {error}", status=400) from None
    except EncryptedFile as error:
        raise InvalidRequest(f"SQL cannot change encrypted files: {error}", status=400) from None
    except Unreadable as error:
        raise ServerFailed(f"A file of the table cannot be read: {error}", status=500) from None
