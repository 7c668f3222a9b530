"""The model of a campaign: the rows that writers have sent to two tables, and the rows that the server has
acknowledged.

The table `db.t` has rows `(producer, number)`, and the numbers of a producer are 0, 1, 2, … without a gap. The table
`db.k` has the key `id`. Each key belongs to one writer, and its values count its changes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

ABSENT = -1
"""The value of a key that is deleted, or that was never inserted."""


class WrongRows(AssertionError):
    """Raised if a reader returns rows that the model does not allow."""


class AcknowledgedCounts(NamedTuple):
    """The rows and changes that were acknowledged before a read began.

    Attributes:
        rows: The number of acknowledged rows of each producer.
        changes: The number of acknowledged changes of each key.
    """

    rows: Mapping[str, int]
    changes: Mapping[int, int]


@dataclass
class AcknowledgedRows:
    """The rows of both tables. Several threads may use it at the same time."""

    sent_rows: Counter[str] = field(default_factory=Counter)
    """The number of rows that each producer has sent, acknowledged or not."""
    acknowledged_rows: Counter[str] = field(default_factory=Counter)
    ends: dict[str, set[int]] = field(default_factory=dict)
    """The number of rows of each producer after each of its requests. A reader sees all rows of a request or none."""
    histories: dict[int, list[int]] = field(default_factory=dict)
    """The values that each key has had, in order. The first value is `ABSENT`."""
    acknowledged_changes: Counter[int] = field(default_factory=Counter)
    """The number of acknowledged changes of each key."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def reserve_rows(self, producer: str, count: int) -> range:
        """Return the numbers of the next rows of a producer, which sends them in one request. They count as sent."""
        with self._lock:
            first_number = self.sent_rows[producer]
            self.sent_rows[producer] += count
            self.ends.setdefault(producer, {0}).add(first_number + count)
            return range(first_number, first_number + count)

    def acknowledge_rows(self, producer: str) -> None:
        """Record that all rows that the producer has sent are acknowledged."""
        with self._lock:
            self.acknowledged_rows[producer] = self.sent_rows[producer]

    def begin_change(self, key: int, value: int) -> None:
        """Record that a change of a key was sent. The value is `ABSENT` for a delete."""
        with self._lock:
            self.histories.setdefault(key, [ABSENT]).append(value)

    def acknowledge_changes(self, keys: Iterable[int]) -> None:
        """Record that all changes that were sent so far for these keys are acknowledged."""
        with self._lock:
            for key in keys:
                self.acknowledged_changes[key] = len(self.histories[key]) - 1

    def snapshot(self) -> AcknowledgedCounts:
        """Return the rows and changes that are acknowledged now."""
        with self._lock:
            return AcknowledgedCounts(dict(self.acknowledged_rows), dict(self.acknowledged_changes))

    def check_rows(self, rows: Counter[tuple[str, int]], acknowledged_counts: AcknowledgedCounts) -> None:
        """Check the rows of `db.t` that a read returned.

        Raises:
            WrongRows: A row is missing, is repeated, or was never sent, or only a part of a request is visible.
        """
        if repeated_rows := [row for row, count in rows.items() if count > 1]:
            raise WrongRows(f"rows occur several times: {repeated_rows[:5]}")
        counts = Counter(producer for producer, _ in rows)
        with self._lock:
            sent_numbers, end_numbers = (
                dict(self.sent_rows),
                {producer: set(numbers) for producer, numbers in self.ends.items()},
            )
        for producer in {*counts, *acknowledged_counts.rows}:
            count = counts[producer]
            if missing_numbers := [number for number in range(count) if (producer, number) not in rows]:
                raise WrongRows(f"{producer} has {count} rows, and its row {missing_numbers[0]} is missing")
            if not acknowledged_counts.rows.get(producer, 0) <= count <= sent_numbers.get(producer, 0):
                raise WrongRows(
                    f"{producer} has {count} rows; {acknowledged_counts.rows.get(producer, 0)} were acknowledged "
                    f"before the read, and {sent_numbers.get(producer, 0)} were sent"
                )
            if count not in end_numbers[producer]:
                raise WrongRows(f"{producer} has {count} rows: only a part of a request is visible")

    def check_keys(self, rows: Counter[tuple[int, int]], acknowledged_counts: AcknowledgedCounts) -> None:
        """Check the rows of `db.k` that a read returned.

        Raises:
            WrongRows: A key has several rows, or a value that was outdated when the read began.
        """
        values = dict(rows.keys())
        if len(values) != sum(rows.values()):
            raise WrongRows("a key has several rows")
        with self._lock:
            histories = {key: list(history) for key, history in self.histories.items()}
        for key in {*values, *histories}:
            history = histories.get(key, [ABSENT])
            allowed_values = history[acknowledged_counts.changes.get(key, 0) :]
            if values.get(key, ABSENT) not in allowed_values:
                raise WrongRows(
                    f"key {key} has the value {values.get(key, ABSENT)}, and not one of {allowed_values[:5]}"
                )
