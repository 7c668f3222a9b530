"""Arguments and results of the client's methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def omit_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are not None: the arguments that the caller of a request gave."""
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class At:
    """A snapshot, by at most one of these fields; without any, the current snapshot."""

    snapshot_id: int | None = None
    ref: str | None = None
    as_of_ms: int | None = None

    def to_query(self) -> dict[str, Any]:
        return omit_none({"snapshot-id": self.snapshot_id, "ref": self.ref, "as-of": self.as_of_ms})


CURRENT = At()


class TimelineInstant(msgspec.Struct, frozen=True, rename="kebab"):
    """An instant of the timeline (docs/reference/timeline.md).

    Pass `position` as `since` to continue after it.
    """

    id: str
    position: str
    action: str
    state: str
    kind: str
    namespace: tuple[str, ...]
    name: str
    uuid: str
    requested_ms: int
    who: str
    completed_ms: int | None = None
    snapshot_id: int | None = None
    metadata_location: str | None = None
    summary: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class EngineTable:
    """A table as engines load it.

    `metadata` is its JSON, with the snapshots that a branch or tag names, or all.
    """

    metadata: bytes
    location: str
    storage: dict[str, str] = field(repr=False)
    """Settings for access to its files, from the server: `s3.endpoint`, `s3.access-key-id`, …"""


class Stage(msgspec.Struct, frozen=True, rename="kebab"):
    """A stage of a plan: files and bytes before and after it."""

    name: str
    files_in: int
    files_removed: int
    files_left: int
    bytes_in: int
    bytes_removed: int
    bytes_left: int
    microseconds: int
    complete: bool
    """False if the time limit ended the stage; files that were not checked are kept."""


class Explanation(msgspec.Struct, frozen=True, rename="kebab"):
    """How a scan is planned.

    `filter` and residuals are Iceberg expressions in JSON.
    """

    snapshot_id: int | None
    stages: tuple[Stage, ...]
    indexes: tuple[dict[str, Any], ...]
    """Each index that was probed: its name, kind, files-in and files-removed."""
    complete: bool
    """False if the time limit ended a stage, or an index was not loaded in time. A later plan may keep fewer files."""
    files: int
    bytes: int
    records: int
    delete_files: int
    filter: Any
    not_used: tuple[str, ...]
    """Parts of the SQL that an Iceberg expression cannot represent."""
    not_used_reasons: tuple[str, ...]
    terms: tuple[dict[str, Any], ...]
    """The parts of the filter that all rows must satisfy, and what bounds do for each alone."""
    layouts: tuple[dict[str, Any], ...]
    """Layouts that would keep clearly fewer files: columns, files-in and about how many files."""
    unknown_layouts: tuple[dict[str, Any], ...]
    """Columns for which nothing can be estimated: column and reason."""
    columns: tuple[dict[str, Any], ...]
    residuals: tuple[dict[str, Any], ...]
    residuals_complete: bool
    json: dict[str, Any]
    """The JSON of the answer."""
    kept: tuple[dict[str, Any], ...] | None = None
    """The first files that the plan keeps; None if they were not requested."""
    joins: tuple[dict[str, Any], ...] = ()
    """The same as in `PlanTable`."""
    unpruned_reasons: tuple[str, ...] = ()
    """Why all files are read; empty if files are left out."""


class PlanTable(msgspec.Struct, frozen=True, rename="kebab"):
    """A plan table: the files that a plan keeps, as a table."""

    name: str | None
    """In the namespace of the table; None if no plan table was created."""
    snapshot_id: int | None
    expires_at_ms: int | None
    """The end of the lease, by the server's clock."""
    files: int
    bytes: int
    considered_files: int
    """Data files of the snapshot."""
    considered_bytes: int | None
    """None if the server did not read all manifests."""
    joins: tuple[dict[str, Any], ...] = ()
    """The outcome of each requested join, nested joins after their parent: table, snapshot-id, keys, used, and the
    reason if it was not used."""


def parse_as_of(text: str) -> int:
    """Return milliseconds since the epoch, of such a number or of a time like 2026-01-31T12:00:00, in UTC if it has
    no offset.

    Raises:
        ValueError: For other text.
    """
    if text.isascii() and text.isdigit():
        return int(text)
    at = datetime.fromisoformat(text)
    # Not by `timestamp()`: it is a float, which for some times is a millisecond less.
    return ((at if at.tzinfo else at.replace(tzinfo=UTC)) - _EPOCH) // timedelta(milliseconds=1)
