"""Tests of commit priority.

A change that has often collided comes first for a short time, and no other change waits long.
"""

from __future__ import annotations

from seamark.metaserver.commit.changes.commit_priority import CommitPriority

TABLE = "table"
A, B, C = ("a", "1"), ("b", "2"), ("c", "3")
"""Three changes."""


def record_collisions(priority: CommitPriority, change: tuple[str, str], *times: float, table: str = TABLE) -> None:
    for now_s in times:
        priority.record_collision(table, change, now_s)


def test_priority_is_earned_by_collisions_and_ends_with_the_change() -> None:
    priority = CommitPriority(after=3, longest_s=10.0)
    record_collisions(priority, A, 0.0, 0.5)
    assert priority.expire_and_find_holder(TABLE, 0.5) is None
    record_collisions(priority, A, 1.0)
    assert priority.expire_and_find_holder(TABLE, 1.0) == (A, 4.0), "the priority lasts as long as one attempt takes"
    assert priority.expire_and_find_holder("another", 1.0) is None
    priority.release(TABLE, A, 2.0)
    assert priority.expire_and_find_holder(TABLE, 2.0) is None


def test_change_that_has_waited_longest_is_next() -> None:
    priority = CommitPriority(after=2, longest_s=10.0)
    record_collisions(priority, B, 0.0)
    record_collisions(priority, A, 0.5, 1.0)
    record_collisions(priority, C, 0.6, 1.1)
    record_collisions(priority, B, 1.2)
    # The priority of A lasts three seconds and twice the 0.5 s between its last two collisions.
    assert priority.expire_and_find_holder(TABLE, 1.3) == (A, 1.0 + 4.0 - 1.3), "the priority lasts from 1.0 on for 4 s"
    priority.release(TABLE, A, 1.4)
    holder = priority.expire_and_find_holder(TABLE, 1.4)
    assert holder is not None
    assert holder[0] == B
    priority.release(TABLE, B, 1.5)
    holder = priority.expire_and_find_holder(TABLE, 1.5)
    assert holder is not None
    assert holder[0] == C


def test_unused_priority_ends_and_the_table_pauses() -> None:
    priority = CommitPriority(after=1, longest_s=2.0)
    record_collisions(priority, A, 0.0)
    assert priority.expire_and_find_holder(TABLE, 1.9) is not None
    assert priority.expire_and_find_holder(TABLE, 2.0) is None
    record_collisions(priority, A, 2.1, 10.0, 21.0)
    assert priority.expire_and_find_holder(TABLE, 21.0) is None
    record_collisions(priority, A, 22.1)
    assert priority.expire_and_find_holder(TABLE, 22.1) is not None


def test_no_change_has_priority_with_length_0() -> None:
    priority = CommitPriority(after=1, longest_s=0.0)
    record_collisions(priority, A, 0.0, 1.0, 2.0)
    assert priority.expire_and_find_holder(TABLE, 2.0) is None


def test_change_that_is_not_repeated_is_forgotten() -> None:
    priority = CommitPriority(after=2, longest_s=10.0)
    record_collisions(priority, A, 0.0)
    record_collisions(priority, B, 200.0)
    record_collisions(priority, A, 201.0)
    assert priority.expire_and_find_holder(TABLE, 201.0) is None
