"""Rows that are read from single pages equal the rows of the file. Unreliable page indexes are not used."""

from __future__ import annotations

import decimal
import io
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamark.connector.parquet.pages import Pages
from seamark.formats.iceberg.files import thrift
from tests.seeds import first_seed

ROWS = 40_000
CODECS = ("none", "snappy", "zstd", "gzip", "lz4")


def draw_table(rng: np.random.Generator, rows: int) -> pa.Table:
    """Return columns of many types, some with nulls, with few or many distinct values."""

    def add_nulls(values: pa.Array) -> pa.Array:
        return pa.compute.if_else(pa.array(rng.random(rows) < 0.2), pa.scalar(None, values.type), values)

    words = pa.array([f"word {number}" * (number % 4) for number in range(50)])
    return pa.table(
        {
            "number": pa.array(rng.integers(-(2**60), 2**60, rows)),
            "sorted": pa.array(np.arange(rows, dtype=np.int32)),
            "few": add_nulls(pa.array(rng.integers(0, 5, rows), pa.int16())),
            "word": add_nulls(words.take(pa.array(rng.integers(0, 50, rows)))),
            "text": pa.array([f"{number:x}" * 3 for number in rng.integers(0, 2**40, rows).tolist()]),
            "float": add_nulls(pa.array(rng.random(rows))),
            "flag": add_nulls(pa.array(rng.random(rows) < 0.5)),
            "at": pa.array(rng.integers(0, 2**50, rows), pa.timestamp("us", tz="UTC")),
            "nanos": add_nulls(pa.array(rng.integers(0, 2**60, rows), pa.timestamp("ns"))),
            "amount": pa.array([decimal.Decimal(number) / 100 for number in rng.integers(0, 10**9, rows).tolist()]),
            "bytes": add_nulls(pa.array([value.tobytes() for value in rng.integers(0, 9, (rows, 3), dtype=np.uint8)])),
            "nothing": pa.nulls(rows, pa.int64()),
            "list": pa.array([[number] for number in range(rows)]),
            "struct": pa.array([{"a": number} for number in range(rows)]),
        }
    )


def write_parquet(table: pa.Table, **parquet_options: Any) -> bytes:
    out = io.BytesIO()
    parquet_options = {"row_group_size": 25_000, "max_rows_per_page": 2_000, "write_page_index": True} | parquet_options
    pq.write_table(table, out, **parquet_options)
    return out.getvalue()


def open_pages(data: bytes) -> tuple[Pages, pq.ParquetFile]:
    source = pa.BufferReader(data)
    file = pq.ParquetFile(source)
    return Pages(source, file, hole_bytes=100), file


def draw_row_numbers(rng: np.random.Generator, rows: int) -> Any:
    """Return a few random row numbers, or many consecutive row numbers."""
    if rng.random() < 0.5:
        return np.sort(rng.choice(rows, int(rng.integers(1, 6)), replace=False))
    first_row = int(rng.integers(0, rows - 10))
    return np.arange(first_row, min(rows, first_row + int(rng.integers(1, rows // 5))))


def check_rows_from_pages(
    data: bytes, table: pa.Table, names: Sequence[str], rng: np.random.Generator, message: str
) -> int:
    """Check that pages give the rows of the file, and return how often pages were read."""
    pages, file = open_pages(data)
    group_start = page_reads = 0
    for number in range(file.metadata.num_row_groups):
        rows = file.metadata.row_group(number).num_rows
        wanted_rows = draw_row_numbers(rng, rows)
        actual = pages.read(number, names, wanted_rows)
        if actual is not None:
            page_reads += 1
            expected = table.select(names).take(pa.array(group_start + wanted_rows))
            assert pa.Table.from_batches([actual]).equals(expected.combine_chunks()), (message, number, wanted_rows)
        group_start += rows
    return page_reads


FLAT_COLUMNS = ("number", "sorted", "few", "word", "text", "float", "flag", "at", "nanos", "amount", "bytes", "nothing")


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("codec", CODECS)
def test_rows_from_pages_equal_the_rows_of_the_file(codec: str) -> None:
    seed = first_seed()
    rng, source = np.random.default_rng(seed), random.Random(seed)
    table = draw_table(rng, ROWS)
    page_reads = 0
    for round_number in range(3):
        parquet_options: dict[str, Any] = {
            "compression": codec,
            "data_page_version": source.choice(("1.0", "2.0")),
            "use_dictionary": source.choice((True, False)),
            "dictionary_pagesize_limit": source.choice((1 << 10, 1 << 16, 1 << 20)),
            "max_rows_per_page": source.choice((500, 2_000, 5_000)),
            "write_page_checksum": source.random() < 0.5,
            "write_statistics": source.random() < 0.5,
            "bloom_filter_options": {"number": True} if source.random() < 0.3 else None,
        }
        data = write_parquet(table, **{name: value for name, value in parquet_options.items() if value is not None})
        for names in (source.sample(FLAT_COLUMNS, 3), ["sorted"], list(FLAT_COLUMNS)):
            page_reads += check_rows_from_pages(
                data, table, names, rng, f"seed {seed}, turn {round_number}, {parquet_options}, {names}"
            )
    assert page_reads > 3, f"seed {seed}: pages were read {page_reads} times only"


def test_columns_with_different_page_boundaries_give_the_same_rows() -> None:
    rng = np.random.default_rng(3)
    table = pa.table({"narrow": np.arange(ROWS, dtype=np.int32), "wide": [f"{number:0100d}" for number in range(ROWS)]})
    data = write_parquet(
        table, max_rows_per_page=20_000, data_page_size=9_000, write_batch_size=100, use_dictionary=False
    )
    assert sum(check_rows_from_pages(data, table, ["narrow", "wide"], rng, "") for _ in range(5)) > 5


def test_reading_few_rows_reads_a_small_part_of_the_column() -> None:
    table = pa.table({"n": np.random.default_rng(5).integers(0, 2**60, ROWS)})
    data = write_parquet(table, row_group_size=ROWS, use_dictionary=False)
    reads: list[int] = []

    class Source:
        def read_at(self, size: int, offset: int) -> bytes:
            reads.append(size)
            return data[offset : offset + size]

    pages = Pages(Source(), pq.ParquetFile(pa.BufferReader(data)), hole_bytes=0)
    actual = pages.read(0, ["n"], np.array([7, 31_000]))
    assert actual is not None
    assert actual.column(0).to_pylist() == table.column(0).take([7, 31_000]).to_pylist()
    assert sum(reads) < len(data) / 5


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("names", [["list"], ["struct"], ["number", "list"], ["list.list.element"], ["unknown"]])
def test_pages_of_nested_columns_are_not_used(names: list[str]) -> None:
    pages, _ = open_pages(write_parquet(draw_table(np.random.default_rng(1), 5_000), max_rows_per_page=100))
    assert pages.read(0, names, np.array([3])) is None


def test_pages_are_not_used_for_rows_on_all_pages_or_without_a_page_index() -> None:
    table = draw_table(np.random.default_rng(1), 20_000)
    pages, _ = open_pages(write_parquet(table))
    assert pages.read(0, ["number"], np.arange(0, 20_000, 100)) is None
    pages, _ = open_pages(write_parquet(table, write_page_index=False))
    assert pages.read(0, ["number"], np.array([3])) is None


def find_offset_index(data: bytes) -> tuple[int, int]:
    """Return the position and the size of the offset index of the first column in the first row group."""
    _, file = open_pages(data)
    out = io.BytesIO()
    file.metadata.write_metadata_file(out)
    footer, _ = thrift.read_structure(out.getvalue(), 4)
    _, row_groups = footer[4][1]  # The value of a list is the pair (type, elements).
    _, chunks = row_groups[0][1][1]
    return chunks[0][4][1], chunks[0][5][1]  # These are offset_index_offset and offset_index_length.


def test_corrupt_page_index_gives_the_right_rows_or_is_not_used() -> None:
    table = pa.table({"n": np.random.default_rng(5).integers(0, 2**60, 30_000)})
    data = write_parquet(table, row_group_size=30_000, use_dictionary=False, max_rows_per_page=1_000)
    offset, size = find_offset_index(data)
    source, unused_count = random.Random(11), 0
    for _ in range(600):
        damaged_bytes = bytearray(data)
        for _ in range(source.choice((1, 1, 2, 4))):
            damaged_bytes[source.randrange(offset, offset + size)] ^= source.randrange(1, 256)
        pages, _ = open_pages(bytes(damaged_bytes))
        wanted_rows = np.sort(np.array(source.sample(range(30_000), 3)))
        actual = pages.read(0, ["n"], wanted_rows)
        unused_count += actual is None
        if actual is not None:
            assert actual.column(0).to_pylist() == table.column(0).take(pa.array(wanted_rows)).to_pylist()
    assert unused_count > 40


def test_pages_that_contradict_the_page_index_are_not_used() -> None:
    table = pa.table({"n": np.arange(30_000)})
    data = write_parquet(table, row_group_size=30_000, use_dictionary=False, max_rows_per_page=1_000)
    offset, size = find_offset_index(data)
    index = thrift.read_structure(data, offset)[0]
    _, (_, locations) = index[1]  # Field 1 is a list: (type, (element type, elements)).
    # A page has 1,000 rows, so pages 4 and 5 begin with the rows 4,000 and 5,000.
    locations[4][3], locations[5][3] = (thrift.I64, 3_999), (thrift.I64, 5_001)  # Field 3 is the first row of a page.
    wrong_index_bytes = thrift.write_structure(index)
    assert len(wrong_index_bytes) == size
    pages, _ = open_pages(data[:offset] + wrong_index_bytes + data[offset + size :])
    for row in (3_500, 3_999, 4_500, 5_000):
        assert pages.read(0, ["n"], np.array([row])) is None
    actual = pages.read(0, ["n"], np.array([9_000]))
    assert actual is not None
    assert actual.column(0).to_pylist() == [9_000]


SCALARS: dict[int, st.SearchStrategy[Any]] = {
    thrift.TRUE: st.none(),
    thrift.FALSE: st.none(),
    thrift.I8: st.integers(0, 255),
    thrift.I16: st.integers(-(2**15), 2**15 - 1),
    thrift.I32: st.integers(-(2**31), 2**31 - 1),
    thrift.I64: st.integers(-(2**63), 2**63 - 1),
    thrift.DOUBLE: st.binary(min_size=8, max_size=8),
    thrift.BINARY: st.binary(max_size=300),
}
# A boolean in a struct is part of the type of its field. In a list, a boolean is a byte: 1 or 2.
IN_LISTS = {**SCALARS, thrift.TRUE: st.sampled_from([1, 2]), thrift.FALSE: st.sampled_from([1, 2])}


def draw_field_of_kinds(kinds: dict[int, st.SearchStrategy[Any]]) -> st.SearchStrategy[tuple[int, Any]]:
    return st.sampled_from(sorted(kinds)).flatmap(lambda kind: st.tuples(st.just(kind), kinds[kind]))


def draw_list_field(inner: dict[int, st.SearchStrategy[Any]]) -> st.SearchStrategy[tuple[int, Any]]:
    return st.sampled_from(sorted(inner)).flatmap(
        lambda kind: st.tuples(st.just(kind), st.lists(inner[kind], max_size=20))
    )


def draw_struct_fields(depth: int) -> st.SearchStrategy[dict[int, tuple[int, Any]]]:
    kinds = dict(SCALARS)
    if depth:
        inner = draw_struct_fields(depth - 1)
        kinds |= {thrift.STRUCT: inner, thrift.LIST: draw_list_field({**IN_LISTS, thrift.STRUCT: inner})}
    return st.dictionaries(st.integers(1, 40), draw_field_of_kinds(kinds), max_size=6)


@given(draw_struct_fields(2))
def test_thrift_structure_survives_a_round_trip(fields: dict[int, tuple[int, Any]]) -> None:
    data = thrift.write_structure(fields)
    assert thrift.read_structure(b"x" + data + b"y", 1) == (fields, 1 + len(data))


@given(st.binary(max_size=60))
def test_random_bytes_raise_a_value_error_or_are_a_thrift_structure(data: bytes) -> None:
    try:
        thrift.read_structure(data)
    except ValueError:
        return


def test_thrift_footer_is_written_to_the_same_bytes() -> None:
    data = write_parquet(draw_table(np.random.default_rng(1), 3_000))
    # A Parquet file ends with the footer, the size of the footer (4 bytes) and the text PAR1.
    size = int.from_bytes(data[-8:-4], "little")
    footer = data[-8 - size : -8]
    assert thrift.write_structure(thrift.read_structure(footer)[0]) == footer
