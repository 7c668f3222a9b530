"""Columns of Parquet files by field id."""

from __future__ import annotations

import pyarrow as pa
import pytest

from seamark.formats.iceberg.files.parquet import AmbiguousColumn, column_of, find_columns, has_ids, to_dotted_names


def with_id(name: str, kind: pa.DataType, field_id: int) -> pa.Field:
    return pa.field(name, kind, metadata={"PARQUET:field_id": str(field_id)})


DEEP = with_id("s", pa.struct([with_id("a", pa.int32(), 3), pa.field("plain", pa.int32())]), 2)
LISTED = with_id("l", pa.list_(with_id("element", pa.int32(), 5)), 4)


def test_columns_are_found_within_structs_and_not_within_lists() -> None:
    assert find_columns([with_id("x", pa.int64(), 1), DEEP, LISTED], [1, 3, 4, 5, 6]) == {
        1: ("x",),
        3: ("s", "a"),
        4: ("l",),
    }


def test_of_two_columns_with_one_id_neither_is_taken_and_others_are() -> None:
    twice = [with_id("x", pa.int64(), 1), with_id("y", pa.int64(), 3), DEEP]
    with pytest.raises(AmbiguousColumn, match="2 columns that may be column 3"):
        find_columns(twice, [1, 3])
    assert find_columns(twice, [1]) == {1: ("x",)}


def test_a_file_has_ids_where_one_column_has() -> None:
    assert has_ids([pa.field("x", pa.int64()), DEEP])
    assert not has_ids([pa.field("x", pa.int64())])


def test_a_column_is_taken_by_its_place_though_another_has_its_dotted_name() -> None:
    table = pa.table([[1, 2], [{"a": 5}, None]], schema=pa.schema([("s.a", pa.int64()), ("s", DEEP.type)]))
    assert column_of(table, ("s", "a")).to_pylist() == [5, None]
    assert column_of(table, ("s.a",)).to_pylist() == [1, 2]
    assert to_dotted_names([("s", "a"), ("s.a",)]) == ["s.a"]
    with pytest.raises(AmbiguousColumn, match="0 columns named 'x'"):
        column_of(table, ("x",))
