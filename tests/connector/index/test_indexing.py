"""Lookups in index files that are built from Parquet files, against the values in these files."""

from __future__ import annotations

import datetime as dt
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seamark.connector.index.files import DataFile, IndexTask, compute_term_keys, index_data_files
from seamark.connector.parquet.columns import Projection
from seamark.formats.iceberg.types.schema import Field, Schema
from seamark.formats.iceberg.types.transforms import compute_transform
from seamark.formats.index.definitions import define_index
from seamark.formats.index.index_file import open_index_file
from seamark.formats.index.keys.arrow_keys import convert_to_keys
from seamark.formats.index.keys.case_folding import fold_case
from seamark.formats.index.keys.functions import INDEXED_FUNCTIONS
from seamark.formats.index.keys.hashing import hash_key, hash_keys, hash_rows
from seamark.formats.index.keys.keys import KeyRange, KeyRanges, Keys, make_key, unpack_bits
from seamark.formats.index.keys.terms import resolve_term
from seamark.formats.index.kinds.bitmap import Bitmap
from seamark.formats.index.kinds.bits import list_positions
from seamark.formats.index.kinds.bloom import Bloom
from seamark.formats.index.kinds.record import RecordBlob

SCHEMA = Schema(
    (
        Field(1, "id", True, "long"),
        Field(2, "name", False, "string"),
        Field(3, "at", False, "timestamptz"),
        Field(4, "price", False, "decimal(20, 2)"),
        Field(5, "code", False, "uuid"),
        Field(6, "day", False, "date"),
    )
)
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
ARROW = {
    1: pa.int64(),
    2: pa.string(),
    3: pa.timestamp("us", "UTC"),
    4: pa.decimal128(20, 2),
    5: pa.binary(16),
    6: pa.date32(),
}


def draw_column(rng: random.Random, column_id: int, rows: int) -> list[Any]:
    def draw_value() -> Any:
        match column_id:
            case 1:
                return rng.choice([-(2**63), -1, 0, 5, 2**63 - 1])
            case 2:
                return rng.choice(["", "Ab", "AB", "ÀÉ", "straße", "İ", "\U0001f600x", "longer than the rest"])
            case 3:
                return EPOCH + dt.timedelta(microseconds=rng.choice([-1, 0, 1, 86_400_000_000, -(10**15), 10**15]))
            case 4:
                return Decimal(rng.choice([-1, 0, 1, -(10**19), 10**19])).scaleb(-2)
            case 5:
                return rng.choice([bytes(16), b"\xff" * 16, bytes(range(16))])
        return dt.date(1970, 1, 1) + dt.timedelta(days=rng.choice([-1, 0, 400, -700]))

    return [None if column_id != 1 and rng.random() < 0.2 else draw_value() for _ in range(rows)]


def to_iceberg_value(value: Any) -> Any:
    """Return times as microseconds since 1970, dates as days, decimals as hundredths, and other values unchanged."""
    if isinstance(value, dt.datetime):
        return (value - EPOCH) // dt.timedelta(microseconds=1)
    if isinstance(value, dt.date):
        return (value - dt.date(1970, 1, 1)).days
    return int(value.scaleb(2)) if isinstance(value, Decimal) else value


def get_key(keys: Keys, row: int) -> Any:
    if keys.valid is not None and not unpack_bits(keys.valid, keys.rows)[row]:
        return None
    if keys.codes is not None:
        return int(keys.codes[row])
    assert keys.starts is not None
    assert keys.heap is not None
    return keys.heap[keys.starts[row] : keys.starts[row + 1]].tobytes()


@pytest.mark.parametrize(
    "text",
    [
        "id",
        "bucket[7](id)",
        "truncate[10](id)",
        "name",
        "lower(name)",
        "upper(name)",
        "truncate[2](name)",
        "bucket[16](name)",
        "hour(at)",
        "day(at)",
        "month(at)",
        "year(at)",
        "bucket[5](at)",
        "truncate[50](price)",
        "bucket[3](price)",
        "bucket[9](code)",
        "day(day)",
        "year(day)",
    ],
)
def test_keys_of_a_term_equal_the_keys_of_its_computed_values(text: str) -> None:
    term = resolve_term(text, SCHEMA)
    for seed in range(20):
        rng = random.Random(f"{text} {seed}")
        values = draw_column(rng, term.column_id, rng.choice([0, 1, 7, 100]))
        split_position = rng.randint(0, len(values))
        chunks = [pa.array(part, ARROW[term.column_id]) for part in (values[:split_position], values[split_position:])]
        keys = compute_term_keys(term, pa.chunked_array(chunks))
        assert keys.rows == len(values)
        for row, value in enumerate(values):
            plain_value = None if value is None else to_iceberg_value(value)
            is_folded = term.transform in INDEXED_FUNCTIONS
            folded_value = fold_case(str(plain_value)) if is_folded and plain_value is not None else plain_value
            result = folded_value if is_folded else compute_transform(term.transform, term.source, plain_value)
            expected = None if result is None else make_key(result, term.kind)
            assert get_key(keys, row) == expected, (seed, row, value)


def write_file(folder: Path, name: str, ids: list[int], names: list[Any]) -> DataFile:
    fields = [
        pa.field("id", pa.int64(), metadata={"PARQUET:field_id": "1"}),
        pa.field("name", pa.string(), metadata={"PARQUET:field_id": "2"}),
    ]
    path = folder / name
    pq.write_table(pa.table([pa.array(ids), pa.array(names, pa.string())], pa.schema(fields)), path, row_group_size=3)
    return DataFile(path.as_uri(), path.stat().st_size, len(ids))


@pytest.fixture
def files(tmp_path: Path) -> list[DataFile]:
    (tmp_path / "broken.parquet").write_bytes(b"no Parquet")
    return [
        write_file(tmp_path, "a.parquet", [1, 2, 3, 4], ["x", None, "Y", "x"]),
        DataFile((tmp_path / "broken.parquet").as_uri(), 10, 4),
        DataFile((tmp_path / "rows.avro").as_uri(), 10, 4, format="AVRO"),
        write_file(tmp_path, "b.parquet", [5, 6], [None, None]),
        write_file(tmp_path, "empty.parquet", [], []),
    ]


def build_task(folder: Path, kind: str, *columns: str) -> IndexTask:
    definition = define_index("i", kind, columns, SCHEMA)
    return IndexTask("table-uuid", definition, Projection(SCHEMA), f"{folder.as_uri()}/_seamark/index")


def open_index(location: str | None) -> Any:
    assert location is not None
    return open_index_file(Path(location.removeprefix("file://")).read_bytes(), location)


@pytest.mark.parametrize(("kind", "columns"), [("bloom", ["name"]), ("bitmap", ["name"]), ("record", ["id", "name"])])
def test_index_file_describes_exactly_the_data_files_that_were_read(
    tmp_path: Path, files: list[DataFile], kind: str, columns: list[str]
) -> None:
    written_index = index_data_files(build_task(tmp_path, kind, *columns), files)
    assert [Path(path).name for path, _ in written_index.skipped] == ["broken.parquet", "rows.avro"]
    assert "AVRO" in written_index.skipped[1][1]
    assert (written_index.files, written_index.rows) == (3, 6)
    index = open_index(written_index.location)
    assert index.header.size_bytes == written_index.size_bytes
    assert index.header.definition == build_task(tmp_path, kind, *columns).definition.id
    assert [Path(path).name for path in index.files.paths] == ["a.parquet", "b.parquet", "empty.parquet"]
    assert index.files.records.tolist() == [4, 2, 0]


def test_bloom_filter_finds_the_files_of_its_keys(tmp_path: Path, files: list[DataFile]) -> None:
    bloom = Bloom(open_index(index_data_files(build_task(tmp_path, "bloom", "lower(name)"), files).location).blob)
    assert bloom.probe(hash_keys(convert_to_keys(pa.array(["y"]), "string"), 0)).tolist()[0] == 1
    assert bloom.probe(hash_keys(convert_to_keys(pa.array(["Y"]), "string"), 0)).tolist() == [0, 0, 0]


def test_bitmap_finds_the_rows_of_its_keys(tmp_path: Path, files: list[DataFile]) -> None:
    bitmap = Bitmap(open_index(index_data_files(build_task(tmp_path, "bitmap", "name"), files).location).blob)
    key_x = KeyRanges("string", (KeyRange(b"x", b"x"),))
    nulls = KeyRanges("string", (), nulls=True)
    assert bitmap.mark_files(key_x).tolist() == [1, 0, 0]
    assert bitmap.mark_files(nulls).tolist() == [1, 1, 0]
    assert list_positions(bitmap.find_rows(0, key_x)).tolist() == [0, 3]
    assert list_positions(bitmap.find_rows(1, nulls)).tolist() == [0, 1]


def test_record_index_finds_the_position_of_its_keys(tmp_path: Path, files: list[DataFile]) -> None:
    record = RecordBlob(open_index(index_data_files(build_task(tmp_path, "record", "id", "name"), files).location).blob)
    keys = [convert_to_keys(pa.array([3, 5, 3]), "long"), convert_to_keys(pa.array(["Y", None, "x"]), "string")]
    lookup = record.lookup(hash_rows(keys, 0), hash_rows(keys, 1))
    # Each result is (key, file, position).
    assert sorted(zip(*(part.tolist() for part in lookup), strict=True)) == [(0, 0, 2), (1, 1, 0)]
    assert record.count == 6


def test_group_without_a_readable_file_makes_no_index_file(tmp_path: Path, files: list[DataFile]) -> None:
    written_index = index_data_files(build_task(tmp_path, "bitmap", "name"), files[1:3])
    assert (written_index.location, written_index.files) == (None, 0)
    assert len(written_index.skipped) == 2
    assert not (tmp_path / "metadata").exists()


def test_literal_and_column_value_have_the_same_hash() -> None:
    column = convert_to_keys(pa.array(["a", "é", ""]), "string")
    literals = [hash_key(make_key(value, "string"), 0) for value in ("a", "é", "")]
    assert hash_keys(column, 0).tolist() == literals
    assert hash_keys(convert_to_keys(pa.array([7], pa.int32()), "int"), 0).tolist() == [
        hash_key(make_key(7, "long"), 0)
    ]
    assert np.array(literals).shape == (3,)


@pytest.mark.parametrize(
    "arrow_type",
    [pa.dictionary(pa.int32(), pa.string()), pa.binary(), pa.large_string(), pa.string_view(), pa.binary_view()],
    ids=str,
)
def test_lower_case_keys_are_the_same_for_every_string_type_of_arrow(arrow_type: pa.DataType) -> None:
    values = ["ÀB", None, "ab", ""]
    plain_array = pa.array(values, pa.string())
    column = plain_array.dictionary_encode() if pa.types.is_dictionary(arrow_type) else plain_array.cast(arrow_type)
    keys = compute_term_keys(resolve_term("lower(name)", SCHEMA), pa.chunked_array([column]))
    assert [get_key(keys, row) for row in range(4)] == ["àb".encode(), None, b"ab", b""]


@pytest.mark.parametrize("column", [pa.array([7]), pa.array([b"\xff"])], ids=["numbers", "no UTF-8"])
def test_lower_case_of_a_non_string_column_is_refused(column: pa.Array) -> None:
    with pytest.raises(ValueError, match=r"string|UTF8"):
        compute_term_keys(resolve_term("lower(name)", SCHEMA), pa.chunked_array([column]))
