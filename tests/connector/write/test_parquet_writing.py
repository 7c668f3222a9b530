"""Tests of written data files: other readers read the same values, and the metrics in the ContentFile are correct."""

from __future__ import annotations

import datetime as dt
import random
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyiceberg.expressions import EqualTo, GreaterThanOrEqual, IsNaN, IsNull, LessThanOrEqual
from pyiceberg.expressions.visitors import _InclusiveMetricsEvaluator
from pyiceberg.io.pyarrow import (
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
)
from pyiceberg.schema import sanitize_column_names

from seamark.connector.arrow.casting import Unwritable, build_arrow_schema, conform, make_file_name
from seamark.connector.parquet.metrics import compute_lower_bound, compute_upper_bound, list_modes
from seamark.connector.write.data_files import finish_data_file, open_data_file_writer
from seamark.connector.write.target import WriteTarget
from seamark.formats.iceberg.manifests.content_file import decode_content_file
from seamark.formats.iceberg.metadata.sort_order import UNSORTED
from seamark.formats.iceberg.types.schema import Field, ListType, MapType, Schema, StructType
from seamark.formats.iceberg.types.values import FLOATS, decode_single_value
from seamark.formats.runtime.errors import BadRequest
from tests.connector.read import typed
from tests.connector.write.written import (
    EVERY_TYPE,
    build_every_type,
    build_metadata,
    build_order,
    build_target,
    conform_rows,
    index_by_column,
    read_by_pyiceberg,
    to_pyiceberg_file,
    to_pyiceberg_metadata,
)
from tests.seeds import examples

KINDS = list(typed.SAMPLES)


def draw_rows(seed: int, row_count: int, null_fraction: float = 0.2) -> pa.Table:
    rng = random.Random(seed)
    columns = {kind: typed.draw_column(rng, kind, row_count, null_fraction) for kind in KINDS}
    return build_every_type(columns, [rng.randrange(12) for _ in range(row_count)])


def write_data_file(
    rows: pa.Table, write_target: WriteTarget, location: str, *, row_group_rows: int | None = None
) -> dict[str, Any]:
    """Write one unpartitioned data file and return its ContentFile."""
    written_table = pa.Table.from_batches(
        [conform(batch, write_target.schema, write_target.arrow) for batch in rows.to_batches()], write_target.arrow
    )
    if write_target.ordering is not None:
        written_table = write_target.ordering.sort(written_table)
    writer = open_data_file_writer(write_target, location)
    try:
        rows_per_group = row_group_rows or max(1, written_table.num_rows)
        for start in range(0, written_table.num_rows, rows_per_group):
            writer.write(written_table.slice(start, rows_per_group))
        return finish_data_file(writer, write_target, ())
    except BaseException:
        writer.abort()
        raise


def write_file(
    folder: Path, rows: pa.Table, schema: Schema = EVERY_TYPE, **arguments: Any
) -> tuple[dict[str, Any], Any]:
    """Write one data file with row groups of seven rows, and return its ContentFile and the metadata of its table."""
    metadata = build_metadata(folder, schema, **arguments)
    write_target = build_target(metadata)
    return write_data_file(rows, write_target, write_target.generate_location(()), row_group_rows=7), metadata


@pytest.mark.parametrize(("seed", "count"), [(0, 0), (1, 1), (2, 7), (3, 100)])
def test_pyiceberg_reads_the_written_values(tmp_path: Path, seed: int, count: int) -> None:
    rows = draw_rows(seed, count)
    file, metadata = write_file(tmp_path, rows)
    actual_table = read_by_pyiceberg(metadata, [file])
    assert actual_table.num_rows == count
    for position, kind in enumerate(KINDS):
        name = f"c{position} {kind}"
        assert typed.are_all_same(typed.to_plain(kind, actual_table[name]), typed.to_plain(kind, rows[name])), (
            seed,
            kind,
        )
    for name in ("st", "list", "lists"):
        assert actual_table[name].to_pylist() == rows[name].to_pylist(), (seed, name)
    # PyIceberg reads a null map with struct values as an empty map.
    assert actual_table["map"].to_pylist() == [value or [] for value in rows["map"].to_pylist()]
    assert str(actual_table["deep"].to_pylist()) == str(rows["deep"].to_pylist()), seed


def test_duckdb_reads_the_written_values(tmp_path: Path) -> None:
    rows = draw_rows(4, 100)
    file, _ = write_file(tmp_path, rows)
    path = file["file-path"].removeprefix("file://")
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        actual_table = connection.sql(f"SELECT * FROM '{path}'").to_arrow_table()
    for position, kind in enumerate(KINDS):
        name = make_file_name(f"c{position} {kind}")
        written_values, read_values = typed.to_plain(kind, rows.column(position)), actual_table[name]
        if kind == "uuid":
            values = read_values.to_pylist()
            assert [None if value is None else UUID(str(value)).bytes for value in values] == written_values
        elif kind == "timestamptz_ns":  # DuckDB 1.5 reads microseconds, and the last value as infinity.
            micros = typed.to_plain("timestamptz", read_values)
            for actual, nanos in zip(micros, written_values, strict=True):
                assert actual == nanos or abs(actual * 1000 - nanos) < 1000, kind
        else:
            assert typed.are_all_same(typed.to_plain(kind, read_values), written_values), kind
    assert actual_table["list"].to_pylist() == rows["list"].to_pylist()


@pytest.mark.parametrize("kind", KINDS)
def test_bounds_include_every_value_of_the_file(tmp_path: Path, kind: str) -> None:
    schema = Schema((Field(1, "c", False, kind),))

    @settings(
        max_examples=examples(20, 4),
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    @given(typed.draw_columns(kind, size_min=1, size_max=12), st.sampled_from(["truncate(1)", "truncate(3)", "full"]))
    def check_bounds(values: list[Any], mode: str) -> None:
        rows = pa.table({"c": typed.build_array(kind, values)})
        file, metadata = write_file(tmp_path, rows, schema, properties={"write.metadata.metrics.default": mode})
        decode_content_file(file, metadata)
        lower, upper = index_by_column(file["lower-bounds"]), index_by_column(file["upper-bounds"])
        present_values = [value for value in values if value is not None and value == value]
        if not present_values:
            assert (lower, upper) == ({}, {})
            return
        minimum, maximum = (
            decode_single_value(kind, lower[1]),
            decode_single_value(kind, upper[1]) if 1 in upper else None,
        )
        assert all(minimum <= value for value in present_values)
        assert maximum is None or all(value <= maximum for value in present_values)
        if kind not in ("string", "binary", "fixed[3]") or mode == "full":
            assert (minimum, maximum) == (min(present_values), max(present_values))
        assert index_by_column(file["null-value-counts"])[1] == values.count(None)
        if kind in FLOATS:
            assert index_by_column(file["nan-value-counts"])[1] == sum(
                value is not None and value != value for value in values
            )

    check_bounds()


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if not kind.startswith(("decimal", "uuid")) and not kind.endswith("_ns")]
)
def test_pyiceberg_prunes_no_file_that_has_the_value(tmp_path: Path, kind: str) -> None:
    schema = Schema((Field(1, "c", False, kind),))
    for seed in range(8):
        values = typed.draw_column(random.Random(seed), kind, 5, null_share=0.3)
        file, metadata = write_file(tmp_path, pa.table({"c": typed.build_array(kind, values)}), schema)
        expected_schema = to_pyiceberg_metadata(metadata).schema()
        for value in values:
            if kind == "float" and value in (float("inf"), float("-inf")):
                continue  # PyIceberg accepts no infinite float in a predicate.
            if value is None:
                predicates: list[Any] = [IsNull("c")]
            elif value != value:
                predicates = [IsNaN("c")]
            else:
                literal = _to_literal(kind, value)
                predicates = [EqualTo("c", literal), GreaterThanOrEqual("c", literal), LessThanOrEqual("c", literal)]  # type: ignore[call-arg]
            for predicate in predicates:
                assert _InclusiveMetricsEvaluator(expected_schema, predicate).eval(to_pyiceberg_file(file)), (
                    seed,
                    predicate,
                )


def _to_literal(kind: str, value: Any) -> Any:
    if kind == "date":
        return dt.date(1970, 1, 1) + dt.timedelta(days=value)
    if kind == "time":
        return (dt.datetime(1970, 1, 1) + dt.timedelta(microseconds=value)).time()
    if kind.startswith("timestamp"):
        zone = dt.UTC if "tz" in kind else None
        micros = value // 1000 if kind.endswith("_ns") else value
        return (dt.datetime(1970, 1, 1, tzinfo=zone) + dt.timedelta(microseconds=micros)).isoformat()
    return value


def test_metrics_equal_the_metrics_of_pyicebergs_writer(tmp_path: Path) -> None:
    """PyIceberg writes no bounds of fields in structs, so these are not compared."""
    # Fields with ids from 30 on are nested. The types of the other fields that are left out are not supported by
    # PyIceberg's function.
    kept_fields = [field for field in EVERY_TYPE.fields if field.id < 30 and not field.name.endswith(("uuid", "_ns"))]
    rows = draw_rows(5, 60).select([field.name for field in kept_fields])
    file, metadata = write_file(tmp_path, rows, Schema(tuple(kept_fields)))
    expected_schema = sanitize_column_names(to_pyiceberg_metadata(metadata).schema())
    expected_statistics = data_file_statistics_from_parquet_metadata(
        pq.read_metadata(file["file-path"].removeprefix("file://")),
        compute_statistics_plan(expected_schema, {}),
        parquet_path_to_id_mapping(expected_schema),
    ).to_serialized_dict()
    assert index_by_column(file["column-sizes"]) == expected_statistics["column_sizes"]
    assert index_by_column(file["value-counts"]) == expected_statistics["value_counts"]
    assert index_by_column(file["null-value-counts"]) == expected_statistics["null_value_counts"]
    assert file["split-offsets"] == expected_statistics["split_offsets"]
    assert file["record-count"] == 60
    for key, pyiceberg_key in (("lower-bounds", "lower_bounds"), ("upper-bounds", "upper_bounds")):
        expected = expected_statistics[pyiceberg_key]
        actual = index_by_column(file[key])
        # The bounds of a field of type fixed may differ. They only have to be values of the column.
        fixed_field = next(field.id for field in kept_fields if "fixed" in field.name)
        assert {field_id: actual[field_id] for field_id in expected if field_id != fixed_field} == {
            field_id: value for field_id, value in expected.items() if field_id != fixed_field
        }
        assert decode_single_value("fixed[3]", actual[fixed_field]) in typed.SAMPLES["fixed[3]"]


def test_columns_in_structs_have_metrics_and_columns_in_lists_have_only_sizes(tmp_path: Path) -> None:
    file, _ = write_file(tmp_path, draw_rows(6, 60, null_fraction=0.0))
    # The fields 31, 32 and 35 are in structs. The fields from 37 on are in lists and maps.
    assert set(index_by_column(file["column-sizes"])) == {*range(1, len(KINDS) + 1), 31, 32, 35, 37, 39, 41, 44}
    assert set(index_by_column(file["value-counts"])) == {*range(1, len(KINDS) + 1), 31, 32, 35}
    assert decode_single_value("double", index_by_column(file["lower-bounds"])[35]) == 0
    # The lower bound of zeros is -0.0, which differs from 0.0 only in its last byte.
    assert index_by_column(file["lower-bounds"])[35] == index_by_column(file["upper-bounds"])[35][:-1] + b"\x80"


@pytest.mark.parametrize("length", [4095, 4096, 4097, 100_000])
def test_long_values_have_bounds_although_the_footer_has_none(tmp_path: Path, length: int) -> None:
    schema = Schema((Field(1, "s", False, "string"), Field(2, "b", False, "binary")))
    rows = pa.table({"s": ["m", "a" * length, "zz", None] * 4, "b": [b"m", b"\xff" * length, b"z", b"a"] * 4})
    file, _ = write_file(tmp_path, rows, schema)
    lower, upper = index_by_column(file["lower-bounds"]), index_by_column(file["upper-bounds"])
    assert lower == {1: b"a" * 16, 2: b"a"}
    assert upper == {1: b"zz"}  # No text of 16 bytes is greater than all texts that begin with 16 bytes 0xff.
    # The full bounds come from the values: PyArrow writes no statistics for values of more than 4,096 bytes.
    assert read_full_bounds(tmp_path, rows, schema) == ("a" * length, "zz", b"a", b"\xff" * length)


def read_full_bounds(folder: Path, rows: pa.Table, schema: Schema) -> tuple[Any, ...]:
    file, _ = write_file(folder, rows, schema, properties={"write.metadata.metrics.default": "full"})
    lower, upper = index_by_column(file["lower-bounds"]), index_by_column(file["upper-bounds"])
    return lower[1].decode(), upper[1].decode(), lower[2], upper[2]


@given(st.text(max_size=6) | st.text("\ud7ff\ue000\U0010ffff\uffffa", max_size=5), st.integers(1, 4))
def test_truncated_text_is_a_valid_bound(text: str, length: int) -> None:
    assert compute_lower_bound("string", text, length) <= text
    upper_bound = compute_upper_bound("string", text, length)
    if upper_bound is None:
        assert set(text[:length]) == {"\U0010ffff"}
        assert len(text) > length
    else:
        assert upper_bound.encode() >= text.encode()
        assert len(upper_bound) <= length


@given(
    st.binary(max_size=6) | st.text("\xff\xfe", max_size=5).map(lambda text: text.encode("latin1")), st.integers(1, 4)
)
def test_truncated_bytes_are_a_valid_bound(data: bytes, length: int) -> None:
    assert compute_lower_bound("binary", data, length) <= data
    upper_bound = compute_upper_bound("binary", data, length)
    if upper_bound is None:
        assert set(data[:length]) == {0xFF}
    else:
        assert upper_bound >= data


# Table properties


WIDE_SCHEMA = Schema(tuple(Field(1 + n, f"c{n}", False, "int") for n in range(120)))
"""By default, only the first 100 columns of a table have metrics."""


@pytest.mark.parametrize(
    ("schema", "properties", "columns_with_bounds", "columns_with_counts"),
    [
        (EVERY_TYPE, {"write.metadata.metrics.default": "none"}, set(), set()),
        (EVERY_TYPE, {"write.metadata.metrics.default": "counts"}, set(), {1, 2, 31}),
        (
            EVERY_TYPE,
            {"write.metadata.metrics.default": "none", "write.metadata.metrics.column.st.a": "full"},
            {31},
            {31},
        ),
        (EVERY_TYPE, {"write.metadata.metrics.column.st.b.c": "none"}, {1, 2, 31}, {1, 2, 31}),
        (EVERY_TYPE, {"write.metadata.metrics.default": "nonsense"}, {1, 31, 32}, {1, 31, 32}),
        (WIDE_SCHEMA, {}, {1, 100}, {1, 100}),
        (WIDE_SCHEMA, {"write.metadata.metrics.max-inferred-column-defaults": "3"}, {1, 3}, {1, 3}),
        (WIDE_SCHEMA, {"write.metadata.metrics.column.c119": "counts"}, {1, 100}, {1, 100, 120}),
        (WIDE_SCHEMA, {"write.metadata.metrics.default": "full"}, {1, 120}, {1, 120}),
    ],
)
def test_properties_decide_which_columns_have_metrics(
    schema: Schema, properties: dict[str, str], columns_with_bounds: set[int], columns_with_counts: set[int]
) -> None:
    modes = list_modes(schema, properties, UNSORTED)
    bounds = {column_id for column_id, mode in modes.items() if mode.bounds}
    counts = {column_id for column_id, mode in modes.items() if mode.counts}
    assert columns_with_bounds <= bounds
    assert columns_with_counts <= counts
    if schema is WIDE_SCHEMA and "write.metadata.metrics.default" not in properties:
        limit = int(properties.get("write.metadata.metrics.max-inferred-column-defaults", 100))
        assert bounds == set(range(1, limit + 1))
    if properties.get("write.metadata.metrics.default") == "none":
        assert bounds == columns_with_bounds


def test_columns_of_the_sort_order_always_have_bounds() -> None:
    sort_order = build_order(("identity", 110, "asc", "nulls-first"), ("bucket[4]", 111, "asc", "nulls-first"))
    assert {column_id for column_id, mode in list_modes(WIDE_SCHEMA, {}, sort_order).items() if mode.bounds} == {
        *range(1, 101),
        110,
    }
    sparse_modes = list_modes(WIDE_SCHEMA, {"write.metadata.metrics.default": "none"}, sort_order)
    assert {column_id for column_id, mode in sparse_modes.items() if mode.bounds} == {110}


def test_files_have_the_encodings_of_the_table_properties(tmp_path: Path) -> None:
    schema = Schema((Field(1, "id", True, "long"), Field(2, "tags", False, ListType(3, "string", False))))
    rows = pa.table({"id": list(range(40_000)), "tags": [["a", str(number)] for number in range(40_000)]})
    for codec in ("zstd", "gzip", "snappy", "lz4", "brotli", "uncompressed"):
        properties = {
            "write.parquet.compression-codec": codec,
            "write.parquet.page-row-limit": "1000",
            "write.parquet.bloom-filter-enabled.column.id": "true",
            "write.parquet.bloom-filter-enabled.column.tags.element": "true",
            "write.parquet.bloom-filter-fpp.column.id": "0.1",
        }
        metadata = build_metadata(tmp_path, schema, properties=properties)
        write_target = build_target(metadata)
        file = write_data_file(rows, write_target, write_target.generate_location(()))
        with pq.ParquetFile(file["file-path"].removeprefix("file://")) as parquet_file:
            chunks = [parquet_file.metadata.row_group(0).column(column_number) for column_number in (0, 1)]
            assert {chunk.compression for chunk in chunks} == {
                {"uncompressed": "UNCOMPRESSED", "lz4": "LZ4"}.get(codec, codec.upper())
            }
            assert all(chunk.bloom_filter_length for chunk in chunks)
            assert all(chunk.has_offset_index and chunk.has_column_index for chunk in chunks)
            assert parquet_file.read().num_rows == 40_000


@pytest.mark.parametrize(
    ("properties", "message"),
    [
        ({"write.parquet.compression-codec": "lzo"}, "lzo"),
        ({"write.parquet.page-size-bytes": "large"}, "large"),
        (
            {
                "write.parquet.bloom-filter-enabled.column.id": "true",
                "write.parquet.bloom-filter-fpp.column.id": "2",
            },
            "fpp.column.id",
        ),
    ],
)
def test_invalid_property_is_refused_by_name(tmp_path: Path, properties: dict[str, str], message: str) -> None:
    with pytest.raises((Unwritable, BadRequest), match=message):
        write_file(tmp_path, pa.table({"id": [1]}), Schema((Field(1, "id", False, "long"),)), properties=properties)
    assert not list(tmp_path.rglob("*.parquet"))


# Rows that do not fit


def build_one_column_schema(kind: Any, required: bool = False) -> Schema:
    return Schema((Field(1, "c", required, kind),))


NAIVE, AWARE = dt.datetime(2020, 1, 1), dt.datetime(2020, 1, 1, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("kind", "column", "message"),
    [
        ("int", pa.array([1, 2**31, -5]), r"column c is int.*int64 from -5 to 2147483648"),
        ("int", pa.array([1.0]), "double"),
        ("int", pa.array(["1"]), "string"),
        ("int", pa.array([True]), "bool"),
        ("long", pa.array([2**63], pa.uint64()), "9223372036854775808"),
        ("float", pa.array([0.1]), r"double from 0\.1 to 0\.1.*32 bits"),
        ("float", pa.array([1e300]), "1e\\+300"),
        ("float", pa.array([2**24 + 1]), "16777217"),
        ("double", pa.array([2**53 + 1]), "9007199254740993"),
        ("decimal(4, 2)", pa.array([Decimal("123.45")]), r"decimal128\(5, 2\) from 123\.45"),
        ("decimal(4, 2)", pa.array([Decimal("1.234")]), r"1\.234"),
        ("decimal(4, 2)", pa.array([100]), "100"),
        ("decimal(4, 2)", pa.array([1.5]), "double"),
        ("date", pa.array([NAIVE]), "timestamp"),
        ("time", pa.array([1], pa.time64("ns")), "time64"),
        ("timestamp", pa.array([1], pa.timestamp("ns")), "timestamp"),
        ("timestamp", pa.array([AWARE]), "local times"),
        ("timestamptz", pa.array([NAIVE]), "instants"),
        ("timestamp_ns", pa.array([2**62], pa.timestamp("us")), "timestamp"),
        ("string", pa.array([b"x"]), "binary"),
        ("string", pa.array([1]), "int64"),
        ("binary", pa.array(["x"]), "string"),
        ("fixed[3]", pa.array([b"ab", b"abc"]), "3 bytes"),
        ("uuid", pa.array([b"x" * 15]), "16 bytes"),
        ("uuid", pa.array(["not a uuid"]), "UUID"),
        ("boolean", pa.array([1]), "int64"),
        (ListType(2, "int", False), pa.array([[2**40]]), r"c\.element is int"),
        (ListType(2, "int", True), pa.array([[1, None]]), r"c\.element is required"),
        (ListType(2, "int", False), pa.array([1]), "list"),
        (StructType((Field(2, "x", False, "int"),)), pa.array([{"y": 1}]), r"no column c\.y; it has c\.x"),
        (StructType((Field(2, "x", True, "int"),)), pa.array([{"x": None}]), r"c\.x is required"),
        (StructType((Field(2, "x", False, "int"),)), pa.array([1]), "struct"),
        (MapType(2, "string", 3, "int", True), pa.array([[("a", None)]], pa.map_(pa.string(), pa.int32())), "required"),
        (MapType(2, "string", 3, "int", True), pa.array([1]), "map"),
        ("unknown", pa.array([1]), "unknown"),
        ("variant", pa.array([b"x"]), "variant"),
    ],
)
def test_value_that_a_cast_would_change_is_refused_with_its_column(
    tmp_path: Path, kind: Any, column: pa.Array, message: str
) -> None:
    with pytest.raises(Unwritable, match=message):
        write_file(tmp_path, pa.table({"c": column}), build_one_column_schema(kind))
    assert not list(tmp_path.rglob("*.parquet"))


@pytest.mark.parametrize(
    ("kind", "column", "expected"),
    [
        ("int", pa.array([1, None], pa.uint64()), [1, None]),
        ("long", pa.array([1, None], pa.int8()), [1, None]),
        ("float", pa.array([0.5, float("inf"), None]), [0.5, float("inf"), None]),
        ("double", pa.array([1, None], pa.float32()), [1.0, None]),
        ("double", pa.array([2**53]), [2.0**53]),
        ("decimal(9, 2)", pa.array([3, None]), [300, None]),
        ("decimal(9, 2)", pa.array([Decimal("1.500")]), [150]),
        ("date", pa.array([dt.date(1970, 1, 2)], pa.date64()), [1]),
        ("time", pa.array([1], pa.time32("s")), [1_000_000]),
        ("timestamp", pa.array([1], pa.timestamp("s")), [1_000_000]),
        ("timestamptz", pa.array([AWARE], pa.timestamp("ms", "Europe/Berlin")), [1_577_836_800_000_000]),
        ("timestamp_ns", pa.array([7], pa.timestamp("us")), [7000]),
        ("string", pa.array(["a", None]).dictionary_encode(), ["a", None]),
        ("string", pa.array(["a", "bb"], pa.string_view()), ["a", "bb"]),
        ("binary", pa.array([b"abc"], pa.binary(3)), [b"abc"]),
        ("fixed[3]", pa.array([b"abc", None]), [b"abc", None]),
        ("uuid", pa.array(["00010203-0405-0607-0809-0a0b0c0d0e0f", None]), [bytes(range(16)), None]),
        ("uuid", pa.array([bytes(16)], pa.uuid()), [bytes(16)]),
        ("boolean", pa.nulls(2), [None, None]),
    ],
)
def test_value_is_cast_if_it_stays_the_same(tmp_path: Path, kind: str, column: pa.Array, expected: Any) -> None:
    file, metadata = write_file(tmp_path, pa.table({"c": column}), build_one_column_schema(kind))
    assert typed.are_all_same(typed.to_plain(kind, read_by_pyiceberg(metadata, [file])["c"]), expected)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([[1, 2], None, []], pa.large_list(pa.int64())),
        pa.array([[1, 2], None, []], pa.list_view(pa.int32())),
        pa.array([[9], [1, 2], None, [], [8]], pa.list_(pa.int16())).slice(1, 3),
        pa.ListArray.from_arrays(
            pa.array([0, 2, 5, 5]), pa.array([1, 2, 7, 7, 7]), mask=pa.array([False, True, False])
        ),
    ],
    ids=["large", "view", "a slice", "a null with elements"],
)
def test_every_list_type_of_arrow_is_written(tmp_path: Path, column: pa.Array) -> None:
    file, metadata = write_file(tmp_path, pa.table({"c": column}), build_one_column_schema(ListType(2, "long", True)))
    assert read_by_pyiceberg(metadata, [file])["c"].to_pylist() == [[1, 2], None, []]


def test_required_field_can_be_null_only_if_its_struct_is_null(tmp_path: Path) -> None:
    schema = build_one_column_schema(
        StructType((Field(2, "x", True, "string"), Field(3, "y", True, ListType(4, "int", True))))
    )
    rows = pa.table({"c": [None, {"x": "a", "y": [1]}, {"x": "", "y": []}]})
    file, metadata = write_file(tmp_path, rows, schema)
    assert read_by_pyiceberg(metadata, [file])["c"].to_pylist() == rows["c"].to_pylist()
    assert index_by_column(file["null-value-counts"]) == {2: 1}
    with pytest.raises(Unwritable, match=r"column c is required, but 1 .* row 1"):
        write_file(tmp_path, pa.table({"c": [1, None, 3]}), build_one_column_schema("int", required=True))
    with pytest.raises(Unwritable, match=r"column c\.c is required, but the data does not have it"):
        write_file(tmp_path, pa.table({"c": [{}]}), build_one_column_schema(StructType((Field(2, "c", True, "int"),))))


def test_missing_column_has_the_write_default_or_null(tmp_path: Path) -> None:
    defaults: dict[str, Any] = {
        "boolean": True,
        "int": 7,
        "decimal(38, 10)": "12345678901234567890.0000000001",
        "date": "2020-02-29",
        "time": "10:00:01",
        "timestamp": "2020-01-01T00:00:00",
        "timestamptz_ns": "2020-01-01T00:00:00.000000001+00:00",
        "string": "é",
        "uuid": "00010203-0405-0607-0809-0a0b0c0d0e0f",
        "fixed[3]": "616263",
        "double": 0.5,
    }
    inner = StructType((Field(51, "x", True, "int", write_default=5), Field(52, "y", False, "int")))
    schema = Schema(
        (
            Field(50, "given", False, "int"),
            *(
                Field(1 + n, f"d{n}", True, kind, write_default=default)
                for n, (kind, default) in enumerate(defaults.items())
            ),
            Field(53, "st", True, inner, write_default={}),
            Field(54, "none", False, "string"),
            Field(55, "nothing", False, "unknown"),
        )
    )
    metadata = build_metadata(tmp_path, schema)
    write_target = build_target(metadata)
    file = write_data_file(pa.table({"given": [1, 2]}), write_target, write_target.generate_location(()))
    with pq.ParquetFile(file["file-path"].removeprefix("file://"), arrow_extensions_enabled=False) as parquet_file:
        actual_table = parquet_file.read()
    expected = [True, 7, 123456789012345678900000000001, 18_321, 36_001_000_000, 1_577_836_800_000_000]
    expected += [1_577_836_800_000_000_001, "é", bytes(range(16)), b"abc", 0.5]
    for n, (kind, value) in enumerate(zip(defaults, expected, strict=True)):
        assert typed.are_all_same(typed.to_plain(kind, actual_table[f"d{n}"]), [value] * 2), kind
    assert actual_table["st"].to_pylist() == [{"x": 5, "y": None}] * 2
    assert actual_table["none"].to_pylist() == [None, None]
    assert "nothing" not in actual_table.column_names


def test_column_that_the_table_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unwritable, match="no column d; it has c"):
        write_file(tmp_path, pa.table({"c": [1], "d": [2]}), build_one_column_schema("int"))
    repeated_columns = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["c", "c"])
    with pytest.raises(Unwritable, match="several columns named c"):
        write_file(tmp_path, repeated_columns, build_one_column_schema("int"))


def test_column_names_are_escaped_as_in_iceberg_without_conflicts() -> None:
    schema = Schema((Field(1, "a b", False, "int"), Field(2, "a_x20b", False, "int"), Field(3, "1é", False, "int")))
    assert build_arrow_schema(schema).names == ["a_x20b", "a_x20b_2", "_1é"]


# Sorted files


@pytest.mark.each_value
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("direction", "nulls"), [("asc", "nulls-first"), ("desc", "nulls-first"), ("asc", "nulls-last")]
)
def test_rows_are_written_in_the_sort_order_of_the_table(tmp_path: Path, kind: str, direction: str, nulls: str) -> None:
    values = typed.draw_column(random.Random(f"{kind} {direction} {nulls}"), kind, 60)
    rows = pa.table({"c": typed.build_array(kind, values), "n": list(range(60))})
    schema = Schema((Field(1, "c", False, kind), Field(2, "n", False, "long")))
    sort_order = build_order(("identity", 1, direction, nulls), ("truncate[10]", 2, "desc", "nulls-last"))
    file, metadata = write_file(tmp_path, rows, schema, order=sort_order)
    assert file["sort-order-id"] == 1
    actual_table = read_by_pyiceberg(metadata, [file])
    # The second field sorts by the number truncated to tens, in descending order.
    rows_by_second_field = sorted(range(60), key=lambda row: -(row // 10))
    present_rows = [row for row in rows_by_second_field if values[row] is not None]
    present_rows.sort(key=lambda row: _make_sort_key(values[row]), reverse=direction == "desc")
    # A reversed stable sort also reverses equal rows. Therefore each value takes its rows from `rows_by_value`.
    rows_by_value: dict[Any, list[int]] = {}
    for row in rows_by_second_field:
        rows_by_value.setdefault(None if values[row] is None else _make_sort_key(values[row]), []).append(row)
    null_rows = rows_by_value.pop(None, [])
    sorted_rows = [
        row for key in dict.fromkeys(_make_sort_key(values[row]) for row in present_rows) for row in rows_by_value[key]
    ]
    assert actual_table["n"].to_pylist() == (
        null_rows + sorted_rows if nulls == "nulls-first" else sorted_rows + null_rows
    )


def _make_sort_key(value: Any) -> Any:
    """Return a key with which Python sorts values as Iceberg does: -0.0 before 0.0, and NaN last."""
    if isinstance(value, float):
        if value != value:
            return (2, 0.0, 0)
        return (1, value, 0 if str(value).startswith("-") else 1)
    return value.encode() if isinstance(value, str) else value


def test_file_contains_exactly_the_conformed_rows(tmp_path: Path) -> None:
    """The expected rows are those that `conform` returns."""
    rows = draw_rows(8, 50)
    metadata = build_metadata(tmp_path, EVERY_TYPE)
    write_target = build_target(metadata)
    file = write_data_file(rows, write_target, write_target.generate_location(()))
    with pq.ParquetFile(file["file-path"].removeprefix("file://")) as parquet_file:
        assert parquet_file.schema_arrow.names == write_target.arrow.names
        actual_table = parquet_file.read()
    expected = conform_rows(rows, write_target)
    for name in ("st", "list", "map", "lists"):
        assert actual_table[name].to_pylist() == expected[name].to_pylist()
    assert actual_table["map"].to_pylist() == rows["map"].to_pylist()


def test_column_without_repeated_values_has_no_dictionary(tmp_path: Path) -> None:
    row_count = 40_000
    numbers = [random.Random(7).randrange(2**60) + number for number in range(row_count)]
    input_table = pa.table(
        {
            "id": numbers,
            "run": [number // 1000 for number in range(row_count)],
            "word": [f"w{number % 100}" for number in range(row_count)],
            "unique": [f"{number:x}" if number % 3 else None for number in numbers],
        }
    )
    kinds = {"id": "long", "run": "long", "word": "string", "unique": "string"}
    schema = Schema(tuple(Field(place, name, False, kind) for place, (name, kind) in enumerate(kinds.items(), 1)))
    write_target = build_target(build_metadata(tmp_path, schema))
    for written_rows, columns_without_dictionary in (
        (row_count, {"id", "unique"}),
        (1000, {"id", "unique"}),
        (100, {"id", "unique", "word"}),
    ):
        file = write_data_file(input_table.slice(0, written_rows), write_target, write_target.generate_location(()))
        with pq.ParquetFile(file["file-path"].removeprefix("file://")) as parquet_file:
            chunks = [parquet_file.metadata.row_group(0).column(place) for place in range(len(kinds))]
            assert {
                chunk.path_in_schema for chunk in chunks if not chunk.has_dictionary_page
            } == columns_without_dictionary
            assert parquet_file.read().equals(input_table.slice(0, written_rows).cast(parquet_file.schema_arrow))


def test_values_of_a_large_column_without_repeats_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counting all values takes several times as long as writing them, and a sample is enough for such a column."""
    counted_rows: list[int] = []

    def record_and_count(column: pa.ChunkedArray) -> pa.Scalar:
        counted_rows.append(len(column))
        return count_distinct(column)

    count_distinct = pc.count_distinct
    monkeypatch.setattr(pc, "count_distinct", record_and_count)
    schema = build_one_column_schema("long")
    write_target = build_target(build_metadata(tmp_path, schema, properties={"write.parquet.dict-size-bytes": "1024"}))
    write_data_file(pa.table({"c": range(40_000)}), write_target, write_target.generate_location(()))
    sample_rows = 16_384  # The size of the writer's sample, which is less than the 40,000 rows of the column.
    assert counted_rows == [sample_rows]
