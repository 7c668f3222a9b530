"""Tests of damaged and hostile manifests: Corrupt that names the file, or a valid decode, without a crash or
much memory.
"""

from __future__ import annotations

import gc
import random
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from seamark.formats.iceberg.manifests.manifest import decode_manifest, decode_manifest_list
from seamark.formats.runtime.errors import Corrupt
from tests.iceberg.manifests import manifest_files as files
from tests.iceberg.manifests.test_manifest import SCHEMA, build_entry, build_manifest, draw_manifest

ROWS = [
    build_entry(
        SCHEMA,
        day=i,
        file_path=f"s3://bucket/täble/{i}.parquet",
        split_offsets=[4, 1000 * i],
        **{
            name: [{"key": k, "value": b"bound" if name.endswith("bounds") else 100 + i} for k in range(1, 4)]
            for name in files.MAPS
        },
    )
    for i in range(12)
]
"""The rows of two blocks with six rows each. Every map has entries."""


def make_manifest(codec: str = "null") -> bytes:
    encoded_rows = [files.encode(SCHEMA, row) for row in ROWS]
    return files.build_container(SCHEMA, [encoded_rows[:6], encoded_rows[6:]], codec=codec)


def is_decoded(data: bytes, decode: Any = decode_manifest) -> bool:
    """Return whether the data can be decoded. Any error except Corrupt with the file's name fails the test."""
    error_message = None
    try:
        decoded_rows = decode(data, "the-file")
    except Corrupt as error:
        error_message = error.message
    if error_message is not None:
        assert error_message.startswith("the-file: ")
        return False
    if decode is decode_manifest:
        # The conversion fails if the offset of a text or the length of a list is beyond the decoded bytes.
        for row in files.to_plain_entries(decoded_rows):
            assert isinstance(row["file_path"], str)
    return True


@pytest.mark.parametrize("codec", ["null", "deflate", "snappy", "zstandard"])
def test_truncated_manifest_is_corrupt_unless_it_ends_between_blocks(codec: str) -> None:
    data = make_manifest(codec)
    block_ends = [end for end in range(len(data)) if data[:end].endswith(files.SYNC)]
    readable_lengths = [end for end in range(len(data)) if is_decoded(data[:end])]
    assert len(block_ends) == 2
    assert readable_lengths == block_ends
    assert decode_manifest(data, "m").rows == 12


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("codec", ["null", "deflate", "snappy", "zstandard"])
def test_flipped_bytes_are_corrupt_or_decode_to_valid_rows(codec: str) -> None:
    check_flipped_bytes(make_manifest(codec), rounds=1500, seed=zlib.crc32(codec.encode()))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_flipped_bytes_in_manifests_of_any_schema_are_corrupt_or_decode_to_valid_rows(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        data = draw_manifest(rng, rng.choice([1, 2, 3]), rng.choice(["null", "null", "deflate"]), "")
        check_flipped_bytes(data, rounds=150, seed=rng.randrange(2**32))


def check_flipped_bytes(data: bytes, *, rounds: int, seed: int) -> None:
    """Decode a file `rounds` times with random damage, mostly one byte. At least one round must detect its damage.

    In every second round, only the part after the header has changed bytes, because the schema in the header is most of
    a small file. In a fifth of the rounds, some bytes at any place are also replaced by random bytes.
    """
    rng, body_start = random.Random(seed), data.index(files.SYNC)
    read_count = 0
    for round_number in range(rounds):
        damaged_bytes = bytearray(data)
        for _ in range(rng.choice([1, 1, 1, 2, 5])):
            offset = rng.randrange(body_start if round_number % 2 else 0, len(data))
            damaged_bytes[offset] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, damaged_bytes[offset] ^ 1 << rng.randrange(8)])
        if rng.random() < 0.2:
            offset = rng.randrange(len(damaged_bytes))
            damaged_bytes[offset : offset + rng.randrange(20)] = rng.randbytes(rng.randrange(20))
        try:
            read_count += is_decoded(bytes(damaged_bytes))
        except BaseException:
            print(f"seed {seed}, round {round_number}: {bytes(damaged_bytes).hex()}")
            raise
    assert read_count < rounds


def test_damaged_manifest_list_is_corrupt_or_decodes() -> None:
    list_schema = {"type": "record", "name": "manifest_file", "fields": []}
    fields: list[dict[str, Any]] = list_schema["fields"]  # type: ignore[assignment]
    for name, field_id, kind in [
        ("manifest_path", 500, "string"),
        ("manifest_length", 501, "long"),
        ("spec", 502, "int"),
    ]:
        fields.append({"name": name, "field-id": field_id, "type": kind})
    summary = {"type": "record", "name": "r508", "fields": []}
    summary["fields"] = [{"name": "lower", "field-id": 510, "type": ["null", "bytes"]}]
    fields.append({"name": "partitions", "field-id": 507, "type": {"type": "array", "items": summary}})
    row = {"manifest_path": "m.avro", "manifest_length": 10, "spec": 0, "partitions": [{"lower": b"x"}] * 3}
    data = files.build_container(list_schema, [[files.encode(list_schema, row)] * 5])
    assert len(decode_manifest_list(data, "the-file")) == 5
    rng, read_count = random.Random(5), 0
    for _ in range(2000):
        damaged_bytes = bytearray(data)
        damaged_bytes[rng.randrange(len(data))] = rng.randrange(256)
        read_count += is_decoded(bytes(damaged_bytes), decode_manifest_list)
    assert 0 < read_count < 2000


def build_block_file(*, count: int = 1, data: bytes, schema: Any = SCHEMA) -> bytes:
    """Return a file of one uncompressed block with these bytes."""
    return files.build_container(schema, []) + files.encode_varint(count) + files.add_length(data) + files.SYNC


ENCODED_ROW = files.encode(SCHEMA, ROWS[0])
TO_PATH = files.encode("int", 1) + b"\x00" * 3 + files.encode("int", 0)
"""The bytes of a row before its file_path: the status, three nulls and the content."""
FORTY_GIB = files.encode_varint(40 << 30)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "ends in the middle of the magic number"),
        (b"PAR1" * 10, "does not start with Avro's magic bytes"),
        (
            files.build_container(SCHEMA, [], codec="lzma"),
            "is compressed with 'lzma'; codecs that can be read: deflate",
        ),
        (b"Obj\x01\x00" + files.SYNC, "has no schema in its header"),
        (files.build_container("{", []), "rows|not a type|unknown type"),
        (make_manifest().replace(files.SYNC, bytes(16))[:-16] + files.SYNC, "does not end with the file's sync marker"),
        (build_block_file(data=ENCODED_ROW[:-1]), "block 0, at byte .*ends in the middle of a value"),
        (build_block_file(data=ENCODED_ROW + b"\x00"), "holds more bytes than its rows take"),
        (build_block_file(count=2, data=ENCODED_ROW), "block 0, at byte .*: ends in the middle of a value"),
        (build_block_file(count=1 << 40, data=ENCODED_ROW), "claims more rows than its bytes can hold"),
        (build_block_file(count=-1, data=ENCODED_ROW), "a block's row count is negative"),
        (files.build_container(SCHEMA, []) + files.encode_varint(1) + FORTY_GIB, "ends in the middle of a block"),
        (files.build_container(SCHEMA, []) + b"\xff" * 12, "is not a 64-bit number"),
        (files.build_container(SCHEMA, []) + b"\xff" * 9, "ends in the middle of a block's row count"),
        (build_block_file(data=b"\xff" * 300), "status: a number is longer than 64 bits"),
        (build_block_file(data=files.encode_varint(2**31) + ENCODED_ROW), "status: a number does not fit the 32 bits"),
        (build_block_file(data=b"\x02\x04" + ENCODED_ROW), "snapshot_id: a union names a branch"),
        (build_block_file(data=b"\x02\x01" + ENCODED_ROW), "snapshot_id: a union names a branch"),
        (
            build_block_file(data=TO_PATH + files.encode_varint(-5) + ENCODED_ROW),
            "file_path: a length or count is negative",
        ),
        (
            build_block_file(data=TO_PATH + FORTY_GIB + ENCODED_ROW),
            "file_path: a length or count is more than the bytes that follow",
        ),
        (
            build_block_file(data=TO_PATH + files.add_length(b"\xc0\xaf") + ENCODED_ROW),
            "file_path: a string is not UTF-8",
        ),
        (
            build_block_file(data=TO_PATH + files.add_length(b"a" * 9 + b"\xed\xa0\x80") + ENCODED_ROW),
            "file_path: a string is not UTF-8",
        ),
    ],
)
def test_error_names_the_file_and_the_field(data: bytes, message: str) -> None:
    with pytest.raises(Corrupt, match=message) as raised_error:
        decode_manifest(data, "s3://b/t/m0.avro")
    assert raised_error.value.message.startswith("s3://b/t/m0.avro: ")


def test_counts_of_lists_and_maps_are_checked_against_the_available_bytes() -> None:
    schema = files.build_manifest_schema(2, [])
    row = files.encode(schema, build_entry(schema, column_sizes=[{"key": 1, "value": 1}]))
    filled_list = b"\x02\x02\x02\x02\x00"  # Branch 1, a block of one entry with its key and value, and the end.
    assert row.count(filled_list) == 1
    for replacement, message in [
        (b"\x02" + FORTY_GIB, "column_sizes: a length or count is more"),
        (b"\x02" + files.encode_varint(-(2**63)), "column_sizes: a length or count is more"),
        (b"\x02" + files.encode_varint(-1) + FORTY_GIB, "column_sizes: a length or count is more"),
        (b"\x02" + files.encode_varint(-1) + files.encode_varint(-1), "column_sizes: a length or count is negative"),
        (b"\x02\x02" + files.encode_varint(2**31), "column_sizes: a number does not fit the 32 bits"),
    ]:
        with pytest.raises(Corrupt, match=message):
            decode_manifest(build_block_file(schema=schema, data=row.replace(filled_list, replacement)), "m")


def add_unknown_fields(*field_types: Any) -> dict[str, Any]:
    """Return the schema of a plain manifest, with fields of these types before all others."""
    schema = files.build_manifest_schema(2, [])
    schema["fields"][:0] = [{"name": f"unknown{index}", "type": kind} for index, kind in enumerate(field_types)]
    return schema


def test_any_number_of_zero_width_elements_is_cheap() -> None:
    empty_record = {"type": "record", "name": "empty", "fields": [{"name": "a", "type": "null"}]}
    schema = add_unknown_fields({"type": "array", "items": empty_record}, {"type": "array", "items": "null"})
    row = (
        files.encode_varint(2**62)
        + b"\x00"
        + files.encode_varint(2**62)
        + b"\x00"
        + files.encode(SCHEMA_2, build_entry(SCHEMA_2))
    )
    assert decode_manifest(build_block_file(schema=schema, data=row), "m").rows == 1


SCHEMA_2 = files.build_manifest_schema(2, [])


def nest_type(kind: Any, levels: int) -> Any:
    for _ in range(levels):
        kind = {"type": "array", "items": kind}
    return kind


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            add_unknown_fields({"type": "record", "name": "r", "fields": [{"name": "a", "type": ["null", "r"]}]}),
            "contains itself",
        ),
        (add_unknown_fields(nest_type("int", 100)), "nested deeper than 64"),
        (add_unknown_fields("no.such.type"), "unknown type 'no.such.type'"),
        (add_unknown_fields(["null", "null"]), "at most one branch is null"),
        (add_unknown_fields([]), "a union needs branches"),
        (add_unknown_fields(17), "not a type: 17"),
        (add_unknown_fields({"type": "fixed", "name": "f", "size": -1}), "-1 is not a valid size of a fixed type"),
        (add_unknown_fields({"type": "fixed", "size": 1}), "needs a name"),
        (add_unknown_fields({"type": "enum", "name": "e"}), "an enum has no symbols"),
        (add_unknown_fields({"type": "record", "name": "r", "fields": [{"name": "a"}]}), "a record needs fields"),
        (add_unknown_fields({"type": "array"}), "not a type: None"),
        (
            files.build_manifest_schema(2, [("p", {"type": "array", "items": "int"})]),
            "p: partition values cannot have type array",
        ),
        (
            files.build_manifest_schema(2, [("p", ["int", "string"])]),
            "p: boolean or int or long is expected, not string",
        ),
        ({"type": "record", "name": "r", "fields": []}, r"has no field status \(0\)"),
        ("int", "a record is expected, not int"),
    ],
)
def test_impossible_schema_is_rejected_with_the_field(schema: Any, message: str) -> None:
    with pytest.raises(Corrupt, match=message) as raised_error:
        decode_manifest(files.build_container(schema, []), "the-file")
    assert raised_error.value.message.startswith("the-file: ")


def test_schema_nested_too_deeply_is_rejected() -> None:
    schema = '{"type":"array","items":' * 100_000 + '"int"' + "}" * 100_000
    with pytest.raises(Corrupt, match="the-file: the Avro schema is not JSON"):
        decode_manifest(files.build_container(SCHEMA, [], metadata={"avro.schema": schema}), "the-file")


def test_named_types_that_double_at_every_level_are_rejected_quickly() -> None:
    doubling_types: list[Any] = [{"type": "record", "name": "r0", "fields": [{"name": "a", "type": "int"}]}]
    for number in range(1, 40):
        fields = [{"name": name, "type": f"r{number - 1}"} for name in "ab"]
        doubling_types.append({"type": "record", "name": f"r{number}", "fields": fields})
    with pytest.raises(Corrupt, match="more than 20000 types"):
        decode_manifest(files.build_container(add_unknown_fields(*doubling_types), []), "the-file")


def test_duplicate_field_is_rejected() -> None:
    schema = files.build_manifest_schema(2, [])
    schema["fields"].append(schema["fields"][0] | {"name": "again"})
    with pytest.raises(Corrupt, match="field 0 is present twice"):
        decode_manifest(files.build_container(schema, []), "the-file")


@pytest.mark.parametrize("field", ["status", "file_path", "record_count", "data_file"])
def test_entry_without_a_required_field_is_corrupt(field: str) -> None:
    schema = files.build_manifest_schema(2, [])
    for fields in (schema["fields"], schema["fields"][-1]["type"]["fields"]):
        for item in fields:
            if item["name"] == field:
                item["type"] = ["null", item["type"]]
    value = {"status": 1, "file_path": "x", "record_count": 1}
    valid_entry = build_entry(schema, **({field: value[field]} if field in value else {}))
    broken_entry = build_entry(schema, **{field: None})
    assert decode_manifest(build_manifest(schema, valid_entry, valid_entry), "the-file").rows == 2
    with pytest.raises(Corrupt, match=r"the-file: .*entry"):
        decode_manifest(build_manifest(schema, valid_entry, broken_entry), "the-file")


def test_rows_of_null_records_do_not_multiply_memory() -> None:
    """Each row has two bytes and a hundred columns, and is rejected before the columns are allocated."""
    schema = files.build_manifest_schema(2, [(f"p{index}", "long") for index in range(100)])
    schema["fields"] = [schema["fields"][0], schema["fields"][-1]]  # Only the status and the data file remain.
    schema["fields"][1]["type"] = ["null", schema["fields"][1]["type"]]
    with pytest.raises(Corrupt, match="claims more rows than its bytes can hold"):
        decode_manifest(build_block_file(count=1 << 20, data=b"\x02\x00" * (1 << 20), schema=schema), "the-file")


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("codec", ["null", "deflate", "snappy", "zstandard"])
def test_block_that_inflates_past_the_limit_is_rejected(codec: str) -> None:
    bomb = files.compress(codec, bytes(64 << 20))
    data = files.build_container(SCHEMA, [], codec=codec) + files.encode_varint(1) + files.add_length(bomb) + files.SYNC
    tracemalloc.start()
    with pytest.raises(Corrupt, match="the-file: inflates to more than 1048576 bytes"):
        decode_manifest(data, "the-file", inflated_limit_bytes=1 << 20)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 8 << 20


def test_size_limit_applies_to_the_sum_of_all_blocks() -> None:
    data = make_manifest("deflate")
    size = len(decode_manifest(data, "m").heap)
    assert decode_manifest(data, "m", inflated_limit_bytes=size).rows == 12
    with pytest.raises(Corrupt, match=f"inflates to more than {size - 1} bytes"):
        decode_manifest(data, "m", inflated_limit_bytes=size - 1)


def test_column_ids_chosen_to_collide_are_rejected_quickly() -> None:
    """Four thousand ids have the same position in the hash table of the compiled decoder.

    Each id would be compared with all others.
    """
    inverse = pow(2654435769, -1, 2**32)  # The decoder multiplies an id by this number to find its position.
    ids = [(high << 21 | low) * inverse % 2**32 for high in range(32) for low in range(128)]
    signed_ids = [i - 2**32 if i >= 2**31 else i for i in ids]
    row = build_entry(SCHEMA, column_sizes=[{"key": key, "value": 1} for key in signed_ids])
    with pytest.raises(Corrupt, match="statistics of more columns than any table has"):
        decode_manifest(build_manifest(SCHEMA, row), "the-file")


def test_statistics_of_too_many_columns_are_rejected() -> None:
    row = build_entry(SCHEMA, column_sizes=[{"key": key, "value": 1} for key in range(140_000)])
    with pytest.raises(Corrupt, match="statistics of more columns than any table has"):
        decode_manifest(build_manifest(SCHEMA, row), "the-file")


@pytest.mark.slow
def test_decoding_leaks_no_memory() -> None:
    good_manifest, cut_manifest = make_manifest("deflate"), make_manifest("null")[:-40]
    bad_row = build_block_file(data=ENCODED_ROW[:-1])

    def decode_all() -> None:
        assert decode_manifest(good_manifest, "m").rows == 12
        for data in (cut_manifest, bad_row):
            assert not is_decoded(data)

    for _ in range(100):  # The first calls fill caches, which is no leak.
        decode_all()
    grown_bytes = []
    for _ in range(3):
        gc.collect()
        bytes_before = psutil.Process().memory_info().rss
        for _ in range(400):
            decode_all()
        gc.collect()
        grown_bytes.append(psutil.Process().memory_info().rss - bytes_before)
    # A leak grows in each round, but other threads of the process may allocate memory in some rounds.
    assert min(grown_bytes) < 1 << 20, grown_bytes


def test_manifests_decoded_by_concurrent_threads_are_equal() -> None:
    """Several threads use one decoding program, which is compiled once for a schema. Their columns must not mix."""
    manifests = [
        build_manifest(
            SCHEMA, *(build_entry(SCHEMA, day=day, record_count=number) for number in range(300)), codec="deflate"
        )
        for day in range(8)
    ]
    with ThreadPoolExecutor(4) as pool:
        for day, decoded_rows in pool.map(lambda day: (day, decode_manifest(manifests[day], "m")), list(range(8)) * 10):
            assert decoded_rows.longs["record_count"].tolist() == list(range(300))
            assert decoded_rows.partition[0].longs is not None
            assert set(decoded_rows.partition[0].longs.tolist()) == {day}
