"""The states of an instant: requested → inflight → completed or rolled back. The module does no I/O.

A table service requests, begins and ends an instant. The effects of one transaction, such as a commit,
are recorded as completed. A finished instant does not change: the timeline is a log, not a queue.
"""

from __future__ import annotations

import msgspec

from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.store.model import Instant, InstantState
from seamark.metaserver.store.port import InstantFilter

INDEXING = "indexing"
"""The action of index builds."""
MAINTENANCE = "maintenance"
"""The action of runs of table services."""
_NEXT_STATES: dict[InstantState, frozenset[InstantState]] = {
    InstantState.REQUESTED: frozenset({InstantState.INFLIGHT, InstantState.ROLLED_BACK}),
    InstantState.INFLIGHT: frozenset({InstantState.COMPLETED, InstantState.ROLLED_BACK}),
    InstantState.COMPLETED: frozenset(),
    InstantState.ROLLED_BACK: frozenset(),
}


def is_finished(state: InstantState) -> bool:
    """Return whether the state is final."""
    return not _NEXT_STATES[state]


def check_transition(current: InstantState, new: InstantState) -> None:
    """Check that the state `new` can follow the state `current`.

    Raises:
        BadRequest: The state cannot follow. The message names the allowed states.
    """
    if new not in _NEXT_STATES[current]:
        allowed_states = (
            " or ".join(sorted(state.value for state in _NEXT_STATES[current])) or "nothing: it is finished"
        )
        raise BadRequest(
            f"An instant in state {current.value} cannot become {new.value}; it may become {allowed_states}"
        )


def advance_instant(instant: Instant, state: InstantState, now_ms: int) -> Instant:
    """Return the instant in its next state. A final state also sets the time of completion.

    Raises:
        BadRequest: The transition is invalid.
    """
    check_transition(instant.state, state)
    completed_ms = now_ms if is_finished(state) else None
    return msgspec.structs.replace(instant, state=state, completed_ms=completed_ms)


def check_invariants(instant: Instant) -> None:
    """Check that no fields contradict each other. Tests call this after every step.

    Raises:
        AssertionError: Some fields contradict each other.
    """
    assert (instant.completed_ms is not None) == is_finished(instant.state), instant
    assert instant.completed_ms is None or instant.completed_ms >= 0, instant


def matches_filter(where: InstantFilter, instant: Instant) -> bool:
    """Return whether an instant satisfies a filter, as in the store's query.

    `since` is ignored, because only the store can compare positions. A condition that is None accepts every instant.
    """
    return (
        (where.uuid is None or where.uuid == instant.uuid)
        and (where.namespace is None or where.namespace == instant.namespace)
        and (where.name is None or where.name == instant.name)
        and (where.action is None or where.action == instant.action)
        and (where.state is None or where.state is instant.state)
    )
