"""Time and randomness as a port, so that a simulation replays from its seed. Only this file reads the wall clock.

A server uses `SystemClock`; a `SimulatedClock` advances only through `advance`.
"""

from __future__ import annotations

import random
import secrets
import time
import uuid
from typing import Protocol


class Clock(Protocol):
    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch, UTC."""

    def monotonic(self) -> float:
        """Seconds on a clock that never steps back; only differences are meaningful."""

    def random_bytes(self, count: int) -> bytes:
        """`count` random bytes; cryptographically strong on the system clock."""

    def uuid4(self) -> uuid.UUID:
        """A random UUID (RFC 9562, version 4)."""

    def uuid7(self) -> uuid.UUID:
        """A UUID whose leading 48 bits are `now_ms()` (RFC 9562, version 7): sorts by time."""


def _uuid4(rand: bytes) -> uuid.UUID:
    return uuid.UUID(bytes=rand, version=4)


def _uuid7(now_ms: int, rand: bytes) -> uuid.UUID:
    value = (now_ms & (1 << 48) - 1) << 80 | int.from_bytes(rand, "big")
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return uuid.UUID(int=value)


class SystemClock:
    monotonic = staticmethod(time.monotonic)
    """Not a method, which would cost a frame: a plan reads it twenty times."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def random_bytes(self, count: int) -> bytes:
        return secrets.token_bytes(count)

    def uuid4(self) -> uuid.UUID:
        return _uuid4(self.random_bytes(16))

    def uuid7(self) -> uuid.UUID:
        return _uuid7(self.now_ms(), self.random_bytes(10))


class SimulatedClock:
    """Deterministic: the same seed and the same calls give the same times and the same UUIDs."""

    def __init__(self, seed: int, start_ms: int = 1_700_000_000_000) -> None:
        self._random = random.Random(seed)  # noqa: S311  a simulation must replay
        self._now_ms = start_ms

    def advance(self, ms: int) -> None:
        self._now_ms += ms

    def now_ms(self) -> int:
        return self._now_ms

    def monotonic(self) -> float:
        return self._now_ms / 1000

    def random_bytes(self, count: int) -> bytes:
        return self._random.randbytes(count)

    def uuid4(self) -> uuid.UUID:
        return _uuid4(self.random_bytes(16))

    def uuid7(self) -> uuid.UUID:
        return _uuid7(self.now_ms(), self.random_bytes(10))
