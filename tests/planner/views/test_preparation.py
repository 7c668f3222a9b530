"""Tests of views that the planner prepares before a plan needs them: which views it prepares, and the plans.

The oracle of each plan is the list of files that the test gave to the snapshot.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from seamark.formats.iceberg.expressions.expression_json import parse_expression
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import Corrupt
from seamark.metaserver.planner.answer.answer import ScanTaskWriter
from seamark.metaserver.planner.plan.cached_views import RECENTLY_PLANNED_S, PlannedTable, PlannedTables
from seamark.metaserver.planner.plan.planner import Planner
from seamark.metaserver.planner.scan.request import BoundScan, ScanRequest, ViewKey
from seamark.metaserver.planner.scan.scan_plan import ScanPlan
from tests.api.client import Api
from tests.api.plans.planned import T, append_files, build_ten_id_files, list_planned_numbers
from tests.planner.lakes.manifests import Manifest
from tests.planner.lakes.tables import (
    RecordingObjects,
    Table,
    build_day_filter,
    build_filter_of_files,
    list_file_numbers,
    open_test_planner,
    to_path,
)
from tests.seeds import first_seed
from tests.server.rig import RunningServer, run_server
from tests.support.wrapper_capture import WrapperCapture
from tests.waits import until

LIMIT_BYTES = 1 << 20
DAYS, CHANGES_PER_ROUND = 5, 10


def build_view_key(metadata: TableMetadata) -> ViewKey:
    return BoundScan.bind(metadata, ScanRequest()).view_key


def make_planned_table(metadata: TableMetadata, *, prepared: bool = False) -> PlannedTable:
    return PlannedTable(build_view_key(metadata), 0.0, prepared)


async def plan_table(planner: Planner, metadata: TableMetadata, filter: Any = True) -> ScanPlan:
    return await planner.bind_and_plan(metadata, ScanRequest(filter=parse_expression(filter)))


def encode_tasks(scan: ScanPlan) -> Any:
    return json.loads(b"[" + b"".join(ScanTaskWriter(scan).write_tasks(scan.entry_ids)) + b"]")


class SnapshotTable:
    """A table with random snapshots.

    `states` has, for each snapshot, its metadata and the days of its files by file number.
    """

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.rng = rng
        self.table = Table(folder)
        self.file_count = 0
        self.manifests: list[tuple[Manifest, dict[int, int]]] = []
        self.states: list[tuple[TableMetadata, dict[int, int]]] = []
        for _ in range(DAYS):
            self.append()
        self.commit()

    def append(self) -> None:
        day, first_number = self.rng.randrange(DAYS), self.file_count
        self.file_count += self.rng.randrange(1, 5)
        new_files = range(first_number, self.file_count)
        manifest = self.table.write_manifest(f"m{first_number}", new_files, day=day, snapshot_id=len(self.states) + 1)
        self.manifests.insert(0, (manifest, dict.fromkeys(new_files, day)))

    def commit(self) -> TableMetadata:
        deletes = [manifest for manifest, files in self.manifests if manifest.content]
        data = [manifest for manifest, files in self.manifests if not manifest.content]
        self.table.commit(len(self.states) + 1, [*data, *deletes])
        days_by_file: dict[int, int] = {}
        for _, files in self.manifests:
            days_by_file |= files
        self.states.append((self.table.metadata, days_by_file))
        return self.table.metadata

    def change(self) -> tuple[TableMetadata, dict[int, int]]:
        """Return the next state of the table, after a rollback or a commit.

        A commit removes a manifest, changes the order of the manifests, adds deletes, or adds data files.
        """
        chance = self.rng.random()
        if chance < 0.2:
            metadata, days_by_file = self.rng.choice(self.states)
            snapshot_id = metadata.current_snapshot_id
            return msgspec.structs.replace(self.table.metadata, current_snapshot_id=snapshot_id), days_by_file
        if chance < 0.35 and len(self.manifests) > 2:
            self.manifests.pop(self.rng.randrange(len(self.manifests)))
        elif chance < 0.5:
            self.rng.shuffle(self.manifests)
        elif chance < 0.6:
            number, day = self.rng.choice([*self.states[-1][1].items()])
            deletes = self.table.write_delete_manifest(
                f"d{len(self.states)}", [number], day=day, snapshot_id=len(self.states) + 1
            )
            self.manifests.append((deletes, {}))
        else:
            self.append()
        self.commit()
        return self.states[-1]


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    "round_number", [*range(6), *(pytest.param(round_number, marks=pytest.mark.slow) for round_number in range(6, 150))]
)
async def test_plans_are_equal_with_and_without_preparation_of_snapshots(tmp_path: Path, round_number: int) -> None:
    """During the plans, views are prepared, cancelled and evicted, and plans of several snapshots run concurrently."""
    seed = first_seed() * 1000 + round_number
    rng = random.Random(seed)
    snapshot_table = SnapshotTable(tmp_path / "t", rng)
    memory_bytes = rng.choice([1 << 30, 1 << 30, 120_000])
    async with (
        open_test_planner(tmp_path, plan_memory_bytes=memory_bytes) as planner,
        open_test_planner(tmp_path) as other_planner,
    ):

        async def check(metadata: TableMetadata, days_by_file: dict[int, int]) -> None:
            low, day = rng.randrange(snapshot_table.file_count), rng.randrange(DAYS)
            filter, expected = rng.choice(
                [
                    (
                        build_filter_of_files(low, low + 5),
                        {number for number in days_by_file if low <= number <= low + 5},
                    ),
                    (
                        build_day_filter(day),
                        {number for number, file_day in days_by_file.items() if file_day == day},
                    ),
                    (True, set(days_by_file)),
                ]
            )
            actual_plan, other_plan = (
                await plan_table(planner, metadata, filter),
                await plan_table(other_planner, metadata, filter),
            )
            assert sorted(list_file_numbers(actual_plan)) == sorted(expected), f"seed {seed}"
            assert encode_tasks(actual_plan) == encode_tasks(other_plan), f"seed {seed}"

        last_state = snapshot_table.states[-1]
        await check(*last_state)
        await plan_table(planner, last_state[0])
        is_unused = False
        for _ in range(CHANGES_PER_ROUND):
            state = snapshot_table.change()
            prepare_task = asyncio.create_task(
                planner.prepare(
                    state[0], make_planned_table(last_state[0], prepared=is_unused), limit_bytes=LIMIT_BYTES
                )
            )
            is_unused = rng.random() < 0.3
            if is_unused:
                await prepare_task
            else:
                for _ in range(rng.randrange(30)):
                    await asyncio.sleep(0)
                if rng.random() < 0.2:
                    prepare_task.cancel()
                await asyncio.gather(
                    *(check(*rng.choice([state, state, last_state, *snapshot_table.states])) for _ in range(4))
                )
                await asyncio.gather(prepare_task, return_exceptions=True)
                if not prepare_task.cancelled():
                    prepare_task.result()
                await check(*state)
                await plan_table(planner, state[0])
            planner.check_invariants()
            last_state = state
        assert planner.read_stats().prepared or memory_bytes < 1 << 30, f"seed {seed}"


async def test_plan_after_a_prepared_commit_reads_nothing_from_storage(tmp_path: Path) -> None:
    snapshot_table = SnapshotTable(tmp_path / "t", random.Random(1))
    capture = WrapperCapture(RecordingObjects)
    async with open_test_planner(tmp_path, capture) as planner:
        old_metadata = snapshot_table.states[-1][0]
        await plan_table(planner, old_metadata, build_filter_of_files(1, 2))
        snapshot_table.append()
        new_metadata = snapshot_table.commit()
        assert await planner.prepare(
            new_metadata, make_planned_table(old_metadata), limit_bytes=LIMIT_BYTES
        ) == build_view_key(new_metadata)
        reads = list(capture.wrapper.reads)
        assert sorted(list_file_numbers(await plan_table(planner, new_metadata))) == sorted(
            snapshot_table.states[-1][1]
        )
        assert capture.wrapper.reads == reads
        assert await planner.prepare(new_metadata, make_planned_table(old_metadata), limit_bytes=LIMIT_BYTES) is None, (
            "the view exists already"
        )


async def test_only_small_commits_to_tables_in_memory_are_prepared(tmp_path: Path) -> None:
    """To prepare a commit, the planner decodes the manifests of the new snapshot before the next plan.

    The decoded manifests of a snapshot are its view.
    """
    snapshot_table, cold_table = (
        SnapshotTable(tmp_path / "t", random.Random(1)),
        SnapshotTable(tmp_path / "cold", random.Random(2)),
    )
    old_metadata = snapshot_table.states[-1][0]
    snapshot_table.append()
    new_metadata = snapshot_table.commit()
    size = to_path(snapshot_table.manifests[0][0]).stat().st_size
    async with open_test_planner(tmp_path) as planner:
        assert await planner.prepare(new_metadata, make_planned_table(old_metadata), limit_bytes=LIMIT_BYTES) is None, (
            "no client has planned the table"
        )
        await plan_table(planner, old_metadata)
        decoded_count = planner.read_stats().decoded
        assert await planner.prepare(new_metadata, make_planned_table(old_metadata), limit_bytes=size - 1) is None
        # A view of another table does not count for this table.
        assert (
            await planner.prepare(
                cold_table.states[-1][0], make_planned_table(cold_table.states[-1][0]), limit_bytes=LIMIT_BYTES
            )
            is None
        )
        assert planner.read_stats().decoded == decoded_count
        assert await planner.prepare(
            new_metadata, make_planned_table(old_metadata), limit_bytes=size
        ) == build_view_key(new_metadata)
        assert planner.read_stats().decoded == decoded_count + 1
        needed_bytes = planner.read_stats().live_bytes + planner.read_stats().added_bytes
    # Before it makes the view, the planner estimates more bytes than the view needs. So a budget of the needed bytes
    # (a share of 1.0) is also too small.
    for share in (0.5, 0.9, 1.0):
        async with open_test_planner(tmp_path, plan_memory_bytes=int(needed_bytes * share)) as planner:
            await plan_table(planner, old_metadata)
            views = planner.read_stats().views
            assert (
                await planner.prepare(new_metadata, make_planned_table(old_metadata), limit_bytes=LIMIT_BYTES) is None
            ), "the budget has no room for the view"
            assert planner.read_stats().views == views
            planner.check_invariants()


async def test_unused_prepared_view_is_replaced_by_the_next_prepared_view(tmp_path: Path) -> None:
    snapshot_table = SnapshotTable(tmp_path / "t", random.Random(1))
    async with open_test_planner(tmp_path) as planner:
        old_metadata = snapshot_table.states[-1][0]
        await plan_table(planner, old_metadata, build_filter_of_files(1, 2))
        latest_table = make_planned_table(old_metadata)
        for _ in range(6):
            snapshot_table.append()
            key = await planner.prepare(snapshot_table.commit(), latest_table, limit_bytes=LIMIT_BYTES)
            assert key is not None
            latest_table = PlannedTable(key, 0.0, prepared=True)
            assert planner.read_stats().views == 2
        decoded_count = planner.read_stats().decoded
        assert sorted(list_file_numbers(await plan_table(planner, snapshot_table.states[-1][0]))) == sorted(
            snapshot_table.states[-1][1]
        )
        assert planner.read_stats().decoded == decoded_count
        planner.check_invariants()


async def test_failed_preparation_is_reported_by_the_plan(tmp_path: Path) -> None:
    snapshot_table = SnapshotTable(tmp_path / "t", random.Random(1))
    async with open_test_planner(tmp_path) as planner:
        old_metadata = snapshot_table.states[-1][0]
        await plan_table(planner, old_metadata)
        snapshot_table.append()
        new_metadata = snapshot_table.commit()
        path = to_path(snapshot_table.manifests[0][0])
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(Corrupt):
            await planner.prepare(new_metadata, make_planned_table(old_metadata), limit_bytes=LIMIT_BYTES)
        with pytest.raises(Corrupt):
            await plan_table(planner, new_metadata)
        path.write_bytes(data)
        assert sorted(list_file_numbers(await plan_table(planner, new_metadata))) == sorted(
            snapshot_table.states[-1][1]
        )
        planner.check_invariants()


class OffsetMonotonicClock(SystemClock):
    ahead_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_s


def test_planned_tables_are_remembered_for_minutes_and_plans_replace_prepared_views() -> None:
    """A view has the decoded manifests of a snapshot.

    `note` records that a plan used a view, and `note_prepared` that a view was made before a plan needs it.
    """
    clock = OffsetMonotonicClock()
    tables = PlannedTables(clock)
    assert tables.is_empty
    tables.note("a", ("1",))
    first_note = tables.get("a")
    assert first_note is not None
    tables.note_prepared("a", first_note, ("2",), due_s=7.0)
    latest_table = tables.get("a")
    assert latest_table is not None
    assert (latest_table.key, latest_table.prepared, latest_table.due_s, latest_table.planned_s) == (
        ("2",),
        True,
        7.0,
        first_note.planned_s,
    )
    tables.note("a", ("2",))
    tables.note_prepared("a", latest_table, ("3",), due_s=9.0)  # A plan has used the table, so this has no effect.
    latest_table = tables.get("a")
    assert latest_table is not None
    assert (latest_table.key, latest_table.prepared, latest_table.due_s) == (("2",), False, 0.0)
    clock.ahead_s = RECENTLY_PLANNED_S
    assert tables.is_empty
    assert tables.get("a") is None
    for number in range(3000):  # This is more than the tables that are remembered.
        tables.note(str(number), ("1",))
    assert tables.get("0") is None
    assert tables.get("2999") is not None


# Tests with a server


async def count_decoded_after(server: RunningServer, prepared_count: int) -> int:
    await until(lambda: server.components.planner.read_stats().prepared == prepared_count)
    return server.components.planner.read_stats().decoded


async def test_commits_to_planned_tables_are_decoded_before_the_next_plan(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        api = Api(server)
        for name in ("t", "never"):
            await api.create_table(name)
            await append_files(api, name, build_ten_id_files(3), snapshot_id=1)
        assert list_planned_numbers(await api("POST", f"{T}/plan", {})) == [0, 1, 2]
        assert server.components.planner.read_stats().decoded == 1
        await append_files(api, "never", build_ten_id_files(4), snapshot_id=2, parent=1)
        await append_files(api, "t", build_ten_id_files(5)[3:], snapshot_id=2, parent=1)
        assert await count_decoded_after(server, 1) == 2, "no client plans the other table"
        assert sorted(list_planned_numbers(await api("POST", f"{T}/plan", {}))) == [0, 1, 2, 3, 4]
        assert server.components.planner.read_stats().decoded == 2
        # A new table with the name of a dropped table is a different table: its first plan reads from storage.
        assert (await api("DELETE", T)).status == 204
        await api.create_table("t")
        await append_files(api, "t", build_ten_id_files(9)[7:], snapshot_id=11)
        assert list_planned_numbers(await api("POST", "/v1/namespaces/db/tables/never/plan", {})) == [
            0,
            1,
            2,
            0,
            1,
            2,
            3,
        ]
        await append_files(api, "never", build_ten_id_files(6)[5:], snapshot_id=3, parent=2)
        assert await count_decoded_after(server, 2) == 5, "two manifests of the other table, and one that was prepared"
        assert list_planned_numbers(await api("POST", f"{T}/plan", {})) == [7, 8]
        assert server.components.planner.read_stats().decoded == 6


async def test_manifests_of_commits_of_another_replica_are_decoded_before_the_next_plan(tmp_path: Path) -> None:
    shared_settings: dict[str, Any] = {
        "database": f"sqlite:///{tmp_path}/shared.db",
        "warehouse": f"file://{tmp_path}/w",
    }
    async with (
        run_server(tmp_path / "a", **shared_settings) as writing_server,
        run_server(tmp_path / "b", **shared_settings) as reading_server,
    ):
        writer, reader = Api(writing_server), Api(reading_server)
        await writer.create_table("t")
        await append_files(writer, "t", build_ten_id_files(3), snapshot_id=1)
        assert list_planned_numbers(await reader("POST", f"{T}/plan", {})) == [0, 1, 2]
        await append_files(writer, "t", build_ten_id_files(5)[3:], snapshot_id=2, parent=1)
        assert await count_decoded_after(reading_server, 1) == 2
        assert writing_server.components.planner.read_stats().prepared == 0
        assert sorted(list_planned_numbers(await reader("POST", f"{T}/plan", {}))) == [0, 1, 2, 3, 4]
        assert reading_server.components.planner.read_stats().decoded == 2


async def test_setting_disables_the_preparation_of_snapshots(tmp_path: Path) -> None:
    async with run_server(tmp_path, plan_prepare_bytes=0) as server:
        api = Api(server)
        await api.create_table("t")
        await append_files(api, "t", build_ten_id_files(3), snapshot_id=1)
        assert list_planned_numbers(await api("POST", f"{T}/plan", {})) == [0, 1, 2]
        await append_files(api, "t", build_ten_id_files(5)[3:], snapshot_id=2, parent=1)
        assert sorted(list_planned_numbers(await api("POST", f"{T}/plan", {}))) == [0, 1, 2, 3, 4]
        assert server.components.planner.read_stats().prepared == 0
        assert not any(task.get_name() == "preparation" for task in asyncio.all_tasks())
