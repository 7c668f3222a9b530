"""Tests of cubes: entries equal DuckDB's aggregates, and a damaged or inexact entry is refused."""

from __future__ import annotations

import math
import random
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from isal import isal_zlib

from seamark.formats.iceberg.expressions.arrow import to_row_type
from seamark.formats.iceberg.types.schema import Field, Schema, StructType
from seamark.formats.index.definitions import IndexDefinition, define_index, parse_definition
from seamark.formats.index.keys.measures import parse_measure
from seamark.formats.index.kinds.arrow_sizes import count_decoded_bytes, find_batches
from seamark.formats.index.kinds.cube import CUBE, CubeEntries, SumOverflow, build_entry_schema, combine_groups
from seamark.formats.index.kinds.kind import UnknownVersion
from seamark.formats.runtime.errors import BadRequest

SCHEMA = Schema(
    (
        Field(1, "ts", False, "timestamp"),
        Field(2, "day", False, "date"),
        Field(3, "country", False, "string"),
        Field(4, "ratio", False, "double"),
        Field(5, "price", False, "decimal(12, 2)"),
        Field(6, "discount", False, "decimal(3, 2)"),
        Field(7, "qty", False, "int"),
        Field(8, "big", False, "long"),
        Field(9, "at", False, "timestamptz"),
        Field(10, "place", False, StructType((Field(11, "city", False, "string"),))),
    ),
    schema_id=0,
)
_TYPES = {
    "ts": pa.timestamp("us"),
    "day": pa.date32(),
    "country": pa.string(),
    "ratio": pa.float64(),
    "price": pa.decimal128(12, 2),
    "discount": pa.decimal128(3, 2),
    "qty": pa.int32(),
    "big": pa.int64(),
    "at": pa.timestamp("us", "UTC"),
}
_IDS = {field.name: field.id for field in SCHEMA.fields}


def define_cube(columns: list[str], measures: list[str], **parameters: float) -> IndexDefinition:
    return define_index("c", "cube", columns, SCHEMA, measures=measures, parameters=parameters)


def build_entry(definition: IndexDefinition, rows: pa.Table) -> pa.RecordBatch:
    columns = {_IDS[name]: rows[name] for name in rows.column_names}
    return CUBE.build_entry_with_aggregates(definition.terms, definition.measures, columns, definition.parameters)


def open_entries(*entries: pa.RecordBatch) -> CubeEntries:
    return CUBE.open(memoryview(b"".join(map(bytes, CUBE.encode(entries)))))


def draw_rows(seed: int, rows: int = 400) -> pa.Table:
    generator = random.Random(seed)

    def draw_value(name: str) -> Any:
        if generator.random() < 0.15:
            return None
        moment = datetime(1969, 12, 28) + timedelta(minutes=generator.randrange(9000))
        match name:
            case "ts":
                return moment
            case "at":
                return moment.replace(tzinfo=UTC)
            case "day":
                return moment.date()
            case "country":
                return generator.choice(["at", "ch", "de", "\N{SNOWMAN}"])
            case "ratio":
                return generator.choice([0.0, -0.0, math.nan, math.inf, 0.5, -7.25])
            case "price":
                return Decimal(generator.randrange(-(10**9), 10**9)).scaleb(-2)
            case "discount":
                return Decimal(generator.randrange(100)).scaleb(-2)
            case "qty":
                return generator.randrange(-1000, 1000)
        return generator.randrange(-(2**62), 2**62)

    return pa.table({name: pa.array([draw_value(name) for _ in range(rows)], kind) for name, kind in _TYPES.items()})


@pytest.mark.parametrize("dimensions", [["day(ts)", "country"], ["ratio"], ["date_trunc('month', day)", "hour(ts)"]])
def test_entry_has_the_aggregates_that_duckdb_computes(dimensions: list[str]) -> None:
    measures = ["count(*)", "count(qty)", "sum(qty)", "sum(big)", "avg(price)", "sum(price * (1 - discount))"]
    measures += ["min(ratio)", "max(ratio)", "min(country)", "max(price)", "sum(qty + qty)", "min(ts)"]
    definition = define_cube(dimensions, measures)
    rows = draw_rows(len(dimensions))
    entry = build_entry(definition, rows)
    assert entry.schema == build_entry_schema(definition.terms, definition.measures)
    keys = [
        f"CAST(date_trunc('{term.transform}', {term.name}) AS {'DATE' if term.source == 'date' else 'TIMESTAMP'})"
        if term.transform != "identity"
        else term.name
        for term in definition.terms
    ]
    # The text computes the lowest ratio that is a number. If all ratios are NaN, the aggregate is NaN.
    lowest = "min(CASE WHEN isnan(ratio) THEN NULL ELSE ratio END)"
    expected = duckdb.sql(
        f"SELECT {', '.join(keys)}, count(*), count(qty), sum(qty), sum(big), sum(price), count(price),"
        f" sum(price * (1 - discount)), coalesce({lowest}, min(ratio)), coalesce({lowest.replace('min', 'max', 1)},"
        " max(ratio)), min(country), max(price), sum(qty + qty), min(ts) FROM rows GROUP BY ALL"
    ).fetchall()
    # An entry has separate groups for zeros with different signs.
    partials = pa.Table.from_batches([entry])
    merged_groups = duckdb.from_arrow(partials).query(
        "e",
        f"SELECT {', '.join(f'd{n}' for n in range(len(keys)))}, sum(m0), sum(m1), sum(m2), sum(m3), sum(m4), sum(m5),"
        f" sum(m6), {lowest.replace('ratio', 'm7')}, {lowest.replace('ratio', 'm8').replace('min', 'max', 1)},"
        " min(m9), max(m10), sum(m11), min(m12) FROM e GROUP BY ALL",
    ).fetchall()  # fmt: skip
    assert sorted(map(repr, map(_normalize_row, merged_groups))) == sorted(map(repr, map(_normalize_row, expected)))


def _normalize_row(row: tuple[Any, ...]) -> list[Any]:
    """Return a row in which equal numbers are represented equally."""
    return [_normalize_value(value) for value in row]


def _normalize_value(value: Any) -> Any:
    if isinstance(value, int | Decimal):
        return Decimal(value).normalize()
    if isinstance(value, float):
        return None if math.isnan(value) else value + 0.0
    return value


def test_min_and_max_are_nan_only_if_all_values_are_nan() -> None:
    rows = pa.table({"country": ["a", "a", "b", "c"], "ratio": [math.nan, 1.0, math.nan, None]})
    entry = build_entry(define_cube(["country"], ["min(ratio)", "max(ratio)"]), rows).to_pydict()
    assert entry["m1"][0] == entry["m2"][0] == 1.0
    assert math.isnan(entry["m1"][1])
    assert math.isnan(entry["m2"][1])
    assert entry["m1"][2] is None


def test_file_with_a_value_beyond_the_type_of_the_engine_is_refused() -> None:
    ints = pa.table({"country": ["a", "a"], "qty": pa.array([2**31 - 1, 1], pa.int32())})
    with pytest.raises(ValueError, match="overflow"):
        build_entry(define_cube(["country"], ["sum(qty + 1)"]), ints)
    wide_schema = Schema((Field(1, "k", False, "int"), Field(2, "v", False, "decimal(38, 0)")), schema_id=0)
    definition = define_index("c", "cube", ["k"], wide_schema, measures=["sum(v)"])
    values = pa.array([Decimal("9" * 38)] * 2, pa.decimal128(38, 0))
    columns = {1: pa.chunked_array([[1, 1]]), 2: pa.chunked_array([values])}
    with pytest.raises(ValueError, match="38"):
        CUBE.build_entry_with_aggregates(definition.terms, definition.measures, columns, definition.parameters)


def test_sum_of_integers_beyond_64_bits_is_exact() -> None:
    rows = pa.table({"country": ["a"] * 4, "big": [2**63 - 1] * 4})
    assert build_entry(define_cube(["country"], ["sum(big)"]), rows).to_pydict()["m1"] == [4 * (2**63 - 1)]


def test_cube_that_does_not_shrink_its_file_is_refused_with_the_figures() -> None:
    rows = pa.table({"big": np.arange(3000)})
    with pytest.raises(
        ValueError, match=r"3,000 groups for 3,000 rows has 1\.0 rows for each group; the minimum is 20"
    ):
        build_entry(define_cube(["big"], ["count(*)"]), rows)
    assert build_entry(define_cube(["big"], ["count(*)"], shrink=1), rows).num_rows == 3000
    assert build_entry(define_cube(["big"], ["count(*)"]), rows.slice(0, 1000)).num_rows == 1000, (
        "a small entry must be kept"
    )


def test_groups_are_sorted_by_their_dimensions() -> None:
    rows = pa.table({"country": ["b", None, "a", "b"], "ratio": [-0.0, 1.0, math.nan, 0.0]})
    dimensions = [
        (row["d0"], str(row["d1"]))
        for row in build_entry(define_cube(["country", "ratio"], ["count(*)"]), rows).to_pylist()
    ]
    assert dimensions == [("a", "nan"), ("b", "-0.0"), ("b", "0.0"), (None, "1.0")]


def test_merge_keeps_the_selected_entries() -> None:
    definition = define_cube(["country"], ["sum(qty)"])
    entries = [build_entry(definition, draw_rows(seed, 50)) for seed in range(4)]
    left, right = open_entries(*entries[:2]), open_entries(*entries[2:])
    parts = CUBE.merge([(left, np.array([True, False])), (right, np.array([True, True]))])
    merged_cube = CUBE.open(memoryview(b"".join(map(bytes, parts))))
    assert [batch.to_pydict() for batch in merged_cube.read(range(3))] == [entries[n].to_pydict() for n in (0, 2, 3)]
    assert CUBE.check_rows(merged_cube, 150) is None
    assert "counts 150 rows" in (CUBE.check_rows(merged_cube, 151) or "")
    assert [batch.to_pydict() for batch in merged_cube.read([2], ["m1"])] == [{"m1": entries[3].to_pydict()["m1"]}]


def test_each_changed_byte_of_a_cube_is_detected() -> None:
    entry = build_entry(define_cube(["country"], ["sum(qty)"]), draw_rows(1, 30))
    blob = b"".join(map(bytes, CUBE.encode([entry])))
    for offset in range(0, len(blob), 7):
        damaged_bytes = bytearray(blob)
        damaged_bytes[offset] ^= 1
        with pytest.raises(ValueError, match="cube"):
            CUBE.open(memoryview(damaged_bytes))
    with pytest.raises(ValueError, match="bytes"):
        CUBE.open(memoryview(blob[:-1]))


@pytest.mark.parametrize("layout", [1, 3])
def test_cube_of_another_layout_is_not_reported_as_damaged(layout: int) -> None:
    blob = bytearray(
        b"".join(map(bytes, CUBE.encode([build_entry(define_cube(["country"], ["sum(qty)"]), draw_rows(1, 30))])))
    )
    # The layout is the third number of the header.
    blob[8:12] = layout.to_bytes(4, "little")
    with pytest.raises(ValueError, match="checksum"):
        CUBE.open(memoryview(blob))
    # The last four bytes of the header are its checksum.
    blob[28:32] = isal_zlib.crc32(blob[:28]).to_bytes(4, "little")
    with pytest.raises(UnknownVersion, match=f"layout {layout}; this server reads layout 2"):
        CUBE.open(memoryview(blob))


def test_entry_with_wrong_offsets_or_text_is_refused_before_its_values_are_used() -> None:
    for offsets, text in ([0, 1 << 30, 2], b"ab"), ([0, 1, 2], b"\xff\xfe"):
        buffers = [None, pa.py_buffer(np.array(offsets, np.int32)), pa.py_buffer(text)]
        country = pa.Array.from_buffers(pa.string(), 2, buffers)
        index = open_entries(pa.RecordBatch.from_arrays([country, pa.array([1, 1], pa.int64())], ["d0", "m0"]))
        with pytest.raises(ValueError, match="cube cannot be read"):
            list(index.read([0]))
        with pytest.raises(ValueError, match="cube cannot be read"):
            index.verify()


def test_small_entry_with_many_decompressed_bytes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seamark.formats.index.kinds.cube._DECODED_BYTES_MAX", 1 << 20)
    index = open_entries(pa.RecordBatch.from_arrays([pa.array(np.zeros(200_000, np.int64))], ["m0"]))
    with pytest.raises(ValueError, match="1,600,000 bytes after unpacking; the maximum is 1,048,576"):
        list(index.read([0]))


def test_text_that_many_groups_share_is_not_decoded_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seamark.formats.index.kinds.cube._DECODED_BYTES_MAX", 1 << 20)
    columns = [pa.array(["x" * 1000] * 2000), pa.array(range(2000), pa.int64())]
    index = open_entries(pa.RecordBatch.from_arrays(columns, ["d0", "m0"]))
    with pytest.raises(ValueError, match="2,008,000 bytes after unpacking; the maximum is 1,048,576"):
        list(index.read([0]))


def test_unpacked_groups_equal_the_packed_groups() -> None:
    """The groups are packed in an index file and read again."""
    rng = random.Random(5)
    numbers = [0, 1, -1, 255, 256, -(1 << 63), (1 << 63) - 1]
    for rows in (0, 1, 15, 16, 500):
        for limit in (1, 4, len(numbers)):
            longs = [rng.choice(numbers[:limit]) for _ in range(rows)]
            columns = {
                "d0": pa.array([rng.choice(["a", "", None, "ü" * limit]) for _ in range(rows)], pa.string()),
                "d1": pa.array([rng.choice([0.0, -0.0, math.nan, None]) for _ in range(rows)], pa.float64()),
                "d2": pa.array(longs, pa.int64()),
                "d3": pa.array([rng.choice([True, None]) for _ in range(rows)], pa.bool_()),
                "m0": pa.array(longs, pa.int64()),
                "m1": pa.array(
                    [rng.choice([Decimal(number), None][:limit]) for number in longs],
                    pa.decimal128(38, 0),
                ),
                "m2": pa.array([Decimal(number * limit) / 100 for number in longs], pa.decimal128(38, 2)),
            }
            # The slice gives the arrays an offset.
            groups = pa.RecordBatch.from_arrays(list(columns.values()), list(columns)).slice(rows // 7)
            (stored_groups,) = open_entries(groups).read([0])
            # Equality of floats does not distinguish the signs of zeros.
            assert stored_groups.equals(groups) or str(stored_groups.to_pydict()) == str(groups.to_pydict())


def test_entry_without_compression_is_refused() -> None:
    sink = pa.BufferOutputStream()
    batch = pa.RecordBatch.from_arrays([pa.array([1])], ["m0"])
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    body = memoryview(sink.getvalue())
    with pytest.raises(ValueError, match="without compression"):
        count_decoded_bytes(body, find_batches(body)[0])


@pytest.mark.parametrize("rows", [0, 1, 3000])
def test_decompressed_size_of_an_entry_is_known_before_it_is_read(rows: int) -> None:
    entry = build_entry(define_cube(["country", "ratio"], ["sum(qty)", "min(ts)"]), draw_rows(4, rows))
    _, body = CUBE.encode([entry, entry])
    assert isinstance(body, memoryview)
    packed_batch = pa.ipc.open_file(body).get_batch(0)
    sizes = [count_decoded_bytes(body, batch_location) for batch_location in find_batches(body)]
    assert sizes == [sum(buffer.size for column in packed_batch.columns for buffer in column.buffers() if buffer)] * 2


def test_entry_with_too_many_groups_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    definition = define_cube(["country"], ["count(*)"])
    monkeypatch.setattr("seamark.formats.index.kinds.cube.ENTRY_GROUPS_MAX", 3)
    with pytest.raises(ValueError, match="the maximum is 3 groups"):
        build_entry(definition, draw_rows(1, 100))


def test_sum_beyond_its_type_is_reported_as_an_overflow() -> None:
    groups = pa.table({"d0": ["a", "a"], "m0": pa.array([2**62] * 2)})
    with pytest.raises(SumOverflow, match="out of bounds"):
        combine_groups(groups, {"m0": "count"})


def test_audit_names_the_column_that_differs() -> None:
    definition = define_cube(["country"], ["sum(qty)", "sum(ratio)"])
    rows = draw_rows(2, 60)
    index = open_entries(build_entry(definition, rows))
    assert list(CUBE.compare_aggregates(index, 0, build_entry(definition, rows))) == []
    reversed_index = open_entries(
        build_entry(definition, rows).take(pa.array(range(build_entry(definition, rows).num_rows)[::-1]))
    )
    assert list(CUBE.compare_aggregates(reversed_index, 0, build_entry(definition, rows))) == [], (
        "the order of groups must not matter"
    )
    changed_rows = rows.set_column(rows.column_names.index("qty"), "qty", pa.array([1] * 60, pa.int32()))
    differences = list(CUBE.compare_aggregates(index, 0, build_entry(definition, changed_rows)))
    assert differences == ["the column m1 of the cube differs from the rows"]


def test_cube_definition_is_read_from_its_id_and_follows_a_rename() -> None:
    definition = define_cube(
        ["day(ts)", "place.city"], ["sum(price * (1 - discount))", "avg(qty)", "count(*)"], shrink=5
    )
    assert definition.text == "cube(day(ts), place.city; sum(price * (1 - discount)), avg(qty), count(*), shrink=5)"
    renamed_schema = Schema(tuple(Field(f.id, f"new_{f.name}", False, f.type) for f in SCHEMA.fields), schema_id=1)
    renamed_definition = parse_definition(definition.id, renamed_schema, name="c")
    assert renamed_definition.id == definition.id
    assert renamed_definition.text.startswith("cube(day(new_ts), new_place.city; sum(new_price * (1 - new_discount))")
    assert set(definition.column_ids) == {1, 11, 5, 6, 7}


@pytest.mark.parametrize("name", ["1", "2024 sales", "1a", " a", "a`b", "a-b", "#1", "a.b"])
def test_text_of_a_measure_is_parsed_to_the_same_measure(name: str) -> None:
    schema = Schema((Field(1, "a", False, "int"), Field(2, name, False, "int")), schema_id=0)
    measure = parse_measure("sum(#2 + 1)", schema)
    assert parse_measure(measure.text, schema) == measure


def test_long_measure_is_read_from_its_definition() -> None:
    definition = define_cube(["country"], ["sum(" + "+".join(["qty"] * 45) + ")"])
    assert parse_definition(definition.id, SCHEMA, name="c").measures == definition.measures


@pytest.mark.parametrize(
    ("columns", "measures", "reason"),
    [
        (["country"], [], "needs a measure"),
        (["country"], ["median(qty)"], "begin with one of"),
        (["country"], ["sum(country)"], "not defined for values of type string"),
        (["country"], ["approx_distinct(ratio)"], "needs a column of the type"),
        (["country"], ["approx_distinct(qty + qty)"], "needs a column of the type"),
        (["country"], ["sum(1)"], "has no column"),
        (["country"], ["sum(ratio * 2)"], "use columns of integers or decimals"),
        (["country"], ["sum(qty"], "one function"),
        (["country"], ["sum(nothing)"], "no such column"),
        (["country"], ["count(*)", "count( * )"], "is in the definition twice"),
        (["lower(country)"], ["count(*)"], "not a dimension"),
        (["bucket[4](country)"], ["count(*)"], "not a dimension"),
        (["country"], ["sum(" + "(" * 60 + "qty" + ")" * 60 + ")"], "nested too deeply"),
        (["country"], ["sum(" + "+".join(["qty"] * 60) + ")"], "more than 200"),
        (["country"], ["sum(" + "+".join(["qty"] * 2000) + ")"], "more than 200"),
        (["country"], ["sum(#" + "9" * 5000 + ")"], "no column with this id"),
    ],
)
def test_invalid_cube_is_refused_with_a_reason(columns: list[str], measures: list[str], reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        define_cube(columns, measures)


def test_only_cubes_have_measures() -> None:
    with pytest.raises(BadRequest, match="has no measures"):
        define_index("b", "bloom", ["qty"], SCHEMA, measures=["count(*)"])


def test_dates_before_1970_are_truncated_downwards() -> None:
    rows = pa.table({"day": pa.array([date(1969, 12, 31), date(1970, 1, 1)]), "qty": pa.array([1, 2], pa.int32())})
    entry = build_entry(define_cube(["year(day)"], ["sum(qty)"]), rows).to_pydict()
    assert entry["d0"] == [date(1969, 1, 1), date(1970, 1, 1)]


def test_combined_groups_equal_the_groups_of_all_rows() -> None:
    definition = define_cube(
        ["country", "day(ts)"], ["sum(qty)", "count(qty)", "min(ratio)", "max(ratio)", "sum(price)"]
    )
    parts = [draw_rows(seed, 200) for seed in range(3)]
    coarse = define_cube(["country"], ["sum(qty)", "count(qty)", "min(ratio)", "max(ratio)", "sum(price)"])
    groups = pa.Table.from_batches([build_entry(definition, rows) for rows in parts]).drop_columns(["d1"])
    functions = {"m0": "count", "m1": "sum", "m2": "count", "m3": "min", "m4": "max", "m5": "sum"}
    expected = pa.Table.from_batches([build_entry(coarse, pa.concat_tables(parts))])
    combined_groups = combine_groups(groups, functions)
    assert combined_groups.schema == expected.schema
    assert sorted(map(repr, combined_groups.to_pylist())) == sorted(map(repr, expected.to_pylist()))


def test_file_without_rows_has_an_entry_without_groups() -> None:
    entry = build_entry(define_cube(["country"], ["sum(qty)"]), draw_rows(0, 0))
    assert entry.num_rows == 0
    assert open_entries(entry).files == 1


_VALUES: dict[str, Any] = {
    "boolean": True,
    "int": 1,
    "long": 1,
    "float": 1.5,
    "double": 1.5,
    "decimal(9, 2)": Decimal("1.25"),
    "string": "a",
    "binary": b"a",
    "fixed[4]": b"abcd",
    "uuid": b"a" * 16,
    "time": time(1),
    "date": date(1960, 1, 1),
    "timestamp": datetime(1960, 1, 1, 5),
    "timestamptz": datetime(1960, 1, 1, 5, tzinfo=UTC),
}


@pytest.mark.parametrize("kind", _VALUES)
def test_values_of_every_type_are_grouped(kind: str) -> None:
    schema = Schema((Field(1, "c", False, kind),), schema_id=0)
    is_compared = kind not in ("boolean", "uuid", "fixed[4]")
    measures = ["count(c)", *(["min(c)", "max(c)"] if is_compared else [])]
    definition = define_index("c", "cube", ["c"], schema, measures=measures)
    column = pa.chunked_array([pa.array([_VALUES[kind], None], to_row_type(kind))])
    entry = CUBE.build_entry_with_aggregates(definition.terms, definition.measures, {1: column}, definition.parameters)
    groups = pa.Table.from_batches([entry, entry])
    functions = {"m0": "count", "m1": "count", **({"m2": "min", "m3": "max"} if is_compared else {})}
    combined_groups = combine_groups(groups, functions)
    assert combined_groups.schema == entry.schema == build_entry_schema(definition.terms, definition.measures)
    assert [row["m0"] for row in combined_groups.to_pylist()] == [2, 2]
    nulls = {1: pa.chunked_array([pa.nulls(2)])}
    assert (
        CUBE.build_entry_with_aggregates(definition.terms, definition.measures, nulls, definition.parameters).num_rows
        == 1
    )
