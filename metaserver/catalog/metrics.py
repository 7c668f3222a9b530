"""Scan and commit reports of engines: kept for a while, queryable; later advice on layout and indexes needs them."""

from __future__ import annotations

from typing import Any

from metaserver.catalog.parts import Parts
from metaserver.catalog.values import Caller, Page
from metaserver.errors import BadRequest
from metaserver.store.port import EntryKind, MetricsReport, NamespacePath, SaveMetricsReport

_TYPES = ("scan-report", "commit-report")


class Metrics:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def report(self, caller: Caller, namespace: NamespacePath, name: str, report: dict[str, Any]) -> None:
        """BadRequest for an unknown report-type or a snapshot-id that is no 64-bit integer; NoSuchTable."""
        report_type = report.get("report-type")
        if report_type not in _TYPES:
            raise BadRequest(f"report-type is {str(report_type)[:40]!r}; it must be one of {', '.join(_TYPES)}")
        snapshot_id = report.get("snapshot-id")
        if not isinstance(snapshot_id, int) or isinstance(snapshot_id, bool) or not -(2**63) <= snapshot_id < 2**63:
            raise BadRequest("snapshot-id must be a 64-bit integer")
        uuid = (await self._parts.require_entry(EntryKind.TABLE, namespace, name)).uuid
        kept = MetricsReport(
            id=str(self._parts.clock.uuid7()),
            uuid=uuid,
            namespace=namespace,
            name=name,
            report_type=report_type,
            snapshot_id=snapshot_id,
            received_ms=self._parts.clock.now_ms(),
            who=caller.who,
            report=report,
        )
        await self._parts.store.transact([SaveMetricsReport(report=kept)])

    async def list(
        self, namespace: NamespacePath, name: str, page_token: str | None, page_size: int | None
    ) -> Page[MetricsReport]:
        uuid = (await self._parts.require_entry(EntryKind.TABLE, namespace, name)).uuid

        async def read(after: str | None, limit: int) -> list[MetricsReport]:
            return await self._parts.store.metrics_reports(uuid, after, limit)

        return await self._parts.page(read, lambda row: row.id, page_token, page_size)
