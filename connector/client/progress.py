"""The progress of a job: files and bytes that it has read, of those that it will read.

Functions that read many files report here. The runner of a job receives it in a `reporting` block;
without one, nothing happens. The executors of a cluster have no such block: there a whole batch counts when it ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

_PAUSE_S = 0.5
"""Least time between two reports."""


@dataclass(frozen=True)
class WorkProgress:
    files_done: int = 0
    files_total: int = 0
    bytes_done: int = 0
    bytes_total: int = 0


class _Tracker:
    """Belongs to the thread of the job."""

    def __init__(self, report: Callable[[WorkProgress], None]) -> None:
        self._report = report
        self._reported_s = float("-inf")
        self.now = WorkProgress()

    def move(self, now: WorkProgress) -> None:
        self.now = now
        at_s = time.monotonic()
        if at_s >= self._reported_s + _PAUSE_S:
            self._reported_s = at_s
            self._report(now)


_TRACKER: ContextVar[_Tracker | None] = ContextVar("tracker", default=None)


@contextmanager
def reporting(report: Callable[[WorkProgress], None]) -> Iterator[None]:
    """Call `report` from time to time with the progress of what the block does."""
    token = _TRACKER.set(_Tracker(report))
    try:
        yield
    finally:
        _TRACKER.reset(token)


def expect(files: int, size_bytes: int) -> None:
    """Further files will be read."""
    if (tracker := _TRACKER.get()) is not None:
        now = tracker.now
        tracker.move(
            WorkProgress(now.files_done, now.files_total + files, now.bytes_done, now.bytes_total + size_bytes)
        )


def advance(files: int, size_bytes: int) -> None:
    """Files have been read."""
    if (tracker := _TRACKER.get()) is not None:
        now = tracker.now
        tracker.move(
            WorkProgress(now.files_done + files, now.files_total, now.bytes_done + size_bytes, now.bytes_total)
        )


@contextmanager
def part(files: int, size_bytes: int) -> Iterator[None]:
    """After the block, these files count as read, whether the block counted them itself or not."""
    tracker = _TRACKER.get()
    before = WorkProgress() if tracker is None else tracker.now
    yield
    if tracker is not None:
        advance(
            before.files_done + files - tracker.now.files_done, before.bytes_done + size_bytes - tracker.now.bytes_done
        )
