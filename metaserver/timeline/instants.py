"""The life of an instant, pure: requested → inflight → completed or rolled back.

A table service asks (requested), begins (inflight) and ends. What is done in one transaction, as a commit is, is
recorded as completed at once. What is finished stays as it is: the timeline is a record, not a queue.
"""

from __future__ import annotations

import msgspec

from metaserver.errors import BadRequest
from metaserver.store.port import Instant, InstantFilter, InstantState

_NEXT: dict[InstantState, frozenset[InstantState]] = {
    InstantState.REQUESTED: frozenset({InstantState.INFLIGHT, InstantState.ROLLED_BACK}),
    InstantState.INFLIGHT: frozenset({InstantState.COMPLETED, InstantState.ROLLED_BACK}),
    InstantState.COMPLETED: frozenset(),
    InstantState.ROLLED_BACK: frozenset(),
}


def is_finished(state: InstantState) -> bool:
    """Whether nothing can follow."""
    return not _NEXT[state]


def check_move(current: InstantState, wanted: InstantState) -> None:
    """BadRequest, with what would be allowed, when `wanted` cannot follow `current`."""
    if wanted not in _NEXT[current]:
        allowed = " or ".join(sorted(state.value for state in _NEXT[current])) or "nothing: it is finished"
        raise BadRequest(f"An instant that is {current.value} cannot become {wanted.value}; it may become {allowed}")


def moved(instant: Instant, state: InstantState, now_ms: int) -> Instant:
    """`instant` in its next state; finished ones get their time. BadRequest for a transition that does not exist."""
    check_move(instant.state, state)
    completed_ms = now_ms if is_finished(state) else None
    return msgspec.structs.replace(instant, state=state, completed_ms=completed_ms)


def check_invariants(instant: Instant) -> None:
    """AssertionError when an instant says two things at once; run by tests after every step."""
    assert (instant.completed_ms is not None) == is_finished(instant.state), instant
    assert instant.completed_ms is None or instant.completed_ms >= 0, instant


def matches(where: InstantFilter, instant: Instant) -> bool:
    """What the store's query decides, for one instant in hand; `since` aside, which only the store can compare."""
    return (
        (where.uuid is None or where.uuid == instant.uuid)
        and (where.namespace is None or where.namespace == instant.namespace)
        and (where.name is None or where.name == instant.name)
        and (where.action is None or where.action == instant.action)
        and (where.state is None or where.state is instant.state)
    )
