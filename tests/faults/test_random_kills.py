"""A test that repeatedly kills one of two replicas at random moments, while clients commit through both."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.rigs.http import HttpClient
from tests.faults.rigs.writers import run_writers, wait_for_commits
from tests.seeds import first_seed
from tests.services.seamark import Seamark

ROUNDS = int(os.environ.get("FAULT_ROUNDS", "15"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_replicas_killed_at_random_moments_lose_no_acknowledged_commit(
    start_seamark: Callable[..., Seamark], postgres_url: str
) -> None:
    """FAULT_SEED repeats the moments of a run, but not the machine's own timing. FAULT_ROUNDS makes the test longer."""
    seed = first_seed("FAULT_SEED")
    print(f"random kills: FAULT_SEED={seed} FAULT_ROUNDS={ROUNDS}")
    rng = random.Random(seed)
    first_server = start_seamark("a", database=postgres_url)
    second_server = start_seamark("b", database=postgres_url, warehouse=first_server.warehouse)
    base_urls = [first_server.base_url, second_server.base_url]
    assert HttpClient(first_server.base_url).create_table()[0] == 200
    with run_writers(base_urls, "t", seed) as recorded:
        for round_number in range(ROUNDS):
            assert wait_for_commits(recorded, count=5, timeout_s=60), (seed, round_number, recorded.unexplained_answers)
            time.sleep(rng.random() * 0.3)  # The kill may come at any step of a commit.
            killed_server = rng.choice((first_server, second_server))
            killed_server.kill9()
            time.sleep(rng.random() * 0.2)  # Meanwhile, the writers use only the other server.
            killed_server.start(60)
    for url in base_urls:
        recorded.check(
            HttpClient(url),
            "t",
            lambda location: Path(location.removeprefix("file://")).is_file(),
            f"FAULT_SEED={seed}, {dict(recorded.outcomes)}",
        )
    print(f"random kills: {dict(recorded.outcomes)}")
