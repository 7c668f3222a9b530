"""Measures passed time: the time that has certainly passed, even if the clock jumps. Deletions by age depend on it.

If a clock jumps ahead, everything seems old: files that a writer is about to commit, tables that were dropped a
minute ago, snapshots, the audit log. So the catalog regularly records readings of the clock, and counts only time
between readings that has certainly passed. Between two readings on one machine, the monotonic clock measures the time.
Between readings on different machines, or after a restart of the machine, the catalog accepts a difference of up to an
hour. Any other difference is a gap: the clock may have jumped, or no server was running. Time in a gap does not count.
So nothing is deleted too early, but deletions may be late.

If a clock is set back, later gaps are removed, because they end in the future.
"""

from __future__ import annotations

from contextlib import suppress

import msgspec

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.decoding import convert_json
from seamark.formats.runtime.errors import CommitConflict
from seamark.metaserver.store.operations import SaveCursor
from seamark.metaserver.store.port import PointerStore

_CURSOR = "seamark clock"
_TOLERATED_MS = 60_000
"""The maximum difference between the clock and the monotonic clock, between two readings, that is not a gap.

Usual corrections of a clock are smaller.
"""
_BELIEVED_MS = 3_600_000
"""The maximum time between two readings that counts as passed without a monotonic clock, as after a restart."""
_SAVED_EVERY_MS = 60_000
_GAPS_MAX = 100

Gap = tuple[int, int]
"""The start and the end of a gap in the passed time, in milliseconds since the epoch."""


class _ClockReading(msgspec.Struct, frozen=True):
    """The last recorded reading of the clock, and the gaps before it, the oldest first.

    A gap is a period in which the clock was possibly set forward. It does not count as passed time.

    Attributes:
        since_ms: The time of the first recorded reading.
        monotonic_s: The reading of the monotonic clock of `machine`, which is never set.
        machine: The machine that recorded the reading, and its start. Monotonic clocks of others are not comparable.
    """

    since_ms: int
    now_ms: int
    monotonic_s: float
    machine: str
    gaps: tuple[Gap, ...] = ()
    is_first_merged: bool = False
    """Whether the first gap combines several gaps."""


class PassedTime(msgspec.Struct, frozen=True):
    """A reading of the clock, with the gaps before it.

    A gap is a period in which the clock was possibly set forward. It does not count as passed time.
    """

    now_ms: int
    since_ms: int
    """The time of the first reading of the clock. All time before it counts as passed."""
    gaps: tuple[Gap, ...] = ()

    def measure_ms(self, start_ms: int, end_ms: int) -> int:
        """Return the milliseconds that have certainly passed, which are negative if `start_ms` is after `end_ms`.

        The time in gaps does not count, because the clock was possibly set forward there.
        """
        if end_ms <= start_ms:
            return end_ms - start_ms
        uncounted_ms = (max(0, min(end, end_ms) - max(start, start_ms)) for start, end in self.gaps)
        return end_ms - start_ms - sum(uncounted_ms)

    def find_time_ago(self, age_ms: int) -> int:
        """Return the latest time since which at least `age_ms` have passed.

        Files that are older than this time have at least this age. The time in gaps does not count, because the clock
        was possibly set forward there.
        """
        until_ms, left_ms = self.now_ms, age_ms
        for start, end in reversed(self.gaps):
            counted_ms = until_ms - end
            if left_ms <= counted_ms:
                break
            until_ms, left_ms = start, left_ms - counted_ms
        return until_ms - left_ms


def _get_end(gap: Gap) -> int:
    _, end_ms = gap
    return end_ms


async def read_passed_time(store: PointerStore, clock: Clock) -> PassedTime:
    """Read the clock, and return the reading with its gaps: periods in which the clock was possibly set forward.

    From the gaps, callers compute ages that do not increase when a clock is set forward. The reading is recorded in the
    database, at most once a minute unless the clock has jumped.
    """
    text = await store.load_cursor(_CURSOR)
    last = None if text is None else convert_json(text, _ClockReading)
    reading = _add_reading(last, clock.now_ms(), clock.monotonic(), clock.machine)
    must_record = last is None or reading.gaps != last.gaps or not 0 <= reading.now_ms - last.now_ms < _SAVED_EVERY_MS
    if must_record:
        with suppress(CommitConflict):  # Another replica has recorded a reading at the same time.
            await store.transact(
                [SaveCursor(consumer=_CURSOR, expected=text, position=msgspec.json.encode(reading).decode())]
            )
    return PassedTime(reading.now_ms, reading.since_ms, reading.gaps)


def _add_reading(last: _ClockReading | None, now_ms: int, monotonic_s: float, machine: str) -> _ClockReading:
    """Return the record of a new reading of the clock, with a gap if the clock was possibly set forward since `last`.

    A gap is a period that does not count as passed time. On the same machine, the monotonic clock shows how much time
    has passed. Otherwise up to an hour (`_BELIEVED_MS`) between the readings counts as passed.

    Args:
        last: The last recorded reading, or None if there is none.
        now_ms: The clock now, in milliseconds since the epoch.
        monotonic_s: The monotonic clock of the machine now.
        machine: The machine and its start.
    """
    if last is None:
        return _ClockReading(now_ms, now_ms, monotonic_s, machine)
    gaps, is_first_merged = last.gaps, last.is_first_merged
    if is_first_merged and now_ms < _get_end(gaps[0]):
        # The combined gaps may end later than now. Move them before now, and keep their length.
        ((start, end),) = gaps[:1]
        gaps = ((start - end + now_ms, now_ms),)
    gaps = tuple((start, min(end, now_ms)) for start, end in gaps if start < now_ms)
    clock_ms = now_ms - last.now_ms
    if machine == last.machine and monotonic_s >= last.monotonic_s:
        monotonic_ms = round((monotonic_s - last.monotonic_s) * 1000)
        # Tolerate a slow drift of one second in a thousand, which is not a jump.
        is_gap = clock_ms - monotonic_ms > _TOLERATED_MS + monotonic_ms // 1000
    else:
        # The monotonic clocks are not comparable, as after a restart, so only a short time is believed.
        is_gap = clock_ms > _BELIEVED_MS
    if is_gap and gaps and _get_end(gaps[-1]) >= last.now_ms:
        # Extend the last gap. Otherwise each reading would add a gap if two replicas have different clocks.
        last_gap_start, _ = gaps[-1]
        gaps = (*gaps[:-1], (last_gap_start, now_ms))
    elif is_gap:
        gaps = (*gaps, (last.now_ms, now_ms))
    if len(gaps) > _GAPS_MAX:
        # Combine the first two gaps into one gap with their total length. The time between them counts as before.
        (start, end), (next_start, next_end) = gaps[:2]
        gaps, is_first_merged = ((start + next_start - end, next_end), *gaps[2:]), True
    return _ClockReading(min(last.since_ms, now_ms), now_ms, monotonic_s, machine, gaps, is_first_merged)
