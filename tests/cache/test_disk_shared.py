"""Tests of several processes on one folder that are killed, forked, or map files while other processes evict them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from seamark.cache.disk import DiskTier
from tests.cache.payloads import make_payload
from tests.cache.test_disk import measure_disk_bytes
from tests.cache.worker import BUDGET_BYTES, KEYS, choose_size
from tests.seeds import mark_fast

REPO = Path(__file__).resolve().parents[2]


def start_worker(folder: Path, seed: int, steps: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.cache.worker", str(folder), str(seed), str(steps)]
    process = subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.slow
def test_concurrent_processes_see_only_complete_values_within_one_budget(tmp_path: Path) -> None:
    workers = [start_worker(tmp_path, seed, 300) for seed in range(3)]
    hits = 0
    for seed, worker in enumerate(workers):
        output, _ = worker.communicate(timeout=120)
        assert worker.returncode == 0
        summary = json.loads(output)
        assert summary["wrong"] == [], f"seed {seed}"
        assert (summary["damaged"], summary["error"]) == (0, ""), f"seed {seed}"
        hits += summary["hits"]
    assert hits > 30
    assert measure_disk_bytes(tmp_path) <= BUDGET_BYTES
    tier = DiskTier(tmp_path, BUDGET_BYTES)
    tier.check_invariants()
    tier.close()


@pytest.mark.parametrize("seed", mark_fast(range(20), 1))
def test_process_killed_during_a_put_leaves_no_incomplete_value_and_no_file(tmp_path: Path, seed: int) -> None:
    source = random.Random(seed)
    survivor = DiskTier(tmp_path, BUDGET_BYTES)
    for round_ in range(4):
        worker = start_worker(tmp_path, 100 * seed + round_, 0)
        time.sleep(source.uniform(0.01, 0.4))
        worker.kill()
        worker.communicate()
        for tier in (survivor, DiskTier(tmp_path, BUDGET_BYTES)):
            stored_values = {key: tier.get(key) for key in (f"k{number}" for number in range(KEYS))}
            for key, view in stored_values.items():
                assert view is None or view == make_payload(key, choose_size(key)), (
                    f"seed {seed}, round {round_}: {key}"
                )
            assert tier.put("after", make_payload("after", 200_000)), f"seed {seed}: {tier.read_stats().last_error}"
            assert tier.read_stats().damaged == 0
        tier.check_invariants()
        tier.close()
        assert measure_disk_bytes(tmp_path) <= BUDGET_BYTES, f"seed {seed}, round {round_}"
    survivor.close()


def test_mapped_value_stays_readable_when_another_process_evicts_it(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, BUDGET_BYTES)
    tier.put("mine", make_payload("mine", 2 << 20))
    view = tier.get("mine")
    worker = start_worker(tmp_path, 1, 200)
    worker.communicate(timeout=60)
    other_tier = DiskTier(tmp_path, BUDGET_BYTES)
    assert other_tier.get("mine") is None, "the other process has evicted it"
    assert view == make_payload("mine", 2 << 20)
    assert tier.get("mine") == view
    other_tier.close()
    tier.close()


def test_forked_child_uses_the_inherited_tier(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, BUDGET_BYTES)
    tier.put("before", make_payload("before", 100_000))
    child = os.fork()
    if child == 0:
        is_readable = tier.get("before") == make_payload("before", 100_000) and tier.put("child", b"from the child")
        os._exit(0 if is_readable else 1)
    assert tier.put("parent", b"from the parent")
    assert os.waitpid(child, 0)[1] == 0
    assert tier.get("child") == b"from the child"
    assert tier.get("parent") == b"from the parent"
    tier.check_invariants()
    tier.close()
