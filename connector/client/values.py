"""Defines arguments and results of the client's methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def omit_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class At:
    """Identifies a snapshot by at most one of these fields. If no field is set, it is the current snapshot."""

    snapshot_id: int | None = None
    ref: str | None = None
    as_of_ms: int | None = None

    def to_query(self) -> dict[str, Any]:
        return omit_none({"snapshot-id": self.snapshot_id, "ref": self.ref, "as-of": self.as_of_ms})


CURRENT = At()


class TimelineInstant(msgspec.Struct, frozen=True, rename="kebab"):
    """An action on a table or view, such as a commit, as the catalog has recorded it (docs/reference/timeline.md).

    Attributes:
        position: The value of `since` with which a listing continues after this instant.
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
    """A table as engines load it.

    Attributes:
        metadata: The table metadata as JSON, with all snapshots or only the snapshots of branches and tags.
        etag: The ETag of the server's response, or "" if the response has none.
    """

    metadata: bytes
    location: str
    storage: dict[str, str] = field(repr=False)
    """The server's settings for access to the files of the table, such as `s3.endpoint` and `s3.access-key-id`."""
    etag: str = ""


class Stage(msgspec.Struct, frozen=True, rename="kebab"):
    """A stage of a plan, with the files and bytes before and after the stage."""

    name: str
    files_in: int
    files_removed: int
    files_left: int
    bytes_in: int
    bytes_removed: int
    bytes_left: int
    microseconds: int
    complete: bool
    """Whether the stage was finished. If it reached its time limit, the files that it did not check are kept."""


class Explanation(msgspec.Struct, frozen=True, rename="kebab"):
    """The explanation of a scan plan.

    The filter and the residuals are Iceberg expressions in JSON.
    """

    snapshot_id: int | None
    stages: tuple[Stage, ...]
    indexes: tuple[dict[str, Any], ...]
    """The indexes that were probed, each with `name`, `kind`, `files-in` and `files-removed`."""
    complete: bool
    """Whether all stages were finished and all indexes were loaded in time.

    If not, a repeated plan may keep fewer files.
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
    """The parts of the filter's conjunction, each with the effect of bounds on this part alone."""
    layouts: tuple[dict[str, Any], ...]
    """The layouts with which the plan would keep clearly fewer files.

    Each has its columns, `files-in`, and an estimate of the kept files.
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
    """The reasons why the plan keeps all files. Empty if it prunes files."""


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

    Nested joins follow the join that contains them. An outcome has `table`, `snapshot-id`, `keys` and `used`. If the
    join was not used, it also has a reason.
    """


def parse_timestamp(text: str) -> int:
    """Parse a time, and return it in milliseconds since the epoch.

    The text is a number of milliseconds, or a time such as 2026-01-31T12:00:00. A time without an offset is in UTC.

    Raises:
        ValueError: The text is neither a number nor a time.
    """
    if text.isascii() and text.isdigit():
        return int(text)
    time = datetime.fromisoformat(text)
    # `timestamp()` is not used, because it returns a float that is a millisecond too small for some times.
    return ((time if time.tzinfo else time.replace(tzinfo=UTC)) - _EPOCH) // timedelta(milliseconds=1)
