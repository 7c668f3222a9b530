"""Reports to Seamark which columns a rewritten statement reads. Trino provides them, with views and `*` resolved.

Trino's own scan reports contain all columns of a table. Reports are sent concurrently with the statement. If a report
fails, it is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence

import structlog

from seamark.connector.client.errors import ClientError
from seamark.connector.plans.async_client import Name
from seamark.connector.trino.protocol.access_rules import parse_columns_read
from seamark.connector.trino.protocol.plan_withdrawal import PlanSnapshotRef

_PENDING_MAX = 100
_TIMEOUT_S = 10.0
_log = structlog.get_logger("seamark.trino-proxy")

Send = Callable[[Name, int, Collection[str]], Awaitable[None]]


class ColumnReports:
    """Sends reports of read columns. An instance belongs to one event loop.

    Attributes:
        send: A function that sends a report. Its arguments are a table, the id of its plan snapshot, and the columns.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._pending: set[asyncio.Task[None]] = set()

    def start(self, answer: bytes, plans: Sequence[PlanSnapshotRef]) -> None:
        """Start a task that sends the reports of a statement. If `_PENDING_MAX` tasks are running, send nothing.

        Args:
            answer: Trino's description of the statement.
            plans: The plans that the statement reads.
        """
        if len(self._pending) < _PENDING_MAX and plans:
            task = asyncio.create_task(self._report(answer, plans))
            self._pending.add(task)
            task.add_done_callback(self._pending.discard)

    async def close(self) -> None:
        await asyncio.gather(*self._pending, return_exceptions=True)

    async def _report(self, answer: bytes, plans: Sequence[PlanSnapshotRef]) -> None:
        columns_by_table = {
            (schema, table): columns for (_, schema, table), columns in parse_columns_read(answer).items()
        }
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                for name, plan_id in plans:
                    columns = columns_by_table.get((".".join(name[:-1]).lower(), name[-1].lower()))
                    if columns is not None:
                        await self._send(name, plan_id, columns)
        except (ClientError, TimeoutError) as error:
            _log.debug("columns not reported", error=str(error) or type(error).__name__)
