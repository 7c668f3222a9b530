"""Random tables of all types and transforms, their files and manifest entries, and the values that readers must find.

The values come from the planner's oracles (`tests/planner`), which follow the specification and share no code with the
code under test.
"""

from __future__ import annotations

import json
import math
import random
import struct
from typing import Any

from seamark.formats.iceberg.manifests.content_file import ContentFile, list_partition_types
from seamark.formats.iceberg.manifests.writer import ManifestEntry, WrittenManifest, write_manifest
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.table_json import decode_table
from seamark.formats.iceberg.types import values
from seamark.formats.runtime.errors import BadRequest
from tests.planner.lakes.kinds import (
    FLOATS,
    NANOSECOND_TYPES,
    draw_kind,
    draw_pool,
    strip_parameters,
    to_bytes,
    widen_kind,
)
from tests.planner.lakes.partitioning import apply, draw_transform, infer_result_kind

UUID = "9c12d441-03fe-4693-9a96-a0705ddf69c1"
NAMES = ["id", "a b", "ä€𝄞", "1st", "x.y", "day", "漢字", "a_x20b", "-", "\x00", 'quote"d', "__"]
CODECS = ["gzip", "gzip", "zstd", "snappy", "uncompressed", "ZSTD"]
LONG_MAX = 2**63 - 1
ADDED, EXISTING, DELETED = 1, 0, 2
SEQUENCE, SNAPSHOT = 9, 4_711
"""The sequence number and the id of the snapshot that adds the manifests of a table."""


class ManifestTable:
    """A table with one schema and one partition spec, and values for the partition fields."""

    def __init__(self, seed: int, version: int, *, avoided_names: tuple[str, ...] = ()) -> None:
        """Create a table from a seed.

        Args:
            avoided_names: Types and names that the partition must not have, because some reader cannot read them.
        """
        self.seed, self.version = seed, version
        self.rng = rng = random.Random(seed)
        self.kinds = {column_id: draw_kind(rng, version) for column_id in range(1, rng.randint(2, 9))}
        self.values = {column: draw_pool(rng, kind, size=6) for column, kind in self.kinds.items()}
        # The id, the source column, the transform and the name of each partition field.
        self.fields: list[tuple[int, int, str, str]] = []
        names = rng.sample([name for name in NAMES if name not in avoided_names], 4)
        for index in range(rng.choice([0, 1, 1, 2, 3, 4])):
            source = rng.choice(list(self.kinds))
            transform = draw_transform(rng, self.kinds[source], self.values[source], void=True)
            if strip_parameters(infer_result_kind(transform, self.kinds[source])) not in avoided_names:
                self.fields.append((1000 + index, source, transform, names[index]))
        # No field has the name of a column, because only fields with identity transforms may have it.
        self.properties = {"write.avro.compression-codec": rng.choice(CODECS)} if rng.random() < 0.7 else {}
        self.metadata = self.read()

    def __repr__(self) -> str:
        return f"Case({self.seed}, {self.version}): {self.kinds} {self.fields} {self.properties}"

    def build_json(self, **extra_fields: Any) -> dict[str, Any]:
        """Return the table's metadata."""
        columns = [
            {"id": column_id, "name": f"c{column_id}", "required": False, "type": kind}
            for column_id, kind in self.kinds.items()
        ]
        schema = {"type": "struct", "schema-id": 0, "fields": columns}
        fields = [
            {"source-id": source, "field-id": field_id, "name": name, "transform": transform}
            for field_id, source, transform, name in self.fields
        ]
        document: dict[str, Any] = {
            "format-version": self.version,
            "table-uuid": UUID,
            "location": "file:///t",
            "last-updated-ms": 1_700_000_000_000,
            "last-column-id": 99,
            "schema": schema,
            "schemas": [schema],
            "current-schema-id": 0,
            "partition-spec": fields,
            "partition-specs": [{"spec-id": 0, "fields": fields}],
            "default-spec-id": 0,
            "last-partition-id": 1099,
            "sort-orders": [{"order-id": 0, "fields": []}],
            "default-sort-order-id": 0,
            "properties": self.properties,
        }
        if self.version > 1:
            document |= {"last-sequence-number": 9}
        if self.version > 2:
            document |= {"next-row-id": 10_000}
        return document | extra_fields

    def read(self, **fields: Any) -> TableMetadata:
        return decode_table(json.dumps(self.build_json(**fields)).encode(), f"file:///t/{self.seed}.json")

    @property
    def partition_kinds(self) -> list[str]:
        return [infer_result_kind(transform, self.kinds[source]) for _, source, transform, _ in self.fields]

    def draw_partition(self) -> tuple[Any, ...]:
        partition_values = []
        for _, source, transform, _ in self.fields:
            value = None if self.rng.random() < 0.15 else self.rng.choice(self.values[source])
            if self.kinds[source] in FLOATS and self.rng.random() < 0.15:
                value = math.nan
            partition_values.append(apply(transform, self.kinds[source], value))
        return tuple(partition_values)

    def draw_file(self, content: int = 0) -> ContentFile:
        """Return a random file with this content. In version 3, position deletes are deletion vectors."""
        rng = self.rng
        is_vector = content == 1 and self.version > 2
        size = rng.choice([0, 1, 4_000, 1 << 33])
        fields: dict[str, Any] = {}
        if content == 0:
            fields["sort_order_id"] = rng.choice([None, 0, 3])
            fields["split_offsets"] = rng.choice([None, (4,), (4, 2000)]) if size > 2000 else None
        elif content == 2:
            fields["equality_ids"] = tuple(rng.sample(list(self.kinds), rng.randint(1, len(self.kinds))))
            fields["sort_order_id"] = rng.choice([None, 0, 3])
        elif is_vector:
            size = 4_000
            fields |= {"referenced_data_file": self.draw_path("d"), "content_offset": 4, "content_size_in_bytes": 99}
        elif self.version == 2:
            fields["referenced_data_file"] = rng.choice([None, self.draw_path("d")])
        return ContentFile(
            content=content,
            file_path=self.draw_path("f"),
            file_format="PUFFIN" if is_vector else rng.choice(["PARQUET", "ORC", "AVRO"]),
            spec_id=0,
            partition=self.draw_partition(),
            record_count=rng.choice([0, 1, 100, 2**40]),
            file_size_in_bytes=size,
            key_metadata=rng.choice([None, None, b"\x00key"]),
            **fields,
            **({} if is_vector else self.build_statistics()),
        )

    def draw_path(self, kind: str) -> str:
        return f"file:///t/{self.rng.choice(['data', 'ä ö', 'x=𝄞'])}/{kind}-{self.rng.getrandbits(60)}.parquet"

    def build_statistics(self) -> dict[str, dict[int, Any] | None]:
        rng = self.rng
        document: dict[str, dict[int, Any]] = {name: {} for name in STATISTICS}
        for column, kind in self.kinds.items():
            if rng.random() < 0.3:
                continue
            value_count = rng.choice([1, 7, 2**40])
            document["column_sizes"][column] = rng.choice([0, 40, LONG_MAX])
            document["value_counts"][column] = value_count
            document["null_value_counts"][column] = rng.randint(0, value_count)
            if kind in FLOATS:
                document["nan_value_counts"][column] = rng.randint(0, value_count)
            lower_index, upper_index = sorted(rng.choices(range(len(self.values[column])), k=2))
            document["lower_bounds"][column] = to_bytes(kind, self.values[column][lower_index])
            document["upper_bounds"][column] = to_bytes(kind, self.values[column][upper_index])
        return {name: values_by_column or None for name, values_by_column in document.items()}

    def draw_entry(self, content: int = 0) -> ManifestEntry:
        """Return an entry as a commit would write it. An added entry has sequence numbers, or inherits them."""
        rng, file = self.rng, self.draw_file(content)
        status = rng.choice([ADDED, ADDED, EXISTING, DELETED])
        if self.version == 1:  # Version 1 has no sequence numbers.
            return ManifestEntry(
                status, rng.randint(1, LONG_MAX), sequence_number=None, file_sequence_number=None, file=file
            )
        inherits = status == ADDED and rng.random() < 0.8
        if status != ADDED:
            file = replace_fields(file, first_row_id=rng.choice([None, 0, 2**50])) if content == 0 else file
        return ManifestEntry(
            status,
            None if status == ADDED and rng.random() < 0.5 else rng.randint(1, LONG_MAX),
            None if inherits else rng.randint(0, 8),
            None if inherits or rng.random() < 0.1 else rng.randint(0, 8),
            file,
        )

    def draw_entries(self, content: int = 0) -> list[ManifestEntry]:
        return [self.draw_entry(content) for _ in range(self.rng.choice([0, 1, 3, 12]))]

    def widen(self) -> TableMetadata:
        """Return the metadata of the table with wider types (spec: "Schema Evolution").

        `self.kinds` keeps the old types.
        """
        widened_kinds = {column: widen_kind(self.rng, kind) or kind for column, kind in self.kinds.items()}
        if self.version > 2:
            widened_kinds |= {column: "timestamp" for column, kind in self.kinds.items() if kind == "date"}
        columns = [
            {"id": column_id, "name": f"c{column_id}", "required": False, "type": kind}
            for column_id, kind in widened_kinds.items()
        ]
        schema = {"type": "struct", "schema-id": 1, "fields": columns}
        old_schema = self.build_json()["schema"]
        return self.read(**{"schemas": [old_schema, schema], "schema": schema, "current-schema-id": 1})


STATISTICS = (
    "column_sizes",
    "value_counts",
    "null_value_counts",
    "nan_value_counts",
    "lower_bounds",
    "upper_bounds",
)


def list_content_types(version: int) -> list[int]:
    """Return the contents of files that tables of the format version may have."""
    return [0] if version == 1 else [0, 1, 2]


def encode_entries(case: ManifestTable, entries: list[ManifestEntry], content: int = 0) -> WrittenManifest:
    """Return a manifest of files with this content. Delete manifests have the content 1 for both kinds of deletes."""
    return write_manifest(iter(entries), metadata=case.metadata, spec_id=0, content=min(content, 1))


def replace_fields(file: ContentFile, **fields: Any) -> ContentFile:
    return ContentFile(**{name: getattr(file, name) for name in file.__struct_fields__} | fields)


def list_live_entries(entries: list[ManifestEntry]) -> list[ManifestEntry]:
    return [entry for entry in entries if entry.status != DELETED]


def inherit_values(
    entries: list[ManifestEntry], version: int, content: int, snapshot: int, sequence: int, first_row_id: int | None
) -> list[ManifestEntry]:
    """Return the live entries as readers must see them.

    The rules are in the specification, "Sequence Number Inheritance" and "First Row ID Inheritance".
    """
    live_entries = []
    for entry in list_live_entries(entries):
        file, numbers = entry.file, (entry.sequence_number, entry.file_sequence_number)
        if version == 1:
            numbers = (0, 0)
        elif entry.status == ADDED:
            numbers = tuple(sequence if number is None else number for number in numbers)  # type: ignore[assignment]
        file_first_row_id = None if version < 3 or entry.status == ADDED else file.first_row_id
        if first_row_id is not None and file_first_row_id is None and content == 0:
            file_first_row_id, first_row_id = first_row_id, first_row_id + file.record_count
        file = replace_fields(file, first_row_id=file_first_row_id if version > 2 else None)
        live_entries.append(
            ManifestEntry(entry.status, snapshot if entry.snapshot_id is None else entry.snapshot_id, *numbers, file)
        )
    return live_entries


def to_comparable(value: Any) -> Any:
    """Return a comparable form of the value, in which NaN equals itself, and zeros and types are distinct."""
    if isinstance(value, tuple):
        return tuple(map(to_comparable, value))
    return (type(value).__name__, repr(value))


def are_same(left: ManifestEntry, right: ManifestEntry) -> bool:
    left_file, right_file = left.file, right.file
    return (
        to_comparable(left_file.partition) == to_comparable(right_file.partition)
        and replace_fields(left_file, partition=()) == replace_fields(right_file, partition=())
        and [left.status, left.snapshot_id, left.sequence_number, left.file_sequence_number]
        == [right.status, right.snapshot_id, right.sequence_number, right.file_sequence_number]
    )


def compute_summary(kind: str, values: list[Any]) -> dict[str, Any] | None:
    """Return a partition field's summary by the specification, or None if readers would order its UUIDs differently."""
    present_values = [value for value in values if value is not None]
    numbers = [value for value in present_values if value == value]  # NaN does not equal itself.
    document: dict[str, Any] = {"null": len(present_values) < len(values), "nan": len(numbers) < len(present_values)}
    if kind == "uuid" and numbers:
        signed_numbers = sorted(numbers, key=lambda value: struct.unpack(">qq", value))
        if (signed_numbers[0], signed_numbers[-1]) != (min(numbers), max(numbers)):
            return None
    sorted_numbers = sorted(numbers, key=lambda value: (value, math.copysign(1, value) if kind in FLOATS else 0))
    bounds = (to_bytes(kind, sorted_numbers[0]), to_bytes(kind, sorted_numbers[-1])) if sorted_numbers else (None, None)
    return document | {"lower": bounds[0], "upper": bounds[1]}


UNREADABLE_BY_PYICEBERG = NANOSECOND_TYPES
UNREADABLE_BY_JAVA = ("fixed", "a_x20b")
"""Types and names that Java cannot read.

Java writes fixed partition values that it cannot read again (InternalReader), and it treats two of `NAMES` as equal.
"""


def encode_content_file(file: ContentFile, metadata: TableMetadata) -> dict[str, object]:
    """Return the JSON of the REST standard, which `decode_content_file` reads, without null fields.

    The table must have the partition spec of the file.
    """
    spec = metadata.spec(file.spec_id)
    if spec is None:
        raise BadRequest(f"The table has no partition spec {file.spec_id}, with which {file.file_path} was written")
    json: dict[str, object] = {
        "spec-id": file.spec_id,
        "content": ("data", "position-deletes", "equality-deletes")[file.content],
        "file-path": file.file_path,
        "file-format": file.file_format.lower(),
        "partition": list(map(values.encode_json, list_partition_types(metadata, spec), file.partition)),
        "file-size-in-bytes": file.file_size_in_bytes,
        "record-count": file.record_count,
    }
    for name in ("sort_order_id", "first_row_id", "referenced_data_file", "content_offset", "content_size_in_bytes"):
        if (value := getattr(file, name)) is not None:
            json[name.replace("_", "-")] = value
    for name in ("split_offsets", "equality_ids"):
        if (items := getattr(file, name)) is not None:
            json[name.replace("_", "-")] = list(items)
    if file.key_metadata is not None:
        json["key-metadata"] = file.key_metadata.hex().upper()
    for name in ("column_sizes", "value_counts", "null_value_counts", "nan_value_counts"):
        if (counts := getattr(file, name)) is not None:
            json[name.replace("_", "-")] = {"keys": list(counts), "values": list(counts.values())}
    for name in ("lower_bounds", "upper_bounds"):
        if (bounds := getattr(file, name)) is not None:
            texts = [bound.hex().upper() for bound in bounds.values()]
            json[name.replace("_", "-")] = {"keys": list(bounds), "values": texts}
    return json
