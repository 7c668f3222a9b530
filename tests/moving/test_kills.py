"""Tests of an import that is killed at any point. It continues, and the catalogs are equal afterwards."""

from __future__ import annotations

import os
import random
import signal
from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest

from seamark.connector.client.indexes import IndexClient
from seamark.connector.moving.moves import Move
from seamark.connector.moving.rest_catalog import RestSource
from seamark.connector.moving.seamark_warehouse import SeamarkDestination
from tests.moving.random_names import fill_with_odd_names, list_catalog
from tests.moving.test_export import run_export
from tests.moving.test_import import run_import
from tests.seeds import examples, first_seed, mark_fast
from tests.services.command import SEAMARK
from tests.services.fork_server import fork
from tests.waits import block_until

ENTRIES = examples(400, 60)


def test_interrupted_import_continues_with_the_remaining_entries(origin: IndexClient, target: IndexClient) -> None:
    fill_with_odd_names(origin, 2, namespaces=4, entries=16)
    with closing(RestSource({"uri": origin.url}, 2)) as source:
        for moved_count in (1, 6):
            results = Move(source, SeamarkDestination(target), workers=2).run()
            assert len(list(islice(results, moved_count))) == moved_count
            results.close()
        outcomes = {result.outcome for result in Move(source, SeamarkDestination(target)).run()}
    assert outcomes == {"moved", "unchanged"}
    assert list_catalog(target) == list_catalog(origin)


def run_until_killed(command: list[str], client: IndexClient, rng: random.Random, log_path: Path) -> None:
    """Run a command, and kill it when the client's catalog has reached a random number of tables.

    A command that ends earlier is not killed.
    """

    def count_tables() -> int:
        return sum(1 for namespace in client.namespaces() for _ in client.tables(namespace))

    table_count = count_tables()
    # The limit is half of the entries, so that most kills interrupt the command.
    table_count_at_kill = rng.randrange(table_count, max(table_count + 1, ENTRIES // 2))
    with log_path.open("ab") as log:
        process = fork(command, dict(os.environ), None, log.fileno(), log.fileno())
        assert process is not None, "the fork server is enabled for tests"
        block_until(lambda: count_tables() >= table_count_at_kill or process.poll() is not None)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)


@pytest.mark.parametrize("seed", mark_fast(range(first_seed(), first_seed() + 5), 0))
def test_killed_import_of_a_random_catalog_continues(
    seed: int, origin: IndexClient, target: IndexClient, tmp_path: Path
) -> None:
    fill_with_odd_names(origin, seed, namespaces=ENTRIES // 6, entries=ENTRIES)
    rng = random.Random(seed)
    command = [SEAMARK, "import", origin.url, "--url", target.url, "--parallel", "2"]
    for _ in range(examples(4, 1)):
        run_until_killed(command, target, rng, tmp_path / "killed.log")
    result = run_import(target, origin.url)
    assert result.exit_code == 0, result.output
    assert list_catalog(target) == list_catalog(origin)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(first_seed(), first_seed() + 3))
def test_killed_export_of_a_random_catalog_changes_nothing_at_its_origin_and_continues(
    seed: int, origin: IndexClient, target: IndexClient, tmp_path: Path
) -> None:
    fill_with_odd_names(origin, seed, namespaces=ENTRIES // 6, entries=ENTRIES)
    listing_before, rng = list_catalog(origin), random.Random(seed)
    command = [SEAMARK, "export", target.url, "--url", origin.url, "--parallel", "2"]
    for _ in range(examples(4, 1)):
        run_until_killed(command, target, rng, tmp_path / "killed.log")
        assert (
            listing_before.items()
            >= {name: document for name, document in list_catalog(target).items() if name[0] != "namespace"}.items()
        )
    result = run_export(origin, target.url)
    assert result.exit_code == 0, result.output
    assert list_catalog(target) == list_catalog(origin) == listing_before
