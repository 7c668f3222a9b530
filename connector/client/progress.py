"""Tracks the progress of a job: the files and bytes that it has read and that it will read.

Functions that read many files report their progress to this module. A job receives the reports in a `report_progress`
block. Outside of the block, and therefore on the executors of a cluster, reports are ignored. The driver counts a whole
batch of an executor when the batch ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

_PAUSE_S = 0.5
"""The minimum time between two reports, in seconds."""


@dataclass(frozen=True)
class WorkProgress:
    """The numbers and sizes of the files that a job has read, and of all files that it will read."""

    files_done: int = 0
    files_total: int = 0
    bytes_done: int = 0
    bytes_total: int = 0


class _Tracker:
    """The progress of the job in this thread. It is reported at most once in `_PAUSE_S` seconds."""

    def __init__(self, report: Callable[[WorkProgress], None]) -> None:
        self._report = report
        self._reported_s = float("-inf")
        self.progress = WorkProgress()

    def update(self, progress: WorkProgress) -> None:
        self.progress = progress
        now_s = time.monotonic()
        if now_s >= self._reported_s + _PAUSE_S:
            self._reported_s = now_s
            self._report(progress)


_TRACKER: ContextVar[_Tracker | None] = ContextVar("tracker", default=None)


@contextmanager
def report_progress(report: Callable[[WorkProgress], None]) -> Iterator[None]:
    """Call `report` at intervals with the progress that is made inside the block."""
    token = _TRACKER.set(_Tracker(report))
    try:
        yield
    finally:
        _TRACKER.reset(token)


def add_expected_work(files: int, size_bytes: int) -> None:
    """Add files to the total number and size of the files that the job will read."""
    if (tracker := _TRACKER.get()) is not None:
        progress = tracker.progress
        tracker.update(
            WorkProgress(
                progress.files_done,
                progress.files_total + files,
                progress.bytes_done,
                progress.bytes_total + size_bytes,
            )
        )


def advance(files: int, size_bytes: int) -> None:
    """Add files to the number and size of the files that the job has read."""
    if (tracker := _TRACKER.get()) is not None:
        progress = tracker.progress
        tracker.update(
            WorkProgress(
                progress.files_done + files,
                progress.files_total,
                progress.bytes_done + size_bytes,
                progress.bytes_total,
            )
        )


@contextmanager
def count_part(files: int, size_bytes: int) -> Iterator[None]:
    """At the end of the block, count these files as read, except those that the block has already counted."""
    tracker = _TRACKER.get()
    progress_before = WorkProgress() if tracker is None else tracker.progress
    yield
    if tracker is not None:
        advance(
            progress_before.files_done + files - tracker.progress.files_done,
            progress_before.bytes_done + size_bytes - tracker.progress.bytes_done,
        )
