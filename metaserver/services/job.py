"""A job of a table service on one table, its progress, and the launchers that run it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from seamark.metaserver.store.model import NamespacePath

JOB_S_MAX = 3600.0
"""A job that takes longer is stopped; a repeated job continues where its last commit ended."""


class Job(msgspec.Struct, frozen=True):
    """Work on one table.

    Jobs with a lower `priority` run first.

    Attributes:
        pause_s: Minimum time until the service's next job of the table.
        idle_pause_s: The same after a job that had nothing to do; None if it does not differ.
    """

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
    """The times at which it may run (`budgets.py`); an empty text allows any time."""
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
    """The data files that a running job has read, and the number that it will read as far as it knows.

    All fields are 0 for a job that reads none, or has just begun.
    """

    files_done: int = 0
    files_total: int = 0
    bytes_done: int = 0
    bytes_total: int = 0


Report = Callable[[JobProgress], None]
"""Receives the progress of a job."""


class JobFailed(Exception):
    """The job will be tried again later.

    The message is one line.
    """


class Launcher(Protocol):
    """Runs one job at a time, somewhere: in a worker process or on Spark."""

    async def run(self, job: Job, report: Report) -> dict[str, Any]:
        """Run the job and return its totals. A cancelled job is stopped.

        Raises:
            JobFailed: The job failed, or its worker ended.
        """

    async def close(self) -> None:
        """Stop the worker; a later job starts another."""


class JobRunner(Launcher, Protocol):
    """Runs one job at a time with the launcher that suits it."""

    def name_of(self, job: Job) -> str:
        """Return the name of the launcher that will run the job."""
