"""Open the peer tier of a worker: membership, cache, client, and the server for the other replicas."""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from importlib import metadata

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.connections import ConnectionLimits
from seamark.formats.runtime.errors import ConfigError
from seamark.metaserver.access.keyring import Keyring
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.objects.warehouse import Warehouse
from seamark.metaserver.peers.blobs import FileCache, open_file_cache
from seamark.metaserver.peers.client import PeerClient, open_peer_client
from seamark.metaserver.peers.files import PeerObjects
from seamark.metaserver.peers.membership import Membership
from seamark.metaserver.peers.protocol import VERSION, PeerTickets
from seamark.metaserver.peers.serving import PeerServer, RequestObserver, serve_peers
from seamark.metaserver.peers.used_tickets import UsedTickets
from seamark.metaserver.settings.fleet import split_address
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import Replica
from seamark.metaserver.store.port import PointerStore

USED_TICKETS_NAME = "peer-tickets"
"""The name of the file in the home folder that records the used tickets of requests."""


def bind_peer_socket(settings: Settings) -> socket.socket:
    """Return a bound TCP socket that does not listen yet.

    Raises:
        ConfigError: The host cannot be resolved, or the address is in use or is not an address of this machine.
    """
    name = "peer_listen" if settings.peer_listen else "peer_address"
    setting = getattr(settings, name)
    host, port = split_address(setting, name)
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"Cannot resolve the host of {name} {setting!r}: {error}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if settings.workers > 1:
            # Each worker process binds the same port, and the system divides the connections among them.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"Cannot bind {name} {setting!r}: {error.strerror}; use an address of this machine, and a free port"
        ) from None
    return sock


class Peers:
    """The running components of the peer tier: membership, client, server and cached files."""

    def __init__(
        self,
        settings: Settings,
        objects: PeerObjects,
        membership: Membership,
        cache: FileCache,
        client: PeerClient,
        server: PeerServer,
        sock: socket.socket,
    ) -> None:
        self._settings = settings
        self._server = server
        self._sock = sock
        self.objects = objects
        self.membership = membership
        self.cache = cache
        self.client = client

    def read_counts(self) -> dict[str, int]:
        """Return the numbers of reads since the start, by source."""
        damaged_count = self.client.damaged + self.cache.damaged
        return {**self.objects.counts.as_dict(), "damaged": damaged_count}

    @asynccontextmanager
    async def serve(
        self, limits: ConnectionLimits, tls: ssl.SSLContext | None, observer: RequestObserver
    ) -> AsyncIterator[None]:
        """Answer other replicas while the context is active, and add this replica to their list.

        `membership.run` keeps this replica in the list.
        """
        async with serve_peers(
            self._server,
            self._sock,
            limits,
            tls,
            observer,
            idle_timeout_s=self._settings.idle_timeout_s,
            shutdown_timeout_s=self._settings.drain_timeout_s,
        ):
            await self.membership.renew()
            try:
                yield
            finally:
                await self.membership.leave()


def _open_used_tickets(settings: Settings, clock: Clock) -> UsedTickets:
    """Open the file with the used tickets in the home folder, which belongs to one server.

    A ticket authenticates one request of another replica. The record shows whether a request is repeated.

    Raises:
        ConfigError: The file cannot be opened.
    """
    path = settings.home / USED_TICKETS_NAME
    try:
        settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        return UsedTickets(path, clock.now_ms())
    except OSError as error:
        raise ConfigError(
            f"Cannot open {path}, the record of the requests of other replicas: {error.strerror}; delete the file, or "
            "choose another home folder with --home"
        ) from None


@asynccontextmanager
async def open_peers(
    settings: Settings,
    stored_objects: ObjectStore,
    store: PointerStore,
    keyring: Keyring,
    clock: Clock,
    observer: RequestObserver,
) -> AsyncIterator[Peers]:
    """Open the cache of files that replicas share, and bind the port for the requests of other replicas.

    Raises:
        ConfigError: The address cannot be used.
    """
    async with AsyncExitStack() as stack:
        sock = stack.enter_context(bind_peer_socket(settings))
        host, port = split_address(settings.peer_address)
        if port == 0 and not settings.peer_listen:
            # The system has chosen the port, which other replicas must know.
            port = sock.getsockname()[1]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        replica = Replica(
            address=address,
            weight=settings.peer_weight,
            version=metadata.version("seamark"),
            protocol=VERSION,
            started_ms=clock.now_ms(),
        )
        warehouse = Warehouse(settings.make_warehouse_uri(), settings.allowed_locations)
        ticket_record = stack.enter_context(closing(_open_used_tickets(settings, clock)))
        tickets = PeerTickets(keyring, clock, ticket_record, leeway_s=settings.clock_leeway_s)
        membership = Membership(store, clock, replica, lease_s=settings.peer_lease_s)
        cache = await stack.enter_async_context(open_file_cache(settings, stored_objects))
        client = await stack.enter_async_context(open_peer_client(settings, tickets))
        objects = PeerObjects(stored_objects, warehouse, membership, cache, client, clock)
        server = PeerServer(address, warehouse, cache, tickets, clock, observer, limit=settings.peer_requests_limit)
        yield Peers(settings, objects, membership, cache, client, server, sock)
