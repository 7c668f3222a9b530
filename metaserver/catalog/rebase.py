"""A stock engine's append, made on a parent that was overtaken, put onto the head that overtook it.

A three-way merge of manifest lists: what the client's snapshot has and its parent had not was added, what the parent
had and it has not was dropped. The branch's head, less what was dropped, plus what was added, is what the engine would
come to by itself if it were refused and tried again. The client's files stay as they are; only the manifest list is
written anew, since sequence numbers and first row ids are the head's successors now (Iceberg spec: "Sequence Number
Inheritance", "First Row ID Inheritance"). The snapshot keeps its id: Java finds it by that, and then deletes what it
wrote and the snapshot does not name.

The rule: whoever asks for it (the table's property) gets a rebase only where nothing is in doubt. In doubt the commit
is refused, as it would have been without.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import structs

from metaserver.catalog.parts import CatalogContext
from metaserver.catalog.values import TableChange
from metaserver.errors import SeamarkError
from metaserver.iceberg.manifests.manifest import ManifestFile, decode_manifest_list
from metaserver.iceberg.manifests.writer import (
    ADDED,
    EXISTING,
    ManifestEntry,
    WrittenManifest,
    assign_first_row_ids,
    read_entries,
    write_manifest,
    write_manifest_list,
)
from metaserver.iceberg.metadata.metadata import ROW_LINEAGE_MIN_FORMAT_VERSION, TableMetadata
from metaserver.iceberg.metadata.requirements import check_requirements
from metaserver.iceberg.metadata.snapshot import Snapshot, SnapshotInput, SnapshotRef
from metaserver.iceberg.types.reading import read

PROPERTY = "seamark.commit.rebase"
"""Of a table. "append": its appends are rebased. Anything else, and nothing: none are."""

_LIST_LIMIT_BYTES = 64 << 20
_MANIFESTS_LIMIT_BYTES = 16 << 20
"""Of manifests that are read to be sure; writers aim at 8 MB for one."""
_NO_NUMBER = -1
_UNASSIGNED = {"sequence_number": _NO_NUMBER, "first_row_id": -(1 << 62)}
"""What an entry inherits that has no number of its own: so it is told from one that has."""
_NUMBER = re.compile(r"[0-9]{1,18}")

_TOTALS = {
    "total-data-files": ("added-data-files", "deleted-data-files"),
    "total-delete-files": ("added-delete-files", "removed-delete-files"),
    "total-records": ("added-records", "deleted-records"),
    "total-files-size": ("added-files-size", "removed-files-size"),
    "total-position-deletes": ("added-position-deletes", "removed-position-deletes"),
    "total-equality-deletes": ("added-equality-deletes", "removed-equality-deletes"),
}
_KEPT = "manifests-kept"


class Append(msgspec.Struct, frozen=True):
    """What a client asks for: one snapshot of its own making, on one branch."""

    snapshot: SnapshotInput
    said: Mapping[str, Any]
    """The snapshot as it was sent."""
    branch: str


class Rebased(msgspec.Struct, frozen=True):
    updates: list[dict[str, Any]]
    """In place of the client's."""
    files: list[tuple[str, bytes]]
    """To be written, each at its location, before anything names them: the manifest list, and manifests."""


class Doubt(Exception):
    """Why an append is not rebased; it never leaves this module."""


def asked_for(base: TableMetadata, change: TableChange) -> Append | None:
    """The append, where the table has them rebased, the change is one and nothing else, and of its requirements all
    but the one on its branch hold. None: it is to be refused as ever."""
    if base.properties.get(PROPERTY, "").lower() != "append":
        return None
    by_action = {str(update.get("action")).lower(): update for update in change.updates}
    if len(change.updates) != 2 or set(by_action) != {"add-snapshot", "set-snapshot-ref"}:
        return None
    said = by_action["add-snapshot"].get("snapshot")
    try:
        snapshot = read(said, SnapshotInput, "snapshot")
        ref = read(by_action["set-snapshot-ref"], _SetRef, "reference")
        mine: list[dict[str, Any]] = []
        others: list[dict[str, Any]] = []
        for requirement in change.requirements:
            named = str(requirement.get("type")).lower() == "assert-ref-snapshot-id"
            (mine if named and requirement.get("ref") == ref.ref_name else others).append(requirement)
        check_requirements(base, others)
    except SeamarkError:
        return None
    if len(mine) != 1 or ref.type.lower() != "branch" or ref.snapshot_id != snapshot.snapshot_id:
        return None
    expected = mine[0].get("snapshot-id")
    if expected is not None and expected != snapshot.parent_snapshot_id:
        return None
    if (snapshot.summary or {}).get("operation") != "append" or not isinstance(said, dict):
        return None
    return Append(snapshot, said, ref.ref_name)


class _SetRef(msgspec.Struct, frozen=True, rename="kebab"):
    ref_name: str
    snapshot_id: int
    type: str


async def rebase(parts: CatalogContext, folder: str, base: TableMetadata, append: Append) -> Rebased | None:
    """`append` on the head of its branch in `base`, with a manifest list to be written in `folder`. None in doubt."""
    try:
        return await _Rebase(parts, base, append).onto_head(folder)
    except (Doubt, SeamarkError):
        # Storage that is away, too: a client that is refused comes again, one that gets another error may give up.
        return None


class _Lists(msgspec.Struct, frozen=True):
    """The manifests by path: of the parent, of the client's snapshot, of the head."""

    parent: dict[str, ManifestFile]
    own: dict[str, ManifestFile]
    head: dict[str, ManifestFile]

    @property
    def added(self) -> list[ManifestFile]:
        return [manifest for path, manifest in self.own.items() if path not in self.parent]

    @property
    def dropped(self) -> list[ManifestFile]:
        """But for those that hold no live file: engines leave them out without merging them."""
        gone = [manifest for path, manifest in self.parent.items() if path not in self.own]
        return [one for one in gone if (one.added_files_count, one.existing_files_count) != (0, 0)]


class _Rebase:
    def __init__(self, parts: CatalogContext, base: TableMetadata, append: Append) -> None:
        """Doubt where the snapshot or the branch's head is not what this knows how to read."""
        snapshot = append.snapshot
        ref = base.refs.get(append.branch)
        head = base.snapshot(ref.snapshot_id) if ref is not None and ref.is_branch else None
        if ref is None or head is None:
            raise Doubt("there is no such branch any more")
        if base.format_version < 2 or not snapshot.sequence_number:
            raise Doubt("the table has, or the client knew of, no sequence numbers")
        if base.snapshot(snapshot.snapshot_id) is not None:
            raise Doubt("the snapshot is there already")
        if snapshot.schema_id is not None and base.schema(snapshot.schema_id) is None:
            raise Doubt("its schema is gone")
        self._parts, self._base, self._append = parts, base, append
        self._ref: SnapshotRef = ref
        self._head: Snapshot = head
        self._sequence_number = base.last_sequence_number + 1

    async def onto_head(self, folder: str) -> Rebased:
        lists = await self._lists()
        self._check_added(lists)
        own, files, merged = await self._own_manifests(lists, folder)
        kept = [manifest for path, manifest in lists.head.items() if path not in merged]
        manifests, next_row_id = [*own, *kept], self._base.next_row_id
        if self._base.format_version >= ROW_LINEAGE_MIN_FORMAT_VERSION:
            manifests, next_row_id = assign_first_row_ids(manifests, next_row_id)
        snapshot_id = self._append.snapshot.snapshot_id
        data = write_manifest_list(
            manifests,
            format_version=self._base.format_version,
            snapshot_id=snapshot_id,
            parent_snapshot_id=self._head.snapshot_id,
            sequence_number=self._sequence_number,
        )
        place = f"{folder}/snap-{snapshot_id}-{self._sequence_number}-{self._parts.clock.uuid4()}.avro"
        updates = self._updates(place, len(kept), next_row_id - self._base.next_row_id)
        return Rebased(updates, [*files, (place, data)])

    async def _lists(self) -> _Lists:
        snapshot = self._append.snapshot
        parent: Snapshot | None = None
        if snapshot.parent_snapshot_id is not None:
            parent = self._base.snapshot(snapshot.parent_snapshot_id)
            if parent is None:
                raise Doubt("its parent has expired")
        own = await self._manifests(snapshot)
        head = await self._manifests(self._head)
        if parent is None:
            return _Lists({}, own, head)
        return _Lists(head if parent is self._head else await self._manifests(parent), own, head)

    async def _manifests(self, snapshot: Snapshot | SnapshotInput) -> dict[str, ManifestFile]:
        place = snapshot.manifest_list
        if place is None or snapshot.key_id is not None:
            raise Doubt("a snapshot has no plain manifest list")
        data = await self._parts.objects.read(place, limit_bytes=_LIST_LIMIT_BYTES)
        manifests = await asyncio.to_thread(decode_manifest_list, data, place)
        by_path = {manifest.manifest_path: manifest for manifest in manifests}
        if len(by_path) != len(manifests):
            raise Doubt("a manifest list names one manifest twice")
        return by_path

    def _check_added(self, lists: _Lists) -> None:
        """That the list describes what it adds as data files of this snapshot, and as many as the summary has."""
        snapshot, specs = self._append.snapshot, {spec.spec_id for spec in self._base.partition_specs}
        for manifest in lists.added:
            sound = (
                manifest.content == 0
                and manifest.added_snapshot_id == snapshot.snapshot_id
                and manifest.sequence_number == snapshot.sequence_number
                and manifest.partition_spec_id in specs
                and manifest.deleted_files_count == 0
                and None not in (manifest.added_files_count, manifest.existing_files_count)
                and manifest.key_metadata is None
                and manifest.manifest_path not in lists.head
            )
            if not sound:
                raise Doubt(f"{manifest.manifest_path} is no manifest of plain additions")
        if any(manifest.content != 0 for manifest in lists.dropped):
            raise Doubt("manifests of deletes were merged")
        said = (snapshot.summary or {}).get("added-data-files", "0")
        if said != str(sum(manifest.added_files_count or 0 for manifest in lists.added)):
            raise Doubt("the summary and the manifest list differ about the number of files")

    async def _own_manifests(
        self, lists: _Lists, folder: str
    ) -> tuple[list[ManifestFile], list[tuple[str, bytes]], set[str]]:
        """The manifests that hold what the client added, those of them that are to be written, and those of the head
        that they replace.

        Where it merged manifests of its parent that another has merged meanwhile, its merge is undone: what it added
        stands in a manifest of ours, the rest in the head as it was. Likewise where their rows have got ids since.
        Doubt where its manifests hold anything but its own additions and, unchanged, what it merged.
        """
        snapshot_id, added, dropped = self._append.snapshot.snapshot_id, lists.added, lists.dropped
        entries = await self._read([structs.replace(each, **_UNASSIGNED) for each in added])
        for entry in (entry for each in entries for entry in each if entry.status == ADDED):
            numbers = (entry.snapshot_id, entry.sequence_number, entry.file_sequence_number)
            if numbers != (snapshot_id, _NO_NUMBER, _NO_NUMBER) or _row_id(entry) is not None:
                raise Doubt("an entry has numbers that its client chose")
        there = all(manifest.manifest_path in lists.head for manifest in dropped)
        merged = await self._read([lists.head[each.manifest_path] for each in dropped] if there else dropped)
        existing = [entry for each in entries for entry in each if entry.status == EXISTING]
        if _identities(existing) != _identities(entry for each in merged for entry in each):
            raise Doubt("what was merged is not what was there")
        stands = there and _row_ids(existing) == _row_ids(entry for each in merged for entry in each)
        own: list[ManifestFile] = []
        files: list[tuple[str, bytes]] = []
        for manifest, held in zip(added, entries, strict=True):
            if stands or not manifest.existing_files_count:
                own.append(self._renumbered(manifest))
            elif manifest.added_files_count:
                place = f"{folder}/{self._parts.clock.uuid4()}-m{len(files)}.avro"
                written = await asyncio.to_thread(self._write, held, manifest.partition_spec_id)
                files.append((place, written.data))
                described = written.described(place, snapshot_id=snapshot_id, sequence_number=self._sequence_number)
                own.append(described)
        return own, files, {manifest.manifest_path for manifest in dropped} if stands else set()

    async def _read(self, manifests: Sequence[ManifestFile]) -> list[list[ManifestEntry]]:
        if sum(manifest.manifest_length for manifest in manifests) > _MANIFESTS_LIMIT_BYTES:
            raise Doubt("it would take long to be sure")
        found = []
        for manifest in manifests:
            data = await self._parts.objects.read(manifest.manifest_path, limit_bytes=_MANIFESTS_LIMIT_BYTES)
            entries = await asyncio.to_thread(read_entries, data, manifest, self._base)
            if len(entries) != (manifest.added_files_count or 0) + (manifest.existing_files_count or 0):
                raise Doubt(f"{manifest.manifest_path} does not hold what its list says")
            found.append(entries)
        return found

    def _write(self, entries: Sequence[ManifestEntry], spec_id: int) -> WrittenManifest:
        plain = {
            "snapshot_id": self._append.snapshot.snapshot_id,
            "sequence_number": None,
            "file_sequence_number": None,
        }
        added = [structs.replace(entry, **plain) for entry in entries if entry.status == ADDED]
        return write_manifest(added, metadata=self._base, spec_id=spec_id, content=0)

    def _renumbered(self, manifest: ManifestFile) -> ManifestFile:
        """The client's manifest with the numbers of its new place; entries without any inherit them."""
        own = manifest.min_sequence_number == manifest.sequence_number
        return structs.replace(
            manifest,
            sequence_number=self._sequence_number,
            min_sequence_number=self._sequence_number if own else manifest.min_sequence_number,
            first_row_id=None,
        )

    def _updates(self, manifest_list: str, kept: int, added_rows: int) -> list[dict[str, Any]]:
        snapshot, ref = self._append.snapshot, self._ref
        # The log is later than the head where the branch was rolled back since.
        logged = [entry.timestamp_ms for entry in self._base.snapshot_log[-1:]]
        rebased = {
            **self._append.said,
            "parent-snapshot-id": self._head.snapshot_id,
            "sequence-number": self._sequence_number,
            "timestamp-ms": max(snapshot.timestamp_ms, self._head.timestamp_ms, *logged),
            "manifest-list": manifest_list,
            "summary": rebased_summary(snapshot.summary or {}, self._head.summary_map(), kept),
        }
        if self._base.format_version >= ROW_LINEAGE_MIN_FORMAT_VERSION:
            rebased |= {"first-row-id": self._base.next_row_id, "added-rows": added_rows}
        # How long the branch keeps its snapshots is as it stands: the client said what it had read.
        moved = msgspec.to_builtins(structs.replace(ref, snapshot_id=snapshot.snapshot_id))
        return [
            {"action": "add-snapshot", "snapshot": rebased},
            {"action": "set-snapshot-ref", "ref-name": self._append.branch, **moved},
        ]


def _row_id(entry: ManifestEntry) -> int | None:
    """The entry's own; None where it is yet to be assigned."""
    own = entry.file.first_row_id
    return None if own is None or own < 0 else own


def _row_ids(entries: Iterable[ManifestEntry]) -> dict[str, int | None]:
    return {entry.file.file_path: _row_id(entry) for entry in entries}


def _identities(entries: Iterable[ManifestEntry]) -> Counter[tuple[Any, ...]]:
    """How often each file is there, by all that a merge must not change, but for its row ids."""
    return Counter(
        (
            entry.file.file_path,
            entry.file.record_count,
            entry.file.file_size_in_bytes,
            entry.snapshot_id,
            entry.sequence_number,
            entry.file_sequence_number,
        )
        for entry in entries
    )


def rebased_summary(said: Mapping[str, str], head: Mapping[str, str], manifests_kept: int) -> dict[str, str]:
    """The client's summary with the totals that follow from the head's; a total that the head does not tell goes."""
    summary = dict(said)
    for total, (added, removed) in _TOTALS.items():
        summary.pop(total, None)
        terms = [head.get(total), said.get(added, "0"), said.get(removed, "0")]
        if all(term is not None and _NUMBER.fullmatch(term) for term in terms):
            before, more, fewer = (int(str(term)) for term in terms)
            summary[total] = str(before + more - fewer)
    if _KEPT in summary:
        summary[_KEPT] = str(manifests_kept)
    return summary
