"""Creates fresh snapshots: the current snapshot of a table with the fresh files of its stream, as a manifest list.

A fresh snapshot is not a snapshot of the table, because no metadata file contains it. Its manifest list has the
manifests of the current snapshot, and one more manifest for each partition spec of the fresh files. The fresh files are
added files with the next sequence number. So plans treat fresh rows like the rows of any other snapshot, with
statistics, residuals, indexes, deletes and row ids.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from seamark.formats.iceberg.manifests.content_file import ContentFile, decode_content_file
from seamark.formats.iceberg.manifests.manifest import ManifestFile
from seamark.formats.iceberg.manifests.writer import (
    ADDED,
    DATA_MANIFEST,
    DELETE_MANIFEST,
    ManifestEntry,
    assign_first_row_ids,
    write_manifest,
    write_manifest_list,
)
from seamark.formats.iceberg.metadata.metadata import ROW_LINEAGE_MIN_FORMAT_VERSION, TableMetadata
from seamark.formats.iceberg.metadata.properties import parse_count
from seamark.formats.iceberg.metadata.snapshot import MAIN, Snapshot, SnapshotLogEntry, SnapshotRef
from seamark.formats.protocol.wire import FRESH_FOLDER
from seamark.formats.runtime.clock import Clock
from seamark.metaserver.commit.change_requests.change_body import Remove
from seamark.metaserver.commit.snapshots.manifest_filter import ManifestFilter, find_files
from seamark.metaserver.commit.snapshots.manifests import Manifests
from seamark.metaserver.commit.snapshots.snapshot_writer import SnapshotWriter
from seamark.metaserver.streams.row_files import EncodedFile

Seal = Callable[[Snapshot], Mapping[str, str]]
"""A function that returns the entries by which other processes verify a fresh snapshot."""
_ID_END = 1 << 62
"""The ids of fresh snapshots are less than this number."""
_ID_MIN = 1 << 32
"""The minimum id of a fresh snapshot. Trino reads smaller numbers as `integer`, and a version must be a `bigint`."""


class EncodedSnapshot(NamedTuple):
    """A fresh snapshot, and the files that must be stored before a plan refers to it.

    A fresh snapshot adds the rows of the stream that are in no committed snapshot yet.

    Attributes:
        files: The location and the bytes of each file.
    """

    snapshot: Snapshot
    files: tuple[tuple[str, bytes], ...]


def encode_fresh_snapshot(
    metadata: TableMetadata,
    manifest_files: Sequence[ManifestFile],
    files: Sequence[EncodedFile],
    *,
    folder: str,
    clock: Clock,
    seal: Seal,
    deletes: Sequence[bytes] = (),
) -> EncodedSnapshot:
    """Create the fresh snapshot of a table.

    Args:
        metadata: The table's metadata.
        manifest_files: The manifests of its current snapshot, without the delete files that `deletes` replace.
        files: The fresh files.
        folder: The folder in which to store the manifests.
        clock: The clock.
        seal: Returns entries for the header of the manifest list, with which other processes verify the snapshot.
        deletes: The delete files for stored rows that fresh rows replace, each as a ContentFile in JSON.
    """
    current_snapshot = metadata.current_snapshot
    snapshot_id = _ID_MIN | int.from_bytes(clock.draw_bytes(8), "big") & (_ID_END - 1)
    sequence_number = metadata.last_sequence_number + 1
    entries_by_kind: defaultdict[tuple[int, int], list[ManifestEntry]] = defaultdict(list)
    contents: dict[int, list[ContentFile]] = {DATA_MANIFEST: [], DELETE_MANIFEST: []}
    for kind, content_files in ((DATA_MANIFEST, [file.content_file for file in files]), (DELETE_MANIFEST, deletes)):
        for text in content_files:
            content = decode_content_file(msgspec.json.decode(text), metadata)
            contents[kind].append(content)
            entries_by_kind[kind, content.spec_id].append(ManifestEntry(ADDED, snapshot_id, None, None, content))
    path_prefix = f"{folder}/{clock.uuid7()}"
    stored_files: list[tuple[str, bytes]] = []
    manifests = list(manifest_files)
    for (kind, spec_id), entries in sorted(entries_by_kind.items()):
        written_manifest = write_manifest(entries, metadata=metadata, spec_id=spec_id, content=kind)
        path = f"{path_prefix}-{'d' if kind == DELETE_MANIFEST else 'm'}{spec_id}.avro"
        stored_files.append((path, written_manifest.data))
        manifests.append(
            written_manifest.to_manifest_file(path, snapshot_id=snapshot_id, sequence_number=sequence_number)
        )
    first_row_id = added_rows = None
    if metadata.format_version >= ROW_LINEAGE_MIN_FORMAT_VERSION:
        first_row_id = metadata.next_row_id
        manifests, end = assign_first_row_ids(manifests, first_row_id)
        added_rows = end - first_row_id
    location = make_fresh_location(folder, snapshot_id)
    snapshot = Snapshot(
        snapshot_id=snapshot_id,
        timestamp_ms=max(
            clock.now_ms(),
            metadata.last_updated_ms,
            0 if current_snapshot is None else current_snapshot.timestamp_ms,
        ),
        sequence_number=sequence_number,
        parent_snapshot_id=metadata.current_snapshot_id,
        summary=msgspec.Raw(
            msgspec.json.encode(_summarize(current_snapshot, contents[DATA_MANIFEST], has_deletes=bool(deletes)))
        ),
        manifest_list=location,
        schema_id=metadata.current_schema_id,
        first_row_id=first_row_id,
        added_rows=added_rows,
    )
    manifest_list = write_manifest_list(
        manifests,
        format_version=metadata.format_version,
        snapshot_id=snapshot_id,
        parent_snapshot_id=metadata.current_snapshot_id,
        sequence_number=sequence_number,
        extra=seal(snapshot),
    )
    return EncodedSnapshot(snapshot, (*stored_files, (location, manifest_list)))


def make_fresh_location(folder: str, snapshot_id: int) -> str:
    """Return the location of the manifest list of a fresh snapshot.

    A fresh snapshot adds the rows of a stream that no commit has added to the table yet. Only plans refer to it.
    """
    return f"{folder}/{snapshot_id}-snap.avro"


def _summarize(current: Snapshot | None, files: Sequence[ContentFile], *, has_deletes: bool) -> dict[str, str]:
    """Return the summary of a fresh snapshot, with totals from which engines estimate the size of the table.

    If the snapshot has deletes, totals of deletes are left out, because with a total of 0, an engine could skip the
    delete files.
    """
    former_summary = {} if current is None else current.build_summary_map()
    added_counts = {
        "data-files": len(files),
        "records": sum(file.record_count for file in files),
        "files-size": sum(file.file_size_in_bytes for file in files),
    }
    summary = {
        "operation": "overwrite" if has_deletes else "append",
        **{f"added-{name}": str(count) for name, count in added_counts.items()},
    }
    for name in ("delete-files", "position-deletes", "equality-deletes"):
        if f"total-{name}" in former_summary and not has_deletes:
            summary[f"total-{name}"] = former_summary[f"total-{name}"]
    for name, count in added_counts.items():
        # A total of -1 is unknown, so the new total is left out as well.
        total = parse_count(former_summary, f"total-{name}", -1) if current is not None else 0
        if total >= 0:
            summary[f"total-{name}"] = str(total + count)
    return summary


def with_fresh_snapshot(metadata: TableMetadata, snapshot: Snapshot) -> TableMetadata:
    """Return the metadata with the fresh snapshot as the current snapshot, as plans need them.

    A fresh snapshot adds the rows of a stream that no commit has added to the table yet. If the table has no snapshot
    yet, the metadata gets a main branch.
    """
    main_ref = metadata.refs.get(MAIN, SnapshotRef(snapshot.snapshot_id, "branch"))
    return msgspec.structs.replace(
        metadata,
        current_snapshot_id=snapshot.snapshot_id,
        snapshots=(*metadata.snapshots, snapshot),
        refs={**metadata.refs, MAIN: msgspec.structs.replace(main_ref, snapshot_id=snapshot.snapshot_id)},
        last_sequence_number=max(metadata.last_sequence_number, snapshot.sequence_number),
        next_row_id=metadata.next_row_id + (snapshot.added_rows or 0),
    )


def log_current_snapshot(metadata: TableMetadata) -> TableMetadata:
    """Return the metadata with an entry for the current snapshot in the snapshot log.

    DuckDB reads the current snapshot from this log. The time of the last update is at least that of the snapshot.
    """
    current = metadata.current_snapshot
    assert current is not None
    entry = SnapshotLogEntry(current.timestamp_ms, current.snapshot_id)
    return msgspec.structs.replace(
        metadata,
        snapshot_log=(*metadata.snapshot_log, entry),
        last_updated_ms=max(metadata.last_updated_ms, current.timestamp_ms),
    )


def may_be_fresh(snapshot_id: int) -> bool:
    """Return whether the id is in the range of the ids of fresh snapshots.

    A committed snapshot may have such an id by chance.
    """
    return _ID_MIN <= snapshot_id < _ID_END


def is_fresh(snapshot: Snapshot) -> bool:
    """Return whether a snapshot is a fresh snapshot, which no metadata file contains."""
    return snapshot.manifest_list is not None and f"/{FRESH_FOLDER}/" in snapshot.manifest_list


async def run_encoding(
    metadata: TableMetadata,
    manifest_files: Sequence[ManifestFile],
    files: Sequence[EncodedFile],
    folder: str,
    clock: Clock,
    seal: Seal,
    deletes: Sequence[bytes] = (),
) -> EncodedSnapshot:
    """Call `encode_fresh_snapshot`, in a thread if there are many manifests or files."""
    work = partial(
        encode_fresh_snapshot, metadata, manifest_files, files, folder=folder, clock=clock, seal=seal, deletes=deletes
    )
    if len(manifest_files) + len(files) + len(deletes) <= _IN_LOOP_ENTRIES_MAX:
        return work()
    return await asyncio.to_thread(work)


async def drop_replaced_vectors(
    removed_paths: Sequence[tuple[str, int | None]],
    manifest_files: Sequence[ManifestFile],
    metadata: TableMetadata,
    writer: SnapshotWriter,
    manifests: Manifests,
) -> Sequence[ManifestFile]:
    """Return the manifests without the deletion vectors that the fresh snapshot replaces.

    A fresh snapshot adds the rows of a stream that no commit has added to the table yet. A keyed row replaces an
    earlier row in a file of the table, and so the deletion vector of this file. If no vector is replaced, the manifests
    remain unchanged.

    Args:
        removed_paths: The location and the offset of each replaced vector.
        manifest_files: The manifests of the current snapshot.
        metadata: The table's metadata.
        writer: Writes the manifests of the remaining vectors.
        manifests: Reads manifests.
    """
    if not removed_paths:
        return manifest_files
    to_remove = await find_files(
        manifests, manifest_files, {Remove(path, offset) for path, offset in removed_paths}, metadata
    )
    sequence_number = metadata.last_sequence_number + 1
    return (
        await ManifestFilter(writer, manifests).remove(manifest_files, to_remove, metadata, sequence_number)
    ).manifests


_IN_LOOP_ENTRIES_MAX = 50
"""The maximum number of manifest entries that are encoded on the event loop. A thread encodes larger numbers."""
