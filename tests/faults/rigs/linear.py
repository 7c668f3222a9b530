"""A checker of histories of one table's head: a register changed by compare-and-swap, with unique values.

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
    began: float
    end_s: float
    outcome: str
    """The outcome of an append is ok, conflict or unknown. The outcome of a read is ok."""
    expected_value: int | None = None
    """The head on which an append was based."""
    value: int | None = None
    """The snapshot that an append adds, or the head that a read returned."""


def find_violations(chain: list[int], events: list[Event], initial_value: int | None = None) -> list[str]:
    """Return the parts of the history that the chain does not explain.

    The list is empty if the history is linearisable.

    Args:
        chain: The table's history, oldest first.
        initial_value: The head before the chain.
    """
    results: list[str] = []
    place = {value: index for index, value in enumerate(chain)}
    if len(place) != len(chain):
        results.append("the chain contains a snapshot twice")
    appends = {event.value: event for event in events if event.kind == "append" and event.outcome != "conflict"}
    for event in events:
        if event.kind != "append":
            continue
        if event.outcome == "ok" and event.value not in place:
            results.append(f"lost update: {event.value} was acknowledged and is not in the chain")
        if event.outcome == "conflict" and event.value in place:
            results.append(f"phantom: {event.value} was refused and is in the chain")
        if event.outcome == "ok" and event.value in place:
            index = place[event.value]
            predecessor = chain[index - 1] if index else initial_value
            if predecessor != event.expected_value:
                results.append(f"{event.value} replaced {predecessor}, but was built on {event.expected_value}")
    results += [f"nobody wrote {value}" for value in chain if value not in appends]
    results += _find_real_time_violations(chain, appends)
    for event in events:
        if event.kind == "append" and event.outcome == "conflict":
            results += _find_unfounded_conflict(event, chain, place, appends, initial_value)
        if event.kind == "read":
            results += _find_impossible_read(event, chain, place, appends, initial_value)
    return results


def _find_real_time_violations(chain: list[int], appends: dict[int | None, Event]) -> list[str]:
    """Return the violations of real time: an append that ended before another began must precede it in the chain."""
    results = []
    latest_start, latest_value = float("-inf"), 0
    for value in chain:
        event = appends.get(value)
        if event is None:
            continue
        if event.outcome == "ok" and event.end_s < latest_start:
            results.append(f"append {value} ended before append {latest_value} began, but is after it in the chain")
        if event.began > latest_start:
            latest_start, latest_value = event.began, value
    return results


def _compute_window(
    head: int | None, chain: list[int], place: dict[int, int], appends: dict[int | None, Event]
) -> tuple[float, float]:
    """Return the longest time in which `head` can have been current.

    It lasts from the beginning of its append to the end of the append of its successor.
    """
    index = place.get(head, -1)
    opens = appends[head].began if head in appends else float("-inf")
    successor = appends.get(chain[index + 1]) if index + 1 < len(chain) else None
    closes = successor.end_s if successor is not None and successor.outcome == "ok" else float("inf")
    return opens, closes


def _find_unfounded_conflict(
    event: Event, chain: list[int], place: dict[int, int], appends: dict[int | None, Event], initial_value: int | None
) -> list[str]:
    if event.expected_value != initial_value and event.expected_value not in place:
        return []  # The append was based on a head that never existed, so a conflict is right.
    index = -1 if event.expected_value == initial_value else place[event.expected_value]  # type: ignore[index]
    successor = appends.get(chain[index + 1]) if index + 1 < len(chain) else None
    if successor is None or successor.began > event.end_s:
        return [f"{event.value} was refused although {event.expected_value} was the head during the whole append"]
    return []


def _find_impossible_read(
    event: Event, chain: list[int], place: dict[int, int], appends: dict[int | None, Event], initial_value: int | None
) -> list[str]:
    if event.value != initial_value and event.value not in place:
        return [f"read {event.value}, which is not in the chain"]
    opens, closes = _compute_window(event.value, chain, place, appends)
    if event.end_s < opens:
        return [f"read {event.value} before it was written"]
    if event.began > closes:
        return [f"stale read of {event.value}: its successor had been acknowledged"]
    return []
