"""Stores the scan and commit reports of engines for a limited time, and lists them."""

from __future__ import annotations

from typing import Any

from seamark.formats.runtime.errors import BadRequest, TooManyRequests
from seamark.metaserver.catalog.context import CatalogContext
from seamark.metaserver.catalog.quotas import Quota
from seamark.metaserver.catalog.values import Caller, Page
from seamark.metaserver.store.model import Entry, EntryKind, MetricsReport, NamespacePath
from seamark.metaserver.store.operations import SaveMetricsReport

_WINDOW_S = 60.0
_RETRY_S = 30
_PAGE_BYTES = 4 << 20
"""The maximum size of all reports in one answer. Reports are encoded on the event loop, so they must be small."""
_TYPES = ("scan-report", "commit-report")


class MetricsReports:
    def __init__(self, context: CatalogContext) -> None:
        self._context = context
        self._sent_quota = Quota(context.settings.metrics_rate_bytes)

    async def report(
        self, caller: Caller, namespace: NamespacePath, name: str, report: dict[str, Any], size: int
    ) -> Entry | None:
        """Store a report of `size` bytes, and return the table.

        The newest `metrics_reports_limit` reports of each table are kept. If the table does not exist, the report is
        not stored, and the result is None: in a CTAS, an engine reports its scans before it commits the table.

        Raises:
            BadRequest: The report-type is unknown, or a snapshot-id is not a 64-bit integer.
            NoSuchNamespace: The namespace does not exist.
            TooManyRequests: The caller has sent more than `metrics_rate_bytes` within a minute.
        """
        report_type = report.get("report-type")
        if report_type not in _TYPES:
            raise BadRequest(f"report-type is {str(report_type)[:40]!r}; it must be one of {', '.join(_TYPES)}")
        snapshot_id = report.get("snapshot-id")
        if not isinstance(snapshot_id, int) or isinstance(snapshot_id, bool) or not -(2**63) <= snapshot_id < 2**63:
            raise BadRequest("snapshot-id is not a 64-bit integer")
        entry = await self._context.store.load_entry(EntryKind.TABLE, namespace, name)
        if entry is None:
            await self._context.require_namespace(namespace)
            return None
        stored_report = MetricsReport(
            id=str(self._context.clock.uuid7()),
            uuid=entry.uuid,
            namespace=namespace,
            name=name,
            report_type=report_type,
            snapshot_id=snapshot_id,
            received_ms=self._context.clock.now_ms(),
            principal_name=caller.principal_name,
            report=report,
        )
        now_s = self._context.clock.monotonic()
        if not self._sent_quota.has_room(caller.principal_name, now_s, size):
            raise TooManyRequests(
                f"{caller.principal_name} has sent too many reports within a minute; this report is dropped", _RETRY_S
            )
        self._sent_quota.add(caller.principal_name, now_s, now_s + _WINDOW_S, size)
        keep = self._context.settings.metrics_reports_limit
        await self._context.store.transact([SaveMetricsReport(report=stored_report, keep=keep)])
        return entry

    async def list(
        self, namespace: NamespacePath, name: str, page_token: str | None, page_size: int | None
    ) -> Page[MetricsReport]:
        """Return a page of the reports of a table. See `CatalogContext.read_page`.

        The number of reports in a page is limited, so that even reports of the maximum size fit into `_PAGE_BYTES`.
        """
        uuid = (await self._context.require_entry(EntryKind.TABLE, namespace, name)).uuid
        limit = max(1, _PAGE_BYTES // self._context.settings.metrics_report_limit_bytes)

        async def read(after: str | None, limit: int) -> list[MetricsReport]:
            return await self._context.store.list_metrics_reports(uuid, after, limit)

        return await self._context.read_page(read, lambda row: row.id, page_token, min(page_size or limit, limit))
