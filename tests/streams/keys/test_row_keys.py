"""Tests of the rows of stream tables whose key changes.

Each row replaces others by the key that the table had at its arrival.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from decimal import Decimal
from random import Random
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

from seamark.connector.streams import row_files
from seamark.formats.iceberg.files.parquet import FIELD_ID
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.new_table import build_table_metadata
from seamark.formats.iceberg.metadata.updates import apply_updates, read_updates
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.log.port import Batch
from seamark.metaserver.streams.incoming.prepared_rows import RowPreparation
from seamark.metaserver.streams.keys import KEY, AcceptedKeys, find_key_columns, identify_key
from seamark.metaserver.streams.row_files import ImportedRowFiles, RowSlice
from tests.seeds import examples, first_seed

FILES = ImportedRowFiles(row_files.__name__)
NAMES = ("a-b", "a_x2Db", "a b", "1x")
"""Column names that Iceberg changes in files. The first name would be changed to the second."""
VALUE, PRICE, DAY = 5, 6, 7
"""The ids of the other columns. The columns of `NAMES` have the ids from 1 on."""
PROMOTIONS = {"int": ("long",), "decimal(9, 2)": ("decimal(20, 2)",), "date": ("timestamp", "timestamp_ns")}
LATE_DAY = "9999-12-31"
"""A day beyond the range of `timestamp_ns`."""


def create_table(key: str) -> TableMetadata:
    types_by_name = dict(zip(NAMES, ("int", "long", "string", "long"), strict=True))
    types_by_name |= {"value": "string", "price": "decimal(9, 2)", "day": "date"}
    fields = [
        {"id": number, "name": name, "type": kind, "required": name == "value"}
        for number, (name, kind) in enumerate(types_by_name.items(), 1)
    ]
    return build_table_metadata(
        uuid="a3a0e2c6-5d3d-4ff5-8d3c-0f6d8f0f4f5e",
        location="file:///t",
        schema={"type": "struct", "fields": fields},
        properties={KEY: key, "format-version": "3"},
        now_ms=1,
    )


def change_table(metadata: TableMetadata, *updates: dict[str, Any]) -> TableMetadata:
    return apply_updates(metadata, read_updates(updates), now_ms=metadata.last_updated_ms + 1)


def change_fields(metadata: TableMetadata, column_id: int, **changes: Any) -> TableMetadata:
    """Return the table after a column got another name or type. Without `changes`, the column is dropped."""
    schema = metadata.current_schema
    fields = [
        msgspec.to_builtins(msgspec.structs.replace(column, **(changes if column.id == column_id else {})))
        for column in schema.fields
        if changes or column.id != column_id
    ]
    return change_table(
        metadata,
        {"action": "add-schema", "schema": {"type": "struct", "fields": fields}},
        {"action": "set-current-schema", "schema-id": -1},
    )


@dataclass
class Log:
    """The batches of each shard, and the rows in the order of the keys that the table had.

    Attributes:
        groups: (column ids, rows) for each key that the table had. A row has its values by column id, and True if it is
            a delete.
    """

    shards: int
    batches: dict[int, list[Batch]] = field(default_factory=dict)
    groups: list[tuple[tuple[int, ...], list[tuple[dict[int, Any], bool]]]] = field(default_factory=list)

    def begin_group(self, metadata: TableMetadata) -> None:
        ids = {column.name: column.id for column in metadata.current_schema.fields}
        self.groups.append((tuple(ids[name] for name in find_key_columns(metadata)), []))

    def append(self, metadata: TableMetadata, group: int, rows: list[dict[int, Any]], deletes: list[bool]) -> None:
        names = {field.id: field.name for field in metadata.current_schema.fields}
        json_rows = [
            {names[column]: value for column, value in row.items() if column in names}
            | ({"_op": "delete"} if is_delete else {})
            for row, is_delete in zip(rows, deletes, strict=True)
        ]
        batches = RowPreparation(metadata, FILES, self.shards).prepare_json(json_rows).batches
        assert batches is not None
        for shard, batch in ({0: batches} if isinstance(batches, Batch) else batches).items():
            self.batches.setdefault(shard, []).append(batch)
        stored_rows = [{column: value for column, value in row.items() if column in names} for row in rows]
        self.groups[group][1].extend(zip(stored_rows, deletes, strict=True))

    def list_slices(self) -> list[RowSlice]:
        return [
            RowSlice(batch.payload, 0, batch.rows, batch.kinds)
            for _, batches in sorted(self.batches.items())
            for batch in batches
        ]

    def replay(self) -> list[str]:
        """Return the values of the rows that remain after all rows are applied."""
        rows: list[dict[int, Any]] = []
        for key, changes in self.groups:
            for row, is_delete in changes:
                values = [row.get(column) for column in key]
                if key and None not in values:
                    rows = [other_row for other_row in rows if [other_row.get(column) for column in key] != values]
                if not is_delete:
                    rows.append(row)
        return sorted(row[VALUE] for row in rows)


def read_values(files: list[Any]) -> list[str]:
    values: list[str] = []
    for file in files:
        table = pq.read_table(io.BytesIO(file.data))
        index = next(
            index for index, column in enumerate(table.schema) if column.metadata[FIELD_ID] == str(VALUE).encode()
        )
        values += table.column(index).to_pylist()
    return sorted(values)


def read_flushed_values(log: Log, metadata: TableMetadata) -> list[str]:
    """Return the values in the files that a flush of the log would write.

    If the metadata do not allow a key, the rows are written without a key.
    """
    try:
        key = find_key_columns(metadata)
    except BadRequest:
        key = ()
    slices = log.list_slices()
    # Rows have kinds (upsert or delete) if they were appended to a table with a key.
    if any(row_slice.kinds for row_slice in slices):
        return read_values(FILES.encode_keyed(slices, metadata, folder=None, key=key)[0])
    return read_values(FILES.encode(slices, metadata, folder=None))


def choose_row(rng: Random, number: int) -> dict[int, Any]:
    return {
        1: rng.randrange(4),
        2: rng.randrange(4),
        3: rng.choice("xyz"),
        4: rng.randrange(4),
        VALUE: f"v{number}",
        PRICE: f"{rng.randrange(4)}.50",
        DAY: f"2026-01-0{rng.randrange(1, 5)}",
    }


@pytest.mark.parametrize("seed", range(first_seed(), first_seed() + examples(30, number_in_ordinary_runs=10)))
def test_rows_replace_other_rows_by_the_key_at_their_arrival(seed: int) -> None:
    """Rows are appended while the key, the schema and the properties of the table change, and flushed at the end.

    A group has the rows that were appended with the same key. The flush must give the same rows as a replay of all
    groups.
    """
    rng = Random(seed)
    keys = ("a-b", "a_x2Db", "a b", "1x", "price", "day", "a-b,a_x2Db", "1x, a b", "")
    metadata = create_table(rng.choice(keys))
    log = Log(rng.choice((1, 3)))
    log.begin_group(metadata)
    history = [(metadata, 0)]
    number = 0
    for _ in range(rng.randint(4, 25)):
        step = rng.choice(("append", "append", "append", "key", "promote", "rename", "schema", "property"))
        key_before = identify_key(metadata)
        fields_by_name = {column.name: column for column in metadata.current_schema.fields}
        if step == "key":
            possible_keys = [
                name for name in keys if all(part.strip() in fields_by_name for part in name.split(",") if part.strip())
            ]
            metadata = change_table(metadata, {"action": "set-properties", "updates": {KEY: rng.choice(possible_keys)}})
        elif step == "promote":
            changed_field = rng.choice(
                [column for column in fields_by_name.values() if column.type in PROMOTIONS] or [None]
            )
            if changed_field is not None:
                metadata = change_fields(metadata, changed_field.id, type=rng.choice(PROMOTIONS[changed_field.type]))
        elif step == "rename":
            key_names = {name.strip() for name in metadata.properties[KEY].split(",")}
            changed_field = rng.choice(
                [column for column in fields_by_name.values() if column.name not in key_names and column.id < VALUE]
            )
            metadata = change_fields(metadata, changed_field.id, name=f"{changed_field.name}_")
        elif step == "schema":
            key = {name.strip() for name in metadata.properties[KEY].split(",") if name.strip()}
            matching_schemas = [
                schema for schema in metadata.schemas if key <= {column.name for column in schema.fields}
            ]
            metadata = change_table(
                metadata, {"action": "set-current-schema", "schema-id": rng.choice(matching_schemas).id}
            )
        elif step == "property":
            metadata = change_table(metadata, {"action": "set-properties", "updates": {"p": str(number)}})
        else:
            # Some appends use metadata from before a change of the key.
            used_metadata, group = rng.choice(history[-3:]) if rng.random() < 0.3 else (metadata, len(log.groups) - 1)
            rows = [choose_row(rng, number := number + 1) for _ in range(rng.randint(1, 6))]
            day_type = used_metadata.current_schema.fields[DAY - 1].type
            if day_type != "timestamp_ns":
                rows = [row | {DAY: LATE_DAY if rng.random() < 0.2 else row[DAY]} for row in rows]
            if day_type != "date":
                rows = [row | {DAY: f"{row[DAY]}T00:00:00"} for row in rows]
            deletes = [bool(find_key_columns(used_metadata)) and rng.random() < 0.2 for _ in rows]
            log.append(used_metadata, group, rows, deletes)
        if identify_key(metadata) != key_before:
            log.begin_group(metadata)
        if history[-1][0] is not metadata:
            history.append((metadata, len(log.groups) - 1))
    for _, changes in log.groups:
        for row, _ in changes:
            row |= {PRICE: Decimal(row[PRICE]), DAY: row[DAY][:10]}
    if log.batches:
        assert read_flushed_values(log, metadata) == log.replay()


def test_column_that_was_dropped_is_still_the_key_of_its_rows() -> None:
    metadata = create_table("a-b")
    log = Log(3)
    log.begin_group(metadata)
    log.append(
        metadata, 0, [{1: key, VALUE: f"{round_number}.{key}"} for round_number in "ab" for key in (1, 2)], 4 * [False]
    )
    log.append(metadata, 0, [{1: 2}], [True])
    metadata_without_column = change_fields(
        change_table(metadata, {"action": "set-properties", "updates": {KEY: ""}}), 1
    )
    assert read_flushed_values(log, metadata_without_column) == ["b.1"]


def test_dates_beyond_the_range_of_a_promoted_key_are_not_replaced() -> None:
    metadata = create_table("day")
    date_schema = metadata.current_schema_id
    log = Log(1)
    log.begin_group(metadata)
    days = ("9999-12-31", "2026-01-02", "2026-01-03")
    log.append(metadata, 0, [{DAY: day, VALUE: day} for day in days], 3 * [False])
    promoted_metadata = change_fields(metadata, DAY, type="timestamp_ns")
    log.begin_group(promoted_metadata)
    log.append(promoted_metadata, 1, [{DAY: "2026-01-02T00:00:00", VALUE: "new"}], [False])
    assert read_flushed_values(log, promoted_metadata) == ["2026-01-03", "9999-12-31", "new"]
    restored_metadata = change_table(promoted_metadata, {"action": "set-current-schema", "schema-id": date_schema})
    log.begin_group(restored_metadata)
    log.append(restored_metadata, 2, [{DAY: "9999-12-31", VALUE: "again"}], [False])
    assert read_flushed_values(log, restored_metadata) == ["2026-01-03", "again", "new"]


@pytest.mark.parametrize("key", ["a-b", ""])  # The column a-b is the key, or the table has no key.
def test_rows_of_a_schema_that_the_table_has_removed_are_flushed_with_the_current_schema(key: str) -> None:
    metadata = create_table(key)
    log = Log(3)
    log.begin_group(metadata)
    old_rows = [{1: number, VALUE: f"a{number}"} for number in (1, 1, 2, 3)]
    log.append(metadata, 0, old_rows, deletes=4 * [False])
    if key:
        log.append(metadata, 0, [{1: 3}], deletes=[True])
    changed_metadata = change_fields(change_fields(metadata, 1, type="long"), PRICE)
    removed_schema_ids = [
        schema.id for schema in changed_metadata.schemas if schema.id != changed_metadata.current_schema_id
    ]
    changed_metadata = change_table(changed_metadata, {"action": "remove-schemas", "schema-ids": removed_schema_ids})
    log.append(changed_metadata, 0, [{1: 2, VALUE: "b2"}], deletes=[False])
    assert read_flushed_values(log, changed_metadata) == log.replay()


def test_rows_wait_with_an_error_if_their_key_column_and_schema_were_removed() -> None:
    metadata = create_table("a-b")
    log = Log(1)
    log.begin_group(metadata)
    log.append(metadata, 0, [{1: 1, VALUE: "a"}], [False])
    changed_metadata = change_fields(change_table(metadata, {"action": "set-properties", "updates": {KEY: ""}}), 1)
    changed_metadata = change_table(
        changed_metadata, {"action": "remove-schemas", "schema-ids": [metadata.current_schema_id]}
    )
    with pytest.raises(BadRequest, match=r"the key column with the id 1 was dropped; add a schema with the columns"):
        read_flushed_values(log, changed_metadata)


def test_rows_without_a_partition_spec_for_their_schema_are_flushed_with_the_current_schema() -> None:
    metadata = create_table("")
    log = Log(1)
    log.begin_group(metadata)
    log.append(metadata, 0, [{1: 1, VALUE: "a"}], [False])
    fields = [msgspec.to_builtins(column) for column in metadata.current_schema.fields]
    changed_metadata = change_table(
        metadata,
        {
            "action": "add-schema",
            "schema": {
                "type": "struct",
                "fields": [*fields, {"id": 8, "name": "town", "type": "string", "required": False}],
            },
        },
        {"action": "set-current-schema", "schema-id": -1},
        {"action": "add-spec", "spec": {"fields": [{"source-id": 8, "transform": "identity", "name": "town"}]}},
        {"action": "set-default-spec", "spec-id": -1},
        {"action": "remove-partition-specs", "spec-ids": [metadata.default_spec.spec_id]},
    )
    assert read_flushed_values(log, changed_metadata) == ["a"]


@pytest.mark.parametrize("kind", ["timestamp", "timestamp_ns"])
def test_rows_of_a_partition_column_that_was_promoted_are_flushed_with_its_new_type(kind: str) -> None:
    created_table = create_table("")
    metadata = change_table(created_table, *build_spec_updates("identity"))
    metadata = change_table(
        metadata, {"action": "remove-partition-specs", "spec-ids": [created_table.default_spec.spec_id]}
    )
    log = Log(1)
    log.begin_group(metadata)
    log.append(metadata, 0, [{DAY: "2026-01-02", VALUE: "a"}], [False])
    promoted_metadata = change_fields(metadata, DAY, type=kind)
    (file,) = FILES.encode(log.list_slices(), promoted_metadata, None)
    assert msgspec.json.decode(file.content_file)["partition"] == ["2026-01-02T00:00:00"]
    assert read_values([file]) == ["a"]


@pytest.mark.parametrize("step", ["spec", "order"])
def test_rows_are_flushed_after_a_transform_of_the_type_to_which_their_column_was_promoted(step: str) -> None:
    metadata = create_table("")
    log = Log(1)
    log.begin_group(metadata)
    log.append(metadata, 0, [{DAY: "9999-12-31", VALUE: "a"}], [False])
    order = {"source-id": DAY, "transform": "hour", "direction": "asc", "null-order": "nulls-first"}
    updates_by_step = {
        "spec": build_spec_updates("hour"),
        "order": (
            {"action": "add-sort-order", "sort-order": {"order-id": 1, "fields": [order]}},
            {"action": "set-default-sort-order", "sort-order-id": -1},
        ),
    }
    promoted_metadata = change_table(change_fields(metadata, DAY, type="timestamp"), *updates_by_step[step])
    assert read_flushed_values(log, promoted_metadata) == ["a"]


def build_spec_updates(transform: str) -> tuple[dict[str, Any], ...]:
    """Return the updates that partition a table by a transform of its day."""
    field = {"source-id": DAY, "transform": transform, "name": "part"}
    return {"action": "add-spec", "spec": {"fields": [field]}}, {"action": "set-default-spec", "spec-id": -1}


def test_delete_does_not_hide_a_missing_value_of_another_row() -> None:
    preparation = RowPreparation(create_table("a-b"), FILES, 1)
    assert preparation.prepare_json([{"a-b": 1, "value": "x"}, {"a-b": 2, "_op": "delete"}]).row_count == 2
    with pytest.raises(
        BadRequest, match=r"column value is required, but 1 of its values are null; the first is in row 1"
    ):
        preparation.prepare_json([{"a-b": 2, "_op": "delete"}, {"a-b": 1}])


def test_append_is_refused_if_the_key_was_changed_in_the_millisecond_of_the_last_update() -> None:
    earlier_metadata = create_table("a-b")
    update = read_updates([{"action": "set-properties", "updates": {KEY: "1x"}}])
    later_metadata = apply_updates(earlier_metadata, update, now_ms=earlier_metadata.last_updated_ms)
    assert later_metadata.last_updated_ms == earlier_metadata.last_updated_ms
    accepted_keys = AcceptedKeys()
    assert accepted_keys.accept("t", "first", earlier_metadata)
    assert not accepted_keys.accept("t", "second", later_metadata)
    # The caller has loaded the table, so this metadata is current.
    accepted_keys.remember_current_key("t", "second", later_metadata)
    assert accepted_keys.accept("t", "second", later_metadata)
    assert not accepted_keys.accept("t", "first", earlier_metadata)
