"""Table locks: a change that has collided often comes first for a short time, and no other change waits for long."""

from __future__ import annotations

from seamark.metaserver.commit.native.table_locks import TableLocks

T = "table"
A, B, C = ("a", "1"), ("b", "2"), ("c", "3")


def collide(locks: TableLocks, change: tuple[str, str], *times: float, table: str = T) -> None:
    for now_s in times:
        locks.record_collision(table, change, now_s)


def test_a_turn_is_earned_by_collisions_and_ends_with_the_change() -> None:
    locks = TableLocks(after=3, lock_s=10.0)
    collide(locks, A, 0.0, 0.5)
    assert locks.holder(T, 0.5) is None
    collide(locks, A, 1.0)
    assert locks.holder(T, 1.0) == (A, 4.0), "long enough for what an attempt takes"
    assert locks.holder("another", 1.0) is None
    locks.release(T, A, 2.0)
    assert locks.holder(T, 2.0) is None


def test_who_has_waited_longest_is_next() -> None:
    locks = TableLocks(after=2, lock_s=10.0)
    collide(locks, B, 0.0)
    collide(locks, A, 0.5, 1.0)
    collide(locks, C, 0.6, 1.1)
    collide(locks, B, 1.2)
    assert locks.holder(T, 1.3) == (A, 1.0 + 4.0 - 1.3)
    locks.release(T, A, 1.4)
    held = locks.holder(T, 1.4)
    assert held is not None
    assert held[0] == B
    locks.release(T, B, 1.5)
    held = locks.holder(T, 1.5)
    assert held is not None
    assert held[0] == C


def test_a_turn_that_is_not_used_ends_and_the_table_rests() -> None:
    locks = TableLocks(after=1, lock_s=2.0)
    collide(locks, A, 0.0)
    assert locks.holder(T, 1.9) is not None
    assert locks.holder(T, 2.0) is None
    collide(locks, A, 2.1, 10.0, 21.0)
    assert locks.holder(T, 21.0) is None
    collide(locks, A, 22.1)
    assert locks.holder(T, 22.1) is not None


def test_without_turns_nobody_has_one() -> None:
    locks = TableLocks(after=1, lock_s=0.0)
    collide(locks, A, 0.0, 1.0, 2.0)
    assert locks.holder(T, 2.0) is None


def test_what_nobody_tries_again_is_forgotten() -> None:
    locks = TableLocks(after=2, lock_s=10.0)
    collide(locks, A, 0.0)
    collide(locks, B, 200.0)
    collide(locks, A, 201.0)
    assert locks.holder(T, 201.0) is None
