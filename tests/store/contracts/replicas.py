"""The contract of pointer stores for replicas: leases by the clock of the database."""

from __future__ import annotations

import asyncio

from seamark.formats.runtime.clock import SimulatedClock
from seamark.metaserver.store.model import Replica
from seamark.metaserver.store.operations import RemoveReplica, RenewReplica
from seamark.metaserver.store.sql.generator_store import GeneratorStore
from tests.store.store_pair import StorePair

LONG_MS = 600_000


def build_replica(address: str, **fields: int | str) -> Replica:
    return Replica(**{"address": address, "weight": 1, "version": "1.0", "protocol": 1, "started_ms": 5, **fields})  # type: ignore[arg-type]


class ReplicasContract(StorePair):
    """The tests of the leases of replicas that each store passes."""

    async def test_every_replica_sees_all_replicas_with_a_live_lease(
        self, store: GeneratorStore, other_store: GeneratorStore
    ) -> None:
        assert await store.replicas() == []
        (replicas_after_first,) = await store.transact([RenewReplica(build_replica("10.0.0.2:1", weight=3), LONG_MS)])
        assert [replica.address for replica in replicas_after_first] == ["10.0.0.2:1"]
        (both_replicas,) = await other_store.transact([RenewReplica(build_replica("10.0.0.1:1"), LONG_MS)])
        assert [replica.address for replica in await store.replicas()] == [replica.address for replica in both_replicas]
        assert [
            (replica.address, replica.weight, replica.version, replica.protocol, replica.started_ms)
            for replica in both_replicas
        ] == [
            ("10.0.0.1:1", 1, "1.0", 1, 5),
            ("10.0.0.2:1", 3, "1.0", 1, 5),
        ]
        assert all(0 < replica.expires_in_ms <= LONG_MS for replica in both_replicas)

    async def test_lease_ends_by_the_clock_of_the_database(
        self, store: GeneratorStore, other_store: GeneratorStore, clock: SimulatedClock
    ) -> None:
        await store.transact([RenewReplica(build_replica("a:1"), 1), RenewReplica(build_replica("b:1"), LONG_MS)])
        clock.advance(10 * LONG_MS)  # The lease does not depend on the clock of the server.
        while len(live_replicas := await other_store.replicas()) > 1:
            await asyncio.sleep(0.005)
        assert [replica.address for replica in live_replicas] == ["b:1"]
        (replicas_after_renewal,) = await store.transact([RenewReplica(build_replica("a:1", version="2.0"), LONG_MS)])
        assert [(replica.address, replica.version) for replica in replicas_after_renewal] == [
            ("a:1", "2.0"),
            ("b:1", "1.0"),
        ]

    async def test_replica_that_leaves_is_removed_at_once(
        self, store: GeneratorStore, other_store: GeneratorStore
    ) -> None:
        await store.transact([RenewReplica(build_replica("a:1"), LONG_MS), RenewReplica(build_replica("b:1"), LONG_MS)])
        await other_store.transact([RemoveReplica("a:1"), RemoveReplica("nobody:1")])
        assert [replica.address for replica in await store.replicas()] == ["b:1"]
