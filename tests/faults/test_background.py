"""Tests that background work continues after a failure, even if the log also fails, as on a full disk."""

from __future__ import annotations

import asyncio
import errno
import json
from pathlib import Path
from typing import Any

import pytest
import structlog

from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import SeamarkError
from seamark.metaserver.access import audit as audits
from seamark.metaserver.access.audit import open_audit
from seamark.metaserver.api.http.observability import logs
from seamark.metaserver.runtime import background
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.operations import CreateNamespace, RecordInstant
from seamark.metaserver.store.port import InstantFilter
from seamark.metaserver.timeline.timeline import open_timeline
from tests.server.rig import build_instant, build_settings, run_server
from tests.waits import until

CLOCK = SystemClock()


class FullDiskLogger:
    """A logger whose methods all raise the error of a full disk."""

    def msg(self, *_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    log = debug = info = warning = error = critical = exception = msg


@pytest.fixture
def full_disk() -> None:
    structlog.configure(logger_factory=lambda *_: FullDiskLogger())
    with pytest.raises(OSError, match="No space"):
        structlog.get_logger("seamark.server").warning("lost")


@pytest.mark.few_cases(4)
@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize("error", [ValueError("a bug"), SeamarkError("the store")])
async def test_failed_background_work_is_restarted(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(background, "RESTART_S", 0.0)
    start_count = 0

    async def fail() -> None:
        nonlocal start_count
        start_count += 1
        raise error

    async with background.run_in_background("work", fail):
        await until(lambda: start_count > 3)


@pytest.mark.usefixtures("full_disk")
async def test_error_of_a_background_run_does_not_escape_if_it_cannot_be_logged() -> None:
    """With the fixture `full_disk`, each attempt to log the error fails, too. The block must end without an error."""
    has_started = asyncio.Event()

    async def fail() -> None:
        has_started.set()
        raise ValueError("a bug")

    async with background.run_once("work", fail):
        await has_started.wait()


@pytest.mark.usefixtures("full_disk")
async def test_watchers_are_woken_after_a_failed_read_of_the_timeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the fixture `full_disk`, each attempt to log the failed read fails, too."""
    settings = build_settings(tmp_path, watch_poll_s=0.02)
    async with (
        open_store(settings.make_database_url(), clock=CLOCK) as store,
        open_timeline(settings, store, CLOCK) as timeline,
    ):
        await store.transact([CreateNamespace(path=("db",), properties={})])
        read_count, read_timeline = 0, timeline._read_new_instants

        async def fail_three_times() -> None:
            nonlocal read_count
            read_count += 1
            if read_count <= 3:
                raise ValueError("a bug")
            await read_timeline()

        monkeypatch.setattr(timeline, "_read_new_instants", fail_three_times)
        watch_task = asyncio.create_task(timeline.watch(InstantFilter(), 10, 60))
        await until(lambda: read_count >= 3)
        instant = build_instant(CLOCK)
        await store.transact([RecordInstant(instant=instant)])
        async with asyncio.timeout(60):
            assert [found.id for found in await watch_task] == [instant.id]


@pytest.mark.usefixtures("full_disk")
async def test_audit_records_are_written_once_the_database_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audits, "_RETRY_S", 0.0)
    async with open_store(build_settings(tmp_path).make_database_url(), clock=CLOCK) as store:
        call_count, transact = 0, store.transact

        async def fail_twice(operations: Any) -> Any:
            nonlocal call_count
            call_count += 1
            if call_count <= 2:
                raise OSError("the database is away")
            return await transact(operations)

        monkeypatch.setattr(store, "transact", fail_twice)
        async with open_audit(store, CLOCK) as audit:
            await audit.record(principal_name="ann", operation="dropTable", resource="db.t", status=204, request_id="1")
            async with asyncio.timeout(60):
                await audit.flush()
        assert call_count == 3
        assert [record.principal_name for record in await store.read_audit_records(after_id=None, limit=10)] == ["ann"]


@pytest.mark.usefixtures("full_disk")
async def test_failed_part_of_housekeeping_does_not_stop_the_other_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def raise_zero_division() -> int:
        raise ZeroDivisionError

    async with run_server(tmp_path) as server:
        parts = server.components.housekeeping._tasks
        results_before = await server.components.housekeeping.run_round()
        *failing_parts, last_part = results_before
        for failing_part in failing_parts:
            monkeypatch.setitem(parts, failing_part, raise_zero_division)
        assert (await server.components.housekeeping.run_round()).keys() == {last_part}


def test_log_line_with_any_content_is_written(capfd: pytest.CaptureFixture[str]) -> None:
    logs.configure_logging(Settings(log_format="json"))
    structlog.get_logger("seamark.server").warning("unpaired surrogate", text="\udcff", number=1)
    line = json.loads(capfd.readouterr().err)
    assert line["event"] == repr("unpaired surrogate")
    assert line["text"] == repr("\udcff")
