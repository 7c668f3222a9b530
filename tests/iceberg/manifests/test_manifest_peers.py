"""Tests that PyIceberg and Iceberg Java read Seamark's manifests and manifest lists without loss or change."""

from __future__ import annotations

import json
import subprocess
from decimal import Context, Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pyspark
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.manifest import read_manifest_list

from seamark.formats.iceberg.manifests.manifest import ManifestFile
from seamark.formats.iceberg.manifests.writer import ManifestEntry, assign_first_row_ids, write_manifest_list
from tests.iceberg.manifests import content_files as cases
from tests.iceberg.manifests.content_files import (
    SEQUENCE,
    SNAPSHOT,
    ManifestTable,
    encode_entries,
    inherit_values,
    list_content_types,
)
from tests.planner.lakes.kinds import parse_decimal, strip_parameters, to_bytes, to_float32
from tests.seeds import examples
from tests.services.java import SHORT_LIVED, find_java_17
from tests.services.process import CACHE

SEEDS = st.integers(0, 2**32)
VERSIONS = st.sampled_from([1, 2, 3])

PARTITION_CONVERTERS = {
    "uuid": lambda value, kind: UUID(bytes=value),
    "decimal": lambda value, kind: Decimal(value).scaleb(-parse_decimal(kind)[1], Context(prec=40)),
    "double": lambda value, kind: to_float32(value),
}
"""The form in which PyIceberg 0.12 returns partition values, by type. It rounds doubles to floats."""


@settings(max_examples=examples(60))
@given(seed=SEEDS, version=VERSIONS)
def test_pyiceberg_reads_our_manifests(seed: int, version: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    case = ManifestTable(seed, version, avoided_names=cases.UNREADABLE_BY_PYICEBERG)
    if case.properties == {"write.avro.compression-codec": "snappy"}:
        case.metadata.properties.clear()  # For compressed manifests, fastavro would need one more package.
    folder = tmp_path_factory.mktemp("pyiceberg")
    entries, manifest_files = [], []
    for content in list_content_types(version):
        entries.append(case.draw_entries(content))
        written_manifest = encode_entries(case, entries[-1], content)
        path = folder / f"{content}.avro"
        path.write_bytes(written_manifest.data)
        manifest_files.append(
            written_manifest.to_manifest_file(str(path), snapshot_id=SNAPSHOT, sequence_number=SEQUENCE)
        )
    manifests, _ = assign_first_row_ids(manifest_files, next_row_id=5)
    options: dict[str, Any] = {"snapshot_id": SNAPSHOT, "parent_snapshot_id": 3, "sequence_number": SEQUENCE}
    (folder / "list.avro").write_bytes(write_manifest_list(manifests, format_version=version, **options))
    io = PyArrowFileIO()
    listed_manifests = list(read_manifest_list(io.new_input(str(folder / "list.avro"))))
    assert len(listed_manifests) == len(manifests)
    for manifest, expected_manifest, written_entries in zip(listed_manifests, manifests, entries, strict=True):
        assert (manifest.content, manifest.sequence_number) == (
            expected_manifest.content,
            expected_manifest.sequence_number,
        )
        assert manifest.min_sequence_number == expected_manifest.min_sequence_number
        for name in ("added_rows_count", "existing_rows_count", "deleted_files_count", "added_snapshot_id"):
            assert getattr(manifest, name) == getattr(expected_manifest, name), name
        assert [
            (summary.contains_null, summary.contains_nan, summary.lower_bound, summary.upper_bound)
            for summary in manifest.partitions or ()
        ] == [
            (summary.contains_null, summary.contains_nan, summary.lower, summary.upper)
            for summary in expected_manifest.partitions or ()
        ]
        expected = inherit_values(
            written_entries, version, expected_manifest.content, SNAPSHOT, SEQUENCE, first_row_id=None
        )
        read_entries = manifest.fetch_manifest_entry(io)
        assert len(read_entries) == len(expected)
        for read_entry, entry in zip(read_entries, expected, strict=True):
            compare_with_pyiceberg(case, read_entry, entry)


def compare_with_pyiceberg(case: ManifestTable, iceberg_entry: Any, entry: ManifestEntry) -> None:
    file, data_file = entry.file, iceberg_entry.data_file
    assert (int(iceberg_entry.status), iceberg_entry.snapshot_id) == (entry.status, entry.snapshot_id)
    assert (iceberg_entry.sequence_number, iceberg_entry.file_sequence_number) == (
        entry.sequence_number,
        entry.file_sequence_number,
    )
    for name in ("file_path", "record_count", "file_size_in_bytes", "key_metadata", "sort_order_id"):
        assert getattr(data_file, name) == getattr(file, name), name
    assert (int(data_file.content), str(data_file.file_format).rpartition(".")[2]) == (file.content, file.file_format)
    for name in cases.STATISTICS:
        assert (getattr(data_file, name) or None) == getattr(file, name), name
    for name in ("split_offsets", "equality_ids"):
        items = getattr(data_file, name) if case.version > 1 or name == "split_offsets" else None
        assert (tuple(items) if items else None) == getattr(file, name), name
    values = []
    for kind, value in zip(case.partition_kinds, file.partition, strict=True):
        convert = PARTITION_CONVERTERS.get(strip_parameters(kind))
        values.append(value if value is None or convert is None else convert(value, kind))
    assert cases.to_comparable(tuple(data_file.partition)) == cases.to_comparable(tuple(values)), case


def read_with_java(metadata_locations: list[str]) -> list[list[dict[str, Any]]]:
    """Return the manifests of each table's current snapshot and their live files, as Iceberg Java reads them.

    `metadata_locations` has the location of each table's metadata file.
    """
    extra_jars = ("slf4j-api-*.jar", "snappy-java-*.jar", "zstd-jni-*.jar")
    jars = [*(CACHE / "jars").glob("iceberg-spark-runtime-*.jar")]
    jars += [jar for name in extra_jars for jar in Path(pyspark.__file__).parent.glob(f"jars/{name}")]
    argv = [find_java_17(), "-Xmx512m", *SHORT_LIVED, "-cp", ":".join(map(str, jars))]
    argv.append(str(Path(__file__).with_name("ManifestPeer.java")))
    result = subprocess.run(argv, input="\n".join(metadata_locations).encode(), capture_output=True, timeout=200)
    assert result.returncode == 0, result.stderr.decode()[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


def write_snapshot(case: ManifestTable, folder: Path) -> tuple[list[ManifestFile], list[list[ManifestEntry]], str]:
    """Write one snapshot with a manifest of each content below `folder`. In version 3, its row ids begin at 10,000.

    Returns:
        The expected manifests and entries, and the URI of the metadata file.
    """
    folder.mkdir()
    described_files, entries = [], []
    for content in list_content_types(case.version):
        entries.append(case.draw_entries(content))
        written_manifest = encode_entries(case, entries[-1], content)
        path = folder / f"{content}.avro"
        path.write_bytes(written_manifest.data)
        described_files.append(
            written_manifest.to_manifest_file(path.as_uri(), snapshot_id=SNAPSHOT, sequence_number=SEQUENCE)
        )
    manifests, next_row_id = (
        assign_first_row_ids(described_files, next_row_id=10_000) if case.version > 2 else (described_files, 0)
    )
    options: dict[str, Any] = {"snapshot_id": SNAPSHOT, "parent_snapshot_id": None, "sequence_number": SEQUENCE}
    (folder / "list.avro").write_bytes(write_manifest_list(manifests, format_version=case.version, **options))
    snapshot: dict[str, Any] = {"snapshot-id": SNAPSHOT, "timestamp-ms": 1_700_000_000_000, "schema-id": 0}
    snapshot |= {"manifest-list": (folder / "list.avro").as_uri(), "summary": {"operation": "append"}}
    snapshot |= {} if case.version == 1 else {"sequence-number": SEQUENCE}
    fields = {} if case.version < 3 else {"next-row-id": next_row_id}
    if case.version > 2:
        snapshot |= {"first-row-id": 10_000, "added-rows": next_row_id - 10_000}
    metadata = case.build_json(**{"snapshots": [snapshot], "current-snapshot-id": SNAPSHOT}, **fields)
    (folder / "v1.metadata.json").write_text(json.dumps(metadata))
    return manifests, entries, (folder / "v1.metadata.json").as_uri()


def to_java_entry(case: ManifestTable, entry: ManifestEntry) -> dict[str, Any]:
    """Return the entry in the form in which the Java program prints it."""
    file = entry.file
    result: dict[str, Any] = {
        name: getattr(file, name)
        for name in ("content", "file_path", "file_format", "spec_id", "record_count", "file_size_in_bytes")
    }
    result["partition"] = [
        None if value is None else to_bytes(kind, value).hex()
        for kind, value in zip(case.partition_kinds, file.partition, strict=True)
    ]
    for name in cases.STATISTICS:
        if (values_by_column := getattr(file, name)) is not None:
            convert = (lambda value: value.hex()) if name.endswith("bounds") else (lambda value: value)
            result[name] = {str(column): convert(value) for column, value in values_by_column.items()}
    result["key_metadata"] = None if file.key_metadata is None else file.key_metadata.hex()
    for name in ("split_offsets", "equality_ids"):
        if (items := getattr(file, name)) is not None:
            result[name] = list(items)
    result["sort_order_id"] = file.sort_order_id
    result |= {"sequence_number": entry.sequence_number, "file_sequence_number": entry.file_sequence_number}
    if file.content == 0:
        return result | {"first_row_id": file.first_row_id}
    names = ("referenced_data_file", "content_offset", "content_size_in_bytes")
    return result | {name: getattr(file, name) for name in names}


@pytest.mark.slow
def test_iceberg_java_reads_our_manifests(tmp_path: Path) -> None:
    tables = [ManifestTable(seed, seed % 3 + 1, avoided_names=cases.UNREADABLE_BY_JAVA) for seed in range(120)]
    snapshots = [write_snapshot(case, tmp_path / str(case.seed)) for case in tables]
    answers = read_with_java([uri for _, _, uri in snapshots])
    assert len(answers) == len(tables)
    compared_count = 0
    for case, (manifests, entries, _), answer in zip(tables, snapshots, answers, strict=True):
        for manifest, written_entries, read_manifest in zip(manifests, entries, answer, strict=True):
            files = read_manifest.pop("files")
            partitions = read_manifest.pop("partitions", None)
            expected_json = msgspec.to_builtins(msgspec.structs.replace(manifest, partitions=None))
            assert read_manifest == {name: expected_json[name] for name in read_manifest}, case
            assert partitions == format_summaries_like_java(manifest), case
            expected = inherit_values(
                written_entries, case.version, manifest.content, SNAPSHOT, SEQUENCE, manifest.first_row_id
            )
            assert files == [to_java_entry(case, entry) for entry in expected], case
            compared_count += len(files)
    assert compared_count > 500


def format_summaries_like_java(manifest: ManifestFile) -> list[dict[str, Any]] | None:
    if manifest.partitions is None:
        return None
    return [
        {
            "null": summary.contains_null,
            "nan": summary.contains_nan,
            "lower": None if summary.lower is None else summary.lower.hex(),
            "upper": None if summary.upper is None else summary.upper.hex(),
        }
        for summary in manifest.partitions
    ]
