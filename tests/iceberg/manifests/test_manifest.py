"""Tests that manifests of any writer's schema decode to the values that fastavro reads."""

from __future__ import annotations

import io
import itertools
import json
import random
from collections.abc import Callable
from typing import Any

import fastavro
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seamark.formats.iceberg.manifests._manifest import MISSING
from seamark.formats.iceberg.manifests.manifest import INFLATED_LIMIT_BYTES, LONGS, TEXTS, decode_manifest
from seamark.formats.runtime.errors import Corrupt
from tests.iceberg.manifests import manifest_files as files
from tests.seeds import examples

TIME = {"type": "long", "logicalType": "time-micros"}
MICROS = {"type": "long", "logicalType": "timestamp-micros"}
PARTITION_TYPES: list[Any] = [
    *("boolean", "int", "long", "float", "double", "string", "bytes", "null", TIME, MICROS),
    {"type": "int", "logicalType": "date"},
    {"type": "long", "logicalType": "timestamp-nanos", "adjust-to-utc": True},
    {"type": "fixed", "name": "fixed", "size": 7},
    {"type": "fixed", "name": "uuid", "size": 16, "logicalType": "uuid"},
    {"type": "fixed", "name": "decimal", "size": 5, "logicalType": "decimal", "precision": 11, "scale": 2},
    {"type": "bytes", "logicalType": "decimal", "precision": 20, "scale": 2},
]
LETTERS = "aZ/=0 éß€漢𝄞"
COLUMNS = [1, 2, 3, 4, 5, 1000, 70_000, -1, 2**31 - 1]


def draw_value(rng: random.Random, schema: Any, name: str = "") -> Any:
    """Return a random value of a schema. In unions it is (branch, value), so that every branch occurs."""
    kind = schema if isinstance(schema, str) else "union" if isinstance(schema, list) else schema["type"]
    logical = schema.get("logicalType") if isinstance(schema, dict) else None
    count = rng.choice([0, 1, 2, 5])
    if logical == "decimal":
        limit = 10 ** schema["precision"]
        return rng.randrange(1 - limit, limit).to_bytes(schema.get("size", 9), "big", signed=True)
    match kind:
        case "null":
            return None
        case "union":
            branch = rng.randrange(len(schema))
            return branch, draw_value(rng, schema[branch], name)
        case "record":
            return {field["name"]: draw_value(rng, field["type"], field["name"]) for field in schema["fields"]}
        case "array":
            return [draw_value(rng, schema["items"], name) for _ in range(count)]
        case "map":
            return {f"k{index}": draw_value(rng, schema["values"], name) for index in range(count)}
        case "enum":
            return rng.choice(schema["symbols"])
        case "boolean":
            return rng.random() < 0.5
        case "string":
            return "".join(rng.choices(LETTERS, k=rng.choice([0, 3, 40])))
        case "float" | "double":
            return rng.choice([0.0, -0.0, 1.5, -1e30, float("inf"), float("nan"), rng.random() * 2.0**-120])
        case "fixed":
            return rng.randbytes(schema["size"])
        case "bytes":
            return rng.randbytes(rng.choice([0, 1, 20, 300]))
        case "int" if name.endswith("status"):
            return rng.choice([0, 1, 1, 2])
        case "int" | "long" if name == "key":
            return rng.choice(COLUMNS)
    if logical == "time-micros":
        return rng.randrange(86_400_000_000)
    if logical in ("date", "timestamp-micros"):  # fastavro creates dates, so the value must be in Python's range.
        # The factor of a time is a day less a microsecond, so that times are not at midnight.
        return rng.randint(-700_000, 2_900_000) * (1 if kind == "int" else 86_399_999_999)
    bits = rng.choice([3, 8, 20, 31] if kind == "int" else [3, 8, 40, 63])
    return rng.randint(-(2**bits) + (bits == 63), 2**bits - 1)  # The least long represents null.


def draw_type(rng: random.Random, numbers: itertools.count[int], depth: int = 0) -> Any:
    """Return a random schema, for fields that a later format may add."""
    name = f"t{next(numbers)}"
    kind = rng.choice(["primitive", "fixed", "enum", "array", "map", "record", "union"])
    if depth == 3 or kind == "primitive":
        return rng.choice(["null", "boolean", "int", "long", "float", "double", "bytes", "string"])
    child_types = [draw_type(rng, numbers, depth + 1) for _ in range(3)]
    fields = [{"name": f"x{index}", "type": inner} for index, inner in enumerate(child_types[: rng.randint(0, 3)])]
    union: list[Any] = ["null", "long", "string", {"type": "array", "items": child_types[0]}]
    document: dict[str, Any] = {
        "fixed": {"type": "fixed", "name": name, "size": 3},
        "enum": {"type": "enum", "name": name, "symbols": ["A", "B", "C"]},
        "array": {"type": "array", "items": child_types[0]},
        "map": {"type": "map", "values": child_types[0]},
        "record": {"type": "record", "name": name, "fields": fields},
        "union": rng.sample(union, 4),
    }
    return document[kind]


def draw_schema(rng: random.Random, version: int, prefix: str) -> dict[str, Any]:
    null_last = rng.random() < 0.5
    partition = []
    for index, kind in enumerate(rng.choices(PARTITION_TYPES, k=rng.choice([0, 1, 2, 6]))):
        named_kind = kind | {"name": f"{kind['name']}_{index}"} if isinstance(kind, dict) and "name" in kind else kind
        is_plain = kind == "null" or rng.random() < 0.3
        partition.append(
            (f"p{index}", named_kind if is_plain else files.make_optional(named_kind, null_last=null_last))
        )
    form = rng.choice(["plain", "plain", "reversed", "nullable", "wider", "long keys"])
    schema = files.build_manifest_schema(version, partition, null_last=null_last, prefix=prefix, map_form=form)
    numbers = itertools.count()
    file_fields = next(field for field in schema["fields"] if field["name"] == f"{prefix}data_file")["type"]["fields"]
    for fields in (schema["fields"], file_fields):
        for _ in range(rng.randint(0, 2)):
            unknown_field = {"name": f"unknown{next(numbers)}", "type": draw_type(rng, numbers)}
            if rng.random() < 0.5:
                unknown_field["field-id"] = 9000 + next(numbers)
            fields.insert(rng.randint(0, len(fields)), unknown_field)
    return schema


def draw_manifest(rng: random.Random, version: int, codec: str, prefix: str) -> bytes:
    schema = draw_schema(rng, version, prefix)

    def draw_block_sizes(length: int) -> list[int]:
        sizes = []
        while length:
            size = rng.randint(1, length)
            sizes.append(size if rng.random() < 0.5 else -size)
            length -= size
        return sizes

    rows = [files.encode(schema, draw_value(rng, schema), draw_block_sizes) for _ in range(rng.choice([0, 1, 10, 40]))]
    offsets = sorted(rng.choices(range(len(rows) + 1), k=rng.randint(0, 3)))
    blocks = [rows[start:end] for start, end in itertools.pairwise([0, *offsets, len(rows)])]
    return files.build_container(schema, blocks, codec=codec)


def add_missing_fields(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with the fields of the first row and all fields that the decoder reads.

    A manifest of version 1 lacks some of these fields. They become None, as the decoder reads them.
    """
    return [{name: row.get(name) for name in sorted({*rows[0], *LONGS, *TEXTS})} for row in rows]


@given(
    seed=st.integers(0, 2**64 - 1),
    version=st.sampled_from([1, 2, 3]),
    codec=st.sampled_from(["null", "deflate"]),  # For other codecs, fastavro would need additional libraries.
    prefix=st.sampled_from(["", "other_"]),
)
@settings(max_examples=examples(300))
def test_every_manifest_decodes_to_what_fastavro_reads(seed: int, version: int, codec: str, prefix: str) -> None:
    """The decoder must not depend on field names, so all names begin with `prefix`."""
    data = draw_manifest(random.Random(seed), version, codec, prefix)
    decoded_manifest = decode_manifest(data, "m.avro")
    assert add_missing_fields(files.to_plain_entries(decoded_manifest)) == add_missing_fields(
        files.read_by_fastavro(data, prefix)
    )
    assert set(decoded_manifest.longs) == set(LONGS)
    assert set(decoded_manifest.texts) == set(TEXTS)
    assert all(
        column.dtype == np.int64 and len(column) == decoded_manifest.rows for column in decoded_manifest.longs.values()
    )


def is_record(schema: Any) -> bool:
    return isinstance(schema, dict) and schema["type"] == "record"


def build_entry(schema: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a plain row for a schema of `build_manifest_schema`, with nulls where allowed, and small values."""
    row: dict[str, Any] = {}
    for field in schema["fields"]:
        name, kind = field["name"], field["type"]
        if name in changes:
            row[name] = changes[name]
        elif records := [branch for branch in (kind if isinstance(kind, list) else [kind]) if is_record(branch)]:
            row[name] = build_entry(records[0], **changes)
        elif isinstance(kind, list) and "null" in kind:
            row[name] = None
        else:
            row[name] = "file.parquet" if kind == "string" else 1
    return row


def build_manifest(schema: dict[str, Any], *rows: dict[str, Any], **options: Any) -> bytes:
    return files.build_container(schema, [[files.encode(schema, row) for row in rows]], **options)


SCHEMA = files.build_manifest_schema(3, [("day", ["null", "int"])])


@pytest.mark.parametrize("codec", ["null", "deflate", "snappy", "zstandard"])
def test_each_codec_decodes_to_the_same_rows(codec: str) -> None:
    rows = [
        build_entry(SCHEMA, day=number, file_path=f"s3://b/t/ü-{number}.parquet", split_offsets=[4, number])
        for number in range(500)
    ]
    plain_entries = files.to_plain_entries(decode_manifest(build_manifest(SCHEMA, *rows), "m.avro"))
    assert len(plain_entries) == 500
    assert (
        files.to_plain_entries(decode_manifest(build_manifest(SCHEMA, *rows, codec=codec), "m.avro")) == plain_entries
    )


@pytest.mark.parametrize("codec", ["null", "deflate"])
def test_manifests_of_fastavro_are_read(codec: str) -> None:
    rows = [
        build_entry(SCHEMA, day=number, status=number % 3, value_counts=[{"key": 1, "value": number}], lower_bounds=[])
        for number in range(400)
    ]
    buffer = io.BytesIO()
    fastavro.writer(buffer, fastavro.parse_schema(SCHEMA), rows, codec=codec, sync_interval=1000)
    decoded_manifest = decode_manifest(buffer.getvalue(), "m.avro")
    assert decoded_manifest.rows == sum(number % 3 != 2 for number in range(400))
    assert add_missing_fields(files.to_plain_entries(decoded_manifest)) == add_missing_fields(
        files.read_by_fastavro(buffer.getvalue())
    )


def test_deleted_entries_are_dropped_with_their_statistics() -> None:
    maps = {"column_sizes": [{"key": 7, "value": 1}], "upper_bounds": [{"key": 7, "value": b"x"}]}
    rows = [
        build_entry(SCHEMA, status=0, day=1, split_offsets=[1]),
        build_entry(SCHEMA, status=2, day=2, split_offsets=[2, 2], equality_ids=[3], **maps),
        build_entry(SCHEMA, status=1, day=3, split_offsets=[]),
        build_entry(SCHEMA, status=2, day=4, **maps),
    ]
    decoded_manifest = decode_manifest(build_manifest(SCHEMA, *rows), "m.avro")
    assert decoded_manifest.longs["status"].tolist() == [0, 1]
    assert decoded_manifest.lists["split_offsets"][0].tolist() == [1, 0]
    assert decoded_manifest.lists["split_offsets"][1].tolist() == [1]
    assert decoded_manifest.lists["equality_ids"][0].tolist() == [-1, -1]
    assert decoded_manifest.counts["column_sizes"] == decoded_manifest.bounds["upper_bounds"] == {}
    assert decoded_manifest.partition[0].longs is not None
    assert decoded_manifest.partition[0].longs.tolist() == [1, 3]


def repeat_first(ids: list[int]) -> list[int]:
    return [*ids[:-1], ids[0]]


@pytest.mark.few_cases(10)
@pytest.mark.parametrize("odd_row", [None, 0, 1, 99, 149])
@pytest.mark.parametrize(
    "change_ids", [lambda ids: ids[::-1], lambda ids: ids[1:], lambda ids: [*ids, 9], repeat_first, lambda ids: []]
)
def test_statistics_are_read_whether_all_rows_name_the_same_columns_or_not(
    odd_row: int | None, change_ids: Callable[[list[int]], list[int]]
) -> None:
    """Rows that all name the same columns in the same order are decoded on a faster path."""
    usual_ids, rows = [4, 1, 7], []
    for number in range(150):  # The odd row is the first, the second, the last, or a middle row, or there is none.
        ids = change_ids(usual_ids) if number == odd_row else usual_ids
        counts = [{"key": column_id, "value": 10 * number + index} for index, column_id in enumerate(ids)]
        bounds = [{"key": column_id, "value": b"%d" % (number + index)} for index, column_id in enumerate(ids)]
        status = files.DELETED if number % 7 == 5 else 0
        rows.append(build_entry(SCHEMA, day=number, status=status, value_counts=counts, upper_bounds=bounds))
    data = build_manifest(SCHEMA, *rows, codec="deflate")
    assert add_missing_fields(files.to_plain_entries(decode_manifest(data, "m.avro"))) == add_missing_fields(
        files.read_by_fastavro(data)
    )


def test_last_value_is_used_when_all_rows_name_a_column_twice() -> None:
    counts = [{"key": 3, "value": 1}, {"key": 3, "value": 2}]
    decoded_manifest = decode_manifest(
        build_manifest(SCHEMA, *[build_entry(SCHEMA, value_counts=counts)] * 5), "m.avro"
    )
    assert [entry["value_counts"] for entry in files.to_plain_entries(decoded_manifest)] == [{3: 2}] * 5


@pytest.mark.parametrize("blocks", [[], [[]], [[], []]])
def test_manifest_without_entries_has_no_rows(blocks: list[list[bytes]]) -> None:
    decoded_manifest = decode_manifest(files.build_container(SCHEMA, blocks, codec="deflate"), "m.avro")
    assert decoded_manifest.rows == 0
    assert files.to_plain_entries(decoded_manifest) == []


def test_field_that_the_format_version_does_not_have_is_missing() -> None:
    schema = files.build_manifest_schema(1, [])
    decoded_manifest = decode_manifest(build_manifest(schema, build_entry(schema)), "m.avro")
    assert decoded_manifest.longs["content"].tolist() == decoded_manifest.longs["sequence_number"].tolist() == [MISSING]
    assert decoded_manifest.longs["snapshot_id"].tolist() == [1]
    assert decoded_manifest.texts["referenced_data_file"].lengths.tolist() == [-1]
    assert decoded_manifest.lists["equality_ids"][0].tolist() == [-1]
    assert decoded_manifest.partition == ()


def test_decoded_manifest_has_its_header() -> None:
    metadata = {"schema": '{"x": "ü"}', "partition-spec-id": "3", "content": "deletes"}
    decoded_manifest = decode_manifest(build_manifest(SCHEMA, build_entry(SCHEMA), metadata=metadata), "m.avro")
    assert metadata.items() <= decoded_manifest.metadata.items()
    assert json.loads(decoded_manifest.metadata["avro.schema"]) == SCHEMA


def test_fields_without_ids_are_found_by_standard_names() -> None:
    schema = files.build_manifest_schema(2, [("day", ["null", "int"])], ids=False)
    spec = json.dumps([{"name": "day", "transform": "day", "source-id": 1, "field-id": 1007}])
    row = build_entry(schema, day=4, file_path="x", value_counts=[{"key": 1, "value": 10}])
    decoded_manifest = decode_manifest(build_manifest(schema, row, metadata={"partition-spec": spec}), "m.avro")
    [actual] = files.to_plain_entries(decoded_manifest)
    assert actual["file_path"] == "x"
    assert actual["value_counts"] == {1: 10}
    assert actual["partition"] == [(1007, 4)]


def test_partition_fields_without_any_id_are_rejected() -> None:
    schema = files.build_manifest_schema(2, [("day", ["null", "int"])], ids=False)
    with pytest.raises(Corrupt, match=r"m\.avro: .*partition fields have ids neither"):
        decode_manifest(build_manifest(schema, build_entry(schema)), "m.avro")


def test_field_id_takes_precedence_over_the_name() -> None:
    schema = files.build_manifest_schema(2, [])
    fields = schema["fields"][-1]["type"]["fields"]  # The last field of an entry is the data file.
    fields_by_name = {field["name"]: field for field in fields}
    fields_by_name["record_count"]["name"], fields_by_name["file_size_in_bytes"]["name"] = (
        "file_size_in_bytes",
        "record_count",
    )
    row = build_entry(schema, record_count=1000, file_size_in_bytes=5)
    [actual] = files.to_plain_entries(decode_manifest(build_manifest(schema, row), "m.avro"))
    assert (actual["record_count"], actual["file_size_in_bytes"]) == (5, 1000)


def test_unions_of_several_number_or_text_types_are_read() -> None:
    schema = files.build_manifest_schema(2, [("p", ["int", "null", "long"]), ("q", ["double", "float", "null"])])
    file = schema["fields"][-1]["type"]
    path = next(field for field in file["fields"] if field["name"] == "file_path")
    path["type"] = ["bytes", "string"]
    rows = [
        build_entry(schema, file_path=(0, b"one"), p=(0, 5), q=(1, 0.5)),
        build_entry(schema, file_path=(1, "two"), p=(2, 2**40), q=(0, 0.1)),
        build_entry(schema, file_path=(1, "three"), p=(1, None), q=(2, None)),
    ]
    plain_entries = files.to_plain_entries(decode_manifest(build_manifest(schema, *rows), "m.avro"))
    assert [row["file_path"] for row in plain_entries] == ["one", "two", "three"]
    partitions = [tuple(value for _, value in row["partition"]) for row in plain_entries]
    assert partitions == [(5, files.to_raw_value(0.5)), (2**40, files.to_raw_value(0.1)), (None, None)]


def test_named_type_may_be_reused() -> None:
    fixed_type, symbol = {"type": "fixed", "name": "id", "size": 2}, {"type": "enum", "name": "e", "symbols": ["X"]}
    schema = files.build_manifest_schema(2, [("a", fixed_type), ("b", ["null", fixed_type])])
    schema["namespace"] = "org.example"
    schema["fields"] += [{"name": "more", "type": ["null", symbol]}, {"name": "again", "type": symbol}]
    row = files.encode(schema, build_entry(schema, a=b"12", b=b"34", more="X", again="X"))
    schema["fields"][-1]["type"] = "org.example.e"
    data_file = schema["fields"][-3]["type"]  # The two fields above follow the data file.
    partition = next(field["type"]["fields"] for field in data_file["fields"] if field["name"] == "partition")
    partition[1]["type"][1] = "id"
    [actual] = files.to_plain_entries(decode_manifest(files.build_container(schema, [[row]]), "m.avro"))
    assert actual["partition"] == [(1000, b"12"), (1001, b"34")]


def test_decoder_keeps_only_the_stored_bounds_of_a_thousand_columns() -> None:
    """Each entry has statistics of four of a thousand columns; no memory of size rows × columns is allocated."""
    rows = [
        build_entry(
            SCHEMA,
            lower_bounds=[{"key": (number * 7 + position) % 1000, "value": b"v%d" % number} for position in range(4)],
        )
        for number in range(1000)
    ]
    decoded_manifest = decode_manifest(build_manifest(SCHEMA, *rows), "m.avro")
    lower = decoded_manifest.bounds["lower_bounds"]
    assert set(lower) == set(range(1000))
    assert sum(len(index) for index, _, _ in lower.values()) == 4000
    assert files.to_plain_entries(decoded_manifest)[999]["lower_bounds"] == {
        (999 * 7 + position) % 1000: b"v999" for position in range(4)
    }


def test_last_value_is_used_when_an_entry_names_a_column_twice() -> None:
    counts = [{"key": 1, "value": 10}, {"key": 2, "value": 20}, {"key": 1, "value": 30}]
    rows = [build_entry(SCHEMA, value_counts=counts), build_entry(SCHEMA, value_counts=[{"key": 1, "value": 5}])]
    plain_entries = files.to_plain_entries(decode_manifest(build_manifest(SCHEMA, *rows), "m.avro"))
    assert [row["value_counts"] for row in plain_entries] == [{1: 30, 2: 20}, {1: 5}]


def test_any_buffer_type_is_accepted() -> None:
    data = build_manifest(SCHEMA, build_entry(SCHEMA), codec="null")
    expected = files.to_plain_entries(decode_manifest(data, "m.avro"))
    buffer = bytearray(b"before" + data + b"after")
    manifest_view = memoryview(buffer)[len(b"before") : -len(b"after")]
    decoded_manifest = decode_manifest(manifest_view, "m.avro", inflated_limit_bytes=INFLATED_LIMIT_BYTES)
    del manifest_view  # A buffer with a view cannot be cleared.
    buffer.clear()  # The decoder keeps no reference to the input.
    assert files.to_plain_entries(decoded_manifest) == expected
