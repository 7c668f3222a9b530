"""Launchers of jobs: a worker process of the server, Spark on this machine, or Spark on a cluster.

The setting `services_launchers` lists the permitted launchers, because a table's writer must not decide the resources
that the server spends. The table's property `seamark.services.launcher` chooses one of the permitted launchers. If the
table does not have the property, the bytes that the job will read decide, because starting a JVM takes longer than a
small job in the worker process. All launchers run the same job, which is a client of the HTTP interface. The job has a
token for the namespace of its table and for dimension tables of its indexes (`dimension_reads.py`). It also has the
fencing number of the lease under which it was started.
"""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.properties import parse_count
from seamark.formats.iceberg.metadata.snapshot import Snapshot
from seamark.formats.runtime.errors import SeamarkError
from seamark.formats.services.services import SERVICES
from seamark.metaserver.services.job import Job, JobFailed, JobProgress, Launcher, Report
from seamark.metaserver.settings.services import LAUNCHERS
from seamark.metaserver.store.model import NamespacePath

PROPERTY = "seamark.services.launcher"
AUTO = "auto"
WORKER, LOCAL, CLUSTER = LAUNCHERS
CHOICES = (AUTO, *LAUNCHERS)


class JobRequest(msgspec.Struct, frozen=True):
    """The request that a launcher sends to the process that runs the job."""

    service: str
    namespace: NamespacePath
    table: str
    url: str
    token: str | None
    folders: tuple[str, ...] | None
    """The local folders of the warehouse.

    The process opens no other local files. If it is None, all files are allowed.
    """
    umask: int
    """The umask for the files of tables."""
    fence: int | None = None
    """The fencing number of the scheduler's lease. If another scheduler has the lease now, the job cannot commit."""
    arguments: dict[str, Any] = {}
    """Additional arguments of a job that a user starts."""
    storage: dict[str, str] = {}
    """S3 keys for tables for which the catalog sends no keys, as properties of a FileIO.

    The process does not send them to other machines.
    """
    certificates: str = ""
    """The certificates of the server (PEM). They are needed if the certificate does not name the server's address."""


class JobAnswer(msgspec.Struct, frozen=True):
    """The totals of a job, or the reason why it failed.

    If `progress` is set, the job is still running, and the answer reports only its progress.
    """

    totals: dict[str, Any] = {}
    error: str = ""
    progress: JobProgress | None = None


@dataclass(frozen=True)
class JobLogin:
    """The login of jobs to the server and the storage.

    Attributes:
        url: The address of the server.
        issue: A function that makes a token for a job. It may ask a policy server for rights. None if the server
            requires no token.
        folders: See `JobRequest.folders`.
        umask: See `JobRequest.umask`.
        keys: A function that returns the S3 keys for `JobRequest.storage`. The call may wait for a service of AWS. If
            it is None, jobs use the keys that the catalog sends, or their own keys.
        certificates: A function that returns the value of `JobRequest.certificates`.
    """

    url: str
    issue: Callable[[Job], Awaitable[str]] | None
    folders: tuple[str, ...] | None
    umask: int
    keys: Callable[[], dict[str, str]] | None = None
    certificates: Callable[[], str] | None = None

    async def make_request(self, job: Job) -> JobRequest:
        """Build the request that starts a job. The launcher sends it.

        Raises:
            JobFailed: There is no token, or there are no keys for the storage. The scheduler repeats the job.
        """
        try:
            token = None if self.issue is None else await self.issue(job)
            storage = {} if self.keys is None else await asyncio.to_thread(self.keys)
        except SeamarkError as error:
            raise JobFailed(error.message) from None
        return JobRequest(
            job.service,
            job.namespace,
            job.table,
            self.url,
            token,
            self.folders,
            self.umask,
            job.fence,
            job.arguments,
            storage,
            "" if self.certificates is None else self.certificates(),
        )


def has_local_spark() -> bool:
    """Return whether PySpark and Java are installed."""
    return importlib.util.find_spec("pyspark") is not None and shutil.which("java") is not None


def read_launcher(properties: Mapping[str, str]) -> str:
    """Return the launcher that the table's property names, or `auto` if the value of the property is invalid."""
    launcher_name = properties.get(PROPERTY, AUTO)
    return launcher_name if launcher_name in CHOICES else AUTO


def explain_ignored_launcher(launcher: str, permitted_launchers: Sequence[str]) -> str | None:
    """Return the reason why the server ignores the property, or None if it does not.

    If the server ignores the property, jobs run as with the value `auto`.
    """
    if launcher not in CHOICES:
        return f"the launcher must be one of {', '.join(CHOICES)}"
    if launcher == AUTO or launcher in permitted_launchers:
        return None
    return f"the server permits {', '.join(permitted_launchers)} (setting services_launchers)"


class LauncherChoice:
    """A `JobRunner` that passes each job to one of its launchers.

    Args:
        launchers: The launchers by name. `WORKER` must be one of them.
        spark_bytes: The minimum number of bytes that a job reads for which Spark is chosen. 0 disables this choice.
    """

    def __init__(self, launchers: Mapping[str, Launcher], *, spark_bytes: int) -> None:
        self._launchers = launchers
        self._spark_bytes = spark_bytes

    def find_launcher_name(self, job: Job) -> str:
        """Return the name of the launcher that runs a job, by its properties and size."""
        if job.service not in SERVICES or not SERVICES[job.service].runs_on_spark:
            return WORKER
        if job.launcher in self._launchers:
            return job.launcher
        if not self._spark_bytes or job.size_bytes < self._spark_bytes:
            return WORKER
        return next((name for name in (CLUSTER, LOCAL) if name in self._launchers), WORKER)

    async def run(self, job: Job, report: Report) -> dict[str, Any]:
        return await self._launchers[self.find_launcher_name(job)].run(job, report)

    async def close(self) -> None:
        for launcher in self._launchers.values():
            await launcher.close()


def sum_bytes_since(metadata: TableMetadata, mark: str) -> int:
    """Return the bytes that commits have added since the last snapshot whose summary has the key `mark`.

    The next rewrite reads about this many bytes. If no snapshot has the key, or an earlier snapshot has expired before
    the key is found, the size of the table is returned.
    """
    snapshot: Snapshot | None = metadata.current_snapshot
    table_bytes = 0 if snapshot is None else parse_count(snapshot.build_summary_map(), "total-files-size", 0)
    added_bytes = 0
    while snapshot is not None:
        summary = snapshot.build_summary_map()
        if mark in summary:
            return min(added_bytes, table_bytes)
        added_bytes += parse_count(summary, "added-files-size", 0)
        parent = snapshot.parent_snapshot_id
        snapshot = None if parent is None else metadata.snapshot(parent)
    return table_bytes
