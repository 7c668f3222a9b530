"""The result of a change: its snapshot, and the metadata file that contains it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from seamark.formats.iceberg.metadata.metadata import TableMetadata


class CommittedChange(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """A committed change. The optional fields are None if the snapshot of the change has expired."""

    snapshot_id: int | None
    parent_snapshot_id: int | None
    sequence_number: int | None
    operation: str | None
    table_uuid: str
    duplicate: Annotated[
        bool,
        msgspec.Meta(
            description="Whether the producer had already committed this change. If its snapshot has expired, the "
            "fields of the snapshot are null."
        ),
    ]
    summary: dict[str, str]


class CommitResult(msgspec.Struct, frozen=True):
    committed: CommittedChange
    metadata_location: str
    """The location of the metadata file that contains the snapshot, or of a later metadata file."""


def make_committed_change(snapshot_id: int | None, metadata: TableMetadata, uuid: str) -> CommittedChange:
    snapshot = None if snapshot_id is None else metadata.snapshot(snapshot_id)
    summary = {} if snapshot is None else snapshot.build_summary_map()
    return CommittedChange(
        snapshot_id=snapshot_id,
        parent_snapshot_id=None if snapshot is None else snapshot.parent_snapshot_id,
        sequence_number=None if snapshot is None else snapshot.sequence_number,
        operation=summary.pop("operation", None),
        table_uuid=uuid,
        duplicate=False,
        summary=summary,
    )
