"""Tasks of real Spark executors are killed, and held up until others run in their place: every batch is in the table
once, and whole."""

from __future__ import annotations

import json
import os
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

from connector.indexes import IndexClient
from tests.connector.test_upserts import create
from tests.faults.test_killed_writers import FIELDS, every_snapshot_is_of_whole_batches
from tests.services.java import java_17
from tests.services.seamark import Seamark

HELD_UP_S = 1.5


class Trouble:
    """What befalls the executors of one job."""

    def __init__(self, job: subprocess.Popen[bytes], source: random.Random) -> None:
        self._job = psutil.Process(job.pid)
        self._source = source
        self.befell: list[str] = []

    def strike(self) -> None:
        """One worker killed, or held up; now and then a whole executor killed."""
        what = self._source.choices(("worker", "straggler", "executor"), (4, 3, 1))[0]
        found = self._executors() if what == "executor" else self._workers()
        if not found:
            return
        victim = self._source.choice(found)
        with suppress(psutil.Error):
            if what == "straggler":
                victim.send_signal(signal.SIGSTOP)
                time.sleep(HELD_UP_S)
                victim.send_signal(signal.SIGCONT)
            else:
                victim.kill()
            self.befell.append(what)

    def _workers(self) -> list[psutil.Process]:
        """Python's, which their daemon has forked."""
        return [one for one in self._below("pyspark.daemon") if _says(one.parent(), "pyspark.daemon")]

    def _executors(self) -> list[psutil.Process]:
        return list(self._below("CoarseGrainedExecutorBackend"))

    def _below(self, what: str) -> Iterator[psutil.Process]:
        with suppress(psutil.Error):
            for one in self._job.children(recursive=True):
                if _says(one, what):
                    yield one


def _says(process: psutil.Process | None, what: str) -> bool:
    with suppress(psutil.Error):
        return process is not None and any(what in one for one in process.cmdline())
    return False


def campaign(home: Path, *, strikes: int, batches: int, seed: int, version: int, indexed: bool) -> None:
    said = f"FAULT_SEED={seed} version={version} indexed={indexed}"
    source = random.Random(seed)
    notes, scratch = home / "notes", home / "scratch"
    java_17()
    with Seamark(home / "server") as server, closing(IndexClient(server.base_url)) as client:
        client._request("POST", "/v1/namespaces", {}, b'{"namespace": ["db"]}')
        properties = {"seamark.index.ids": "record(id)"} if indexed else {}
        create(client, version=version, spec=[("bucket[4]", 1)], properties=properties, fields=FIELDS)
        notes.write_text("0")
        argv = [sys.executable, "-m", "tests.faults.spark_job", server.base_url, "db.t", str(notes), str(seed)]
        with (home / "job.log").open("wb") as log:
            job = subprocess.Popen([*argv, str(batches), str(scratch)], stdout=log, stderr=log)
            trouble = Trouble(job, source)
            try:
                while job.poll() is None and len(trouble.befell) < strikes:
                    time.sleep(source.uniform(0.05, 0.5))
                    if int(notes.read_text()):  # it has begun
                        trouble.strike()
                job.wait(timeout=400)
            finally:
                _end(job)
        assert job.returncode == 0, (said, (home / "job.log").read_text()[-3000:])
        assert int(notes.read_text()) == batches
        every_snapshot_is_of_whole_batches(client, seed, batches, said)
    ended = tasks(scratch / "events")
    failed = [one for one in ended if one["Task End Reason"]["Reason"] not in ("Success", "TaskKilled")]
    again = [one for one in ended if one["Task Info"]["Attempt"] or one["Task Info"]["Speculative"]]
    assert failed, f"{said}: no task failed of {len(ended)} ({trouble.befell})"
    assert again, f"{said}: no task was run again of {len(ended)} ({trouble.befell})"


def _end(job: subprocess.Popen[bytes]) -> None:
    with suppress(psutil.Error):
        for one in psutil.Process(job.pid).children(recursive=True):
            with suppress(psutil.Error):
                one.kill()
    job.kill()
    job.wait()


def tasks(events: Path) -> list[dict[str, Any]]:
    """The ends of all attempts, as Spark's event log tells them."""
    lines = [line for path in events.rglob("*") if path.is_file() for line in path.read_text().splitlines()]
    found = [json.loads(line) for line in lines if '"SparkListenerTaskEnd"' in line]
    return [one for one in found if one["Event"] == "SparkListenerTaskEnd"]


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_each_batch_of_a_job_whose_tasks_are_killed_and_run_again_is_there_once(tmp_path: Path) -> None:
    seed = int(os.environ.get("FAULT_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 30)
    campaign(tmp_path, strikes=3, batches=5, seed=seed, version=3, indexed=True)


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("version", [2, 3])
def test_so_it_is_with_many_strikes(tmp_path: Path, version: int, indexed: bool) -> None:
    seed = int(os.environ.get("FAULT_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 30)
    campaign(tmp_path, strikes=25, batches=60, seed=seed, version=version, indexed=indexed)
