"""Runs a job by `spark-submit`: on this machine, or on a cluster of any kind that Spark supports.

The driver runs in its own process, which Spark starts here (client mode). It finds its request in a file of a
private folder and leaves its answer there, because the output belongs to Spark, and arguments and variables of a
process are visible to others. On this machine each process of the job has a memory limit. The folder has a pipe whose
other end this process keeps open: a driver ends when the server ends, however that happens. A killed driver has
committed whole batches; its other files are orphans, which table services remove.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import resource
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from seamark.formats.runtime.decoding import from_json
from seamark.metaserver.services.job import JOB_S_MAX, Job, JobFailed, JobProgress, Report
from seamark.metaserver.services.launching.launchers import JobAnswer, JobLogin

REQUEST, ANSWER, PROGRESS, ALIVE = "request.json", "answer.json", "progress.json", "alive"
_OUTPUT_BYTES = 4000
_NICE = 10
_POLL_S = 1.0
"""Between two looks at the progress of the driver."""
_LOOPBACK = ("spark.driver.host=127.0.0.1", "spark.driver.bindAddress=127.0.0.1")
_PROCESS_BYTES_MIN = 1 << 30
"""A JVM with Spark, and a task, need about as much."""
_HEAP = 0.6
"""Part of the memory of the JVM that is its heap; the rest is for classes, threads and buffers."""
_KEY_VARIABLES = ("SEAMARK_PARQUET_KEY_FILE", "SEAMARK_PARQUET_KMS")
"""The variables with which the driver decrypts files. All readers of the table see the failure of a job."""
_QUIET = ("spark.ui.enabled=false", "spark.ui.showConsoleProgress=false", "spark.log.level=ERROR")


def submit_program() -> str | None:
    """Return the path of spark-submit: of SPARK_HOME, of PySpark, or in the PATH; None without any."""
    homes = [os.environ.get("SPARK_HOME", "")]
    if (spec := importlib.util.find_spec("pyspark")) is not None and spec.origin:
        homes.append(str(Path(spec.origin).parent))
    for home in filter(None, homes):
        program = Path(home, "bin", "spark-submit")
        if program.is_file():
            return str(program)
    return shutil.which("spark-submit")


class LocalLimits(NamedTuple):
    """The limits of a job on this machine.

    Attributes:
        process_bytes: The memory limit of each process; 0: none.
    """

    master: str
    process_bytes: int


def local_limits(memory_bytes: int) -> LocalLimits:
    """Divide the memory among the JVM, the driver and as many tasks as there are CPUs, or fewer tasks if the memory
    does not suffice for them. 0: no limit."""
    if not memory_bytes:
        return LocalLimits("local[*]", 0)
    tasks = max(1, min(len(os.sched_getaffinity(0)), memory_bytes // _PROCESS_BYTES_MIN - 2))
    return LocalLimits(f"local[{tasks}]", memory_bytes // (tasks + 2))


class SparkSubmit:
    """A `Launcher` that runs each job by spark-submit.

    `options`: further options of spark-submit, as words of a shell. `environment`: the variables of the driver.
    `driver`: the module whose `main` runs the job. `process_bytes`: as in `LocalLimits`.
    """

    def __init__(
        self,
        master: str,
        options: str,
        login: JobLogin,
        environment: Mapping[str, str],
        driver: str,
        *,
        process_bytes: int = 0,
    ) -> None:
        self._master = master
        self._script = f"from {driver} import main\n\nmain()\n"
        self._process_bytes = process_bytes
        self._options = shlex.split(options)
        self._login = login
        self._environment = environment

    async def run(self, job: Job, report: Report) -> dict[str, Any]:
        program = submit_program()
        if program is None:
            raise JobFailed("spark-submit is not installed; pip install 'seamark[spark]', or set SPARK_HOME")
        request = await self._login.request(job)
        with tempfile.TemporaryDirectory(prefix="seamark-job-") as name:  # readable by its owner only
            folder = Path(name)
            (folder / "job.py").write_text(self._script)
            (folder / REQUEST).write_bytes(msgspec.json.encode(request))
            os.mkfifo(folder / ALIVE, 0o600)
            # For reading too: to open only the writing end would wait for the driver.
            alive = os.open(folder / ALIVE, os.O_RDWR | os.O_CLOEXEC)
            try:
                async with asyncio.timeout(JOB_S_MAX):
                    answer = await self._drive(program, folder, report)
            except TimeoutError:
                raise JobFailed(f"The job took longer than {JOB_S_MAX:g} s and was stopped") from None
            except (OSError, msgspec.DecodeError, ValueError) as error:
                raise JobFailed(f"The Spark driver failed: {error}") from None
            finally:
                os.close(alive)
        if answer.error:
            raise JobFailed(answer.error)
        return answer.totals

    async def close(self) -> None:
        """Do nothing: each job has its own driver."""

    def _command(self, program: str, folder: Path) -> list[str]:
        local = self._master.startswith("local")
        defaults = [*_QUIET, *(_LOOPBACK if local else ())]
        if self._process_bytes:
            defaults.append(f"spark.driver.memory={int(_HEAP * self._process_bytes) >> 20}m")
        configured = [word for value in defaults for word in ("--conf", value)]
        return [program, "--master", self._master, *configured, *self._options, str(folder / "job.py"), str(folder)]

    def _limit(self, pid: int) -> None:
        """Limit the shell script that starts the JVM, from which all processes of the job inherit the limits.

        Raises:
            OSError: The script has ended, or the system refuses.
        """
        if self._process_bytes:
            resource.prlimit(pid, resource.RLIMIT_DATA, (self._process_bytes,) * 2)
        os.setpriority(os.PRIO_PROCESS, pid, _NICE)
        Path(f"/proc/{pid}/autogroup").write_text(str(_NICE))  # of its session, see `job_worker.yield_to_requests`

    async def _drive(self, program: str, folder: Path, report: Report) -> JobAnswer:
        with (folder / "output").open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *self._command(program, folder),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable, **self._environment},
                start_new_session=True,
            )
            try:
                with suppress(OSError):
                    self._limit(process.pid)
                code = await _wait_for_end(process, folder / PROGRESS, report)
            finally:
                with suppress(ProcessLookupError):  # also the driver, which is a child of Spark's launcher
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        try:
            return from_json((folder / ANSWER).read_bytes(), JobAnswer)
        except FileNotFoundError:
            why = "its output is left out, because it may quote values of encrypted files"
            if not any(self._environment.get(name) for name in _KEY_VARIABLES):
                last = (folder / "output").read_bytes()[-_OUTPUT_BYTES:].decode(errors="replace")
                why = " ".join(last.split())[-500:]
            raise JobFailed(f"The Spark driver ended with code {code} and without an answer: {why}") from None


async def _wait_for_end(process: asyncio.subprocess.Process, progress: Path, report: Report) -> int:
    """Return the code with which the process ends.

    Until then, report the progress that the driver writes.
    """
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(_POLL_S):
                return await process.wait()
        with suppress(FileNotFoundError):
            report(from_json(await asyncio.to_thread(progress.read_bytes), JobProgress))
