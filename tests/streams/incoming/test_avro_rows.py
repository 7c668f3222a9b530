"""Tests of rows in Avro. Every type is read as it was written, and hostile files are refused at once."""

from __future__ import annotations

import io
import json
import zlib
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest

from seamark.formats.runtime.errors import BadRequest, TooLarge
from seamark.metaserver.streams.incoming.avro_rows import INFLATED_BYTES_MAX, read_avro
from tests.streams.topics.topic_source import encode_avro


def read_rows(data: bytes, *, rows_max: int = 1000) -> pa.RecordBatch:
    return read_avro(data, "The message", rows_max=rows_max)


def build_record(*fields: Any, name: str = "Row", **extra_fields: Any) -> dict[str, Any]:
    """Return a record whose fields have these types."""
    return {
        "type": "record",
        "name": name,
        "fields": [{"name": f"f{number}", "type": field} for number, field in enumerate(fields)],
        **extra_fields,
    }


NESTED_RECORD = build_record(
    {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 1}, "E", name="Nested"
)
COLUMNS: list[tuple[Any, list[Any], pa.DataType]] = [
    ("boolean", [True, False], pa.bool_()),
    ("int", [-(2**31), 2**31 - 1], pa.int32()),
    ("long", [-(2**63), 2**63 - 1], pa.int64()),
    ("float", [0.5, -1.0], pa.float32()),
    ("double", [1e300, float("inf")], pa.float64()),
    ("string", ["", "ä\u4e2d"], pa.string()),
    ("bytes", [b"", b"\xff"], pa.binary()),
    (["null", "string"], [None, "x"], pa.string()),
    (["long", "null"], [3, None], pa.int64()),
    ({"type": "int", "logicalType": "date"}, [date(1, 1, 1), date(9999, 12, 31)], pa.date32()),
    ({"type": "long", "logicalType": "time-micros"}, [time(0), time(23, 59, 59, 999999)], pa.time64("us")),
    (
        {"type": "long", "logicalType": "timestamp-micros"},
        [datetime(1970, 1, 1, tzinfo=UTC), datetime(2026, 11, 29, 1, 2, 3, 4, tzinfo=UTC)],
        pa.timestamp("us", "UTC"),
    ),
    (
        {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 3},
        [Decimal("12345678901234567890123456789012345.678"), Decimal("-0.001")],
        pa.decimal128(38, 3),
    ),
    ({"type": "enum", "name": "E", "symbols": ["a", "b"]}, ["a", "b"], pa.string()),
    ({"type": "fixed", "name": "F", "size": 2}, [b"ab", b"cd"], pa.binary(2)),
    ({"type": "array", "items": ["null", "int"]}, [[], [1, None]], pa.list_(pa.int32())),
]


@pytest.mark.parametrize("codec", ["null", "deflate"])
def test_values_of_all_types_survive_a_round_trip(codec: str) -> None:
    schema = build_record(*(kind for kind, _, _ in COLUMNS), NESTED_RECORD, {"type": "map", "values": "Nested"})
    nested_values = [{"f0": Decimal("1.5"), "f1": "a"}, {"f0": Decimal("-2.5"), "f1": "b"}]
    rows = [
        {
            **{f"f{number}": values[row_index] for number, (_, values, _) in enumerate(COLUMNS)},
            f"f{len(COLUMNS)}": nested_values[row_index],
            f"f{len(COLUMNS) + 1}": {"k": nested_values[row_index]},
        }
        for row_index in range(2)
    ]
    batch = read_rows(encode_avro(*rows, schema=schema, codec=codec))
    for number, (_, values, kind) in enumerate(COLUMNS):
        column = batch.column(number)
        assert column.to_pylist() == values
        assert column.type == kind or pa.types.is_list(kind)
    assert batch.column(len(COLUMNS)).to_pylist() == nested_values
    assert batch.column(len(COLUMNS) + 1).to_pylist() == [[("k", value)] for value in nested_values]


def test_named_types_are_resolved_in_their_namespace() -> None:
    inner = {"type": "enum", "name": "Kind", "symbols": ["inner"]}
    outer = {"type": "enum", "name": "Kind", "symbols": ["outer"]}
    schema = build_record(
        outer, build_record(inner, "Kind", name="Other", namespace="b"), "Kind", "b.Kind", namespace="a"
    )
    row = {"f0": "outer", "f1": {"f0": "inner", "f1": "inner"}, "f2": "outer", "f3": "inner"}
    assert read_rows(encode_avro(row, schema=schema)).to_pylist() == [row]


def test_records_in_the_last_field_of_records_are_read() -> None:
    schema = build_record(build_record(build_record("double", name="Geo"), name="Addr"))
    row = {"f0": {"f0": {"f0": 1.5}}}
    assert read_rows(encode_avro(row, schema=schema)).to_pylist() == [row]


def nest_type(levels: int) -> Any:
    kind: Any = "int"
    for _ in range(levels):
        kind = {"type": "array", "items": kind}
    return kind


def build_doubled_schema(levels: int) -> Any:
    """Return a schema with few names, but with 2 to the power of `levels` types."""
    kind: Any = build_record("int", name="R0")
    for level in range(1, levels):
        kind = build_record(kind, f"R{level - 1}", name=f"R{level}")
    return kind


def build_file(schema: Any, blocks: list[tuple[int, bytes]], codec: bytes = b"null") -> bytes:
    """Return a file with this schema and these blocks, which need not be valid."""
    sink = io.BytesIO()
    sink.write(b"Obj\x01")  # The first four bytes of each Avro file.
    sync_marker = b"s" * 16
    text = schema if isinstance(schema, bytes) else json.dumps(schema).encode()
    fastavro.schemaless_writer(sink, {"type": "map", "values": "bytes"}, {"avro.schema": text, "avro.codec": codec})
    sink.write(sync_marker)
    for count, data in blocks:
        fastavro.schemaless_writer(sink, "long", count)
        fastavro.schemaless_writer(sink, "bytes", data)
        sink.write(sync_marker)
    return sink.getvalue()


def deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)  # A negative window size writes no zlib header.
    return packer.compress(data) + packer.flush()


HUGE = b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01"
"""The largest long number."""


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"Obj\x01", "ends in the middle"),
        (build_file("long", []), "is not a record"),
        (build_file(b"{", []), "not valid JSON"),
        (build_file(b"[" * 100_000, []), "not valid JSON"),
        (build_file(b'{"type":"record"' + b" " * 300_000 + b"}", []), "characters"),
        (build_file(build_record(nest_type(100)), []), "levels"),
        (build_file(build_record(build_doubled_schema(14)), []), "levels or more than"),
        (build_file(build_record(["null", "Row"]), []), "recursive"),
        (build_file(build_record("Missing"), []), "unknown type 'Missing'"),
        (build_file(build_record(["int", "string"]), []), "union"),
        (build_file(build_record({"type": "array", "items": "null"}), [(1, HUGE)]), "without bytes"),
        (build_file(build_record({"type": "map", "values": build_record(name="Empty")}), []), "without bytes"),
        (build_file(build_record(), [(2**60, b"")]), "no field with a value"),
        (build_file(build_record("null"), [(500, b"")]), "no field with a value"),
        (build_file(build_record("int", "int"), [(500, b"\x02")]), "does not have its schema"),
        (build_file(build_record("string"), [(1, HUGE)]), "does not have its schema"),
        (build_file(build_record("string"), [(1, b"\x01")]), "does not have its schema"),
        (
            build_file(build_record({"type": "array", "items": "int"}), [(1, HUGE + b"\x02")]),
            "does not have its schema",
        ),
        (
            build_file(build_record({"type": "enum", "name": "E", "symbols": ["a"]}), [(1, b"\x06")]),
            "does not have its",
        ),
        (build_file(build_record(["null", "int"]), [(1, b"\x08")]), "does not have its schema"),
        (build_file(build_record("int"), [(1, b"\x02\x02")]), "more bytes than its rows"),
        (build_file(build_record("int"), [(1, HUGE)]), "does not have its type"),
        (
            build_file(build_record("bytes"), [(1, deflate(bytes(INFLATED_BYTES_MAX + 1)))], b"deflate"),
            "inflates to more",
        ),
        (build_file(build_record("int"), [(1, b"\x02")], b"lzma"), "codecs that can be read"),
        (build_file(build_record("int", fields=[{"name": "a", "type": "int"}] * 2), []), "twice"),
    ],
)
def test_hostile_file_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        read_rows(data)


def test_file_with_too_many_rows_is_refused_before_they_are_decoded() -> None:
    with pytest.raises(TooLarge, match="more than 10 rows"):
        read_rows(build_file(build_record("int"), [(11, b"\x02" * 11)]), rows_max=10)


@pytest.mark.parametrize("seed", range(50))
def test_damaged_file_is_refused_or_read(seed: int) -> None:
    rows = [{"id": number, "name": "n" * number} for number in range(20)]
    data = bytearray(encode_avro(*rows, codec="null"))
    for step in range(3):  # Large primes spread the damaged positions over the file.
        data[(seed * 7919 + step * 104729) % len(data)] ^= 1 << (seed + step) % 8
    try:
        batch = read_rows(bytes(data))
    except (BadRequest, TooLarge):
        return
    assert batch.num_rows <= 1000  # A damaged number of rows must not make a small file large.


def nest_record(levels: int) -> Any:
    kind: Any = "int"
    for level in range(levels):
        kind = build_record(kind, name=f"N{level}")
    return kind


def build_array_type(kind: Any) -> Any:
    return {"type": "array", "items": kind}


def encode_items(count: int, data: bytes) -> bytes:
    """Return an encoded array with the same item `count` times."""
    sink = io.BytesIO()
    fastavro.schemaless_writer(sink, "long", count)
    return sink.getvalue() + data * count + b"\0"


@pytest.mark.parametrize(
    "data",
    [
        build_file(build_record("int", *["null"] * 4_900), [(1_000, b"\x02" * 1_000)]),
        build_file(build_record(build_array_type(nest_record(11))), [(1, encode_items(1 << 18, b"\x02"))]),
        build_file(
            build_record(build_array_type(build_record("int", *["null"] * 400, name="Wide"))),
            [(1, encode_items(1 << 15, b"\x02"))],
        ),
        build_file(build_record(build_array_type("int")), [(1, encode_items(4 << 20, b"\x02"))]),
        build_file(build_record({"type": "map", "values": "int"}), [(1, encode_items(1 << 20, b"\x02a\x02"))]),
        build_file(build_record(["null", {"type": "fixed", "name": "F", "size": 1 << 20}]), [(1_000, b"\0" * 1_000)]),
        build_file(
            build_record(build_array_type(["null", build_record(*["double"] * 1_000, name="D")])),
            [(1, encode_items(1 << 15, b"\0"))],
        ),
        build_file(build_record({"type": "enum", "name": "E", "symbols": ["a" * 200_000]}), [(1_000, b"\0" * 1_000)]),
    ],
    ids=["nulls", "records", "nulls in items", "items", "entries", "null fixed", "null records", "symbols"],
)
def test_small_file_that_needs_much_memory_is_refused_before_it_is_decoded(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fastavro, "schemaless_reader", lambda *_: pytest.fail("a row is decoded"))
    with pytest.raises(TooLarge, match="bytes of memory by their schema"):
        read_rows(data)


def test_file_within_the_memory_limit_is_read() -> None:
    """Each of the 2,000 items takes one byte in the file, and becomes a row of more than twenty columns in memory."""
    item_types = [build_record("int", *["null"] * 20, name="Wide"), ["null", build_record(*["double"] * 50, name="D")]]
    schema = build_record(*(build_array_type(kind) for kind in item_types), "string")
    text = encode_items(20_000, b"a")[:-1]  # A string is encoded as an array of bytes without the last zero byte.
    data = encode_items(1_000, b"\x02") + encode_items(1_000, b"\0") + text
    batch = read_rows(build_file(schema, [(1, data)]))
    assert [len(batch.column(number)[0]) for number in range(2)] == [1_000, 1_000]
