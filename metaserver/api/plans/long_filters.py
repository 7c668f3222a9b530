"""The filter of a pinned plan request, parsed and bound, and work that grows with its length.

A filter may list two hundred thousand values. To read, bind or write such a filter takes up to seconds of Python, so
all of this runs in a thread, for one filter at a time, and principals in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from seamark.formats.iceberg.expressions.expression import TRUE, Expression
from seamark.formats.iceberg.expressions.expression_json import parse_expression
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.protocol.wire import decode_json
from seamark.metaserver.api.http.slots import WorkerLimits
from seamark.metaserver.planner.scan.request import BoundScan, ScanRequest, bind_for_java
from seamark.metaserver.planner.scan.tokens import PinnedRequest

LONG_FILTER_BYTES = 64 << 10
"""Shorter filters take milliseconds."""
T = TypeVar("T")


class LongFilters:
    """Runs the work on the filters of one principal."""

    def __init__(self, bounds: WorkerLimits, who: str) -> None:
        self._turns = bounds.parsing
        self._who = who

    async def run(self, pinned: PinnedRequest, work: Callable[[], T]) -> T:
        """The result of `work` on this request; in a thread and in turn if its filter is long."""
        return await self._turns.run(self._who, work) if is_long(pinned) else work()

    async def bind(self, metadata: TableMetadata, pinned: PinnedRequest) -> BoundScan:
        """The filter, parsed and bound. BadRequest for an invalid filter."""
        if is_long(pinned):
            return await self._turns.run(self._who, partial(_bound, metadata, pinned))
        return _bound(metadata, pinned)


def is_long(pinned: PinnedRequest) -> bool:
    return len(pinned.filter) > LONG_FILTER_BYTES


def _bound(metadata: TableMetadata, pinned: PinnedRequest) -> BoundScan:
    request = ScanRequest(
        snapshot_id=pinned.snapshot_id,
        start_snapshot_id=pinned.start_snapshot_id,
        end_snapshot_id=pinned.end_snapshot_id,
        filter=_filter(pinned),
        case_sensitive=pinned.case_sensitive,
        use_snapshot_schema=pinned.use_snapshot_schema,
        nan_above=pinned.nan_above,
        may_delete_files=pinned.may_delete_files,
    )
    return bind_for_java(metadata, request)


def _filter(pinned: PinnedRequest) -> Expression:
    if not pinned.filter:
        return TRUE
    return parse_expression(decode_json(pinned.filter, "The filter"), unknown=True, functions=pinned.functions)
