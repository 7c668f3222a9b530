"""Random histories of tables: schemas, specs, rows and commits from one seed, written as real writers write them.

The module uses no code of the project: it builds metadata.json by hand and manifests with `manifests.py`. Data files
do not exist on disk, because planning reads only metadata.
"""

from __future__ import annotations

import json
import random
import uuid
from pathlib import Path
from typing import Any

from tests.planner.lakes import partitioning
from tests.planner.lakes.files import FileMaker
from tests.planner.lakes.kinds import compute_sort_key, draw_pool, get_limits, strip_parameters, to_bytes
from tests.planner.lakes.lake import DATA, ContentFile, DataFile, DeleteFile, Lake, LakeSnapshot
from tests.planner.lakes.manifests import (
    ADDED,
    DELETED,
    EXISTING,
    Entry,
    Manifest,
    PartitionField,
    Style,
    build_manifest_bytes,
    encode_manifest_list,
)
from tests.planner.lakes.schemas import SchemaMaker

NOW_MS = 1_760_000_000_000
MAIN_BRANCH = "main"


def write_random_lake(seed: int, folder: Path) -> Lake:
    """Write the table of a seed below `folder`, and return it. The same seed always gives the same table."""
    return _History(seed, folder).build_lake()


class _History:
    def __init__(self, seed: int, folder: Path) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.folder = folder
        self.location = folder.as_uri()
        (folder / "metadata").mkdir(parents=True)
        self.version = rng.choice([1, 2, 2, 2, 3, 3])
        self.final_version = min(3, self.version + (rng.random() < 0.3))
        self.maker = SchemaMaker(rng)
        self.schema = self.maker.draw_first_schema(self.version)
        self.schemas = {0: self.schema}
        self.pools: dict[int, list[Any]] = {}
        self._fill_pools()
        self.specs: dict[int, tuple[PartitionField, ...]] = {}
        self.last_partition_id = 999
        self.default_spec = 0
        self._add_spec()
        self.style = Style.draw_style(rng)
        self.sequence = 0
        self.next_row_id = 0
        self.snapshots: dict[int, LakeSnapshot] = {}
        self.heads: dict[str, LakeSnapshot] = {}
        self.log: list[dict[str, int]] = []
        self.refs: dict[str, tuple[str, int]] = {}
        self.files = FileMaker(rng, self.location, self.pools)

    def build_lake(self) -> Lake:
        rng = self.rng
        self._append(MAIN_BRANCH)
        for _ in range(rng.randint(1, 7)):
            self._evolve()
            branch = rng.choice(list(self.heads))
            if rng.random() < 0.15:
                branch = rng.choice(["dev", "b/2"])
                self.heads.setdefault(branch, rng.choice(list(self.snapshots.values())))
            commits = [self._append, self._overwrite, self._rewrite_manifests, self._compact]
            if self.version >= 2:
                commits += [self._commit_row_delta] * 4
            rng.choice(commits)(branch)
        self.version = self.final_version
        for branch, head in self.heads.items():
            self.refs[branch] = ("branch", head.id)
        for number in range(rng.randint(0, 2)):
            self.refs[f"tag-{number}"] = ("tag", rng.choice(list(self.snapshots)))
        metadata = self._build_metadata()
        path = self.folder / "metadata" / "00001-0.metadata.json"
        path.write_text(json.dumps(metadata), encoding="utf-8")
        return Lake(
            seed=self.seed,
            folder=self.folder,
            version=self.version,
            metadata_location=path.as_uri(),
            metadata=metadata,
            schemas=self.schemas,
            schema=self.schema,
            specs=self.specs,
            snapshots=self.snapshots,
            current_snapshot=self.heads[MAIN_BRANCH],
            refs=self.refs,
            pools=self.pools,
        )

    # Schema and spec evolution

    def _evolve(self) -> None:
        rng = self.rng
        if self.version < self.final_version and rng.random() < 0.5:
            self.version = self.final_version
        if rng.random() < 0.35:
            partition_source_ids = {part.source for fields in self.specs.values() for part in fields}
            new_schema = self.maker.evolve(self.schema, len(self.schemas), self.version, partition_source_ids)
            if new_schema.fields != self.schema.fields:
                self.schema = self.schemas[new_schema.id] = new_schema
                self._fill_pools()
        if rng.random() < 0.3:
            self._add_spec()

    def _fill_pools(self) -> None:
        for column in self.schema.leaves().values():
            size = self.rng.randint(3, 22)
            if column.id not in self.pools:
                self.pools[column.id] = draw_pool(self.rng, column.kind, size)
                continue
            # A wider type has more possible values. Only values for which existing transforms have a result are drawn.
            new_values = draw_pool(self.rng, column.kind, 4)
            # Near the least integer, a truncation overflows. The widths of truncations are less than 1,000.
            if strip_parameters(column.kind) in ("int", "long"):
                new_values = [value for value in new_values if int(value) > get_limits(column.kind)[0] + 1000]
            elif column.kind in partitioning.TIME_KINDS:
                new_values = [value for value in new_values if partitioning.has_hour(column.kind, int(value))]
            reprs = {repr(value) for value in self.pools[column.id]}
            self.pools[column.id] += [value for value in new_values if repr(value) not in reprs]

    def _add_spec(self) -> None:
        """Choose a partition spec with up to three new fields, and make it the default.

        If a spec with the same fields exists, it is used again. In version 1, a spec keeps the fields of the previous
        default spec, and a removed field gets the void transform.
        """
        rng = self.rng
        fields: list[PartitionField] = []
        if self.version == 1 and self.specs:
            for part in self.specs[self.default_spec]:
                is_deleted = rng.random() < 0.4
                fields.append(PartitionField(part.id, part.name, part.source, "void") if is_deleted else part)
        fields_by_source = {
            (part.source, part.transform): part for old_spec in self.specs.values() for part in old_spec
        }
        leaves = list(self.schema.leaves().values())
        for column in rng.sample(leaves, min(len(leaves), rng.choice([0, 1, 1, 1, 2, 3]))):
            transform = partitioning.draw_transform(
                rng, column.kind, self.pools[column.id], void=self.version > 1 and bool(self.specs)
            )
            if any(part.source == column.id for part in fields):
                continue
            if self.version > 1 and (column.id, transform) in fields_by_source:
                fields.append(fields_by_source[column.id, transform])
                continue
            self.last_partition_id += 1
            name = f"{column.name}_{strip_parameters(transform)}_{self.last_partition_id}"
            fields.append(PartitionField(self.last_partition_id, name, column.id, transform))
        new_spec = tuple(fields)
        for spec_id, old_spec in self.specs.items():
            if old_spec == new_spec:
                self.default_spec = spec_id
                return
        self.default_spec = len(self.specs)
        self.specs[self.default_spec] = new_spec

    def _find_kinds(self) -> dict[int, str]:
        """Return the current types of all columns without child columns, by id."""
        return {column.id: column.kind for column in self.schema.leaves().values()}

    # Commits

    def _append(self, branch: str) -> None:
        added_files = self._draw_data_files(self.rng.randint(2, 7))
        self._commit(branch, "append", [], self._group(added_files))

    def _draw_data_files(self, count: int) -> list[DataFile]:
        files = []
        for _ in range(count):
            spec_id = self.default_spec if self.rng.random() < 0.9 else self.rng.choice(list(self.specs))
            files.append(self.files.make_data_file(self.schema, spec_id, self.specs[spec_id], self._find_kinds()))
        return files

    def _group(self, files: list[Any]) -> list[list[Entry]]:
        """Make ADDED entries, and return a list of entries for each manifest.

        A manifest has files of one content and one spec. Such files are distributed at random over up to two manifests.
        """
        groups: dict[tuple[int, ...], list[Entry]] = {}
        for file in files:
            part = self.rng.randint(0, 1) if len(files) > 2 else 0
            groups.setdefault((int(file.content != DATA), file.spec_id, part), []).append(self._make_added_entry(file))
        return list(groups.values())

    @staticmethod
    def _make_added_entry(file: ContentFile, sequence: int | None = None) -> Entry:
        return Entry(ADDED, None, sequence, None, file)

    def _overwrite(self, branch: str) -> None:
        """Remove some files, and in some cases add others.

        The manifests of removed files are rewritten with EXISTING and DELETED entries.
        """
        rng = self.rng
        share = rng.choice([0.2, 0.5, 1.0])
        files = self.heads[branch].data_files + self.heads[branch].delete_files
        ids = {id(file) for file in files if rng.random() < share * (1.0 if isinstance(file, DataFile) else 0.3)}
        added_files = self._draw_data_files(rng.randint(0, 3))
        self._replace(branch, "overwrite" if added_files else "delete", ids, self._group(added_files))

    def _compact(self, branch: str) -> None:
        """Replace the files of one partition by one file. A branch without data files gets an append.

        From version 2 on, the new file has the latest sequence number of the replaced files, which is older than the
        commit.
        """
        files = self.heads[branch].data_files
        if not files:
            return self._append(branch)
        rng = self.rng
        chosen_file = rng.choice(files)
        group = [file for file in files if file.partition_key == chosen_file.partition_key]
        data = self.files.make_data_file(
            self.schema, chosen_file.spec_id, self.specs[chosen_file.spec_id], self._find_kinds(), like=chosen_file
        )
        latest_sequence = max(file.sequence for file in group) if self.version > 1 else None
        return self._replace(
            branch, "replace", {id(file) for file in group}, [[self._make_added_entry(data, latest_sequence)]]
        )

    def _replace(self, branch: str, operation: str, removed_ids: set[int], added_entries: list[list[Entry]]) -> None:
        kept_manifests, rewritten = [], []
        for manifest in self.heads[branch].manifests:
            live_entries = [entry for entry in manifest.entries if entry.status != DELETED]
            if any(id(entry.file) in removed_ids for entry in live_entries):
                rewritten.append(
                    [self._carry_entry(entry.file, is_deleted=id(entry.file) in removed_ids) for entry in live_entries]
                )
            elif live_entries or self.rng.random() < 0.5:  # A manifest without live files may be kept or omitted.
                kept_manifests.append(manifest)
        self._commit(branch, operation, kept_manifests, rewritten + added_entries)

    @staticmethod
    def _carry_entry(file: ContentFile, is_deleted: bool) -> Entry:
        snapshot_id = None if is_deleted else file.snapshot_id
        return Entry(DELETED if is_deleted else EXISTING, snapshot_id, file.sequence, file.file_sequence, file)

    def _rewrite_manifests(self, branch: str) -> None:
        """Merge the manifests of one spec and one content into a manifest that has only EXISTING entries.

        If the manifests have no live files, no manifest replaces them. A branch without manifests gets an append.
        """
        groups: dict[tuple[int, int], list[Manifest]] = {}
        for manifest in self.heads[branch].manifests:
            groups.setdefault((manifest.content, manifest.spec_id), []).append(manifest)
        if not groups:
            return self._append(branch)
        merged_manifests = self.rng.choice(list(groups.values()))
        files = [entry.file for manifest in merged_manifests for entry in manifest.entries if entry.status != DELETED]
        manifests = [manifest for manifest in self.heads[branch].manifests if manifest not in merged_manifests]
        entries = [self._carry_entry(file, is_deleted=False) for file in files]
        return self._commit(branch, "replace", manifests, [entries] if entries else [])

    def _commit_row_delta(self, branch: str) -> None:
        """Add delete files, and in some cases the new rows of an update.

        A deletion vector replaces the previous vector of its data file.
        """
        rng = self.rng
        head = self.heads[branch]
        live_files = head.data_files
        data = self._draw_data_files(rng.choice([0, 0, 1, 2]))
        delete_files: list[DeleteFile] = []
        removed_ids: set[int] = set()
        for _ in range(rng.randint(1, 3)):
            has_equality_deletes = rng.random() < 0.5 or not live_files
            if has_equality_deletes:
                delete_files += self.files.make_equality_deletes(
                    self.schema, self.specs, live_files, self._find_kinds()
                )
            elif self.version >= 3:
                paths_with_new_vectors = {vector.referenced_path for vector in delete_files}
                targets = [file for file in live_files + data if file.path not in paths_with_new_vectors]
                old_vectors = [delete for delete in head.delete_files if delete.content == 1]
                new_vectors, replaced_vectors = self.files.build_vectors(targets, old_vectors)
                delete_files += new_vectors
                removed_ids |= {id(delete) for delete in replaced_vectors}
            else:
                delete_files += self.files.make_position_deletes(live_files + data)
        self._replace(branch, "overwrite", removed_ids, self._group([*data, *delete_files]))

    def _commit(self, branch: str, operation: str, kept_manifests: list[Manifest], groups: list[list[Entry]]) -> None:
        rng = self.rng
        parent = self.heads.get(branch)
        if self.version > 1:
            self.sequence += 1
        sequence = self.sequence
        snapshot_id = rng.getrandbits(62) + 1
        written_manifests = [self._write_manifest(entries, snapshot_id, sequence) for entries in groups]
        manifests = written_manifests + kept_manifests if rng.random() < 0.7 else kept_manifests + written_manifests
        first_row_id = self.next_row_id
        listed_manifests: list[tuple[Manifest, int | None]] = []
        for manifest in manifests:
            manifest_row_id = None
            if self.version >= 3 and manifest.content == 0:
                if manifest.first_row_id is None:
                    manifest.first_row_id = self.next_row_id
                    self.next_row_id += manifest.counts[ADDED][1] + manifest.counts[EXISTING][1]
                manifest_row_id = manifest.first_row_id
            listed_manifests.append((manifest, manifest_row_id))
        path = self.folder / "metadata" / f"snap-{snapshot_id}.avro"
        header = {"snapshot-id": str(snapshot_id), "format-version": str(self.version)}
        header["parent-snapshot-id"] = str(parent.id) if parent else "null"
        if self.version > 1:
            header["sequence-number"] = str(sequence)
        path.write_bytes(encode_manifest_list(listed_manifests, version=self.version, style=self.style, header=header))
        snapshot_json: dict[str, Any] = {
            "snapshot-id": snapshot_id,
            "timestamp-ms": NOW_MS + 1000 * len(self.snapshots),
            "manifest-list": path.as_uri(),
            "summary": {"operation": operation},
            "schema-id": self.schema.id,
        }
        if parent:
            snapshot_json["parent-snapshot-id"] = parent.id
        if self.version > 1:
            snapshot_json["sequence-number"] = sequence
        if self.version >= 3:
            snapshot_json |= {"first-row-id": first_row_id, "added-rows": self.next_row_id - first_row_id}
        snapshot = LakeSnapshot(
            snapshot_id, parent.id if parent else None, sequence, self.schema.id, tuple(manifests), snapshot_json
        )
        self.snapshots[snapshot_id] = self.heads[branch] = snapshot
        if branch == MAIN_BRANCH:
            self.log.append({"timestamp-ms": snapshot_json["timestamp-ms"], "snapshot-id": snapshot_id})

    def _write_manifest(self, entries: list[Entry], snapshot_id: int, sequence: int) -> Manifest:
        rng = self.rng
        content = int(entries[0].file.content != DATA)
        spec_id = entries[0].file.spec_id
        written_rows = []
        for entry in entries:
            file = entry.file
            explicit_snapshot_id = entry.snapshot_id
            if entry.status == ADDED:
                file.snapshot_id, file.file_sequence = snapshot_id, sequence
                file.sequence = sequence if entry.sequence is None else entry.sequence
            # Entries of version 1, and of removed files, must state the id of the snapshot. Others may inherit it.
            if explicit_snapshot_id is None and (self.version == 1 or entry.status == DELETED or rng.random() < 0.3):
                explicit_snapshot_id = snapshot_id
            written_rows.append(Entry(entry.status, explicit_snapshot_id, entry.sequence, entry.file_sequence, file))
        fields, kinds = self.specs[spec_id], self._find_kinds()
        style = self.style if rng.random() < 0.8 else Style.draw_style(rng)
        data = build_manifest_bytes(
            written_rows,
            version=self.version,
            content=content,
            style=style,
            spec_id=spec_id,
            fields=fields,
            kinds=kinds,
            schema=self.schema.build_json(),
        )
        path = self.folder / "metadata" / f"{snapshot_id}-m{rng.getrandbits(40)}.avro"
        path.write_bytes(data)
        files = [entry.file for entry in written_rows]
        live_sequences = [entry.file.sequence for entry in written_rows if entry.status != DELETED]
        counts = {}  # (files, rows) by status
        for status in (ADDED, EXISTING, DELETED):
            counts_of_status = [entry.file.record_count for entry in written_rows if entry.status == status]
            counts[status] = (len(counts_of_status), sum(counts_of_status))
        summaries = [_compute_summary(rng, part, index, files, kinds) for index, part in enumerate(fields)]
        return Manifest(
            path=path.as_uri(),
            length=len(data),
            content=content,
            spec_id=spec_id,
            sequence=sequence,
            min_sequence=min(live_sequences, default=sequence),
            snapshot_id=snapshot_id,
            entries=written_rows,
            partitions=summaries if style.summaries else None,
            counts=counts,
        )

    def _build_metadata(self) -> dict[str, Any]:
        specs = [
            {"spec-id": key, "fields": [part.build_json() for part in fields]} for key, fields in self.specs.items()
        ]
        metadata_json: dict[str, Any] = {
            "format-version": self.version,
            "table-uuid": str(uuid.UUID(int=self.seed)),
            "location": self.location,
            "last-updated-ms": NOW_MS + 1000 * len(self.snapshots),
            "last-column-id": self.maker.last_id,
            "current-schema-id": self.schema.id,
            "schemas": [schema.build_json() for schema in self.schemas.values()],
            "default-spec-id": self.default_spec,
            "partition-specs": specs,
            "last-partition-id": self.last_partition_id,
            "default-sort-order-id": 0,
            "sort-orders": [{"order-id": 0, "fields": []}],
            "properties": {},
            "current-snapshot-id": self.heads[MAIN_BRANCH].id,
            "refs": {
                name: {"snapshot-id": snapshot_id, "type": kind} for name, (kind, snapshot_id) in self.refs.items()
            },
            "snapshots": [snapshot.json for snapshot in self.snapshots.values()],
            "snapshot-log": self.log,
            "metadata-log": [],
        }
        if self.version == 1:
            metadata_json |= {"schema": self.schema.build_json(), "partition-spec": specs[self.default_spec]["fields"]}
        else:
            metadata_json["last-sequence-number"] = self.sequence
        if self.version >= 3:
            metadata_json["next-row-id"] = self.next_row_id
        return metadata_json


def _compute_summary(
    rng: random.Random, part: PartitionField, position: int, files: list[ContentFile], kinds: dict[int, str]
) -> dict[str, Any]:
    """Return the summary of a partition field over all entries of a manifest."""
    kind = partitioning.infer_result_kind(part.transform, kinds[part.source])
    values = [file.partition[position] for file in files]
    nans = [value for value in values if value != value]
    comparable_values = [value for value in values if value is not None and value == value]
    sorted_comparable_values = sorted(comparable_values, key=lambda value: compute_sort_key(kind, value))
    return {
        "contains_null": None in values,
        "contains_nan": bool(nans) if rng.random() < 0.9 else None,
        "lower_bound": to_bytes(kind, sorted_comparable_values[0]) if sorted_comparable_values else None,
        "upper_bound": to_bytes(kind, sorted_comparable_values[-1]) if sorted_comparable_values else None,
    }
