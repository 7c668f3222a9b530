"""An ObjectStore that fails on purpose, by seed or by script. The same seed and calls give the same `trace`.

A catalog must tolerate these faults: a request that never arrived, a request that was executed and lost its reply, a
full disk, a slow disk. Each fault leaves the object in the state that it claims.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from enum import Enum

from seamark.formats.runtime.errors import RetryLater, StorageError
from seamark.metaserver.objects.port import ObjectInfo, ObjectStore, Upload


class Fault(Enum):
    """The fault of one call to a store of objects."""

    BEFORE = "fails without any effect"
    BROKEN = "is refused permanently without any effect"
    LOST_REPLY = "is executed, then fails"
    FULL = "finds the disk full"
    SLOW = "is slow, then succeeds"


class FaultyObjects:
    """A store that fails.

    `rates` are the probabilities of faults for each call, drawn from `seed`. A script overrides them for the next
    calls.
    """

    def __init__(
        self, inner: ObjectStore, *, seed: int = 0, rates: Mapping[Fault, float] | None = None, slow_s: float = 0.01
    ) -> None:
        self.inner = inner
        self.rates = dict(rates or {})
        self.trace: list[str] = []
        self._random = random.Random(seed)
        self._slow_s = slow_s
        self._scripts: dict[str, deque[Fault | None]] = {}

    def script_faults(self, operation: str, *faults: Fault | None) -> None:
        """Set the faults of the next calls of read, exists, create, delete, list or ping, in order.

        None means no fault.
        """
        self._scripts.setdefault(operation, deque()).extend(faults)

    async def read(self, location: str, *, limit_bytes: int | None = None) -> bytes:
        fault = await self._apply_fault_before("read", location)
        data = await self.inner.read(location, limit_bytes=limit_bytes)
        self._apply_fault_after(fault, location)
        return data

    async def read_range(self, location: str, start: int, length: int) -> bytes:
        fault = await self._apply_fault_before("read", location)
        data = await self.inner.read_range(location, start, length)
        self._apply_fault_after(fault, location)
        return data

    async def exists(self, location: str) -> bool:
        fault = await self._apply_fault_before("exists", location)
        result = await self.inner.exists(location)
        self._apply_fault_after(fault, location)
        return result

    async def check_links(self, locations: Sequence[str]) -> None:
        await self.inner.check_links(locations)

    async def create(self, location: str, data: bytes, *, durable: bool = True) -> None:
        fault = await self._apply_fault_before("create", location)
        await self.inner.create(location, data, durable=durable)
        self._apply_fault_after(fault, location)

    async def delete(self, location: str) -> None:
        fault = await self._apply_fault_before("delete", location)
        await self.inner.delete(location)
        self._apply_fault_after(fault, location)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        fault = await self._apply_fault_before("list", prefix)
        async for info in self.inner.list(prefix):
            yield info
        self._apply_fault_after(fault, prefix)

    def list_uploads(self, prefix: str) -> AsyncIterator[Upload]:
        return self.inner.list_uploads(prefix)

    async def abort_uploads(self, uploads: Sequence[Upload]) -> int:
        return await self.inner.abort_uploads(uploads)

    async def ping(self) -> None:
        fault = await self._apply_fault_before("ping", "")
        await self.inner.ping()
        self._apply_fault_after(fault, "")

    def _draw_fault(self, operation: str) -> Fault | None:
        fault_script = self._scripts.get(operation)
        if fault_script:
            return fault_script.popleft()
        point = self._random.random()
        for fault, rate in self.rates.items():
            if fault is Fault.FULL and operation != "create":
                continue
            if point < rate:
                return fault
            point -= rate
        return None

    async def _apply_fault_before(self, operation: str, location: str) -> Fault | None:
        """Draw the fault of a call, and return it. Wait if the fault is `SLOW`.

        Raises:
            RetryLater: The fault prevents the call: the storage is unavailable, or the disk is full.
            StorageError: The fault prevents the call: the storage refuses it.
        """
        fault = self._draw_fault(operation)
        self.trace.append(f"{operation} {fault.name if fault else 'ok'}")
        if fault is Fault.BEFORE:
            raise RetryLater(f"injected: storage is unavailable for {location!r}")
        if fault is Fault.BROKEN:
            raise StorageError(f"injected: storage refused {location!r}")
        if fault is Fault.FULL:
            raise RetryLater(f"injected: the disk that holds {location!r} is full")
        if fault is Fault.SLOW:
            await asyncio.sleep(self._slow_s)
        return fault

    def _apply_fault_after(self, fault: Fault | None, location: str) -> None:
        """Raise an error after an executed call if its fault is that the reply is lost."""
        if fault is Fault.LOST_REPLY:
            raise RetryLater(f"injected: the reply for {location!r} was lost")
