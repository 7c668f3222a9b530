"""Tests of Seamark's manifests and manifest lists. Readers find the entries that were written, with the values that
entries inherit.
"""

from __future__ import annotations

import io
import json
import math
from types import SimpleNamespace
from typing import Any

import fastavro
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seamark.formats.iceberg.manifests.content_file import ContentFile
from seamark.formats.iceberg.manifests.entry_avro import convert_to_avro_name
from seamark.formats.iceberg.manifests.manifest import (
    FieldSummary,
    ManifestFile,
    decode_manifest,
    decode_manifest_list,
)
from seamark.formats.iceberg.manifests.writer import (
    ManifestEntry,
    assign_first_row_ids,
    decode_listed,
    read_live_entries,
    write_manifest,
    write_manifest_list,
)
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.errors import BadRequest, Corrupt
from tests.iceberg.manifests import content_files as cases
from tests.iceberg.manifests import manifest_files
from tests.iceberg.manifests.content_files import (
    ADDED,
    DELETED,
    EXISTING,
    SEQUENCE,
    SNAPSHOT,
    ManifestTable,
    are_same,
    compute_summary,
    encode_entries,
    inherit_values,
    list_content_types,
    list_live_entries,
    replace_fields,
)
from tests.planner.lakes.kinds import DAY_US, to_bytes
from tests.planner.lakes.manifests import Entry, PartitionField, Style, build_manifest_bytes
from tests.seeds import examples

SEEDS = st.integers(0, 2**32)
VERSIONS = st.sampled_from([1, 2, 3])


def make_manifest_file(path: str, length_bytes: int = 1, **fields: Any) -> ManifestFile:
    """Return the description of a manifest in a manifest list, by default of a data manifest of the spec 0."""
    defaults = {"partition_spec_id": 0, "content": 0, "sequence_number": 5, "min_sequence_number": 5}
    return ManifestFile(path, length_bytes, **defaults | {"added_snapshot_id": 1} | fields)


def read_entries(data: bytes, manifest: ManifestFile, metadata: TableMetadata) -> list[ManifestEntry]:
    return read_live_entries(decode_listed(data, manifest), manifest, metadata)


def write_and_read_list(
    case: ManifestTable, manifests: list[ManifestFile], next_row_id: int = 10_000
) -> list[ManifestFile]:
    """Write a manifest list, and return the manifests as readers find them in the list."""
    if case.version > 2:
        manifests, _ = assign_first_row_ids(manifests, next_row_id)
    data = write_manifest_list(
        manifests,
        format_version=case.version,
        snapshot_id=SNAPSHOT,
        parent_snapshot_id=None,
        sequence_number=SEQUENCE,
    )
    manifest_list = list(decode_manifest_list(data, "snap.avro"))
    assert manifest_list == manifests
    return manifest_list


@settings(max_examples=examples(150))
@given(seed=SEEDS, version=VERSIONS)
def test_entries_are_read_as_written_with_inherited_values(seed: int, version: int) -> None:
    case = ManifestTable(seed, version)
    for content in list_content_types(version):
        entries = case.draw_entries(content)
        written_manifest = encode_entries(case, entries, content)
        manifest_file = written_manifest.to_manifest_file("m.avro", snapshot_id=SNAPSHOT, sequence_number=SEQUENCE)
        (manifest,) = write_and_read_list(case, [manifest_file])
        actual_entries = read_entries(written_manifest.data, manifest, case.metadata)
        expected = inherit_values(entries, version, content, SNAPSHOT, SEQUENCE, manifest.first_row_id)
        assert len(actual_entries) == len(expected), case
        for actual_entry, expected_entry in zip(actual_entries, expected, strict=True):
            assert are_same(actual_entry, expected_entry), f"{case}\n{actual_entry}\n{expected_entry}"


@settings(max_examples=examples(100))
@given(seed=SEEDS, version=VERSIONS)
def test_manifest_summary_matches_its_entries(seed: int, version: int) -> None:
    case = ManifestTable(seed, version)
    entries = case.draw_entries()
    written_manifest = encode_entries(case, entries)
    manifest_file = written_manifest.to_manifest_file("m.avro", snapshot_id=SNAPSHOT, sequence_number=SEQUENCE)
    entries_by_status = {
        status: [entry for entry in entries if entry.status == status] for status in (ADDED, EXISTING, DELETED)
    }
    assert [manifest_file.added_files_count, manifest_file.existing_files_count, manifest_file.deleted_files_count] == [
        len(entries_by_status[status]) for status in (ADDED, EXISTING, DELETED)
    ]
    assert [manifest_file.added_rows_count, manifest_file.existing_rows_count, manifest_file.deleted_rows_count] == [
        sum(entry.file.record_count for entry in entries_by_status[status]) for status in (ADDED, EXISTING, DELETED)
    ]
    numbers = [
        SEQUENCE if listed.sequence_number is None else listed.sequence_number for listed in list_live_entries(entries)
    ]
    if version == 1:
        assert (manifest_file.sequence_number, manifest_file.min_sequence_number) == (0, 0)
    else:
        assert manifest_file.sequence_number == SEQUENCE
        assert manifest_file.min_sequence_number == min(numbers, default=SEQUENCE)
    assert (manifest_file.manifest_length, manifest_file.added_snapshot_id) == (len(written_manifest.data), SNAPSHOT)
    expected = [
        compute_summary(kind, [entry.file.partition[index] for entry in entries])
        for index, kind in enumerate(case.partition_kinds)
    ]
    if None in expected:
        assert manifest_file.partitions is None
    else:
        assert manifest_file.partitions is not None
        assert [to_plain(summary) for summary in manifest_file.partitions] == expected, case


def to_plain(summary: FieldSummary) -> dict[str, Any]:
    return {
        "null": summary.contains_null,
        "nan": summary.contains_nan,
        "lower": summary.lower,
        "upper": summary.upper,
    }


@settings(max_examples=examples(60))
@given(seed=SEEDS, version=VERSIONS)
def test_manifests_of_other_writers_are_read(seed: int, version: int) -> None:
    """Fields are in any order, are missing, or have plain types, as in manifests of the planner's tests."""
    case = ManifestTable(seed, version)
    content = case.rng.choice([0, *list_content_types(version)[1:]])
    entries = [case.draw_entry(content) for _ in range(case.rng.choice([1, 5]))]
    style = Style.draw_style(case.rng)
    fields = tuple(
        PartitionField(field_id, name, source, transform) for field_id, source, transform, name in case.fields
    )
    data = build_manifest_bytes(
        [
            Entry(
                listed.status,
                listed.snapshot_id,
                listed.sequence_number,
                listed.file_sequence_number,
                to_planner_file(case, listed.file),
            )
            for listed in entries
        ],
        version=version,
        content=min(content, 1),
        style=style,
        spec_id=0,
        fields=fields,
        kinds=case.kinds,
        schema=case.build_json()["schema"],
    )
    manifest = make_manifest_file(
        "m.avro",
        len(data),
        content=min(content, 1),  # Both kinds of deletes are in delete manifests.
        sequence_number=SEQUENCE if version > 1 else 0,
        min_sequence_number=0,
        added_snapshot_id=SNAPSHOT,
    )
    actual_entries = read_entries(data, manifest, case.metadata)
    expected = inherit_values(entries, version, content, SNAPSHOT, SEQUENCE, first_row_id=None)
    assert len(actual_entries) == len(expected)
    for actual_entry, expected_entry in zip(actual_entries, expected, strict=True):
        # The entry has the numbers of its writer, or no numbers.
        omitted_fields = (
            "column_sizes",
            "key_metadata",
            "sort_order_id",
            "first_row_id",
        )
        plain_values = dict.fromkeys(
            (*omitted_fields, *(FIELDS_OMITTED_BY_SPARSE_WRITERS if style.sparse and content == 0 else ()))
        )
        comparable_entries = [
            ManifestEntry(
                listed.status,
                listed.snapshot_id,
                listed.sequence_number,
                listed.file_sequence_number,
                replace_fields(listed.file, **plain_values),
            )
            for listed in (actual_entry, expected_entry)
        ]
        assert are_same(*comparable_entries), f"{case} {style}\n{actual_entry}\n{expected_entry}"


FIELDS_OMITTED_BY_SPARSE_WRITERS = ("equality_ids", "referenced_data_file")


def to_planner_file(case: ManifestTable, file: ContentFile) -> SimpleNamespace:
    """Return the file with the attributes of the data files in the tests of the planner."""
    # These files have no sizes of columns, which are the first statistics.
    by_column = [getattr(file, name) or {} for name in cases.STATISTICS[1:]]
    names = ("values", "nulls", "nans", "lower", "upper")
    metrics = {
        column: SimpleNamespace(
            **{name: values_by_column.get(column) for name, values_by_column in zip(names, by_column, strict=True)}
        )
        for column in case.kinds
    }
    return SimpleNamespace(
        content=file.content,
        path=file.file_path,
        format=file.file_format,
        partition=file.partition,
        record_count=file.record_count,
        size=file.file_size_in_bytes,
        metrics=metrics,
        split_offsets=None if file.split_offsets is None else list(file.split_offsets),
        equality_ids=None if file.equality_ids is None else list(file.equality_ids),
        referenced_path=file.referenced_data_file,
        content_offset=file.content_offset,
        content_size=file.content_size_in_bytes,
    )


@settings(max_examples=examples(60))
@given(seed=SEEDS)
def test_partition_values_have_the_promoted_type_of_their_column(seed: int) -> None:
    case = ManifestTable(seed, 3)
    widened_metadata = case.widen()
    entries = [entry for entry in case.draw_entries() if entry.status != DELETED]
    written_manifest = encode_entries(case, entries)
    (manifest,) = write_and_read_list(
        case, [written_manifest.to_manifest_file("m.avro", snapshot_id=SNAPSHOT, sequence_number=SEQUENCE)]
    )
    old_entries = read_entries(written_manifest.data, manifest, case.metadata)
    days = [
        value or 0
        for entry in old_entries
        for (_, source, transform, _), value in zip(case.fields, entry.file.partition, strict=True)
        if (transform, case.kinds[source]) == ("identity", "date")
    ]
    if any(not -(2**63) <= day * DAY_US < 2**63 for day in days):
        with pytest.raises(Corrupt, match=r"^m\.avro: partition field .* is outside the range of timestamp"):
            read_entries(written_manifest.data, manifest, widened_metadata)
        return
    wide_entries = read_entries(written_manifest.data, manifest, widened_metadata)
    for old_entry, new_entry in zip(old_entries, wide_entries, strict=True):
        expected = tuple(
            value * DAY_US if (transform, case.kinds[source]) == ("identity", "date") and value is not None else value
            for (_, source, transform, _), value in zip(case.fields, old_entry.file.partition, strict=True)
        )
        assert cases.to_comparable(new_entry.file.partition) == cases.to_comparable(expected), case
    second_manifest = write_manifest(
        [msgspec.structs.replace(entry, status=EXISTING) for entry in wide_entries],
        metadata=widened_metadata,
        spec_id=0,
        content=0,
    )
    (listed_manifest,) = write_and_read_list(
        case, [second_manifest.to_manifest_file("n.avro", snapshot_id=SNAPSHOT + 1, sequence_number=SEQUENCE + 1)]
    )
    for old_entry, new_entry in zip(
        wide_entries, read_entries(second_manifest.data, listed_manifest, widened_metadata), strict=True
    ):
        assert are_same(msgspec.structs.replace(old_entry, status=EXISTING), new_entry), case


def build_table(
    version: int = 2, partition_fields: list[dict[str, Any]] | None = None, **extra_fields: Any
) -> ManifestTable:
    """Return a table with a column of type long and a column of type uuid. By default it has no partition fields."""
    table = ManifestTable(seed=0, version=version)
    table.kinds, table.fields, table.properties = {1: "long", 2: "uuid"}, [], {}
    table.fields = [(1000 + index, *field) for index, field in enumerate(partition_fields or [])]  # type: ignore[misc]
    table.metadata = table.read(**extra_fields)
    return table


def build_data_file(partition: tuple[Any, ...] = (), **fields: Any) -> ContentFile:
    options = {"content": 0, "file_path": "f.parquet", "file_format": "PARQUET", "spec_id": 0, "record_count": 10}
    return ContentFile(**options | {"partition": partition, "file_size_in_bytes": 1} | fields)


def build_added_entry(file: ContentFile, **fields: Any) -> ManifestEntry:
    return ManifestEntry(
        **{"status": ADDED, "snapshot_id": None, "sequence_number": None}
        | fields
        | {"file_sequence_number": None, "file": file}
    )


def test_equal_entries_produce_equal_bytes() -> None:
    case = ManifestTable(5, 2)
    entries = case.draw_entries() or [case.draw_entry()]
    assert encode_entries(case, entries).data == encode_entries(case, entries).data


@pytest.mark.parametrize("codec", ["gzip", "deflate", "zstd", "snappy", "uncompressed"])
def test_manifest_has_the_codec_of_the_tables_properties(codec: str) -> None:
    case = build_table(properties={"write.avro.compression-codec": codec})
    entries = [build_added_entry(build_data_file(file_path=f"{number}.parquet")) for number in range(450)]
    data = encode_entries(case, entries).data
    names = {"gzip": "deflate", "zstd": "zstandard", "uncompressed": "null"}
    # For other codecs, fastavro would need additional packages; Java reads our files in another test.
    if codec in (
        "gzip",
        "deflate",
        "uncompressed",
    ):
        reader = fastavro.reader(io.BytesIO(data))
        assert [row["data_file"]["file_path"] for row in reader] == [f"{number}.parquet" for number in range(450)]  # type: ignore[index, call-overload]
    assert decode_manifest(data, "m").metadata["avro.codec"] == names.get(codec, codec)


def test_manifest_has_the_compression_level_of_the_tables_properties() -> None:
    # The prime number makes the paths differ in several digits.
    entries = [build_added_entry(build_data_file(file_path=f"{i * 7919}.parquet")) for i in range(450)]
    sizes = [
        len(encode_entries(build_table(properties={"write.avro.compression-level": level}), entries).data)
        for level in ("1", "9")
    ]
    assert sizes[0] > sizes[1]


@pytest.mark.parametrize(
    ("properties", "message"),
    [
        ({"write.avro.compression-codec": "lzo"}, "write.avro.compression-codec is 'lzo'"),
        ({"write.avro.compression-level": "10"}, "write.avro.compression-level is 10"),
        ({"write.avro.compression-level": "high"}, "write.avro.compression-level must have an integer"),
    ],
)
def test_invalid_compression_property_is_named_in_the_error(properties: dict[str, str], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        encode_entries(build_table(properties=properties), [])


def test_manifest_header_equals_that_of_javas_writers() -> None:
    case = build_table(3, [(1, "bucket[4]", "b")])
    metadata = decode_manifest(encode_entries(case, []).data, "m").metadata
    assert json.loads(metadata["schema"]) == case.build_json()["schema"]
    assert json.loads(metadata["partition-spec"]) == case.build_json()["partition-spec"]
    assert {name: metadata[name] for name in ("schema-id", "partition-spec-id", "format-version", "content")} == {
        "schema-id": "0",
        "partition-spec-id": "0",
        "format-version": "3",
        "content": "data",
    }
    deletes = write_manifest([], metadata=case.metadata, spec_id=0, content=1)
    assert decode_manifest(deletes.data, "m").metadata["content"] == "deletes"
    assert "content" not in decode_manifest(encode_entries(build_table(1), []).data, "m").metadata


@pytest.mark.parametrize(
    ("version", "entry", "content", "message"),
    [
        (1, build_added_entry(build_data_file()), 0, "needs a snapshot id"),
        (1, build_added_entry(build_data_file(content=1), snapshot_id=1), 1, "no delete files"),
        (2, build_added_entry(build_data_file()), 1, "content of .* differs from the manifest"),
        (2, build_added_entry(build_data_file(content=1)), 0, "content of .* differs from the manifest"),
        (2, build_added_entry(build_data_file(spec_id=1)), 0, "the partition spec .* differs from the manifest"),
        (2, build_added_entry(build_data_file(), status=EXISTING, snapshot_id=1), 0, "only an added file inherits"),
        (3, build_added_entry(build_data_file(), status=DELETED, snapshot_id=1), 0, "only an added file inherits"),
    ],
)
def test_entries_that_readers_would_misread_are_not_written(
    version: int, entry: ManifestEntry, content: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write_manifest([entry], metadata=build_table(version).metadata, spec_id=0, content=content)


def test_version_1_manifest_in_a_version_2_table_has_sequence_number_0() -> None:
    written_manifest = encode_entries(
        build_table(1),
        [
            build_added_entry(build_data_file(), snapshot_id=5),
            build_added_entry(build_data_file(), status=EXISTING, snapshot_id=4),
        ],
    )
    (manifest,) = decode_manifest_list(
        write_manifest_list(
            [written_manifest.to_manifest_file("m", snapshot_id=5, sequence_number=0)],
            format_version=1,
            snapshot_id=5,
            parent_snapshot_id=None,
            sequence_number=0,
        ),
        "list",
    )
    entries = read_entries(written_manifest.data, manifest, build_table(2).metadata)
    assert [
        (entry.status, entry.snapshot_id, entry.sequence_number, entry.file_sequence_number) for entry in entries
    ] == [
        (ADDED, 5, 0, 0),
        (EXISTING, 4, 0, 0),
    ]
    (rewritten_manifest,) = write_and_read_list(build_table(2), [manifest])
    assert rewritten_manifest == manifest


def test_first_row_ids_are_assigned_to_data_manifests_without_them() -> None:
    def build_manifest_file(path: str, content: int, first_row_id: int | None, counts: tuple[int, int]) -> ManifestFile:
        rows = {"added_rows_count": counts[0], "existing_rows_count": counts[1], "first_row_id": first_row_id}
        return make_manifest_file(path, content=content, **rows)

    manifests = [
        build_manifest_file("a", 0, 7, (1, 1)),
        build_manifest_file("b", 0, None, (100, 25)),
        build_manifest_file("c", 1, None, (5, 0)),
        build_manifest_file("d", 0, None, (0, 3)),
        build_manifest_file("e", 0, None, (1, 0)),
    ]
    numbered_manifests, next_row_id = assign_first_row_ids(manifests, next_row_id=1_000)
    assert [manifest.first_row_id for manifest in numbered_manifests] == [7, 1_000, None, 1_125, 1_128]
    assert next_row_id == 1_129
    with pytest.raises(Corrupt, match=r"^m: .* has no row counts"):
        assign_first_row_ids([make_manifest_file("m")], 0)


def test_files_inherit_first_row_ids_in_the_order_of_their_manifest() -> None:
    """By the specification ("First Row ID Inheritance"), existing files of upgraded tables can have no ids.

    These files then inherit ids as added files do.
    """
    case = build_table(3)
    old_entry_fields = {"status": EXISTING, "snapshot_id": 1, "sequence_number": 1}
    entries = [
        # The id of an added file is ignored, because the writer of the file does not choose it.
        build_added_entry(build_data_file(first_row_id=3, record_count=50)),
        build_added_entry(build_data_file(first_row_id=70, record_count=25), **old_entry_fields),
        build_added_entry(build_data_file(record_count=5), **old_entry_fields),
        build_added_entry(build_data_file(record_count=9), **old_entry_fields | {"status": DELETED}),
        build_added_entry(build_data_file(record_count=1)),
    ]
    written_manifest = encode_entries(case, entries)
    manifest_file = written_manifest.to_manifest_file("m", snapshot_id=5, sequence_number=2)
    (manifest,), next_row_id = assign_first_row_ids([manifest_file], next_row_id=1_000)
    assert next_row_id == 1_081  # The manifest reserves ids for the rows of all live files: 50 + 25 + 5 + 1.
    assert [entry.file.first_row_id for entry in read_entries(written_manifest.data, manifest, case.metadata)] == [
        1_000,
        70,
        1_050,
        1_055,
    ]
    assert {entry.file.first_row_id for entry in read_entries(written_manifest.data, manifest_file, case.metadata)} == {
        None
    }


def test_manifest_list_requires_the_fields_of_its_version() -> None:
    manifest_file = encode_entries(build_table(3), []).to_manifest_file("m", snapshot_id=5, sequence_number=2)
    options: dict[str, Any] = {"snapshot_id": 5, "parent_snapshot_id": 4, "sequence_number": 2}
    with pytest.raises(ValueError, match="m: the data manifest has no first row id"):
        write_manifest_list([manifest_file], format_version=3, **options)
    with pytest.raises(ValueError, match="has no delete manifests"):
        write_manifest_list([msgspec.structs.replace(manifest_file, content=1)], format_version=1, **options)
    with pytest.raises(Corrupt, match=r"^m: .* has no added_files_count"):
        write_manifest_list(
            [msgspec.structs.replace(manifest_file, added_files_count=None)], format_version=2, **options
        )


LOW, HIGH = b"\x00" * 16, b"\xff" * 16


@pytest.mark.parametrize(("uuids", "agree"), [((LOW, HIGH), False), ((HIGH, HIGH), True), ((LOW, b"\x01" * 16), True)])
def test_uuid_bounds_are_valid_in_every_readers_order_or_omitted(uuids: tuple[bytes, ...], agree: bool) -> None:
    case = build_table(2, [(2, "identity", "u"), (1, "identity", "n")])
    entries = encode_entries(case, [build_added_entry(build_data_file((value, 1))) for value in uuids])
    assert (entries.partitions is not None) == agree


def test_zeros_and_nan_have_the_bounds_of_the_specification() -> None:
    case = build_table(2, [(1, "identity", "f")])
    case.kinds = {1: "double"}
    case.metadata = case.read()
    entries = encode_entries(
        case, [build_added_entry(build_data_file((value,))) for value in (0.0, -0.0, math.nan, None)]
    )
    assert entries.partitions is not None
    (summary,) = entries.partitions
    assert (summary.contains_null, summary.contains_nan) == (True, True)
    assert (summary.lower, summary.upper) == (to_bytes("double", -0.0), to_bytes("double", 0.0))


def test_partition_values_of_a_dropped_column_stay_distinct() -> None:
    case = build_table(2, [(2, "identity", "u"), (1, "bucket[4]", "b")])
    entries = encode_entries(case, [build_added_entry(build_data_file((LOW, 3)))])
    manifest = entries.to_manifest_file("m", snapshot_id=5, sequence_number=2)
    columns = [{"id": 3, "name": "rest", "required": False, "type": "long"}]
    new_schema = {"type": "struct", "schema-id": 1, "fields": columns}
    metadata_without_column = case.read(
        **{"schemas": [case.build_json()["schema"], new_schema], "current-schema-id": 1}
    )
    (entry,) = read_entries(entries.data, manifest, metadata_without_column)
    assert entry.file.partition == (LOW, 3)
    second_manifest = write_manifest([entry], metadata=metadata_without_column, spec_id=0, content=0)
    assert (
        read_entries(
            second_manifest.data,
            second_manifest.to_manifest_file("m", snapshot_id=5, sequence_number=2),
            metadata_without_column,
        )[0].file
        == entry.file
    )
    metadata_without_schema = case.read(**{"schemas": [new_schema], "current-schema-id": 1})
    with pytest.raises(Corrupt, match=r"^m: partition field u: the field has values, but no schema"):
        read_entries(entries.data, manifest, metadata_without_schema)


def test_partition_field_without_values_has_type_null() -> None:
    """Java gives the type `unknown` to fields of dropped columns."""
    case = build_table(version=1, partition_fields=[(77, "void", "gone"), (1, "identity", "n")])
    entries = encode_entries(case, [build_added_entry(build_data_file((None, 4)), snapshot_id=1)])
    schema = json.loads(decode_manifest(entries.data, "m").metadata["avro.schema"])
    record = next(field["type"] for field in schema["fields"] if field["name"] == "data_file")
    partition = next(field["type"] for field in record["fields"] if field["name"] == "partition")
    assert [field["type"] for field in partition["fields"]] == ["null", ["null", "long"]]
    (entry,) = read_entries(
        entries.data, entries.to_manifest_file("m", snapshot_id=1, sequence_number=0), case.metadata
    )
    assert entry.file.partition == (None, 4)


def test_manifest_that_differs_from_its_list_is_corrupt_and_named() -> None:
    case = build_table(2, [(1, "identity", "n")])
    entries = encode_entries(case, [build_added_entry(build_data_file((1,)))])
    manifest = entries.to_manifest_file("m.avro", snapshot_id=5, sequence_number=2)
    for data, changed_fields, expected_change in [
        (entries.data[:-1], {}, "bytes, but the manifest list states"),
        (entries.data, {"partition_spec_id": 7}, "has the partition spec 7"),
        (entries.data, {"content": 1}, "has content 0"),
        (b"x" * len(entries.data), {}, "does not start with Avro's magic bytes"),
    ]:
        with pytest.raises(Corrupt, match=rf"^m\.avro.*{expected_change}"):
            read_entries(data, msgspec.structs.replace(manifest, **changed_fields), case.metadata)
    other_case = build_table(2, [(2, "identity", "n")])
    with pytest.raises(
        Corrupt, match=r"^m\.avro: partition field n: the stored type long .* cannot be converted to uuid"
    ):
        read_entries(entries.data, manifest, other_case.metadata)


@settings(max_examples=examples(300))
@given(seed=st.integers(0, 50), version=VERSIONS, fraction=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
def test_damaged_manifest_is_corrupt_or_is_read(seed: int, version: int, fraction: float, byte: int) -> None:
    """Blocks have checksums only with some codecs. Other blocks must decode to entries or raise an error."""
    case = ManifestTable(seed, version)
    case.metadata.properties["write.avro.compression-codec"] = "uncompressed"
    written_manifest = encode_entries(case, case.draw_entries())
    data = bytearray(written_manifest.data)
    data[int(fraction * len(data))] = byte
    manifest = written_manifest.to_manifest_file("m.avro", snapshot_id=SNAPSHOT, sequence_number=SEQUENCE)
    try:
        entries = read_entries(bytes(data), manifest, case.metadata)
    except Corrupt as error:
        assert "m.avro" in error.message  # noqa: PT017
    else:
        assert all(isinstance(entry.file.file_path, str) for entry in entries)


def test_path_that_is_not_text_is_corrupt() -> None:
    schema = manifest_files.build_manifest_schema(2, [])
    file_fields = schema["fields"][-1]["type"]["fields"]
    for field in file_fields:
        if field["name"] == "file_path":
            field["type"] = "bytes"
    file: dict[str, Any] = {field["name"]: None for field in file_fields}
    file |= {"content": 0, "file_path": b"\xff", "file_format": "parquet", "partition": {}, "record_count": 1}
    row = {"status": ADDED, "data_file": file | {"file_size_in_bytes": 1}}
    row |= dict.fromkeys(("snapshot_id", "sequence_number", "file_sequence_number"))
    data = manifest_files.build_container(schema, [[manifest_files.encode(schema, row)]])
    with pytest.raises(Corrupt, match=r"^m: file_path of an entry is not UTF-8 text"):
        read_entries(data, make_manifest_file("m", len(data)), build_table(2).metadata)


def test_existing_entry_without_a_sequence_number_is_corrupt() -> None:
    schema = manifest_files.build_manifest_schema(2, [])
    row = dict.fromkeys(("snapshot_id", "sequence_number", "file_sequence_number"))
    file: dict[str, Any] = {field["name"]: None for field in schema["fields"][-1]["type"]["fields"]}
    file |= {"content": 0, "file_path": "f", "file_format": "parquet", "partition": {}, "record_count": 1}
    row = {**row, "status": EXISTING, "data_file": file | {"file_size_in_bytes": 1}}  # type: ignore[assignment]
    data = manifest_files.build_container(schema, [[manifest_files.encode(schema, row)]])
    with pytest.raises(Corrupt, match=r"^m: an existing file has no sequence number"):
        read_entries(data, make_manifest_file("m", len(data)), build_table(2).metadata)


@pytest.mark.parametrize(
    ("name", "avro"),
    [
        ("a", "a"),
        ("1a", "_1a"),
        ("a b", "a_x20b"),
        ("é", "_xE9"),
        ("𝄞", "_xD834_xDD1E"),
        ("_", "_"),
        ("٣", "_x663"),
    ],
)
def test_field_names_are_made_valid_for_avro(name: str, avro: str) -> None:
    assert convert_to_avro_name(name) == avro
