"""Creates a snapshot from a change: manifests, manifest list and summary, and the table metadata that contains it.

Manifests of added files are written before the commit lock is taken. Their entries inherit sequence numbers and row
ids, so these manifests are valid for any parent. Files that depend on the parent are written under the lock: rewritten
manifests, merged manifests and the manifest list. The metadata are changed by updates of the REST specification, as if
an engine had committed the snapshot (Iceberg spec: "Snapshots", "Sequence Numbers", "Row Lineage").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from msgspec import structs

from seamark.formats.iceberg.manifests.writer import assign_first_row_ids
from seamark.formats.iceberg.metadata.metadata import ROW_LINEAGE_MIN_FORMAT_VERSION, TableMetadata
from seamark.formats.iceberg.metadata.snapshot import Snapshot, SnapshotInput, SnapshotRef
from seamark.formats.iceberg.metadata.updates import AddSnapshot, SetSnapshotRef, Update, apply_updates
from seamark.formats.iceberg.types.values import LONG_MAX
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.commit.change_requests.change_body import Producer
from seamark.metaserver.commit.snapshots.manifest_filter import RewrittenManifests
from seamark.metaserver.commit.snapshots.manifest_merge import ManifestMerge
from seamark.metaserver.commit.snapshots.manifests import run_by_count
from seamark.metaserver.commit.snapshots.snapshot_writer import SnapshotWriter, StoredManifest
from seamark.metaserver.commit.snapshots.summary import SummaryCounts, build_summary, count_files


class SnapshotTerms(NamedTuple):
    """The properties that a commit sets for its snapshot.

    Attributes:
        summary: Additional entries of the summary.
        operation: The operation, such as `append`.
        branch: The branch to which the snapshot is committed.
        producer: The producer whose sequence number the summary contains, or None.
    """

    operation: str
    branch: str
    summary: Mapping[str, str]
    producer: Producer | None = None


class ProducedSnapshot(NamedTuple):
    snapshot: Snapshot
    summary: dict[str, str]
    metadata: TableMetadata
    """The metadata with the snapshot at the head of its branch."""
    needed_paths: frozenset[str]
    """The manifests of the snapshot and its manifest list."""


async def produce_snapshot(
    writer: SnapshotWriter,
    terms: SnapshotTerms,
    added_manifests: Sequence[StoredManifest],
    counts: SummaryCounts,
    rewritten_manifests: RewrittenManifests,
    metadata: TableMetadata,
    parent: Snapshot | None,
    *,
    merge: ManifestMerge | None,
    now_ms: int,
) -> ProducedSnapshot:
    """Write the files of a snapshot, and return the snapshot and the metadata that contain it.

    If the storage fails, some files may have been written, but nothing refers to them.

    Args:
        writer: Writes the files.
        terms: The operation, branch, summary and producer of the snapshot.
        added_manifests: The manifests of the added files.
        counts: The counts of the added files, for the summary.
        rewritten_manifests: The remaining manifests of the parent, and the removed files.
        metadata: The current metadata of the table.
        parent: The head of the branch in `metadata`, or None for an empty table.
        merge: Merges small manifests, or None to keep them unmerged.
        now_ms: The timestamp of the snapshot.

    Raises:
        BadRequest: The table has too few row ids left.
        Corrupt: A manifest cannot be merged. The message names it.
    """
    version = metadata.format_version
    sequence = metadata.last_sequence_number + 1 if version > 1 else 0
    new_manifests = [manifest.describe(writer.snapshot_id, sequence) for manifest in added_manifests]
    manifest_files = [*new_manifests, *rewritten_manifests.manifests]
    if merge is not None:
        manifest_files = await merge.merge(manifest_files, metadata, sequence)
    first_row_id = added_rows = None
    if version >= ROW_LINEAGE_MIN_FORMAT_VERSION:
        first_row_id = metadata.next_row_id
        manifest_files, end = assign_first_row_ids(manifest_files, first_row_id)
        added_rows = end - first_row_id
        if end > LONG_MAX:
            raise BadRequest(
                f"The snapshot's manifests need {added_rows:,} row ids (record-count), and the table has used "
                f"{first_row_id:,} of {LONG_MAX:,}; commit fewer rows"
            )
    parent_id = None if parent is None else parent.snapshot_id
    location = await writer.write_manifest_list(tuple(manifest_files), metadata, parent_id, sequence)
    removed_counts = await run_by_count(len(rewritten_manifests.files), partial(count_files, rewritten_manifests.files))
    summary = build_summary(
        terms.operation,
        counts,
        removed_counts,
        None if parent is None else parent.build_summary_map(),
        terms.summary,
        terms.producer,
    )
    snapshot = SnapshotInput(
        snapshot_id=writer.snapshot_id,
        timestamp_ms=max(now_ms, metadata.last_updated_ms),
        summary=summary,
        sequence_number=sequence,
        parent_snapshot_id=parent_id,
        manifest_list=location,
        schema_id=metadata.current_schema_id,
        first_row_id=first_row_id,
        added_rows=added_rows,
    )
    updates: list[Update] = [AddSnapshot(snapshot), _set_branch(terms.branch, metadata, writer)]
    new_metadata = apply_updates(metadata, updates, now_ms=now_ms)
    return ProducedSnapshot(
        snapshot=new_metadata.snapshots_by_id[writer.snapshot_id],
        summary=summary,
        metadata=new_metadata,
        needed_paths=frozenset({location, *(manifest.manifest_path for manifest in manifest_files)}),
    )


def _set_branch(branch: str, metadata: TableMetadata, writer: SnapshotWriter) -> SetSnapshotRef:
    """Return the update that moves the branch to the snapshot, and keeps the branch's retention properties.

    A branch that does not exist yet has no retention properties.
    """
    ref = metadata.refs.get(branch, SnapshotRef(writer.snapshot_id, "branch"))
    return SetSnapshotRef.build_for_ref(branch, structs.replace(ref, type="branch", snapshot_id=writer.snapshot_id))
