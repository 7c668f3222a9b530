"""Tests of real Spark executors whose tasks are killed or delayed until others replace them.

Every batch is in the table once, and complete.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from seamark.connector.client.indexes import IndexClient
from tests.connector.write.test_upserts import create_upsert_table
from tests.faults.test_killed_writers import FIELDS, check_whole_batches
from tests.seeds import first_seed
from tests.services.java import find_java_17
from tests.services.seamark import Seamark

STRAGGLER_PAUSE_S = 1.5
"""The time for which a worker stops, so that Spark starts its task a second time."""
BUSY_S = 0.03
"""The time, in seconds, for which workers are observed to find those that are working."""


class ExecutorFaults:
    """Faults for the executors of one job."""

    def __init__(self, job: subprocess.Popen[bytes], rng: random.Random) -> None:
        self._job = psutil.Process(job.pid)
        self._rng = rng
        self.caused_faults: list[str] = []

    def cause_random_fault(self) -> None:
        """Kill or delay a worker, and sometimes kill a whole executor.

        An executor is killed in one of eight faults only, because Spark must start a JVM to replace it.
        """
        fault = self._rng.choices(("worker", "straggler", "executor"), (4, 3, 1))[0]
        processes = self._list_executors() if fault == "executor" else self._list_workers()
        if not processes:
            return
        process = self._rng.choice(processes)
        with suppress(psutil.Error):
            if fault == "straggler":
                process.send_signal(signal.SIGSTOP)
                time.sleep(STRAGGLER_PAUSE_S)
                process.send_signal(signal.SIGCONT)
            else:
                process.kill()
            self.caused_faults.append(fault)

    def _list_workers(self) -> list[psutil.Process]:
        """Return the Python workers that are working. Their daemons have forked them."""
        workers = [
            process
            for process in self._list_below("pyspark.daemon")
            if _has_argument(process.parent(), "pyspark.daemon")
        ]
        cpu_before_s = [_read_cpu_s(worker) for worker in workers]
        time.sleep(BUSY_S)
        return [
            worker for worker, before_s in zip(workers, cpu_before_s, strict=True) if _read_cpu_s(worker) > before_s
        ]

    def _list_executors(self) -> list[psutil.Process]:
        return list(self._list_below("CoarseGrainedExecutorBackend"))

    def _list_below(self, command: str) -> Iterator[psutil.Process]:
        with suppress(psutil.Error):
            for process in self._job.children(recursive=True):
                if _has_argument(process, command):
                    yield process


def _read_cpu_s(process: psutil.Process) -> float:
    with suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def _has_argument(process: psutil.Process | None, text: str) -> bool:
    with suppress(psutil.Error):
        return process is not None and any(text in argument for argument in process.cmdline())
    return False


def run_campaign(home: Path, *, failures: int, seed: int, version: int, is_indexed: bool, within_s: float) -> None:
    """Disturb one job until `failures` attempts of its tasks have failed, and then let it end."""
    context = f"FAULT_SEED={seed} version={version} is_indexed={is_indexed}"
    rng = random.Random(seed)
    checkpoint, scratch = home / "checkpoint", home / "scratch"
    find_java_17()
    with Seamark(home / "server") as server, closing(IndexClient(server.base_url)) as client:
        client._request("POST", "/v1/namespaces", {}, b'{"namespace": ["db"]}')
        properties = {"seamark.index.ids": "record(id)"} if is_indexed else {}
        create_upsert_table(client, version=version, spec=[("bucket[4]", 1)], properties=properties, fields=FIELDS)
        checkpoint.write_text("0")
        argv = [
            sys.executable,
            "-m",
            "tests.faults.rigs.spark_job",
            server.base_url,
            "db.t",
            str(checkpoint),
            str(seed),
        ]
        with (home / "job.log").open("wb") as log:
            job = subprocess.Popen([*argv, str(scratch)], stdout=log, stderr=log)
            faults = ExecutorFaults(job, rng)
            deadline_s = time.monotonic() + within_s
            try:
                while job.poll() is None and time.monotonic() < deadline_s:
                    time.sleep(rng.uniform(0.05, 0.5))
                    if int(checkpoint.read_text()):  # The job has committed a batch.
                        faults.cause_random_fault()
                    if len(list_failed_tasks(scratch / "events")) >= failures:
                        break
                # The job ends after a batch that begins when this file exists.
                checkpoint.with_suffix(".last").touch()
                job.wait(timeout=120)
            finally:
                _kill_job(job)
        assert job.returncode == 0, (context, (home / "job.log").read_text()[-3000:])
        check_whole_batches(client, seed, int(checkpoint.read_text()), context)
    attempts = list_task_ends(scratch / "events")
    failed_attempts = list_failed_tasks(scratch / "events")
    assert len(failed_attempts) >= failures, (
        f"{context}: {len(failed_attempts)} of {len(attempts)} tasks failed ({faults.caused_faults})"
    )
    assert any(map(_is_repeated_attempt, attempts)), (
        f"{context}: no task was run again of {len(attempts)} ({faults.caused_faults})"
    )


def list_failed_tasks(events: Path) -> list[dict[str, Any]]:
    return [
        task for task in list_task_ends(events) if task["Task End Reason"]["Reason"] not in ("Success", "TaskKilled")
    ]


def _is_repeated_attempt(attempt: dict[str, Any]) -> bool:
    """Return True if this attempt repeats a task: as a later attempt, or in a stage that runs again."""
    task_info = attempt["Task Info"]
    return bool(task_info["Attempt"] or task_info["Speculative"] or attempt["Stage Attempt ID"])


def _kill_job(job: subprocess.Popen[bytes]) -> None:
    with suppress(psutil.Error):
        for process in psutil.Process(job.pid).children(recursive=True):
            with suppress(psutil.Error):
                process.kill()
    job.kill()
    job.wait()


def list_task_ends(events: Path) -> list[dict[str, Any]]:
    """Return the ends of all task attempts in Spark's event log so far. The last line may be incomplete."""
    logs = [path.read_text() for path in events.rglob("*") if path.is_file()]
    lines = [line for text in logs for line in text[: text.rfind("\n") + 1].splitlines()]
    documents = [json.loads(line) for line in lines if '"SparkListenerTaskEnd"' in line]
    return [document for document in documents if document["Event"] == "SparkListenerTaskEnd"]


# In the fast tier, test_spark_upserts_again.py runs tasks twice, and test_killed_writers.py kills a job.
@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_each_batch_is_applied_once_when_tasks_are_killed_and_repeated(tmp_path: Path) -> None:
    seed = first_seed("FAULT_SEED")
    run_campaign(tmp_path, failures=2, seed=seed, version=3, is_indexed=True, within_s=300)


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("is_indexed", [False, True])
@pytest.mark.parametrize("version", [2, 3])
def test_each_batch_is_applied_once_with_many_failures(tmp_path: Path, version: int, is_indexed: bool) -> None:
    seed = first_seed("FAULT_SEED")
    run_campaign(tmp_path, failures=25, seed=seed, version=version, is_indexed=is_indexed, within_s=1200)
