"""Time and randomness as a port, so that a simulation can be repeated from its seed.

Only this file reads the wall clock. A server uses `SystemClock`. A `SimulatedClock` advances only when `advance` or
`jump` is called.
"""

from __future__ import annotations

import random
import secrets
import time
import uuid
from functools import cache
from pathlib import Path
from typing import Protocol


class Clock(Protocol):
    """The interface for times and random numbers. A simulation replaces the system's clock by a simulated clock."""

    def now_ms(self) -> int:
        """Return milliseconds since the Unix epoch, UTC."""

    def monotonic(self) -> float:
        """Return the seconds of a clock that never steps back. Only differences are meaningful."""

    @property
    def machine(self) -> str:
        """A text that identifies the machine and its last start.

        Times of `monotonic` can be compared only if this text is equal.
        """

    def draw_bytes(self, count: int) -> bytes:
        """Return `count` random bytes. The bytes of `SystemClock` are cryptographically strong."""

    def uuid4(self) -> uuid.UUID:
        """Return a random UUID (RFC 9562, version 4)."""

    def uuid7(self) -> uuid.UUID:
        """Return a UUID that sorts by time (RFC 9562, version 7): its first 48 bits are `now_ms()`.

        The first 4,096 UUIDs of a millisecond sort in the order in which the clock created them.
        """


def _make_uuid4(random_bytes: bytes) -> uuid.UUID:
    return uuid.UUID(bytes=random_bytes, version=4)


class _Uuid7Sequence:
    """A generator of version 7 UUIDs with a 12-bit counter after the time (RFC 9562, section 6.2, method 1)."""

    def __init__(self) -> None:
        self._last_ms = 0
        self._counter = 0

    def generate(self, now_ms: int, random_bytes: bytes) -> uuid.UUID:
        """Return the next UUID, which contains 62 of the random bits."""
        self._counter = min(self._counter + 1, _COUNTER_MAX) if now_ms == self._last_ms else 0
        self._last_ms = now_ms
        # From the highest bit: 48 bits of time, 4 of the version (7), 12 of the counter, 2 of the variant (2), and 62
        # random bits.
        time_bits = (now_ms & (1 << 48) - 1) << 80
        random_bits = int.from_bytes(random_bytes, "big") & (1 << 62) - 1
        return uuid.UUID(int=time_bits | 0x7 << 76 | self._counter << 64 | 0x2 << 62 | random_bits)


_UUID_BYTES = 16
_UUID7_RANDOM_BYTES = 10
_COUNTER_MAX = (1 << 12) - 1
"""The maximum of the counter. Further UUIDs of the same millisecond are not in order."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@cache
def _find_boot_id() -> str:
    """Return the id that the operating system has chosen at the machine's last start."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return secrets.token_hex(16)  # Without this file, only this process can compare its times.


class SystemClock:
    """The clock of the operating system."""

    _uuids = _Uuid7Sequence()
    """The UUID sequence of the process."""

    monotonic = staticmethod(time.monotonic)
    """A built-in function instead of a Python function, because a plan calls it twenty times."""

    @property
    def machine(self) -> str:
        """The id of the machine's last start. Times of `monotonic` begin again at a start."""
        return _find_boot_id()

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def draw_bytes(self, count: int) -> bytes:
        return secrets.token_bytes(count)

    def uuid4(self) -> uuid.UUID:
        return _make_uuid4(self.draw_bytes(_UUID_BYTES))

    def uuid7(self) -> uuid.UUID:
        return self._uuids.generate(self.now_ms(), self.draw_bytes(_UUID7_RANDOM_BYTES))


class SimulatedClock:
    """A deterministic clock.

    With the same seed and the same calls, it returns the same times and UUIDs.
    """

    machine = "simulated"

    def __init__(self, seed: int, start_ms: int = 1_700_000_000_000) -> None:
        self._random = random.Random(seed)  # noqa: S311  a simulation must replay
        self._now_ms = start_ms
        self._jumped_ms = 0
        self._uuids = _Uuid7Sequence()

    def advance(self, ms: int) -> None:
        """Let time pass for both clocks."""
        self._now_ms += ms

    def jump(self, ms: int) -> None:
        """Move the wall clock forwards or backwards. The monotonic clock does not change."""
        self._now_ms += ms
        self._jumped_ms += ms

    def now_ms(self) -> int:
        return self._now_ms

    def monotonic(self) -> float:
        return (self._now_ms - self._jumped_ms) / 1000

    def draw_bytes(self, count: int) -> bytes:
        return self._random.randbytes(count)

    def uuid4(self) -> uuid.UUID:
        return _make_uuid4(self.draw_bytes(_UUID_BYTES))

    def uuid7(self) -> uuid.UUID:
        return self._uuids.generate(self.now_ms(), self.draw_bytes(_UUID7_RANDOM_BYTES))
