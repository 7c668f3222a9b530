"""Tests of a writer that is killed at random moments and restarted from its checkpoint.

No batch is applied twice or lost, and no snapshot has part of a batch.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.values import At
from seamark.connector.read.scans import scan
from seamark.formats.protocol.wire import SEQUENCE_KEY
from tests.connector.write.test_upserts import create_upsert_table
from tests.faults.rigs.mortal_writer import Model, apply_batch
from tests.seeds import first_seed
from tests.services.seamark import Seamark

FIELDS = [
    {"id": 1, "name": "id", "required": True, "type": "long"},
    {"id": 2, "name": "batch", "required": False, "type": "long"},
]


def read_rows_at(client: SeamarkClient, time_point: At) -> list[tuple[int, int]]:
    rows = scan(client, "db.t", ["id", "batch"], at=time_point).to_arrow().to_pylist()
    return sorted((row["id"], row["batch"]) for row in rows)


def list_model_rows(model: Model) -> list[tuple[int, int]]:
    return sorted((key, number) for key, numbers in model.items() for number in numbers)


def run_campaign(home: Path, *, kills: int, batches: int, seed: int, version: int, is_indexed: bool) -> None:
    """Kill the writer job `kills` times, let it finish, and check the rows of each snapshot."""
    context = f"FAULT_SEED={seed} version={version} is_indexed={is_indexed}"
    rng = random.Random(seed)
    checkpoint = home / "checkpoint"
    with Seamark(home) as server, closing(IndexClient(server.base_url)) as client:
        client._request("POST", "/v1/namespaces", {}, b'{"namespace": ["db"]}')
        properties = {"seamark.index.ids": "record(id)"} if is_indexed else {}
        create_upsert_table(client, version=version, spec=[("bucket[4]", 1)], properties=properties, fields=FIELDS)
        checkpoint.write_text("0")
        argv = [
            sys.executable,
            "-m",
            "tests.faults.rigs.mortal_writer",
            server.base_url,
            "db.t",
            str(checkpoint),
            str(seed),
        ]
        kill_count = 0
        for _ in range(10 * kills):  # Some jobs end before they are killed, so there are more attempts than kills.
            job = subprocess.Popen([*argv, str(batches)], stderr=subprocess.PIPE)
            finished_batches = int(checkpoint.read_text())
            try:
                if kill_count < kills:  # The job is killed during one of its batches.
                    while job.poll() is None and int(checkpoint.read_text()) == finished_batches:
                        time.sleep(0.005)
                    time.sleep(rng.random() * 0.3)  # The kill may come at any step of a batch.
                    kill_count += job.poll() is None
                    job.kill()
                _, error = job.communicate(timeout=250)
            finally:
                job.kill()
                job.wait()
            assert job.returncode in (0, -9), (context, error.decode())
            if job.returncode == 0:
                break
        assert kill_count > kills // 2, f"{context}: the job ended too early for {kills} kills"
        assert int(checkpoint.read_text()) == batches
        check_whole_batches(client, seed, batches, context)


def check_whole_batches(client: IndexClient, seed: int, batches: int, message: str) -> None:
    """Check that each snapshot has the rows of all batches up to its sequence number, and no part of a later batch."""
    loaded_table = client.load_table("db.t", history=True)
    model: Model = {}
    next_number = 0
    snapshots = json.loads(loaded_table.metadata)["snapshots"]
    for snapshot in sorted(snapshots, key=lambda snapshot: snapshot["sequence-number"]):
        actual_rows = read_rows_at(client, At(snapshot_id=snapshot["snapshot-id"]))
        last_sequence = int(snapshot["summary"][SEQUENCE_KEY])
        assert last_sequence >= next_number, f"{message}: sequence {last_sequence} was committed twice"
        while next_number <= last_sequence:  # A batch without changes has no snapshot.
            apply_batch(model, seed, next_number)
            next_number += 1
        assert actual_rows == list_model_rows(model), f"{message}: after batch {last_sequence}"
    while next_number < batches:
        apply_batch(model, seed, next_number)
        next_number += 1
    assert read_rows_at(client, At()) == list_model_rows(model), message


@pytest.mark.slow
def test_killed_and_restarted_job_applies_each_batch_once(tmp_path: Path) -> None:
    seed = first_seed("FAULT_SEED")
    run_campaign(tmp_path, kills=3, batches=25, seed=seed, version=3, is_indexed=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("is_indexed", [False, True])
@pytest.mark.parametrize("version", [2, 3])
def test_job_killed_many_times_applies_each_batch_once(tmp_path: Path, version: int, is_indexed: bool) -> None:
    seed = first_seed("FAULT_SEED")
    run_campaign(tmp_path, kills=15, batches=150, seed=seed, version=version, is_indexed=is_indexed)
