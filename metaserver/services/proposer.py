"""The server's part of a table service. It proposes jobs for a table, and reports the problems that these jobs correct.

A job may be killed at any time, and may run twice: it works through the HTTP interface like any client, and each of its
commits is atomic. So the queue needs no storage. A replica that takes the lease examines every table and proposes the
jobs again.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import msgspec

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.properties import parse_bool
from seamark.formats.runtime.clock import Clock
from seamark.formats.services.service import TableService
from seamark.metaserver.planner.view.view import TableView
from seamark.metaserver.services.job import Job
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import Entry

NEVER = math.inf
RECHECK_S = 3600.0
"""The time between two examinations of a table, for a service that depends on more than the table's metadata."""
_REWRITE_PAUSE_MIN_S, _FILES_PLANNED_PER_S = 60.0, 1000
"""A pause between two rewrites has one second for each 1,000 files of the table, but at least 60 seconds."""


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """A problem of a table.

    Attributes:
        problem: The name of the problem.
        detail: The problem in words.
        cost: The effect of the problem on the users of the table.
        service: The table service that corrects the problem, or None.
        enabled: Whether the server runs the service for this table, or None if there is no service.
        after_s: The seconds until the time window of the table begins, if the service waits for the window.
    """

    problem: str
    detail: str
    cost: str
    service: str | None = None
    enabled: bool | None = None
    after_s: float = 0.0


class TableHealth(msgspec.Struct, frozen=True, rename="kebab"):
    """The measures of the current snapshot of a table, and its problems.

    Sizes are in bytes.

    Attributes:
        deleted_records: The number of deleted rows by the totals of the snapshot. A row that is in two delete files
            counts twice.
    """

    snapshot_id: int | None
    format_version: int
    files: int
    records: int
    size_in_bytes: int
    target_file_size_in_bytes: int
    small_files: int
    files_if_compacted: int
    delete_files: int
    deleted_records: int
    manifests: int
    metadata_size_in_bytes: int
    snapshots: int
    expired_snapshots: int
    problems: tuple[Problem, ...]


class TableState(NamedTuple):
    """The state of a table in which a service searches for problems."""

    metadata: TableMetadata
    view: TableView
    health: TableHealth
    """The measures of the table, without problems."""
    now_ms: int
    why_not_expired: str = ""
    """The reason why the expired snapshots cannot be determined. It is empty if they can."""


class JobProposer(ABC):
    """The part of a table service that runs in the server: it proposes jobs and reports problems."""

    service: ClassVar[TableService]

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock

    @property
    def name(self) -> str:
        return self.service.name

    @abstractmethod
    def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
        """Return the job that the table may need in its current state, or None.

        The method has no side effects and is cheap, because it runs for every change of every table.
        """

    def recheck_after_s(self, metadata: TableMetadata) -> float:
        """Return the seconds after which `propose` must be called again even if the table does not change.

        The result is NEVER if the proposal depends only on changes of the table.
        """
        return NEVER

    def list_source_tables(self, metadata: TableMetadata) -> frozenset[tuple[str, ...]]:
        """Return the other tables whose changes may require a job for this table: namespace levels and name of each."""
        return frozenset()

    def find_problems(self, state: TableState) -> Iterator[Problem]:
        """Yield the problems of a table that jobs of the service correct, and the invalid properties.

        The default is no problems. Services that find problems override this method.
        """
        return iter(())

    def is_on(self, metadata: TableMetadata) -> bool:
        """Return whether the policy of the table enables the service.

        If the table does not have the property that switches the service, the server's settings decide. A service
        without such a property is always enabled.
        """
        switch = self.service.switch
        return switch is None or parse_bool(metadata.properties, switch, self._settings.runs_by_default(self.service))

    def make_job(self, entry: Entry, pause_s: float = 1.0, **details: Any) -> Job:
        """Make a job of the service.

        Args:
            details: Additional fields of `Job`.
        """
        return Job(
            self.service.name, entry.namespace, entry.name, entry.uuid, self.service.priority, pause_s, **details
        )

    def make_problem(self, state: TableState, problem: str, detail: str, cost: str) -> Problem:
        """Make a problem that a job of the service corrects."""
        is_enabled = self._settings.services_workers > 0 and self.is_on(state.metadata)
        return Problem(problem, detail, cost, self.service.name, is_enabled)


class RewriteProposer(JobProposer):
    """The server's part of a service that replaces data files or manifests.

    Such a service does not run on tables of format version 1.
    """

    def is_on(self, metadata: TableMetadata) -> bool:
        return metadata.format_version > 1 and super().is_on(metadata)


def compute_rewrite_pause_s(files: int) -> float:
    """Return the minimum time between two rewrites of a table by a service.

    Each rewrite plans the whole table, so the pause grows with the number of files.
    """
    return max(_REWRITE_PAUSE_MIN_S, files / _FILES_PLANNED_PER_S)
