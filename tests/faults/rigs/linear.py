"""A checker of histories of a table's current snapshot: a register changed by compare-and-swap, with unique values.

Because values are unique and each success names the value that it replaced, only the table's own chain of snapshots can
explain the history. So the check is exact and takes linear time, unlike in the general case (Herlihy and Wing 1990;
Gibbons and Korach 1997 for registers with unique values).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """One operation of one client. Times are in seconds on a clock that all clients share (CLOCK_MONOTONIC)."""

    kind: str
    """The kind of operation: append or read."""
    start_s: float
    end_s: float
    outcome: str
    """The outcome of an append is ok, conflict or unknown. The outcome of a read is ok."""
    expected_value: int | None = None
    """The snapshot on which an append was based."""
    value: int | None = None
    """The snapshot that an append adds, or the current snapshot that a read returned."""


def find_violations(chain: list[int], events: list[Event], initial_value: int | None = None) -> list[str]:
    """Return a text for each event that the snapshots of the table do not explain.

    Other texts name snapshots that no client wrote, or report that `chain` contains a snapshot twice. The list is empty
    if the events are linearisable: if some order of them explains all answers.

    Args:
        chain: The snapshots of the table, oldest first.
        events: The reads and appends of all clients, with their answers.
        initial_value: The snapshot that was current before the first one of `chain`, or None.
    """
    violations: list[str] = []
    index_by_value = {value: index for index, value in enumerate(chain)}
    if len(index_by_value) != len(chain):
        violations.append("the chain contains a snapshot twice")
    appends = {event.value: event for event in events if event.kind == "append" and event.outcome != "conflict"}
    for event in events:
        if event.kind != "append":
            continue
        if event.outcome == "ok" and event.value not in index_by_value:
            violations.append(f"lost update: {event.value} was acknowledged and is not in the chain")
        if event.outcome == "conflict" and event.value in index_by_value:
            violations.append(f"phantom: {event.value} was refused and is in the chain")
        if event.outcome == "ok" and event.value in index_by_value:
            index = index_by_value[event.value]
            predecessor = chain[index - 1] if index else initial_value
            if predecessor != event.expected_value:
                violations.append(f"{event.value} replaced {predecessor}, but was built on {event.expected_value}")
    violations += [f"no client wrote {value}" for value in chain if value not in appends]
    violations += _find_real_time_violations(chain, appends)
    for event in events:
        if event.kind == "append" and event.outcome == "conflict":
            violations += _find_unfounded_conflict(event, chain, index_by_value, appends, initial_value)
        if event.kind == "read":
            violations += _find_impossible_read(event, chain, index_by_value, appends, initial_value)
    return violations


def _find_real_time_violations(chain: list[int], appends: dict[int | None, Event]) -> list[str]:
    """Return the violations of this rule: an append that ended before another began must precede it in the chain."""
    violations = []
    latest_start_s, latest_value = float("-inf"), 0
    for value in chain:
        event = appends.get(value)
        if event is None:
            continue
        if event.outcome == "ok" and event.end_s < latest_start_s:
            violations.append(f"append {value} ended before append {latest_value} began, but is after it in the chain")
        if event.start_s > latest_start_s:
            latest_start_s, latest_value = event.start_s, value
    return violations


def _compute_window(
    head: int | None, chain: list[int], index_by_value: dict[int, int], appends: dict[int | None, Event]
) -> tuple[float, float]:
    """Return (earliest time, latest time) at which the snapshot `head` can have been current.

    This time lasts from the start of its append to the end of the append of its successor. The earliest time is minus
    infinity if its append is not among `appends`. The latest time is infinity if there is no acknowledged append of a
    successor.
    """
    index = index_by_value.get(head, -1)
    earliest_s = appends[head].start_s if head in appends else float("-inf")
    successor = appends.get(chain[index + 1]) if index + 1 < len(chain) else None
    latest_s = successor.end_s if successor is not None and successor.outcome == "ok" else float("inf")
    return earliest_s, latest_s


def _find_unfounded_conflict(
    event: Event,
    chain: list[int],
    index_by_value: dict[int, int],
    appends: dict[int | None, Event],
    initial_value: int | None,
) -> list[str]:
    if event.expected_value != initial_value and event.expected_value not in index_by_value:
        return []  # The append was based on a snapshot that was never current, so a conflict is right.
    index = -1 if event.expected_value == initial_value else index_by_value[event.expected_value]  # type: ignore[index]
    successor = appends.get(chain[index + 1]) if index + 1 < len(chain) else None
    if successor is None or successor.start_s > event.end_s:
        return [f"{event.value} was refused although {event.expected_value} was the head during the whole append"]
    return []


def _find_impossible_read(
    event: Event,
    chain: list[int],
    index_by_value: dict[int, int],
    appends: dict[int | None, Event],
    initial_value: int | None,
) -> list[str]:
    if event.value != initial_value and event.value not in index_by_value:
        return [f"read {event.value}, which is not in the chain"]
    earliest_s, latest_s = _compute_window(event.value, chain, index_by_value, appends)
    if event.end_s < earliest_s:
        return [f"read {event.value} before it was written"]
    if event.start_s > latest_s:
        return [f"stale read of {event.value}: its successor had been acknowledged"]
    return []
