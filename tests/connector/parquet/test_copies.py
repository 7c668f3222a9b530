"""Copied row groups against reading, concatenating and dropping columns with pyarrow, DuckDB and DataFusion."""

from __future__ import annotations

import datetime
import decimal
import random
import struct
from pathlib import Path
from typing import Any

import datafusion
import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from seamark.connector.client.storage import Storage
from seamark.connector.parquet.copy import source
from seamark.connector.parquet.copy.source import SourceFile
from seamark.connector.parquet.metrics import Metrics, list_leaves, list_modes
from seamark.formats.iceberg.files import _footer, thrift
from seamark.formats.iceberg.files import footer as footer_module
from seamark.formats.iceberg.files.footer import (
    PATCH,
    ParquetFooter,
    encode_footer,
    encode_group,
    patch_chunks,
    read_footer,
)
from seamark.formats.iceberg.files.parquet import Unreadable
from seamark.formats.iceberg.metadata.sort_order import UNSORTED
from seamark.formats.iceberg.types.schema import Field, Schema
from tests.connector.parquet.copied import add_field_ids, merge_files
from tests.seeds import examples, first_seed, mark_fast

KINDS: dict[str, tuple[pa.DataType, Any]] = {
    "long": (pa.int64(), lambda rng: rng.randrange(-(1 << 60), 1 << 60)),
    "int": (pa.int32(), lambda rng: rng.randrange(100)),
    "text": (pa.string(), lambda rng: rng.choice(["a", "ü" * 5, "x" * rng.randrange(300)])),
    "binary": (pa.binary(), lambda rng: rng.randbytes(rng.randrange(20))),
    "double": (pa.float64(), lambda rng: rng.choice([rng.random(), float("inf"), -0.0])),
    "flag": (pa.bool_(), lambda rng: rng.random() < 0.5),
    "day": (pa.date32(), lambda rng: datetime.date(2020, 1, 1) + datetime.timedelta(rng.randrange(3000))),
    "moment": (
        pa.timestamp("us", "UTC"),
        lambda rng: datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(seconds=rng.random() * 1e8),
    ),
    "price": (pa.decimal128(12, 2), lambda rng: decimal.Decimal(rng.randrange(10**9)) / 100),
    "wide": (pa.decimal128(38, 5), lambda rng: decimal.Decimal(rng.randrange(10**20)) / 10**5),
    "tags": (
        pa.list_(pa.field("element", pa.string())),
        lambda rng: [rng.choice("abc") for _ in range(rng.randrange(4))],
    ),
    "place": (
        pa.struct([pa.field("lat", pa.float64()), pa.field("name", pa.string())]),
        lambda rng: {"lat": rng.random(), "name": rng.choice(["here", None])},
    ),
    "props": (
        pa.map_(pa.string(), pa.int64()),
        lambda rng: [(f"k{number}", number) for number in range(rng.randrange(3))],
    ),
}
CODECS = ["none", "snappy", "gzip", "zstd", "lz4", "brotli"]


def draw_rows(rng: random.Random, schema: pa.Schema, rows: int) -> pa.Table:
    columns = []
    for field in schema:
        draw = KINDS[field.name][1]
        values = [None if field.nullable and rng.random() < 0.2 else draw(rng) for _ in range(rows)]
        columns.append(pa.array(values, field.type))
    return pa.table(columns, schema=schema)


def write_randomly(rng: random.Random, path: Path, rows: pa.Table, encryption: Any = None) -> None:
    """Write the rows with random settings of the writer.

    The small sizes of row groups and pages give files of a few hundred rows several groups and pages.

    Args:
        encryption: The encryption properties of pyarrow's writer, which then writes no Bloom filters.
    """
    names = [column.path for column in list_leaf_columns(rows.schema)]
    flat_columns = [field.name for field in rows.schema if field.type in (pa.int64(), pa.string())]
    encodings = {name: "DELTA_BINARY_PACKED" for name in ("long", "int") if name in rows.schema.names}
    blooms = {name: {"ndv": 100, "fpp": 0.01} for name in flat_columns}
    is_plain = rng.random() < 0.5
    pq.write_table(
        rows,
        path,
        row_group_size=rng.choice([7, 100, 1000]),
        compression=rng.choice(CODECS),
        use_dictionary=False if is_plain else names,
        column_encoding=encodings if is_plain and rng.random() < 0.5 else None,
        data_page_version=rng.choice(["1.0", "2.0"]),
        data_page_size=rng.choice([100, 1 << 20]),
        write_page_index=rng.random() < 0.6,
        write_page_checksum=rng.random() < 0.5,
        store_schema=rng.random() < 0.5,
        store_decimal_as_integer=True,
        bloom_filter_options=blooms if rng.random() < 0.5 and encryption is None else None,
        sorting_columns=[pq.SortingColumn(0)] if rng.random() < 0.3 else None,
        encryption_properties=encryption,
    )


def list_leaf_columns(schema: pa.Schema) -> list[Any]:
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema):
        pass
    actual_schema = pq.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    return [actual_schema.column(number) for number in range(len(actual_schema))]


@pytest.mark.parametrize("number", mark_fast(range(12), 2))
def test_merged_file_has_the_rows_of_its_files(tmp_path: Path, number: int) -> None:
    seed = first_seed() + number
    rng = random.Random(seed)
    names = rng.sample(list(KINDS), rng.randint(1, len(KINDS)))
    nullable = {name: rng.random() < 0.8 for name in names}
    schema = add_field_ids(pa.schema([pa.field(name, KINDS[name][0], nullable[name]) for name in names]))
    parts, paths = [], []
    for part in range(rng.randint(1, 5)):
        rows = draw_rows(rng, schema, rng.choice([1, 50, 500]))
        columns = rng.sample(names, len(names))  # Each file has a different order of columns.
        write_randomly(rng, tmp_path / f"{part}.parquet", rows.select(columns))
        parts.append(rows)
        paths.append(tmp_path / f"{part}.parquet")
    selected_names = rng.sample(names, rng.randint(1, len(names)))
    out = tmp_path / "out.parquet"
    merge_files(paths, out, pa.schema([schema.field(name) for name in selected_names]))
    expected = pa.concat_tables(parts).select(selected_names)
    with pq.ParquetFile(out, page_checksum_verification=True) as file:
        actual = file.read()
    assert actual.cast(expected.schema).equals(expected), seed
    counts = ", ".join(f'count("{name}")' for name in selected_names)
    value_counts = duckdb.sql(f"SELECT {counts} FROM '{out}'").fetchall()[0]
    assert value_counts == tuple(len(column) - column.null_count for column in expected.columns), seed
    assert duckdb.sql(f"SELECT * FROM '{out}'").to_arrow_table().num_rows == expected.num_rows
    session = datafusion.SessionContext()
    session.register_parquet("t", str(out))
    actual_table = pa.Table.from_batches(session.sql(f'SELECT "{selected_names[0]}" FROM t').collect())
    assert sorted(map(repr, actual_table.column(0).to_pylist())) == sorted(map(repr, expected.column(0).to_pylist())), (
        seed
    )
    if "long" in selected_names and expected["long"].drop_null():
        first_value = expected["long"].drop_null()[0].as_py()
        matching_count = sum(value == first_value for value in expected["long"].to_pylist())
        for count_row in (
            duckdb.sql(f"SELECT count(*) FROM '{out}' WHERE long = {first_value}").fetchall()[0],
            tuple(session.sql(f"SELECT count(*) FROM t WHERE long = {first_value}").collect()[0].column(0).to_pylist()),
        ):
            assert count_row == (matching_count,), seed


def test_page_indexes_and_bloom_filters_describe_the_copied_chunks(tmp_path: Path) -> None:
    schema = add_field_ids(pa.schema([("long", pa.int64()), ("text", pa.string())]))
    paths = []
    for part in range(3):
        rows = pa.table({"long": range(part, 30_000, 3), "text": [f"{part}-{n}" for n in range(10_000)]}, schema=schema)
        paths.append(tmp_path / f"{part}.parquet")
        pq.write_table(
            rows,
            paths[-1],
            data_page_size=4096,
            max_rows_per_page=500,
            write_page_index=True,
            use_dictionary=False,
            bloom_filter_options={"long": {"ndv": 10_000, "fpp": 0.001}},
        )
    out = tmp_path / "out.parquet"
    merge_files(paths, out, schema)
    with SourceFile(str(out), Storage()) as merged_file:
        for number, path in enumerate(paths):
            with SourceFile(str(path), Storage()) as source_file:
                for column in range(2):
                    copied_group, source_group = merged_file.footer.groups[number], source_file.footer.groups[0]
                    assert (
                        merged_file.read_column_index(copied_group, column)
                        == source_file.read_column_index(source_group, column)
                        is not None
                    )
                    assert merged_file.read_bloom(copied_group, column) == source_file.read_bloom(source_group, column)
                    _check_offset_index(merged_file, number, column)
                assert merged_file.read_bloom(merged_file.footer.groups[number], 0) is not None
    # DuckDB uses the filters: the range of each row group contains the value 4, but only one filter does.
    probe_rows = duckdb.sql(f"SELECT * FROM parquet_bloom_probe('{out}', 'long', 4)").fetchall()
    assert [is_excluded for *_, is_excluded in probe_rows].count(False) == 1
    # DataFusion uses the page indexes: it skips the pages whose bounds do not contain the value 16002.
    session = datafusion.SessionContext()
    session.register_parquet("t", str(out))
    plan = session.sql("EXPLAIN ANALYZE SELECT text FROM t WHERE long = 16002").to_pydict()["plan"][0]
    pruned_line = next(part for part in plan.replace(",", "\n").splitlines() if "page_index_rows_pruned" in part)
    assert "=0" not in pruned_line.replace(" ", ""), plan


def _check_offset_index(file: SourceFile, number: int, column: int) -> None:
    """Check that each entry of the offset index has the place and the size of one whole data page."""
    index = file.read_offset_index(file.footer.groups[number], column)
    assert index is not None
    fields, _ = thrift.read_structure(index)
    _, (_, pages) = fields[1]  # Field 1 is a list: (type, (element type, elements)).
    assert len(pages) > 5, "the files must be written with several pages in a column"
    for page in pages:
        (_, offset), (_, size) = page[1], page[2]
        end, kind, _, packed_size, _ = _footer.page_at(file.read(offset, size), 0)
        assert (kind, end + packed_size) == (0, size)  # The kind 0 is a data page.


def test_unchanged_footer_is_encoded_to_the_same_bytes(tmp_path: Path) -> None:
    rng = random.Random(first_seed())
    for number in range(20):
        names = rng.sample(list(KINDS), rng.randint(1, len(KINDS)))
        path = tmp_path / f"{number}.parquet"
        write_randomly(rng, path, draw_rows(rng, pa.schema([(name, KINDS[name][0]) for name in names]), 50))
        raw = _read_footer(path)
        footer = read_footer(raw)
        groups = [_encode_again(footer, group) for group in footer.groups]
        assert raw == encode_footer(
            version=footer.version,
            schema=footer.schema,
            rows=footer.rows,
            groups=groups,
            key_values=footer.key_values,
            created_by=footer.created_by,
            orders=footer.orders,
            later_fields=footer.later_fields,
        )


def _encode_again(footer: ParquetFooter, group: Any) -> bytes:
    values = np.stack([group.read_values(name) for name in PATCH], axis=1)
    return encode_group(patch_chunks(footer, group.chunks, values, [None] * len(values)), group.fields)


def _read_footer(path: Path) -> bytes:
    """Return the footer of a file, which ends with the footer's size (4 bytes) and the text PAR1."""
    data = path.read_bytes()
    return data[-8 - int.from_bytes(data[-8:-4], "little") : -8]


def test_corrupt_files_are_refused_without_an_output_file(tmp_path: Path) -> None:
    """Files are truncated, or have a changed footer or a wrong footer length.

    A merge with an accepted file has at least the 300 rows of the undamaged file.
    """
    rng = random.Random(first_seed())
    schema = add_field_ids(pa.schema([("long", pa.int64()), ("text", pa.string())]))
    rows = draw_rows(rng, schema, 300)
    good_path = tmp_path / "good.parquet"
    write_randomly(rng, good_path, rows)
    data = good_path.read_bytes()
    length = int.from_bytes(data[-8:-4], "little")
    refused_count, count = 0, examples(150, 45)
    for number in range(count):
        damaged_bytes = bytearray(data)
        fault = ("truncated", "changed footer", "wrong length")[number % 3]
        if fault == "truncated":
            damaged_bytes = damaged_bytes[: rng.randrange(len(damaged_bytes))]
        elif fault == "changed footer":
            damaged_bytes[len(data) - 8 - rng.randrange(length) - 1] ^= 1 << rng.randrange(8)
        else:
            damaged_bytes[-8:-4] = rng.randrange(1 << 32).to_bytes(4, "little")
        path, out = tmp_path / "broken.parquet", tmp_path / "out.parquet"
        path.write_bytes(damaged_bytes)
        try:
            merge_files([good_path, path], out, schema)
        except (Unreadable, ValueError):
            refused_count += 1
            assert not out.exists()
        else:
            assert pq.read_metadata(out).num_rows >= 300
            out.unlink()
        assert path.read_bytes() == damaged_bytes
    # Nearly all truncated files and wrong lengths are refused, which are two of the three faults.
    assert refused_count > count * 2 / 3


def test_overlapping_column_chunks_are_refused(tmp_path: Path) -> None:
    schema = add_field_ids(pa.schema([("long", pa.int64()), ("int", pa.int32())]))
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"long": range(100), "int": range(100)}, schema=schema), path, use_dictionary=False)
    data, raw = path.read_bytes(), _read_footer(path)
    footer = read_footer(raw)
    group = footer.groups[0]
    values = np.stack([group.read_values(name) for name in PATCH], axis=1)
    values[1, PATCH["data_page"]] = values[0, PATCH["data_page"]]
    forged_footer = encode_footer(
        version=2,
        schema=footer.schema,
        rows=footer.rows,
        groups=[encode_group(patch_chunks(footer, group.chunks, values, [None, None]), group.fields)],
        key_values=(),
        created_by=None,
        orders=footer.orders,
        later_fields={},
    )
    path.write_bytes(data[: -8 - len(raw)] + forged_footer + len(forged_footer).to_bytes(4, "little") + b"PAR1")
    with pytest.raises(Unreadable, match="overlap"):
        SourceFile(str(path), Storage())


def test_files_of_duckdb_and_pyarrow_are_merged_into_one(tmp_path: Path) -> None:
    schema = add_field_ids(pa.schema([("long", pa.int64()), ("text", pa.string())]))
    first_path, second_path, out = tmp_path / "1.parquet", tmp_path / "2.parquet", tmp_path / "out.parquet"
    duckdb.sql(
        "COPY (SELECT range AS long, 'd' || range AS text FROM range(1000)) "
        f"TO '{first_path}' (FORMAT parquet, FIELD_IDS {{long: 1, text: 101}}, ROW_GROUP_SIZE 2048)"
    )
    pq.write_table(pa.table({"long": [1], "text": ["p"]}, schema=schema), second_path)
    merge_files([first_path, second_path], out, schema)
    assert pq.read_table(out)["text"].to_pylist() == [f"d{n}" for n in range(1000)] + ["p"]


class RangeReadStorage(Storage):
    """A storage that reads local files as an object store does: by range reads and output streams."""

    def open(self, location: str) -> tuple[fs.FileSystem, str]:
        filesystem, path = super().open(location)
        return fs.SubTreeFileSystem("/", filesystem), path.lstrip("/")


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("block_bytes", [100, 1000, 4096, 1 << 20])
def test_copy_of_objects_in_blocks_equals_the_copy_of_local_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    rng = random.Random(first_seed())
    schema = add_field_ids(pa.schema([("long", pa.int64()), ("text", pa.string()), ("tags", KINDS["tags"][0])]))
    monkeypatch.setattr(source, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(source, "PAGE_HEADER_MAX_BYTES", 2000)
    monkeypatch.setattr(footer_module, "PAGE_HEADER_MAX_BYTES", 2000)
    parts, paths = [], []
    for part in range(4):
        parts.append(draw_rows(rng, schema, 400))
        paths.append(tmp_path / f"{part}.parquet")
        write_randomly(rng, paths[-1], parts[-1])
    merge_files(paths, tmp_path / "local.parquet", schema)
    merge_files(paths, tmp_path / "object.parquet", schema, RangeReadStorage())
    assert (tmp_path / "object.parquet").read_bytes() == (tmp_path / "local.parquet").read_bytes()


def test_nan_in_the_statistics_of_a_copied_chunk_gives_no_bound() -> None:
    """parquet-java can write NaN as a bound. The bounds of the other chunks do not cover the rows of that chunk."""
    schema = Schema((Field(1, "d", False, "double"),), 0)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"d": [1.0, 100.0, 5.0, 7.0]}), sink, row_group_size=2)
    data = bytes(sink.getvalue())
    size = int.from_bytes(data[-8:-4], "little")

    def read_bounds(first_max: float) -> list[list[Any]]:
        fields, _ = thrift.read_structure(data[-8 - size : -8])
        # A field is (type, value), and the value of a list is (element type, elements).
        _, (_, row_groups) = fields[4]
        _, (_, chunks) = row_groups[0][1]
        _, column_metadata = chunks[0][3]
        _, statistics = column_metadata[12]
        maximum_type, _ = statistics[5]
        statistics[5] = maximum_type, struct.pack("<d", first_max)
        footer = thrift.write_structure(fields)
        encoded_footer = pa.BufferReader(b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1")
        metrics = Metrics(list_leaves(schema), list_modes(schema, {}, UNSORTED))
        metrics.add_copied({})
        metrics.add_copied({})
        rows = metrics.collect(pq.read_metadata(encoded_footer))
        return [rows[name]["values"] for name in ("lower-bounds", "upper-bounds")]

    assert read_bounds(100.0) == [[struct.pack("<d", 1.0).hex().upper()], [struct.pack("<d", 100.0).hex().upper()]]
    assert read_bounds(float("nan")) == [[], []]


def test_invalid_utf8_in_text_statistics_gives_no_bound() -> None:
    schema = Schema((Field(1, "s", False, "string"),), 0)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"s": [b"a", b"\xff"]}), sink)
    metrics = Metrics(list_leaves(schema), list_modes(schema, {}, UNSORTED))
    metrics.add_copied({})
    rows = metrics.collect(pq.read_metadata(pa.BufferReader(sink.getvalue())))
    assert rows["lower-bounds"]["values"] == rows["upper-bounds"]["values"] == []
