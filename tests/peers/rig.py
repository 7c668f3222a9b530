"""Replicas in the test's process: a real database, files and ports, and a storage that counts and delays reads."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seamark.formats.runtime.clock import Clock, SystemClock
from seamark.formats.runtime.errors import RetryLater
from seamark.metaserver.access.keyring import open_keyring
from seamark.metaserver.api.http.observability.metrics import ServerMetrics
from seamark.metaserver.objects.forwarding import ForwardingObjects
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.objects.router import open_objects
from seamark.metaserver.peers.peers import Peers, open_peers
from seamark.metaserver.server import make_connection_limits, open_certificate
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.open import open_store
from tests.services.seamark import SHARED_KEY


class WatchedObjects(ForwardingObjects):
    """A real storage that counts complete reads by location, delays them by `delay_s`, and fails while `is_away`."""

    def __init__(self, object_store: ObjectStore) -> None:
        super().__init__(object_store)
        self.reads: Counter[str] = Counter()
        self.delay_s = 0.0
        self.is_away = False

    async def read(self, location: str, *, limit_bytes: int | None = None) -> bytes:
        self.reads[location] += 1
        await asyncio.sleep(self.delay_s)
        if self.is_away:
            raise RetryLater("the storage is unavailable")
        return await self._stored_objects.read(location, limit_bytes=limit_bytes)


@dataclass
class Node:
    """A replica. `stored_objects` is its storage, which counts the reads that no other replica has answered."""

    peers: Peers
    stored_objects: WatchedObjects
    settings: Settings

    @property
    def address(self) -> str:
        return self.peers.membership.address

    async def read(self, location: str, limit_bytes: int | None = None) -> bytes:
        return await self.peers.objects.read(location, limit_bytes=limit_bytes)

    def owns(self, location: str) -> bool:
        return self.peers.membership.rank_replicas(location)[0] == self.address


@asynccontextmanager
async def open_node(folder: Path, name: str, *, clock: Clock | None = None, **options: Any) -> AsyncIterator[Node]:
    """Open a replica that answers on a free port and has joined the other replicas.

    It uses the database and the warehouse in `folder`.
    """
    clock = clock or SystemClock()
    settings = Settings(
        **{
            "home": folder / name,
            "database": f"sqlite:///{folder / 'shared.db'}",
            "warehouse": f"file://{folder / 'warehouse'}",
            "encryption_key": SHARED_KEY,
            "peer_address": "127.0.0.1:0",
            "peer_lease_s": 60.0,
            **options,
        }
    )
    metrics, certificate = ServerMetrics(), open_certificate(settings)
    async with (
        open_store(settings.make_database_url(), clock=clock) as store,
        open_keyring(settings, store, clock) as keyring,
        open_objects(settings, clock) as real_objects,
    ):
        watched_objects = WatchedObjects(real_objects)
        async with (
            open_peers(settings, watched_objects, store, keyring, clock, metrics) as peers,
            peers.serve(make_connection_limits(settings), certificate and certificate.context, metrics),
        ):
            yield Node(peers, watched_objects, settings)


async def introduce_nodes(*nodes: Node) -> None:
    """Make every node read the list of live replicas, so that the nodes know each other."""
    for node in nodes:
        await node.peers.membership.renew()
