"""Tests of the states of an instant."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamark.formats.runtime.clock import SimulatedClock
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.store.model import InstantState
from seamark.metaserver.store.port import InstantFilter
from seamark.metaserver.timeline.instants import (
    advance_instant,
    check_invariants,
    check_transition,
    is_finished,
    matches_filter,
)
from tests.server.rig import build_instant

R, I, C, B = InstantState.REQUESTED, InstantState.INFLIGHT, InstantState.COMPLETED, InstantState.ROLLED_BACK  # noqa: E741
ALLOWED_MOVES = {(R, I), (R, B), (I, C), (I, B)}


@pytest.mark.parametrize(("current_state", "next_state"), sorted(itertools.product(InstantState, repeat=2)))
def test_only_the_four_state_transitions_are_allowed(current_state: InstantState, next_state: InstantState) -> None:
    if (current_state, next_state) in ALLOWED_MOVES:
        check_transition(current_state, next_state)
    else:
        with pytest.raises(BadRequest, match=f"in state {current_state.value} cannot become {next_state.value}"):
            check_transition(current_state, next_state)


@given(st.lists(st.sampled_from(list(InstantState)), max_size=6))
def test_no_path_leaves_a_finished_state(states: list[InstantState]) -> None:
    clock = SimulatedClock(1)
    instant = build_instant(clock, state=R, completed_ms=None)
    for state in states:
        clock.advance(1)
        try:
            next_instant = advance_instant(instant, state, clock.now_ms())
        except BadRequest:
            assert (instant.state, state) not in ALLOWED_MOVES
            continue
        assert not is_finished(instant.state)
        assert next_instant.requested_ms == instant.requested_ms
        instant = next_instant
        check_invariants(instant)


def test_filter_matches_only_if_every_condition_matches() -> None:
    instant = build_instant(SimulatedClock(1), "t", "commit")
    assert matches_filter(InstantFilter(), instant)
    assert matches_filter(
        InstantFilter(namespace=("db",), name="t", action="commit", state=InstantState.COMPLETED, uuid=instant.uuid),
        instant,
    )
    for other_filter in (
        InstantFilter(namespace=("d",)),
        InstantFilter(name="u"),
        InstantFilter(action="drop"),
        InstantFilter(state=InstantState.ROLLED_BACK),
        InstantFilter(uuid="x"),
    ):
        assert not matches_filter(other_filter, instant)
