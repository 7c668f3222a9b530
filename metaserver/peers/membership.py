"""The replicas of the catalog, from their leases in the database, and the owner of each file.

The list of replicas is only a hint. If a replica has another list, it requests the file from another replica, which
also answers. A replica that has stopped is skipped (`files.py`). So if the database does not answer, the last list is
used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from seamark.cache.rendezvous import Rendezvous
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import SeamarkError
from seamark.metaserver.store.model import Replica
from seamark.metaserver.store.operations import RemoveReplica, RenewReplica
from seamark.metaserver.store.port import PointerStore

_log = structlog.get_logger("seamark.peers")


class Membership:
    """The list of replicas, and the lease of this replica.

    An instance belongs to one event loop. The workers of a machine have one address and are one replica.
    """

    def __init__(self, store: PointerStore, clock: Clock, replica: Replica, *, lease_s: float) -> None:
        self._store = store
        self._clock = clock
        self._lease_s = lease_s
        self._replicas: tuple[Replica, ...] = ()
        self._ring = Rendezvous({})
        self.replica = replica
        self.renewals = self.failures = 0

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """The replicas at the last renewal of the lease."""
        return self._replicas

    @property
    def address(self) -> str:
        return self.replica.address

    def rank_replicas(self, location: str) -> list[str]:
        """Return the addresses of the replicas that read the file for all replicas, in the order of preference.

        The first replica is the owner of the file. The second is its substitute while the owner does not answer.
        The result is empty before the first renewal, and if this replica is alone.
        """
        return self._ring.rank(location) if len(self._replicas) > 1 else []

    async def run(self) -> None:
        """Renew the lease until the task is cancelled."""
        while True:
            await self.renew()
            # Sleep between 75 % and 125 % of a third of the lease, so that replicas do not renew at the same time.
            jitter = self._clock.draw_bytes(1)[0] / 255
            await asyncio.sleep(self._lease_s / 3 * (0.75 + 0.5 * jitter))

    async def renew(self) -> None:
        """Renew the lease and read the list. Errors of the database are logged, but not raised."""
        try:
            (live_replicas,) = await self._store.transact([RenewReplica(self.replica, int(self._lease_s * 1000))])
        except SeamarkError as error:
            self.failures += 1
            _log.warning("the lease of this replica was not renewed", error=error.message)
            return
        self.renewals += 1
        self.replace(live_replicas)

    async def leave(self) -> None:
        """End the lease, so that the other replicas do not have to wait until it expires.

        Errors of the database are logged, but not raised.
        """
        self.replace(())  # From now on, this replica sends no requests to others.
        try:
            await self._store.transact([RemoveReplica(self.address)])
        except SeamarkError as error:
            _log.warning("the lease of this replica is not removed; it will expire", error=error.message)

    def replace(self, live_replicas: Sequence[Replica]) -> None:
        """Use a new list of replicas.

        Replicas with another protocol are omitted, because they cannot answer.
        """
        compatible_replicas = tuple(
            live_replica for live_replica in live_replicas if live_replica.protocol == self.replica.protocol
        )
        if [(replica.address, replica.weight) for replica in compatible_replicas] != [
            (replica.address, replica.weight) for replica in self._replicas
        ]:
            self._ring = Rendezvous({replica.address: replica.weight for replica in compatible_replicas})
            _log.info("replicas", addresses=[replica.address for replica in compatible_replicas])
        self._replicas = compatible_replicas
