"""Tests that the figures on the page about fleets are those of the simulation."""

from __future__ import annotations

import pytest

from bench.fleet.arithmetic import PAGE, FleetSize, compute_shares, format_figures, replace_figures


@pytest.mark.slow
def test_figures_on_the_page_equal_the_results_of_the_simulation() -> None:
    page = PAGE.read_text()
    assert replace_figures(page, format_figures()) == page


def test_replica_that_joins_or_leaves_moves_about_its_share_of_the_files() -> None:
    fleet = FleetSize(replicas=20)
    key_shares = compute_shares(fleet, keys=8000)
    assert 0.75 < key_shares.least_share < 1 < key_shares.largest_share < 1.25
    assert abs(key_shares.moved_by_join - 1 / 21) < 0.01
    assert abs(key_shares.moved_by_leave - 1 / 20) < 0.01
