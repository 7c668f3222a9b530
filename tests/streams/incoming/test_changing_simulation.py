"""Tests of the gates of stream tables in a simulated fleet: rows never meet a table that has changed.

Each mutation breaks the product on purpose, and the simulation must detect it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from seamark.metaserver.log.kafka.journal_state import JournalState
from seamark.metaserver.log.kafka.kafka_log import KafkaLog
from seamark.metaserver.streams.incoming.table_gates import TableGates
from tests.seeds import first_seed
from tests.streams.simulation.changing import ChangingWorld
from tests.streams.simulation.loop import run_simulated
from tests.streams.simulation.ports import Leases
from tests.streams.simulation.world import InvariantBroken

QUICK_SEEDS = 12
SLOW_SEEDS = 5_000
MUTATION_SEEDS = 300
"""The number of seeds within which the simulation must detect a mutation."""


def run_world(seed: int, **options) -> ChangingWorld:
    """Run the simulation of appends and schema changes that the seed determines, and return its final state."""
    world = ChangingWorld(seed, **options)
    try:
        run_simulated(world.clock, world.run())
    except Exception as error:
        error.add_note(f"seed {seed}; run_world({seed}) repeats it")
        raise
    return world


def test_rows_of_a_fleet_never_meet_a_table_that_has_changed() -> None:
    worlds = [run_world(seed, appends=4) for seed in range(first_seed(), first_seed() + QUICK_SEEDS)]
    assert sum(world.changes for world in worlds) > QUICK_SEEDS
    assert sum(world.flushed_rows for world in worlds) > 10 * QUICK_SEEDS


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_rows_of_many_fleets_never_meet_a_table_that_has_changed() -> None:
    for seed in range(first_seed(), first_seed() + SLOW_SEEDS):
        run_world(seed, appends=20)


def ignore_the_gates(patch: pytest.MonkeyPatch) -> None:
    """Make the log accept rows that another process checked before a commit changed the table."""
    patch.setattr(JournalState, "_check_gates", lambda state, request: None)


def read_gate_numbers_after_the_check(patch: pytest.MonkeyPatch) -> None:
    """Make each append send gate numbers that it reads only after its rows were checked.

    The log compares these numbers, which change with each commit, to refuse rows that were checked before a commit.
    """
    append = KafkaLog.append

    async def append_with_late_numbers(log: KafkaLog, batches, producer=None, gates=None):
        await log.catch_up()
        numbers = {stream: gate.number for stream, gate in log.read_gates(gates or {}).items()}
        return await append(log, batches, producer, numbers)

    patch.setattr(KafkaLog, "append", append_with_late_numbers)


def commit_without_the_lease(patch: pytest.MonkeyPatch) -> None:
    """Let a paused process commit although its lease has ended and another process allows appends again."""
    patch.setattr(Leases, "check_fence", lambda leases, operation: None)


def open_the_gate_before_the_end_of_the_lease(patch: pytest.MonkeyPatch) -> None:
    """Allow appends to a table again while the transaction of the commit, which changes the table, may still run."""

    async def keep_lease(gates: TableGates, uuid: str, holder: str) -> None:
        pass

    patch.setattr(TableGates, "_end_lease", keep_lease)


MUTATIONS: list[tuple[Callable[[pytest.MonkeyPatch], None], int]] = [
    (ignore_the_gates, 1),
    (read_gate_numbers_after_the_check, 16),
    (commit_without_the_lease, 11),
    (open_the_gate_before_the_end_of_the_lease, 9),
]
"""For each mutation: the function that breaks the product, and the first seed to try."""


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("mutate", "start_seed"), MUTATIONS, ids=[mutation[0].__name__ for mutation in MUTATIONS])
def test_the_simulation_detects_each_mutation(
    mutate: Callable[[pytest.MonkeyPatch], None], start_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    for seed in range(start_seed, start_seed + MUTATION_SEEDS):
        try:
            run_world(seed)
        except InvariantBroken as error:
            assert "were written to a table of generation" in str(error), error  # noqa: PT017
            return
    pytest.fail("the simulation does not detect the mutation")
