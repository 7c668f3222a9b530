"""Tests of keyed tables in a simulated world. A reader gets the replay of the log.

Each mutation breaks the product on purpose, and the simulation must detect it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from seamark.metaserver.streams.stream_table import FreshRows, StreamTable
from tests.seeds import first_seed
from tests.streams.simulation.keyed import KeyedCatalog, KeyedWorld
from tests.streams.simulation.loop import run_simulated
from tests.streams.simulation.ports import RemoteTables
from tests.streams.simulation.world import InvariantBroken

QUICK_SEEDS = 40
SLOW_SEEDS = 5_000
MUTATION_SEEDS = 300
"""The number of seeds within which the simulation must detect a mutation."""


def run_world(seed: int, **options) -> KeyedWorld:
    """Run the simulation of a table with a key that the seed determines, and return its final state."""
    world = KeyedWorld(seed, **options)
    try:
        run_simulated(world.clock, world.run())
    except Exception as error:
        error.add_note(f"seed {seed}; run_world({seed}) repeats it")
        raise
    return world


def test_readers_see_the_replay_of_the_log() -> None:
    worlds = [run_world(seed, appends=4) for seed in range(first_seed(), first_seed() + QUICK_SEEDS)]
    assert sum(world.replays for world in worlds) > 10 * QUICK_SEEDS
    assert sum(world.crashes for world in worlds) > QUICK_SEEDS / 2
    assert sum(world.compactions for world in worlds) > QUICK_SEEDS / 2
    assert sum(world.flushed_rows for world in worlds) > 20 * QUICK_SEEDS
    assert {world.is_fleet for world in worlds} == {False, True}


@pytest.mark.parametrize("seed", [52])
def test_readers_see_the_replay_of_the_log_in_worlds_that_once_failed(seed: int) -> None:
    run_world(seed, appends=20)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_readers_see_the_replay_of_the_log_in_many_worlds() -> None:
    for seed in range(first_seed(), first_seed() + SLOW_SEEDS):
        run_world(seed, appends=20)


def flush_without_deletes(patch: pytest.MonkeyPatch) -> None:
    """Make a flush add rows without deleting the rows that they replace."""
    commit = RemoteTables.commit

    async def commit_without_deletes(
        tables: RemoteTables, entry, metadata, files, ranges, deletes=None, index_files=()
    ):
        empty_deletes = None if deletes is None else deletes._replace(content_files=[b"{}"])
        return await commit(tables, entry, metadata, files, ranges, empty_deletes)

    patch.setattr(RemoteTables, "commit", commit_without_deletes)


def commit_deletes_of_an_older_version(patch: pytest.MonkeyPatch) -> None:
    """Make a flush delete rows in files that a compaction has replaced since."""
    commit_keyed = KeyedCatalog.commit_keyed

    def commit(catalog: KeyedCatalog, *args) -> None:
        catalog.checks_versions = False
        commit_keyed(catalog, *args)

    patch.setattr(KeyedCatalog, "commit_keyed", commit)


def take_earlier_rows_for_later_ones(patch: pytest.MonkeyPatch) -> None:
    """Make a flush or a read keep the earlier of two rows with the same key."""
    read_slices = StreamTable._read_slices
    patch.setattr(StreamTable, "_read_slices", lambda table, *args: read_slices(table, *args)[::-1])


def order_fresh_parts_backwards(patch: pytest.MonkeyPatch) -> None:
    """Make an earlier fresh file delete rows of a later one. Fresh files have rows that are not flushed yet."""
    get_fresh_rows = StreamTable.get_fresh_rows

    async def reverse(table: StreamTable, flushed_offsets) -> FreshRows:
        rows = await get_fresh_rows(table, flushed_offsets)
        return rows._replace(parts=rows.parts[::-1])

    patch.setattr(StreamTable, "get_fresh_rows", reverse)


def plan_deletes_with_earlier_metadata(patch: pytest.MonkeyPatch) -> None:
    """Let a plan compute its deletes for the files in the metadata of the previous call, not of its own metadata."""
    store = StreamTable.store_deletes
    earlier_metadata: dict[StreamTable, object] = {}

    async def store_stale(table: StreamTable, keyed_rows, entry, metadata, *, fresh: bool):
        last_metadata, earlier_metadata[table] = earlier_metadata.get(table, metadata), metadata
        return await store(table, keyed_rows, entry, last_metadata if fresh else metadata, fresh=fresh)

    patch.setattr(StreamTable, "store_deletes", store_stale)


def forget_the_last_append(patch: pytest.MonkeyPatch) -> None:
    """Make each file that is written for a range of offsets omit the last append of the range.

    A single append stays.
    """
    read_slices = StreamTable._read_slices

    def omit_last_slice(table: StreamTable, *args):
        rows = read_slices(table, *args)
        return rows[:-1] or rows

    patch.setattr(StreamTable, "_read_slices", omit_last_slice)


MUTATIONS: list[tuple[Callable[[pytest.MonkeyPatch], None], str, int]] = [
    (flush_without_deletes, "a key has several rows", 1),
    (commit_deletes_of_an_older_version, "a key has several rows|not the replay", 1),
    (take_earlier_rows_for_later_ones, "not the replay", 1),
    (order_fresh_parts_backwards, "not the replay", 1),
    (plan_deletes_with_earlier_metadata, "a key has several rows|not the replay|which is not in it", 1),
    (forget_the_last_append, "not the replay", 1),
]
"""For each mutation: the function that breaks the product, the message of the simulation, and the first seed to try."""


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("mutate", "message", "start_seed"), MUTATIONS, ids=[mutation[0].__name__ for mutation in MUTATIONS]
)
def test_the_simulation_detects_each_mutation(
    mutate: Callable[[pytest.MonkeyPatch], None], message: str, start_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    for seed in range(start_seed, start_seed + MUTATION_SEEDS):
        try:
            run_world(seed)
        except InvariantBroken as error:
            assert re.search(message, str(error)), error  # noqa: PT017
            return
    pytest.fail("the simulation does not detect the mutation")
