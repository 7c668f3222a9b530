"""Tests of table metadata JSON: the fields of each format version, old and damaged files, and stability."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.table.metadata import TableMetadataUtil

from seamark.formats.iceberg.metadata import table_json
from seamark.formats.iceberg.metadata.metadata import TableMetadata, add_previous_file
from seamark.formats.iceberg.metadata.table_json import decode_table, encode_refs_view, encode_table
from seamark.formats.runtime.errors import BadRequest, Corrupt
from tests.iceberg.samples import (
    EVENTS,
    NOW_MS,
    UUID,
    add_snapshot,
    add_snapshots,
    apply_json_updates,
    build_order,
    build_spec,
    build_table,
    set_ref,
)
from tests.seeds import examples

SOURCE = "s3://lake/events/metadata/00001.metadata.json"


def build_rich_table(version: int) -> TableMetadata:
    """Return a table that uses every feature of its format version."""
    metadata = build_table(version, partition_spec=build_spec((2, "day", "d")), sort_order=build_order((1, "identity")))
    metadata = add_snapshots(metadata, 11, 12, 13)
    updates: list[dict[str, Any]] = [
        set_ref(11, "v1", "tag", **{"max-ref-age-ms": 5}),
        set_ref(12, "dev", **{"min-snapshots-to-keep": 2}),
        {
            "action": "set-statistics",
            "statistics": {
                "snapshot-id": 12,
                "statistics-path": "s3://lake/stats.puffin",
                "file-size-in-bytes": 10,
                "file-footer-size-in-bytes": 3,
                "blob-metadata": [
                    # Of the blob types that are not indexes, PyIceberg 0.12 reads only this type.
                    {"type": "apache-datasketches-theta-v1", "snapshot-id": 12, "sequence-number": 2, "fields": []}
                ],
            },
        },
        {
            "action": "set-partition-statistics",
            "partition-statistics": {
                "snapshot-id": 13,
                "statistics-path": "s3://lake/part.parquet",
                "file-size-in-bytes": 10,
            },
        },
    ]
    if version >= 3:
        updates.append(
            {"action": "add-encryption-key", "encryption-key": {"key-id": "k", "encrypted-key-metadata": "AAEC"}}
        )
    metadata, _ = add_previous_file(apply_json_updates(metadata, *updates), SOURCE, NOW_MS)
    return metadata


@pytest.mark.parametrize("version", [1, 2, 3])
def test_metadata_is_equal_after_a_round_trip(version: int) -> None:
    metadata = build_rich_table(version)
    data = encode_table(metadata)
    assert decode_table(data, SOURCE) == metadata
    assert encode_table(decode_table(data, SOURCE)) == data
    assert decode_table(gzip.compress(data), SOURCE) == metadata


def test_gzip_file_is_unpacked_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_json, "UNPACKED_BYTES_MAX", 1000)
    assert table_json.decompress_if_gzip(gzip.compress(b" " * 1000)) == b" " * 1000
    for bad_bytes in (gzip.compress(b" " * 1001), gzip.compress(b" " * 1000)[:-4]):
        with pytest.raises(Corrupt, match=r"table metadata: .* 1000 bytes"):
            decode_table(bad_bytes, SOURCE)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_pyiceberg_reads_our_metadata(version: int) -> None:
    metadata = build_rich_table(version)
    pyiceberg_metadata = TableMetadataUtil.parse_raw(encode_table(metadata).decode())
    assert pyiceberg_metadata.format_version == version
    assert [snapshot.snapshot_id for snapshot in pyiceberg_metadata.snapshots] == [11, 12, 13]
    assert pyiceberg_metadata.current_snapshot_id == 13
    assert {name: ref.snapshot_id for name, ref in pyiceberg_metadata.refs.items()} == {"main": 13, "v1": 11, "dev": 12}
    assert [entry.snapshot_id for entry in pyiceberg_metadata.snapshot_log] == [11, 12, 13]
    assert pyiceberg_metadata.metadata_log[0].metadata_file == SOURCE
    assert pyiceberg_metadata.statistics[0].blob_metadata[0].fields == []
    assert pyiceberg_metadata.last_partition_id == 1000
    assert pyiceberg_metadata.default_sort_order_id == 1


def test_each_format_version_has_exactly_the_fields_that_its_readers_need() -> None:
    empty_tables = {version: json.loads(encode_table(build_table(version))) for version in (1, 2, 3)}
    assert "last-sequence-number" not in empty_tables[1]
    assert empty_tables[1]["schema"] == empty_tables[1]["schemas"][0]
    assert empty_tables[1]["partition-spec"] == []
    for version in (2, 3):
        assert empty_tables[version]["last-sequence-number"] == 0
        assert not {"schema", "partition-spec"} & empty_tables[version].keys()
    assert [empty_tables[version]["current-snapshot-id"] for version in (1, 2, 3)] == [-1, -1, None]
    assert ["next-row-id" in empty_tables[version] for version in (1, 2, 3)] == [False, False, True]
    required_names = {
        "format-version", "table-uuid", "location", "last-updated-ms", "last-column-id", "schemas", "current-schema-id",
        "partition-specs", "default-spec-id", "last-partition-id", "sort-orders", "default-sort-order-id",
    }  # fmt: skip
    for version in (1, 2, 3):
        assert required_names <= empty_tables[version].keys()


def test_version_1_snapshots_have_no_sequence_number() -> None:
    document = json.loads(encode_table(build_rich_table(1)))
    assert all("sequence-number" not in snapshot for snapshot in document["snapshots"])


OLD_V1: dict[str, Any] = {
    "format-version": 1,
    "location": "s3://lake/old",
    "last-updated-ms": NOW_MS,
    "last-column-id": 3,
    "schema": {"type": "struct", "fields": EVENTS["fields"]},
    "partition-spec": [{"name": "d", "transform": "day", "source-id": 2}],
    "properties": {"a": "b"},
    "current-snapshot-id": 7,
    "snapshots": [{"snapshot-id": 7, "timestamp-ms": NOW_MS, "manifests": ["s3://lake/m1.avro"]}],
}


def test_old_version_1_metadata_is_completed() -> None:
    metadata = decode_table(json.dumps(OLD_V1).encode(), SOURCE)
    assert metadata.table_uuid is None
    assert metadata.current_schema.id == 0
    assert metadata.default_spec.fields[0].field_id == 1000
    assert metadata.last_partition_id == 1000
    assert [order.order_id for order in metadata.sort_orders] == [0]
    assert metadata.refs["main"].snapshot_id == 7
    document = json.loads(encode_table(metadata))
    assert document["snapshots"][0]["manifests"] == ["s3://lake/m1.avro"]
    assert "table-uuid" not in document
    TableMetadataUtil.parse_raw(json.dumps({**document, "snapshots": [], "current-snapshot-id": -1, "refs": {}}))
    upgraded_metadata = apply_json_updates(
        metadata, {"action": "assign-uuid", "uuid": UUID}, {"action": "upgrade-format-version", "format-version": 3}
    )
    assert decode_table(encode_table(upgraded_metadata), SOURCE) == upgraded_metadata


def test_unknown_fields_are_ignored() -> None:
    document = json.loads(encode_table(build_rich_table(2)))
    document["x-new"] = {"a": [1]}
    document["snapshots"][0]["x-new"] = 1
    document["schemas"][0]["fields"][0]["x-new"] = 1
    assert decode_table(json.dumps(document).encode(), SOURCE).snapshots[0].snapshot_id == 11


def make_broken(**changes: Any) -> dict[str, Any]:
    """Return metadata with changed fields. A field is missing if its value is DROP."""
    document = json.loads(encode_table(build_rich_table(2)))
    document.update(changes)
    return {key: value for key, value in document.items() if value != "DROP"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "Input data was truncated"),
        (b"\x1f\x8bnot gzip", "valid table metadata"),
        (b'{"format-version": 2}', "missing required field"),
        (b"\xff\xfe", "valid table metadata"),
        (b"[" * 100_000, "valid table metadata"),
        (json.dumps(make_broken(**{"format-version": 9})).encode(), "Unsupported format version: v9"),
        (json.dumps(make_broken(**{"table-uuid": "DROP"})).encode(), "UUID is required"),
        (json.dumps(make_broken(**{"schemas": "DROP"})).encode(), "schemas must exist in format v2"),
        (json.dumps(make_broken(**{"partition-specs": []})).encode(), "partition-specs must exist"),
        (json.dumps(make_broken(**{"sort-orders": "DROP"})).encode(), "sort-orders must exist"),
        (json.dumps(make_broken(**{"last-partition-id": "DROP"})).encode(), "last-partition-id must exist"),
        (json.dumps(make_broken(**{"last-sequence-number": "DROP"})).encode(), "last-sequence-number must exist"),
        (json.dumps(make_broken(**{"last-sequence-number": 1})).encode(), "greater than last sequence number 1"),
        (json.dumps(make_broken(**{"current-schema-id": 5})).encode(), "current-schema-id=5"),
        (json.dumps(make_broken(**{"default-spec-id": 5})).encode(), "default-spec-id=5"),
        (json.dumps(make_broken(**{"default-sort-order-id": 5})).encode(), "default-sort-order-id=5"),
        (json.dumps(make_broken(**{"current-snapshot-id": 99})).encode(), "current snapshot 99"),
        (json.dumps(make_broken(**{"current-snapshot-id": 12})).encode(), r"does not match main branch \(12 != 13\)"),
        (
            json.dumps(make_broken(refs={"b": {"snapshot-id": 99, "type": "branch"}})).encode(),
            "reference b does not exist",
        ),
        (json.dumps(make_broken(snapshots="x")).encode(), r"\$.snapshots"),
        (encode_table(build_table(3)).replace(b'"next-row-id":0,', b""), "next-row-id must exist in format v3"),
    ],
)
def test_file_that_is_not_metadata_is_corrupt_and_named(data: bytes, message: str) -> None:
    with pytest.raises(Corrupt, match=message) as raised_error:
        decode_table(data, SOURCE)
    assert SOURCE in raised_error.value.message


DATA = encode_table(build_rich_table(2))


@settings(max_examples=examples(300))
@given(st.integers(0, len(DATA) - 1), st.integers(0, 255))
def test_metadata_with_a_flipped_byte_is_corrupt_or_consistent(position: int, byte: int) -> None:
    damaged_data = DATA[:position] + bytes([byte]) + DATA[position + 1 :]
    try:
        metadata = decode_table(damaged_data, SOURCE)
    except Corrupt as error:
        assert SOURCE in error.message  # noqa: PT017  either outcome is right
        return
    assert metadata.current_snapshot is not None
    assert decode_table(encode_table(metadata), SOURCE) == metadata


def test_refs_mode_has_only_referenced_snapshots_and_the_whole_log() -> None:
    metadata = apply_json_updates(add_snapshots(build_table(), 1, 2, 3, 4), set_ref(2, "v1", "tag"))
    view = json.loads(encode_refs_view(metadata))
    assert [snapshot["snapshot-id"] for snapshot in view["snapshots"]] == [2, 4]
    assert len(view["snapshot-log"]) == 4
    full_json = json.loads(encode_table(metadata))
    assert {**view, "snapshots": None} == {**full_json, "snapshots": None}
    assert [
        snapshot.snapshot_id for snapshot in TableMetadataUtil.parse_raw(encode_refs_view(metadata).decode()).snapshots
    ] == [2, 4]


def test_metadata_log_keeps_the_newest_files_and_returns_the_removed_files() -> None:
    metadata = build_table(properties={"write.metadata.previous-versions-max": "3"})
    removed_names: list[str] = []
    for number in range(5):
        metadata, expired_files = add_previous_file(metadata, f"f{number}", NOW_MS + number)
        removed_names += expired_files
    assert [(entry.metadata_file, entry.timestamp_ms - NOW_MS) for entry in metadata.metadata_log] == [
        ("f2", 2),
        ("f3", 3),
        ("f4", 4),
    ]
    assert removed_names == ["f0", "f1"]
    _, removed_files = add_previous_file(metadata, "f5", NOW_MS, max_entries=0)
    assert removed_files == ["f2", "f3", "f4"]
    metadata, _ = add_previous_file(build_table(), "f", NOW_MS)
    assert len(metadata.metadata_log) == 1
    with pytest.raises(BadRequest, match="previous-versions-max"):
        add_previous_file(build_table(properties={"write.metadata.previous-versions-max": "x"}), "f", NOW_MS)


def test_snapshot_summary_is_kept_byte_for_byte_and_can_be_read() -> None:
    metadata = add_snapshots(build_table(), 1)
    data = encode_table(metadata).replace(b'"added-records":"7"', b'"added-records" : "7", "x":"\\u00e9"')
    decoded_table = decode_table(data, SOURCE)
    assert decoded_table.snapshots[0].build_summary_map() == {"operation": "append", "added-records": "7", "x": "é"}
    assert encode_table(decoded_table) == data


def test_snapshots_are_found_by_id() -> None:
    metadata = add_snapshots(build_table(), 5, 6)
    assert metadata.snapshot(5) is metadata.snapshots[0]
    assert metadata.snapshot(7) is None
    assert metadata.current_snapshot is metadata.snapshots[1]
    assert add_snapshot(5, 1)["snapshot"]["manifest-list"] == metadata.snapshots[0].manifest_list
