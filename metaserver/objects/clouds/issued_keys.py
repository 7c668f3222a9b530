"""Caches the keys that a cloud issues for one table, and returns them to clients while they are valid long enough."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from seamark.formats.runtime.clock import Clock, SystemClock
from seamark.formats.storage.locations import Location
from seamark.metaserver.objects.storage import ClientAccess
from seamark.metaserver.objects.vending import VENDED

LIFETIME_MIN_S = 900
"""The shortest remaining lifetime of keys that a client gets."""
REUSE_MS = 60_000
"""The time for which a client may reuse an earlier answer with keys (HTTP 304)."""
_KEYS_MAX = 4096
_THREADS = 4
"""The maximum number of requests for keys that a cloud answers at the same time."""


@dataclass(frozen=True, slots=True)
class IssuedKeys:
    """Keys as properties of a FileIO, which are secrets, and the time at which they expire."""

    properties: dict[str, str] = field(repr=False)
    expires_ms: int


class KeyCache:
    """Caches the last keys that a cloud has issued for each table.

    Answers for the same table share keys, because each request to a cloud takes a tenth of a second. Concurrent answers
    share a request. The cache has its own threads, so that a cloud that does not answer delays no other work.
    All servers of a process share the cache. Each server has its own event loop.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._issued_keys: OrderedDict[tuple[object, ...], IssuedKeys] = OrderedDict()
        self._requests: dict[tuple[object, ...], Future[IssuedKeys]] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._users = 0
        self._lock = threading.Lock()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Use the cache while the context is active. When the last context ends, the threads are stopped."""
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users and self._threads is not None:
                    # This does not wait: a running request ends within its timeout.
                    self._threads.shutdown(wait=False)
                    self._threads = None

    async def get(self, key: tuple[object, ...], issue: Callable[[], IssuedKeys]) -> IssuedKeys:
        """Return keys that are valid for at least `LIFETIME_MIN_S`.

        Args:
            key: The values that determine the keys.
            issue: Issues new keys. The function may block, so it is called in a thread.
        """
        with self._lock:
            issued_keys = self._issued_keys.get(key)
            if issued_keys is not None and issued_keys.expires_ms - self._clock.now_ms() >= LIFETIME_MIN_S * 1000:
                self._issued_keys.move_to_end(key)
                return issued_keys
            request = self._requests.get(key)
            if request is None:
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(_THREADS, "cloud-keys")
                request = self._requests[key] = self._threads.submit(self._issue_and_cache, key, issue)
        # With the shield, a cancelled waiter does not cancel the request, which other waiters may share.
        return await asyncio.shield(asyncio.wrap_future(request))

    def _issue_and_cache(self, key: tuple[object, ...], issue: Callable[[], IssuedKeys]) -> IssuedKeys:
        """Issue new keys, cache them, and remove the request from the pending requests."""
        try:
            issued_keys = issue()
            with self._lock:
                self._issued_keys[key] = issued_keys
                self._issued_keys.move_to_end(key)
                while len(self._issued_keys) > _KEYS_MAX:
                    self._issued_keys.popitem(last=False)
            return issued_keys
        finally:
            with self._lock:
                del self._requests[key]


class KeyIssuer(Protocol):
    """A function that issues keys for a table, and may block."""

    def __call__(self, table: Location, /, *, writable: bool) -> IssuedKeys: ...


def lends_keys(client_access: str, delegation: str | None) -> bool:
    """Return whether a client gets keys for a table.

    Args:
        client_access: The storage's setting for the access of clients, which is `none` if clients get no keys.
        delegation: The header `X-Iceberg-Access-Delegation`. A client that does not send it gets keys.
    """
    mechanisms = [name.strip().lower() for name in (delegation or "").split(",") if name.strip()]
    return client_access != "none" and (not mechanisms or VENDED in mechanisms)


async def add_issued_keys(
    cache: KeyCache,
    issue: KeyIssuer,
    identity: tuple[object, ...],
    table: Location,
    address: dict[str, str],
    *,
    may_write: Callable[[], bool] | None,
    refresh: tuple[str, str],
) -> ClientAccess:
    """Return the configuration of a client, with the keys that a cloud issues for a table.

    Args:
        cache: The cache of the cloud's keys.
        issue: Issues new keys.
        identity: The values that determine the keys, besides the table and the rights of the client.
        table: The location of the table.
        address: The properties with the address of the cloud.
        may_write: Returns whether the client may change the table. Without it, the client may only read.
        refresh: A tuple (property, path): the name of the client's property for the path of new keys, and this path,
            which may be empty.
    """
    writable = may_write is not None and may_write()
    issued_keys = await cache.get((*identity, table, writable), partial(issue, table, writable=writable))
    name, path = refresh
    return describe_keys(table, address, {**issued_keys.properties, **({name: path} if path else {})})


def describe_keys(table_location: Location, address: dict[str, str], credentials: dict[str, str]) -> ClientAccess:
    """Return the `config` and the `storage-credentials` of a LoadTableResult.

    Both contain the credentials. Clients read `storage-credentials` first, but clients before Iceberg 1.8 read only
    `config`.
    """
    config = {**address, **credentials}
    return config, [{"prefix": f"{table_location}/", "config": config}]
