"""Upserts and deletes by key: what a batch of rows changes, at a cost that follows the batch.

    upsert(client, "db.t", rows, keys=["id"], precombine="ts")        a row for each key: in the place of the stored one
    upsert(client, "db.t", rows, keys=["id"], columns=["price"])      of stored rows, only these columns
    delete(client, "db.t", keys=rows)                                 rows with these keys go
    delete(client, "db.t", where="country = 'FR'")                    rows that match go
    upsert(client, "db.t", rows, keys=["id"], way="equality")         … of which nothing is looked up (`unlocated.py`)

Rows are located in one snapshot (`locating.py`). Merge-on-read marks them as deleted and appends the new ones;
copy-on-write writes the files that hold them anew. Either is one commit, which says what was read, so the server
refuses it where somebody has changed one of these rows since, or written another row with one of the keys: then all is
done anew from what stands, a bounded number of times. So the table is always as if upserts had come one by one.

The rule it keeps: nothing is visible before the commit, and files are deleted only where no snapshot has
them, nor ever will.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec import UNSET, UnsetType

from seamark.connector.arrow.casting import Unwritable
from seamark.connector.client.client import Name, SeamarkClient
from seamark.connector.client.commits import Producer
from seamark.connector.read.deleted_rows import Deletes
from seamark.connector.read.lineage import NAMES, ROW_ID_NAME, has_lineage
from seamark.connector.read.scans import TaskReader, bound_filter, wanted_of
from seamark.connector.read.tables import OpenTable, plan
from seamark.connector.write.appends import Rows, WrittenFiles, batches_of, write_batches
from seamark.connector.write.delete_files import DeletedRows, WrittenDeletes, write_deletes
from seamark.connector.write.equality_upserts import EQUALITY, check_unlocated, unlocated
from seamark.connector.write.latest_rows import Batch, Rank, batch_of, column_of, latest
from seamark.connector.write.read_conditions import check_unchanged
from seamark.connector.write.rewrites import rewritten
from seamark.connector.write.row_changes import ATTEMPTS, NOTHING, Report, RowChange, committed
from seamark.connector.write.row_locations import RANGES_MAX, WAYS, BatchKeys, FoundRows, LocatedKeys, key_names, locate
from seamark.connector.write.target import WriteTarget, with_lineage
from seamark.metaserver.iceberg.expressions.expression import TRUE, Expression
from seamark.metaserver.iceberg.files.parquet import Unreadable
from seamark.metaserver.iceberg.metadata.snapshot import MAIN
from seamark.metaserver.iceberg.types.schema import Field, Schema

Mask = npt.NDArray[np.bool_]
Longs = npt.NDArray[np.int64]

MERGE_ON_READ, COPY_ON_WRITE = "merge-on-read", "copy-on-write"
MODES = (MERGE_ON_READ, COPY_ON_WRITE)
_UPSERT_MODES = ("write.merge.mode", "write.update.mode")
_DELETE_MODES = ("write.delete.mode",)
_SCOPE_VALUES_MAX = 1_000
"""Keys that a commit names one by one as what was read; of more it names ranges and buckets."""


def upsert(
    client: SeamarkClient,
    table: Name,
    rows: Rows,
    *,
    keys: Sequence[str],
    precombine: str | None = None,
    columns: Sequence[str] | None = None,
    mode: str | None = None,
    way: str | None = None,
    read_snapshot_id: int | UnsetType | None = UNSET,
    branch: str = MAIN,
    producer: Producer | None = None,
    summary: Mapping[str, str] | None = None,
    attempts: int = ATTEMPTS,
) -> Report:
    """Puts each row in the place of those with its key, or adds it. The rows are held in memory.

    Of rows with one key the latest by `precombine` counts, the last of several such, null before all others; a stored
    row that is later stays. With `columns` only these are taken from the rows where a row is stored, beside the key and
    `precombine`. `mode` is by default the table's `write.merge.mode` or `write.update.mode`, else copy-on-write; `way`
    is how rows are located (`locating.WAYS`), by default chosen; `equality` locates none: the change is merge-on-read
    whatever the table says, there are neither `columns` nor `precombine`, and of the report only files, attempts,
    snapshot and `duplicate` are told.

    `read_snapshot_id` makes it a read-modify-write: Conflict, and nothing is changed, where a row with one of the keys
    has changed since that snapshot, None for a table that had none: has other values, is gone or is new.

    Unwritable for rows that do not fit the table or have no key, and for what `equality` cannot say; Refused with
    status 409 where others were faster in all attempts; Unreadable for a file that is broken. `producer`, and what is
    not known after an error, are as with `append`.
    """
    check_names(keys, columns)
    checked(mode, way, precombine, columns, read_snapshot_id)
    given = list(batches_of(rows))

    def prepared(opened: OpenTable, target: WriteTarget) -> RowChange:
        batch = batch_of(given, opened.schema, keys, precombine, columns)
        if way == EQUALITY:
            return unlocated(batch, opened, target)
        how = mode_of(mode, target)
        check_read(client, opened, batch, read_snapshot_id, way)
        found = differing(client, opened, batch, way, how)
        return _written(found, scope_of(batch.keys, opened), opened, target, how)

    more: dict[str, Any] = {"branch": branch, "producer": producer, "summary": summary, "attempts": attempts}
    return committed(client, table, prepared, history=read_snapshot_id is not UNSET, **more)


def check_read(
    client: SeamarkClient,
    opened: OpenTable,
    batch: Batch,
    read_snapshot_id: int | UnsetType | None,
    way: str | None,
) -> None:
    """Conflict where rows of the batch's keys have changed since a snapshot, where one is given."""
    if read_snapshot_id is not UNSET:
        check_unchanged(client, opened, batch.keys, read_snapshot_id, way)


def delete(
    client: SeamarkClient,
    table: Name,
    *,
    keys: Rows | None = None,
    key: Sequence[str] | None = None,
    where: str | Mapping[str, Any] | None = None,
    mode: str | None = None,
    way: str | None = None,
    read_snapshot_id: int | UnsetType | None = UNSET,
    branch: str = MAIN,
    producer: Producer | None = None,
    summary: Mapping[str, str] | None = None,
    attempts: int = ATTEMPTS,
) -> Report:
    """Deletes the rows that have one of these keys; or those that match a predicate, in SQL or as an Iceberg expression
    in JSON. `mode` is by default the table's `write.delete.mode`. Otherwise as `upsert`.

    `key` names the columns of `keys` by which rows go: by default the table's identifier fields, else the only column
    that `keys` has. Its other columns do not count. Unwritable where there is no telling, or a column of the key is not
    there."""
    if (keys is None) == (where is None):
        raise ValueError("say which rows are to go, by keys or by a predicate (where)")
    if where is not None and (key is not None or read_snapshot_id is not UNSET):
        raise ValueError("key and read_snapshot_id are of a delete by keys, not by a predicate (where)")
    check_names(key, None)
    if way == EQUALITY and keys is None:
        raise ValueError(f"by way of {EQUALITY!r} rows go by keys, not by a predicate (where)")
    checked(mode, way, read_snapshot_id=read_snapshot_id)
    given = None if keys is None else list(batches_of(keys))

    def prepared(opened: OpenTable, target: WriteTarget) -> RowChange:
        if given is None:
            scope = bound_filter(where, opened)
            found = _without(_matching(client, opened, scope))
        elif not given:
            return NOTHING
        else:
            batch = keys_of_rows(given, opened.schema, key)
            if way == EQUALITY:
                return unlocated(batch, opened, target, deletes=True)
            check_read(client, opened, batch, read_snapshot_id, way)
            scope, found = scope_of(batch.keys, opened), without(client, opened, batch, way)
        return _written(found, scope, opened, target, mode_of(mode, target, deletes=True))

    more: dict[str, Any] = {"branch": branch, "producer": producer, "summary": summary, "attempts": attempts}
    return committed(client, table, prepared, history=read_snapshot_id is not UNSET, **more)


def keys_of_rows(given: Sequence[pa.RecordBatch], schema: Schema, key: Sequence[str] | None) -> Batch:
    """The key's columns of the rows. Unwritable as for `delete`."""
    for one in given:
        names = key_names(schema, key, one.schema.names)
    return batch_of([one.select(names) for one in given], schema, names)


def check_names(keys: Sequence[str] | None, columns: Sequence[str] | None) -> None:
    """ValueError for one name, whose letters would be taken for names."""
    if isinstance(keys, str) or isinstance(columns, str):
        raise ValueError("keys and columns are lists of names")


def checked(
    mode: str | None,
    way: str | None,
    precombine: str | None = None,
    columns: Sequence[str] | None = None,
    read_snapshot_id: int | UnsetType | None = UNSET,
) -> None:
    """ValueError for what there is not, and what makes no sense together."""
    if mode is not None and mode.lower() not in MODES:
        raise ValueError(f"mode is {mode!r}; it may be {' or '.join(MODES)}")
    if way == EQUALITY and read_snapshot_id is not UNSET:
        raise ValueError(
            f"read_snapshot_id needs the stored rows, of which nothing is looked up by way of {EQUALITY!r}"
        )
    if way == EQUALITY:
        check_unlocated(mode, precombine, columns)
    elif way is not None and way not in WAYS:
        raise ValueError(f"way is {way!r}; rows are located by {' or '.join(WAYS)}, or not at all by {EQUALITY}")


def mode_of(given: str | None, target: WriteTarget, *, deletes: bool = False) -> str:
    """As given, else as the table has it. Unwritable where that is none."""
    properties = _DELETE_MODES if deletes else _UPSERT_MODES
    found = given or next((target.properties[one] for one in properties if target.properties.get(one)), COPY_ON_WRITE)
    if found.lower() not in MODES:
        raise Unwritable(f"{properties[0]} is {found!r}; it may be {' or '.join(MODES)}")
    return found.lower()


# What changes


@dataclass(frozen=True)
class Difference:
    """Rows that go, and those that come; of the report what is known before any file is written."""

    located: LocatedKeys
    new: tuple[pa.Table, ...]
    report: Report
    tracked: bool = False
    """Whether new rows have the row ids of those in whose place they come, beside the table's columns."""

    def rows(self) -> Iterator[pa.RecordBatch]:
        for one in self.new:
            yield from one.to_batches()

    def written(self, target: WriteTarget) -> WrittenFiles:
        """The rows that come, alone."""
        return write_batches(with_lineage(target) if self.tracked else target, self.rows())


def scope_of(keys: BatchKeys, opened: OpenTable, parts: int = 1) -> Expression:
    """What a commit of these keys has read; shorter where it has so many parts like this."""
    specs = opened.metadata.partition_specs
    return keys.holding(_SCOPE_VALUES_MAX // parts, specs, max(1, RANGES_MAX // parts))


def without(client: SeamarkClient, opened: OpenTable, batch: Batch, way: str | None) -> Difference:
    """The table without the rows that have the keys of the batch."""
    return _without(locate(client, opened, batch.keys, way))


def _without(located: LocatedKeys) -> Difference:
    return Difference(located, (), Report(deleted=_rows(located.files), files_read=len(located.read)))


def _rows(files: Iterable[FoundRows]) -> int:
    return sum(len(one.positions) for one in files)


def _matching(client: SeamarkClient, opened: OpenTable, where: Expression) -> LocatedKeys:
    """The rows that a predicate is true for."""
    reader = TaskReader(wanted_of(opened, (), where, positions=True), opened.storage)
    files, read = [], set()
    for task in plan(client, opened, where):
        read.add(task.path)
        positions = [batch.column(0).to_numpy() for batch in reader.read(task)]
        if positions:
            found = np.concatenate(positions)
            files.append(FoundRows(task, found, np.zeros(len(found), dtype=np.int64)))
    return LocatedKeys(tuple(files), frozenset(read))


def differing(client: SeamarkClient, opened: OpenTable, batch: Batch, way: str | None, mode: str) -> Difference:
    """The table with the rows of the batch in the place of those that have their keys.

    They keep the row ids of those, as a column `_row_id`, where files are to be written anew or anything of the stored
    rows is read; else they are new rows, as with equality deletes and where the table has a column of that name.
    """
    located = locate(client, opened, batch.keys, way)
    there = np.zeros(batch.keys.count, dtype=np.bool_)
    for one in located.files:
        there[one.keys] = True
    named = batch.rows.column_names
    kept = [one.name for one in opened.schema.fields if one.name not in named] if batch.partial else []
    names = [*kept, *([batch.precombine.name] if batch.precombine is not None else [])]
    tracked = has_lineage(opened.metadata) and (mode == COPY_ON_WRITE or bool(names))
    tracked = tracked and not any(one.name in NAMES for one in opened.schema.fields)
    names = [*names, ROW_ID_NAME] if tracked else names
    wins, read, new = np.ones(len(there), dtype=np.bool_), located.read, batch.rows
    more, numbered = [], False
    if names and located.files:
        stored = _Stored.of(opened, located.files, names, batch.precombine)
        read |= {one.task.path for one in located.files}
        wins = ~stored.later_than(batch)
        if numbered := tracked and bool(wins[stored.keys].any()):
            batch = replace(batch, rows=batch.rows.append_column(ROW_ID_NAME, stored.row_ids(len(there))))
            new = batch.rows
        if kept:
            more = [stored.completed(batch, wins, kept)]
            new = new.filter(pa.array(~there))
    if not more:
        new = new.filter(pa.array(wins))
    files = tuple(found for one in located.files if len((found := one.of(wins)).positions))
    updated = int(np.count_nonzero(wins & there))
    report = Report(
        inserted=int(np.count_nonzero(~there)),
        updated=updated,
        deleted=_rows(files) - updated,
        stale=int(np.count_nonzero(~wins)),
        files_read=len(read),
    )
    return Difference(LocatedKeys(files, read), (new, *more), report, numbered)


@dataclass(frozen=True)
class _Stored:
    """Columns of the located rows, and the number of each row's key, int64[rows]."""

    rows: pa.Table
    keys: Longs
    by: Field | None
    """Of several rows of one key the last by this counts."""

    @staticmethod
    def of(opened: OpenTable, files: Sequence[FoundRows], names: Sequence[str], by: Field | None) -> _Stored:
        wanted = wanted_of(opened, names, TRUE)
        reader = TaskReader(wanted, opened.storage)
        batches, keys = [], []
        for one in files:
            read = list(reader.read(one.task, one.positions))
            if sum(batch.num_rows for batch in read) != len(one.positions):
                raise Unreadable(one.task.path, "it has not all the rows that an index says are live in it")
            batches.extend(read)
            keys.append(one.keys)
        return _Stored(pa.Table.from_batches(batches, wanted.arrow), np.concatenate(keys), by)

    def later_than(self, batch: Batch) -> Mask:
        """bool[keys]: those of which a stored row is later than the one given."""
        found = np.zeros(batch.keys.count, dtype=np.bool_)
        if self.by is not None:
            both = pa.concat_arrays([column_of(batch.rows, self.by), column_of(self.rows, self.by)])
            rank = Rank.of(both, self.by, len(both))
            ours, theirs = rank.take(self.keys), rank.take(slice(batch.keys.count, None))
            found[self.keys[ours.is_before(theirs)]] = True
        return found

    def completed(self, batch: Batch, wins: Mask, kept: Sequence[str]) -> pa.Table:
        """The rows of the batch that win, of keys that are stored, with the `kept` columns of the latest stored row."""
        chosen = self._latest[wins[self.keys[self._latest]]]
        made = batch.rows.take(pa.array(self.keys[chosen]))
        rest = self.rows.select(list(kept)).take(pa.array(chosen))
        for name in kept:
            made = made.append_column(rest.field(name), rest[name])
        return made

    def row_ids(self, count: int) -> pa.ChunkedArray:
        """int64[count keys]: that of the latest stored row; null where none is stored."""
        places = np.full(count, -1, dtype=np.int64)
        places[self.keys[self._latest]] = self._latest
        return self.rows[ROW_ID_NAME].take(pa.array(places, mask=places < 0))

    @cached_property
    def _latest(self) -> Longs:
        """int64[stored keys]: of each key's rows the latest."""
        rank = Rank.of(None if self.by is None else column_of(self.rows, self.by), self.by, self.rows.num_rows)
        return latest((self.keys,), rank)


# What is written


def _written(found: Difference, scope: Expression, opened: OpenTable, target: WriteTarget, mode: str) -> RowChange:
    files = found.located.files
    if mode == COPY_ON_WRITE:
        data = rewritten(opened, target, files, found.rows())
        paths = [one.task.path for one in files]
        read = found.located.read.union(one.task.path for one in files if not one.is_whole)
        report = replace(found.report, files_read=len(read))
        return RowChange(scope, report, data, removed=tuple({"file-path": path} for path in paths))
    deletes = marked(opened, target, files)
    try:
        data = found.written(target)
    except BaseException:
        deletes.discard(target.storage)
        raise
    return RowChange(scope, found.report, data, deletes)


def marked(opened: OpenTable, target: WriteTarget, files: Sequence[FoundRows]) -> WrittenDeletes:
    """Merge-on-read: these rows deleted by position, and with the last of its rows the file."""
    gone = [
        DeletedRows(
            one.task.path,
            one.task.spec_id,
            one.task.file.get("partition") or (),
            one.positions,
            one.task.deletes,
            one.task.records,
        )
        for one in files
    ]
    return write_deletes(target, gone, Deletes(opened.storage, opened.metadata)) if gone else WrittenDeletes()
