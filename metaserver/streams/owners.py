"""Chooses the owner of a stream table: the process, among those with the same log, that flushes the table.

All processes with one log may append rows and read them. The owner keeps the rows of a table in memory, and flushes
them, so that other processes do not repeat this work. Rendezvous hashing over the live leases of the processes chooses
the owner. All shards of a table have the same owner, because a flush is one commit of the table.

Ownership is only a hint. For a short time, two processes may consider themselves the owner, or no process may. This is
safe, because the transaction of a flush compares the flushed offsets, so that a second flush of the same rows changes
nothing. If the owner has not flushed rows for the duration of a lease, another process flushes them.
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
"""The fraction of `peer_lease_s` for which a lease lasts. In the remaining time, other processes notice its end."""


class StreamOwners:
    """Decides whether this process is the owner of a table, and whether it flushes waiting rows."""

    def __init__(self, membership: Membership | None, *, lease_s: float = 0.0, only_reads: bool = False) -> None:
        """Create the object that chooses the owner of each table: the process that flushes its rows.

        Args:
            membership: The processes that can be owners, and have leases in the database. None if no other process uses
                the log, or if this process only reads.
            lease_s: The duration of a lease. If the owner of a table has flushed nothing for this time, another process
                may flush.
            only_reads: Whether this process never flushes.
        """
        self._membership = membership
        self._only_reads = only_reads
        self._lease_ms = int(1000 * lease_s)
        self._unmoved_offsets: dict[str, tuple[dict[int, int], int]] = {}
        """For tables of other owners, the flushed offsets, and the time since which this process has seen them."""

    def is_owner(self, uuid: str) -> bool:
        if self._only_reads:
            return False
        if self._membership is None:
            return True
        ranked_replicas = self._membership.rank_replicas(uuid)
        return not ranked_replicas or ranked_replicas[0] == self._membership.address

    def may_flush(
        self, uuid: str, flushed_offsets: Mapping[int, int], now_ms: int, *, owner_interval_ms: int = 0
    ) -> bool:
        """Return whether this process flushes the rows of a table that have waited long enough.

        The owner flushes them. Another process, unless it only reads, flushes them if the owner has flushed nothing for
        the duration of a lease.

        Args:
            uuid: The table.
            flushed_offsets: Its current flushed offsets.
            now_ms: The current time.
            owner_interval_ms: An additional time for which the owner may flush nothing.
        """
        if self._only_reads:
            return False
        if self.is_owner(uuid):
            self._unmoved_offsets.pop(uuid, None)
            return True
        offsets, since_ms = self._unmoved_offsets.get(uuid, ({}, now_ms))
        if offsets != flushed_offsets:
            offsets, since_ms = dict(flushed_offsets), now_ms
        self._unmoved_offsets[uuid] = (offsets, since_ms)
        return now_ms - since_ms >= self._lease_ms + owner_interval_ms

    def forget(self, uuid: str) -> None:
        """Forget how long the owner of a table has flushed nothing, because the table is closed or has no waiting rows.

        If rows wait again later, the owner again has the duration of a lease for the flush.
        """
        self._unmoved_offsets.pop(uuid, None)


@asynccontextmanager
async def open_owners(
    settings: Settings, store: PointerStore, clock: Clock, *, is_shared: bool
) -> AsyncIterator[StreamOwners]:
    """Include this process in the choice of owners while the context is active.

    The owner of a table is the process that flushes its rows. A process that only reads is never an owner. Without
    other processes, this process owns all tables.

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
        # Do not use the address of the server, because it does not identify one of its workers.
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
