"""Work on what a client sent, whose duration grows with it: a schema of 50,000 columns takes seconds to check."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.errors import BadRequest
from seamark.formats.runtime.fair_lock import FairLock

T = TypeVar("T")

LARGE_BYTES = 128 << 10
"""The size of JSON from which a request counts as large. Less takes milliseconds."""


class LargeRequests(FairLock):
    """Checks one large request at a time, and principals in turn."""

    async def run_by_size(self, holder: str, size_bytes: int, work: Callable[[], T]) -> T:
        """Return the result of `work`, which is pure: of a large request in a thread, so that the loop serves others
        meanwhile.

        Args:
            size_bytes: Of the request as JSON, or about as much.
        """
        if size_bytes <= LARGE_BYTES:
            return work()
        return await self.run(holder, work)


def index_columns(metadata: TableMetadata) -> TableMetadata:
    """Return the same metadata with the names of its columns indexed.

    For 50,000 columns this takes a quarter of a second, which the first plan would take from the event loop.
    """
    with suppress(BadRequest):  # who needs the columns gets the error
        _ = metadata.current_schema.index
    return metadata
