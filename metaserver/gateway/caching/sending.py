"""Limits the memory of answers that clients have not received yet, for one worker.

An answer that waits for its client keeps bytes in memory: bytes that the connection has but the kernel has not
accepted, and bytes that the store has sent. All answers share a budget, and a principal may use a share of it. An
answer gets at most an eighth of the free budget, but always `STEP_MIN_BYTES`, so that no client waits for another
client. So 10,000 slow clients use at most the budget plus `STEP_MIN_BYTES` each, for reads of any length.
"""

from __future__ import annotations

from collections import Counter

STEP_BYTES = 1 << 20
"""The maximum number of bytes that an answer may pass to the kernel in one call."""
STEP_MIN_BYTES = 16 << 10
"""The number of bytes that an answer may always keep, even if the budget is exhausted."""
_SEND_BUDGET_DIVISOR = 8


class SendBudget:
    """The budget for the unsent bytes of a worker. An instance belongs to one event loop."""

    def __init__(self, limit_bytes: int, share_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._share_bytes = share_bytes
        self.taken_bytes = 0
        self._bytes_by_holder: Counter[str] = Counter()

    def compute_next_bytes(self, holder: str) -> int:
        """Compute how many unsent bytes an answer to the principal `holder` may keep. The method charges nothing.

        An answer gets a part of the free bytes, so that other answers also get some. The share of one principal limits
        the answer only while the budget is charged. If no answer has unsent bytes, no other principal needs them. The
        result is at least `STEP_MIN_BYTES`, even without free bytes.
        """
        free_bytes = self._limit_bytes - self.taken_bytes
        if self._bytes_by_holder:
            free_bytes = min(free_bytes, self._share_bytes - self._bytes_by_holder.get(holder, 0))
        return max(STEP_MIN_BYTES, min(STEP_BYTES, free_bytes // _SEND_BUDGET_DIVISOR))

    def take(self, holder: str, size_bytes: int) -> None:
        self.taken_bytes += size_bytes
        self._bytes_by_holder[holder] += size_bytes

    def release(self, holder: str, size_bytes: int) -> None:
        self.taken_bytes -= size_bytes
        self._bytes_by_holder[holder] -= size_bytes
        if not self._bytes_by_holder[holder]:
            del self._bytes_by_holder[holder]

    def check_invariants(self) -> None:
        assert self.taken_bytes == sum(self._bytes_by_holder.values())
        assert all(held_bytes > 0 for held_bytes in self._bytes_by_holder.values())


class AnswerBudget:
    """The part of a `SendBudget` that an answer uses. It charges the bytes that the client has not received yet."""

    __slots__ = ("_budget", "_holder", "_size_bytes")

    def __init__(self, budget: SendBudget, holder: str) -> None:
        self._budget = budget
        self._holder = holder
        self._size_bytes = 0

    @property
    def next_bytes(self) -> int:
        """The number of unsent bytes that the answer may buffer next. Reading the property reserves none of them."""
        return self._budget.compute_next_bytes(self._holder)

    def set_charge(self, size_bytes: int) -> None:
        """Charge `size_bytes` to the budget, and release what the answer has charged before. 0 releases all bytes."""
        if self._size_bytes:
            self._budget.release(self._holder, self._size_bytes)
        self._size_bytes = size_bytes
        if size_bytes:
            self._budget.take(self._holder, size_bytes)
