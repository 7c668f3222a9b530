"""Records the runs of jobs on the timeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seamark.metaserver.access.worker_tokens import SERVICE_PRINCIPAL
from seamark.metaserver.clock import Clock
from seamark.metaserver.services.service import Job
from seamark.metaserver.store.model import EntryKind, Instant, InstantState
from seamark.metaserver.store.operations import RecordInstant
from seamark.metaserver.store.port import PointerStore
from seamark.metaserver.timeline.instants import MAINTENANCE
from seamark.metaserver.timeline.timeline import Timeline

_ERROR_MAX = 1000


class RunLog:
    def __init__(self, store: PointerStore, timeline: Timeline, clock: Clock) -> None:
        self._store = store
        self._timeline = timeline
        self._clock = clock

    async def record(self, job: Job, launcher: str, began_ms: int, totals: Mapping[str, Any], error: str) -> None:
        """One instant for a job that did something or failed; none for a job that found nothing to do."""
        if not totals and not error:
            return
        now_ms = self._clock.now_ms()
        seconds = round((now_ms - began_ms) / 1000, 3)
        summary: dict[str, Any] = {"service": job.service, "launcher": launcher, "seconds": seconds}
        summary |= {"error": error[:_ERROR_MAX]} if error else {"totals": dict(totals)}
        instant = Instant(
            id=str(self._clock.uuid7()),
            action=MAINTENANCE,
            state=InstantState.ROLLED_BACK if error else InstantState.COMPLETED,
            kind=EntryKind.TABLE,
            namespace=job.namespace,
            name=job.table,
            uuid=job.uuid,
            requested_ms=began_ms,
            completed_ms=now_ms,
            who=SERVICE_PRINCIPAL,
            summary=summary,
        )
        await self._store.transact([RecordInstant(instant=instant)])
        self._timeline.notify()
