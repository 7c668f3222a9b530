"""Tests of finding Parquet columns by field id."""

from __future__ import annotations

import pyarrow as pa
import pytest

from seamark.formats.iceberg.files.parquet import AmbiguousColumn, find_columns, get_column, has_ids, to_dotted_names


def build_field(name: str, kind: pa.DataType, field_id: int) -> pa.Field:
    return pa.field(name, kind, metadata={"PARQUET:field_id": str(field_id)})


DEEP_STRUCT = build_field("s", pa.struct([build_field("a", pa.int32(), 3), pa.field("plain", pa.int32())]), 2)
LIST_COLUMN = build_field("l", pa.list_(build_field("element", pa.int32(), 5)), 4)


def test_columns_are_found_in_structs_and_not_in_lists() -> None:
    assert find_columns([build_field("x", pa.int64(), 1), DEEP_STRUCT, LIST_COLUMN], [1, 3, 4, 5, 6]) == {
        1: ("x",),
        3: ("s", "a"),
        4: ("l",),
    }


def test_columns_with_a_shared_id_are_ignored_and_columns_with_a_unique_id_are_found() -> None:
    schema_fields = [build_field("x", pa.int64(), 1), build_field("y", pa.int64(), 3), DEEP_STRUCT]
    with pytest.raises(AmbiguousColumn, match="2 columns that may be column 3"):
        find_columns(schema_fields, [1, 3])
    assert find_columns(schema_fields, [1]) == {1: ("x",)}


def test_file_has_field_ids_if_any_column_has_one() -> None:
    assert has_ids([pa.field("x", pa.int64()), DEEP_STRUCT])
    assert not has_ids([pa.field("x", pa.int64())])


def test_column_is_found_by_path_when_another_has_its_dotted_name() -> None:
    table = pa.table([[1, 2], [{"a": 5}, None]], schema=pa.schema([("s.a", pa.int64()), ("s", DEEP_STRUCT.type)]))
    assert get_column(table, ("s", "a")).to_pylist() == [5, None]
    assert get_column(table, ("s.a",)).to_pylist() == [1, 2]
    assert to_dotted_names([("s", "a"), ("s.a",)]) == ["s.a"]
    with pytest.raises(AmbiguousColumn, match="0 columns named 'x'"):
        get_column(table, ("x",))
