"""Columns of data files, against what was written and what Iceberg's rules of projection say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from seamark.connector.parquet.columns import Projection, read_columns
from seamark.metaserver.iceberg.files.parquet import Unreadable
from seamark.metaserver.iceberg.types.schema import Field, Schema, StructType

SCHEMA = Schema(
    (
        Field(1, "id", True, "long"),
        Field(2, "c.b", False, "string"),
        Field(
            3,
            "a",
            False,
            StructType(
                (Field(4, "b", False, "int"), Field(5, "deep", False, StructType((Field(6, "x", False, "int"),))))
            ),
        ),
        Field(7, "later", False, "int"),
        Field(8, "filled", False, "int", initial_default=5),
    )
)


def with_id(name: str, kind: pa.DataType, field_id: int) -> pa.Field:
    return pa.field(name, kind, metadata={"PARQUET:field_id": str(field_id)})


def written(folder: Path, fields: list[pa.Field], columns: list[Any]) -> str:
    path = str(folder / "data.parquet")
    arrays = [pa.array(values, one.type) for one, values in zip(fields, columns, strict=True)]
    pq.write_table(pa.Table.from_arrays(arrays, schema=pa.schema(fields)), path, row_group_size=2)
    return path


def read(path: str, *column_ids: int, projection: Projection | None = None, rows: int = 3) -> dict[int, list[Any]]:
    found = read_columns(path, column_ids, projection or Projection(SCHEMA), filesystem=fs.LocalFileSystem(), rows=rows)
    return {column_id: column.to_pylist() for column_id, column in found.items()}


DEEP = pa.struct([with_id("x", pa.int32(), 6)])
FIELDS = [
    with_id("renamed", pa.int64(), 1),
    with_id("a.b", pa.string(), 2),
    with_id("a", pa.struct([with_id("b", pa.int32(), 4), with_id("deep", DEEP, 5)]), 3),
]
ROWS: list[Any] = [
    [1, 2, 3],
    ["p", None, "q"],
    [{"b": 7, "deep": {"x": 1}}, None, {"b": None, "deep": None}],
]


def test_columns_are_found_by_id_whatever_they_are_called(tmp_path: Path) -> None:
    path = written(tmp_path, FIELDS, ROWS)
    assert read(path, 1, 2, 4, 6) == {1: [1, 2, 3], 2: ["p", None, "q"], 4: [7, None, None], 6: [1, None, None]}


def test_a_column_added_later_is_null(tmp_path: Path) -> None:
    assert read(written(tmp_path, FIELDS, ROWS), 7) == {7: [None, None, None]}


def test_what_readers_fill_in_themselves_is_left_alone(tmp_path: Path) -> None:
    path = written(tmp_path, FIELDS, ROWS)
    with pytest.raises(Unreadable, match="default"):
        read(path, 8)
    with pytest.raises(Unreadable, match="partition"):
        read(path, 7, projection=Projection(SCHEMA, partitioned=frozenset([7])))


def test_a_file_of_another_length_than_its_manifest_says_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="3 rows; its manifest says 4"):
        read(written(tmp_path, FIELDS, ROWS), 1, rows=4)


def test_a_file_without_ids_is_not_read(tmp_path: Path) -> None:
    path = written(tmp_path, [pa.field("ident", pa.int64())], [[1, 2, 3]])
    with pytest.raises(Unreadable, match="no field ids"):
        read(path, 1)


def test_what_is_no_parquet_file_is_unreadable(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    path.write_bytes(b"PAR1 no PAR1")
    with pytest.raises(Unreadable, match="cannot be read"):
        read(str(path), 1)
    with pytest.raises(Unreadable, match="cannot be read"):
        read(str(tmp_path / "absent"), 1)


def test_of_two_columns_that_may_be_the_one_none_is_taken(tmp_path: Path) -> None:
    twice = written(tmp_path, [with_id("x", pa.int64(), 1), with_id("y", pa.int64(), 1)], [[1, 2, 3], [4, 5, 6]])
    with pytest.raises(Unreadable, match="2 columns that may be column 1"):
        read(twice, 1)
