"""The object storage for the rest of the server, which reads complete immutable files through the replicas.

Each file has an owner among the replicas (`membership.py`), which reads it from the storage and caches it. The other
replicas request the file from the owner. There are two rules. A peer that is slow, unavailable, full or wrong never
fails a read, because then the storage is read. Content is used only if its digest and its signature match.

An owner is slow if it takes longer than about 95 % of earlier answers, until it begins to answer or until the answer is
complete. Then the storage is read at the same time, and the first result is used (a hedged read). After some
consecutive failures, the owner is not used for a while, and its substitute reads the file for all replicas.

All other requests (ranges, writes, listings, deletes, files whose names can be used again) go to the storage.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, fields

from seamark.cache.single_flight import SingleFlight
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import Corrupt, TooLarge
from seamark.metaserver.objects.forwarding import ForwardingObjects
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.objects.warehouse import Warehouse
from seamark.metaserver.peers.blobs import FileCache
from seamark.metaserver.peers.client import PeerClient, PeerDamaged, PeerFailed, PendingRequest
from seamark.metaserver.peers.latencies import CircuitBreaker, Percentile
from seamark.metaserver.peers.membership import Membership
from seamark.metaserver.peers.protocol import is_immutable

_BREAKERS_MAX = 1024
"""With this many circuit breakers, all are removed, so that replicas that no longer exist take no memory."""


@dataclass(slots=True)
class PeerCounts:
    """The numbers of reads of files by this process since its start."""

    own: int = 0
    """Reads from the cache of this replica, because it owns the file."""
    hits: int = 0
    """Reads that another replica answered from its cache."""
    fetched: int = 0
    """Reads that another replica answered after it read the storage."""
    hedged: int = 0
    """Reads for which the storage was also read, because a replica was slow."""
    failed: int = 0
    """Reads from the storage because a replica failed."""
    skipped: int = 0
    """Reads for which the owner was skipped, because it had failed before."""
    direct: int = 0
    """Reads from the storage because this replica is alone, or the cache cannot be used for the file.

    The cache has no files that can change or are too large. A damaged copy is not used either.
    """

    def as_dict(self) -> dict[str, int]:
        return {item.name: getattr(self, item.name) for item in fields(self)}


class PeerObjects(ForwardingObjects):
    """An ObjectStore that reads the files of `stored_objects` through the replicas.

    An instance belongs to one event loop.
    """

    def __init__(
        self,
        stored_objects: ObjectStore,
        warehouse: Warehouse,
        membership: Membership,
        cache: FileCache,
        client: PeerClient,
        clock: Clock,
    ) -> None:
        super().__init__(stored_objects)
        self._warehouse = warehouse
        self._membership = membership
        self._cache = cache
        self._client = client
        self._clock = clock
        self._breakers: dict[str, CircuitBreaker] = {}
        self._flights: SingleFlight[tuple[str, int | None], bytes] = SingleFlight()
        # Each value is the time limit of one part of a read. It adapts to measured durations. Until enough durations
        # are measured, it is the first number of seconds.
        self._first_byte_latency = Percentile(0.05, min_s=0.005, max_s=0.1, factor=2.0)
        self._cached_latency = Percentile(0.1, min_s=0.01, max_s=1.0, factor=2.0)
        self._storage_latency = Percentile(0.25, min_s=0.02, max_s=5.0)
        self.counts = PeerCounts()

    async def read(self, location: str, *, limit_bytes: int | None = None) -> bytes:
        """Read a file through its owner, the replica that caches the file for all replicas.

        A file that can change is read from the storage, as is every file if no replica can answer.

        Raises:
            ObjectMissing: The file does not exist.
            TooLarge: The file has more than `limit_bytes` bytes.
        """
        checked_location = str(self._warehouse.parse(location))
        ranked_replicas = self._membership.rank_replicas(checked_location) if is_immutable(checked_location) else []
        if not ranked_replicas:
            self.counts.direct += 1
            return await self._stored_objects.read(checked_location, limit_bytes=limit_bytes)
        owner = self._choose_owner(ranked_replicas)
        if owner is None:
            self.counts.failed += 1
            return await self._stored_objects.read(checked_location, limit_bytes=limit_bytes)
        if owner == self._membership.address:
            return await self._read_owned_file(checked_location, limit_bytes)
        return await self._flights.run(
            (checked_location, limit_bytes), lambda: self._read_from_owner(owner, checked_location, limit_bytes)
        )

    def _choose_owner(self, ranked_replicas: list[str]) -> str | None:
        """Return the owner, or its substitute while the owner fails, or None if both fail."""
        for rank, address in enumerate(ranked_replicas):
            if address == self._membership.address or self._get_breaker(address).admit_request(self._clock.monotonic()):
                self.counts.skipped += rank
                return address
        return None

    def _get_breaker(self, address: str) -> CircuitBreaker:
        """Return the breaker of a replica. If there are too many breakers, all of them start again as closed."""
        breaker = self._breakers.get(address)
        if breaker is None:
            if len(self._breakers) >= _BREAKERS_MAX:
                self._breakers.clear()
            breaker = self._breakers[address] = CircuitBreaker()
        return breaker

    async def _read_owned_file(self, location: str, limit_bytes: int | None) -> bytes:
        """Read a file from the cache of this replica.

        If the file is too large for the cache, or if the cached copy is damaged, the storage is read.

        Raises:
            TooLarge: The file has more than `limit_bytes` bytes.
        """
        try:
            file = await self._cache.get(location)
        except (TooLarge, Corrupt):
            self.counts.direct += 1
            return await self._stored_objects.read(location, limit_bytes=limit_bytes)
        self.counts.own += 1
        if limit_bytes is not None and len(file.content) > limit_bytes:
            raise TooLarge(f"{location!r} has {len(file.content)} bytes, but at most {limit_bytes} are read")
        return bytes(file.content)

    async def _read_from_owner(self, owner: str, location: str, limit_bytes: int | None) -> bytes:
        """Read a file from its owner. If the owner is slow, also read the storage, and use the first content."""
        began_s = self._clock.monotonic()
        pending = self._client.request_file(owner, location, limit_bytes)
        storage_task: asyncio.Task[bytes] | None = None
        try:
            await self._wait_for_answer(pending, began_s)
            if not pending.answer.done():
                self.counts.hedged += 1
                storage_task = asyncio.get_running_loop().create_task(
                    self._read_storage(location, limit_bytes), name="hedged-read"
                )
                await asyncio.wait((pending.answer, storage_task), return_when=asyncio.FIRST_COMPLETED)
                # If the storage fails first, the owner may still send the file.
                if not pending.answer.done() and storage_task.exception() is not None:
                    await asyncio.wait((pending.answer,))
            if pending.answer.done():
                content = self._read_result(pending, owner, began_s)
                if content is not None:
                    return content
            elif not pending.acknowledged.is_set():
                # The storage was faster, and the owner has not even begun its answer, so this counts as a failure.
                self._get_breaker(owner).record_failure(self._clock.monotonic())
            if storage_task is None:
                return await self._read_storage(location, limit_bytes)
            return await storage_task
        finally:
            pending.answer.cancel()
            if storage_task is not None:
                storage_task.cancel()
            await asyncio.gather(pending.answer, *filter(None, (storage_task,)), return_exceptions=True)

    async def _wait_for_answer(self, pending: PendingRequest, began_s: float) -> None:
        """Wait until the answer is complete, or until it takes too long."""
        start_task = asyncio.get_running_loop().create_task(pending.acknowledged.wait(), name="peer-beginning")
        try:
            await asyncio.wait(
                (pending.answer, start_task),
                timeout=self._first_byte_latency.value_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            start_task.cancel()
        if not pending.acknowledged.is_set():
            return
        self._first_byte_latency.add(self._clock.monotonic() - began_s)
        if not pending.answer.done():
            latency = self._cached_latency if pending.from_cache else self._storage_latency
            await asyncio.wait((pending.answer,), timeout=latency.value_s)

    def _read_result(self, pending: PendingRequest, owner: str, began_s: float) -> bytes | None:
        """Return the content of a finished answer, or None after a failure.

        The circuit breaker counts the failure, unless the owner has begun to answer and its answer is not damaged. The
        owner is then available, but does not have the file.
        """
        now_s = self._clock.monotonic()
        try:
            content = pending.answer.result()
        except PeerFailed as error:
            self.counts.failed += 1
            if pending.acknowledged.is_set() and not isinstance(error, PeerDamaged):
                self._get_breaker(owner).record_success()  # The owner answers, but it does not have this file.
            else:
                self._get_breaker(owner).record_failure(now_s)
            return None
        self._get_breaker(owner).record_success()
        if pending.from_cache:
            self.counts.hits += 1
            self._cached_latency.add(now_s - began_s)
        else:
            self.counts.fetched += 1
            self._storage_latency.add(now_s - began_s)
        return content

    async def _read_storage(self, location: str, limit_bytes: int | None) -> bytes:
        began_s = self._clock.monotonic()
        content = await self._stored_objects.read(location, limit_bytes=limit_bytes)
        self._storage_latency.add(self._clock.monotonic() - began_s)
        return content

    @property
    def open_breakers(self) -> int:
        return sum(breaker.is_open for breaker in self._breakers.values())
