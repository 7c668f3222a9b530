"""Runs jobs in a process of our own, which uses Arrow and starts no JVM.

The worker reads one job a line from its standard input and answers with one line on its standard output, both JSON. It
ends with its input, so it never outlives the server. It gets no secrets of the server, except AWS's variables if tables
are on S3: each job brings a token for the namespace of its table. It runs at a lower CPU priority and within a memory
limit, because the data files that it decodes may be hostile.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from seamark.metaserver.services.service import Job, JobFailed
from seamark.metaserver.store.model import NamespacePath

MODULE = "seamark.metaserver.cli.job_worker"
JOB_S_MAX = 3600.0
"""A job that takes longer is stopped; a repeated job continues where its last commit ended."""
_ANSWER_BYTES_MAX = 1 << 20
_VARIABLES = frozenset(
    (
        *("PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONPATH"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SEAMARK_CA"),
        *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
    )
)
"""What a worker gets of the server's environment, which may contain secrets."""
_PREFIXES = ("LC_", "OMP_", "ARROW_", "MALLOC_")
_STORAGE_PREFIX = "AWS_"


class JobRequest(msgspec.Struct, frozen=True):
    """A line to the worker."""

    service: str
    namespace: NamespacePath
    table: str
    url: str
    token: str | None
    folders: tuple[str, ...]
    """Local folders of the warehouse: the worker opens no other local files."""


class JobAnswer(msgspec.Struct, frozen=True):
    """A line from the worker: the totals, or why it failed."""

    totals: dict[str, Any] = {}
    error: str = ""


class WorkerProcess:
    """A `Launcher`. `issue` makes a token for a namespace; None: the server requires none."""

    def __init__(
        self,
        url: str,
        issue: Callable[[NamespacePath], str] | None,
        *,
        memory_bytes: int,
        umask: int,
        folders: tuple[str, ...],
        environment: Mapping[str, str],
        on_s3: bool,
    ) -> None:
        """`on_s3`: the worker needs the keys of AWS's provider chain, unless the catalog hands out others."""
        self._url = url
        self._issue = issue
        self._memory_bytes = memory_bytes
        self._umask = umask
        self._folders = folders
        self._environment = environment
        self._on_s3 = on_s3
        self._process: asyncio.subprocess.Process | None = None

    async def run(self, job: Job) -> dict[str, Any]:
        try:
            async with asyncio.timeout(JOB_S_MAX):
                answer = await self._ask(job)
        except TimeoutError:
            await self.close()
            raise JobFailed(f"The job took longer than {JOB_S_MAX:g} s and was stopped") from None
        except (OSError, msgspec.DecodeError, ValueError) as error:
            await self.close()
            raise JobFailed(f"The worker process failed: {error}") from None
        except BaseException:
            await self.close()
            raise
        if answer.error:
            raise JobFailed(answer.error)
        return answer.totals

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def _ask(self, job: Job) -> JobAnswer:
        process = await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        token = None if self._issue is None else self._issue(job.namespace)
        request = JobRequest(job.service, job.namespace, job.table, self._url, token, self._folders)
        process.stdin.write(msgspec.json.encode(request) + b"\n")
        await process.stdin.drain()
        line = await process.stdout.readline()
        if not line.endswith(b"\n"):
            code = await process.wait()
            await self.close()
            raise JobFailed(f"The worker process ended with code {code} during the job")
        return msgspec.json.decode(line, type=JobAnswer)

    async def _start(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            prefixes = (*_PREFIXES, _STORAGE_PREFIX) if self._on_s3 else _PREFIXES
            own = {name: value for name, value in os.environ.items() if name in _VARIABLES or name.startswith(prefixes)}
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # the working directory is no place to import modules from
                "-m",
                MODULE,
                str(self._memory_bytes),
                f"{self._umask:o}",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_ANSWER_BYTES_MAX,
                env={**own, **self._environment},
            )
        return self._process
