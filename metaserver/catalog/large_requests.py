"""Runs work on the content of requests if the duration of the work grows with the size of the request.

For example, checking a schema of 50,000 columns takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.errors import BadRequest
from seamark.formats.runtime.fair_lock import FairLock

T = TypeVar("T")

LARGE_BYTES = 128 << 10
"""The minimum size of a large request as JSON. Work on a smaller request takes milliseconds."""


class LargeRequests(FairLock):
    """Runs the work of one large request at a time. Each principal in turn runs a request."""

    async def run_by_size(self, holder: str, size_bytes: int, work: Callable[[], T]) -> T:
        """Return the result of `work`, which has no side effects.

        The work of a large request runs in a thread, so that the event loop can serve other requests.

        Args:
            size_bytes: The approximate size of the request as JSON.
        """
        if size_bytes <= LARGE_BYTES:
            return work()
        return await self.run(holder, work)


def index_columns(metadata: TableMetadata) -> TableMetadata:
    """Return the same metadata with an index of the column names.

    For 50,000 columns, this takes a quarter of a second. Without it, the first plan would block the event
    loop for that time.
    """
    with suppress(BadRequest):  # The code that needs the columns raises the error.
        _ = metadata.current_schema.index
    return metadata
