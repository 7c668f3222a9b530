"""Runs the work of large requests in a thread, one request at a time.

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


class LargeRequestLock(FairLock):
    """A lock for the work of large requests. One request has it at a time. Waiting principals get it in rotation."""

    async def run_by_size(self, holder: str, size_bytes: int, work: Callable[[], T]) -> T:
        """Run `work`, which has no side effects, and return its result.

        The work of a large request runs in a thread, so that the event loop can serve other requests.

        Args:
            holder: The principal of the request.
            size_bytes: The approximate size of the request as JSON.
        """
        if size_bytes <= LARGE_BYTES:
            return work()
        return await self.run(holder, work)


def index_columns(metadata: TableMetadata) -> TableMetadata:
    """Build the index of the column names, and return the metadata.

    For 50,000 columns, this takes a quarter of a second. Otherwise the first plan would build the index, and block
    the event loop for this time.
    """
    with suppress(BadRequest):  # The code that needs the columns raises the error.
        _ = metadata.current_schema.index
    return metadata
