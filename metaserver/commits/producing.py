"""A change made into a snapshot: manifests, manifest list, summary; and the metadata with that snapshot in it.

What a change adds is written before its turn, in manifests that leave sequence number and first row ids to be
inherited, so that they stay right whichever parent the change gets. What depends on the parent (manifests with removed
files, merged ones, the manifest list) is written in the turn. The metadata change by the standard's own updates alone,
as if an engine had committed the snapshot (Iceberg spec: "Snapshots", "Sequence Numbers", "Row Lineage").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from metaserver.commits.change import Change
from metaserver.commits.merging import Merging
from metaserver.commits.removing import RewrittenManifests
from metaserver.commits.summary import SummaryCounts, counts_of, summary_of
from metaserver.commits.writing import StoredManifest, Writer
from metaserver.errors import BadRequest
from metaserver.iceberg.manifests.writer import assign_first_row_ids
from metaserver.iceberg.metadata.metadata import ROW_LINEAGE_MIN_FORMAT_VERSION, TableMetadata
from metaserver.iceberg.metadata.snapshot import Snapshot
from metaserver.iceberg.metadata.updates import apply_updates
from metaserver.iceberg.types.values import LONG_MAX


class Produced(NamedTuple):
    snapshot: Snapshot
    summary: dict[str, str]
    metadata: TableMetadata
    """With the snapshot at the head of its branch."""
    needed: frozenset[str]
    """Every manifest of the snapshot, and its list."""


async def produce(
    writer: Writer,
    change: Change,
    added: Sequence[StoredManifest],
    counts: SummaryCounts,
    removed: RewrittenManifests,
    metadata: TableMetadata,
    parent: Snapshot | None,
    *,
    merging: Merging,
    now_ms: int,
) -> Produced:
    """The snapshot on `parent`, the head of the change's branch in `metadata`. `removed.manifests` are what is left of
    the parent's manifests.

    BadRequest where the row ids left are too few for what is added; Corrupt naming a manifest that cannot be merged;
    errors of storage: then nothing but files has come into being.
    """
    version = metadata.format_version
    sequence = metadata.last_sequence_number + 1 if version > 1 else 0
    fresh = [one.described(writer.snapshot_id, sequence) for one in added]
    listed = await merging.merge([*fresh, *removed.manifests], metadata, sequence)
    first_row_id = added_rows = None
    if version >= ROW_LINEAGE_MIN_FORMAT_VERSION:
        first_row_id = metadata.next_row_id
        listed, beyond = assign_first_row_ids(listed, first_row_id)
        added_rows = beyond - first_row_id
        if beyond > LONG_MAX:
            raise BadRequest(
                f"The snapshot's manifests need {added_rows:,} row ids (record-count), and the table has given "
                f"{first_row_id:,} of {LONG_MAX:,}"
            )
    location = await writer.manifest_list(tuple(listed), metadata, parent, sequence)
    summary = summary_of(
        change.operation,
        counts,
        counts_of(removed.files),
        None if parent is None else parent.summary_map(),
        change.request.summary,
        change.request.producer,
    )
    snapshot: dict[str, Any] = {
        "snapshot-id": writer.snapshot_id,
        "sequence-number": sequence,
        "timestamp-ms": max(now_ms, metadata.last_updated_ms),
        "manifest-list": location,
        "summary": summary,
        "schema-id": metadata.current_schema_id,
    }
    given = {
        "parent-snapshot-id": None if parent is None else parent.snapshot_id,
        "first-row-id": first_row_id,
        "added-rows": added_rows,
    }
    snapshot |= {name: value for name, value in given.items() if value is not None}
    updates = [{"action": "add-snapshot", "snapshot": snapshot}, _move(change.request.branch, metadata, writer)]
    after = apply_updates(metadata, updates, now_ms=now_ms)
    return Produced(
        snapshot=after.snapshots_by_id[writer.snapshot_id],
        summary=summary,
        metadata=after,
        needed=frozenset({location, *(manifest.manifest_path for manifest in listed)}),
    )


def _move(branch: str, metadata: TableMetadata, writer: Writer) -> Mapping[str, Any]:
    """The branch to the snapshot; how long it keeps snapshots stays as it is."""
    ref = metadata.refs.get(branch)
    kept = {} if ref is None else msgspec.to_builtins(ref)
    kept |= {"action": "set-snapshot-ref", "ref-name": branch, "type": "branch", "snapshot-id": writer.snapshot_id}
    return kept
