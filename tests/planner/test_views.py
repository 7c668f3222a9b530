"""Tests of views in memory: how often manifests are decoded, the memory budget, and concurrent waiters.

The oracle of every answer is the hand-made table: file n holds the ids from 10 n to 10 n + 9.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import threading
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest

from seamark.formats.iceberg.expressions.expression_json import parse_expression
from seamark.metaserver.access.principal import set_principal
from seamark.metaserver.index.blocks.block import Block
from seamark.metaserver.planner.answer.answer import ScanTaskWriter
from seamark.metaserver.planner.indexes.coverage import compute_view_file_ids
from seamark.metaserver.planner.lookup.lookup import find_files_by_prefix
from seamark.metaserver.planner.plan.cached_views import CachedView
from seamark.metaserver.planner.plan.planner import Planner
from seamark.metaserver.planner.scan.request import ScanRequest
from seamark.metaserver.planner.scan.scan_plan import ScanPlan
from tests.api.client import Api
from tests.api.plans.planned import append_files, build_data_file
from tests.planner.lakes.manifests import Manifest
from tests.planner.lakes.tables import (
    RecordingObjects,
    Table,
    build_day_filter,
    build_filter_of_files,
    list_file_numbers,
    open_test_planner,
    plan_file_numbers,
)
from tests.seeds import examples
from tests.server.rig import run_server
from tests.support.wrapper_capture import WrapperCapture
from tests.waits import until

DAYS, PER_DAY = 8, 10


def create_filled_table(folder: Path, *, days: int = DAYS, per_day: int = PER_DAY) -> tuple[Table, list[Manifest]]:
    """Return a table with a manifest for each day, of `per_day` files."""
    table = Table(folder)
    manifests = [
        table.write_manifest(f"m{day}", range(day * per_day, (day + 1) * per_day), day=day) for day in range(days)
    ]
    table.commit(1, manifests)
    return table, manifests


async def plan_table(planner: Planner, table: Table, filter: Any = True, **request: Any) -> ScanPlan:
    return await planner.bind_and_plan(table.metadata, ScanRequest(filter=parse_expression(filter), **request))


async def test_concurrent_plans_of_a_cold_table_decode_each_manifest_once(tmp_path: Path) -> None:
    table, _ = create_filled_table(tmp_path / "t")
    capture = WrapperCapture(RecordingObjects)
    async with open_test_planner(tmp_path, capture) as planner:
        ranges = [(n % 40, n % 40 + n % 23) for n in range(60)]
        plans = await asyncio.gather(
            *(plan_file_numbers(planner, table.metadata, build_filter_of_files(low, high)) for low, high in ranges),
            *(plan_file_numbers(planner, table.metadata) for _ in range(20)),
            *(plan_file_numbers(planner, table.metadata, build_day_filter(n % DAYS)) for n in range(20)),
        )
        assert planner.read_stats().decoded == DAYS
        assert sorted(capture.wrapper.reads) == sorted(["snap-1.avro", *(f"m{day}.avro" for day in range(DAYS))])
    for (low, high), numbers in zip(ranges, plans[:60], strict=True):
        assert numbers == list(range(low, high + 1))
    assert all(numbers == list(range(80)) for numbers in plans[60:80])
    assert plans[80:] == [list(range(n % DAYS * 10, n % DAYS * 10 + 10)) for n in range(20)]


async def test_plan_after_a_commit_decodes_only_the_new_manifests(tmp_path: Path) -> None:
    table, manifests = create_filled_table(tmp_path / "t")
    async with open_test_planner(tmp_path) as planner:
        assert await plan_file_numbers(planner, table.metadata) == list(range(80))
        assert planner.read_stats().decoded == DAYS
        for snapshot_id in range(2, 6):
            manifests.append(table.write_manifest(f"n{snapshot_id}", [80 + snapshot_id], snapshot_id=snapshot_id))
            table.commit(snapshot_id, manifests)
            assert (await plan_file_numbers(planner, table.metadata))[80:] == [
                80 + number for number in range(2, snapshot_id + 1)
            ]
            assert planner.read_stats().decoded == DAYS + snapshot_id - 1
        stats = planner.read_stats()
        assert stats.blocks == DAYS + 4
        assert stats.views == 5
        # Time travel, and a branch whose manifests differ from main's: blocks in memory must not be decoded again.
        assert await plan_file_numbers(planner, table.metadata, snapshot_id=2) == [*range(80), 82]
        table.commit(9, [manifests[-1], manifests[3]])
        assert await plan_file_numbers(planner, table.metadata) == [85, *range(30, 40)]
        appended_numbers = await plan_file_numbers(planner, table.metadata, start_snapshot_id=2, end_snapshot_id=4)
        assert appended_numbers == [83, 84]
        assert planner.read_stats().decoded == DAYS + 4


async def test_selective_filter_on_a_cold_snapshot_reads_only_needed_manifests(
    tmp_path: Path,
) -> None:
    table, _ = create_filled_table(tmp_path / "t")
    async with open_test_planner(tmp_path) as partial_planner, open_test_planner(tmp_path) as full_planner:
        full_plan = await plan_table(full_planner, table)
        for planned_days, day in enumerate((6, 2, 5), start=1):
            partial_plan, complete_plan = (
                await plan_table(partial_planner, table, build_day_filter(day)),
                await plan_table(full_planner, table, build_day_filter(day)),
            )
            assert partial_planner.read_stats().decoded == planned_days
            assert list_file_numbers(partial_plan) == list(range(day * 10, day * 10 + 10))
            assert (
                partial_plan.entry_ids.tolist()
                == complete_plan.entry_ids.tolist()
                == full_plan.entry_ids.tolist()[day * 10 : day * 10 + 10]
            )
            assert partial_plan.considered == complete_plan.considered == 80
        assert full_planner.read_stats().decoded == DAYS
        assert await plan_file_numbers(partial_planner, table.metadata) == list(range(80))
        assert partial_planner.read_stats().decoded == DAYS, "blocks of earlier partial views must be reused"


async def test_repeated_plan_is_served_from_the_cache(tmp_path: Path) -> None:
    table, _ = create_filled_table(tmp_path / "t")
    async with open_test_planner(tmp_path) as planner:
        first_plan = await plan_table(planner, table, build_filter_of_files(3, 44))
        repeated_plan = await plan_table(planner, table, build_filter_of_files(3, 44))
        assert repeated_plan.entry_ids.tolist() == first_plan.entry_ids.tolist()
        assert list_file_numbers(repeated_plan) == list(range(3, 45))
        assert planner.read_stats().plan_hits == 1
        assert list_file_numbers(await plan_table(planner, table, build_filter_of_files(3, 45))) == list(range(3, 46))
        assert planner.read_stats().plan_hits == 1


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("held_file", ["snap-1.avro", "m3.avro"])
async def test_cancelled_waiter_does_not_affect_other_waiters(tmp_path: Path, held_file: str) -> None:
    table, _ = create_filled_table(tmp_path / "t")
    capture = WrapperCapture(RecordingObjects)
    async with open_test_planner(tmp_path, capture) as planner:
        storage = capture.wrapper
        storage.hold = held_file
        waiting_tasks = [
            asyncio.create_task(plan_file_numbers(planner, table.metadata, build_filter_of_files(n, n + 1)))
            for n in range(6)
        ]
        while not storage.is_holding:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        waiting_tasks[0].cancel()
        waiting_tasks[3].cancel()
        await asyncio.sleep(0.01)
        storage.resume()
        results = await asyncio.gather(*waiting_tasks, return_exceptions=True)
        assert [isinstance(result, asyncio.CancelledError) for result in results] == [n in (0, 3) for n in range(6)]
        assert [result for n, result in enumerate(results) if n not in (0, 3)] == [[n, n + 1] for n in (1, 2, 4, 5)]
        assert planner.read_stats().decoded == DAYS
        assert sorted(storage.reads) == sorted(["snap-1.avro", *(f"m{day}.avro" for day in range(DAYS))])


async def test_next_plan_starts_again_when_all_waiters_were_cancelled(tmp_path: Path) -> None:
    table, _ = create_filled_table(tmp_path / "t")
    capture = WrapperCapture(RecordingObjects)
    async with open_test_planner(tmp_path, capture) as planner:
        capture.wrapper.hold = "m3.avro"
        waiting_tasks = [asyncio.create_task(plan_file_numbers(planner, table.metadata)) for _ in range(3)]
        await until(lambda: capture.wrapper.is_holding)
        for item in waiting_tasks:
            item.cancel()
        capture.wrapper.resume()
        assert await plan_file_numbers(planner, table.metadata) == list(range(80))
        assert all(
            isinstance(result, asyncio.CancelledError)
            for result in await asyncio.gather(*waiting_tasks, return_exceptions=True)
        )
        assert planner.read_stats().decoded <= 2 * DAYS
        planner.check_invariants()


# The memory budget


def list_live_blocks(folder: Path) -> list[Block]:
    """Return the live blocks of tables in this folder; blocks of earlier tests may not be collected yet."""
    gc.collect()
    return [item for item in gc.get_objects() if isinstance(item, Block) and str(folder) in item.location]


async def list_sizes_bytes(folder: Path, tables: list[Table]) -> list[int]:
    """Return the bytes of each table's blocks."""
    sizes_bytes = []
    async with open_test_planner(folder) as planner:
        for table in tables:
            scan = await plan_table(planner, table)
            sizes_bytes.append(sum(block.size_bytes for block in scan.view.blocks))
        del scan
    gc.collect()  # The blocks are freed before the caller opens another planner.
    return sizes_bytes


async def test_views_are_within_their_memory_budget_and_answers_are_right(tmp_path: Path) -> None:
    """A view has the decoded manifests of a table, each of which is a block."""
    tables = [create_filled_table(tmp_path / f"t{n}", days=2 + n, per_day=40)[0] for n in range(6)]
    sizes_bytes = await list_sizes_bytes(tmp_path, tables)
    # The largest table fits, but not all tables together.
    budget = max(sizes_bytes) + sum(sizes_bytes) // 3
    rng, decoded_count = random.Random(4), 0
    async with open_test_planner(tmp_path, plan_memory_bytes=budget) as planner:
        for round_number in range(examples(60, 30)):
            number = rng.randrange(len(tables))
            low = rng.randrange(80)
            assert await plan_file_numbers(planner, tables[number].metadata, build_filter_of_files(low, low + 5)) == [
                n for n in range(low, low + 6) if n < (2 + number) * 40
            ], f"turn {round_number}"
            # An answer adds memory to the view, which the next plan counts.
            await plan_table(planner, tables[number], build_filter_of_files(low, low + 90))
            await asyncio.sleep(0)
            stats = planner.read_stats()
            planner.check_invariants()
            assert stats.live_bytes + stats.added_bytes <= budget, f"turn {round_number}"
            decoded_count = stats.decoded
    assert decoded_count > sum(2 + n for n in range(6)), "no block was evicted, so the test did not reach the budget"


@pytest.mark.slow
async def test_memory_account_counts_the_blocks_that_are_alive(tmp_path: Path) -> None:
    tables = [create_filled_table(tmp_path / f"t{n}", days=3)[0] for n in range(3)]
    async with open_test_planner(tmp_path) as planner:
        held_plans = [await plan_table(planner, table, build_filter_of_files(1, 25)) for table in tables]
        live_blocks = list_live_blocks(tmp_path)
        assert len(live_blocks) == planner.read_stats().blocks == 9
        assert sum(block.size_bytes for block in live_blocks) == planner.read_stats().live_bytes
        block_references = [weakref.ref(block) for block in live_blocks]
        del live_blocks, held_plans
        planner._views.budget_bytes = 0
        await plan_table(planner, tables[0], build_filter_of_files(1, 2))
        await asyncio.sleep(0)  # The event loop refers to the result that woke this task until the task sleeps again.
        gc.collect()
        assert [reference() for reference in block_references] == [None] * 9
        assert (planner.read_stats().live_bytes, planner.read_stats().blocks, planner.read_stats().views) == (0, 0, 0)
        assert planner.read_stats().added_bytes == 0


async def test_principal_that_plans_many_tables_evicts_its_own_views(tmp_path: Path) -> None:
    """A view has the decoded manifests of a table. The views of principal a must stay in memory."""
    tables = [create_filled_table(tmp_path / f"t{n}", days=2, per_day=40)[0] for n in range(12)]
    sizes_bytes = await list_sizes_bytes(tmp_path, tables)
    rng = random.Random(5)

    async def plan_tables(planner: Planner, principal: str, table_numbers: list[int]) -> None:
        for number in table_numbers:
            low = rng.randrange(70)
            with set_principal(principal):
                file_numbers = await plan_file_numbers(
                    planner, tables[number].metadata, build_filter_of_files(low, low + 5)
                )
            assert file_numbers == list(range(low, low + 6))
            planner.check_invariants()

    # The budget has room for the views of 8 of the 12 tables.
    async with open_test_planner(tmp_path, plan_memory_bytes=sum(sizes_bytes) * 8 // 12) as planner:
        await plan_tables(planner, "a", [0, 1])
        for _ in range(3):
            await plan_tables(planner, "b", list(range(2, 12)))
        decoded_count = planner.read_stats().decoded
        # b plans 10 tables of 2 manifests in 3 rounds; at least 6 tables a round must have been evicted.
        assert decoded_count > 3 * 2 * 6, "the budget must be too small for all tables of b"
        await plan_tables(planner, "a", [1, 0])
        assert planner.read_stats().decoded == decoded_count


@pytest.mark.slow
async def test_adding_a_view_examines_no_other_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A view is the part of a table that a planner keeps in memory. One reader can have tens of thousands of views."""
    table, _ = create_filled_table(tmp_path / "t", days=12, per_day=2)
    examined_views: list[CachedView] = []
    # A planner that examines a cached view reads its `holder`.
    holder: Any = CachedView.holder  # The descriptor of the slot

    def note_examined(cached_view: CachedView) -> str:
        examined_views.append(cached_view)
        return str(holder.__get__(cached_view))

    monkeypatch.setattr(
        CachedView, "holder", property(note_examined, lambda cached_view, name: holder.__set__(cached_view, name))
    )
    async with open_test_planner(tmp_path, plan_memory_bytes=4_000_000) as planner:
        with set_principal("a"):
            await plan_file_numbers(planner, table.metadata, build_day_filter(0))
        counts, evicted_count = [], 0
        with set_principal("b"):
            for number, days in enumerate(itertools.combinations(range(12), 4)):
                examined_views.clear()
                view_count = len(planner._views)
                file_numbers = await plan_file_numbers(
                    planner, table.metadata, {"type": "in", "term": "day", "values": list(days)}
                )
                assert file_numbers == [file for day in days for file in (2 * day, 2 * day + 1)]
                counts.append(len({id(cached_view) for cached_view in examined_views}))
                evicted_count += len(planner._views) <= view_count
                if number % 100 == 0:
                    planner.check_invariants()
        # Of the 495 views, some must have been evicted, and many must be in memory at the end.
        assert evicted_count > 100
        assert len(planner._views) > 50
        # Of the many views in memory, only the few that are evicted for the new view are examined.
        assert max(counts[100:]) <= 10
        assert await plan_file_numbers(planner, table.metadata, build_day_filter(0)) == [0, 1]
        assert planner.read_stats().decoded == 12


@pytest.mark.slow
async def test_single_principal_can_use_the_whole_budget(tmp_path: Path) -> None:
    tables = [create_filled_table(tmp_path / f"t{n}", days=2, per_day=40)[0] for n in range(8)]
    sizes_bytes = await list_sizes_bytes(tmp_path, tables)
    # The budget has room for all tables. The principal a plans all but one of them, much more than half.
    async with open_test_planner(tmp_path, plan_memory_bytes=2 * sum(sizes_bytes)) as planner:
        for _ in range(2):
            for principal, table in zip("aaaaaaab", tables, strict=True):
                with set_principal(principal):
                    assert await plan_file_numbers(planner, table.metadata, build_filter_of_files(3, 4)) == [3, 4]
        # Each of the 8 tables has 2 manifests, and the second round decodes none again.
        assert planner.read_stats().decoded == 2 * 8


async def test_view_larger_than_the_budget_is_planned_and_released(tmp_path: Path) -> None:
    table, _ = create_filled_table(tmp_path / "t")
    async with open_test_planner(tmp_path, plan_memory_bytes=1) as planner:
        for _ in range(3):
            assert await plan_file_numbers(planner, table.metadata, build_filter_of_files(5, 70)) == list(range(5, 71))
            await asyncio.sleep(0)
            assert planner.read_stats().live_bytes == 0, "the view must be released without the garbage collector"
        assert planner.read_stats().decoded == 3 * DAYS


@pytest.mark.slow
async def test_views_of_snapshots_that_share_all_blocks_are_evicted(tmp_path: Path) -> None:
    """A view has the data files of one snapshot.

    It needs memory besides the decoded manifests that snapshots share. So the views of many snapshots must not
    accumulate.
    """
    table, manifests = create_filled_table(tmp_path / "t", days=40, per_day=2)
    blocks_bytes = (await list_sizes_bytes(tmp_path, [table]))[0]
    for snapshot_id in range(2, 102):
        table.commit(snapshot_id, manifests)
    metadata = table.metadata
    budget = blocks_bytes + (1 << 20)  # Beside the shared blocks, 1 MiB remains for the views of 101 snapshots.
    async with open_test_planner(tmp_path, plan_memory_bytes=budget) as planner:
        for snapshot_id in range(1, 102):
            request = {"snapshot_id": snapshot_id}
            assert await plan_file_numbers(planner, metadata, build_filter_of_files(7, 9), **request) == [7, 8, 9]
            assert planner.read_stats().live_bytes + planner.read_stats().added_bytes <= budget
        assert 1 < planner.read_stats().views < 50
        assert planner.read_stats().decoded == 40


async def test_cached_plans_keep_no_reference_to_table_metadata(tmp_path: Path) -> None:
    table, _ = create_filled_table(tmp_path / "t")
    async with open_test_planner(tmp_path) as planner:
        scan = await plan_table(planner, table, build_filter_of_files(1, 2))
        assert table.metadata.snapshots
        assert (scan.metadata.snapshots, scan.metadata.snapshot_log, scan.metadata.refs) == ((), (), {})


@pytest.mark.slow
async def test_closed_planners_leave_no_thread_file_or_mapping(tmp_path: Path) -> None:
    table, _ = create_filled_table(tmp_path / "t", days=1, per_day=8000)
    process = psutil.Process()

    def count_mappings() -> int:
        return Path("/proc/self/maps").read_text().count(str(tmp_path))

    def count_resources() -> tuple[int, set[str], int]:
        gc.collect()
        # The event loop's own threads stay.
        thread_names = {thread.name for thread in threading.enumerate() if not thread.name.startswith("asyncio_")}
        return process.num_fds(), thread_names, count_mappings()

    async def run_planner_cycle() -> int:
        async with open_test_planner(tmp_path, plan_disk_bytes=64 << 20) as planner:
            scan = await plan_table(planner, table, build_filter_of_files(10, 20))
            assert list_file_numbers(scan) == list(range(10, 21))
            assert planner.read_stats().decoded in (0, 1)
            return count_mappings()

    await run_planner_cycle()
    fds_before, threads_before, mappings_before = count_resources()
    mapping_counts = [await run_planner_cycle() for _ in range(50)]  # A leak in each cycle exceeds the limits below.
    assert min(mapping_counts) >= 1, "blocks from the folder must be mapped"
    fds_after, threads_after, mappings_after = count_resources()
    # A leak grows in each cycle, but memory of other tests may be released meanwhile.
    assert fds_after < fds_before + 25
    assert threads_after <= threads_before
    assert mappings_after == mappings_before


# The time limit


async def test_plan_without_time_keeps_unchecked_files_reports_it_and_is_not_cached(tmp_path: Path) -> None:
    table, _ = create_filled_table(tmp_path / "t")
    async with open_test_planner(tmp_path, plan_time_budget_s=0) as planner:
        for _ in range(2):
            scan = await plan_table(planner, table, build_filter_of_files(33, 35))
            assert set(list_file_numbers(scan)) >= {33, 34, 35}
            assert not scan.complete
            assert all(scan.compute_residual(row) != parse_expression(False) for row in scan.entry_ids.tolist())
        assert planner.read_stats().plan_hits == 0
        assert (await plan_table(planner, table)).complete, "a plan without a filter has nothing to check"


async def test_pages_of_plans_with_and_without_time_form_a_complete_answer(tmp_path: Path) -> None:
    """One server has no time for planning, so its plans keep all files.

    Each server also answers the page tokens of a plan that the other server made.
    """
    settings = {"plan_inline_limit": 2, "plan_page_size": 7}  # Plans of more than two files have pages.
    server_without_time = run_server(tmp_path, **settings, plan_time_budget_s=0)
    expected = [3, 17, 18, 44, 59]
    where = {"filter": {"type": "in", "term": "id", "values": [10 * n + 5 for n in expected]}}
    path = "/v1/namespaces/db/tables/t"
    async with server_without_time as slow_server, run_server(tmp_path, **settings) as fast_server:
        slow_api, fast_api = Api(slow_server), Api(fast_server)
        await slow_api.create_table()
        files = [build_data_file(f"file:///t/data/{n:06d}.parquet", 10 * n, 10 * n + 9) for n in range(60)]
        await append_files(slow_api, "t", files, snapshot_id=1, manifests=4)
        for api, other_api in ((slow_api, fast_api), (fast_api, slow_api)):
            plan = await api("POST", f"{path}/plan", where)
            tokens = plan.json["plan-tasks"]
            assert len(tokens) > 1
            for round_number in range(2):
                numbers: list[int] = []
                for position, token in enumerate(tokens):
                    page_api = (api, other_api)[(position + round_number) % 2]
                    page = await page_api("POST", f"{path}/tasks", {"plan-task": token})
                    tasks = page.json["file-scan-tasks"]
                    numbers += [int(task["data-file"]["file-path"][-14:-8]) for task in tasks]
                assert len(numbers) == len(set(numbers)), "a file occurs twice"
                assert set(numbers) >= set(expected)
        last_plan = await slow_api("POST", f"{path}/plan", where)
        assert last_plan.json["status"] == "completed"


@pytest.mark.slow  # test_memory_account.py makes the same check for a whole server.
async def test_memory_account_is_close_to_the_memory_of_the_process(tmp_path: Path) -> None:
    """The planner's count of bytes differs by less than 10 % from the memory that tracemalloc reports.

    The memory includes NumPy arrays and derived data.
    """
    table = Table(tmp_path / "t")
    manifests = [table.write_manifest(f"m{n}", range(n * 3000, n * 3000 + 3000), day=n) for n in range(20)]
    table.commit(1, manifests)
    small_table, _ = create_filled_table(tmp_path / "small")
    async with open_test_planner(tmp_path) as planner:
        for _ in range(2):  # The first rounds load modules and objects that are created only once.
            await plan_file_numbers(planner, small_table.metadata, build_filter_of_files(1, 5))
        metadata = table.metadata
        gc.collect()
        tracemalloc.start()
        try:
            stats_before = planner.read_stats()
            scan = await planner.bind_and_plan(metadata, ScanRequest(filter=parse_expression(True)))
            tasks_bytes = sum(len(task) for task in ScanTaskWriter(scan).write_tasks(scan.entry_ids))
            find_files_by_prefix(scan.view)
            compute_view_file_ids(scan.view)
            del scan
            await planner.bind_and_plan(
                metadata, ScanRequest(filter=parse_expression({"type": "eq", "term": "id", "value": 7}))
            )
            await asyncio.sleep(0)
            gc.collect()
            held_bytes = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        stats_after = planner.read_stats()
        byte_growth = (
            stats_after.live_bytes + stats_after.added_bytes - stats_before.live_bytes - stats_before.added_bytes
        )
        assert tasks_bytes > 60_000 * 100, "the answer must name all 60,000 files, each with at least 100 bytes"
        assert abs(byte_growth - held_bytes) < held_bytes / 10, (
            f"the planner counts {byte_growth:,} bytes, but {held_bytes:,} bytes are allocated"
        )
