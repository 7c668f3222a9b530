"""Stream tables and their log in a simulated world of crashes: the classes of the server, no sockets, no threads."""

from __future__ import annotations

from tests.seeds import first_seed
from tests.streams.simulation.loop import run_simulated
from tests.streams.simulation.world import World


def run_world(seed: int, **options) -> World:
    """Run one world to its end."""
    world = World(seed, **options)
    try:
        run_simulated(world.clock, world.run())
    except BaseException as error:
        error.add_note(f"seed {seed}; run_world({seed}) repeats it")
        raise
    return world


def test_rows_are_kept_once_and_in_order() -> None:
    worlds = [run_world(seed) for seed in range(first_seed(), first_seed() + 200)]
    assert sum(world.reads for world in worlds) > 2000
    assert sum(world.crashes for world in worlds) > 100
    assert sum(world.flushed_rows for world in worlds) > 5000
    assert sum(world.durable_checks for world in worlds) > 200
