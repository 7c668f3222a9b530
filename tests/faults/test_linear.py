"""Tests of the checker of histories: it accepts histories of real registers, and reports each kind of violation."""

from __future__ import annotations

import random

import pytest

from tests.faults.rigs.linear import Event, find_violations


def build_append_event(value: int, expected: int | None, began_s: float, end_s: float, outcome: str = "ok") -> Event:
    return Event("append", began_s, end_s, outcome, expected, value)


def _simulate_history(seed: int) -> tuple[list[int], list[Event]]:
    """Simulate clients of a real compare-and-swap register. Each operation takes effect within its interval."""
    rng = random.Random(seed)
    head: int | None = None
    chain: list[int] = []
    events: list[Event] = []
    heads: list[int | None] = [None]
    for number in range(1, 200):
        effect_s = float(number)  # The time at which the operation takes effect.
        began_s, end_s = effect_s - rng.random() * 5, effect_s + rng.random() * 5
        if rng.random() < 0.3:
            events.append(Event("read", began_s, end_s, "ok", value=head))
            continue
        expected = rng.choice([head, rng.choice(heads)])
        if expected == head:
            chain.append(number)
            head = number
            heads.append(head)
            outcome = "unknown" if rng.random() < 0.1 else "ok"
            events.append(build_append_event(number, expected, began_s, end_s, outcome))
        else:
            events.append(build_append_event(number, expected, began_s, end_s, "conflict"))
    return chain, events


@pytest.mark.parametrize("seed", range(30))
def test_histories_of_a_real_register_are_accepted(seed: int) -> None:
    chain, events = _simulate_history(seed)
    assert find_violations(chain, events) == []


@pytest.mark.parametrize("seed", range(10))
def test_lost_update_is_reported(seed: int) -> None:
    chain, events = _simulate_history(seed)
    lost_value = next(event.value for event in events if event.kind == "append" and event.outcome == "ok")
    assert any(
        "lost update" in text for text in find_violations([value for value in chain if value != lost_value], events)
    )


def test_phantom_stale_read_and_wrong_order_are_reported() -> None:
    first_append, second_append = build_append_event(1, None, 0, 1), build_append_event(2, 1, 2, 3)
    assert find_violations([1, 2], [first_append, second_append]) == []
    assert "phantom" in find_violations([1, 2], [first_append, build_append_event(2, 1, 2, 3, "conflict")])[0]
    assert "stale read" in find_violations([1, 2], [first_append, second_append, Event("read", 4, 5, "ok", value=1)])[0]
    assert (
        "before it was written"
        in find_violations([1, 2], [first_append, second_append, Event("read", 0, 1, "ok", value=2)])[0]
    )
    assert any(
        "is after" in text for text in find_violations([2, 1], [first_append, build_append_event(2, None, 2, 3)])
    )
    assert (
        "was the head during the whole append"
        in find_violations([1], [first_append, build_append_event(9, 1, 2, 3, "conflict")])[0]
    )
    assert any(
        "built on" in text for text in find_violations([1, 2], [first_append, build_append_event(2, None, 2, 3)])
    )
    assert find_violations([1], []) == ["no client wrote 1"]
