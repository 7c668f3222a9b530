"""Tests of manifest lists, and of manifests and lists that PyIceberg wrote."""

from __future__ import annotations

import io
import random
import uuid
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pytest
from pyiceberg import manifest as pyiceberg_manifest
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.typedef import Record
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FixedType,
    FloatType,
    IntegerType,
    LongType,
    NestedField,
    PrimitiveType,
    StringType,
    TimestampType,
    TimeType,
    UUIDType,
)

from seamark.formats.iceberg.manifests.manifest import (
    FieldSummary,
    ManifestFile,
    decode_manifest,
    decode_manifest_list,
)
from seamark.formats.runtime.errors import Corrupt
from tests.iceberg.manifests import manifest_files as files

DAY, MOMENT = date(2026, 11, 21), datetime(2026, 11, 21, 12, 30, 0, 5)
VALUES: list[tuple[PrimitiveType, Any, Any]] = [
    (BooleanType(), True, True),
    (IntegerType(), -5, -5),
    (LongType(), 2**40, 2**40),
    (FloatType(), 0.5, files.to_raw_value(0.5)),
    (DoubleType(), 0.1, files.to_raw_value(0.1)),
    (DateType(), files.to_raw_value(DAY), files.to_raw_value(DAY)),
    (TimeType(), 3_600_000_001, 3_600_000_001),
    (TimestampType(), files.to_raw_value(MOMENT), files.to_raw_value(MOMENT)),
    (StringType(), "grün", "grün".encode()),
    (UUIDType(), uuid.UUID(int=7), uuid.UUID(int=7).bytes),
    (FixedType(3), b"abc", b"abc"),
    (BinaryType(), b"\x00\xff", b"\x00\xff"),
    (DecimalType(9, 2), Decimal("-123.45"), ("decimal", -12345)),
]
"""The type, the value in PyIceberg's form, and the stored value."""


def build_data_file(number: int, partition: Record) -> pyiceberg_manifest.DataFile:
    return pyiceberg_manifest.DataFile.from_args(
        content=pyiceberg_manifest.DataFileContent.DATA,
        file_path=f"s3://b/t/{number}.parquet",
        file_format=pyiceberg_manifest.FileFormat.PARQUET,
        partition=partition,
        record_count=10 * number,
        file_size_in_bytes=1000 + number,
        column_sizes={1: number, 2: 7},
        value_counts={1: 10 * number},
        null_value_counts={1: 0},
        nan_value_counts={},
        lower_bounds={1: bytes([number])},
        upper_bounds={1: b"", 2: b"zz"},
        key_metadata=None,
        split_offsets=[4, 128] if number % 2 else None,
        equality_ids=None,
        sort_order_id=None if number % 2 else 3,
    )


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("codec", ["null", "deflate"])
def test_manifests_of_pyiceberg_are_read(version: Any, codec: Any, tmp_path: Path) -> None:
    columns = [NestedField(i + 1, f"c{i}", kind) for i, (kind, _, _) in enumerate(VALUES)]
    fields = [PartitionField(i + 1, 1000 + i, IdentityTransform(), f"c{i}") for i in range(len(VALUES))]
    spec, path = PartitionSpec(*fields, spec_id=4), tmp_path / "m.avro"
    output = PyArrowFileIO().new_output(f"file://{path}")
    with pyiceberg_manifest.write_manifest(version, spec, Schema(*columns), output, 77, codec) as writer:
        for i in range(5):
            partition = Record(*(None if i == 3 else value for _, value, _ in VALUES))
            writer.add_entry(
                pyiceberg_manifest.ManifestEntry.from_args(
                    status=pyiceberg_manifest.ManifestEntryStatus.ADDED,
                    snapshot_id=77,
                    sequence_number=5,
                    file_sequence_number=5,
                    data_file=build_data_file(i, partition),
                )
            )
    decoded_manifest = decode_manifest(path.read_bytes(), str(path))
    assert (decoded_manifest.metadata["partition-spec-id"], decoded_manifest.metadata["format-version"]) == (
        "4",
        str(version),
    )
    plain_entries = files.to_plain_entries(decoded_manifest)
    assert [row["file_path"] for row in plain_entries] == [f"s3://b/t/{i}.parquet" for i in range(5)]
    assert [row["column_sizes"] for row in plain_entries] == [{1: i, 2: 7} for i in range(5)]
    assert [row["lower_bounds"] for row in plain_entries] == [{1: bytes([i])} for i in range(5)]
    assert [row["upper_bounds"] for row in plain_entries] == [{1: b"", 2: b"zz"}] * 5
    assert [row["split_offsets"] for row in plain_entries] == [None, [4, 128], None, [4, 128], None]
    assert [row["sort_order_id"] for row in plain_entries] == [3, None, 3, None, 3]
    for i, row in enumerate(plain_entries):
        assert row["partition"] == [
            (1000 + k, None if i == 3 else expected) for k, (_, _, expected) in enumerate(VALUES)
        ]
    expected_manifests = files.read_by_fastavro(path.read_bytes())
    assert [row["partition"] for row in expected_manifests] == [row["partition"] for row in plain_entries]


@pytest.mark.parametrize("version", [1, 2])
def test_manifest_lists_of_pyiceberg_are_read(version: Any, tmp_path: Path) -> None:
    path = tmp_path / "snap.avro"
    io_ = PyArrowFileIO()
    output = io_.new_output(f"file://{path}")
    summaries = [
        pyiceberg_manifest.PartitionFieldSummary(True, None, b"\x01", b"\x02"),
        pyiceberg_manifest.PartitionFieldSummary(False, True, None, None),
    ]
    written_manifests = [
        pyiceberg_manifest.ManifestFile.from_args(
            manifest_path=f"s3://b/t/{number}-m0.avro",
            manifest_length=1000 + number,
            partition_spec_id=number,
            content=pyiceberg_manifest.ManifestContent.DATA,
            sequence_number=9,
            min_sequence_number=3,
            added_snapshot_id=77,
            added_files_count=number,
            existing_files_count=0,
            deleted_files_count=2,
            added_rows_count=10 * number,
            existing_rows_count=0,
            deleted_rows_count=20,
            partitions=[summaries, [], None][number % 3],
            key_metadata=b"key" if number == 1 else None,
        )
        for number in range(7)
    ]
    with pyiceberg_manifest.write_manifest_list(version, output, 77, 76, 9, "deflate") as writer:
        writer.add_manifests(written_manifests)
    manifest_list = decode_manifest_list(path.read_bytes(), str(path))
    expected = list(pyiceberg_manifest.read_manifest_list(io_.new_input(f"file://{path}")))
    assert len(manifest_list) == 7
    for decoded_manifest, expected_manifest in zip(manifest_list, expected, strict=True):
        for name in ManifestFile.__struct_fields__:
            if name == "partitions":
                assert decoded_manifest.partitions == (
                    None
                    if expected_manifest.partitions is None
                    else tuple(
                        FieldSummary(
                            summary.contains_null, summary.contains_nan, summary.lower_bound, summary.upper_bound
                        )
                        for summary in expected_manifest.partitions
                    )
                )
            elif name != "first_row_id":  # PyIceberg does not support row lineage.
                assert getattr(decoded_manifest, name) == getattr(expected_manifest, name)


def build_list_schema(version: int, *, null_last: bool) -> dict[str, Any]:
    def make_optional(kind: Any) -> list[Any]:
        return files.make_optional(kind, null_last=null_last)

    def build_field(name: str, field_id: int, kind: Any) -> dict[str, Any]:
        return {"name": name, "field-id": field_id, "type": kind}

    summary = [
        build_field("contains_null", 509, "boolean"),
        build_field("contains_nan", 518, make_optional("boolean")),
        build_field("lower_bound", 510, make_optional("bytes")),
        build_field("upper_bound", 511, make_optional("bytes")),
    ]
    count_ids = [504, 505, 506, 512, 513, 514]
    names = [f"{state}_{unit}_count" for unit in ("files", "rows") for state in ("added", "existing", "deleted")]
    fields = [
        build_field("manifest_path", 500, "string"),
        build_field("manifest_length", 501, "long"),
        build_field("partition_spec_id", 502, "int"),
        build_field("added_snapshot_id", 503, "long"),
        *(
            build_field(name, i, make_optional("int" if i < 510 else "long"))
            for name, i in zip(names, count_ids, strict=True)
        ),
        build_field(
            "partitions",
            507,
            make_optional(
                {"type": "array", "element-id": 508, "items": {"type": "record", "name": "r508", "fields": summary}}
            ),
        ),
        build_field("key_metadata", 519, make_optional("bytes")),
    ]
    if version > 1:
        fields += [
            build_field("content", 517, "int"),
            build_field("sequence_number", 515, "long"),
            build_field("min_sequence_number", 516, "long"),
        ]
    if version > 2:
        fields.append(build_field("first_row_id", 520, make_optional("long")))
    return {"type": "record", "name": "manifest_file", "fields": fields}


def draw_manifest_file(rng: random.Random, schema: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for field in schema["fields"]:
        name, kind = field["name"], field["type"]
        if isinstance(kind, list):
            kind = next(branch for branch in kind if branch != "null")
            if rng.random() < 0.3:
                row[name] = None
                continue
        if isinstance(kind, dict):
            row[name] = [draw_manifest_file(rng, kind["items"]) for _ in range(rng.randrange(4))]
        else:
            row[name] = {
                "string": f"s3://b/ü{rng.randrange(100)}",
                "bytes": rng.randbytes(rng.choice([0, 8])),
                "boolean": rng.random() < 0.5,
            }.get(kind, rng.randrange(1000))
    return row


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("null_last", [False, True])
def test_every_manifest_list_decodes_to_what_fastavro_reads(version: int, null_last: bool) -> None:
    rng, schema = random.Random(version), build_list_schema(version, null_last=null_last)
    rows = [files.encode(schema, draw_manifest_file(rng, schema)) for _ in range(300)]
    data = files.build_container(schema, [rows[:100], [], rows[100:]], codec="deflate")
    manifest_list = decode_manifest_list(data, "snap.avro")
    expected: list[Any] = list(fastavro.reader(io.BytesIO(data)))
    assert len(manifest_list) == len(expected) == 300
    for decoded_manifest, expected_manifest in zip(manifest_list, expected, strict=True):
        for name in ManifestFile.__struct_fields__:
            if name == "partitions":
                partitions = expected_manifest["partitions"]
                expected_partitions = (
                    None if partitions is None else tuple(FieldSummary(*summary.values()) for summary in partitions)
                )
                assert decoded_manifest.partitions == expected_partitions
            else:
                default_value = 0 if name in ("content", "sequence_number", "min_sequence_number") else None
                assert getattr(decoded_manifest, name) == expected_manifest.get(name, default_value)


def test_manifest_list_without_manifests_is_empty() -> None:
    assert decode_manifest_list(files.build_container(build_list_schema(2, null_last=False), []), "snap.avro") == ()


def test_manifest_list_whose_schema_has_no_path_is_rejected_by_name() -> None:
    schema = build_list_schema(2, null_last=False)
    del schema["fields"][0]
    with pytest.raises(Corrupt, match=r"^snap\.avro: the Avro schema, .*has no field manifest_path \(500\)"):
        decode_manifest_list(files.build_container(schema, []), "snap.avro")
