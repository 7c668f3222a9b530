"""Turns: who has collided often comes first, for a short time, and nobody is held back for long."""

from __future__ import annotations

from metaserver.commits.turns import Turns

T = "table"
A, B, C = ("a", "1"), ("b", "2"), ("c", "3")


def collide(turns: Turns, change: tuple[str, str], *times: float, table: str = T) -> None:
    for now_s in times:
        turns.collided(table, change, now_s)


def test_a_turn_is_earned_by_collisions_and_ends_with_the_change() -> None:
    turns = Turns(after=3, turn_s=10.0)
    collide(turns, A, 0.0, 0.5)
    assert turns.holder(T, 0.5) is None
    collide(turns, A, 1.0)
    assert turns.holder(T, 1.0) == (A, 4.0), "long enough for what an attempt takes"
    assert turns.holder("another", 1.0) is None
    turns.ended(T, A, 2.0)
    assert turns.holder(T, 2.0) is None


def test_who_has_waited_longest_is_next() -> None:
    turns = Turns(after=2, turn_s=10.0)
    collide(turns, B, 0.0)
    collide(turns, A, 0.5, 1.0)
    collide(turns, C, 0.6, 1.1)
    collide(turns, B, 1.2)
    assert turns.holder(T, 1.3) == (A, 1.0 + 4.0 - 1.3)
    turns.ended(T, A, 1.4)
    held = turns.holder(T, 1.4)
    assert held is not None
    assert held[0] == B
    turns.ended(T, B, 1.5)
    held = turns.holder(T, 1.5)
    assert held is not None
    assert held[0] == C


def test_a_turn_that_is_not_used_ends_and_the_table_rests() -> None:
    turns = Turns(after=1, turn_s=2.0)
    collide(turns, A, 0.0)
    assert turns.holder(T, 1.9) is not None
    assert turns.holder(T, 2.0) is None
    collide(turns, A, 2.1, 10.0, 21.0)
    assert turns.holder(T, 21.0) is None
    collide(turns, A, 22.1)
    assert turns.holder(T, 22.1) is not None


def test_without_turns_nobody_has_one() -> None:
    turns = Turns(after=1, turn_s=0.0)
    collide(turns, A, 0.0, 1.0, 2.0)
    assert turns.holder(T, 2.0) is None


def test_what_nobody_tries_again_is_forgotten() -> None:
    turns = Turns(after=2, turn_s=10.0)
    collide(turns, A, 0.0)
    collide(turns, B, 200.0)
    collide(turns, A, 201.0)
    assert turns.holder(T, 201.0) is None
