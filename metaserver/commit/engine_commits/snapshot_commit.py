"""The form of a commit that is rebased: it adds one snapshot to one branch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.requirements import check_requirements
from seamark.formats.iceberg.metadata.snapshot import SnapshotInput
from seamark.formats.iceberg.types.reading import read
from seamark.formats.runtime.errors import SeamarkError
from seamark.metaserver.catalog.values import TableChange


class SnapshotCommit(msgspec.Struct, frozen=True):
    """A request to add one snapshot to one branch."""

    snapshot: SnapshotInput
    fields: Mapping[str, Any]
    """The snapshot as sent."""
    branch: str

    @property
    def is_append(self) -> bool:
        return (self.snapshot.summary or {}).get("operation") == "append"


def requested_snapshot(base: TableMetadata, change: TableChange) -> SnapshotCommit | None:
    """The snapshot, if the change is exactly one, and all requirements but that on its branch hold. None: the commit is
    refused as usual."""
    by_action = {str(update.get("action")): update for update in change.updates}
    if len(change.updates) != 2 or set(by_action) != {"add-snapshot", "set-snapshot-ref"}:
        return None
    fields = by_action["add-snapshot"].get("snapshot")
    try:
        snapshot = read(fields, SnapshotInput, "snapshot")
        ref = read(by_action["set-snapshot-ref"], _SetRef, "reference")
        on_branch: list[dict[str, Any]] = []
        others: list[dict[str, Any]] = []
        for requirement in change.requirements:
            named = requirement.get("type") == "assert-ref-snapshot-id"
            (on_branch if named and requirement.get("ref") == ref.ref_name else others).append(requirement)
        check_requirements(base, others)
    except SeamarkError:
        return None
    if len(on_branch) != 1 or ref.type.lower() != "branch" or ref.snapshot_id != snapshot.snapshot_id:
        return None
    expected = on_branch[0].get("snapshot-id")
    if expected is not None and expected != snapshot.parent_snapshot_id:
        return None
    if not isinstance(fields, dict):
        return None
    return SnapshotCommit(snapshot, fields, ref.ref_name)


class _SetRef(msgspec.Struct, frozen=True, rename="kebab"):
    ref_name: str
    snapshot_id: int
    type: str
