"""Tests of small Parquet files that decode to many bytes, read as joined tables, delete files and indexed files."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc  # noqa: F401  not counted to what is measured
import pyarrow.parquet as pq
import pyroaring
import pytest
from isal import isal_zlib
from pyarrow import fs

from seamark.connector.parquet import columns as indexed
from seamark.connector.parquet.columns import Projection, read_columns
from seamark.formats.iceberg.files import thrift
from seamark.formats.iceberg.files.budget import create_decoding_budget
from seamark.formats.iceberg.files.parquet import Unreadable
from seamark.formats.iceberg.files.parquet_reading import (
    FOOTER_FREE_BYTES,
    FOOTER_LIMIT_BYTES,
    BoundedParquet,
    read_page_sizes,
)
from seamark.formats.iceberg.types.schema import Field, Schema
from seamark.formats.index.keys.delete_files import DeleteFile, decode_delete_content
from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.objects.router import open_objects
from seamark.metaserver.planner.joins.dimension_columns import DimensionColumn, FileColumn
from seamark.metaserver.planner.rows.data_columns import DataRows
from seamark.metaserver.settings.settings import Settings
from tests.bombs.peak import measure_peak

MIB = 1 << 20
LIMIT = 64 * MIB
ROWS = 20_000
VALUE = "x" * 100_000
KEY_COLUMN_ID = 1


def write_column(path: Path, column: pa.Array, **options: object) -> Path:
    """Write a file of less than a mebibyte with one column, and return its path."""
    field = pa.field("c", column.type, metadata={"PARQUET:field_id": str(KEY_COLUMN_ID)})
    pq.write_table(pa.table([column], schema=pa.schema([field])), path, compression="zstd", **options)
    assert path.stat().st_size < MIB
    return path


def repeat_value(kind: pa.DataType, rows: int = ROWS) -> pa.Array:
    """Return an array of `rows` rows that all contain the same long value."""
    value = pa.array([VALUE.encode()], pa.binary()).cast(kind)
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), value)


def write_dictionary(folder: Path) -> Path:
    return write_column(folder / "dictionary.parquet", repeat_value(pa.string()))


def write_fixed(folder: Path) -> Path:
    # PyArrow writes each of these values separately, so there are only 2,000. They still decode to three times LIMIT.
    return write_column(folder / "fixed.parquet", repeat_value(pa.binary(len(VALUE)), rows=2_000))


def write_delta(folder: Path) -> Path:
    column = pa.array([VALUE] * 2_000, pa.large_string())
    return write_column(folder / "delta.parquet", column, use_dictionary=False, column_encoding="DELTA_BYTE_ARRAY")


def write_page(folder: Path) -> Path:
    return write_column(
        folder / "page.parquet", pa.array(["y" * (200 * MIB)]), use_dictionary=False, write_statistics=False
    )


def write_nulls(folder: Path) -> Path:
    return write_column(folder / "nulls.parquet", pa.nulls(10_000_000, pa.int64()))


BOMBS = {
    "dictionary": write_dictionary,
    "fixed": write_fixed,
    "delta": write_delta,
    "page": write_page,
    "nulls": write_nulls,
}
Bomb = Callable[[str], Path]


@pytest.fixture(scope="module")
def bomb(tmp_path_factory: pytest.TempPathFactory) -> Bomb:
    """Return a function that writes the file with a name in BOMBS, and returns its path.

    Each of these small files decodes to far more bytes than the server may use for it.
    A file is written only once, because writing takes longer than rejecting it.
    """
    return cache(lambda name: BOMBS[name](tmp_path_factory.mktemp("bombs")))


def count_rows(path: str) -> int:
    return int(pq.ParquetFile(path).metadata.num_rows)


def read_as_dimension(path: str, kind: str) -> str:
    """Read the column as a join does.

    Returns:
        A text with the numbers of keys, rows and bytes that are left of the limit, or the reason of the refusal.
    """

    async def read() -> str:
        home = Path(path).parent
        async with open_objects(Settings(home=home, warehouse=home.as_uri()), SystemClock()) as objects:
            reader = DataRows(
                objects, asyncio.get_running_loop(), mapping=None, limit_bytes=128 * MIB, decoded_bytes=LIMIT
            )
            return await asyncio.to_thread(describe_keys, reader)

    def describe_keys(reader: DataRows) -> str:
        try:
            with reader.read_all(
                Path(path).as_uri(), Path(path).stat().st_size, count_rows(path), [KEY_COLUMN_ID]
            ) as result:
                column = FileColumn.from_array(result[KEY_COLUMN_ID], kind)
        except Unreadable as error:
            return error.reason
        return f"{len(column.collect_keys(None))} keys of {column.rows} rows, {reader.decoded.left_bytes} left"

    return asyncio.run(read())


def read_as_rows(path: str) -> str:
    """Read all rows of the column as a lookup does. Return a text with their number, or the reason of the refusal."""

    async def read() -> str:
        home = Path(path).parent
        async with open_objects(Settings(home=home, warehouse=home.as_uri()), SystemClock()) as objects:
            reader = DataRows(
                objects, asyncio.get_running_loop(), mapping=None, limit_bytes=128 * MIB, decoded_bytes=LIMIT
            )
            return await asyncio.to_thread(describe_read, reader)

    def describe_read(reader: DataRows) -> str:
        count = count_rows(path)
        try:
            with reader.read(
                Path(path).as_uri(), Path(path).stat().st_size, count, [KEY_COLUMN_ID], np.arange(count)
            ) as result:
                return f"{len(result[KEY_COLUMN_ID])} rows"
        except Unreadable as error:
            return error.reason

    return asyncio.run(read())


def read_as_equality_delete(path: str, kind: str) -> str:
    """Decode the file as an equality delete file. Return the deletes as text, or the reason of the refusal."""
    size = Path(path).stat().st_size
    file = DeleteFile(
        path,
        format="parquet",
        content=2,  # equality deletes
        size_bytes=size,
        records=count_rows(path),
        referenced=None,
        offset=-1,
        length=-1,
        columns=(KEY_COLUMN_ID,),
    )
    try:
        return str(decode_delete_content(Path(path).read_bytes(), file, ((KEY_COLUMN_ID, kind),), limit_bytes=LIMIT))
    except Unreadable as error:
        return error.reason


KINDS = {"fixed": "binary", "nulls": "long"}


def test_long_value_repeated_by_every_row_is_one_value_in_memory(tmp_path: Path) -> None:
    size, report = measure_peak(read_as_dimension, write_dictionary(tmp_path), "string")
    assert report == f"1 keys of {ROWS} rows, {LIMIT} left"
    assert size < LIMIT


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("name", ["fixed", "delta", "page", "nulls"])
def test_column_that_decodes_to_more_than_the_limit_is_not_used_as_a_dimension(bomb: Bomb, name: str) -> None:
    size, report = measure_peak(read_as_dimension, bomb(name), KINDS.get(name, "string"))
    assert report == f"decoded it takes more than {LIMIT:,} bytes"
    assert size < 2 * LIMIT


@pytest.mark.parametrize("name", ["dictionary", "fixed", "delta", "page"])
def test_rows_that_decode_to_more_than_the_limit_are_not_read(bomb: Bomb, name: str) -> None:
    size, report = measure_peak(read_as_rows, bomb(name))
    assert report == f"decoded it takes more than {LIMIT:,} bytes"
    assert size < 2 * LIMIT


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("name", ["dictionary", "fixed", "delta", "page", "nulls"])
def test_equality_delete_file_that_decodes_to_more_than_the_limit_is_not_read(bomb: Bomb, name: str) -> None:
    size, report = measure_peak(read_as_equality_delete, bomb(name), KINDS.get(name, "string"))
    assert report == f"decoded it takes more than {LIMIT:,} bytes"
    assert size < 2 * LIMIT


def write_footer(path: Path, change: Callable[[thrift.Fields], None]) -> Path:
    """Write a file with one column and one row, and with a footer that `change` has modified. Return its path."""
    buffer = io.BytesIO()
    field = pa.field("c", pa.int64(), metadata={"PARQUET:field_id": str(KEY_COLUMN_ID)})
    pq.write_table(pa.table([pa.array([1])], schema=pa.schema([field])), buffer)
    data = buffer.getvalue()
    # The last 8 bytes are the length of the footer and the magic number.
    begin = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    footer, _ = thrift.read_structure(data, begin)
    change(footer)
    footer_bytes = thrift.write_structure(footer)
    assert len(footer_bytes) < FOOTER_LIMIT_BYTES
    path.write_bytes(data[:begin] + footer_bytes + len(footer_bytes).to_bytes(4, "little") + b"PAR1")
    return path


def _make_list(count: int, item: object, kind: int = thrift.STRUCT) -> tuple[int, tuple[int, list[object]]]:
    """Return a list field with the same item `count` times."""
    return thrift.LIST, (kind, [item] * count)


def _get_items(fields: thrift.Fields, number: int) -> list[thrift.Fields]:
    """Return the structures in the list that is the field `number`. The value of a field is (Thrift type, content)."""
    _, (_, items) = fields[number]
    return items


# Numbers of fields in the Thrift structures of Parquet.
_SCHEMA, _ROW_GROUPS, _PAIRS = 2, 4, 5  # FileMetaData
_CHUNKS = 1  # RowGroup
_CHUNK_METADATA = 3  # ColumnChunk
_PATH = 3  # ColumnMetaData


def _get_group(footer: thrift.Fields) -> thrift.Fields:
    """Return the first row group."""
    return _get_items(footer, _ROW_GROUPS)[0]


def add_chunks(footer: thrift.Fields) -> None:
    _get_group(footer)[_CHUNKS] = _make_list(400_000, {2: (thrift.I64, 0)})


def add_empty_chunks(footer: thrift.Fields) -> None:
    """Add 400,000 column chunks without fields, which the footer can hold within its limit.

    pyarrow rejects the file, but only after it has allocated memory for them.
    """
    _get_group(footer)[_CHUNKS] = _make_list(count=400_000, item={})


def add_groups(footer: thrift.Fields) -> None:
    empty_group = {_CHUNKS: _make_list(0, None), 2: (thrift.I64, 0), 3: (thrift.I64, 0)}
    footer[_ROW_GROUPS] = _make_list(700_000, empty_group)


def add_pairs(footer: thrift.Fields) -> None:
    footer[_PAIRS] = _make_list(500_000, {1: (thrift.BINARY, b"")})


def add_elements(footer: thrift.Fields) -> None:
    root, *_ = _get_items(footer, _SCHEMA)
    children = [{1: (thrift.I32, 1), 3: (thrift.I32, 1), 4: (thrift.BINARY, b"")}] * 120_000
    root_of_children = {**root, 5: (thrift.I32, len(children))}
    footer[_SCHEMA] = (thrift.LIST, (thrift.STRUCT, [root_of_children, *children]))


def add_paths(footer: thrift.Fields) -> None:
    chunk, *_ = _get_items(_get_group(footer), _CHUNKS)
    _, chunk_metadata = chunk[_CHUNK_METADATA]
    chunk_metadata[_PATH] = _make_list(1_200_000, b"", thrift.BINARY)


FOOTERS = {
    "chunks": add_chunks,
    "claimed": add_empty_chunks,
    "groups": add_groups,
    "pairs": add_pairs,
    "schema": add_elements,
    "paths": add_paths,
}


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("name", FOOTERS)
def test_footer_that_expands_beyond_the_limit_is_not_decoded(tmp_path: Path, name: str) -> None:
    path = write_footer(tmp_path / "f.parquet", FOOTERS[name])
    size, report = measure_peak(describe_open_file, path)
    assert report == f"the footer takes more than {LIMIT:,} bytes when it is decoded"
    assert size < LIMIT


def describe_open_file(path: str) -> str:
    """Open the file. Return its rows and the unused budget as text, or the reason of the refusal."""
    budget = create_decoding_budget(LIMIT)
    try:
        with pa.memory_map(path) as source:
            return f"{BoundedParquet(source, path, budget).rows} rows, {budget.left_bytes} left"
    except Unreadable as error:
        return error.reason


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("count", [1, 40, 700])
def test_memory_of_a_long_footer_is_within_its_estimate(tmp_path: Path, count: int) -> None:
    names = [f"a_column_with_a_long_name_{number}" for number in range(count)]
    table = pa.table({name: pa.array(range(8)) for name in names})
    path = tmp_path / "wide.parquet"
    pq.write_table(table, path, row_group_size=1)
    footer_bytes = int.from_bytes(path.read_bytes()[-8:-4], "little")
    measured_bytes, report = measure_peak(describe_open_file, path)
    assert report.startswith("8 rows, ")
    _, _, left_bytes, _ = report.split()
    estimated_bytes = LIMIT - int(left_bytes)
    if footer_bytes <= FOOTER_FREE_BYTES:
        assert estimated_bytes == 0
    else:
        # Apart from 4 MiB, the estimate is between a third of the memory and four times the memory.
        assert measured_bytes / 3 - 4 * MIB < estimated_bytes < 4 * measured_bytes + 4 * MIB


def test_page_header_that_expands_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    """The header of a data page has a list of ten million structures of one byte each."""
    # Three integers (\x15) that are 0, and a list (\x29) of structures (\xfc) whose length follows.
    header = b"\x15\x00\x15\x00\x15\x00\x29\xfc" + encode_varint(10_000_000) + bytes(10_000_000) + b"\x00"
    path = tmp_path / "pages"
    path.write_bytes(header)
    size, report = measure_peak(count_pages, path)
    assert "exceeds the data" in report or "not a Thrift structure" in report
    assert size < LIMIT


def count_pages(path: str) -> str:
    try:
        return str(read_page_sizes(Path(path).read_bytes(), 10))
    except ValueError as error:
        return str(error)


def encode_varint(number: int) -> bytes:
    """Encode a number of at least 0 with 7 bits in each byte, as Thrift does."""
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*encoded, number))


def read_as_position_delete(path: str) -> str:
    file = DeleteFile(path, "parquet", 1, Path(path).stat().st_size, count_rows(path), None, -1, -1, ())
    try:
        delete_content = decode_delete_content(Path(path).read_bytes(), file, (), limit_bytes=LIMIT)
    except Unreadable as error:
        return error.reason
    return f"{delete_content.positions.nbytes} bytes"


def write_position_deletes(path: Path, paths: pa.Array, positions: pa.Array, **options: object) -> Path:
    pq.write_table(pa.table({"file_path": paths, "pos": positions}), path, compression="zstd", **options)
    return path


def test_long_path_repeated_by_every_position_delete_is_one_path_in_memory(tmp_path: Path) -> None:
    path = write_position_deletes(tmp_path / "d.parquet", repeat_value(pa.string()), pa.array(range(ROWS), pa.int64()))
    size, report = measure_peak(read_as_position_delete, path)
    assert report.endswith(" bytes")
    assert size < LIMIT


def test_position_deletes_of_too_many_rows_are_not_read(tmp_path: Path) -> None:
    rows = 4_000_000
    path = write_position_deletes(
        tmp_path / "d.parquet", pa.array(["f"] * rows), pa.array(np.zeros(rows, dtype=np.int64))
    )
    assert path.stat().st_size < MIB
    size, report = measure_peak(read_as_position_delete, path)
    assert report == f"decoded it takes more than {LIMIT:,} bytes"
    assert size < LIMIT


def read_as_vector(path: str, record_count: str) -> str:
    data = Path(path).read_bytes()
    file = DeleteFile(path, "puffin", 1, len(data), int(record_count), "data.parquet", 0, len(data), ())
    try:
        return str(decode_delete_content(data, file, (), limit_bytes=LIMIT))
    except Unreadable as error:
        return error.reason


def write_vector(path: Path, bitmap: bytes) -> Path:
    """Write a deletion vector with this bitmap: its length, the magic number, the bitmap and the checksum."""
    vector_body = b"\xd1\xd3\x39\x64" + bitmap
    checksum = isal_zlib.crc32(vector_body).to_bytes(4, "big")
    path.write_bytes(len(vector_body).to_bytes(4, "big") + vector_body + checksum)
    return path


def test_deletion_vector_with_runs_of_billions_of_rows_is_not_expanded(tmp_path: Path) -> None:
    bitmap = pyroaring.BitMap64()
    bitmap.add_range(0, 1 << 34)
    bitmap.run_optimize()
    path = write_vector(tmp_path / "v", bitmap.serialize())
    assert path.stat().st_size < 4 * MIB
    size, report = measure_peak(read_as_vector, path, str(1 << 34))
    assert "exceed the memory limit" in report
    assert size < LIMIT


def test_deletion_vector_that_is_too_long_is_not_opened(tmp_path: Path) -> None:
    path = write_vector(tmp_path / "v", bytes(5 * MIB))
    size, report = measure_peak(read_as_vector, path, "1")
    assert "is too long" in report
    assert size < LIMIT


def test_long_default_of_a_column_missing_from_a_file_is_one_value() -> None:
    field = Field(KEY_COLUMN_ID, "c", False, "string", initial_default=VALUE)
    column = FileColumn.make_absent([Schema((field,))], DimensionColumn(KEY_COLUMN_ID, "string"), 1_000_000, "f")
    assert column.rows == 1_000_000
    assert len(column.collect_keys(None)) == 1
    assert column.size_bytes < 10 * MIB


def read_column_within_limit(path: str) -> str:
    """Read the column with the limit LIMIT of decoded bytes. Return its size in bytes, or the reason of a failure.

    The function runs in a separate process, so its limit affects no other test.
    """
    indexed.DECODED_BYTES_MAX = LIMIT
    schema = Schema((Field(KEY_COLUMN_ID, "c", False, "string"),))
    try:
        columns = read_columns(
            path, [KEY_COLUMN_ID], Projection(schema), filesystem=fs.LocalFileSystem(), rows=count_rows(path)
        )
    except Unreadable as error:
        return error.reason
    return str(columns[KEY_COLUMN_ID].nbytes)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("name", ["dictionary", "fixed", "delta", "page", "nulls"])
def test_data_file_that_decodes_to_more_than_the_limit_is_not_indexed(bomb: Bomb, name: str) -> None:
    size, report = measure_peak(read_column_within_limit, bomb(name))
    assert report == f"decoded it takes more than {LIMIT:,} bytes"
    assert size < 2 * LIMIT
