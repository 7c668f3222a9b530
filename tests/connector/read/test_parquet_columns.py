"""Columns of data files against the written values and Iceberg's column projection rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from seamark.connector.parquet.columns import Projection, read_columns
from seamark.formats.iceberg.files.parquet import Unreadable
from seamark.formats.iceberg.types.schema import Field, Schema, StructType
from tests.connector.parquet import encrypted

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


def build_field(name: str, kind: pa.DataType, field_id: int) -> pa.Field:
    return pa.field(name, kind, metadata={"PARQUET:field_id": str(field_id)})


def write_parquet(folder: Path, fields: list[pa.Field], columns: list[Any]) -> str:
    path = str(folder / "data.parquet")
    arrays = [pa.array(values, field.type) for field, values in zip(fields, columns, strict=True)]
    pq.write_table(pa.Table.from_arrays(arrays, schema=pa.schema(fields)), path, row_group_size=2)
    return path


def read_columns_of_file(
    path: str, *column_ids: int, projection: Projection | None = None, rows: int = 3
) -> dict[int, list[Any]]:
    columns = read_columns(
        path, column_ids, projection or Projection(SCHEMA), filesystem=fs.LocalFileSystem(), rows=rows
    )
    return {column_id: column.to_pylist() for column_id, column in columns.items()}


DEEP_STRUCT = pa.struct([build_field("x", pa.int32(), 6)])
FIELDS = [
    build_field("renamed", pa.int64(), 1),
    build_field("a.b", pa.string(), 2),
    build_field("a", pa.struct([build_field("b", pa.int32(), 4), build_field("deep", DEEP_STRUCT, 5)]), 3),
]
COLUMN_VALUES: list[Any] = [
    [1, 2, 3],
    ["p", None, "q"],
    [{"b": 7, "deep": {"x": 1}}, None, {"b": None, "deep": None}],
]


def test_columns_are_found_by_id_and_not_by_name(tmp_path: Path) -> None:
    path = write_parquet(tmp_path, FIELDS, COLUMN_VALUES)
    assert read_columns_of_file(path, 1, 2, 4, 6) == {
        1: [1, 2, 3],
        2: ["p", None, "q"],
        4: [7, None, None],
        6: [1, None, None],
    }


def test_column_that_was_added_later_is_null(tmp_path: Path) -> None:
    assert read_columns_of_file(write_parquet(tmp_path, FIELDS, COLUMN_VALUES), 7) == {7: [None, None, None]}


def test_columns_with_defaults_or_partition_values_are_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path, FIELDS, COLUMN_VALUES)
    with pytest.raises(Unreadable, match="default"):
        read_columns_of_file(path, 8)
    with pytest.raises(Unreadable, match="partition"):
        read_columns_of_file(path, 7, projection=Projection(SCHEMA, partitioned=frozenset([7])))


def test_file_whose_row_count_differs_from_its_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="3 rows; the manifest entry says 4"):
        read_columns_of_file(write_parquet(tmp_path, FIELDS, COLUMN_VALUES), 1, rows=4)


def test_file_without_field_ids_is_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path, [pa.field("ident", pa.int64())], [[1, 2, 3]])
    with pytest.raises(Unreadable, match="no field ids"):
        read_columns_of_file(path, 1)


def test_file_that_is_not_parquet_is_unreadable(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    path.write_bytes(b"PAR1 no PAR1")
    with pytest.raises(Unreadable, match="cannot be read"):
        read_columns_of_file(str(path), 1)
    with pytest.raises(Unreadable, match="cannot be read"):
        read_columns_of_file(str(tmp_path / "absent"), 1)


def test_file_with_two_columns_of_the_same_id_is_refused(tmp_path: Path) -> None:
    repeated_path = write_parquet(
        tmp_path, [build_field("x", pa.int64(), 1), build_field("y", pa.int64(), 1)], [[1, 2, 3], [4, 5, 6]]
    )
    with pytest.raises(Unreadable, match="2 columns that may be column 1"):
        read_columns_of_file(repeated_path, 1)


ENCRYPTED_COLUMN_CASES: list[Any] = [
    ({"k1": ["id"]}, {"plaintext_footer": True}),
    ({"k1": ["id", "st.a"]}, {}),
    ({"k1": ["id"]}, {"encryption_algorithm": "AES_GCM_CTR_V1"}),
]


@pytest.mark.parametrize(("columns", "options"), ENCRYPTED_COLUMN_CASES)
def test_plain_columns_of_encrypted_files_are_read_without_keys(
    tmp_path: Path, columns: dict[str, list[str]], options: dict[str, Any]
) -> None:
    path = str(tmp_path / "data.parquet")
    struct_fields = [build_field("a", pa.int64(), 4), build_field("b", pa.string(), 5)]
    fields = [
        build_field("id", pa.int64(), 1),
        build_field("c.b", pa.string(), 2),
        build_field("st", pa.struct(struct_fields), 3),
    ]
    table = pa.table(
        {
            "id": range(5000),
            "c.b": [None if n % 7 == 0 else f"text {n % 90}" for n in range(5000)],
            "st": [{"a": n, "b": "x" * (n % 5)} for n in range(5000)],
        },
        schema=pa.schema(fields),
    )
    configuration = encrypted.build_configuration(columns, **options)
    properties = encrypted.build_encryption(configuration)
    pq.write_table(table, path, row_group_size=900, encryption_properties=properties, data_page_size=500)
    projection = Projection(
        Schema(
            (
                Field(1, "id", True, "long"),
                Field(2, "c.b", False, "string"),
                Field(3, "st", False, StructType((Field(4, "a", False, "long"), Field(5, "b", False, "string")))),
            )
        )
    )

    def read_with_keys(*column_ids: int, keys: Any = encrypted.build_keys) -> dict[int, list[Any]]:
        local_filesystem = fs.LocalFileSystem()
        actual_columns = read_columns(path, column_ids, projection, filesystem=local_filesystem, rows=5000, keys=keys)
        return {column_id: column.to_pylist() for column_id, column in actual_columns.items()}

    assert read_with_keys(2, 5) == {2: table["c.b"].to_pylist(), 5: [row["b"] for row in table["st"].to_pylist()]}
    encrypted_ids = [1, *([4] if "st.a" in columns["k1"] else [])]
    for column_id in encrypted_ids:
        with pytest.raises(Unreadable, match=r"the column (id|st\.a) is encrypted, and an index would reveal"):
            read_with_keys(2, column_id)
    # The process aborts if pyarrow reads an encrypted column without its key.
    for column_id in (1, 2):
        with pytest.raises(Unreadable, match="the file is encrypted, and this process has no key"):
            read_with_keys(column_id, keys=lambda: None)
