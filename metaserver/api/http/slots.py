"""Limits for concurrent requests and for the memory of their bodies: in total, and a share for each principal.

No principal can use a whole limit: a principal may use half of each limit. If the server has no logins, there is only
one principal, which may use the whole limit. While a request is processed, it uses one kind of slot. While its body is
received, it uses a different kind, so that slow senders take no slots from processing. The module uses no clock and no
I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from seamark.formats.runtime.errors import RetryLater, TooManyRequests
from seamark.formats.runtime.fair_lock import FairLock
from seamark.metaserver.catalog.imports import ImportLimits


class HolderLimit:
    """A limit for all holders together, and a smaller limit, the share, for each holder.

    If the holder is None, only the limit for all holders applies.
    """

    def __init__(self, resource_name: str, limit: int, share: int) -> None:
        self._resource_name = resource_name
        self.limit = limit
        self.share = share
        self.taken = 0
        self._slots_by_holder: Counter[str] = Counter()

    def take(self, holder: str | None, amount: int = 1) -> None:
        """Take `amount` for a holder, or without a share if `holder` is None. If an error is raised, nothing is taken.

        Raises:
            RetryLater: The total would exceed the limit.
            TooManyRequests: The holder would exceed its share.
        """
        if self.taken + amount > self.limit:
            raise RetryLater(f"The server is at its limit of {self.limit:,} {self._resource_name}; try again shortly")
        if holder is not None:
            taken_slots = self._slots_by_holder.get(holder, 0) + amount
            if taken_slots > self.share:
                raise TooManyRequests(
                    f"{holder[:100]} uses its share of {self.share:,} of the server's {self.limit:,} "
                    f"{self._resource_name}; wait for answers before you send more"
                )
            self._slots_by_holder[holder] = taken_slots
        self.taken += amount

    def release(self, holder: str | None, amount: int = 1) -> None:
        """Release slots of a holder."""
        self.taken -= amount
        if holder is not None:
            remaining = self._slots_by_holder[holder] - amount
            if remaining:
                self._slots_by_holder[holder] = remaining
            else:
                del self._slots_by_holder[holder]

    @contextmanager
    def reserve(self, holder: str | None, amount: int = 1) -> Iterator[None]:
        """Take `amount` for a holder, and release it when the context ends.

        If the amount is 0, nothing is taken, because an entry with 0 would never be removed.

        Raises:
            RetryLater, TooManyRequests: See `take`.
        """
        if not amount:
            yield
            return
        self.take(holder, amount)
        try:
            yield
        finally:
            self.release(holder, amount)

    def check_invariants(self) -> None:
        assert 0 <= sum(self._slots_by_holder.values()) <= self.taken <= self.limit
        assert all(0 < held_slots <= self.share for held_slots in self._slots_by_holder.values())


class WorkerLimits:
    """The limits of one worker for concurrent work and its memory. All warehouses share them.

    Args:
        requests: The maximum number of concurrent requests.
        watchers: The maximum number of concurrent watchers.
        body_bytes: The maximum memory of the bodies of requests, and of each kind of bodies in the gateway.
        has_logins: Whether requests have different principals.
    """

    def __init__(self, *, requests: int, watchers: int, body_bytes: int, has_logins: bool = True) -> None:
        # The last argument is the share of one client. It is at most a half, so that a client cannot use a whole limit.
        self.working = HolderLimit("requests at once", requests, max(1, requests // 2))
        self.reading = HolderLimit("requests that send their bodies", requests, max(1, requests // 2))
        self.logging_in = HolderLimit("concurrent logins", requests, max(1, requests // 2))
        self.tokens = HolderLimit("requests for tokens at once", requests, max(1, requests // 4))
        # The timeline refuses more than `watchers` requests that wait. Its other reads are few and short.
        self.watching = HolderLimit("watchers", watchers + requests, max(1, watchers // 2))
        self.bodies = HolderLimit("bytes of bodies", body_bytes, max(1, body_bytes // 2))
        # Without logins, all requests to the gateway have the same principal, which may use all the memory.
        gateway_share = max(1, body_bytes // (2 if has_logins else 1))
        self.gateway_documents = HolderLimit("bytes of XML", body_bytes, gateway_share)
        self.gateway_writes = HolderLimit("bytes of conditional writes", body_bytes, gateway_share)
        self.parsing = FairLock()
        """The queue in which large bodies and large filters are parsed one at a time."""
        self.reading_sql = FairLock()
        """The queue in which SQL texts are parsed one at a time."""
        self.inflating = FairLock()
        """The queue in which compressed bodies are inflated one step at a time."""
        self.selecting = FairLock()
        """The queue in which groups of cubes are compared with conditions, one part at a time."""
        self.advising = FairLock()
        """The queue of requests for advice. One request at a time has a sample of rows in memory."""
        self.simulating = FairLock()
        """The queue in which simulations run in a thread, one at a time, even if their requests have ended."""
        self.comparing = FairLock()
        """The queue in which metadata files of events are compared, one pair at a time."""
        self.imports = ImportLimits()

    @property
    def _limits(self) -> tuple[HolderLimit, ...]:
        return (
            *(self.working, self.reading, self.logging_in, self.tokens, self.watching, self.bodies),
            *(self.gateway_documents, self.gateway_writes),
        )

    def check_invariants(self) -> None:
        for holder_limit in self._limits:
            holder_limit.check_invariants()

    @property
    def is_idle(self) -> bool:
        """Whether no request uses any of these limits, except `comparing`. Only tests call it."""
        is_importing = not self.imports.is_idle
        return not (is_importing or any(limit.taken for limit in self._limits)) and all(
            lock.is_free
            for lock in (
                *(self.parsing, self.reading_sql, self.inflating),
                *(self.selecting, self.advising, self.simulating),
            )
        )


Kind = Literal["working", "watching", "tokens"]
"""The attribute of `WorkerLimits` with the limit for a request."""


class RequestSlot:
    """The slots of one request, from its login to its answer.

    The owner must call `leave` in any case.
    """

    __slots__ = ("_bytes", "_holder", "_limit_of_kind", "_taken_limit", "_worker_limits", "body")

    def __init__(self, worker_limits: WorkerLimits, holder: str | None, kind: Kind) -> None:
        self._worker_limits = worker_limits
        self._holder = holder
        self._limit_of_kind = getattr(worker_limits, kind)
        self._limit_of_kind.take(holder)
        self._taken_limit: HolderLimit | None = self._limit_of_kind
        self._bytes = 0
        self.body: bytes | None = None
        """The whole body, after it was read."""

    def begin_reading(self) -> None:
        """Take a slot for receiving the body instead of the slot for processing. A request for a token keeps its slot.

        Raises:
            RetryLater: All slots for receiving bodies are in use.
            TooManyRequests: The principal uses its whole share of these slots.
        """
        if self._limit_of_kind is not self._worker_limits.tokens:
            # Unauthenticated requests must not delay the bodies of authenticated requests.
            self._change_slot(self._worker_limits.reading)

    def end_reading(self) -> None:
        if self._taken_limit is not self._limit_of_kind:
            self._change_slot(self._limit_of_kind)

    def reserve_memory(self, size: int) -> None:
        """Count further bytes against the limit of memory for requests. They are released when the answer is sent.

        Raises:
            RetryLater: The requests in progress use all of the memory.
            TooManyRequests: The requests of this client use its whole share.
        """
        if not size:  # An entry of zero bytes would never be released.
            return
        self._worker_limits.bodies.take(self._holder, size)
        self._bytes += size

    def leave(self) -> None:
        """Release the slot and the bytes of the request."""
        if self._taken_limit is not None:
            self._taken_limit.release(self._holder)
            self._taken_limit = None
        if self._bytes:
            self._worker_limits.bodies.release(self._holder, self._bytes)
            self._bytes = 0

    def _change_slot(self, holder_limit: HolderLimit) -> None:
        """Release the slot of the request, and take a slot of another limit."""
        if self._taken_limit is not None:
            self._taken_limit.release(self._holder)
            self._taken_limit = None
        holder_limit.take(self._holder)
        self._taken_limit = holder_limit
