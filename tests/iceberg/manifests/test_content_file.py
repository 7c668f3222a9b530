"""Tests of content files in JSON: valid files are read completely, errors name the file and the field."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.catalog.rest.scan_planning import RESTDataFile, RESTEqualityDeleteFile, RESTPositionDeleteFile

from seamark.formats.iceberg.manifests.content_file import decode_content_file, find_column_type
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.table_json import decode_table
from seamark.formats.runtime.errors import BadRequest
from tests.iceberg.manifests.content_files import (
    STATISTICS,
    ManifestTable,
    encode_content_file,
    replace_fields,
    to_comparable,
)
from tests.seeds import examples

MODELS: dict[int, Any] = {0: RESTDataFile, 1: RESTPositionDeleteFile, 2: RESTEqualityDeleteFile}


@settings(max_examples=examples(200))
@given(seed=st.integers(0, 2**32), version=st.sampled_from([1, 2, 3]))
def test_files_are_equal_after_a_json_round_trip(seed: int, version: int) -> None:
    case = ManifestTable(seed, version)
    for content in [0] if version == 1 else [0, 1, 2]:
        file = case.draw_file(content)
        fields = encode_content_file(file, case.metadata)
        actual_content_file = decode_content_file(json.loads(json.dumps(fields)), case.metadata)
        assert to_comparable(actual_content_file.partition) == to_comparable(file.partition), case
        assert replace_fields(actual_content_file, partition=()) == replace_fields(file, partition=()), case


@settings(max_examples=examples(60))
@given(seed=st.integers(0, 2**32), version=st.sampled_from([2, 3]), content=st.sampled_from([0, 1, 2]))
def test_pyiceberg_reads_our_json(seed: int, version: int, content: int) -> None:
    case = ManifestTable(seed, version)
    case.fields = []  # PyIceberg has no parser for nulls in partitions.
    case.metadata = case.read()
    file = case.draw_file(content)
    iceberg_model = MODELS[content].model_validate(encode_content_file(file, case.metadata))
    assert iceberg_model.file_format.value.upper() == file.file_format
    for name in ("file_path", "record_count", "file_size_in_bytes", "sort_order_id"):
        assert getattr(iceberg_model, name) == getattr(file, name)
    assert (iceberg_model.key_metadata and bytes.fromhex(iceberg_model.key_metadata)) == file.key_metadata
    if isinstance(iceberg_model, RESTDataFile):
        for name in STATISTICS[:4]:  # The first four are counts, and the others are bounds.
            counts = getattr(iceberg_model, name)
            assert (counts and counts.to_dict()) == getattr(file, name)
        for name in STATISTICS[4:]:
            bounds = getattr(iceberg_model, name)
            actual_bounds = bounds and {column: bytes.fromhex(str(bound)) for column, bound in bounds.to_dict().items()}
            assert actual_bounds == getattr(file, name)
    elif isinstance(iceberg_model, RESTEqualityDeleteFile):
        assert tuple(iceberg_model.equality_ids or ()) == file.equality_ids
    else:
        for name in ("referenced_data_file", "content_offset", "content_size_in_bytes"):
            assert getattr(iceberg_model, name) == getattr(file, name)


COLUMNS = {1: "long", 2: "string", 3: "double", 4: "decimal(4, 2)", 5: "date", 6: "uuid", 7: "time", 8: "timestamp"}
COLUMNS |= {9: "fixed[2]", 10: "boolean", 11: "int"}
FIELDS = {0: [], 1: [(1, "identity")], 2: [(4, "identity"), (5, "day")], 3: [(7, "identity")], 4: [(3, "identity")]}
FIELDS |= {5: [(1, "void")], 6: [(2, "truncate[3]")], 7: [(1, "zorder")], 8: [(9, "identity")], 9: [(11, "bucket[4]")]}
FIELDS |= {10: [(8, "identity")]}
"""The source column and the transform of each field, by the id of the partition spec."""


def decode_table_of_version(version: int = 2) -> TableMetadata:
    columns: list[dict[str, Any]] = [
        {"id": column_id, "name": f"c{column_id}", "required": False, "type": kind}
        for column_id, kind in COLUMNS.items()
    ]
    nested_type = {"type": "list", "element-id": 13, "element": "int", "element-required": False}
    columns.append({"id": 12, "name": "list", "required": False, "type": nested_type})
    inner_struct = {"type": "struct", "fields": [{"id": 15, "name": "i", "required": False, "type": "int"}]}
    mapped_type = {
        "type": "map",
        "key-id": 16,
        "key": "int",
        "value-id": 17,
        "value": inner_struct,
        "value-required": False,
    }
    columns.append({"id": 14, "name": "map", "required": False, "type": mapped_type})
    separate_struct = {"type": "struct", "fields": [{"id": 19, "name": "i", "required": False, "type": "int"}]}
    columns.append({"id": 18, "name": "struct", "required": False, "type": separate_struct})
    document = {
        "format-version": version,
        "table-uuid": "9c12d441-03fe-4693-9a96-a0705ddf69c1",
        "location": "file:///t",
        "last-sequence-number": 1,
        "last-updated-ms": 1_700_000_000_000,
        "last-column-id": 99,
        "schemas": [{"type": "struct", "schema-id": 0, "fields": columns}],
        "current-schema-id": 0,
        "partition-specs": [
            {
                "spec-id": spec_id,
                "fields": [
                    {
                        "source-id": source,
                        "transform": transform,
                        "name": f"p{source}",
                        "field-id": 1000 + 10 * spec_id + index,
                    }
                    for index, (source, transform) in enumerate(fields)
                ],
            }
            for spec_id, fields in FIELDS.items()
        ],
        "default-spec-id": 0,
        "last-partition-id": 1999,
        "sort-orders": [{"order-id": 0, "fields": []}],
        "default-sort-order-id": 0,
    }
    if version == 3:
        document["next-row-id"] = 0
    return decode_table(json.dumps(document).encode(), "file:///t/metadata.json")


TABLES = {version: decode_table_of_version(version) for version in (1, 2, 3)}
DATA = {
    "content": "data",
    "file-path": "s3://lake/f.parquet",
    "file-format": "parquet",
    "spec-id": 0,
    "partition": [],
    "record-count": 10,
    "file-size-in-bytes": 1000,
}
EQUALITY = {**DATA, "content": "equality-deletes", "equality-ids": [1, 2, 19]}
POSITION = {**DATA, "content": "position-deletes"}
VECTOR = {
    **POSITION,
    "file-format": "puffin",
    "referenced-data-file": "s3://lake/d.parquet",
    "content-offset": 4,
    "content-size-in-bytes": 40,
}


def build_bounds(column: int, data: str) -> dict[str, list[Any]]:
    return {"keys": [column], "values": [data]}


@pytest.mark.parametrize(
    ("valid_file", "version"), [(DATA, 1), (DATA, 3), (EQUALITY, 2), (EQUALITY, 3), (POSITION, 2), (VECTOR, 3)]
)
def test_valid_files_are_accepted(valid_file: dict[str, Any], version: int) -> None:
    content_file = decode_content_file(valid_file, TABLES[version])
    assert encode_content_file(content_file, TABLES[version]) == valid_file


REFUSED_FILES: list[tuple[dict[str, Any], int, dict[str, Any], str]] = [
    (DATA, 2, {"content": "rows"}, "content: 'rows' is not one of data, position-deletes, equality-deletes"),
    (DATA, 2, {"content": None}, r"content"),
    (DATA, 2, {"file-path": ""}, r"file-path"),
    (DATA, 2, {"file-path": "\ud800"}, "file-path: the text has a lone surrogate"),
    (DATA, 2, {"file-format": "lance"}, "file-format: 'lance' is not one of avro, orc, parquet, puffin"),
    (DATA, 2, {"file-format": "puffin"}, "file-format: a puffin file can only be a deletion vector"),
    (DATA, 2, {"spec-id": 77}, "spec-id: the table has no partition spec 77"),
    (DATA, 2, {"spec-id": 1}, "partition: the file has 0 values, but spec 1 has 1 fields"),
    (DATA, 2, {"spec-id": 1, "partition": ["7"]}, "partition: field p1: '7' is not a value of type long"),
    (DATA, 2, {"spec-id": 1, "partition": [2**63]}, "partition: field p1: "),
    (DATA, 2, {"spec-id": 1, "partition": [1.0]}, "partition: field p1: 1.0 is not a value"),
    (DATA, 2, {"spec-id": 1, "partition": {"1010": 7}}, "partition"),
    (DATA, 2, {"spec-id": 4, "partition": [10**400]}, "partition: field p3: .* is outside the range of double"),
    (DATA, 2, {"spec-id": 2, "partition": ["1.234", None]}, "partition: field p4: '1.234' is not a decimal of scale 2"),
    (DATA, 2, {"spec-id": 2, "partition": ["400.00", None]}, "partition: field p4: .* more digits"),
    (DATA, 2, {"spec-id": 2, "partition": [None, "2024-02-30"]}, "partition: field p5: "),
    (DATA, 2, {"spec-id": 2, "partition": [None, "+99999999-01-01"]}, "partition: field p5: "),
    (DATA, 2, {"spec-id": 3, "partition": ["24:00:00"]}, "partition: field p7: "),
    (DATA, 2, {"spec-id": 5, "partition": [1]}, "partition: field p1 can only be null"),
    (DATA, 2, {"spec-id": 6, "partition": ["\udc00"]}, "partition: field p2: "),
    (DATA, 2, {"spec-id": 7, "partition": ["a"]}, "spec-id: the unknown transform zorder"),
    (DATA, 2, {"spec-id": 8, "partition": ["ABCDEF"]}, "partition: field p9: "),
    (DATA, 2, {"spec-id": 10, "partition": ["2024-01-01T00:00:00+00:00"]}, "partition: field p8: "),
    (DATA, 2, {"record-count": -1}, "record-count"),
    (DATA, 2, {"record-count": 2**63}, "record-count"),
    (DATA, 2, {"record-count": True}, "record-count"),
    (DATA, 2, {"file-size-in-bytes": None}, "file-size-in-bytes"),
    (DATA, 2, {"value-counts": {"keys": [1], "values": []}}, "value-counts: the file has 1 keys, but 0 values"),
    (DATA, 2, {"value-counts": {"keys": [1, 1], "values": [1, 1]}}, "value-counts: a column is present twice"),
    (DATA, 2, {"value-counts": {"keys": [1], "values": [-1]}}, "value-counts"),
    (DATA, 2, {"column-sizes": {"keys": [77], "values": [1]}}, "column-sizes: no schema of the table has a column 77"),
    (
        DATA,
        2,
        {"value-counts": {"keys": [1], "values": [5]}, "null-value-counts": {"keys": [1], "values": [6]}},
        "null-value-counts: column 1 has 6, but only 5 values",
    ),
    (DATA, 2, {"lower-bounds": build_bounds(1, "xy")}, "lower-bounds of column 1: 'xy' is not hexadecimal"),
    (DATA, 2, {"lower-bounds": build_bounds(1, "00 00")}, "lower-bounds of column 1: "),
    (
        DATA,
        2,
        {"lower-bounds": build_bounds(1, "000000")},
        "lower-bounds: column 1: 3 bytes are not a value of type long",
    ),
    (DATA, 2, {"upper-bounds": build_bounds(2, "FF")}, "upper-bounds: column 2: "),
    (
        DATA,
        2,
        {"upper-bounds": build_bounds(3, "000000000000F87F")},
        "upper-bounds: column 3: NaN is not a valid bound",
    ),
    (DATA, 2, {"upper-bounds": build_bounds(12, "00")}, "upper-bounds: column 12 is a list, which has no bounds"),
    (
        DATA,
        2,
        {"lower-bounds": build_bounds(2, "62"), "upper-bounds": build_bounds(2, "61")},
        "lower-bounds: the bound of column 2 is ab",
    ),
    (DATA, 2, {"key-metadata": "0"}, "key-metadata: '0' is not hexadecimal"),
    (DATA, 2, {"split-offsets": [4, 4]}, "split-offsets: the offsets are not in ascending order"),
    (DATA, 2, {"split-offsets": [1000]}, "split-offsets: the offset 1,000 is not within the file"),
    (DATA, 2, {"equality-ids": [1]}, "equality-ids: only equality deletes"),
    (DATA, 2, {"referenced-data-file": "x"}, "referenced-data-file: only position deletes"),
    (DATA, 3, {"content-offset": 0}, "content-offset: only deletion vectors"),
    (EQUALITY, 1, {}, "content: a table of format version 1 has no delete files"),
    (EQUALITY, 2, {"equality-ids": None}, "equality-ids: equality deletes need them"),
    (EQUALITY, 2, {"equality-ids": []}, "equality-ids: equality deletes need them"),
    (EQUALITY, 2, {"equality-ids": [1, 1]}, "equality-ids: column 1 is present twice"),
    (EQUALITY, 2, {"equality-ids": [77]}, "equality-ids: the table's schema has no column 77"),
    (EQUALITY, 2, {"equality-ids": [12]}, "equality-ids: column 12 .* is not of a primitive type"),
    (EQUALITY, 2, {"equality-ids": [13]}, "equality-ids: column 13 .* inside a list or map"),
    (EQUALITY, 2, {"equality-ids": [15]}, "equality-ids: column 15 .* inside a list or map"),
    (EQUALITY, 3, {"first-row-id": 1}, "first-row-id: only data files"),
    (EQUALITY, 3, {"file-format": "puffin"}, "file-format: a puffin file can only be a deletion vector"),
    (POSITION, 3, {}, "file-format: a table of format version 3 accepts no new position delete files"),
    (VECTOR, 2, {}, "file-format: a table of format version 2 has no deletion vectors"),
    (VECTOR, 3, {"referenced-data-file": None}, "referenced-data-file: a deletion vector requires it"),
    (VECTOR, 3, {"referenced-data-file": ""}, "referenced-data-file: a deletion vector requires it"),
    (VECTOR, 3, {"content-offset": None}, "content-offset: a deletion vector requires it"),
    (VECTOR, 3, {"content-size-in-bytes": None}, "content-size-in-bytes: a deletion vector requires it"),
    (VECTOR, 3, {"content-size-in-bytes": 997}, "content-size-in-bytes: the deletion vector ends beyond"),
]


@pytest.mark.parametrize(("valid_file", "version", "change", "message"), REFUSED_FILES)
def test_invalid_file_is_rejected_by_file_and_field(
    valid_file: dict[str, Any], version: int, change: dict[str, Any], message: str
) -> None:
    path = change.get("file-path", valid_file["file-path"]) or "without a file-path"
    with pytest.raises(BadRequest, match=message) as error:
        decode_content_file(valid_file | change, TABLES[version])
    path_text = path.encode(errors="backslashreplace").decode()
    assert error.value.message.startswith(f"Invalid content file {path_text}: ")


def test_error_of_an_invalid_file_has_a_limited_length() -> None:
    for change in ({"spec-id": 1, "partition": ["7" * 100_000]}, {"file-path": "x" * 100_000, "record-count": -1}):
        with pytest.raises(BadRequest) as error:
            decode_content_file(DATA | change, TABLES[2])
        assert len(error.value.message) < 3_000


@pytest.mark.parametrize("json_value", [None, [], "x", 7, {}, {"file-path": 3}])
def test_json_that_is_not_a_file_is_rejected(json_value: object) -> None:
    with pytest.raises(BadRequest, match=r"^Invalid content file without a file-path: "):
        decode_content_file(json_value, TABLES[2])


NAMES = [*DATA, *EQUALITY, *VECTOR, *(name.replace("_", "-") for name in STATISTICS)]
NAMES += ["key-metadata", "split-offsets", "sort-order-id", "first-row-id"]
ARBITRARY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["keys", "values"]), inner),
    max_leaves=5,
)


@settings(max_examples=examples(400))
@given(
    valid_file=st.sampled_from([DATA, EQUALITY, POSITION, VECTOR]),
    version=st.sampled_from([1, 2, 3]),
    name=st.sampled_from(NAMES),
    value=ARBITRARY_JSON,
    spec=st.sampled_from(list(FIELDS)),
    partition=st.lists(ARBITRARY_JSON, max_size=2),
)
def test_random_json_is_rejected_or_read_as_a_file(
    valid_file: dict[str, Any], version: int, name: str, value: object, spec: int, partition: list[object]
) -> None:
    json_value = {**valid_file, "spec-id": spec, "partition": partition, name: value}
    try:
        content_file = decode_content_file(json_value, TABLES[version])
    except BadRequest:
        return
    second_content_file = decode_content_file(encode_content_file(content_file, TABLES[version]), TABLES[version])
    assert replace_fields(second_content_file, partition=()) == replace_fields(content_file, partition=())
    assert to_comparable(second_content_file.partition) == to_comparable(content_file.partition)


@pytest.mark.parametrize(("content", "version", "kind"), [("DATA", 1, 0), ("EQUALITY_DELETES", 2, 2)])
def test_content_types_are_read_in_javas_spelling(content: str, version: int, kind: int) -> None:
    valid_file = DATA if kind == 0 else EQUALITY
    assert decode_content_file(valid_file | {"content": content, "file-format": "ORC"}, TABLES[version]).content == kind


@pytest.mark.parametrize(
    ("change", "name", "expected"),
    [
        ({"lower-bounds": build_bounds(1, "01000000")}, "lower_bounds", {1: b"\x01\x00\x00\x00"}),
        ({"lower-bounds": build_bounds(2, "62"), "upper-bounds": build_bounds(2, "62")}, "lower_bounds", {2: b"b"}),
        (
            {"lower-bounds": build_bounds(6, "7F" * 16), "upper-bounds": build_bounds(6, "00" * 16)},
            "upper_bounds",
            {6: bytes(16)},
        ),
        ({"lower-bounds": build_bounds(2147483546, "61")}, "lower_bounds", {2147483546: b"a"}),
        ({"column-sizes": {"keys": [12, 13], "values": [1, 2]}}, "column_sizes", {12: 1, 13: 2}),
        ({"value-counts": {"keys": [], "values": []}}, "value_counts", None),
        ({"split-offsets": []}, "split_offsets", None),
        ({"key-metadata": "0aFF"}, "key_metadata", b"\x0a\xff"),
        ({"unheard-of": 1}, "record_count", 10),
        ({"spec-id": 4, "partition": ["-Infinity"]}, "partition", (-math.inf,)),
        ({"spec-id": 9, "partition": [3]}, "partition", (3,)),
        ({"first-row-id": 7}, "first_row_id", 7),
    ],
)
def test_unusual_but_valid_values_are_accepted(change: dict[str, Any], name: str, expected: object) -> None:
    """Examples are bounds from before a promotion, UUIDs in Java's order, reserved columns and unknown fields."""
    assert getattr(decode_content_file(DATA | change, TABLES[2]), name) == expected


def test_position_deletes_have_no_sort_order() -> None:
    """They are sorted by file and position, and readers ignore the sort order (spec, "Data File Fields")."""
    assert decode_content_file(POSITION | {"sort-order-id": 3}, TABLES[2]).sort_order_id is None


def test_column_has_its_latest_type() -> None:
    case = ManifestTable(1, 3)
    case.kinds = {1: "int", 2: "int"}
    case.fields = []
    old_schema = case.build_json()["schema"]
    widened_schema = {**old_schema, "schema-id": 1, "fields": [{**old_schema["fields"][0], "type": "long"}]}
    metadata = case.read(**{"schemas": [old_schema, widened_schema], "current-schema-id": 1})
    assert [find_column_type(metadata, column) for column in (1, 2, 3)] == ["long", "int", None]


def test_file_of_an_unknown_spec_has_no_json() -> None:
    file = decode_content_file(DATA, TABLES[2])
    with pytest.raises(BadRequest, match=r"no partition spec 77, with which s3://lake/f\.parquet"):
        encode_content_file(replace_fields(file, spec_id=77), TABLES[2])
