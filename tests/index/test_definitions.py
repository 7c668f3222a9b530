"""Tests of index definitions: reading any table properties, and writing one form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.partition import PartitionField, PartitionSpec
from seamark.formats.iceberg.types.schema import Field, Schema
from seamark.formats.index.definitions import (
    DEFINITIONS_MAX,
    IndexDefinition,
    define_index,
    list_bucket_definitions,
    parse_definition,
    read_definitions,
)
from seamark.formats.index.kinds.bloom import FALSE_POSITIVE_PROBABILITY
from seamark.formats.runtime.errors import BadRequest

FIRST_SCHEMA = Schema((Field(1, "id", True, "long"), Field(2, "name", False, "string")), schema_id=0)
RENAMED_SCHEMA = Schema(
    (Field(1, "key", True, "long"), Field(2, "name", False, "string"), Field(3, "id", False, "int")), schema_id=1
)


def build_table(
    properties: dict[str, str], *, schemas: tuple[Schema, ...] = (FIRST_SCHEMA,), specs: tuple[PartitionSpec, ...] = ()
) -> TableMetadata:
    return TableMetadata(
        format_version=2,
        table_uuid="u",
        location="file:///w/t",
        last_updated_ms=0,
        last_column_id=9,
        schemas=schemas,
        current_schema_id=schemas[-1].id,
        partition_specs=specs or (PartitionSpec(0, ()),),
        default_spec_id=0,
        last_partition_id=999,
        sort_orders=(),
        default_sort_order_id=0,
        properties=properties,
    )


def parse_index(text: str, **fields: Any) -> IndexDefinition:
    definitions = read_definitions(build_table({"seamark.index.n": text}, **fields))
    assert not definitions.problems
    return definitions.by_name["n"]


def test_definition_is_equal_after_writing_and_reading_its_property() -> None:
    for definition in (
        define_index("n", "bitmap", ["name"], FIRST_SCHEMA),
        define_index("n", "bloom", ["lower(name)"], FIRST_SCHEMA, parameters={"fpp": 0.001}, state="paused"),
        define_index("n", "record", ["id", "truncate[3](name)"], FIRST_SCHEMA),
    ):
        assert parse_index(definition.property_text) == definition
        assert parse_index(definition.text) == define_index(
            "n", definition.kind, [t.text for t in definition.terms], FIRST_SCHEMA, parameters=definition.parameters
        )
    assert json.loads(define_index("n", "bloom", ["id"], FIRST_SCHEMA, state="paused").property_text) == {
        "kind": "bloom",
        "columns": ["id"],
        "field-ids": [1],
        "fpp": FALSE_POSITIVE_PROBABILITY,
        "state": "paused",
    }


@pytest.mark.parametrize(
    ("text", "equal_definition"),
    [
        ("bitmap(id)", define_index("n", "bitmap", ["id"], FIRST_SCHEMA)),
        (" Bloom ( id ,fpp = 0.001 ) ", define_index("n", "bloom", ["id"], FIRST_SCHEMA, parameters={"fpp": 0.001})),
        (
            "bloom(lower(name), FPP=1e-3)",
            define_index("n", "bloom", ["lower(name)"], FIRST_SCHEMA, parameters={"fpp": 0.001}),
        ),
        ("record(id, bucket[4](name))", define_index("n", "record", ["id", "bucket[4](name)"], FIRST_SCHEMA)),
        ("bitmap(id, state=paused)", define_index("n", "bitmap", ["id"], FIRST_SCHEMA, state="paused")),
        ('{"kind":"bitmap","columns":["id"]}', define_index("n", "bitmap", ["id"], FIRST_SCHEMA)),
    ],
)
def test_definitions_in_the_forms_of_users_are_read(text: str, equal_definition: IndexDefinition) -> None:
    assert parse_index(text) == equal_definition


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "defines no index"),
        ("bitmap", "defines no index"),
        ("btree(id)", "no index kind 'btree'"),
        ("bucket(id)", "the table's partition spec defines indexes of this kind"),
        ("bitmap()", "is not a column"),
        ("bitmap(nope)", "no such column"),
        ("bitmap(id, name)", "on one column, not on 2"),
        ("record(id, id)", "column id is in the index twice"),
        (f"record({', '.join(['id'] * 33)})", "at most 32 columns, not on 33"),
        (
            '{"kind":"cube","columns":["id"],"measures":["count(*)","count(id)","count(*)"]}',
            "count(*) is in the definition",
        ),
        ("bitmap(id, fpp=0.1)", "not 'fpp'"),
        ("bloom(id, depth=3)", "not 'depth'"),
        ("bloom(id, fpp=0)", "between 1e-06 and 0.5"),
        ("bloom(id, fpp=nan)", "between 1e-06"),
        ("bloom(id, fpp=often)", "between 1e-06"),
        ("bloom(id, fpp=0.1, fpp=0.2)", "set twice"),
        ("bitmap(lookup[n.shops@5:1:0:boolean](id))", "the field id 0 states whether a key has a partner"),
        ("bitmap(id, state=asleep)", "enabled or paused"),
        ("bitmap(`id)", "close its backticks and parentheses"),
        ("{", "not JSON"),
        ('{"kind":"bitmap"}', "columns must be a list"),
        ('{"kind":"bitmap","columns":[1]}', "columns must be a list"),
        ('{"kind":"bitmap","columns":[]}', "needs a column"),
        ('{"kind":["bitmap"],"columns":["id"]}', "no index kind"),
        ('{"kind":"bitmap","columns":["id"],"field-ids":[1,2]}', "one for each"),
        ('{"kind":"bitmap","columns":["id"],"field-ids":[77]}', "no column with this id"),
        ('{"kind":"bitmap","columns":["id"],"state":[]}', "enabled or paused"),
        ('{"kind":"bloom","columns":["id"],"fpp":true}', "between 1e-06"),
        ("[" * 9000, "defines no index"),
        ('{"a":' * 9000, "the limit is"),
        ('{"a":' * 1900, "not JSON"),
    ],
)
def test_invalid_definition_is_reported_and_the_other_definitions_are_used(text: str, message: str) -> None:
    definitions = read_definitions(
        build_table({"seamark.index.bad": text, "seamark.index.good": "bitmap(id)", "other": "x"})
    )
    assert list(definitions.by_name) == ["good"]
    assert message in definitions.problems["bad"]


@given(st.text(max_size=60))
def test_no_property_makes_reading_fail(text: str) -> None:
    definitions = read_definitions(build_table({"seamark.index.x": text, f"seamark.index.{text}": "bitmap(id)"}))
    assert len(definitions.by_name) + len(definitions.problems) == len({"x", text})


def test_name_that_the_api_cannot_address_is_a_problem() -> None:
    definitions = read_definitions(build_table({"seamark.index.": "bitmap(id)", "seamark.index.a/b": "bitmap(id)"}))
    assert set(definitions.problems) == {"", "a/b"}
    with pytest.raises(BadRequest, match="the table's partition spec defines"):
        define_index("bucket:id", "bitmap", ["id"], FIRST_SCHEMA)


def test_definitions_beyond_the_limit_of_a_table_are_not_read() -> None:
    definitions = read_definitions(
        build_table({f"seamark.index.i{n:04}": "bitmap(id)" for n in range(DEFINITIONS_MAX + 3)})
    )
    assert len(definitions.by_name) == DEFINITIONS_MAX
    assert len(definitions.problems) == 3


def test_definition_follows_a_renamed_column() -> None:
    definition = define_index("n", "bitmap", ["id"], FIRST_SCHEMA)
    renamed_definition = parse_index(definition.property_text, schemas=(FIRST_SCHEMA, RENAMED_SCHEMA))
    assert renamed_definition.id == definition.id
    assert (renamed_definition.terms[0].column_id, renamed_definition.terms[0].name) == (1, "key")
    # A name in a property that a user writes refers to the column that has the name now.
    assert parse_index("bitmap(id)", schemas=(FIRST_SCHEMA, RENAMED_SCHEMA)).terms[0].column_id == 3


def test_definition_by_a_user_finds_a_column_by_its_former_name() -> None:
    schemas = (FIRST_SCHEMA, Schema((Field(1, "key", True, "long"),), schema_id=1))
    term = parse_index("bitmap(id)", schemas=schemas).terms[0]
    assert (term.column_id, term.name) == (1, "key")


def test_definition_id_depends_on_the_indexed_content_and_not_on_name_or_state() -> None:
    first_definition = define_index("a", "bloom", ["id"], FIRST_SCHEMA, parameters={"fpp": 0.01})
    renamed_definition = define_index("b", "bloom", ["key"], RENAMED_SCHEMA, state="paused")
    other_definitions = [
        define_index("a", "bloom", ["id"], FIRST_SCHEMA, parameters={"fpp": 0.02}),
        define_index("a", "bitmap", ["id"], FIRST_SCHEMA),
        define_index("a", "bloom", ["bucket[4](id)"], FIRST_SCHEMA),
        define_index("a", "bloom", ["name"], FIRST_SCHEMA),
    ]
    term = '{"field-id":1,"transform":"identity","keys":"long"}'
    assert first_definition.id == renamed_definition.id == '{"kind":"bloom","terms":[' + term + '],"fpp":0.01}'
    assert len({first_definition.id, *(other.id for other in other_definitions)}) == 5
    assert (
        define_index("r", "record", ["id", "name"], FIRST_SCHEMA).id
        != define_index("r", "record", ["name", "id"], FIRST_SCHEMA).id
    )


@pytest.mark.parametrize(
    ("kind", "promoted_kind", "is_kept"),
    [
        ("int", "long", True),
        ("float", "double", True),
        ("decimal(9, 2)", "decimal(18, 2)", True),
        ("decimal(19, 2)", "decimal(38, 2)", True),
        ("decimal(18, 2)", "decimal(19, 2)", False),
        ("date", "timestamp", False),
    ],
)
def test_index_is_kept_after_a_promotion_that_does_not_change_its_keys(
    kind: str, promoted_kind: str, is_kept: bool
) -> None:
    old_definition, new_definition = (
        define_index("i", "bitmap", ["c"], Schema((Field(1, "c", False, item),), schema_id=0))
        for item in (kind, promoted_kind)
    )
    assert (old_definition.id == new_definition.id) == is_kept


@pytest.mark.parametrize(
    ("transform", "kind", "promoted_kind"),
    [
        ("bucket[16]", "date", "timestamp"),  # Dates are hashed in days, and timestamps in microseconds.
        ("truncate[10]", "int", "long"),  # Truncating the least ints overflows. Truncating them as longs does not.
    ],
)
def test_index_on_a_function_gets_another_id_when_the_functions_type_changes(
    transform: str, kind: str, promoted_kind: str
) -> None:
    old_definition, new_definition = (
        define_index("i", "bitmap", [f"{transform}(c)"], Schema((Field(1, "c", False, item),), schema_id=0))
        for item in (kind, promoted_kind)
    )
    assert old_definition.id != new_definition.id


def test_definition_can_be_read_from_its_id() -> None:
    definition = define_index("n", "bloom", ["lower(name)"], FIRST_SCHEMA, parameters={"fpp": 0.25})
    assert parse_definition(definition.id, FIRST_SCHEMA, name="n") == definition
    for invalid_id in (
        "{",
        "[]",
        "{}",
        '{"kind":"bloom","terms":[{"field-id":1}]}',
        " " + definition.id,
        '{"terms":[3]}',
    ):
        with pytest.raises(BadRequest):
            parse_definition(invalid_id, FIRST_SCHEMA)


def test_plans_use_one_of_two_names_of_an_index_and_no_paused_index() -> None:
    definitions = read_definitions(
        build_table(
            {
                "seamark.index.a": "bitmap(id)",
                "seamark.index.b": "bitmap(id)",
                "seamark.index.c": "bloom(id, state=paused)",
            }
        )
    )
    assert [definition.name for definition in definitions.enabled] == ["a"]
    assert list(definitions.by_name) == ["a", "b", "c"]


def test_bucket_indexes_follow_the_partition_specs_through_evolution() -> None:
    specs = (
        PartitionSpec(
            0, (PartitionField("id_bucket", "bucket[8]", 1, (), 1000), PartitionField("n", "identity", 2, (), 1001))
        ),
        PartitionSpec(1, (PartitionField("id_bucket", "bucket[8]", 1, (), 1000),)),
        PartitionSpec(2, (PartitionField("id_bucket", "bucket[16]", 1, (), 1002),)),
        PartitionSpec(3, (PartitionField("lost", "bucket[4]", 99, (), 1003),)),
    )
    definitions = list_bucket_definitions(build_table({}, specs=specs))
    assert [(item.name, item.kind, item.text) for item in definitions] == [
        ("bucket:id_bucket", "bucket", "bucket(bucket[8](id))"),
        ("bucket:id_bucket:2", "bucket", "bucket(bucket[16](id))"),
    ]


def test_table_without_indexes_is_read_without_parsing() -> None:
    assert read_definitions(build_table({"a": "b"})) is read_definitions(build_table({}))
