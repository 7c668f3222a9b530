"""Plans with random indexes on random tables, compared with rows, the specification and Iceberg Java.

Each case is planned four times:

- with statistics alone, as in `test_oracle.py`;
- with indexes of some of the files (`indexing.py`): the plan keeps every matching file, names the same delete files
  (`judge.py`), and keeps no file that is pruned without indexes;
- with bloom indexes that are never local and are probed by range;
- with half of the index files damaged or missing: the plan keeps all that it keeps with intact indexes, and no file
  that it would prune without indexes.

With a bitmap of all files a plan is exact: it has exactly the files with a row that matches for some client.

A failure names its seed and case; `PLANNER_SEEDS=17 pytest tests/planner/indexes/test_indexed_oracle.py -m "not slow"`
replays seed 17, `PLANNER_SEEDS=100-300` a range.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as replace_struct

from seamark.formats.iceberg.expressions.expression import And, Bound, Or, collect_predicates
from seamark.formats.iceberg.expressions.expression_json import parse_expression
from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.index.files import remote as cold
from seamark.metaserver.index.files.registry import Registry
from seamark.metaserver.planner.indexes.probe import Probe
from seamark.metaserver.planner.scan.request import BoundScan, ScanRequest
from seamark.metaserver.planner.scan.scan_plan import ScanPlan
from seamark.metaserver.planner.view.selection import Expired, FileSelection
from seamark.metaserver.store.open import open_store
from tests.planner.lakes.cases import ScanCase, draw_cases
from tests.planner.lakes.history import write_random_lake
from tests.planner.lakes.indexing import (
    IndexedLake,
    Planning,
    create_namespace,
    damage_file,
    draw_definitions,
    draw_indexed_filter,
    index_randomly,
    list_data_files,
    open_planning,
    register_lake,
)
from tests.planner.lakes.judge import LAKES_PER_BATCH, SeamarkTask, judge, plan_with_java, plan_with_seamark
from tests.planner.lakes.lake import DataFile, Lake
from tests.planner.lakes.literal_forms import FORMS
from tests.planner.lakes.predicates import (
    IEEE_FLOAT_ORDER,
    JAVA_FLOAT_ORDER,
    SPARK_FLOAT_ORDER,
    FloatOrder,
    Names,
    draw_filter,
    expand_zeros_sometimes,
    list_columns,
    matches,
    to_json,
)
from tests.planner.lakes.tables import RecordingObjects
from tests.planner.test_oracle import read_seeds
from tests.seeds import examples
from tests.services.java_planner import JavaPlanner

CLIENTS = (IEEE_FLOAT_ORDER, JAVA_FLOAT_ORDER)
CLIENTS_WITH_NAN_ABOVE = (*CLIENTS, SPARK_FLOAT_ORDER)
"""All clients, including one for which NaN is above every number, as in Spark.

Plans for other clients may contain its rows by chance.
"""


async def run_campaign(seeds: Sequence[int], per_lake: int, folder: Path, java_planner: JavaPlanner) -> Counter[str]:
    """Check `per_lake` cases on the lake of each seed, and count the situations that occurred."""
    counts: Counter[str] = Counter()
    clock = SystemClock()
    narrow = Probe.narrow_by_disjunctions

    def narrow_and_count(probe: Probe, selection: FileSelection, is_expired: Expired) -> None:
        files_before = selection.count()
        narrow(probe, selection, is_expired)
        counts["removed by disjunctions"] += files_before - selection.count()

    async with AsyncExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(Probe, "narrow_by_disjunctions", narrow_and_count)
        store = await stack.enter_async_context(open_store(f"sqlite:///{folder / 'seamark.db'}", clock=clock))
        await create_namespace(store)
        registry = Registry(store, clock)
        for start in range(0, len(seeds), LAKES_PER_BATCH):
            chunk = seeds[start : start + LAKES_PER_BATCH]
            random_cases: list[ScanCase] = []
            lakes: dict[int, IndexedLake] = {}
            for seed in chunk:
                lake_cases = list(draw_cases(seed, folder, per_lake))
                rng = random.Random(f"indexes of {seed}")
                lake = lake_cases[0].lake
                indexed_lake = lakes[seed] = await register_lake(lake, store, registry, draw_definitions(rng, lake))
                await index_randomly(rng, indexed_lake)
                random_cases += [
                    _replace_with_indexed_values(rng, indexed_lake, case) if rng.random() < 0.7 else case
                    for case in lake_cases
                ]
            java_task = asyncio.create_task(asyncio.to_thread(plan_with_java, java_planner, random_cases))
            async with open_planning(folder, registry) as planning:
                plain_plans, indexed_plans = await _plan_cases(planning, random_cases, lakes, counts)
            range_plans = await _plan_by_ranges(folder, registry, random_cases, lakes)
            damaged_plans = await _plan_with_damage(folder, registry, random_cases, lakes, counts)
            for case, plain_plan, plan, range_plan, damaged_plan, (filtered_plan, unfiltered_plan) in zip(
                random_cases, plain_plans, indexed_plans, range_plans, damaged_plans, await java_task, strict=True
            ):
                assert set(plan) <= set(range_plan) <= set(plain_plan), (
                    f"the plan by ranges must keep at least the files of the plan by whole index files\n{case}"
                )
                assert all(plain_plan.get(path) == task for path, task in plan.items()), (
                    f"indexes must not change a planned file or add one\n{case}"
                )
                assert set(plan) <= set(damaged_plan) <= set(plain_plan), (
                    f"a plan with damaged indexes must keep at least the files of the plan with intact indexes\n{case}"
                )
                counts += judge(case, plan, filtered_plan, unfiltered_plan)
                counts["kept without indexes"] += len(plain_plan)
                counts["kept with damaged indexes"] += len(damaged_plan)
                counts["kept by ranges"] += len(range_plan)
            for seed in chunk:
                shutil.rmtree(folder / str(seed))
    return counts


def _replace_with_indexed_values(rng: random.Random, indexed_lake: IndexedLake, case: ScanCase) -> ScanCase:
    """Return the case with a filter on values that the indexes contain."""
    schema = (
        indexed_lake.lake.schemas[case.snapshot.schema_id] if case.uses_names_of_snapshot else indexed_lake.lake.schema
    )
    tree = draw_indexed_filter(rng, indexed_lake, schema)
    or_rng = random.Random(repr(tree))  # A separate generator, so that the later draws of `rng` do not change.
    if or_rng.random() < 0.15:  # Indexes evaluate one alternative, and statistics may evaluate the other.
        tree = {"type": "or", "left": tree, "right": draw_filter(or_rng, indexed_lake.lake, schema, depth=2)}
    return replace(case, filter=to_json(tree, rng.choice(FORMS)), java_filter=to_json(tree, "java"))


Plans = list[dict[str, SeamarkTask]]


async def _plan_cases(
    planning: Planning, cases: Sequence[ScanCase], lakes: dict[int, IndexedLake], counts: Counter[str]
) -> tuple[Plans, Plans]:
    """Return the plans of each case without indexes, and the plans with indexes."""
    plain_plans, indexed_plans = [], []
    for case in cases:
        plain_plans.append(await plan_with_seamark(planning.planner, case))
        indexed_plans.append(await plan_with_seamark(planning.planner, case, await lakes[case.lake.seed].build_entry()))
    for lake in lakes.values():
        for definition in lake.definitions:
            usage = planning.usage.find_usage(lake.metadata.table_uuid, definition.id)
            if usage is not None:
                counts[f"plans with {definition.kind}"] += usage.plans
                counts[f"removed by {definition.kind}"] += usage.files_removed
    assert (planning.indexes.failures, planning.indexes.quarantined) == (0, 0)
    return plain_plans, indexed_plans


async def _plan_by_ranges(
    folder: Path, registry: Registry, cases: Sequence[ScanCase], lakes: dict[int, IndexedLake]
) -> Plans:
    """Return the plans of a server that reads index files only by ranges. Reads of whole index files never end."""
    live_locations = {file.location for lake in lakes.values() for file in await lake.list_live_files()}

    class ObjectsWithUnreachableFiles(RecordingObjects):
        async def read(self, location: str, *, limit_bytes: int | None = None) -> bytes:
            if location in live_locations:
                await asyncio.Event().wait()
            return await super().read(location, limit_bytes=limit_bytes)

    with pytest.MonkeyPatch.context() as patch:
        # The first read has only a part of the header of an index file, so the planner reads further ranges.
        patch.setattr(cold, "_FIRST_READ_BYTES", 64)
        async with open_planning(
            folder, registry, wrap=ObjectsWithUnreachableFiles, index_whole_bytes=0, index_wait_s=0.5
        ) as planning:
            return [
                await plan_with_seamark(planning.planner, case, await lakes[case.lake.seed].build_entry())
                for case in cases
            ]


async def _plan_with_damage(
    folder: Path, registry: Registry, cases: Sequence[ScanCase], lakes: dict[int, IndexedLake], counts: Counter[str]
) -> Plans:
    """Return the plans of a server that finds half of the index files damaged or missing."""
    for seed, lake in lakes.items():
        rng = random.Random(f"damage of {seed}")
        for file in await lake.list_live_files():
            if rng.random() < 0.5:
                counts[f"index files {damage_file(rng, file.location)}"] += 1
    async with open_planning(folder, registry) as planning:
        results = [
            await plan_with_seamark(planning.planner, case, await lakes[case.lake.seed].build_entry()) for case in cases
        ]
        counts["quarantined"] += planning.indexes.quarantined
    return results


async def test_plans_with_indexes_keep_all_matching_files_even_when_indexes_are_damaged(
    tmp_path: Path, java: JavaPlanner
) -> None:
    count = examples(30, 11)
    counts = await run_campaign(read_seeds(range(count)), 8, tmp_path, java)
    print(dict(counts))
    if "PLANNER_SEEDS" not in os.environ:
        assert counts["kept without indexes"] > counts["kept with damaged indexes"] + 5
        assert counts["kept with damaged indexes"] > counts["kept"] + 5
        assert min(counts[f"removed by {kind}"] for kind in ("bloom", "bitmap", "record")) > count / 12
        assert counts["quarantined"] > 20
        assert counts["removed by disjunctions"] > 0
        assert counts["kept"] <= counts["kept by ranges"] < counts["kept"] + 20


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("start", range(20_000, 22_000, 500))
async def test_plans_with_indexes_keep_all_matching_files_in_thousands_of_cases(
    start: int, tmp_path: Path, java: JavaPlanner
) -> None:
    counts = await run_campaign(range(start, start + 500), 10, tmp_path, java)
    print(f"seeds from {start}: {dict(counts)}")
    assert counts["case"] == 5000


# Exactness


def define_exact_bitmaps(lake: Lake) -> dict[str, str]:
    """Return properties that define a bitmap on each column of the current schema whose values are known in all files.

    The values of a column with a default are not known in files that were written before the column was added.
    """
    files = list_data_files(lake)
    return {
        f"seamark.index.b{column.id}": json.dumps(
            {"kind": "bitmap", "columns": [f"`{column.name.replace('`', '``')}`"], "field-ids": [column.id]}
        )
        for column in lake.schema.leaves().values()
        if column.default is None or all(column.id in file.written_columns for file in files)
    }


def draw_conditions(rng: random.Random, lake: Lake, count: int) -> Iterator[list[Any]]:
    """Yield conditions on one or two columns, as JSON.

    A condition is a predicate, or an AND or OR of two predicates with the literals 0.0 and -0.0.
    """
    # The name of an index ends with b and the id of its column.
    covered_columns = {name.rpartition("b")[2] for name in define_exact_bitmaps(lake)}
    while count:  # Conditions without an exact answer, or with a repeated column, are drawn again.
        conditions = [_draw_condition(rng, lake, covered_columns) for _ in range(rng.choice([1, 2]))]
        if None not in conditions and len(set().union(*map(list_columns, conditions))) == len(conditions):
            count -= 1
            yield conditions


def _draw_condition(rng: random.Random, lake: Lake, covered_columns: set[str]) -> Any | None:
    """Return a random predicate as JSON, or None if no index can answer it exactly."""
    tree = draw_filter(rng, lake, lake.schema, depth=3)
    if not isinstance(tree, dict) or not isinstance(tree["term"], str):
        return None
    column = Names(lake.schema)[tree["term"]]
    by_order = column.kind == "uuid" and tree["type"] in ("lt", "lt-eq", "gt", "gt-eq")
    # Clients order UUIDs in two ways, and indexes support neither.
    if str(column.id) not in covered_columns or by_order:
        return None
    return to_json(expand_zeros_sometimes(rng, tree), rng.choice(FORMS))


def find_matching_files(
    lake: Lake, files: Sequence[DataFile], predicates: Sequence[Any], clients: Sequence[FloatOrder]
) -> set[str]:
    """Return the paths of the files with a row that satisfies each predicate for some client.

    The client can differ between the predicates.
    """
    names = Names(lake.schema)
    return {
        file.path
        for file in files
        if any(
            all(any(matches(item, row, names, float_order) for float_order in clients) for item in predicates)
            for row in lake.read_rows(file)
        )
    }


async def run_exact_campaign(seeds: Sequence[int], per_lake: int, folder: Path) -> Counter[str]:
    counts: Counter[str] = Counter()
    clock = SystemClock()
    async with open_store(f"sqlite:///{folder / 'seamark.db'}", clock=clock) as store:
        await create_namespace(store)
        registry = Registry(store, clock)
        async with open_planning(folder, registry) as planning:
            for seed in seeds:
                lake = write_random_lake(seed, folder / str(seed))
                properties = define_exact_bitmaps(lake)
                if len(properties) > 1:
                    indexed_lake = await register_lake(lake, store, registry, properties)
                    for definition in indexed_lake.definitions:
                        entries = list(indexed_lake.build_entries(definition, list_data_files(lake)))
                        assert len(entries) == len(list_data_files(lake))
                        middle = len(entries) // 2
                        for part in (entries[:middle], entries[middle:]):
                            if part:
                                await indexed_lake.add(definition, part)
                    await _check_exact_plans(planning, indexed_lake, per_lake, counts)
                shutil.rmtree(folder / str(seed))
    return counts


async def _check_exact_plans(planning: Planning, indexed_lake: IndexedLake, count: int, counts: Counter[str]) -> None:
    lake, entry = indexed_lake.lake, await indexed_lake.build_entry()
    rng = random.Random(~lake.seed)
    for conditions in draw_conditions(rng, lake, count):
        snapshot = rng.choice(list(lake.snapshots.values()))
        filter_json = (
            conditions[0] if len(conditions) == 1 else {"type": "and", "left": conditions[0], "right": conditions[1]}
        )
        has_nan_above = rng.random() < 0.5
        request = ScanRequest(filter=parse_expression(filter_json), snapshot_id=snapshot.id)
        bound = BoundScan.bind(indexed_lake.metadata, request).bound
        request = replace_struct(request, nan_above=has_nan_above)
        scan = await planning.planner.bind_and_plan(indexed_lake.metadata, request, entry)
        predicate_count = len(collect_predicates(bound))
        # Binding removes a predicate that is always true or false for its type. Such filters are not compared here.
        # A condition with the member `left` has two predicates.
        if isinstance(bound, Bound | And | Or) and predicate_count != sum(1 + ("left" in item) for item in conditions):
            counts["decided by its type"] += 1
            continue
        paths = {_find_path(scan, row) for row in scan.entry_ids.tolist()}
        context = f"seed {lake.seed}, snapshot {snapshot.id}: {filter_json}\n{scan.bound}"
        clients = CLIENTS_WITH_NAN_ABOVE if has_nan_above else CLIENTS
        assert find_matching_files(lake, snapshot.data_files, conditions, clients) <= paths, context
        counts["for Spark"] += has_nan_above
        if predicate_count:
            assert paths <= find_matching_files(lake, snapshot.data_files, conditions, CLIENTS_WITH_NAN_ABOVE), context
        counts["case"] += 1
        counts["two columns"] += len(conditions) > 1
        counts["left out by rows"] += sum(stage.name == "bitmap_rows" for stage in scan.stages)
        counts["kept"] += len(paths)
        counts["dropped"] += len(snapshot.data_files) - len(paths)


def _find_path(scan: ScanPlan, row: int) -> str:
    block, row_in_block = scan.view.locate(row)
    path = block.read_text("file_path", row_in_block)
    assert path is not None
    return path


async def test_plan_is_exact_when_bitmaps_cover_all_files(tmp_path: Path) -> None:
    count = examples(30, 4)
    counts = await run_exact_campaign(read_seeds(range(500, 500 + count)), 15, tmp_path)
    print(dict(counts))
    if "PLANNER_SEEDS" not in os.environ:
        assert counts["case"] > 7 * count
        assert min(counts["two columns"], counts["kept"], counts["dropped"]) > 1.5 * count


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_plan_is_exact_when_bitmaps_cover_all_files_in_thousands_of_cases(tmp_path: Path) -> None:
    counts = await run_exact_campaign(range(30_000, 30_600), 20, tmp_path)
    print(dict(counts))
    assert counts["case"] > 8000
