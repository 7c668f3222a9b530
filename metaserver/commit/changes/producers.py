"""Finds the last sequence number that a producer has committed to a table, in the pointer store or in snapshots.

The transaction of each commit updates the producer's row in the store. A restored database may lack the row, and so may
a table that was registered again. In these cases, the summaries of the table's newest snapshots are searched.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.protocol.wire import PRODUCER_KEY, SEQUENCE_KEY
from seamark.metaserver.store.port import PointerStore

_PRODUCER_KEY_BYTES = PRODUCER_KEY.encode()
_DIGITS_MAX = 19
"""The maximum number of digits of a sequence number, which has 64 bits."""


class LastCommit(NamedTuple):
    """The last sequence number that a producer has committed, and its snapshot."""

    sequence: int
    snapshot_id: int | None


async def find_last_commit(
    store: PointerStore, uuid: str, producer: str, metadata: TableMetadata, look_back: int
) -> LastCommit | None:
    """Return the last commit of a producer to a table.

    The result is None if neither the store nor the newest `look_back` snapshots contain a commit of the producer.

    Args:
        store: The database.
        uuid: The UUID of the table.
        producer: The id of the producer.
        metadata: The metadata of the table.
        look_back: The maximum number of snapshots to search.
    """
    state = await store.load_producer(uuid, producer)
    if state is not None:
        return LastCommit(state.sequence, state.snapshot_id)
    return max(_find_recorded_commits(producer, metadata, look_back), default=None)


def find_producer_snapshot(
    producer: str, sequence: int, last_commit: LastCommit, metadata: TableMetadata, look_back: int
) -> int | None:
    """Return the snapshot that a producer committed with a sequence number, or None if the metadata do not contain it.

    Args:
        producer: The id of the producer.
        sequence: The sequence number, which is at most that of `last_commit`.
        last_commit: The last commit of the producer.
        metadata: The metadata of the table.
        look_back: The maximum number of snapshots to search.
    """
    if sequence == last_commit.sequence:
        return last_commit.snapshot_id
    commits = _find_recorded_commits(producer, metadata, look_back)
    return next((commit.snapshot_id for commit in commits if commit.sequence == sequence), None)


def _find_recorded_commits(producer: str, metadata: TableMetadata, look_back: int) -> Iterator[LastCommit]:
    for snapshot in metadata.snapshots[-look_back:]:
        # Search the raw JSON first: this is cheaper than decoding it, and most snapshots have no producer.
        if _PRODUCER_KEY_BYTES not in bytes(snapshot.summary):
            continue
        summary = snapshot.build_summary_map()
        sequence = summary.get(SEQUENCE_KEY, "")
        if summary.get(PRODUCER_KEY) == producer and sequence.isascii() and sequence.isdigit():
            yield LastCommit(int(sequence[:_DIGITS_MAX]), snapshot.snapshot_id)
