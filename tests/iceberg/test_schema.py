"""Tests of schemas: spelling, equality, names, identifiers, defaults and depth."""

from __future__ import annotations

from typing import Any

import pytest

from seamark.formats.iceberg.types.reading import convert_json_value
from seamark.formats.iceberg.types.schema import Schema, normalize_schema
from seamark.formats.iceberg.types.transforms import accepts_type, canonicalize_transform
from seamark.formats.iceberg.types.types import canonicalize_primitive
from seamark.formats.runtime.errors import BadRequest
from tests.iceberg.samples import build_field, build_schema


def parse_schema(*fields: dict[str, Any], **extra_fields: Any) -> Schema:
    return convert_json_value(build_schema(*fields, **extra_fields), Schema, "schema")


def build_struct(*fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "struct", "fields": list(fields)}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("INT", "int"),
        ("decimal(9,2)", "decimal(9, 2)"),
        ("decimal( 9 , 2 )", "decimal(9, 2)"),
        ("fixed[ 16 ]", "fixed[16]"),
        ("Geometry(OGC:CRS84)", "geometry"),
        ("geometry(srid:3857)", "geometry(srid:3857)"),
        ("geography(OGC:CRS84, Karney)", "geography(OGC:CRS84, karney)"),
        ("geography(srid:4326)", "geography(srid:4326)"),
    ],
)
def test_each_type_is_written_in_one_form(text: str, name: str) -> None:
    assert canonicalize_primitive(text) == name
    assert canonicalize_primitive(name) == name


@pytest.mark.parametrize(
    "text",
    ["", "decimal(39, 2)", "decimal", "fixed[x]", "struct", "geography(a, flat)", "int ", "decimal(٣,٢)", "fixed[٣]"],
)
def test_unknown_type_is_rejected(text: str) -> None:
    with pytest.raises(BadRequest):
        canonicalize_primitive(text)


def test_type_width_accepts_ascii_digits_only_as_in_java() -> None:
    assert canonicalize_transform("BUCKET[03]") == "bucket[3]"
    for transform in ("bucket[٣]", "buc\u212aet[3]"):
        assert canonicalize_transform(transform) == transform


def test_schemas_with_different_ids_and_spellings_are_equal() -> None:
    schema = parse_schema(build_field(1, "a", "decimal(4,1)", True), identifiers=(1,), schema_id=1)
    assert schema.is_same_as(parse_schema(build_field(1, "a", "DECIMAL(4, 1)", True), identifiers=(1,), schema_id=2))
    assert not schema.is_same_as(parse_schema(build_field(1, "a", "decimal(4,1)", True), schema_id=1))
    assert not schema.is_same_as(parse_schema(build_field(1, "a", "decimal(4,1)", True, doc="x"), identifiers=(1,)))


def test_columns_have_full_and_short_names() -> None:
    points = {"type": "list", "element-id": 2, "element-required": True, "element": build_struct(build_field(3, "x"))}
    new_schema = parse_schema(build_field(1, "points", points), build_field(4, "m.x"))
    assert new_schema.index.by_id[3].name == "points.element.x"
    assert new_schema.index.by_name["points.x"] == 3
    assert new_schema.index.by_name["points.element.x"] == 3
    assert new_schema.highest_field_id == 4


def test_full_name_takes_precedence_over_a_short_name() -> None:
    points = {"type": "list", "element-id": 2, "element-required": True, "element": build_struct(build_field(3, "x"))}
    assert parse_schema(build_field(1, "p", points), build_field(4, "p.x")).index.by_name["p.x"] == 4


@pytest.mark.parametrize(
    ("new_schema", "message"),
    [
        (parse_schema(build_field(1, "a", "long", True), identifiers=(2,)), "field does not exist"),
        (parse_schema(build_field(1, "a", build_struct(), True), identifiers=(1,)), "not a primitive"),
        (parse_schema(build_field(1, "a", "double", True), identifiers=(1,)), "float or double"),
        (
            parse_schema(build_field(1, "a", build_struct(build_field(2, "b", "long", True))), identifiers=(2,)),
            "optional field a",
        ),
        (
            parse_schema(
                build_field(
                    1, "a", {"type": "list", "element-id": 2, "element": "long", "element-required": True}, True
                ),
                identifiers=(2,),
            ),
            "must not be nested in a",
        ),
        (parse_schema(build_field(1, "a", "unknown", True)), "required field with unknown type"),
    ],
)
def test_impossible_schema_is_rejected(new_schema: Schema, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        normalize_schema(new_schema)


GOOD_DEFAULTS = [
    ("boolean", True),
    ("int", -5),
    ("long", 2**40),
    ("float", 1.5),
    ("float", 3.4028235e38),
    ("timestamp_ns", "1677-09-21T00:12:43.145224192"),
    ("timestamptz_ns", "2262-04-11T23:47:16.854775807+00:00"),
    ("double", 1.0),
    ("decimal(9, 2)", "14.20"),
    ("decimal(5, 2)", "-999.99"),
    ("date", "2017-11-16"),
    ("time", "22:31:08.123456"),
    ("timestamp", "2017-11-16T22:31:08.123456"),
    ("timestamptz", "2017-11-16T22:31:08.123456+00:00"),
    ("timestamp_ns", "2017-11-16T22:31:08.123456789"),
    ("timestamptz_ns", "2017-11-16T22:31:08.123456789+00:00"),
    ("string", "iceberg"),
    ("uuid", "f79c3e09-677c-4bbd-a479-3f349cb785e7"),
    ("fixed[2]", "0A1f"),
    ("binary", ""),
]


@pytest.mark.parametrize(("kind", "value"), GOOD_DEFAULTS)
def test_default_of_the_columns_type_is_kept(kind: str, value: object) -> None:
    normalized_schema = normalize_schema(parse_schema(build_field(1, "a", kind, **{"initial-default": value})))
    assert normalized_schema.fields[0].initial_default == value


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("boolean", 1),
        ("int", 2**31),
        ("int", True),
        ("long", "1"),
        ("float", 1),
        ("float", 1e39),
        ("double", float("nan")),
        ("double", float("inf")),
        ("decimal(9, 2)", "14.2"),
        ("decimal(5, 2)", "1234.20"),
        ("decimal(9, 2)", "x"),
        ("decimal(9, 2)", "NaN"),
        ("date", "2017-13-01"),
        ("time", "25:00:00"),
        ("timestamp", "2017-11-16T22:31:08+00:00"),
        ("timestamptz", "2017-11-16T22:31:08+02:00"),
        ("timestamptz", "2017-11-16T22:31:08"),
        ("timestamp_ns", "1677-09-21T00:12:43.145224191"),
        ("timestamptz_ns", "2262-04-11T23:47:16.854775808+00:00"),
        ("uuid", "f79c3e09"),
        ("fixed[2]", "00"),
        ("binary", "0"),
        ("variant", {}),
        ("unknown", 1),
        ({"type": "struct", "fields": []}, {}),
    ],
)
def test_default_of_a_different_type_is_rejected(kind: object, value: object) -> None:
    with pytest.raises(BadRequest, match="default"):
        normalize_schema(parse_schema(build_field(1, "a", kind, **{"write-default": value})))


def test_schema_depth_is_limited() -> None:
    kind: object = "long"
    for depth in range(200, 0, -1):
        kind = build_struct(build_field(depth, "f", kind))
    with pytest.raises(BadRequest, match="nested deeper than 100 levels"):
        normalize_schema(parse_schema(build_field(1000, "root", kind)))
    for depth in range(100_000):
        kind = build_struct(build_field(depth, "f", kind))
    with pytest.raises(BadRequest, match="nested too deeply"):
        parse_schema(build_field(1, "root", kind))


def test_transforms_are_written_in_one_form_and_check_their_source_type() -> None:
    assert canonicalize_transform("Bucket[016]") == "bucket[16]"
    assert canonicalize_transform("DAY") == "day"
    assert canonicalize_transform("Zorder[x]") == "Zorder[x]"
    assert accepts_type("hour", "timestamp_ns")
    assert not accepts_type("hour", "date")
    assert accepts_type("bucket[4]", "decimal(9, 2)")
    assert not accepts_type("bucket[4]", "double")
    assert not accepts_type("identity", "geography(OGC:CRS84, karney)")
    assert accepts_type("zorder", "double")
    with pytest.raises(BadRequest):
        canonicalize_transform("truncate[99999999999]")
