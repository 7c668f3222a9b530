"""Places for requests and bytes for their bodies: a bound in all, and a share of it for each who asks.

The rule: nobody takes all. A principal has half of each bound; without a login there is one principal, who has all. A
request has a place while it is worked on, and another kind of place while its body is under way, so that clients that
send slowly keep none of those that work needs. No clock, no input or output.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal
from weakref import WeakValueDictionary

from metaserver.errors import RetryLater, TooManyRequests


class Bound:
    """`limit` of something, `share` of it for each holder. The holder None has no share: only the limit counts."""

    def __init__(self, what: str, limit: int, share: int) -> None:
        self._what = what
        self.limit = limit
        self.share = share
        self.taken = 0
        self._held: Counter[str] = Counter()

    def take(self, holder: str | None, amount: int = 1) -> None:
        """RetryLater where the bound is met, TooManyRequests where the holder's share is; nothing is taken then."""
        if self.taken + amount > self.limit:
            raise RetryLater(f"The server is at its limit of {self.limit:,} {self._what}; try again shortly")
        if holder is not None:
            held = self._held[holder] + amount
            if held > self.share:
                raise TooManyRequests(
                    f"{self.share:,} of the server's {self.limit:,} {self._what} are taken by {holder[:100]} alone, "
                    "which is the share of one; wait for answers before you send more"
                )
            self._held[holder] = held
        self.taken += amount

    def give_back(self, holder: str | None, amount: int = 1) -> None:
        self.taken -= amount
        if holder is not None:
            left = self._held[holder] - amount
            if left:
                self._held[holder] = left
            else:
                del self._held[holder]

    def check_invariants(self) -> None:
        assert 0 <= sum(self._held.values()) <= self.taken <= self.limit
        assert all(0 < held <= self.share for held in self._held.values())


class Turns:
    """One of all at a time, and one of each holder in the queue for it: who sends much waits for its own."""

    def __init__(self) -> None:
        self._all = asyncio.Lock()
        self._own: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def of(self, holder: str) -> AsyncIterator[None]:
        """The turn of `holder`, for as long as the block runs."""
        own = self._own.setdefault(holder, asyncio.Lock())
        async with own, self._all:
            yield


class Bounds:
    """Those of one worker."""

    def __init__(self, *, requests: int, watchers: int, body_bytes: int) -> None:
        self.working = Bound("requests at once", requests, max(1, requests // 2))
        self.reading = Bound("requests whose bodies are under way", requests, max(1, requests // 2))
        self.knocking = Bound("requests that log in at once", requests, max(1, requests // 2))
        self.tokens = Bound("requests for tokens at once", requests, max(1, requests // 4))
        # The timeline itself refuses more than `watchers`; reads of it that do not wait are few and short.
        self.watching = Bound("watchers", watchers + requests, max(1, watchers // 2))
        self.bodies = Bound("bytes of bodies", body_bytes, max(1, body_bytes // 2))
        self.parsing = Turns()
        """Of large bodies, one at a time."""
        self.inflating = Turns()
        """Of packed bodies, one step of one at a time."""

    def check_invariants(self) -> None:
        for bound in (self.working, self.reading, self.knocking, self.tokens, self.watching, self.bodies):
            bound.check_invariants()


Kind = Literal["working", "watching", "tokens"]


class Place:
    """One request's, from its login to its answer. Its owner calls `leave` in any case."""

    def __init__(self, bounds: Bounds, holder: str | None, kind: Kind) -> None:
        self._bounds = bounds
        self._holder = holder
        self._own = getattr(bounds, kind)
        self._bound: Bound | None = None
        self._bytes = 0
        self._move(self._own)

    def begin_reading(self) -> None:
        """The body is under way. RetryLater and TooManyRequests as of a `Bound`."""
        if self._own is not self._bounds.tokens:  # strangers keep nobody's body waiting
            self._move(self._bounds.reading)

    def end_reading(self) -> None:
        if self._bound is not self._own:
            self._move(self._own)

    def keep(self, size: int) -> None:
        """So many more bytes of the body are in memory, until the answer."""
        self._bounds.bodies.take(self._holder, size)
        self._bytes += size

    def leave(self) -> None:
        if self._bound is not None:
            self._bound.give_back(self._holder)
            self._bound = None
        if self._bytes:
            self._bounds.bodies.give_back(self._holder, self._bytes)
            self._bytes = 0

    def _move(self, bound: Bound) -> None:
        if self._bound is not None:
            self._bound.give_back(self._holder)
            self._bound = None
        bound.take(self._holder)
        self._bound = bound
