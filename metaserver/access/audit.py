"""The audit log: changes and refused requests, with their principals.

The log records the outcome of every request that changes something, of every SQL statement, and of refused
requests (401, 403). It records other reads only with the setting audit_reads. Refusals cannot fill the
disk: in each minute, only the first refused requests of an address or a principal are written, and one
record contains the number of further refusals (`refusals.py`). A record contains names, the operation, the
resource's path and the outcome. It never contains a header, a query string or a body, which may contain
secrets.

A task writes the records to the store in batches. A request waits for space in the queue, but not for the write. So a
record is never dropped while the server runs, and an attacker cannot displace records by flooding the log. There are
two exceptions, which do not wait and may be dropped: records of reads, and of refusals of unauthenticated clients
(`dropped` counts them). A process that is killed loses the records in its queue. Commits are also
recorded in the timeline, in the transaction of the commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from seamark.formats.runtime.clock import Clock
from seamark.metaserver.access.authorizer import is_recorded
from seamark.metaserver.access.principal import ANONYMOUS_NAME
from seamark.metaserver.access.refusals import Refusals
from seamark.metaserver.runtime.background import log_safely
from seamark.metaserver.store.model import AuditRecord
from seamark.metaserver.store.operations import SaveAudit
from seamark.metaserver.store.port import PointerStore

QUEUED_RECORDS_MAX = 10_000
"""The maximum number of queued records, which use about 5 MB."""
RECORDS_PER_BATCH = 512
CLOSE_TIMEOUT_S = 10.0
"""The maximum time that closing the log waits for the database to accept the last records."""
_RETRY_S = 0.5
_TEXT_MAX = 1024
_UNAUTHENTICATED, _FORBIDDEN = 401, 403
_DENIED = (_UNAUTHENTICATED, _FORBIDDEN)
_STRANGER_TEXT_MAX = 200
REFUSED = "refused"
"""The action of a record that counts refused requests. The resource of the record contains their number."""
_EACH_ADDRESS, _EACH_PRINCIPAL, _KEYS_MAX = 20, 500, 2_000
"""The refusals per minute that are written individually, of an address and of a principal, and the maximum number of
addresses and principals that are distinguished."""
_COUNTED_EVERY_S = 10.0
"""The interval in which the writer records the numbers of refusals if no other records arrive."""
_log = structlog.get_logger("seamark.audit")


class AuditLog:
    """The queue and the writer of audit records. An instance belongs to one event loop, and `open_audit` opens it."""

    def __init__(
        self,
        store: PointerStore,
        clock: Clock,
        *,
        reads: bool = False,
        capacity: int = QUEUED_RECORDS_MAX,
        batch: int = RECORDS_PER_BATCH,
    ) -> None:
        self._store = store
        self._clock = clock
        self._reads = reads
        self._batch = batch
        self._queue: asyncio.Queue[AuditRecord] = asyncio.Queue(capacity)
        self._is_closing = False
        self._unsaved_records = 0
        self._last_id = 0
        self._refusals = Refusals(each_address=_EACH_ADDRESS, each_principal=_EACH_PRINCIPAL, keys_max=_KEYS_MAX)
        self.dropped = 0
        """The number of lost records: records for which the queue had no space, and unwritten records at the end."""

    @property
    def waiting(self) -> int:
        """The number of records that are not in the store yet."""
        return self._unsaved_records

    def is_kept(self, operation: str, status: int) -> bool:
        """Return whether `record` would write the record, so that callers need not create it."""
        return self._reads or status in _DENIED or is_recorded(operation)

    async def record(
        self,
        *,
        principal_name: str,
        operation: str,
        resource: str,
        status: int,
        request_id: str,
        remote: str | None = None,
        kind: str | None = None,
    ) -> bool:
        """Queue a record. If the record must not be lost, wait for space in the queue.

        Args:
            kind: The kind of the request's error, or None if the request succeeded.

        Returns:
            Whether the record is queued. It is not if a refusal is only counted, or the log does not record the
            request.
        """
        if not self.is_kept(operation, status):
            return False
        is_anonymous_refusal = principal_name == ANONYMOUS_NAME and status in _DENIED
        if status in _DENIED:
            self._record_refusal_counts()
            if not self._refusals.count_and_check_limit(
                principal_name, remote or "", unauthenticated=is_anonymous_refusal
            ):
                return False
        record = AuditRecord(
            id=self._make_id(),
            at_ms=self._clock.now_ms(),
            principal_name=_shorten_and_clean(principal_name),
            action=operation,
            resource=_shorten_and_clean(resource[:_STRANGER_TEXT_MAX] if is_anonymous_refusal else resource),
            outcome=classify_outcome(status, kind),
            status=status,
            request_id=request_id,
            remote=_shorten_and_clean(remote or ""),
        )
        must_wait = not is_anonymous_refusal and (status in _DENIED or is_recorded(operation))
        if self._is_closing or (self._queue.full() and not must_wait):
            self.dropped += 1
            return False
        await self._queue.put(record)
        self._unsaved_records += 1
        return True

    def _record_refusal_counts(self, *, closing: bool = False) -> None:
        """Queue a record with the number of unwritten refusals of each client in the last minute.

        Only the first refusals of a client are written one by one, so that a client cannot fill the log. If the queue
        is full, a record is dropped and counted in `dropped`.

        Args:
            closing: Whether to queue the records before the minute has ended.
        """
        now_ms = self._clock.now_ms()
        for refusals in self._refusals.end_window_if_due(now_ms, closing=closing):
            if self._queue.full():
                self.dropped += 1
                continue
            self._queue.put_nowait(
                AuditRecord(
                    id=self._make_id(),
                    at_ms=now_ms,
                    principal_name=_shorten_and_clean(refusals.principal_name),
                    action=REFUSED,
                    resource=f"{refusals.count} more requests",
                    outcome="denied",
                    status=_UNAUTHENTICATED if refusals.principal_name == ANONYMOUS_NAME else _FORBIDDEN,
                    request_id="",
                    remote=_shorten_and_clean(refusals.remote),
                )
            )
            self._unsaved_records += 1

    def _make_id(self) -> str:
        """Return a UUIDv7 that is greater than the previous id, so that records of the same millisecond are ordered."""
        self._last_id = max(self._clock.uuid7().int, self._last_id + 1)
        return str(uuid.UUID(int=self._last_id))

    async def write(self) -> None:
        """Write queued records in batches, each in one transaction, until the task is cancelled.

        If no record arrives for `_COUNTED_EVERY_S`, queue the records with the numbers of refusals that are due.
        """
        while True:
            try:
                async with asyncio.timeout(_COUNTED_EVERY_S):
                    records = [await self._queue.get()]
            except TimeoutError:
                self._record_refusal_counts()
                continue
            while len(records) < self._batch and not self._queue.empty():
                records.append(self._queue.get_nowait())
            await self._save(tuple(records))
            self._unsaved_records -= len(records)
            for _ in records:
                self._queue.task_done()

    async def _save(self, records: tuple[AuditRecord, ...]) -> None:
        """Write records in one transaction. After an error, try again until the write succeeds."""
        # The write can be repeated after an unknown outcome, because a record with an existing id is not inserted
        # again.
        while True:
            try:
                await self._store.transact([SaveAudit(records)])
            except Exception as error:  # noqa: BLE001  without the writer, requests would block once the queue is full
                waiting_count = self.waiting
                log_safely(_log.warning, "audit records wait for the database", error=str(error), waiting=waiting_count)
                await asyncio.sleep(_RETRY_S)
            else:
                return

    async def flush(self) -> None:
        """Wait until all records that are now in the queue are in the store."""
        await self._queue.join()

    async def close(self, timeout_s: float) -> None:
        """Flush for at most `timeout_s`. Count the records that are lost after that, and log an error."""
        self._record_refusal_counts(closing=True)
        self._is_closing = True
        try:
            await asyncio.wait_for(self._queue.join(), timeout_s)
        except TimeoutError:
            self.dropped += self.waiting
            _log.error("audit records are lost: the database did not accept them", records=self.waiting)


def classify_outcome(status: int, kind: str | None) -> str:
    """Return the outcome: allowed, denied, or failed:<kind of the error>.

    Without a kind, the status of the answer replaces it.
    """
    if status in _DENIED:
        return "denied"
    return "allowed" if status < 400 else f"failed:{kind or status}"


def _shorten_and_clean(text: str) -> str:
    """Shorten the text, and replace characters of paths that PostgreSQL cannot store."""
    text = text.replace("\x00", "\ufffd").encode(errors="replace").decode()
    return text if len(text) <= _TEXT_MAX else text[: _TEXT_MAX - 1] + "…"


@asynccontextmanager
async def open_audit(
    store: PointerStore,
    clock: Clock,
    *,
    reads: bool = False,
    capacity: int = QUEUED_RECORDS_MAX,
    batch: int = RECORDS_PER_BATCH,
    close_timeout_s: float = CLOSE_TIMEOUT_S,
) -> AsyncIterator[AuditLog]:
    """Open the log with its writer. When the context ends, flush it.

    Args:
        store: The store of the records.
        clock: The clock.
        reads: Whether to record reads as well.
        capacity: The maximum number of records that wait for the database.
        batch: The maximum number of records of one transaction.
        close_timeout_s: The maximum time of the flush.
    """
    audit = AuditLog(store, clock, reads=reads, capacity=capacity, batch=batch)
    writer = asyncio.create_task(audit.write(), name="audit")
    try:
        yield audit
    finally:
        await audit.close(close_timeout_s)
        writer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await writer
