"""Launcher that runs jobs in a worker process of the server, which uses Arrow and starts no JVM.

The worker reads one job per line from its standard input, and answers with one line on its standard output. Both are
JSON. Lines with the progress of the job precede the answer. The worker ends when its input ends, so it never outlives
the server. Each job has a token for the namespace of its table and for dimension tables of its indexes. It also has the
server's S3 keys, unless the catalog sends keys for the table. The process gets no other secrets of the server, except
the variables of AWS if tables are on S3. The process has a lower CPU priority. It also has a memory limit, because the
data files that it decodes are untrusted.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from seamark.formats.runtime.decoding import convert_json
from seamark.metaserver.objects.storage import ServerStorage
from seamark.metaserver.services.job import JOB_S_MAX, Job, JobFailed, Report
from seamark.metaserver.services.launching.launchers import JobAnswer, JobLogin
from seamark.metaserver.settings.settings import Settings

_ANSWER_BYTES_MAX = 1 << 20
"""The maximum length of a line that the worker writes."""
_VARIABLES = frozenset(
    (
        *(
            "JAVA_HOME",
            "SPARK_HOME",
            "SPARK_CONF_DIR",
            "HADOOP_CONF_DIR",
            "YARN_CONF_DIR",
            "PYSPARK_PYTHON",
            "KUBECONFIG",
        ),
        *("PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONPATH"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SEAMARK_CA"),
        *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
    )
)
"""The variables of the server's environment that a worker receives. Other variables may contain secrets."""
_PREFIXES: tuple[str, ...] = ("LC_", "OMP_", "ARROW_", "MALLOC_", "SEAMARK_PARQUET_")
"""A worker also receives the variables whose names begin with one of these prefixes."""
_END_S = 2.0
"""The time within which a worker has to end before it is killed."""


def list_job_variables(storages: Iterable[ServerStorage], settings: Settings | None = None) -> dict[str, str]:
    """Return the environment variables of the server that job processes receive.

    Args:
        storages: The storages of the tables. The library of a storage may need variables, such as those of AWS's
            provider chain.
        settings: The settings of a further warehouse, or None for the server's own warehouse. If the jobs of a
            further warehouse have their own keys for its storage, they do not receive the variables with which the
            server logs in to the cloud.
    """
    names, prefixes = set(_VARIABLES), _PREFIXES
    for storage in storages:
        names.update(storage.public_variables)
        if settings is None or not storage.has_own_job_keys(settings):
            prefixes += storage.variable_prefixes
    return {name: value for name, value in os.environ.items() if name in names or name.startswith(prefixes)}


class WorkerProcess:
    """The default `Launcher`, for all jobs that need no cluster."""

    def __init__(
        self,
        login: JobLogin,
        module: str,
        *,
        memory_bytes: int,
        environment: Mapping[str, str],
    ) -> None:
        """Create a worker.

        Args:
            login: The login of jobs.
            module: The module that the worker runs.
            memory_bytes: The memory limit of the worker.
            environment: The environment variables of the worker.
        """
        self._module = module
        self._login = login
        self._memory_bytes = memory_bytes
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None

    async def run(self, job: Job, report: Report) -> dict[str, Any]:
        """Run a job in the worker, and return its totals; see `Launcher.run`.

        Raises:
            JobFailed: The job failed, or took too long.
        """
        try:
            async with asyncio.timeout(JOB_S_MAX):
                answer = await self._send_job(job, report)
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
        """End the worker. If it does not end in time, kill it."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        # A worker whose input ends stops its job, and removes the files of the job.
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(_END_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    async def _send_job(self, job: Job, report: Report) -> JobAnswer:
        """Send a job to the worker, report its progress, and return its answer.

        Raises:
            JobFailed: The worker ended during the job.
        """
        request = await self._login.make_request(job)
        process = await self._get_process()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(request) + b"\n")
        await process.stdin.drain()
        while True:
            line = await process.stdout.readline()
            if not line.endswith(b"\n"):
                code = await process.wait()
                await self.close()
                raise JobFailed(f"The worker process ended with code {code} during the job")
            answer = convert_json(line, JobAnswer)
            if answer.progress is None:
                return answer
            report(answer.progress)

    async def _get_process(self) -> asyncio.subprocess.Process:
        """Return the running worker, or start a worker."""
        if self._process is None or self._process.returncode is not None:
            # With -P, Python does not import modules from the working directory.
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                self._module,
                str(self._memory_bytes),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_ANSWER_BYTES_MAX,
                env=dict(self._environment),
                start_new_session=True,  # A session has its own priority; see `job_worker.yield_to_requests`.
            )
        return self._process
