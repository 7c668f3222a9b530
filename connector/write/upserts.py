"""Upserts and deletes rows by key, at a cost that depends on the size of the batch.

    upsert(client, "db.t", rows, keys=["id"], precombine="ts")        replaces or inserts the row of each key
    upsert(client, "db.t", rows, keys=["id"], columns=["price"])      changes only these columns of stored rows
    delete(client, "db.t", keys=rows)                                 deletes the rows with these keys
    delete(client, "db.t", where="country = 'FR'")                    deletes the rows that match
    upsert(client, "db.t", rows, keys=["id"], strategy="equality")         locates no rows (`equality_upserts.py`)

Rows are located in one snapshot (`row_locations.py`). Merge-on-read marks the rows as deleted and appends new rows.
Copy-on-write rewrites the files that contain them. Both make one commit, which contains a filter of the rows that were
read. The server refuses the commit if a concurrent commit has changed one of these rows, or has added a row with one of
the keys. The change is then prepared again from the current snapshot, up to a maximum number of attempts. Upserts are
therefore serializable.

Nothing is visible before the commit. Written files are deleted only if no snapshot will ever contain them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
from msgspec import UNSET, UnsetType

from seamark.connector.arrow.arrays import Longs, Mask
from seamark.connector.arrow.casting import Unwritable
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.commits import Producer
from seamark.connector.client.names import Name
from seamark.connector.parquet.copy.protection import FileProtection
from seamark.connector.parquet.encryption.keys import ParquetKeys
from seamark.connector.read.chosen_rows import read_chosen
from seamark.connector.read.deleted_rows import Deletes
from seamark.connector.read.lineage import NAMES, ROW_ID_NAME, has_lineage
from seamark.connector.read.read_plan import plan_read
from seamark.connector.read.scans import TaskReader, bind_filter
from seamark.connector.read.tables import OpenTable, plan
from seamark.connector.write.appends import Rows, to_batches
from seamark.connector.write.data_files import divide_by_protection
from seamark.connector.write.delete_files import DeletedRows, WrittenDeletes, write_deletes
from seamark.connector.write.equality_upserts import EQUALITY, check_equality_arguments, write_equality_upsert
from seamark.connector.write.latest_rows import KeyedBatch, Rank, find_latest_rows, read_column, select_latest
from seamark.connector.write.read_conditions import check_unchanged
from seamark.connector.write.rewrites import rewrite_files
from seamark.connector.write.row_changes import COMMIT_ATTEMPTS_MAX, NOTHING, Report, RowChange, commit_row_change
from seamark.connector.write.row_locations import (
    RANGES_MAX,
    STRATEGIES,
    BatchKeys,
    LocatedKeys,
    MatchedRows,
    choose_key_names,
    locate,
)
from seamark.connector.write.table_writer import WrittenFiles, discard_on_error, write_batches
from seamark.connector.write.target import WriteTarget, with_lineage
from seamark.formats.iceberg.expressions.expression import TRUE, Expression
from seamark.formats.iceberg.files.parquet import Unreadable
from seamark.formats.iceberg.metadata.snapshot import MAIN
from seamark.formats.iceberg.types.schema import Field, Schema

MERGE_ON_READ, COPY_ON_WRITE = "merge-on-read", "copy-on-write"
MODES = (MERGE_ON_READ, COPY_ON_WRITE)
_UPSERT_MODES = ("write.merge.mode", "write.update.mode")
_DELETE_MODES = ("write.delete.mode",)
_PROTECTION_SAMPLE_FILES = 16
"""The number of files of a table that are opened to determine the encryption of its files."""
_SCOPE_VALUES_MAX = 1_000
"""The maximum number of keys that a commit lists as read. For more keys, it lists ranges and buckets."""


def upsert(
    client: SeamarkClient,
    table: Name,
    rows: Rows,
    *,
    keys: Sequence[str],
    precombine: str | None = None,
    columns: Sequence[str] | None = None,
    mode: str | None = None,
    strategy: str | None = None,
    read_snapshot_id: int | UnsetType | None = UNSET,
    branch: str = MAIN,
    producer: Producer | None = None,
    summary: Mapping[str, str] | None = None,
    attempts: int = COMMIT_ATTEMPTS_MAX,
    file_keys: ParquetKeys | None = None,
) -> Report:
    """Replace the stored row with the key of each new row, or insert the new row if there is no stored row.

    All new rows are in memory at the same time.

    If several new rows have the same key, the row with the largest value in the column `precombine` is used, and the
    last row if several rows have the largest value. Null is the smallest value. A stored row with a larger value stays.

    `read_snapshot_id` makes the call a read-modify-write: it raises Conflict and changes nothing if a row with one of
    the keys was inserted, deleted or changed since that snapshot. None means that the table had no snapshot.

    The docstring of `append` describes `producer` and the state after an error.

    A new file has the encryption of the files from which its rows come. New rows have the encryption of the rows that
    they replace. If they replace no rows, they have the encryption of the table's files.

    Args:
        columns: The columns to change, in addition to the key and `precombine`. All other columns of a stored row keep
            their values.
        mode: The default is the table's `write.merge.mode` or `write.update.mode`. Without such a property, it is
            copy-on-write.
        strategy: The way to locate rows (`row_locations.STRATEGIES`). By default, `locate` chooses it. The strategy
            `equality` locates no rows: the change is always merge-on-read, `columns` and `precombine` are not
            supported, and the report contains only files, attempts, snapshot and `duplicate`.
        file_keys: The keys of encrypted Parquet files, for example from `read_environment_keys()`. If None, encrypted
            files are refused.

    Raises:
        Unwritable: The rows do not fit the table, a key is null, the strategy `equality` does not support the change,
            or the stored rows are in files with different encryption.
        Refused: Other commits caused a conflict in every attempt. The status is 409.
        Unreadable: A file is damaged.
    """
    check_names(keys, columns)
    check_arguments(mode, strategy, precombine, columns, read_snapshot_id, file_keys)
    batches = list(to_batches(rows))

    def prepare(source_table: OpenTable, target: WriteTarget) -> RowChange:
        batch = find_latest_rows(batches, source_table.schema, keys, precombine, columns)
        if strategy == EQUALITY:
            return write_equality_upsert(batch, source_table, target)
        write_mode = choose_mode(mode, target)
        check_unchanged(client, source_table, batch.keys, read_snapshot_id, strategy)
        difference = compute_upsert(client, source_table, batch, strategy, write_mode)
        return write_change(client, difference, read_scope(batch.keys, source_table), source_table, target, write_mode)

    options: dict[str, Any] = {"branch": branch, "producer": producer, "summary": summary, "attempts": attempts}
    options["file_keys"] = file_keys
    return commit_row_change(client, table, prepare, history=read_snapshot_id is not UNSET, **options)


def delete(
    client: SeamarkClient,
    table: Name,
    *,
    keys: Rows | None = None,
    key: Sequence[str] | None = None,
    where: str | Mapping[str, Any] | None = None,
    mode: str | None = None,
    strategy: str | None = None,
    read_snapshot_id: int | UnsetType | None = UNSET,
    branch: str = MAIN,
    producer: Producer | None = None,
    summary: Mapping[str, str] | None = None,
    attempts: int = COMMIT_ATTEMPTS_MAX,
    file_keys: ParquetKeys | None = None,
) -> Report:
    """Delete the rows that have one of these keys, or that match a predicate.

    All arguments that are not described here have the same meaning as in `upsert`.

    Args:
        keys: The keys. Columns that are not key columns are ignored.
        key: The names of the key columns. The default is the table's identifier fields or, without such fields, the
            only column of `keys`.
        where: The predicate, as SQL or as the JSON of an Iceberg expression.
        mode: The default is the table's `write.delete.mode`.

    Raises:
        Unwritable: The key columns cannot be determined, or one of them is missing.
    """
    if (keys is None) == (where is None):
        raise ValueError("set either keys or a predicate (where)")
    if where is not None and (key is not None or read_snapshot_id is not UNSET):
        raise ValueError("key and read_snapshot_id apply to a delete by keys, not by a predicate (where)")
    check_names(key, None)
    if strategy == EQUALITY and keys is None:
        raise ValueError(f"with strategy={EQUALITY!r} rows are deleted by keys, not by a predicate (where)")
    check_arguments(mode, strategy, read_snapshot_id=read_snapshot_id, file_keys=file_keys)
    batches = None if keys is None else list(to_batches(keys))

    def prepare(source_table: OpenTable, target: WriteTarget) -> RowChange:
        if batches is None:
            scope = bind_filter(where, source_table)
            difference = _build_deletion(_locate_matching(client, source_table, scope))
        elif not batches:
            return NOTHING
        else:
            batch = extract_keys(batches, source_table.schema, key)
            if strategy == EQUALITY:
                return write_equality_upsert(batch, source_table, target, deletes=True)
            check_unchanged(client, source_table, batch.keys, read_snapshot_id, strategy)
            scope, difference = (
                read_scope(batch.keys, source_table),
                compute_delete(client, source_table, batch, strategy),
            )
        return write_change(client, difference, scope, source_table, target, choose_mode(mode, target, deletes=True))

    options: dict[str, Any] = {"branch": branch, "producer": producer, "summary": summary, "attempts": attempts}
    options["file_keys"] = file_keys
    return commit_row_change(client, table, prepare, history=read_snapshot_id is not UNSET, **options)


def extract_keys(batches: Sequence[pa.RecordBatch], schema: Schema, key: Sequence[str] | None) -> KeyedBatch:
    """Return the distinct keys of the rows.

    Raises:
        Unwritable: The key columns cannot be determined, one of them is missing, or a key is null.
    """
    # Every batch is checked. The names are the same for all batches: they are given, or come from the schema, or are
    # the only column of the rows.
    for batch in batches:
        names = choose_key_names(schema, key, batch.schema.names)
    return find_latest_rows([batch.select(names) for batch in batches], schema, names)


def check_names(keys: Sequence[str] | None, columns: Sequence[str] | None) -> None:
    """Check that the names are lists, because the characters of a string would be used as names.

    Raises:
        ValueError: An argument is a string.
    """
    if isinstance(keys, str) or isinstance(columns, str):
        raise ValueError("keys and columns must be lists of names, not a string")


def check_arguments(
    mode: str | None,
    strategy: str | None,
    precombine: str | None = None,
    columns: Sequence[str] | None = None,
    read_snapshot_id: int | UnsetType | None = UNSET,
    file_keys: ParquetKeys | None = None,
) -> None:
    """Check that all values are known and that the arguments can be combined.

    Raises:
        ValueError: A value is unknown, or two arguments cannot be combined.
    """
    if mode is not None and mode.lower() not in MODES:
        raise ValueError(f"mode is {mode!r}; it must be {' or '.join(MODES)}")
    if strategy == EQUALITY and read_snapshot_id is not UNSET:
        raise ValueError(f"read_snapshot_id needs the stored rows, which strategy={EQUALITY!r} does not read")
    if strategy == EQUALITY and file_keys is not None:
        raise ValueError(f"strategy={EQUALITY!r} writes keys of rows to delete files, which are not encrypted")
    if strategy == EQUALITY:
        check_equality_arguments(mode, precombine, columns)
    elif strategy is not None and strategy not in STRATEGIES:
        raise ValueError(f"strategy is {strategy!r}; it must be {', '.join(STRATEGIES)} or {EQUALITY}")


def choose_mode(requested_mode: str | None, target: WriteTarget, *, deletes: bool = False) -> str:
    """Return the requested mode, or the mode in the table's properties if no mode is requested.

    An upsert uses `write.merge.mode`, or `write.update.mode` if the table does not have it. A delete uses
    `write.delete.mode`. Without these properties, the mode is copy-on-write.

    Raises:
        Unwritable: The mode is unknown.
    """
    names = [name for name in (_DELETE_MODES if deletes else _UPSERT_MODES) if target.properties.get(name)]
    mode = requested_mode or (target.properties[names[0]] if names else COPY_ON_WRITE)
    if mode.lower() not in MODES:
        source = "the requested mode" if requested_mode else f"the table property {names[0]}"
        raise Unwritable(f"{source} is {mode!r}; it must be {' or '.join(MODES)}")
    return mode.lower()


# Row differences


@dataclass(frozen=True)
class RowDifference:
    """The rows that a change deletes, and the rows that it adds.

    Attributes:
        located: The rows to delete.
        new: The rows to add.
        report: The counts that are known before files are written.
    """

    located: LocatedKeys
    new: tuple[pa.Table, ...]
    report: Report
    tracked: bool = False
    """Whether new rows have the row ids of the rows that they replace, in addition to the table's columns."""

    def iter_rows(self) -> Iterator[pa.RecordBatch]:
        for table in self.new:
            yield from table.to_batches()

    def write(self, target: WriteTarget, protection: FileProtection | None = None) -> WrittenFiles:
        """Write the rows to add.

        Args:
            protection: The encryption of the files, for the columns of `find_rows_target`.
        """
        return write_batches(self.find_rows_target(target), self.iter_rows(), protection=protection)

    def find_rows_target(self, target: WriteTarget) -> WriteTarget:
        return with_lineage(target) if self.tracked else target


def read_scope(keys: BatchKeys, source_table: OpenTable, parts: int = 1) -> Expression:
    """Return the filter of the rows that a commit of these keys has read.

    The server refuses the commit if a concurrent commit has changed rows that the filter matches.

    Args:
        keys: The keys of the rows to commit.
        source_table: The table that was read.
        parts: The number of filters in the commit. The length of each filter is limited accordingly.
    """
    specs = source_table.metadata.partition_specs
    return keys.filter_expression(_SCOPE_VALUES_MAX // parts, specs, max(1, RANGES_MAX // parts))


def compute_delete(
    client: SeamarkClient, source_table: OpenTable, batch: KeyedBatch, strategy: str | None
) -> RowDifference:
    """Return the difference that deletes the rows with the keys of the batch."""
    return _build_deletion(locate(client, source_table, batch.keys, strategy))


def _build_deletion(located_keys: LocatedKeys) -> RowDifference:
    return RowDifference(
        located_keys, (), Report(deleted=_count_rows(located_keys.files), files_read=len(located_keys.read))
    )


def _count_rows(files: Iterable[MatchedRows]) -> int:
    return sum(len(rows.positions) for rows in files)


def _locate_matching(client: SeamarkClient, source_table: OpenTable, where: Expression) -> LocatedKeys:
    """Locate the rows for which a predicate is true. There are no keys, so all rows get the key index 0."""
    reader = TaskReader(
        plan_read(source_table, (), where, positions=True), source_table.storage, keys=source_table.keys
    )
    files, read_paths = [], set()
    for task in plan(client, source_table, where):
        read_paths.add(task.path)
        positions = [batch.column(0).to_numpy() for batch in reader.read(task)]
        if positions:
            all_positions = np.concatenate(positions)
            files.append(MatchedRows(task, all_positions, np.zeros(len(all_positions), dtype=np.int64)))
    return LocatedKeys(tuple(files), frozenset(read_paths))


def compute_upsert(
    client: SeamarkClient, source_table: OpenTable, batch: KeyedBatch, strategy: str | None, mode: str
) -> RowDifference:
    """Return the difference that replaces the rows with the keys of the batch by the rows of the batch.

    If the mode is copy-on-write, or columns of the stored rows are read, new rows have the row ids of the rows that
    they replace, in a column `_row_id`. Otherwise, or if the table itself has a column `_row_id`, they get new row ids.
    """
    located_keys = locate(client, source_table, batch.keys, strategy)
    stored_keys = np.zeros(batch.keys.count, dtype=np.bool_)
    for rows in located_keys.files:
        stored_keys[rows.keys] = True
    batch_names = batch.rows.column_names
    stored_names = (
        [field.name for field in source_table.schema.fields if field.name not in batch_names] if batch.partial else []
    )
    names_to_read = [*stored_names, *([batch.precombine.name] if batch.precombine is not None else [])]
    has_row_ids = has_lineage(source_table.metadata) and (mode == COPY_ON_WRITE or bool(names_to_read))
    has_row_ids = has_row_ids and not any(field.name in NAMES for field in source_table.schema.fields)
    names_to_read = [*names_to_read, ROW_ID_NAME] if has_row_ids else names_to_read
    is_applied = np.ones(len(stored_keys), dtype=np.bool_)  # False for keys whose stored row is later than the new row.
    read_paths, new_rows = located_keys.read, batch.rows
    completed_rows, has_stored_row_ids = [], False
    if names_to_read and located_keys.files:
        stored_rows = _StoredRows.read(source_table, located_keys.files, names_to_read, batch.precombine)
        read_paths |= {rows.task.path for rows in located_keys.files}
        is_applied = ~stored_rows.find_later_rows(batch)
        if has_stored_row_ids := has_row_ids and bool(is_applied[stored_rows.keys].any()):
            batch = replace(
                batch, rows=batch.rows.append_column(ROW_ID_NAME, stored_rows.list_row_ids(len(stored_keys)))
            )
            new_rows = batch.rows
        if stored_names:
            completed_rows = [stored_rows.complete(batch, is_applied, stored_names)]
            new_rows = new_rows.filter(pa.array(~stored_keys))
    if not completed_rows:
        new_rows = new_rows.filter(pa.array(is_applied))
    files = tuple(chosen_rows for rows in located_keys.files if len((chosen_rows := rows.select(is_applied)).positions))
    updated_count = int(np.count_nonzero(is_applied & stored_keys))
    report = Report(
        inserted=int(np.count_nonzero(~stored_keys)),
        updated=updated_count,
        deleted=_count_rows(files) - updated_count,
        stale=int(np.count_nonzero(~is_applied)),
        files_read=len(read_paths),
    )
    return RowDifference(LocatedKeys(files, read_paths), (new_rows, *completed_rows), report, has_stored_row_ids)


@dataclass(frozen=True)
class _StoredRows:
    """Some columns of the located rows, and the index of each row's key in the batch, as int64[rows]."""

    rows: pa.Table
    keys: Longs
    order_column: Field | None
    """The precombine column, by which the latest of several rows with the same key is selected, or None."""

    @staticmethod
    def read(
        source_table: OpenTable, files: Sequence[MatchedRows], names: Sequence[str], precombine_field: Field | None
    ) -> _StoredRows:
        read_plan = plan_read(source_table, names, TRUE)
        batches, keys = [], []
        batches_by_file = read_chosen(
            read_plan, source_table.storage, [(rows.task, rows.positions) for rows in files], source_table.keys
        )
        for rows, file_batches in zip(files, batches_by_file, strict=True):
            if sum(batch.num_rows for batch in file_batches) != len(rows.positions):
                raise Unreadable(rows.task.path, "the file does not have all rows that an index has located in it")
            batches.extend(file_batches)
            keys.append(rows.keys)
        return _StoredRows(pa.Table.from_batches(batches, read_plan.arrow), np.concatenate(keys), precombine_field)

    def find_later_rows(self, batch: KeyedBatch) -> Mask:
        """Return for each key whether a stored row is later than the new row, as bool[keys].

        New and stored rows are ranked together, because only ranks of one ranking can be compared.
        """
        has_later_row = np.zeros(batch.keys.count, dtype=np.bool_)
        if self.order_column is not None:
            values = pa.concat_arrays(
                [read_column(batch.rows, self.order_column), read_column(self.rows, self.order_column)]
            )
            rank = Rank.from_column(values, self.order_column, len(values))
            batch_rank, stored_rank = rank.take(self.keys), rank.take(slice(batch.keys.count, None))
            has_later_row[self.keys[batch_rank.is_before(stored_rank)]] = True
        return has_later_row

    def complete(self, batch: KeyedBatch, wins: Mask, names: Sequence[str]) -> pa.Table:
        """Return the batch's rows that replace stored rows.

        The values of the columns `names` come from the latest stored row of the key.

        Args:
            batch: The new rows.
            wins: Whether the new row of each key is used, as bool[keys].
            names: The columns that the new rows lack.
        """
        stored_indexes = self._latest[wins[self.keys[self._latest]]]
        complete_rows = batch.rows.take(pa.array(self.keys[stored_indexes]))
        stored_columns = self.rows.select(list(names)).take(pa.array(stored_indexes))
        for name in names:
            complete_rows = complete_rows.append_column(stored_columns.field(name), stored_columns[name])
        return complete_rows

    def list_row_ids(self, count: int) -> pa.ChunkedArray:
        """Return the row id of the latest stored row of each key, as int64[count keys].

        The id of a key without a stored row is null.
        """
        places = np.full(count, -1, dtype=np.int64)
        places[self.keys[self._latest]] = self._latest
        return self.rows[ROW_ID_NAME].take(pa.array(places, mask=places < 0))

    @cached_property
    def _latest(self) -> Longs:
        """The position of the latest row of each key, as int64[stored keys]."""
        rank = Rank.from_column(
            None if self.order_column is None else read_column(self.rows, self.order_column),
            self.order_column,
            self.rows.num_rows,
        )
        return select_latest((self.keys,), rank)


# Written files


def write_change(
    client: SeamarkClient,
    difference: RowDifference,
    scope: Expression,
    source_table: OpenTable,
    target: WriteTarget,
    mode: str,
) -> RowChange:
    """Write the files of a change. If an error occurs, delete the written files.

    With copy-on-write, the files with rows to delete are rewritten without these rows. With merge-on-read, delete files
    and files with the new rows are added.

    Args:
        client: The client of the catalog.
        difference: The rows to delete and to add.
        scope: A filter of the rows that were read.
        source_table: The table that was read.
        target: The table with the settings with which new files are written.
        mode: The mode: copy-on-write or merge-on-read.
    """
    files = difference.located.files
    if mode == COPY_ON_WRITE:
        rewrite_target = with_lineage(target) if files and has_lineage(source_table.metadata) else target
        protection = _choose_protection(client, source_table, difference, rewrite_target)
        data = rewrite_files(source_table, target, files, difference.iter_rows(), protection)
        paths = [rows.task.path for rows in files]
        read_paths = difference.located.read.union(rows.task.path for rows in files if not rows.is_whole)
        report = replace(difference.report, files_read=len(read_paths))
        return RowChange(scope, report, data, removed=tuple({"file-path": path} for path in paths))
    protection = _choose_protection(client, source_table, difference, difference.find_rows_target(target))
    deletes = delete_by_position(source_table, target, files)
    with discard_on_error([deletes], target.storage):
        data = difference.write(target, protection)
    return RowChange(scope, difference.report, data, deletes)


def _choose_protection(
    client: SeamarkClient, source_table: OpenTable, difference: RowDifference, target: WriteTarget
) -> FileProtection | None:
    """Return the encryption of the files with new rows.

    It is the encryption of the files with the replaced rows or, if no rows are replaced, of the first files of a
    plan of the table. If only some of these files are encrypted, it is the encryption of the encrypted files. The
    result is None if none of them is encrypted, if there are no keys, or if there are no new rows.

    Raises:
        Unwritable: The files are encrypted in different ways.
        Unreadable: A file cannot be read.
    """
    if source_table.keys is None or not difference.new:
        return None
    tasks = [rows.task for rows in difference.located.files] or list(
        islice(plan(client, source_table), _PROTECTION_SAMPLE_FILES)
    )
    protections = [
        protection for protection, _ in divide_by_protection(tasks, target, source_table.keys) if protection is not None
    ]
    if len(protections) > 1:
        raise Unwritable(
            "the rows are in files that are encrypted in different ways, "
            "so the encryption of the new rows is uncertain; change the rows of each file with a separate call"
        )
    return protections[0] if protections else None


def delete_by_position(source_table: OpenTable, target: WriteTarget, files: Sequence[MatchedRows]) -> WrittenDeletes:
    """Delete these rows by position (merge-on-read). A data file without remaining rows is removed from the table."""
    deleted_rows = [
        DeletedRows(
            rows.task.path,
            rows.task.spec_id,
            rows.task.file.get("partition") or (),
            rows.positions,
            rows.task.deletes,
            rows.task.records,
        )
        for rows in files
    ]
    return (
        write_deletes(target, deleted_rows, Deletes(source_table.storage, source_table.metadata))
        if deleted_rows
        else WrittenDeletes()
    )
