"""Tests of jobs on a machine whose clock jumps ahead or back by a day or a year.

No job deletes a file of a live writer, purges a table that was just dropped, or expires a young snapshot.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import BadRequestError

from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.indexes import IndexClient
from seamark.connector.jobs.server_jobs import expire, remove_orphan_files
from seamark.connector.write.appends import append
from seamark.connector.write.upserts import upsert
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.commit.changes import change_application
from seamark.metaserver.commit.changes.change_application import ChangeApplication
from seamark.metaserver.commit.removed_files import check_stored
from seamark.metaserver.objects.local import LocalObjects
from seamark.metaserver.objects.port import ObjectInfo
from tests.connector.jobs.test_expiration import read_snapshot, to_path
from tests.connector.jobs.test_orphan_files import age_file, put_file
from tests.connector.lake import open_catalog
from tests.connector.server_thread import ServerThread
from tests.connector.write.test_compaction import build_rows, create_test_table
from tests.seeds import examples, mark_fast

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


class MachineClock(SystemClock):
    """The clock of a machine: `pass_time` lets time pass, and `jump` changes the clock.

    `to_clock_ms` converts a system time to the time that the clock showed then.
    """

    def __init__(self) -> None:
        self._passed_ms = 0
        self._moves: list[tuple[int, int]] = [(0, 0)]
        """Pairs: a time of the system's clock, and how far this clock is ahead from then on."""

    def now_ms(self) -> int:
        return super().now_ms() + self._moves[-1][1]

    def monotonic(self) -> float:  # type: ignore[override]
        return SystemClock.monotonic() + self._passed_ms / 1000

    def pass_time(self, ms: int) -> None:
        self._passed_ms += ms
        self.jump(ms)

    def jump(self, ms: int) -> None:
        self._moves.append((super().now_ms(), self._moves[-1][1] + ms))

    def to_clock_ms(self, system_ms: int) -> int:
        return system_ms + next(ahead_ms for since_ms, ahead_ms in reversed(self._moves) if since_ms <= system_ms)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MachineClock:
    """Return a clock, and patch the listing of files so that the times of the files follow this clock."""
    clock, list_objects = MachineClock(), LocalObjects.list

    async def list_by_clock(self: LocalObjects, prefix: str) -> AsyncIterator[ObjectInfo]:
        async for info in list_objects(self, prefix):
            yield ObjectInfo(info.location, info.size_bytes, clock.to_clock_ms(info.modified_ms))

    monkeypatch.setattr(LocalObjects, "list", list_by_clock)
    return clock


@pytest.fixture
def machine(tmp_path: Path, clock: MachineClock) -> Iterator[ServerThread]:
    with ServerThread(tmp_path, warehouse=tmp_path.as_uri(), clock=clock, drop_retention_s=7 * 86_400) as server:
        yield server


def run_housekeeping(machine: ServerThread) -> None:
    machine.run(machine.components.housekeeping.run_round())


def write_uncommitted_file(location: str, number: int) -> Path:
    """Write a file that no commit has added yet, and return its path."""
    path = to_path(location) / "data" / f"live-{number}.parquet"
    table = build_rows([1000 + number])
    fields = [field.with_metadata({"PARQUET:field_id": str(id_)}) for id_, field in enumerate(table.schema, 1)]
    pq.write_table(table.cast(pa.schema(fields)), path)
    return path


@pytest.mark.parametrize("seed", mark_fast(range(20), 1))
def test_random_clock_jumps_delete_no_young_file(machine: ServerThread, clock: MachineClock, seed: int) -> None:
    """Run random actions: write a file without a commit, let hours pass, jump, upsert, or drop and restore the table.

    After each action, orphan files and old snapshots are removed. No uncommitted file of less than two days and no
    snapshot of less than four days may be removed.
    """
    rng = random.Random(seed)
    elapsed_ms, written_times, expected_ids = 0, dict[Path, int](), set[int]()
    snapshots: dict[int, int] = {}
    removed_count = 0
    with open_catalog(machine.url) as catalog, closing(IndexClient(machine.url)) as client:
        create_test_table(catalog, 2)
        append(client, "db.t", build_rows([0]))
        expected_ids.add(0)
        table = catalog.load_table("db.t")
        orphans = [put_file(table, f"data/orphan-{number}.parquet", days=0) for number in range(3)]
        run_housekeeping(machine)
        for number in range(examples(60, 10)):
            action = rng.random() if number else 0.5  # The first action is a jump, so that each seed has one.
            if action < 0.25:
                written_times[write_uncommitted_file(table.location(), number)] = elapsed_ms
            elif action < 0.45:
                for _ in range(rng.randrange(1, 24)):  # Housekeeping runs every hour and reads the clock.
                    clock.pass_time(HOUR_MS)
                    elapsed_ms += HOUR_MS
                    run_housekeeping(machine)
            elif action < 0.6:
                clock.jump(rng.choice([-1, 1]) * rng.choice([DAY_MS, 5 * DAY_MS, 365 * DAY_MS]))
                run_housekeeping(machine)
            elif action < 0.8:
                upsert(client, "db.t", build_rows([number]), keys=["id"])
                expected_ids.add(number)
                snapshots[catalog.load_table("db.t").metadata.current_snapshot_id or 0] = elapsed_ms
            else:
                _drop_and_restore(machine, client, catalog, clock, rng)
            removed_count += remove_orphan_files(client, "db.t").files
            expire(client, "db.t")
            run_housekeeping(machine)
            for path, written_ms in list(written_times.items()):
                assert path.exists() or elapsed_ms - written_ms > 2 * DAY_MS, path
                if elapsed_ms - written_ms > DAY_MS and path.exists():
                    assert machine.run(_commit_change(machine, _make_change(path))).status == 200
                    # `write_uncommitted_file` writes one row, with the id 1000 + the number in the file's name.
                    expected_ids.add(1000 + int(path.stem.rpartition("-")[2]))
                    del written_times[path]
            table = catalog.load_table("db.t")
            assert {row["id"] for row in table.scan().to_arrow().to_pylist()} == expected_ids
            kept_snapshot_ids = {snapshot.snapshot_id for snapshot in table.metadata.snapshots}
            young_snapshot_ids = {
                id_ for id_, committed_ms in snapshots.items() if elapsed_ms - committed_ms < 4 * DAY_MS
            }
            assert young_snapshot_ids <= kept_snapshot_ids
        clock.jump(20 * 365 * DAY_MS)  # Then the clock is later than all files, even if it went back before.
        for _ in range(24 * 5):
            run_housekeeping(machine)
            clock.pass_time(HOUR_MS)
        append(client, "db.t", build_rows([5000]))
        removed_count += remove_orphan_files(client, "db.t").files
        assert not any(path.exists() for path in orphans)
    assert removed_count >= len(orphans)


def _drop_and_restore(
    machine: ServerThread, client: IndexClient, catalog: RestCatalog, clock: MachineClock, rng: random.Random
) -> None:
    catalog.purge_table("db.t")
    if rng.random() < 0.5:
        clock.jump(rng.choice([10, 400]) * DAY_MS)
        run_housekeeping(machine)
    (row,) = machine.run(machine.components.store.list_dropped(("db",), None, 10))
    status, _ = machine.run(_undrop(machine, row.id))
    assert status == 200


async def _undrop(machine: ServerThread, dropped_id: str) -> tuple[int, Any]:
    answer = await machine.api("POST", f"/api/v1/dropped/{dropped_id}/undrop", {})
    return answer.status, answer.json


def test_old_files_stay_until_the_minimum_age_has_passed_on_the_server(
    machine: ServerThread, clock: MachineClock
) -> None:
    """The clock was wrong before the server started, so only the times of the files show their age."""
    with open_catalog(machine.url) as catalog, closing(IndexClient(machine.url)) as client:
        create_test_table(catalog, 2)
        append(client, "db.t", build_rows([0]))
        table = catalog.load_table("db.t")
        orphan_path = write_uncommitted_file(table.location(), 1)
        for path in to_path(table.location()).rglob("*"):
            if path.is_file():
                age_file(path, days=400)
        report = remove_orphan_files(client, "db.t")
        assert (report.files, report.files_unconfirmed) == (0, 1)
        for _ in range(24 * 3 + 2):  # The minimum age is three days. The first and the last hour may count in part.
            assert orphan_path.exists()
            clock.pass_time(HOUR_MS)
            run_housekeeping(machine)
        assert remove_orphan_files(client, "db.t").files == 1
        assert not orphan_path.exists()


def test_orphan_removal_is_refused_if_clocks_of_server_and_storage_differ(
    server: ServerThread, client: IndexClient
) -> None:
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, 2)
        append(client, "db.t", build_rows([0]))
        orphan = put_file(catalog.load_table("db.t"), "data/orphan.parquet")
        context = server.components.catalog.context
        fast_clock = MachineClock()
        fast_clock.jump(HOUR_MS)
        object.__setattr__(context, "clock", fast_clock)
        with pytest.raises(InvalidRequest, match=r"clocks of the server and of the storage .* differ by 3,[56]\d\d s"):
            remove_orphan_files(client, "db.t")
        assert orphan.exists()
        object.__setattr__(context, "clock", SystemClock())
        assert remove_orphan_files(client, "db.t").files == 1
        probes = to_path(catalog.load_table("db.t").location()) / "_seamark" / "clock"
        assert not list(probes.iterdir())


def test_commit_of_removed_files_is_refused(server: ServerThread, client: IndexClient) -> None:
    """Both an engine's commit and a change of the API are refused. Files that still exist are committed."""
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, 2)
        append(client, "db.t", build_rows([0]))
        table = catalog.load_table("db.t")
        late_path, kept_path = write_uncommitted_file(table.location(), 1), write_uncommitted_file(table.location(), 2)
        os.utime(late_path, (1, 1))  # The file is so old that the removal deletes it.
        staged_change = _make_change(late_path)
        with table.transaction() as transaction:
            transaction.set_properties({"a": "b"})
            transaction.add_files([f"file://{kept_path}"])
            assert remove_orphan_files(client, "db.t").files == 1
        # PyIceberg reads the late file in add_files, so the file must exist again until then.
        late_path.write_bytes(kept_path.read_bytes())
        table.refresh()
        transaction = table.transaction()
        transaction.add_files([f"file://{late_path}"])
        late_path.unlink()
        with pytest.raises(BadRequestError, match="does not exist: a removal of orphan files"):
            transaction.commit_transaction()
        answer = server.run(_commit_change(server, staged_change))
        assert answer.error[:2] == (400, "BadRequestException")
        assert "a removal of orphan files of this table deleted" in answer.error[2]
        assert len(read_snapshot(client, catalog.load_table("db.t").current_snapshot().snapshot_id)) == 2
        late_path.write_bytes(kept_path.read_bytes())
        assert server.run(_commit_change(server, staged_change)).status == 200


def test_removal_of_a_file_during_its_commit_is_detected(
    server: ServerThread, client: IndexClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The removal of orphan files begins before the commit checks its files, and deletes a file after the check."""
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, 2)
        append(client, "db.t", build_rows([0]))
        location = catalog.load_table("db.t").location()
        late_path, *other_paths = (write_uncommitted_file(location, number) for number in range(100))
        os.utime(late_path, (1, 1))  # The file is so old that the removal deletes it.
        delete, preload = LocalObjects.delete, ChangeApplication.preload
        has_started, is_prepared = asyncio.Event(), asyncio.Event()

        async def delete_later(self: LocalObjects, location: str) -> None:
            if location.endswith(late_path.name):
                has_started.set()
                await is_prepared.wait()
            await delete(self, location)

        async def prepare(self: ChangeApplication, metadata: TableMetadata) -> None:
            await preload(self, metadata)
            is_prepared.set()

        monkeypatch.setattr(LocalObjects, "delete", delete_later)
        monkeypatch.setattr(ChangeApplication, "preload", prepare)

        async def remove_and_commit() -> Any:
            removal = asyncio.create_task(asyncio.to_thread(remove_orphan_files, client, "db.t"))
            await has_started.wait()
            add = [file for path in (late_path, *other_paths) for file in _make_change(path)["add"]]
            answer = await _commit_change(server, {"add": add})
            assert (await removal).files == 1
            return answer

        assert server.run(remove_and_commit()).error[:2] == (400, "BadRequestException")
        assert not late_path.exists()


@pytest.mark.slow
def test_files_are_checked_before_the_commit_lock_is_taken(
    server: ServerThread, client: IndexClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow storage must not delay all commits of a table whose orphan files were removed."""
    checks_under_lock: list[bool] = []
    running_changes: set[int] = set()
    apply = ChangeApplication.apply

    async def record_apply(self: ChangeApplication, *args: Any) -> Any:
        running_changes.add(1)
        try:
            return await apply(self, *args)
        finally:
            running_changes.clear()

    async def record_check(*args: Any) -> None:
        checks_under_lock.append(bool(running_changes))
        await check_stored(*args)

    with open_catalog(server.url) as catalog:
        create_test_table(catalog, 2)
        append(client, "db.t", build_rows([0]))
        put_file(catalog.load_table("db.t"), "data/orphan.parquet")
        assert remove_orphan_files(client, "db.t").files == 1
        monkeypatch.setattr(ChangeApplication, "apply", record_apply)
        monkeypatch.setattr(change_application, "check_stored", record_check)
        append(client, "db.t", build_rows([1]))
        assert checks_under_lock == [False]


def _make_change(path: Path) -> dict[str, Any]:
    file = {
        "content": "data",
        "file-path": f"file://{path}",
        "file-format": "parquet",
        "spec-id": 0,
        "partition": [],
        "record-count": 1,
        "file-size-in-bytes": path.stat().st_size,
    }
    return {"add": [file]}


async def _commit_change(server: ServerThread, body: dict[str, Any]) -> Any:
    return await server.api("POST", "/api/v1/tables/db/t/commit", body)
