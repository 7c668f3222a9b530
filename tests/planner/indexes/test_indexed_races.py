"""Plans while index files are added, merged, damaged, quarantined and deleted: no plan fails, and each plan is right.

The planner under test has its own registry, like a worker beside another worker that changes the registry.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from seamark.formats.iceberg.expressions.expression_json import parse_expression
from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import CommitConflict
from seamark.metaserver.index.files.registry import Registry
from seamark.metaserver.planner.scan.request import ScanRequest
from seamark.metaserver.store.model import IndexFileState, RegisteredIndexFile
from seamark.metaserver.store.open import open_store
from tests.planner.lakes.indexing import IndexedTable, Planning, create_namespace, damage_file, open_planning
from tests.planner.lakes.tables import Table, list_file_numbers
from tests.seeds import examples

FILES = 24
KINDS = ("bloom", "bitmap", "record")

PLANS_MIN = 10
"""The least number of plans, also on a busy machine that makes fewer during the changes."""


def draw_filter(rng: random.Random) -> tuple[Any, set[int]]:
    """Return a filter, and the numbers of the files with a matching row.

    File n contains the even numbers from 10 n to 10 n + 8.
    """
    values = sorted({rng.randrange(10 * FILES) for _ in range(rng.choice([1, 2, 5]))})
    if len(values) == 1:
        filter: Any = {"type": "eq", "term": "id", "value": values[0]}
    else:
        filter = {"type": "in", "term": "id", "values": values}
    file_numbers = {value // 10 for value in values if value % 2 == 0}
    if rng.random() < 0.3:  # The filter requires two values of one column, so no row matches.
        other_value = 2 * rng.randrange(5 * FILES)
        filter = {"type": "and", "left": filter, "right": {"type": "eq", "term": "id", "value": other_value}}
        file_numbers = {other_value // 10} if other_value in values else set()
    return filter, file_numbers


async def plan_until_ended(
    planning: Planning, table: IndexedTable, rng: random.Random, end_event: asyncio.Event
) -> int:
    """Plan until `end_event` is set, and more than PLANS_MIN times. Return the number of plans.

    Raises:
        AssertionError: A plan lacks a file with a matching row.
    """
    count = 0
    while not end_event.is_set() or count <= PLANS_MIN:
        filter, expected = draw_filter(rng)
        request = ScanRequest(filter=parse_expression(filter))
        scan = await planning.planner.bind_and_plan(table.metadata, request, await table.build_entry())
        assert expected <= set(list_file_numbers(scan)), filter
        count += 1
        if rng.random() < 0.3:
            await asyncio.sleep(0)
    return count


def get_path(file: RegisteredIndexFile) -> Path:
    return Path(file.location.removeprefix("file://"))


async def change_index_files(table: IndexedTable, rng: random.Random, change_count: int) -> None:
    """Build, replace, damage, quarantine and delete index files, one change after another."""
    for _ in range(change_count):
        kind = rng.choice(KINDS)
        live_index_files = [
            file for file in await table.list_files() if file.state is IndexFileState.LIVE and file.kind == kind
        ]
        chosen_files = rng.sample(live_index_files, min(len(live_index_files), rng.randint(0, 3)))
        match rng.choice(["add", "add", "replace", "replace", "damage", "quarantine", "clean"]):
            case "add":
                await table.index(kind, rng.sample(range(FILES), rng.randint(1, FILES)))
            case "replace":
                try:
                    await table.index(kind, range(FILES), remove=[file.location for file in chosen_files])
                except CommitConflict:  # A concurrent plan has quarantined one of the files.
                    continue
                for file in chosen_files:
                    get_path(file).unlink(missing_ok=True)
            case "damage":
                for file in chosen_files:
                    if get_path(file).exists():
                        damage_file(rng, file.location)
            case "quarantine":
                for file in chosen_files:
                    await table.registry.quarantine_file(file.uuid, file.location, "reported by the test")
            case "clean":
                for file in await table.list_files():
                    if file.state is not IndexFileState.LIVE:
                        await table.registry.forget(file.uuid, file.location)
                        get_path(file).unlink(missing_ok=True)
        await asyncio.sleep(rng.choice([0, 0.002, 0.01]))


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
async def test_plans_during_index_changes_stay_complete(seed: int, tmp_path: Path) -> None:
    await _run_race(seed, tmp_path, examples(60, 12))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(10, 20))
async def test_plans_during_thousands_of_index_changes_stay_complete(seed: int, tmp_path: Path) -> None:
    await _run_race(seed, tmp_path, 600)


async def _run_race(seed: int, folder: Path, change_count: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with AsyncExitStack() as stack:
        clock = SystemClock()
        store = await stack.enter_async_context(open_store(f"sqlite:///{folder / 's.db'}", clock=clock))
        await create_namespace(store)
        new_table = Table(folder / "t")
        new_table.commit(
            1,
            [new_table.write_manifest("a", range(FILES // 2)), new_table.write_manifest("b", range(FILES // 2, FILES))],
        )
        table = IndexedTable(new_table, store, Registry(store, clock), {kind: f"{kind}(id)" for kind in KINDS})
        await table.register()
        options: dict[str, Any] = {"index_wait_s": 0.05, "index_memory_bytes": 20_000, "index_disk_bytes": 4 << 20}
        workers = [
            await stack.enter_async_context(
                open_planning(folder, Registry(store, clock), **options, home=folder / name)
            )
            for name in ("one", "two")
        ]
        end_event = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            planning_tasks = [
                group.create_task(plan_until_ended(worker, table, random.Random(f"{seed} {number}"), end_event))
                for number, worker in enumerate((*workers, *workers))
            ]
            await change_index_files(table, rng, change_count)
            end_event.set()
        counts = [task.result() for task in planning_tasks]
        assert min(counts) > PLANS_MIN
        ids = [definition.id for definition in table.definitions.values()]
        usages = [worker.usage.find_usage(table.metadata.table_uuid, item) for worker in workers for item in ids]
        assert sum(item.files_removed for item in usages if item is not None) > 0
        # Plans must also be right after the changes, with the remaining index files.
        for _ in range(50):
            filter, expected = draw_filter(rng)
            scan = await workers[0].planner.bind_and_plan(
                table.metadata, ScanRequest(filter=parse_expression(filter)), await table.build_entry()
            )
            assert expected <= set(list_file_numbers(scan))
            workers[0].planner.check_invariants()
