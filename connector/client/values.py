"""The arguments and results of the client's methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def omit_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are not None. An argument that is None is not set."""
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class At:
    """A snapshot, identified by at most one of these fields. Without any field, it is the current snapshot."""

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
    principal_name: str = msgspec.field(name="who")
    completed_ms: int | None = None
    snapshot_id: int | None = None
    metadata_location: str | None = None
    summary: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class EngineTable:
    """A table in the form in which engines load it.

    Attributes:
        metadata: The table metadata in JSON, with all snapshots or only the snapshots of branches and tags.
        etag: The version of the server's answer, or empty if the answer has none.
    """

    metadata: bytes
    location: str
    storage: dict[str, str] = field(repr=False)
    """The server's settings for access to the files of the table: `s3.endpoint`, `s3.access-key-id`, …"""
    etag: str = ""


class Stage(msgspec.Struct, frozen=True, rename="kebab"):
    """A stage of a plan, with the files and bytes before and after it."""

    name: str
    files_in: int
    files_removed: int
    files_left: int
    bytes_in: int
    bytes_removed: int
    bytes_left: int
    microseconds: int
    complete: bool
    """Whether the stage was finished. If the time limit ended it, the files that were not checked are kept."""


class Explanation(msgspec.Struct, frozen=True, rename="kebab"):
    """The explanation of a scan plan.

    The filter and the residuals are Iceberg expressions in JSON.
    """

    snapshot_id: int | None
    stages: tuple[Stage, ...]
    indexes: tuple[dict[str, Any], ...]
    """The indexes that were probed. Each has a name, a kind, files-in and files-removed."""
    complete: bool
    """Whether all stages were finished and all indexes were loaded in time.

    If not, a later plan may keep fewer files.
    """
    files: int
    bytes: int
    records: int
    delete_files: int
    filter: Any
    not_used: tuple[str, ...]
    """Parts of the SQL that an Iceberg expression cannot represent."""
    not_used_reasons: tuple[str, ...]
    terms: tuple[dict[str, Any], ...]
    """The parts of the filter that all rows must satisfy. Each has the effect that bounds have on the part alone."""
    layouts: tuple[dict[str, Any], ...]
    """Layouts with which a plan would keep clearly fewer files.

    Each has columns, files-in, and an estimate of the kept files.
    """
    unknown_layouts: tuple[dict[str, Any], ...]
    """The columns for which no estimate is possible, each with the reason."""
    columns: tuple[dict[str, Any], ...]
    residuals: tuple[dict[str, Any], ...]
    residuals_complete: bool
    json: dict[str, Any]
    """The JSON of the response."""
    kept_files: tuple[dict[str, Any], ...] | None = msgspec.field(default=None, name="kept")
    """The first files that the plan keeps, or None if they were not requested."""
    joins: tuple[dict[str, Any], ...] = ()
    """The outcome of each requested join. See `PlanTable`."""
    unpruned_reasons: tuple[str, ...] = ()
    """The reasons why all files are read. Empty if files are left out."""


class PlanTable(msgspec.Struct, frozen=True, rename="kebab"):
    """A plan table: a table with the files that a plan keeps."""

    name: str | None
    """The name in the namespace of the table, or None if no plan table was created."""
    snapshot_id: int | None
    expires_at_ms: int | None
    """The time at which the lease ends, by the server's clock."""
    files: int
    bytes: int
    considered_files: int
    """The number of data files of the snapshot."""
    considered_bytes: int | None
    """The size of these data files, or None if the server did not read all manifests."""
    joins: tuple[dict[str, Any], ...] = ()
    """The outcome of each requested join.

    Nested joins follow the join that contains them. An outcome has table, snapshot-id, keys and used. If the join was
    not used, it also has the reason.
    """


def parse_timestamp(text: str) -> int:
    """Return a time in milliseconds since the epoch.

    The text is a number of milliseconds, or a time such as 2026-01-31T12:00:00. A time without an offset is in UTC.

    Raises:
        ValueError: The text is neither a number nor a time.
    """
    if text.isascii() and text.isdigit():
        return int(text)
    at = datetime.fromisoformat(text)
    # `timestamp()` is not used, because its result is a float. For some times, it is a millisecond too small.
    return ((at if at.tzinfo else at.replace(tzinfo=UTC)) - _EPOCH) // timedelta(milliseconds=1)
