"""A job of a table service on one table, its progress, and the launchers that run it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from seamark.metaserver.store.model import NamespacePath

JOB_S_MAX = 3600.0
"""The maximum duration of a job, in seconds.

A job that takes longer is stopped. The next job continues after its last commit.
"""


class Job(msgspec.Struct, frozen=True):
    """A job of a table service: work on one table.

    Attributes:
        priority: Jobs with a lower number run first.
        pause_s: The minimum time until the next job of the service on the table, in seconds.
        idle_pause_s: The same minimum time after a job that had nothing to do. If it is None, it is `pause_s`.
    """

    service: str
    namespace: NamespacePath
    table: str
    uuid: str
    priority: int = 5
    pause_s: float = 1.0
    size_bytes: int = 0
    """The approximate bytes of the data files that the job reads."""
    launcher: str = "auto"
    """The launcher that the job requires (`launchers.py`)."""
    window: str = ""
    """The time windows in which the job may run (`budgets.py`). An empty text allows any time."""
    fence: int | None = None
    """The fencing number of the lease under which the job is started."""
    arguments: dict[str, Any] = {}
    idle_pause_s: float | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.service, self.uuid

    @property
    def tenant(self) -> str:
        """The top-level namespace of the table. The queue is fair between tenants."""
        return self.namespace[0] if self.namespace else ""


class JobProgress(msgspec.Struct, frozen=True, rename="kebab"):
    """The data files that a running job has read, and all data files that it will read, if this is known.

    All fields are 0 for a job that reads no files, or that has just begun.
    """

    files_done: int = 0
    files_total: int = 0
    bytes_done: int = 0
    bytes_total: int = 0


Report = Callable[[JobProgress], None]
"""A function that receives the progress of a job."""


class JobFailed(Exception):
    """Raised if a job failed. It will be tried again later.

    The message has one line.
    """


class Launcher(Protocol):
    """A way to run jobs, one at a time: in a worker process or on Spark."""

    async def run(self, job: Job, report: Report) -> dict[str, Any]:
        """Run a job, and return its totals. If the call is cancelled, the job is stopped.

        Raises:
            JobFailed: The job failed, or its worker ended.
        """

    async def close(self) -> None:
        """Stop the worker. A later job starts a new worker."""


class JobRunner(Launcher, Protocol):
    """A launcher that chooses one of several launchers for each job."""

    def find_launcher_name(self, job: Job) -> str:
        """Return the name of the launcher that will run the job."""
