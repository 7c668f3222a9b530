"""Tests of the choice of launcher, by the table's property and by the bytes added since the last rewrite."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamark.commands.programs import SPARK_DRIVER
from seamark.formats.iceberg.metadata.compaction import COMPACTED_BY
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.table_json import decode_table
from seamark.formats.runtime.errors import RetryLater
from seamark.metaserver.services.job import Job, JobFailed, JobProgress, Report
from seamark.metaserver.services.launching.launchers import (
    AUTO,
    CLUSTER,
    LOCAL,
    WORKER,
    JobLogin,
    LauncherChoice,
    explain_ignored_launcher,
    read_launcher,
    sum_bytes_since,
)
from seamark.metaserver.services.launching.spark_submit import ALIVE, REQUEST, SparkSubmit, compute_local_limits
from tests.services.command import SEAMARK
from tests.waits import PATIENCE_S, block_until


class RecordingLauncher:
    """A launcher that records the services of its jobs, and runs nothing."""

    def __init__(self) -> None:
        self.started_services: list[str] = []

    async def run(self, job: Job, report: Report) -> dict[str, Any]:
        self.started_services.append(job.service)
        return {}

    async def close(self) -> None:
        pass


def ignore_progress(progress: JobProgress) -> None:
    pass


def build_job(size_bytes: int, launcher: str = AUTO, service: str = "compaction") -> Job:
    return Job(service, ("db",), "t", "uuid", size_bytes=size_bytes, launcher=launcher)


def build_choice(*names: str, spark_bytes: int = 100) -> LauncherChoice:
    return LauncherChoice({name: RecordingLauncher() for name in names}, spark_bytes=spark_bytes)


def test_large_rewrite_runs_on_the_cluster_or_local_spark_or_in_the_worker() -> None:
    for names, expected in (((WORKER, LOCAL, CLUSTER), CLUSTER), ((WORKER, LOCAL), LOCAL), ((WORKER,), WORKER)):
        assert build_choice(*names).find_launcher_name(build_job(100)) == expected
        assert build_choice(*names).find_launcher_name(build_job(99)) == WORKER
        assert build_choice(*names, spark_bytes=0).find_launcher_name(build_job(1 << 50)) == WORKER


def test_launcher_property_overrides_the_size_but_only_for_rewrites() -> None:
    choice = build_choice(WORKER, LOCAL, CLUSTER)
    assert choice.find_launcher_name(build_job(1, read_launcher({"seamark.services.launcher": "local"}))) == LOCAL
    assert (
        choice.find_launcher_name(build_job(1 << 40, read_launcher({"seamark.services.launcher": "worker"}))) == WORKER
    )
    assert choice.find_launcher_name(build_job(1, read_launcher({"seamark.services.launcher": "nonsense"}))) == WORKER
    assert choice.find_launcher_name(build_job(1 << 40, CLUSTER, service="expiration")) == WORKER


@pytest.mark.each_value
@pytest.mark.parametrize(
    "permitted_launchers", [(WORKER,), (WORKER, LOCAL), (WORKER, CLUSTER), (WORKER, LOCAL, CLUSTER)]
)
@pytest.mark.parametrize("launcher", [AUTO, WORKER, LOCAL, CLUSTER, "nonsense"])
async def test_launcher_property_is_ignored_unless_the_server_permits_it(
    permitted_launchers: tuple[str, ...], launcher: str
) -> None:
    launchers = {name: RecordingLauncher() for name in permitted_launchers}
    runner = LauncherChoice(launchers, spark_bytes=100)
    for size_bytes in (1, 1000):
        name = runner.find_launcher_name(build_job(size_bytes, launcher))
        is_ignored = explain_ignored_launcher(launcher, permitted_launchers) is not None
        assert is_ignored == (launcher not in (AUTO, *permitted_launchers))
        if is_ignored:
            assert name == runner.find_launcher_name(build_job(size_bytes))
        await runner.run(build_job(size_bytes, launcher), ignore_progress)
        assert launchers[name].started_services.pop() == "compaction"
        assert not any(launcher.started_services for launcher in launchers.values())


@given(memory_bytes=st.integers(3 << 30, 1 << 42))
def test_processes_of_local_spark_share_its_memory(memory_bytes: int) -> None:
    limits = compute_local_limits(memory_bytes)
    tasks = int(limits.master.removeprefix("local[").removesuffix("]"))
    assert 1 <= tasks <= len(os.sched_getaffinity(0))
    assert limits.process_bytes >= 1 << 30
    assert memory_bytes - tasks - 2 < (tasks + 2) * limits.process_bytes <= memory_bytes


def test_local_spark_without_a_limit_uses_all_cpus() -> None:
    assert compute_local_limits(0) == ("local[*]", 0)


async def test_job_fails_alone_if_its_rights_are_unknown() -> None:
    """Any other error would end the jobs of the other tables too."""

    async def issue(job: Job) -> str:
        raise RetryLater("The policy server gave no decision")

    with pytest.raises(JobFailed, match="no decision"):
        await JobLogin("http://127.0.0.1:1", issue, (), 0o022).make_request(build_job(1))


async def test_each_process_of_a_local_job_inherits_the_memory_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that replaces spark-submit starts another process, as spark-submit starts the JVM."""
    limit_bytes = 2 << 30
    program = tmp_path / "bin" / "spark-submit"
    program.parent.mkdir()
    script = "import resource; print(resource.getrlimit(resource.RLIMIT_DATA)[1])"
    # The limit is set shortly after the start.
    program.write_text(f"#!/bin/sh\nsleep 0.3\n{sys.executable} -c '{script}' >{tmp_path}/child\necho $* >&2\nexit 3\n")
    program.chmod(0o700)
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    login = JobLogin("http://127.0.0.1:1", issue=None, folders=(), umask=0o022)
    launcher = SparkSubmit("local[2]", "", login, dict(os.environ), SPARK_DRIVER, process_bytes=limit_bytes)
    with pytest.raises(JobFailed, match=r"spark\.driver\.memory=1228m"):  # 60 % of the limit.
        await launcher.run(build_job(1), ignore_progress)
    assert int((tmp_path / "child").read_text()) == limit_bytes


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_signal_quietly_ends_a_command_that_waits_for_spark(tmp_path: Path, signal_number: signal.Signals) -> None:
    """Signals may also arrive during the clean-up. The program that replaces spark-submit does not end by itself."""
    for name, text in (("spark-submit", f"echo $$ >{tmp_path}/pid; exec sleep 600"), ("java", "exit 1")):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o700)
    environment = {**os.environ, "SPARK_HOME": str(tmp_path), "PATH": f"{program.parent}:{os.environ['PATH']}"}
    environment["TMPDIR"] = str(tmp_path)
    command = [SEAMARK, "run", "compact", "db.t", "--on", "local", "--url", "http://127.0.0.1:1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment) as process:
        try:
            block_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith("\n"))
            spark_pid = int((tmp_path / "pid").read_text())
            # After the priority is set, the command waits for the end of the program.
            block_until(
                lambda: os.getpriority(os.PRIO_PROCESS, spark_pid) > os.getpriority(os.PRIO_PROCESS, process.pid)
            )
            while process.poll() is None:
                process.send_signal(signal_number)
            assert process.stdout is not None
            assert process.stdout.read() == b""
        finally:
            process.kill()
    # The command ends with a code, or with a signal that arrives while Python exits. A shell reports both alike.
    assert process.returncode in (128 + signal_number, -signal_number)
    assert list(tmp_path.glob("seamark-job-*")) == []
    with pytest.raises(ProcessLookupError):
        os.kill(spark_pid, 0)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("time_of_death", ["before the driver starts", "later"])
def test_driver_ends_when_its_server_has_died(tmp_path: Path, time_of_death: str) -> None:
    os.mkfifo(tmp_path / ALIVE)
    os.mkfifo(tmp_path / REQUEST)  # The test writes nothing to the pipe, so the driver waits until it is ended.
    alive_descriptor = os.open(tmp_path / ALIVE, os.O_RDWR | os.O_CLOEXEC)
    if time_of_death == "before the driver starts":
        os.close(alive_descriptor)
    with subprocess.Popen([sys.executable, "-c", f"from {SPARK_DRIVER} import main; main()", tmp_path]) as driver:
        try:
            if time_of_death == "later":
                block_until(lambda: _has_open(driver.pid, tmp_path / ALIVE))
                assert driver.poll() is None
                os.close(alive_descriptor)
            assert driver.wait(PATIENCE_S) == 1
        finally:
            driver.kill()


def _has_open(pid: int, path: Path) -> bool:
    open_paths = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            open_paths.add(os.readlink(descriptor))
    return str(path) in open_paths


def test_rewrite_counts_the_bytes_added_since_the_last_rewrite() -> None:
    def build_metadata(*summaries: dict[str, str]) -> TableMetadata:
        snapshots = [
            {"snapshot-id": number, "sequence-number": number, "timestamp-ms": number, "manifest-list": "file:///l"}
            | {"summary": {"operation": "append", "total-files-size": "1000", **summary}}
            | ({"parent-snapshot-id": number - 1} if number > 1 else {})
            for number, summary in enumerate(summaries, 1)
        ]
        document = {
            "format-version": 2,
            "table-uuid": "00000000-0000-4000-8000-000000000000",
            "location": "file:///t",
            "last-sequence-number": len(snapshots),
            "last-updated-ms": 9,
            "last-column-id": 1,
            "current-schema-id": 0,
            "schemas": [{"type": "struct", "schema-id": 0, "fields": []}],
            "default-spec-id": 0,
            "partition-specs": [{"spec-id": 0, "fields": []}],
            "last-partition-id": 999,
            "default-sort-order-id": 0,
            "sort-orders": [{"order-id": 0, "fields": []}],
            "snapshots": snapshots,
            "current-snapshot-id": len(snapshots),
        }
        return decode_table(json.dumps(document).encode(), "t")

    append_summary = {"added-files-size": "100"}
    assert sum_bytes_since(build_metadata(append_summary, append_summary), COMPACTED_BY) == 1000
    assert (
        sum_bytes_since(build_metadata(append_summary, {COMPACTED_BY: "seamark", **append_summary}), COMPACTED_BY) == 0
    )
    assert (
        sum_bytes_since(build_metadata({COMPACTED_BY: "seamark"}, append_summary, append_summary), COMPACTED_BY) == 200
    )
