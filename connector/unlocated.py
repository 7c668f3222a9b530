"""Upserts and deletes by key of rows that nobody looks for: equality deletes, and the new rows, in one commit.

    upsert_unlocated(client, "db.t", rows, keys=["id"])      a row for each key, in the place of whatever has it
    delete_unlocated(client, "db.t", keys=rows)              rows with these keys go

Nothing of the table is read, neither index nor data file, so that a batch costs the same on a table of any size, and
says nothing about what was there. Every reader pays instead: it holds the rows of each file that the deletes apply to
against their keys, until a compaction has applied them. PyIceberg does not read such tables.

The rule it keeps: the rows that go are those with one of the keys in every file of a lower sequence number; the new
rows have the deletes' own, and stay. An equality delete file is either of one partition, and then for files of this
very partition spec alone, or of a spec without fields, and then for all files. So where the table has a spec without
fields there are deletes by this one; else by all of its specs, which have to be by columns of the key.

Such a commit collides with nothing but a spec that it does not know, by which somebody has written in the meantime (a
resize of buckets); then it is done anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from connector.client import Name, SeamarkClient
from connector.deleting import WrittenDeletes, is_void, write_equality_deletes
from connector.latest import Batch, batch_of
from connector.parquet.casting import Unwritable
from connector.planning import OpenTable
from connector.target import WriteTarget
from connector.upserts import ATTEMPTS, NOTHING, Change, Report, committed
from connector.writing import Rows, WrittenFiles, batches_of, write_batches
from metaserver.iceberg.expressions import TRUE
from metaserver.iceberg.metadata import TableMetadata
from metaserver.iceberg.partition import PartitionSpec
from metaserver.iceberg.snapshot import MAIN


def upsert_unlocated(
    client: SeamarkClient,
    table: Name,
    rows: Rows,
    *,
    keys: Sequence[str],
    branch: str = MAIN,
    producer: tuple[str, int] | None = None,
    summary: Mapping[str, str] | None = None,
    attempts: int = ATTEMPTS,
) -> Report:
    """Puts each row in the place of those with its key, or adds it; of rows with one key the last given counts.

    Of the report only the numbers of files written and of attempts, the snapshot and `duplicate` are told. Unwritable
    for rows that do not fit the table, keys of floating point numbers, tables of version 1 and those with a partition
    spec by other columns than the key's. Otherwise as `connector.upserts.upsert`.
    """
    given = list(batches_of(rows))

    def prepared(opened: OpenTable, target: WriteTarget) -> Change:
        batch = batch_of(given, opened.schema, keys)
        return _written(batch, opened, target, batch.rows.to_batches())

    return committed(client, table, prepared, branch=branch, producer=producer, summary=summary, attempts=attempts)


def delete_unlocated(
    client: SeamarkClient,
    table: Name,
    *,
    keys: Rows,
    branch: str = MAIN,
    producer: tuple[str, int] | None = None,
    summary: Mapping[str, str] | None = None,
    attempts: int = ATTEMPTS,
) -> Report:
    """Deletes the rows that have one of these keys, whose columns are all columns of `keys`. As `upsert_unlocated`."""
    given = list(batches_of(keys))

    def prepared(opened: OpenTable, target: WriteTarget) -> Change:
        if not given:
            return NOTHING
        return _written(batch_of(given, opened.schema, given[0].schema.names), opened, target, ())

    return committed(client, table, prepared, branch=branch, producer=producer, summary=summary, attempts=attempts)


class _Blind(Change):
    """It has read nothing; the snapshot tells the server which partition specs were known."""

    def body(self, opened: OpenTable) -> dict[str, Any]:
        said = super().body(opened)
        del said["scope"]
        return said


def _written(batch: Batch, opened: OpenTable, target: WriteTarget, new: Sequence[pa.RecordBatch]) -> Change:
    if not batch.keys.count:
        return NOTHING
    columns = [field.name for field in batch.keys.fields]
    keys = batch.rows.select(columns)
    deletes = WrittenDeletes()
    data = WrittenFiles()
    try:
        for spec in _specs(opened.metadata, columns):
            more = write_equality_deletes(target, keys, columns, spec=spec)
            deletes = WrittenDeletes((*deletes.files, *more.files))
        data = write_batches(target, new)
    except BaseException:
        deletes.discard(target.storage)
        raise
    return _Blind(TRUE, Report(), data, deletes)


def _specs(metadata: TableMetadata, columns: Sequence[str]) -> list[PartitionSpec]:
    """By which deletes of these keys meet every file of the table. Unwritable where there are none such.

    A field that is void splits nothing: a spec of such fields alone is without fields, to every reader."""
    ids = {field.id for field in metadata.current_schema.fields if field.name in columns}
    parts = [(spec, part) for spec in metadata.partition_specs for part in spec.fields if not is_void(part)]
    foreign = [(spec, part) for spec, part in parts if not ids.issuperset(part.sources)]
    by_parts = {spec.spec_id for spec, _ in parts}
    if plain := [spec for spec in metadata.partition_specs if spec.spec_id not in by_parts]:
        return [min(plain, key=lambda spec: len(spec.fields))]
    if foreign:
        spec, part = foreign[0]
        raise Unwritable(
            f"partition spec {spec.spec_id} of the table is by {part.name}, which is not of the key "
            f"{', '.join(columns)}: in which partitions rows go is not known, and the table has no spec without fields "
            "for deletes in all of them; let rows be located, or have its columns in the key"
        )
    return list(metadata.partition_specs)
