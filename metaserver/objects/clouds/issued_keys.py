"""Keys for one table that a cloud issues, and their reuse while they live long enough."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from seamark.formats.runtime.clock import Clock, SystemClock
from seamark.formats.storage.locations import Location
from seamark.metaserver.objects.vending import VENDED

LIFETIME_MIN_S = 900
"""The shortest remaining lifetime of keys that a client gets."""
REUSE_MS = 60_000
"""Milliseconds for which a client may use an earlier answer with keys, instead of a new answer (HTTP 304)."""
_KEYS_MAX = 4096


@dataclass(frozen=True, slots=True)
class IssuedKeys:
    """Keys as properties of a FileIO, which are secrets, and the time at which they expire."""

    properties: dict[str, str] = field(repr=False)
    expires_ms: int


class KeyCache:
    """The keys that were issued last.

    Answers for the same table share keys, because each request to a cloud takes a tenth of a second.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._issued: OrderedDict[tuple[object, ...], IssuedKeys] = OrderedDict()

    async def get(self, key: tuple[object, ...], issue: Callable[[], IssuedKeys]) -> IssuedKeys:
        """Return keys that live for at least `LIFETIME_MIN_S`.

        Args:
            key: The values that determine the keys.
            issue: Issues new keys. The function may block, so it is called in a thread.
        """
        issued = self._issued.get(key)
        if issued is None or issued.expires_ms - self._clock.now_ms() < LIFETIME_MIN_S * 1000:
            issued = await asyncio.to_thread(issue)
            self._issued[key] = issued
            while len(self._issued) > _KEYS_MAX:
                self._issued.popitem(last=False)
        self._issued.move_to_end(key)
        return issued


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
