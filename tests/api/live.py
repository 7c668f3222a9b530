"""Tables of real files with any schema. Their snapshots are committed over HTTP.

Each snapshot has two manifests: one of all live data files and one of all live delete files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from tests.api.client import Api
from tests.planner.lakes.lake import DataFile, DeleteFile
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

STYLE = Style(has_shuffled_fields=False, sparse=False, codec="deflate", old_names=False, summaries=False, seed=0)


@dataclass
class LiveSnapshot:
    """The id of a snapshot, and its live data and delete files with their sequence numbers."""

    id: int
    data: list[DataFile]
    deletes: list[DeleteFile]


@dataclass(kw_only=True)
class LiveTable:
    """A table in the namespace `db`.

    `schema` is the current schema as JSON.
    """

    api: Api
    name: str
    folder: Path
    version: int
    schema: dict[str, Any]
    parts: tuple[PartitionField, ...]
    snapshots: list[LiveSnapshot] = field(default_factory=list)
    file_count: int = 0
    next_row_id: int = 0

    @classmethod
    async def make(
        cls,
        api: Api,
        name: str,
        schema: dict[str, Any],
        parts: Sequence[PartitionField],
        version: int,
        **fields: Any,
    ) -> Self:
        body = {
            "name": name,
            "schema": schema,
            "partition-spec": {"spec-id": 0, "fields": [partition_field.build_json() for partition_field in parts]},
            "properties": {"format-version": str(version)},
        }
        answer = await api("POST", "/v1/namespaces/db/tables", body)
        assert answer.status == 200, answer.raw
        folder = Path(answer.json["metadata"]["location"].removeprefix("file://"))
        for subfolder in ("data", "metadata"):
            (folder / subfolder).mkdir(parents=True, exist_ok=True)
        return cls(api=api, name=name, folder=folder, version=version, schema=schema, parts=tuple(parts), **fields)

    @property
    def data(self) -> list[DataFile]:
        return self.snapshots[-1].data if self.snapshots else []

    def make_path(self, ending: str) -> Path:
        """Return a new path with this ending in the table's data folder."""
        self.file_count += 1
        return self.folder / "data" / f"{self.file_count:05d}{ending}"

    async def commit(
        self, data: Sequence[DataFile] = (), deletes: Sequence[DeleteFile] = (), removed: Iterable[str] = ()
    ) -> LiveSnapshot:
        """Commit a snapshot that replaces `removed` by the new files, and return it."""
        metadata = (await self.api("GET", f"/v1/namespaces/db/tables/{self.name}")).json["metadata"]
        sequence, snapshot_id = metadata["last-sequence-number"] + 1, len(self.snapshots) + 1
        previous_snapshot = self.snapshots[-1] if self.snapshots else LiveSnapshot(0, [], [])
        removed_paths = set(removed)
        added_files = [replace(file, sequence=sequence, snapshot_id=snapshot_id) for file in (*data, *deletes)]
        remaining_files = [
            file for file in (*previous_snapshot.data, *previous_snapshot.deletes) if file.path not in removed_paths
        ]
        live_files = [*remaining_files, *added_files]
        snapshot = LiveSnapshot(
            snapshot_id,
            [file for file in live_files if isinstance(file, DataFile)],
            [file for file in live_files if isinstance(file, DeleteFile)],
        )
        manifests = [
            self._write_manifest(files, content, snapshot_id, sequence)
            for content, files in ((0, snapshot.data), (1, snapshot.deletes))
            if files
        ]
        path = self.folder / "metadata" / f"snap-{snapshot_id}.avro"
        header = {"format-version": str(self.version)}
        first_row_id = self.next_row_id
        listing = [
            (manifest, first_row_id if self.version > 2 and manifest.content == 0 else None) for manifest in manifests
        ]
        path.write_bytes(encode_manifest_list(listing, version=self.version, style=STYLE, header=header))
        row_count = sum(file.record_count for file in snapshot.data)
        self.next_row_id += row_count
        body = {
            "snapshot-id": snapshot_id,
            "sequence-number": sequence,
            "timestamp-ms": metadata["last-updated-ms"] + 1,
            "manifest-list": f"file://{path}",
            "summary": {
                "operation": "append",
                "total-data-files": str(len(snapshot.data)),
                "total-files-size": str(sum(file.size for file in live_files)),
            },
            "schema-id": self.schema["schema-id"],
            **({"parent-snapshot-id": previous_snapshot.id} if previous_snapshot.id else {}),
            **({"first-row-id": first_row_id, "added-rows": row_count} if self.version > 2 else {}),
        }
        ref = {"action": "set-snapshot-ref", "ref-name": "main", "type": "branch", "snapshot-id": snapshot_id}
        await self.update({"action": "add-snapshot", "snapshot": body}, ref)
        self.snapshots.append(snapshot)
        return snapshot

    async def update(self, *updates: dict[str, Any]) -> None:
        body = {"requirements": [], "updates": list(updates)}
        answer = await self.api("POST", f"/v1/namespaces/db/tables/{self.name}", body)
        assert answer.status == 200, answer.raw

    def _write_manifest(self, files: Sequence[Any], content: int, snapshot_id: int, sequence: int) -> Manifest:
        """Write a manifest with these files, and return its row of the manifest list.

        Files with the sequence number `sequence` are listed as added, and files with an earlier number as existing.
        """
        entries = [
            Entry(
                ADDED if file.sequence == sequence else EXISTING, file.snapshot_id, file.sequence, file.sequence, file
            )
            for file in files
        ]
        data = build_manifest_bytes(
            entries,
            version=self.version,
            content=content,
            style=STYLE,
            spec_id=0,
            fields=self.parts,
            kinds={field_json["id"]: field_json["type"] for field_json in self.schema["fields"]},
            schema=self.schema,
        )
        path = self.folder / "metadata" / f"m-{snapshot_id}-{content}.avro"
        path.write_bytes(data)
        counts = dict.fromkeys((ADDED, EXISTING, DELETED), (0, 0))
        for entry in entries:
            file_count, row_count = counts[entry.status]
            counts[entry.status] = (file_count + 1, row_count + entry.file.record_count)
        sequence_min = min(file.sequence for file in files)
        return Manifest(
            f"file://{path}",
            len(data),
            content,
            spec_id=0,
            sequence=sequence,
            min_sequence=sequence_min,
            snapshot_id=snapshot_id,
            entries=entries,
            partitions=None,
            counts=counts,
        )
