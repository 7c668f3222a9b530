"""Measures the times of rewritten statements, and reports them to Seamark for the query history.

The proxy does not decode the pages of a statement, so it does not recognise the last page. A statement counts as ended
when its client has requested no page for `_IDLE_S`. Its time ends with the response to the last request. The time
includes the time that the client takes between two pages, so it is accurate only for short results, which most
analytical queries have. The number of measured statements is bounded. If a report fails, it is dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import structlog

from seamark.connector.client.errors import ClientError
from seamark.connector.plans.async_client import Name

_IDLE_S = 20.0
_STATEMENTS_MAX = 1000
"""The maximum number of statements that are measured at once."""
_REPORT_S = 10.0
_PAGES = ["", "v1", "statement"]
"""The first parts of the path of a page: `/v1/statement/STATE/QUERY_ID/SECRET/TOKEN`."""
_SECONDS_MIN = 1e-6
"""The minimum time that is reported, because Seamark requires a positive time."""
_log = structlog.get_logger("seamark.trino-proxy")


class PlannedRead(NamedTuple):
    """The files and bytes of one table that a statement reads by its plan.

    Attributes:
        statement: The fingerprint of the statement in the query history.
    """

    table: Name
    statement: str
    files: int
    bytes: int


Send = Callable[[PlannedRead, float, Sequence[Name]], Awaitable[None]]


@dataclass(slots=True)
class _Measurement:
    """A statement that is being measured, with the times of its start and of its last page."""

    reads: Sequence[PlannedRead]
    """The reads that are counted in the query history."""
    tables: Sequence[Name]
    """All tables that the statement reads by plans."""
    began_s: float
    ended_s: float


class StatementTimes:
    """Measures statements. An instance belongs to one event loop."""

    def __init__(self, send: Send) -> None:
        """Create an instance without statements.

        Args:
            send: A function that reports the time of a statement for one table. Its arguments are the read, the time
                in seconds, and the tables of the statement. Only one report of a statement has its tables. In the other
                reports, this argument is empty.
        """
        self._send = send
        self._measurements: dict[str, _Measurement] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._reports: set[asyncio.Task[None]] = set()

    def start(self, target: str | None, reads: Sequence[PlannedRead], began_s: float) -> None:
        """Start to measure a statement whose next page is at `target`. Without a next page, the statement has ended.

        Nothing is measured if no read is counted, or if too many statements are being measured.

        Args:
            target: The path of the next page, or None.
            reads: The reads of the statement. Only reads that are counted in the query history are reported.
            began_s: The time at which the statement was sent, on a monotonic clock.
        """
        counted_reads = [planned_read for planned_read in reads if planned_read.statement]
        query_id = None if target is None else _find_query_id(target)
        if not counted_reads or len(self._measurements) >= _STATEMENTS_MAX:
            return
        tables = [planned_read.table for planned_read in reads]
        measurement = _Measurement(counted_reads, tables, began_s, time.monotonic())
        if query_id is None:
            self._start_report(measurement)
        elif query_id not in self._measurements:
            self._measurements[query_id] = measurement
            self._report_later(query_id, _IDLE_S)

    def note_page(self, method: str, target: str) -> None:
        """Record that a client has received a page. After a DELETE, the statement is no longer measured."""
        query_id = _find_query_id(target) if self._measurements else None
        if query_id is None or query_id not in self._measurements:
            return
        if method == "DELETE":
            del self._measurements[query_id]
            self._timers.pop(query_id).cancel()
        else:
            self._measurements[query_id].ended_s = time.monotonic()

    async def close(self) -> None:
        """Report the statements that were measured, and wait for the reports."""
        for timer in self._timers.values():
            timer.cancel()
        for measurement in self._measurements.values():
            self._start_report(measurement)
        self._measurements.clear()
        await asyncio.gather(*self._reports, return_exceptions=True)

    def _report_later(self, query_id: str, delay_s: float) -> None:
        self._timers[query_id] = asyncio.get_running_loop().call_later(delay_s, self._report_if_idle, query_id)

    def _report_if_idle(self, query_id: str) -> None:
        """Report the time of a statement, and measure it no longer, if its client has requested no page for `_IDLE_S`.

        Otherwise, check it again later.
        """
        measurement = self._measurements[query_id]
        remaining_s = measurement.ended_s + _IDLE_S - time.monotonic()
        if remaining_s > 0:
            self._report_later(query_id, remaining_s)
        else:
            del self._measurements[query_id], self._timers[query_id]
            self._start_report(measurement)

    def _start_report(self, measurement: _Measurement) -> None:
        task = asyncio.create_task(self._report(measurement))
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    async def _report(self, measurement: _Measurement) -> None:
        seconds, tables = max(_SECONDS_MIN, measurement.ended_s - measurement.began_s), measurement.tables
        try:
            async with asyncio.timeout(_REPORT_S):
                for planned_read in measurement.reads:
                    await self._send(planned_read, seconds, tables)
                    tables = ()  # Only the first report of a statement has its tables.
        except (ClientError, TimeoutError) as error:
            _log.debug("time not reported", error=str(error) or type(error).__name__)


def _find_query_id(target: str) -> str | None:
    """Return the query id in the path of a page, or None for other paths."""
    id_index = len(_PAGES) + 1
    parts = target.split("/", id_index + 1)
    return parts[id_index] if len(parts) == id_index + 2 and parts[: len(_PAGES)] == _PAGES else None
