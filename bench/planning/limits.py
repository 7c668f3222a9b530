"""The highest speed of this machine's memory, measured in the same run as the results that are compared with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

PROBE_BYTES = 512 << 20
"""The size of the probe in bytes, much larger than any CPU cache."""


@dataclass(frozen=True)
class Bandwidth:
    """The speed of memory: gigabytes (10⁹) per second that one core reads, and copies (each byte counted once)."""

    read_rate_gb_s: float
    copy_rate_gb_s: float

    def compute_floor_ms(self, size: int) -> float:
        """Return the minimum milliseconds to read `size` bytes from memory."""
        return size / self.read_rate_gb_s / 1e6

    def write_text(self) -> str:
        return f"reads {self.read_rate_gb_s:.1f} GB/s, copies {self.copy_rate_gb_s:.1f} GB/s"


def measure_bandwidth(size: int = PROBE_BYTES, times: int = 3) -> Bandwidth:
    """Return the best speed of `times` sums and copies over `size` bytes.

    The speed of a sum is limited by memory, not by the additions.
    """
    source = np.ones(size // 8, np.uint64)
    target = np.empty_like(source)
    read_s = min(_measure_s(source.sum) for _ in range(times))
    copy_s = min(_measure_s(lambda: np.copyto(target, source)) for _ in range(times))
    return Bandwidth(size / read_s / 1e9, size / copy_s / 1e9)


def _measure_s(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s
