"""Joins the rows of several small requests to a table into one append.

Most of the work for a small request does not depend on the number of its rows: creating the arrays of the columns, the
Arrow stream of the batch, and the entry of the log. So if the log cannot start another append to a table, the rows of
further requests wait, and then become one batch of the log. The requests do not take longer, because the log could not
write their rows earlier.

Each request has its own answer. If the joined batch cannot be prepared, or is refused before it is stored, each request
is appended alone. So a row that does not fit fails only its own request, and the message contains the number of the row
in this request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from seamark.formats.runtime.errors import BadRequest, CommitUnknown, RetryLater, TooLarge, TooManyRequests
from seamark.metaserver.catalog.values import LoadedTable
from seamark.metaserver.log.port import Acknowledgement, Position
from seamark.metaserver.streams.appends import TableRows
from seamark.metaserver.streams.incoming.prepared_rows import JoinedRows, RowPreparation

_REQUEST_ROWS_MAX = 500
"""The maximum number of rows of a request that joins a batch. Joining larger requests saves little time."""
_JOINED_ROWS_MAX = 2_000
"""The number of rows of a batch above which no further request joins it. Preparing them takes some milliseconds."""
_JOINED_BYTES_MAX = 1 << 20
"""The total size of the bodies of a batch above which no further request joins it."""
_ERRORS_OF_ONE_REQUEST = (BadRequest, TooLarge, TooManyRequests)
"""The errors after which nothing is stored, and that only some requests of a batch may have caused."""


def can_join(preparation: RowPreparation, rows: JoinedRows) -> bool:
    """Return whether the rows of a request may be appended together with the rows of other requests."""
    return 0 < len(rows) <= _REQUEST_ROWS_MAX and preparation.accepts_joined_rows(rows)


@dataclass(slots=True, eq=False)
class _Request:
    """The rows of a request, and its answer.

    Attributes:
        loaded: The table.
        preparation: Prepares the rows for the log.
        rows: The rows.
        size_bytes: The size of the body.
        arrived_s: The time of the arrival, by the clock of the event loop.
        answer: Receives the positions of the rows, or the error.
    """

    loaded: LoadedTable
    preparation: RowPreparation
    rows: JoinedRows
    size_bytes: int
    arrived_s: float
    answer: asyncio.Future[Acknowledgement]


class _TableQueue:
    """The waiting requests of one table, and the number of running appends."""

    def __init__(self) -> None:
        self.waiting: deque[_Request] = deque()
        self.append_count = 0

    def take_batch(self) -> list[_Request]:
        """Remove and return the waiting requests whose rows become the next batch.

        The requests of a batch have the same metadata, because their rows are prepared together.
        """
        batch: list[_Request] = []
        row_count = size_bytes = 0
        while self.waiting and row_count < _JOINED_ROWS_MAX and size_bytes < _JOINED_BYTES_MAX:
            request = self.waiting[0]
            if batch and request.loaded.metadata is not batch[0].loaded.metadata:
                break
            self.waiting.popleft()
            if not request.answer.done():  # Leave out cancelled requests.
                batch.append(request)
                row_count += len(request.rows)
                size_bytes += request.size_bytes
        return batch


class JoinedAppends:
    """Appends rows of concurrent requests together. An instance belongs to one event loop."""

    def __init__(
        self, append: Callable[[Sequence[TableRows], None, float], Awaitable[Acknowledgement]], *, appends_max: int
    ) -> None:
        """Create an instance without requests.

        Args:
            append: Appends rows to the log, like `Streams.append`.
            appends_max: The maximum number of concurrent appends to a table.
        """
        self._append_rows = append
        self._appends_max = appends_max
        self._queues: dict[str, _TableQueue] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.request_count = 0
        """The number of requests whose rows are not durable yet."""

    async def append(
        self, loaded_table: LoadedTable, preparation: RowPreparation, rows: JoinedRows, size_bytes: int
    ) -> Acknowledgement:
        """Append the rows of a request. They are durable on return.

        If the maximum number of appends is running for the table, the rows wait, and join the next append.

        Args:
            loaded_table: The table.
            preparation: Prepares the rows. `can_join` must have accepted them.
            rows: The rows.
            size_bytes: The size of the body.

        Raises:
            BadRequest: A row does not fit.
            CommitUnknown: It is unknown whether the rows are stored.
        """
        assert loaded_table.entry is not None
        uuid = loaded_table.entry.uuid
        queue = self._queues.setdefault(uuid, _TableQueue())
        loop = asyncio.get_running_loop()
        request = _Request(loaded_table, preparation, rows, size_bytes, loop.time(), loop.create_future())
        queue.waiting.append(request)
        self.request_count += 1
        if queue.append_count < self._appends_max:
            queue.append_count += 1
            task = asyncio.create_task(self._run(uuid, queue), name=f"append {uuid}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            return await request.answer
        finally:
            self.request_count -= 1

    async def _run(self, uuid: str, queue: _TableQueue) -> None:
        """Append waiting rows until no request is waiting. Answer all requests, even after an unexpected error."""
        batch: list[_Request] = []
        try:
            while batch := queue.take_batch():
                await self._append(batch)
        finally:
            _refuse_requests(
                batch, CommitUnknown("The server failed while it stored the rows; they may be stored or not")
            )
            queue.append_count -= 1
            if not queue.append_count:  # Requests can still wait here only after an unexpected error.
                del self._queues[uuid]
                _refuse_requests(
                    queue.waiting, RetryLater("The server failed before it stored the rows; send them again")
                )

    async def _append(self, batch: Sequence[_Request]) -> None:
        """Append the rows of a batch of requests together, and answer the requests.

        If the rows of one request may be the cause of an error, each request is appended alone, so that only this
        request is refused.
        """
        last_request = batch[-1]
        try:
            prepared_rows = last_request.preparation.prepare_joined([request.rows for request in batch])
            assert prepared_rows.batches is not None
        except Exception as error:  # noqa: BLE001  the rows of one request may cause any error, and nothing is stored
            await self._append_alone(batch, error)
            return
        try:
            acknowledgement = await self._append_rows(
                [TableRows(last_request.loaded, prepared_rows.batches)], None, batch[0].arrived_s
            )
        except _ERRORS_OF_ONE_REQUEST as error:
            await self._append_alone(batch, error)
            return
        except Exception as error:  # noqa: BLE001  no request may wait for a task that has ended
            _refuse_requests(batch, error)
            return
        except BaseException:
            _refuse_requests(
                batch, CommitUnknown("The server stops while it stores the rows; they may be stored or not")
            )
            raise
        (position,) = acknowledgement.positions
        start = position.offset
        for request in batch:
            end = start + len(request.rows)
            if not request.answer.done():
                request.answer.set_result(Acknowledgement((Position(position.shard, start, end),)))
            start = end

    async def _append_alone(self, batch: Sequence[_Request], error: Exception) -> None:
        """Append each request of a refused batch alone. If the batch has only one request, refuse this request."""
        if len(batch) == 1:
            _refuse_requests(batch, error)
        else:
            await asyncio.gather(*(self._append([request]) for request in batch))


def _refuse_requests(batch: Iterable[_Request], error: Exception) -> None:
    for request in batch:
        if not request.answer.done():
            request.answer.set_exception(error)
