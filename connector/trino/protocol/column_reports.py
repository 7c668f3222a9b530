"""Reports to Seamark which columns a rewritten statement reads, as Trino has resolved them through views and `*`.

Trino's own scan reports name all columns of a table. Reports are sent beside the statement; one that fails is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence

import structlog

from seamark.connector.client.errors import ClientError
from seamark.connector.plans.async_client import Name
from seamark.connector.trino.protocol.access_rules import columns_read
from seamark.connector.trino.protocol.plan_withdrawal import PlanSnapshotRef

_PENDING_MAX = 100
_TIMEOUT_S = 10.0
_log = structlog.get_logger("seamark.trino-proxy")

Send = Callable[[Name, int, Collection[str]], Awaitable[None]]


class ColumnReports:
    """Belongs to one event loop.

    `send`: a table, the plan snapshot that is read, and columns.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._pending: set[asyncio.Task[None]] = set()

    def start(self, answer: bytes, plans: Sequence[PlanSnapshotRef]) -> None:
        """`answer`: Trino's description of the statement, which reads `plans`.

        Beyond the limit nothing is sent.
        """
        if len(self._pending) < _PENDING_MAX and plans:
            task = asyncio.create_task(self._report(answer, plans))
            self._pending.add(task)
            task.add_done_callback(self._pending.discard)

    async def close(self) -> None:
        await asyncio.gather(*self._pending, return_exceptions=True)

    async def _report(self, answer: bytes, plans: Sequence[PlanSnapshotRef]) -> None:
        read = {(schema, table): columns for (_, schema, table), columns in columns_read(answer).items()}
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                for name, plan_id in plans:
                    columns = read.get((".".join(name[:-1]).lower(), name[-1].lower()))
                    if columns is not None:
                        await self._send(name, plan_id, columns)
        except (ClientError, TimeoutError) as error:
            _log.debug("columns not reported", error=str(error) or type(error).__name__)
