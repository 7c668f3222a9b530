"""How far a producer has come with a table: by the pointer store, and where that knows nothing, by the snapshots.

The store's row is moved in the transaction of each commit. A database that was lost, or a table that was registered
anew, has no rows; then the summaries of the table's newest snapshots tell what is in the table already.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from metaserver.iceberg.metadata.metadata import TableMetadata
from metaserver.store.port import PointerStore
from metaserver.wire import PRODUCER_KEY, SEQUENCE_KEY

_MARK = PRODUCER_KEY.encode()
_DIGITS_MAX = 19


class Last(NamedTuple):
    """The last sequence that was committed, and the snapshot that it led to."""

    sequence: int
    snapshot_id: int | None


async def last_of(
    store: PointerStore, uuid: str, producer: str, metadata: TableMetadata, look_back: int
) -> Last | None:
    """None: it has committed nothing to the table, as far as its newest `look_back` snapshots tell."""
    state = await store.producer(uuid, producer)
    if state is not None:
        return Last(state.sequence, state.snapshot_id)
    return max(_told(producer, metadata, look_back), default=None)


def snapshot_of(producer: str, sequence: int, last: Last, metadata: TableMetadata, look_back: int) -> int | None:
    """The snapshot that a sequence led to, which is not above the last; None where no snapshot says so any more."""
    if sequence == last.sequence:
        return last.snapshot_id
    return next((one.snapshot_id for one in _told(producer, metadata, look_back) if one.sequence == sequence), None)


def _told(producer: str, metadata: TableMetadata, look_back: int) -> Iterator[Last]:
    for snapshot in metadata.snapshots[-look_back:]:
        if _MARK not in bytes(snapshot.summary):  # most are nobody's, and to decode them all takes longer
            continue
        summary = snapshot.summary_map()
        sequence = summary.get(SEQUENCE_KEY, "")
        if summary.get(PRODUCER_KEY) == producer and sequence.isascii() and sequence.isdigit():
            yield Last(int(sequence[:_DIGITS_MAX]), snapshot.snapshot_id)
