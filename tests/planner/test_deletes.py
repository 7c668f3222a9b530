"""Random tests of the delete files that apply, against the specification's rules for each pair of files, and rows.

`Situation` draws a view: manifests of both contents, of several specs, versions and writers' schemas, written by
fastavro. The oracle consists of `is_in_scope` (spec, "Scan Planning"), `removes` (whether any key or position of
the delete file meets a row of the data file) and `is_dropped_by_java` (whether Java's DeleteFileIndex drops the pair by
its statistics).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from seamark.formats.iceberg.manifests.manifest import ManifestFile, decode_manifest_list
from seamark.formats.iceberg.metadata.table_json import decode_table
from seamark.formats.iceberg.types.schema import Schema
from seamark.metaserver.index.blocks.block import Block
from seamark.metaserver.planner.deletes import equality
from seamark.metaserver.planner.deletes.delete_index import DeleteIndex
from seamark.metaserver.planner.view.view import TableView
from tests.planner.lakes.delete_tables import (
    LATE,
    NESTED,
    SPECS,
    A,
    B,
    F,
    build_manifest_file,
    build_schema,
    build_specs,
    encode_as_block,
    read_positions,
)
from tests.planner.lakes.history import write_random_lake
from tests.planner.lakes.kinds import DAY_US, FLOATS, LONG_MAX, LONG_MIN, draw_pool
from tests.planner.lakes.lake import DATA, EQUALITY_DELETES, PATH_ID, POSITION_DELETES, DataFile, DeleteFile
from tests.planner.lakes.manifests import ADDED, DELETED, EXISTING, Entry, Style, build_manifest_bytes
from tests.planner.lakes.metrics import ColumnMetrics, draw_metrics
from tests.seeds import examples

GLOBAL_SPECS = (0, 3)
PROMOTED_KINDS = {
    "int": "long",
    "float": "double",
    "decimal(9, 2)": "decimal(20, 2)",
    "decimal(18, 0)": "decimal(18, 0)",
}
DATES = ["date", "timestamp", "timestamp_ns"]
"""The types to which a date may be promoted, and date itself; rows and partitions here have days in any case."""
UNITS_PER_DAY = {"timestamp": DAY_US, "timestamp_ns": DAY_US * 1000}
PATHS = [f"s3://bucket/table/data/{name}.parquet" for name in ("a", "ab", "abc", "zz", "é", "\U0001f600", "b" * 40)]


@dataclass(eq=False)
class ListedManifest:
    """A manifest with its data for a manifest list."""

    content: int
    spec_id: int
    schema_id: int
    version: int
    sequence: int
    entries: list[Entry] = field(default_factory=list)


def are_same(kind: str, left: Any, right: Any) -> bool:
    """Return whether two values of a column are equal. NaN equals NaN, null equals null, and -0.0 equals 0.0."""
    if kind in FLOATS and left is not None and right is not None and left != left:
        return bool(right != right)
    return bool(left == right)


class Situation:
    """A random view as Python objects, with an oracle of the delete files that apply."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        possible_kinds = [
            "int",
            "long",
            "string",
            "uuid",
            "binary",
            "date",
            "decimal(9, 2)",
            "decimal(18, 0)",
            "boolean",
            "time",
        ]
        # F has floats. LATE is a column that only the new schema has.
        old_kinds = {key: rng.choice(possible_kinds) for key in (A, B, NESTED, LATE)} | {
            F: rng.choice(["float", "double"])
        }
        new_kinds = {
            key: rng.choice(DATES) if kind == "date" else PROMOTED_KINDS.get(kind, kind)
            for key, kind in old_kinds.items()
        }
        self.kinds = {0: old_kinds, 1: new_kinds}
        required_ids = {key for key in (A, F) if rng.random() < 0.3}
        self.required_ids = required_ids
        self.schemas = {
            0: build_schema(0, old_kinds, required_ids, late=False),
            1: build_schema(1, new_kinds, required_ids, late=True),
        }
        # For a date that was promoted to a timestamp, the number of units of the new type in a day.
        self.units = {
            key: UNITS_PER_DAY.get(kind, 1) if old_kinds[key] == "date" else 1 for key, kind in new_kinds.items()
        }
        self.pools = {key: draw_pool(rng, kind, rng.choice([2, 4, 8])) for key, kind in old_kinds.items()}
        for key, unit in self.units.items():
            if unit > 1:  # Days that overflow the promoted type are not used.
                self.pools[key] = [day for day in self.pools[key] if abs(day) * unit <= LONG_MAX] or [0]
        self.pools[F] += [math.nan, 0.0, -0.0]
        self.style = Style.draw_style(rng)
        self.data: list[tuple[ListedManifest, Entry]] = []
        self.deletes: list[tuple[ListedManifest, Entry]] = []
        self.file_count = 0
        self.manifests = [self._build_manifest(DATA) for _ in range(rng.randint(1, 6))]
        self.delete_manifests = [self._build_manifest(1) for _ in range(rng.randint(0, 5))]

    def _build_manifest(self, content: int) -> ListedManifest:
        rng = self.rng
        version = rng.choice([1, 2, 3]) if content == DATA else rng.choice([2, 3])
        sequence = 0 if version == 1 else rng.randint(0, 6)
        manifest = ListedManifest(content, rng.choice([0, 1, 1, 2, 3, 4]), rng.randint(0, 1), version, sequence)
        for _ in range(rng.randint(0, 8)):
            entry = self._build_entry(manifest)
            manifest.entries.append(entry)
            if entry.status != DELETED:
                (self.deletes if content else self.data).append((manifest, entry))
        return manifest

    def _build_entry(self, manifest: ListedManifest) -> Entry:
        rng = self.rng
        status = rng.choice([ADDED, ADDED, EXISTING, EXISTING, DELETED])
        sequence = None if manifest.version == 1 else rng.randint(0, 6)
        if rng.random() < 0.4 and (status == ADDED or manifest.sequence == 0):
            sequence = None
        return Entry(
            status,
            1,
            sequence,
            sequence,
            self._build_delete_file(manifest) if manifest.content else self._build_data_file(manifest),
        )

    def draw_row(self, schema_id: int, partition_values: dict[int, Any]) -> dict[int, Any]:
        rng = self.rng
        row: dict[int, Any] = {}
        for key in (A, B, NESTED, F, LATE):
            is_null = key not in self.required_ids and rng.random() < 0.25
            row[key] = None if is_null or (key == LATE and schema_id == 0) else rng.choice(self.pools[key])
        return row | partition_values

    def _draw_partition(self, spec_id: int) -> tuple[Any, ...]:
        rng = self.rng
        pools = {part.source: self.pools[part.source][-3:] for part in SPECS[spec_id]}
        return tuple(
            None if part.transform == "void" or rng.random() < 0.2 else rng.choice(pools[part.source])
            for part in SPECS[spec_id]
        )

    def _build_metrics(self, schema_id: int, values: dict[int, list[Any]]) -> dict[int, ColumnMetrics]:
        kinds = self.kinds[schema_id]
        metrics_by_column = {
            key: draw_metrics(self.rng, kinds[key], [self._to_stored(schema_id, key, value) for value in column_values])
            for key, column_values in values.items()
        }
        return {
            key: column_metrics
            for key, column_metrics in metrics_by_column.items()
            if column_metrics != ColumnMetrics()
        }

    def _to_stored(self, schema_id: int, key: int, value: Any) -> Any:
        """Return a value of column `key` as files of the schema store it.

        Schema 0 stores a date in days. Schema 1 stores it in the units of the type to which the date is promoted.
        """
        unit = self.units.get(key, 1)
        return value if schema_id == 0 or value is None or unit == 1 else value * unit

    def _draw_common_fields(self, manifest: ListedManifest, content: int) -> dict[str, Any]:
        self.file_count += 1
        # Only the first files have one of `PATHS`, which differ in length and in their characters.
        path = self.rng.choice(PATHS) if content == DATA and self.file_count < 30 else "data/x"
        return {
            "path": f"{path}{self.file_count if self.rng.random() < 0.8 else ''}"
            if content == DATA
            else f"d{self.file_count}",
            "content": content,
            "format": self.rng.choice(["PARQUET", "avro"]),
            "spec_id": manifest.spec_id,
            "partition": self._draw_partition(manifest.spec_id),
            "size": 100,
        }

    def _build_data_file(self, manifest: ListedManifest) -> DataFile:
        # The schema of a file is that of the manifest or an older one, because a rewritten manifest keeps the bytes of
        # old bounds.
        schema_id = self.rng.randint(0, manifest.schema_id)
        common_fields = self._draw_common_fields(manifest, DATA)
        parts = zip(SPECS[manifest.spec_id], common_fields["partition"], strict=True)
        fixed_values = {part.source: value for part, value in parts if part.transform == "identity"}
        rows = [self.draw_row(schema_id, fixed_values) for _ in range(self.rng.randint(1, 4))]
        keys = [key for key in (A, B, NESTED, F, LATE) if key != LATE or schema_id == 1]
        metrics = self._build_metrics(schema_id, {key: [row[key] for row in rows] for key in keys})
        return DataFile(**common_fields, record_count=len(rows), metrics=metrics, rows=rows)

    def _build_delete_file(self, manifest: ListedManifest) -> DeleteFile:
        rng = self.rng
        delete_kind = rng.choice(["equality", "equality", "positions", "file", "bounds", "vector"])
        if delete_kind == "vector" and manifest.version < 3:
            delete_kind = "file"
        common_fields = self._draw_common_fields(
            manifest, EQUALITY_DELETES if delete_kind == "equality" else POSITION_DELETES
        )
        paths = [entry.file.path for _, entry in self.data] or ["none"]
        if delete_kind == "equality":
            return self._build_equality_delete(manifest, common_fields)
        if delete_kind == "positions":
            sampled_rows = {(path, 0) for path in rng.sample(paths, min(2, len(paths)))}
            sorted_paths = sorted(path.encode() for path, _ in sampled_rows)
            path_metrics = {PATH_ID: ColumnMetrics(lower=sorted_paths[0], upper=sorted_paths[-1] + b"~")}
            return DeleteFile(
                **common_fields,
                record_count=2,
                metrics=rng.choice([{}, path_metrics]),
                positions=frozenset(sampled_rows),
            )
        path = rng.choice(paths)
        metrics, referenced_path = {}, path
        if delete_kind == "bounds":
            metrics, referenced_path = {PATH_ID: ColumnMetrics(lower=path.encode(), upper=path.encode())}, None
        if delete_kind == "vector":
            common_fields |= {"format": rng.choice(["PUFFIN", "puffin"])}
        return DeleteFile(
            **common_fields,
            record_count=1,
            metrics=metrics,
            referenced_path=referenced_path,
            positions=frozenset({(path, 0)}),
            content_offset=4 if delete_kind == "vector" else None,
            content_size=40 if delete_kind == "vector" else None,
        )

    def _build_equality_delete(self, manifest: ListedManifest, common_fields: dict[str, Any]) -> DeleteFile:
        rng = self.rng
        schema_id = rng.randint(0, manifest.schema_id)
        usable_columns = [A, B, NESTED, F] + [LATE] * schema_id
        ids = rng.sample(usable_columns, rng.choice([1, 1, 2, 3]))
        rows = [self.draw_row(schema_id, {}) for _ in range(rng.randint(1, 3))]
        metrics = self._build_metrics(schema_id, {key: [row[key] for row in rows] for key in ids})
        keys = tuple(tuple(row[key] for key in ids) for row in rows)
        return DeleteFile(**common_fields, record_count=len(rows), metrics=metrics, equality_ids=ids, keys=keys)

    def build_table_view(self) -> TableView:
        def build_blocks(manifests: list[ListedManifest]) -> list[Block]:
            return [
                encode_as_block(f"m{number}.avro", self.encode_manifest(manifest))
                for number, manifest in enumerate(manifests)
            ]

        def build_manifest_files(manifests: list[ListedManifest]) -> list[ManifestFile]:
            return [build_manifest_file(item.content, item.spec_id, item.sequence) for item in manifests]

        return TableView(
            build_manifest_files(self.manifests),
            build_blocks(self.manifests),
            build_manifest_files(self.delete_manifests),
            build_blocks(self.delete_manifests),
        )

    def encode_manifest(self, manifest: ListedManifest) -> bytes:
        sources = [part.source for part in SPECS[manifest.spec_id]]
        entries = []
        for entry in manifest.entries:
            parts = zip(sources, entry.file.partition, strict=True)
            partition = tuple(self._to_stored(manifest.schema_id, source, value) for source, value in parts)
            entries.append(replace(entry, file=replace(entry.file, partition=partition)))
        return build_manifest_bytes(
            entries,
            version=manifest.version,
            content=manifest.content,
            style=replace(self.style, sparse=self.style.sparse and manifest.content == DATA),
            spec_id=manifest.spec_id,
            fields=SPECS[manifest.spec_id],
            kinds=self.kinds[manifest.schema_id],
            schema=self.schemas[manifest.schema_id],
        )

    def build_delete_index(self, view: TableView) -> DeleteIndex:
        schemas = [msgspec.convert(schema, type=Schema) for schema in self.schemas.values()]
        return DeleteIndex(view, build_specs(), schemas)

    # The oracle

    def compute_sequence(self, manifest_and_entry: tuple[ListedManifest, Entry]) -> int:
        manifest, entry = manifest_and_entry
        return manifest.sequence if entry.sequence is None else entry.sequence

    def is_in_scope(self, delete: tuple[ListedManifest, Entry], data: tuple[ListedManifest, Entry]) -> bool:
        """Return whether the specification applies the delete file to the data file.

        If a position delete names its data file, only the name counts, as in Java.
        """
        delete_file, file = delete[1].file, data[1].file
        has_same_partition = delete_file.partition_key == file.partition_key
        data_sequence, delete_sequence = self.compute_sequence(data), self.compute_sequence(delete)
        if delete_file.content == EQUALITY_DELETES:
            return data_sequence < delete_sequence and (delete_file.spec_id in GLOBAL_SPECS or has_same_partition)
        if data_sequence > delete_sequence:
            return False
        referenced_path = delete_file.referenced_path
        bounds = delete_file.metrics.get(PATH_ID)
        if referenced_path is None and bounds is not None and bounds.lower == bounds.upper:
            referenced_path = bounds.lower.decode()
        if not (has_same_partition if referenced_path is None else referenced_path == file.path):
            return False
        return delete_file.is_vector or not any(
            other[1].file.is_vector and self.is_in_scope(other, data) for other in self.deletes
        )

    def removes(self, delete: tuple[ListedManifest, Entry], data: tuple[ListedManifest, Entry]) -> bool:
        """Return whether a delete file that applies to the data file may remove a row of it.

        The positions of a position delete file are not examined, so it may always remove a row.
        """
        delete_file, file = delete[1].file, data[1].file
        if delete_file.content == POSITION_DELETES:
            return True
        kinds = [self.kinds[1][key] for key in delete_file.equality_ids]
        return any(
            all(
                are_same(kind, row[key], value)
                for kind, key, value in zip(kinds, delete_file.equality_ids, deleted_key, strict=True)
            )
            for row in file.rows
            for deleted_key in delete_file.keys
        )

    def is_dropped_by_java(self, delete: tuple[ListedManifest, Entry], data: tuple[ListedManifest, Entry]) -> bool:
        """Return whether the statistics of a column prove that the delete file removes no row of the data file.

        Only columns count for which Java's planner uses statistics correctly: no floats, UUIDs, promoted dates or
        fields of structs that may be null.
        """
        delete_file, file = delete[1].file, data[1].file
        if delete_file.content == POSITION_DELETES:
            return False
        return any(
            self._is_dropped_by_column(
                key, delete_file.metrics.get(key, ColumnMetrics()), file.metrics.get(key, ColumnMetrics())
            )
            for key in delete_file.equality_ids
            if self.kinds[1][key] not in (*FLOATS, "uuid", *UNITS_PER_DAY) and key != NESTED
        )

    def _is_dropped_by_column(self, key: int, delete_metrics: ColumnMetrics, data_metrics: ColumnMetrics) -> bool:
        is_required = key in self.required_ids

        def is_null_possible(metrics: ColumnMetrics) -> bool:
            return not is_required and (metrics.nulls is None or metrics.nulls > 0)

        def is_always_null(metrics: ColumnMetrics) -> bool:
            return not is_required and metrics.nulls is not None and metrics.nulls == metrics.values

        if is_null_possible(data_metrics) and is_null_possible(delete_metrics):
            return False
        if (is_always_null(data_metrics) and not is_null_possible(delete_metrics)) or (
            is_always_null(delete_metrics) and not is_null_possible(data_metrics)
        ):
            return True
        if None in (data_metrics.lower, data_metrics.upper, delete_metrics.lower, delete_metrics.upper):
            return False
        kind = self.kinds[1][key]
        return decode_bound(kind, data_metrics.lower) > decode_bound(kind, delete_metrics.upper) or decode_bound(
            kind, delete_metrics.lower
        ) > decode_bound(kind, data_metrics.upper)


def decode_bound(kind: str, data: bytes | None) -> Any:
    """Return a bound in sortable form.

    Its stored type follows from the length of its bytes, not from the column's type.
    """
    assert data is not None
    if kind in ("string", "binary", "boolean"):
        return data
    number = int.from_bytes(data, "big" if kind.startswith("decimal") else "little", signed=True)
    # In blocks, the least long represents an absent bound. So the least bound is the next number.
    return max(number, LONG_MIN + 1)


def check_situation(seed: int) -> int:
    """Check one random situation.

    Return how often a delete file that is in scope of a data file was left out because of statistics.
    """
    situation = Situation(seed)
    view = situation.build_table_view()
    index = situation.build_delete_index(view)
    assert view.file_count == len(situation.data), seed
    assert view.delete_file_count == len(situation.deletes), seed
    positions = read_positions(view)
    rows = list(range(view.file_count)) * 2
    situation.rng.shuffle(rows)
    deletes = index.find_deletes(positions[rows])
    dropped_count = 0
    for row, applying_deletes in zip(rows, deletes, strict=True):
        data = situation.data[row]
        assert list(applying_deletes) == sorted(set(applying_deletes)), seed
        assert applying_deletes == index.find_deletes_for_file(int(positions[row])), seed
        for number, delete in enumerate(situation.deletes):
            context = f"seed {seed}: delete row {number}, data row {row}"
            is_applicable = situation.is_in_scope(delete, data)
            if number in applying_deletes:
                assert is_applicable, f"{context} is out of scope"
                assert not situation.is_dropped_by_java(delete, data), f"{context} is excluded by statistics"
            elif is_applicable:
                dropped_count += 1
                assert not situation.removes(delete, data), f"{context} is missing"
    return dropped_count


def test_views_have_exactly_the_delete_files_that_apply() -> None:
    count = examples(150, 25)
    assert sum(check_situation(seed) for seed in range(count)) > 2 * count


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_thousands_of_views_have_exactly_the_delete_files_that_apply() -> None:
    for seed in range(1000, 6000):
        check_situation(seed)


def test_data_files_are_split_into_several_searches_when_there_are_many_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equality, "_PAIRS_MAX", 16)
    for seed in range(150, 150 + examples(50, 5)):
        check_situation(seed)


def test_plan_names_all_delete_files_that_remove_rows_of_a_random_history(tmp_path: Path) -> None:
    removing_count, count = 0, examples(30, 5)
    for seed in range(count):
        lake = write_random_lake(seed, tmp_path / str(seed))
        location = lake.metadata_location
        metadata = decode_table(Path(location.removeprefix("file://")).read_bytes(), location)
        for snapshot in lake.snapshots.values():
            view = build_view(snapshot.json["manifest-list"])
            index = DeleteIndex(view, metadata.partition_specs, metadata.schemas)
            deletes = index.find_deletes(read_positions(view))
            for file, applying_deletes in zip(snapshot.data_files, deletes, strict=True):
                names = {snapshot.delete_files[number].name for number in applying_deletes}
                allowed_deletes = {delete.name: delete for delete in lake.find_applicable_deletes(snapshot, file)}
                assert names <= allowed_deletes.keys(), f"seed {seed}, snapshot {snapshot.id}, {file.path}"
                needed_deletes = {
                    name for name, delete in allowed_deletes.items() if lake.find_removed_positions(delete, file)
                }
                assert needed_deletes <= names, f"seed {seed}, snapshot {snapshot.id}, {file.path}"
                removing_count += len(needed_deletes)
    assert removing_count > 3 * count


def build_view(manifest_list: str) -> TableView:
    def read(location: str) -> bytes:
        return Path(location.removeprefix("file://")).read_bytes()

    manifests = decode_manifest_list(read(manifest_list), manifest_list)
    data, deletes = ([manifest for manifest in manifests if manifest.content == content] for content in (0, 1))
    blocks = {
        manifest.manifest_path: encode_as_block(manifest.manifest_path, read(manifest.manifest_path))
        for manifest in manifests
    }
    return TableView(
        data,
        [blocks[manifest.manifest_path] for manifest in data],
        deletes,
        [blocks[delete.manifest_path] for delete in deletes],
    )
