"""Launcher that runs jobs with `spark-submit`, on this machine or on any cluster that Spark supports.

The driver runs in its own process, which Spark starts on this machine (client mode). The request and the answer are
files in a private folder. They are not sent by standard output, because Spark writes to it, nor as arguments or
variables, because other users can see them. On this machine, each process of the job has a memory limit.

The folder has a pipe whose other end this process keeps open. So a driver ends when the server ends, for any reason.
The commits of a killed driver are complete. Its other files are orphans, which table services remove.
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

from seamark.formats.runtime.decoding import convert_json
from seamark.metaserver.services.job import JOB_S_MAX, Job, JobFailed, JobProgress, Report
from seamark.metaserver.services.launching.launchers import JobAnswer, JobLogin

REQUEST, ANSWER, PROGRESS, ALIVE = "request.json", "answer.json", "progress.json", "alive"
"""The names of the files of a job in its folder. `ALIVE` is the pipe that is open as long as the server runs."""
_OUTPUT_BYTES = 4000
"""The number of bytes at the end of the driver's output that are read after a failure."""
_REASON_CHARACTERS_MAX = 500
_NICE = 10
"""The niceness of the driver: requests to the server have a higher CPU priority than jobs."""
_NON_TASK_PROCESSES = 2
"""The JVM and the driver, which need memory in addition to the tasks."""
_POLL_S = 1.0
"""The time between two reads of the driver's progress."""
_LOOPBACK = ("spark.driver.host=127.0.0.1", "spark.driver.bindAddress=127.0.0.1")
_PROCESS_BYTES_MIN = 1 << 30
"""The approximate minimum memory of a JVM with Spark, and also of a task, in bytes."""
_HEAP_FRACTION = 0.6
"""The fraction of the JVM's memory that is heap. The rest is for classes, threads and buffers."""
_KEY_VARIABLES = ("SEAMARK_PARQUET_KEY_FILE", "SEAMARK_PARQUET_KMS")
"""The variables that contain keys with which the driver decrypts files.

If one of them is set, failures do not quote the driver's output, because all readers of the table can see
failures.
"""
_QUIET = ("spark.ui.enabled=false", "spark.ui.showConsoleProgress=false", "spark.log.level=ERROR")


def find_submit_program() -> str | None:
    """Return the path of spark-submit, or None if it is not installed.

    The function searches SPARK_HOME, PySpark and the PATH.
    """
    homes = [os.environ.get("SPARK_HOME", "")]
    if (spec := importlib.util.find_spec("pyspark")) is not None and spec.origin:
        homes.append(str(Path(spec.origin).parent))
    for home in filter(None, homes):
        program = Path(home, "bin", "spark-submit")
        if program.is_file():
            return str(program)
    return shutil.which("spark-submit")


class LocalSparkSettings(NamedTuple):
    """The settings of a Spark job on this machine that limit its memory.

    Attributes:
        master: The master URL of Spark, with the number of tasks that run at the same time: `local[N]`.
        process_bytes: The memory limit of each process, or 0 for no limit.
    """

    master: str
    process_bytes: int


def compute_local_limits(memory_bytes: int) -> LocalSparkSettings:
    """Divide the memory among the JVM, the driver and one task per CPU.

    If the memory is too small for all tasks, there are fewer tasks. If `memory_bytes` is 0, there is no limit.
    """
    if not memory_bytes:
        return LocalSparkSettings("local[*]", 0)
    tasks = max(1, min(len(os.sched_getaffinity(0)), memory_bytes // _PROCESS_BYTES_MIN - _NON_TASK_PROCESSES))
    return LocalSparkSettings(f"local[{tasks}]", memory_bytes // (tasks + _NON_TASK_PROCESSES))


class SparkSubmit:
    """A `Launcher` that runs each job with spark-submit.

    Args:
        master: The master URL of Spark.
        options: Additional options of spark-submit, separated as in a shell.
        login: The login of jobs.
        environment: The environment variables of the driver.
        driver: The module whose `main` runs the job.
        process_bytes: The memory limit of each process, or 0 for no limit.
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
        """Run a job with its own driver, and return its totals; see `Launcher.run`.

        Raises:
            JobFailed: The job failed, or took too long.
        """
        program = find_submit_program()
        if program is None:
            raise JobFailed("spark-submit is not installed; pip install 'seamark[spark]', or set SPARK_HOME")
        request = await self._login.make_request(job)
        # Only the owner can read a temporary folder.
        with tempfile.TemporaryDirectory(prefix="seamark-job-") as folder_name:
            folder = Path(folder_name)
            (folder / "job.py").write_text(self._script)
            (folder / REQUEST).write_bytes(msgspec.json.encode(request))
            os.mkfifo(folder / ALIVE, 0o600)
            # The driver ends when this pipe ends, which is also the case if this process is killed. Open the pipe also
            # for reading. Otherwise, opening it would wait for the driver.
            alive_pipe = os.open(folder / ALIVE, os.O_RDWR | os.O_CLOEXEC)
            try:
                async with asyncio.timeout(JOB_S_MAX):
                    answer = await self._run_driver(program, folder, report)
            except TimeoutError:
                raise JobFailed(f"The job took longer than {JOB_S_MAX:g} s and was stopped") from None
            except (OSError, msgspec.DecodeError, ValueError) as error:
                raise JobFailed(f"The Spark driver failed: {error}") from None
            finally:
                os.close(alive_pipe)
        if answer.error:
            raise JobFailed(answer.error)
        return answer.totals

    async def close(self) -> None:
        """Do nothing, because each job has its own driver."""

    def _make_command(self, program: str, folder: Path) -> list[str]:
        """Return the command that starts the Spark application of a job."""
        is_local = self._master.startswith("local")
        defaults = [*_QUIET, *(_LOOPBACK if is_local else ())]
        if self._process_bytes:
            # The heap is only a part of the limit, because the JVM also needs memory outside of its heap.
            defaults.append(f"spark.driver.memory={int(_HEAP_FRACTION * self._process_bytes) >> 20}m")
        conf_options = [word for value in defaults for word in ("--conf", value)]
        return [program, "--master", self._master, *conf_options, *self._options, str(folder / "job.py"), str(folder)]

    def _limit_process(self, pid: int) -> None:
        """Set the limits of the shell script that starts the JVM. All processes of the job inherit them.

        Raises:
            OSError: The script has ended, or the system refuses the limits.
        """
        if self._process_bytes:
            resource.prlimit(pid, resource.RLIMIT_DATA, (self._process_bytes,) * 2)
        os.setpriority(os.PRIO_PROCESS, pid, _NICE)
        # If Linux groups processes by session (autogroup), a priority applies only within its session. So also lower
        # the priority of the session.
        Path(f"/proc/{pid}/autogroup").write_text(str(_NICE))

    async def _run_driver(self, program: str, folder: Path, report: Report) -> JobAnswer:
        """Run the driver, and return its answer.

        Raises:
            JobFailed: The driver ended without an answer.
        """
        with (folder / "output").open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *self._make_command(program, folder),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable, **self._environment},
                start_new_session=True,
            )
            try:
                with suppress(OSError):
                    self._limit_process(process.pid)
                code = await _wait_for_end(process, folder / PROGRESS, report)
            finally:
                with suppress(ProcessLookupError):  # The group includes the driver, a child of Spark's launcher.
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        try:
            return convert_json((folder / ANSWER).read_bytes(), JobAnswer)
        except FileNotFoundError:
            reason = "the output is left out, because it may quote values of encrypted files"
            if not any(self._environment.get(name) for name in _KEY_VARIABLES):
                output_end = (folder / "output").read_bytes()[-_OUTPUT_BYTES:].decode(errors="replace")
                reason = " ".join(output_end.split())[-_REASON_CHARACTERS_MAX:]
            raise JobFailed(f"The Spark driver ended with code {code} and without an answer: {reason}") from None


async def _wait_for_end(process: asyncio.subprocess.Process, progress: Path, report: Report) -> int:
    """Wait until the process ends, and return its exit code.

    Until then, report the progress that the driver writes.
    """
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(_POLL_S):
                return await process.wait()
        with suppress(FileNotFoundError):
            report(convert_json(await asyncio.to_thread(progress.read_bytes), JobProgress))
