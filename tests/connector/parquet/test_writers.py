"""Files of many writers, with all types and unusual sizes, are merged into one file.

pyarrow, DuckDB, DataFusion and Polars read the rows of the original files from it.
"""

from __future__ import annotations

import datetime
import decimal
import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datafusion
import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.io.fileformat import FileFormatFactory
from pyiceberg.io.pyarrow import PyArrowFileIO, _to_requested_schema, pyarrow_to_schema
from pyiceberg.manifest import FileFormat

from tests.connector.parquet.copied import add_field_ids, concatenate, merge_files
from tests.seeds import first_seed

Writer = Callable[[random.Random, pa.Table, Path], None]
Reader = Callable[[Path], pa.Table]


def read_with_duckdb(path: Path) -> pa.Table:
    return duckdb.sql(f"SELECT * FROM '{path}'").to_arrow_table()


def read_with_datafusion(path: Path) -> pa.Table:
    session = datafusion.SessionContext()
    session.register_parquet("t", str(path))
    return session.sql("SELECT * FROM t").to_arrow_table()


READERS: Mapping[str, Reader] = {
    "pyarrow": lambda path: pq.ParquetFile(path, page_checksum_verification=True).read(),
    "duckdb": read_with_duckdb,
    "datafusion": read_with_datafusion,
    "polars": lambda path: pl.read_parquet(path).to_arrow(),
}


def list_row_texts(table: pa.Table) -> list[str]:
    """Return the rows as texts, sorted, because engines return rows in any order."""
    return sorted(map(repr, table.to_pylist()))


# Files of several writers


def _write_with_pyarrow(rng: random.Random, rows: pa.Table, path: Path) -> None:
    is_plain = rng.random() < 0.6
    encodings: Mapping[pa.DataType, Sequence[str]] = {
        pa.int64(): ("PLAIN", "DELTA_BINARY_PACKED"),
        pa.int32(): ("PLAIN", "DELTA_BINARY_PACKED"),
        pa.float64(): ("PLAIN", "BYTE_STREAM_SPLIT"),
        pa.string(): ("PLAIN", "DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"),
        pa.bool_(): ("PLAIN", "RLE"),
    }
    chosen_encodings = {
        field.name: rng.choice(encodings[field.type]) for field in rows.schema if field.type in encodings
    }
    flat_columns = [name for name in ("long", "text") if name in rows.schema.names]
    pq.write_table(
        rows,
        path,
        row_group_size=rng.choice([60, 1000]),
        compression=rng.choice(["none", "snappy", "gzip", "zstd", "lz4", "brotli"]),
        use_dictionary=not is_plain,
        column_encoding=chosen_encodings if is_plain else None,
        data_page_version=rng.choice(["1.0", "2.0"]),
        data_page_size=rng.choice([200, 1 << 20]),
        write_page_index=rng.random() < 0.5,
        write_page_checksum=rng.random() < 0.5,
        bloom_filter_options={name: {"ndv": 50} for name in flat_columns} if rng.random() < 0.5 else None,
    )


def _build_field_ids(schema: pa.Schema | pa.StructType) -> Any:
    """Return the field ids in the form that DuckDB accepts."""
    result: dict[str, Any] = {}
    for field in schema:
        kind, children = field.type, dict[str, Any]()
        if pa.types.is_struct(kind):
            children = _build_field_ids(kind)
        elif pa.types.is_map(kind):
            children = _build_field_ids(pa.schema([kind.key_field, kind.item_field]))
            children = {"key": children[kind.key_field.name], "value": children[kind.item_field.name]}
        elif pa.types.is_list(kind):
            children = {"element": next(iter(_build_field_ids(pa.schema([kind.value_field])).values()))}
        number = int(field.metadata[b"PARQUET:field_id"])
        result[field.name] = {"__duckdb_field_id": number, **children} if children else number
    return result


def _write_with_duckdb(rng: random.Random, rows: pa.Table, path: Path) -> None:
    with duckdb.connect() as connection:
        connection.register("given", rows)
        ids = str(_build_field_ids(rows.schema)).replace("'", "")
        codec = rng.choice(["snappy", "gzip", "zstd", "lz4_raw", "brotli", "uncompressed"])
        version = rng.choice(["V1", "V2"])
        connection.execute(
            f"COPY (SELECT * FROM given) TO '{path}' (FORMAT parquet, FIELD_IDS {ids}, CODEC {codec}, "
            f"PARQUET_VERSION {version}, ROW_GROUP_SIZE 2048)"
        )


def _write_with_datafusion(rng: random.Random, rows: pa.Table, path: Path) -> None:
    session = datafusion.SessionContext()
    frame = session.create_dataframe([rows.to_batches()], name="given", schema=rows.schema)
    frame.write_parquet_with_options(
        str(path),
        datafusion.ParquetWriterOptions(
            compression=rng.choice(["snappy", "gzip(6)", "zstd(3)", "lz4_raw", "uncompressed"]),
            writer_version=rng.choice(["1.0", "2.0"]),
            dictionary_enabled=rng.random() < 0.5,
            statistics_enabled=rng.choice(["page", "chunk", "none"]),
            bloom_filter_on_write=rng.random() < 0.5,
            data_page_row_count_limit=rng.choice([50, 20_000]),
            max_row_group_size=rng.choice([64, 1 << 20]),
        ),
    )


def _to_large_field(field: pa.Field) -> pa.Field:
    """Return the field with large lists, texts and bytes at all levels, because Polars supports only large types."""
    kind = field.type
    if pa.types.is_struct(kind):
        kind = pa.struct([_to_large_field(child) for child in kind])
    elif pa.types.is_list(kind):
        kind = pa.large_list(_to_large_field(kind.value_field).with_name("item"))
    elif kind in (pa.string(), pa.binary()):
        kind = pa.large_string() if kind == pa.string() else pa.large_binary()
    return field.with_type(kind)


def _write_with_polars(rng: random.Random, rows: pa.Table, path: Path) -> None:
    pl.from_arrow(rows).write_parquet(  # type: ignore[union-attr]
        path,
        arrow_schema=pa.schema([_to_large_field(field) for field in rows.schema]),
        compression=rng.choice(["snappy", "gzip", "zstd", "lz4", "uncompressed", "brotli"]),
        row_group_size=rng.choice([70, 1000]),
        data_page_size=rng.choice([300, 1 << 20]),
        statistics=rng.random() < 0.5,
    )


def _write_with_pyiceberg(rng: random.Random, rows: pa.Table, path: Path) -> None:
    """Write a data file as PyIceberg's `append` does."""
    model, schema = FileFormatFactory.get(FileFormat.PARQUET), pyarrow_to_schema(rows.schema)
    batches = [
        _to_requested_schema(
            requested_schema=schema, file_schema=schema, batch=batch, include_field_ids=True, format_model=model
        )
        for batch in rows.to_batches(max_chunksize=rng.choice([30, 1000]))
    ]
    properties = {
        "write.parquet.compression-codec": rng.choice(["zstd", "snappy", "gzip", "lz4", "uncompressed", "brotli"]),
        "write.parquet.page-size-bytes": rng.choice(["300", "1048576"]),
        "write.parquet.page-row-limit": rng.choice(["40", "20000"]),
        "write.parquet.row-group-limit": rng.choice(["90", "1048576"]),
        "write.parquet.dict-size-bytes": rng.choice(["100", "2097152"]),
    }
    with model.create_writer(PyArrowFileIO().new_output(str(path)), schema, properties) as writer:
        writer.write(pa.Table.from_batches(batches))


WRITERS: Mapping[str, Writer] = {
    "pyarrow": _write_with_pyarrow,
    "duckdb": _write_with_duckdb,
    "datafusion": _write_with_datafusion,
    "polars": _write_with_polars,
    "pyiceberg": _write_with_pyiceberg,
}
VALUE_DRAWERS: Mapping[str, tuple[pa.DataType, Callable[[random.Random], Any]]] = {
    "long": (pa.int64(), lambda rng: rng.randrange(-(1 << 60), 1 << 60)),
    "int": (pa.int32(), lambda rng: rng.randrange(100)),
    "text": (pa.string(), lambda rng: rng.choice(["a", "ü" * 5, "x" * rng.randrange(300), ""])),
    "blob": (pa.binary(), lambda rng: rng.randbytes(rng.randrange(20))),
    "double": (pa.float64(), lambda rng: rng.choice([rng.random(), float("inf"), -0.0])),
    "flag": (pa.bool_(), lambda rng: rng.random() < 0.5),
    "day": (pa.date32(), lambda rng: datetime.date(2020, 1, 1) + datetime.timedelta(rng.randrange(3000))),
    "place": (
        pa.struct([pa.field("lat", pa.float64()), pa.field("name", pa.string())]),
        lambda rng: {"lat": rng.random(), "name": rng.choice(["here", None])},
    ),
    "stops": (
        pa.list_(pa.field("element", pa.struct([pa.field("place", pa.int64()), pa.field("note", pa.string())]))),
        lambda rng: [{"place": n, "note": rng.choice(["n", None])} for n in range(rng.randrange(4))],
    ),
    "words": (
        pa.list_(pa.field("element", pa.string())),
        lambda rng: [rng.choice(["x", None, "y" * 50]) for _ in range(rng.randrange(4))],
    ),
}


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("number", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 60))])
def test_random_files_of_all_writers_are_merged_into_one(tmp_path: Path, number: int) -> None:
    seed = first_seed() + number
    rng = random.Random(seed)
    names = rng.sample(list(VALUE_DRAWERS), rng.randint(1, len(VALUE_DRAWERS)))
    schema = add_field_ids(pa.schema([pa.field(name, VALUE_DRAWERS[name][0]) for name in names]))
    parts, paths = [], []
    for part in range(rng.randint(2, 5)):
        row_count = rng.choice([1, 50, 500])
        random_values = [
            [None if rng.random() < 0.2 else VALUE_DRAWERS[name][1](rng) for _ in range(row_count)] for name in names
        ]
        parts.append(
            pa.table(
                [pa.array(values, VALUE_DRAWERS[name][0]) for name, values in zip(names, random_values, strict=True)],
                schema,
            )
        )
        # PyIceberg 0.12 writes a null list of structs as an empty list.
        writer = rng.choice([name for name in WRITERS if name != "pyiceberg" or "stops" not in names])
        paths.append(tmp_path / f"{part}-{writer}.parquet")
        WRITERS[writer](rng, parts[-1], paths[-1])
        assert pq.read_metadata(paths[-1]).num_rows == row_count
    selected_names = rng.sample(names, rng.randint(1, len(names)))
    out = tmp_path / "out.parquet"
    merge_files(paths, out, pa.schema([schema.field(name) for name in selected_names]))
    expected = list_row_texts(pa.concat_tables(parts).select(selected_names))
    for name, read_rows in READERS.items():
        assert list_row_texts(read_rows(out)) == expected, (seed, name, paths)


# All types, and unusual sizes


def _make_typed_rows() -> pa.Table:
    timestamp = datetime.datetime(2024, 2, 29, 12, 34, 56, 789012)
    price = decimal.Decimal("-1234.56")
    values: list[tuple[str, pa.DataType, Any]] = [
        *((f"int{bits}", kind, -bits) for bits, kind in ((8, pa.int8()), (16, pa.int16()), (32, pa.int32()))),
        *((f"uint{bits}", kind, bits) for bits, kind in ((8, pa.uint8()), (32, pa.uint32()), (64, pa.uint64()))),
        ("half", pa.float16(), np.float16(1.5)),
        ("float", pa.float32(), 0.5),
        ("fixed", pa.binary(7), b"1234567"),
        ("uuid", pa.uuid(), uuid.UUID(int=7).bytes),
        ("in_int32", pa.decimal128(9, 2), price),
        ("in_int64", pa.decimal128(18, 2), price),
        ("in_bytes", pa.decimal128(38, 2), price),
        ("time_ms", pa.time32("ms"), datetime.time(1, 2, 3, 4000)),
        ("time_us", pa.time64("us"), datetime.time(1, 2, 3, 4)),
        ("time_ns", pa.time64("ns"), datetime.time(1, 2, 3, 4)),
        *((f"at_{unit}", pa.timestamp(unit), timestamp.replace(microsecond=0)) for unit in ("ms", "us", "ns")),
        ("at_zone", pa.timestamp("us", "UTC"), timestamp.replace(tzinfo=datetime.UTC)),
        ("large", pa.large_string(), "large"),
        ("nothing", pa.null(), None),
        (
            "list_of_struct",
            pa.list_(pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))])),
            [{"a": 1, "b": ["x"]}],
        ),
        ("map", pa.map_(pa.string(), pa.struct([("v", pa.float64())])), [("k", {"v": 1.0})]),
        ("lists", pa.list_(pa.list_(pa.int64())), [[1], [], [2, 3]]),
    ]
    columns = [pa.array([value, None, value, value], kind) for _, kind, value in values]
    return pa.table(columns, [name for name, _, _ in values])


def _write_int96(path: Path) -> None:
    moments = [datetime.datetime(2024, 1, 1, 1), None, datetime.datetime(1999, 1, 1)]
    rows = pa.table({"at": pa.array(moments, pa.timestamp("ns")), "n": [1, 2, 3]})
    pq.write_table(rows, path, use_deprecated_int96_timestamps=True)
    assert pq.ParquetFile(path).schema.column(0).physical_type == "INT96"


def _write_columns(path: Path, count: int) -> None:
    pq.write_table(pa.table({f"c{number}": [number, None] for number in range(count)}), path, write_page_index=True)


ODD_FILES: Mapping[str, Callable[[Path], None]] = {
    "all types": lambda path: pq.write_table(
        _make_typed_rows(), path, store_decimal_as_integer=True, write_page_index=True
    ),
    "all types, version 2": lambda path: pq.write_table(
        _make_typed_rows(), path, version="2.6", data_page_version="2.0", use_dictionary=False, write_page_checksum=True
    ),
    "int96": _write_int96,
    "no rows": lambda path: pq.write_table(_make_typed_rows().slice(0, 0), path),
    "no row groups": lambda path: pq.ParquetWriter(path, pa.schema([("a", pa.int64())])).close(),
    "one row": lambda path: pq.write_table(_make_typed_rows().slice(0, 1), path),
    "only nulls": lambda path: pq.write_table(_make_typed_rows().slice(1, 1), path),
    "5,000 columns": lambda path: _write_columns(path, 5000),
    "1,000 columns": lambda path: _write_columns(path, 1000),
    "huge values": lambda path: pq.write_table(
        pa.table({"text": ["x" * (24 << 20), "", "y" * (9 << 20)], "n": [1, 2, 3]}), path, use_dictionary=False
    ),
    "split bytes": lambda path: pq.write_table(
        pa.table({"n": [1, None, 3], "f": pa.array([b"12", b"34", None], pa.binary(2))}),
        path,
        use_dictionary=False,
        column_encoding={"n": "BYTE_STREAM_SPLIT", "f": "BYTE_STREAM_SPLIT"},
    ),
    "a row a group": lambda path: pq.write_table(pa.table({"n": range(400)}), path, row_group_size=1),
}
UNREADABLE_CASES = {("split bytes", "duckdb"), ("split bytes", "polars")}
"""Pairs of file and engine that are not tested, because the engine cannot read the original file either."""
OMITTED_CASES = {("5,000 columns", "duckdb"), ("1,000 columns", "duckdb")}
"""Pairs of file and engine that are not tested, because DuckDB reserves 8 MiB for each column that it reads.

A process that has reserved more than the machine's memory cannot start another process by `fork`, as
PySpark does.
"""


LARGE_FILES = {"5,000 columns", "huge values"}
"""The names of the large files in ODD_FILES."""


@pytest.mark.few_cases(4)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LARGE_FILES else []) for name in ODD_FILES]
)
def test_unusual_files_are_copied_unchanged(tmp_path: Path, name: str) -> None:
    path, out = tmp_path / "given.parquet", tmp_path / "out.parquet"
    ODD_FILES[name](path)
    bytes_before = path.read_bytes()
    concatenate([path, path], out)
    assert path.read_bytes() == bytes_before
    for engine, read_rows in READERS.items():
        if (name, engine) in OMITTED_CASES:
            continue
        if (name, engine) in UNREADABLE_CASES:
            with pytest.raises((duckdb.Error, pl.exceptions.ComputeError)):
                read_rows(path)
            continue
        source_table = read_rows(path)
        assert list_row_texts(read_rows(out)) == list_row_texts(pa.concat_tables([source_table, source_table])), engine
    with pq.ParquetFile(path) as old_file, pq.ParquetFile(out) as new_file:
        assert new_file.schema.equals(old_file.schema)
        if new_file.metadata.num_rows:  # The Arrow types come from the copied files.
            assert new_file.read().equals(pa.concat_tables([old_file.read(), old_file.read()]))
