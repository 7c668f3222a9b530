"""What a table service is: it proposes jobs for a table, and a launcher runs them.

A job may be killed at any time and may run twice: it works through the HTTP interface like any client, and each of its
commits is atomic. So the queue needs no storage: a new leader looks at every table and proposes the jobs again.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import msgspec

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.store.model import Entry, NamespacePath

NEVER = math.inf
RECHECK_S = 3600.0
"""Time between two looks of a service that depends on more than the table's metadata."""
JOB_S_MAX = 3600.0
"""A job that takes longer is stopped; a repeated job continues where its last commit ended."""
_PAUSE_S, _FILES_A_SECOND = 60.0, 1000


class Job(msgspec.Struct, frozen=True):
    """Work on one table. Jobs with a lower `priority` run first. `pause_s`: least time until the service's next job of
    the table; `idle_pause_s`: the same after a job that found nothing to do, None if it is no other."""

    service: str
    namespace: NamespacePath
    table: str
    uuid: str
    priority: int = 5
    pause_s: float = 1.0
    size_bytes: int = 0
    """About the bytes of data files that the job reads."""
    launcher: str = "auto"
    """Where it runs (`launchers.py`)."""
    window: str = ""
    """When it may run (`budgets.py`); empty: at any time."""
    fence: int | None = None
    """The fencing number of the lease under which it is started."""
    arguments: dict[str, Any] = {}
    idle_pause_s: float | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.service, self.uuid

    @property
    def tenant(self) -> str:
        """The top-level namespace, between which the queue is fair."""
        return self.namespace[0] if self.namespace else ""


class JobProgress(msgspec.Struct, frozen=True, rename="kebab"):
    """Data files that a running job has read, of those that it will read as far as it knows. All 0 for a job that reads
    none, or has just begun."""

    files_done: int = 0
    files_total: int = 0
    bytes_done: int = 0
    bytes_total: int = 0


Report = Callable[[JobProgress], None]
"""Receives the progress of a job."""


def rewrite_pause_s(files: int) -> float:
    """Least time between two rewrites of a table by a service, because each plans the whole table."""
    return max(_PAUSE_S, files / _FILES_A_SECOND)


class JobFailed(Exception):
    """The job will be tried again later. The message is one line."""


class Service(ABC):
    name: ClassVar[str]
    """A noun, as in metrics and logs."""

    @abstractmethod
    def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
        """The job that the current state of the table may need; None: none. Pure and cheap: it runs for every change
        of every table."""

    def recheck_after_s(self, metadata: TableMetadata) -> float:
        """Seconds after which `propose` may answer otherwise although the table has not changed, or its answer be due
        again; NEVER if that depends on changes alone."""
        return NEVER


class Launcher(Protocol):
    """Runs one job at a time, somewhere: in a worker process or on Spark."""

    async def run(self, job: Job, report: Report) -> dict[str, Any]:
        """The totals of the job. JobFailed when it failed or its worker ended. A cancelled job is stopped."""

    async def close(self) -> None:
        """Stops the worker; a later job starts another."""


class JobRunner(Launcher, Protocol):
    """Runs one job at a time with the launcher that suits it."""

    def name_of(self, job: Job) -> str:
        """The name of the launcher that will run the job."""
