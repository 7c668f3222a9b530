"""Campaigns: replicas are killed, paused, cut off from each other, their disk caches damaged and filled, at random
moments, while clients plan through all of them. No answer is wrong, and no request to a replica that runs fails while
the storage lives."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.rigs.disk import small_disk
from tests.peers.campaign import NOTHING_KEPT, Faults, Readers, run_campaign, write_tables
from tests.peers.fleet import open_fleet
from tests.peers.networks import network
from tests.seeds import first_seed
from tests.services.postgres import Postgres
from tests.services.s3 import S3

ROUNDS = 30


@pytest.mark.slow
def test_no_fault_of_a_replica_makes_an_answer_wrong_or_a_read_of_another_fail(
    tmp_path: Path, postgres: Postgres, s3: S3
) -> None:
    rng = random.Random(first_seed())
    first = {"SEAMARK_PEER_DISK_FOLDER": str(tmp_path / "disk" / "files")}
    with (
        small_disk(tmp_path / "disk") as disk,
        open_fleet(tmp_path, postgres, s3, 3, env=NOTHING_KEPT, first=first) as fleet,
    ):
        readers = Readers(fleet, write_tables(fleet))
        faults = Faults(readers, rng, disk)
        kinds = [faults.kill, faults.pause, faults.cut_off, faults.damage_disk, faults.fill_disk]
        run_campaign(readers, kinds, ROUNDS, rng)


@pytest.mark.slow
def test_replicas_on_hosts_of_their_own_lose_their_network_and_no_answer_is_wrong(
    tmp_path: Path, postgres: Postgres, s3: S3
) -> None:
    """Each has its own network namespace, so that its packets are lost, and connections are neither refused nor
    ended."""
    rng = random.Random(first_seed())
    first = {"SEAMARK_PEER_DISK_FOLDER": str(tmp_path / "disk" / "files")}
    with (
        network(3) as hosts,
        small_disk(tmp_path / "disk") as disk,
        open_fleet(tmp_path, postgres, s3, 3, env=NOTHING_KEPT, first=first, network=hosts) as fleet,
    ):
        readers = Readers(fleet, write_tables(fleet))
        faults = Faults(readers, rng, disk, hosts)
        kinds = [faults.divide, faults.disconnect, faults.kill, faults.pause, faults.damage_disk, faults.fill_disk]
        run_campaign(readers, kinds, ROUNDS, rng)
