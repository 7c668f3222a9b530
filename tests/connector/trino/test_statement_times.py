"""Tests that the proxy reports the times of rewritten statements for the query history."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence

import pytest

from seamark.connector.client.errors import ServerFailed
from seamark.connector.plans.async_client import Name
from seamark.connector.trino.protocol import statement_times
from seamark.connector.trino.protocol.statement_times import PlannedRead, StatementTimes
from tests.connector.trino.protocol import END, ROWS, run_fake_seamark, run_fake_trino
from tests.connector.trino.rig import run_proxy

FINGERPRINT = "0123456789abcdef"
PLANNED_READ = PlannedRead(("db", "t"), FINGERPRINT, 3, 30)
SLOWNESS_S = 60
"""The time by which a busy machine can delay a step of a test."""
PAGE = "/v1/statement/executing/q1/slug/1"


class Reports:
    """Receives the reports of `times`, the tested object, and refuses those of the table `db.broken`.

    `seconds` has the reported seconds by the fingerprint of the statement.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.run_tables: list[Sequence[Name]] = []
        self.times = StatementTimes(self._send)

    async def _send(self, planned_read: PlannedRead, seconds: float, run_tables: Sequence[Name]) -> None:
        if planned_read.table == ("db", "broken"):
            raise ServerFailed("no")
        self.seconds.setdefault(planned_read.statement, []).append(seconds)
        self.run_tables.append(run_tables)


async def test_time_ends_with_the_last_page_that_the_client_has_received() -> None:
    reports, start_s = Reports(), time.monotonic() - 100
    reports.times.start(PAGE, [PLANNED_READ, PlannedRead(("db", "uncounted"), "", 1, 1)], start_s)
    reports.times.note_page("GET", "/v1/statement/executing/q1/slug/2")
    reports.times.note_page("GET", "/v1/statement/executing/q2/slug/2")
    assert reports.seconds == {}
    await reports.times.close()
    assert reports.seconds == {FINGERPRINT: [pytest.approx(100, abs=SLOWNESS_S)]}
    assert reports.run_tables == [[("db", "t"), ("db", "uncounted")]]


async def test_statement_without_a_further_page_is_reported_and_a_cancelled_statement_is_not() -> None:
    reports = Reports()
    reports.times.start(PAGE, [PLANNED_READ], time.monotonic())
    reports.times.note_page("DELETE", PAGE)
    reports.times.start(None, [PlannedRead(("db", "broken"), "f", 1, 1)], time.monotonic())
    reports.times.start(None, [PlannedRead(("db", "u"), "e" * 16, 1, 1)], time.monotonic() - 5)
    await reports.times.close()
    assert reports.seconds == {"e" * 16: [pytest.approx(5, abs=SLOWNESS_S)]}


async def test_statement_is_reported_when_its_client_requests_no_more_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statement_times, "_IDLE_S", 0.01)
    reports, age_s = Reports(), 7
    reports.times.start(PAGE, [PLANNED_READ], time.monotonic() - age_s)
    while not reports.seconds:  # The timeout of the test limits the wait.
        await asyncio.sleep(0.01)
    assert reports.seconds == {FINGERPRINT: [pytest.approx(age_s, abs=SLOWNESS_S)]}
    await reports.times.close()


async def test_number_of_measured_statements_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statement_times, "_STATEMENTS_MAX", 2)
    reports = Reports()
    for number in range(5):
        reports.times.start(PAGE.replace("q1", f"q{number}"), [PLANNED_READ], time.monotonic())
    await reports.times.close()
    assert len(reports.seconds[FINGERPRINT]) == 2


async def test_proxy_reports_the_time_of_a_rewritten_statement() -> None:
    async with (
        run_fake_seamark(lambda *_: {"statement": FINGERPRINT}) as seamark,
        run_fake_trino(lambda _: [ROWS, ROWS, END]) as trino,
    ):
        async with run_proxy(trino.url, seamark=seamark.url, rules=False) as rig:
            _, _, body = await rig.ask("POST", "/v1/statement", data=b"SELECT x FROM lake.db.t WHERE x = 1")
            page = json.loads(body)
            while "nextUri" in page:
                _, _, body = await rig.ask("GET", page["nextUri"].removeprefix(rig.url))
                page = json.loads(body)
            assert all(path == "db/t" for path, _ in seamark.requests)
        (report,) = [body for path, body in seamark.requests if path == "db/t/history"]
        assert report.pop("seconds") > 0
        assert report.pop("run")["tables"] == [["db", "t"]]
        assert report == {"statement": FINGERPRINT, "files": 3, "bytes": 30}
