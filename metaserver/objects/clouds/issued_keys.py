"""Keys for one table that a cloud issues, and their reuse while they live long enough."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from seamark.formats.runtime.clock import Clock, SystemClock
from seamark.formats.storage.locations import Location
from seamark.metaserver.objects.vending import VENDED

LIFETIME_MIN_S = 900
"""The shortest remaining lifetime of keys that a client gets."""
REUSE_MS = 60_000
"""Milliseconds for which a client may use an earlier answer with keys, instead of a new answer (HTTP 304)."""
_KEYS_MAX = 4096
_THREADS = 4
"""The maximum number of requests for keys that a cloud answers at the same time."""


@dataclass(frozen=True, slots=True)
class IssuedKeys:
    """Keys as properties of a FileIO, which are secrets, and the time at which they expire."""

    properties: dict[str, str] = field(repr=False)
    expires_ms: int


class KeyCache:
    """The keys that were issued last.

    Answers for the same table share keys, because each request to a cloud takes a tenth of a second. Concurrent answers
    share the request. The cache has its own threads, so that a cloud that does not answer delays no other work.
    The servers of a process share the cache, and each has an event loop.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._issued: OrderedDict[tuple[object, ...], IssuedKeys] = OrderedDict()
        self._requests: dict[tuple[object, ...], Future[IssuedKeys]] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._users = 0
        self._lock = threading.Lock()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Use the cache while the context is active. The end of the last context ends the threads."""
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
        """Return keys that live for at least `LIFETIME_MIN_S`.

        Args:
            key: The values that determine the keys.
            issue: Issues new keys. The function may block, so it is called in a thread.
        """
        with self._lock:
            issued = self._issued.get(key)
            if issued is not None and issued.expires_ms - self._clock.now_ms() >= LIFETIME_MIN_S * 1000:
                self._issued.move_to_end(key)
                return issued
            request = self._requests.get(key)
            if request is None:
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(_THREADS, "cloud-keys")
                request = self._requests[key] = self._threads.submit(self._request, key, issue)
        # With the shield, a cancelled waiter does not cancel the request, which other waiters may share.
        return await asyncio.shield(asyncio.wrap_future(request))

    def _request(self, key: tuple[object, ...], issue: Callable[[], IssuedKeys]) -> IssuedKeys:
        try:
            issued = issue()
            with self._lock:
                self._issued[key] = issued
                self._issued.move_to_end(key)
                while len(self._issued) > _KEYS_MAX:
                    self._issued.popitem(last=False)
            return issued
        finally:
            with self._lock:
                del self._requests[key]


def requests_keys(delegation: str | None) -> bool:
    """Return whether a client that sends this `X-Iceberg-Access-Delegation` wants keys. Without the header, it does."""
    requested = [name.strip().lower() for name in (delegation or "").split(",") if name.strip()]
    return not requested or VENDED in requested


def describe_keys(
    table: Location, address: dict[str, str], keys: dict[str, str]
) -> tuple[dict[str, str], list[dict[str, object]]]:
    """Return the `config` and the `storage-credentials` of a LoadTableResult.

    Clients read `storage-credentials` first, but before Iceberg 1.8 only `config`.
    """
    config = {**address, **keys}
    return config, [{"prefix": f"{table}/", "config": config}]
