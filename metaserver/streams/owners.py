"""The process of a fleet that flushes a stream table: the owner of its shards.

All processes over one log may append rows, and may read them. The owner keeps the rows of a table in memory and flushes
them, so that other processes do not repeat this work. Rendezvous hashing over the live leases of the processes chooses
the owner. All shards of a table have one owner, because a flush is one commit of the table.

The owner is a hint. For a while, two processes may both be the owner, or no process may be the owner. This is safe,
because the transaction of a flush compares the flushed offsets, so a second flush of the same rows changes nothing.
Another process flushes the rows that the owner has not flushed for the time of a lease.
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib import metadata

from seamark.formats.runtime.clock import Clock
from seamark.metaserver.peers.membership import Membership
from seamark.metaserver.runtime.background import run_in_background
from seamark.metaserver.settings.fleet import READ
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import STREAM_OWNER_PROTOCOL, Replica
from seamark.metaserver.store.port import PointerStore

_LEASE_USE_FRACTION = 0.6
"""The fraction of `peer_lease_s` for which a lease lasts.

In the remaining time, other processes notice its end at their next renewal.
"""


class StreamOwners:
    """Says whether this process is the owner of a table, and whether it flushes rows that wait."""

    def __init__(self, membership: Membership | None, *, lease_s: float = 0.0, only_reads: bool = False) -> None:
        """Use the leases of `membership`; None if no other process uses the log, or if this process `only_reads`."""
        self._membership = membership
        self._only_reads = only_reads
        self._lease_ms = int(1000 * lease_s)
        self._unmoved: dict[str, tuple[dict[int, int], int]] = {}
        """The flushed offsets of tables of other owners, and since when this process sees them."""

    def is_owner(self, uuid: str) -> bool:
        if self._only_reads:
            return False
        if self._membership is None:
            return True
        ranked = self._membership.rank_replicas(uuid)
        return not ranked or ranked[0] == self._membership.address

    def may_flush(self, uuid: str, flushed: Mapping[int, int], now_ms: int, *, owner_interval_ms: int = 0) -> bool:
        """Return whether this process flushes the rows of a table that have waited long enough.

        The owner does. Another process does if the owner has flushed nothing for the time of a lease, unless it only
        reads.

        Args:
            uuid: The table.
            flushed: Its present flushed offsets.
            now_ms: The time.
            owner_interval_ms: A further time for which the owner may flush nothing.
        """
        if self._only_reads:
            return False
        if self.is_owner(uuid):
            self._unmoved.pop(uuid, None)
            return True
        offsets, since_ms = self._unmoved.get(uuid, ({}, now_ms))
        if offsets != flushed:
            offsets, since_ms = dict(flushed), now_ms
        self._unmoved[uuid] = (offsets, since_ms)
        return now_ms - since_ms >= self._lease_ms + owner_interval_ms

    def forget(self, uuid: str) -> None:
        """Forget a table that is closed, or has no waiting rows."""
        self._unmoved.pop(uuid, None)


@asynccontextmanager
async def open_owners(
    settings: Settings, store: PointerStore, clock: Clock, *, is_shared: bool
) -> AsyncIterator[StreamOwners]:
    """Take part in the choice of owners during the block.

    Args:
        is_shared: Whether other processes may use the log.
    """
    if settings.role == READ:
        yield StreamOwners(None, only_reads=True)
        return
    if not is_shared:
        yield StreamOwners(None)
        return
    replica = Replica(
        # Each worker is a separate process, so the address of the server does not identify it.
        address=f"{socket.gethostname()}/{os.getpid()}/{clock.uuid4()}",
        weight=1,
        version=metadata.version("seamark"),
        protocol=STREAM_OWNER_PROTOCOL,
        started_ms=clock.now_ms(),
    )
    membership = Membership(store, clock, replica, lease_s=_LEASE_USE_FRACTION * settings.peer_lease_s)
    await membership.renew()
    try:
        async with run_in_background("stream owners", membership.run):
            yield StreamOwners(membership, lease_s=settings.peer_lease_s)
    finally:
        await membership.leave()
