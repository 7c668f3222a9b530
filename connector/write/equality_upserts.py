"""Upserts and deletes by key of rows that nobody looks for: equality deletes, and the new rows, in one commit.

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

from collections.abc import Sequence

from seamark.connector.arrow.casting import Unwritable
from seamark.connector.read.tables import OpenTable
from seamark.connector.write.appends import WrittenFiles, write_batches
from seamark.connector.write.delete_files import WrittenDeletes, check_equality_deletes, write_equality_deletes
from seamark.connector.write.latest_rows import Batch
from seamark.connector.write.row_changes import NOTHING, Report, RowChange
from seamark.connector.write.target import WriteTarget
from seamark.metaserver.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.iceberg.metadata.partition import PartitionSpec

EQUALITY = "equality"


def check_unlocated(mode: str | None, precombine: str | None, columns: Sequence[str] | None) -> None:
    """ValueError for what would have to read stored rows."""
    for name, given in (("precombine", precombine), ("columns", columns)):
        if given is not None:
            raise ValueError(f"{name} needs the stored rows, which are not looked up by way of {EQUALITY!r}")
    if mode is not None and mode.lower() != "merge-on-read":
        raise ValueError(f"mode is {mode!r}; what is not looked up can only be marked as deleted: merge-on-read")


def check_table(opened: OpenTable, target: WriteTarget, keys: Sequence[str]) -> None:
    """Unwritable where `unlocated` would find it so of any batch."""
    check_equality_deletes(target, keys)
    _specs(opened.metadata, keys)


def unlocated(batch: Batch, opened: OpenTable, target: WriteTarget, *, deletes: bool = False) -> RowChange:
    """The rows of the batch in the place of whatever has their keys; or nothing in their place. Unwritable for keys of
    floating point numbers, tables of version 1 and those with a partition spec by other columns than the key's."""
    if not batch.keys.count:
        return NOTHING
    columns = [field.name for field in batch.keys.fields]
    keys = batch.rows.select(columns)
    gone, data = WrittenDeletes(), WrittenFiles()
    try:
        for spec in _specs(opened.metadata, columns):
            more = write_equality_deletes(target, keys, columns, spec=spec)
            gone = WrittenDeletes((*gone.files, *more.files))
        if not deletes:
            data = write_batches(target, batch.rows.to_batches())
    except BaseException:
        gone.discard(target.storage)
        raise
    return RowChange(None, Report(), data, gone)


def _specs(metadata: TableMetadata, columns: Sequence[str]) -> list[PartitionSpec]:
    """By which deletes of these keys meet every file of the table. Unwritable where there are none such.

    A field that is void splits nothing: a spec of such fields alone is without fields, to every reader."""
    ids = {field.id for field in metadata.current_schema.fields if field.name in columns}
    parts = [(spec, part) for spec in metadata.partition_specs for part in spec.fields if not part.is_void]
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
