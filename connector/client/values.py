"""Arguments and results of the client's methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def omit_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are not None; these are the arguments that the caller of a request has set."""
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class At:
    """A snapshot, identified by at most one of these fields; without any, the current snapshot."""

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
    """A table in the form in which engines load it.

    Attributes:
        metadata: The table metadata in JSON, with all snapshots or only the snapshots of branches and tags.
    """

    metadata: bytes
    location: str
    storage: dict[str, str] = field(repr=False)
    """The server's settings for access to the files of the table: `s3.endpoint`, `s3.access-key-id`, …"""


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
    """The indexes that were probed, each with its name, kind, files-in and files-removed."""
    complete: bool
    """Whether all stages were finished and all indexes were loaded in time. If not, a later plan may keep
    fewer files.
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
    """The parts of the filter that all rows must satisfy, and the effect of bounds for each part alone."""
    layouts: tuple[dict[str, Any], ...]
    """Layouts with which a plan would keep clearly fewer files: columns, files-in, and an estimate of the
    files.
    """
    unknown_layouts: tuple[dict[str, Any], ...]
    """Columns for which no estimate is possible: column and reason."""
    columns: tuple[dict[str, Any], ...]
    residuals: tuple[dict[str, Any], ...]
    residuals_complete: bool
    json: dict[str, Any]
    """The JSON of the answer."""
    kept: tuple[dict[str, Any], ...] | None = None
    """The first files that the plan keeps; None if they were not requested."""
    joins: tuple[dict[str, Any], ...] = ()
    """The outcome of each requested join; see `PlanTable`."""
    unpruned_reasons: tuple[str, ...] = ()
    """The reasons why all files are read; empty if files are left out."""


class PlanTable(msgspec.Struct, frozen=True, rename="kebab"):
    """A plan table: a table with the files that a plan keeps."""

    name: str | None
    """The name in the namespace of the table; None if no plan table was created."""
    snapshot_id: int | None
    expires_at_ms: int | None
    """The end of the lease by the server's clock."""
    files: int
    bytes: int
    considered_files: int
    """The number of data files of the snapshot."""
    considered_bytes: int | None
    """The size of these data files; None if the server did not read all manifests."""
    joins: tuple[dict[str, Any], ...] = ()
    """The outcome of each requested join.

    Nested joins follow their parent. An outcome has table, snapshot-id, keys, used, and the reason if the join
    was not used.
    """


def parse_as_of(text: str) -> int:
    """Return milliseconds since the epoch for such a number, or for a time such as 2026-01-31T12:00:00.

    A time without an offset is in UTC.

    Raises:
        ValueError: The text is neither a number nor a time.
    """
    if text.isascii() and text.isdigit():
        return int(text)
    at = datetime.fromisoformat(text)
    # `timestamp()` is not used, because its result is a float, which is a millisecond less for some times.
    return ((at if at.tzinfo else at.replace(tzinfo=UTC)) - _EPOCH) // timedelta(milliseconds=1)
