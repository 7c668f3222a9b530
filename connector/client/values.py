"""What the client's calls take and return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class At:
    """Which snapshot: by at most one of these; the current one by none."""

    snapshot_id: int | None = None
    ref: str | None = None
    as_of_ms: int | None = None

    def given(self) -> dict[str, Any]:
        named = {"snapshot-id": self.snapshot_id, "ref": self.ref, "as-of": self.as_of_ms}
        return {name: value for name, value in named.items() if value is not None}


CURRENT = At()


@dataclass(frozen=True, slots=True)
class Instant:
    """One thing that happened, see docs/reference/timeline.md. Pass `position` as `since` to read on from here."""

    id: str
    position: str
    action: str
    state: str
    kind: str
    namespace: tuple[str, ...]
    name: str
    uuid: str
    requested_ms: int
    completed_ms: int | None
    who: str
    snapshot_id: int | None
    metadata_location: str | None
    summary: dict[str, Any]


@dataclass(frozen=True, slots=True)
class LoadedTable:
    """A table as engines load it. `metadata` is its JSON, with the snapshots that a branch or tag names, or all."""

    metadata: bytes
    location: str
    storage: dict[str, str] = field(repr=False)
    """How its files are reached: `s3.endpoint`, `s3.access-key-id`, …, as far as the server tells."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A step of a plan: files and bytes that came in and that are left."""

    name: str
    files_in: int
    files_removed: int
    files_left: int
    bytes_in: int
    bytes_removed: int
    bytes_left: int
    microseconds: int
    complete: bool
    """False where time was up: what was not checked is kept."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """How a scan is planned. `filter` and residuals are Iceberg expressions in JSON."""

    snapshot_id: int | None
    stages: tuple[Stage, ...]
    indexes: tuple[dict[str, Any], ...]
    """Each index that was asked: its name, kind, files-in and files-removed."""
    complete: bool
    """False where time was up, or an index was not there in time: another plan may leave fewer files."""
    files: int
    bytes: int
    records: int
    delete_files: int
    filter: Any
    not_used: tuple[str, ...]
    """Parts of the SQL that no expression can say."""
    columns: tuple[dict[str, Any], ...]
    residuals: tuple[dict[str, Any], ...]
    residuals_complete: bool
    kept: tuple[dict[str, Any], ...] | None
    """The first of the files that are left; None where they were not asked for."""
    joins: tuple[dict[str, Any], ...]
    """As of `PlanTable`."""
    json: dict[str, Any]
    """The answer as it came."""


@dataclass(frozen=True, slots=True)
class PlanTable:
    """What a plan keeps of a table, as a table of its own."""

    name: str | None
    """In the namespace of the table; None where none was made, and the table is to be read by its own name."""
    snapshot_id: int | None
    expires_at_ms: int | None
    """When the name is good no longer, by the server's clock."""
    files: int
    bytes: int
    considered_files: int
    """Of the snapshot."""
    considered_bytes: int | None
    """None where the server did not have to read all manifests."""
    joins: tuple[dict[str, Any], ...] = ()
    """What became of each join that was asked for, nested ones behind their parent: table, snapshot-id, keys, used, and
    the reason where it was left out."""


def instant_of(json: Mapping[str, Any]) -> Instant:
    return Instant(
        id=json["id"],
        position=json["position"],
        action=json["action"],
        state=json["state"],
        kind=json["kind"],
        namespace=tuple(json["namespace"]),
        name=json["name"],
        uuid=json["uuid"],
        requested_ms=json["requested-ms"],
        completed_ms=json.get("completed-ms"),
        who=json["who"],
        snapshot_id=json.get("snapshot-id"),
        metadata_location=json.get("metadata-location"),
        summary=json.get("summary", {}),
    )


def explanation_of(json: dict[str, Any]) -> Explanation:
    stages = tuple(
        Stage(**{name.replace("-", "_"): value for name, value in stage.items()}) for stage in json["stages"]
    )
    return Explanation(
        snapshot_id=json["snapshot-id"],
        stages=stages,
        indexes=tuple(json["indexes"]),
        complete=json["complete"],
        files=json["files"],
        bytes=json["bytes"],
        records=json["records"],
        delete_files=json["delete-files"],
        filter=json["filter"],
        not_used=tuple(json["not-used"]),
        columns=tuple(json["columns"]),
        residuals=tuple(json["residuals"]),
        residuals_complete=json["residuals-complete"],
        kept=None if "kept" not in json else tuple(json["kept"]),
        joins=tuple(json.get("joins", ())),
        json=json,
    )
