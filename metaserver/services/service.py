"""What a table service is: it proposes jobs for a table, and a launcher runs them.

A job may be killed at any time and may run twice: it works through the HTTP interface like any client, and each of its
commits is atomic. So the queue needs no storage: a new leader looks at every table and proposes the jobs again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from seamark.metaserver.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.store.model import Entry, NamespacePath

_PAUSE_S, _FILES_A_SECOND = 60.0, 1000


class Job(msgspec.Struct, frozen=True):
    """Work on one table. Jobs with a lower `priority` run first. `pause_s`: least time until the service's next job of
    the table."""

    service: str
    namespace: NamespacePath
    table: str
    uuid: str
    priority: int = 5
    pause_s: float = 1.0

    @property
    def key(self) -> tuple[str, str]:
        return self.service, self.uuid


def rewrite_pause_s(files: int) -> float:
    """Least time between two rewrites of a table by a service, because each plans the whole table."""
    return max(_PAUSE_S, files / _FILES_A_SECOND)


def count_of(values: Mapping[str, str], name: str, default: int) -> int:
    """A number of any size; the default if it is absent or no number. The job reports an invalid property."""
    text = values.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 20 else default


class JobFailed(Exception):
    """The job will be tried again later. The message is one line."""


class Service(Protocol):
    @property
    def name(self) -> str:
        """A noun, as in metrics and logs."""

    def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
        """The job that the current state of the table may need; None: none. Pure and cheap: it runs for every change
        of every table."""


class Launcher(Protocol):
    """Runs one job at a time."""

    async def run(self, job: Job) -> dict[str, Any]:
        """The totals of the job. JobFailed when it failed or its worker ended. A cancelled job is stopped."""

    async def close(self) -> None:
        """Stops the worker; a later job starts another."""
