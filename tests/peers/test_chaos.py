"""Campaigns of faults in replicas while clients plan.

Replicas are killed, paused and cut off. Their disk caches are damaged and filled. No answer is wrong, and no request to
a running replica fails while the storage is available.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.rigs.disk import mount_small_disk
from tests.peers.campaign import WITHOUT_MEMORY_CACHES, FleetFaults, PlanReaders, run_campaign, write_tables
from tests.peers.fleet import open_fleet
from tests.peers.networks import open_network
from tests.seeds import first_seed
from tests.services.postgres import Postgres
from tests.services.s3 import S3

ROUNDS = 30


@pytest.mark.slow
def test_no_fault_of_a_replica_causes_a_wrong_answer_or_a_failed_read_of_another(
    tmp_path: Path, postgres: Postgres, s3: S3
) -> None:
    rng = random.Random(first_seed())
    first_settings = {"SEAMARK_PEER_DISK_FOLDER": str(tmp_path / "disk" / "files")}
    with (
        mount_small_disk(tmp_path / "disk") as disk,
        open_fleet(tmp_path, postgres, s3, 3, env=WITHOUT_MEMORY_CACHES, first_env=first_settings) as fleet,
    ):
        readers = PlanReaders(fleet, write_tables(fleet))
        faults = FleetFaults(readers, rng, disk)
        kinds = [faults.kill, faults.pause, faults.isolate, faults.damage_disk, faults.fill_disk]
        run_campaign(readers, kinds, ROUNDS, rng)


@pytest.mark.slow
def test_replicas_that_lose_their_network_cause_no_wrong_answer(tmp_path: Path, postgres: Postgres, s3: S3) -> None:
    """Each replica has its own network namespace. During a fault, its packets are lost, as on a broken network.

    A connection then neither ends nor is refused, so the other side must notice the fault by its timeouts.
    """
    rng = random.Random(first_seed())
    first_settings = {"SEAMARK_PEER_DISK_FOLDER": str(tmp_path / "disk" / "files")}
    with (
        open_network(3) as network,
        mount_small_disk(tmp_path / "disk") as disk,
        open_fleet(
            tmp_path, postgres, s3, count=3, env=WITHOUT_MEMORY_CACHES, first_env=first_settings, network=network
        ) as fleet,
    ):
        readers = PlanReaders(fleet, write_tables(fleet))
        faults = FleetFaults(readers, rng, disk, network)
        kinds = [faults.divide, faults.disconnect, faults.kill, faults.pause, faults.damage_disk, faults.fill_disk]
        run_campaign(readers, kinds, ROUNDS, rng)
