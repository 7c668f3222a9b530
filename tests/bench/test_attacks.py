"""Tests of each attack for a short time: the good client is always answered, and memory stays within the budgets."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.attacks.attackers import ATTACKS
from bench.attacks.run import run


@pytest.mark.slow
async def test_no_attack_fails_a_request_of_a_good_client_or_exceeds_the_memory(tmp_path: Path) -> None:
    report = await run(tmp_path, quick=True)
    measured_rows = {(row.case, row.measure): row for row in report.rows}
    for attack in ATTACKS:
        assert measured_rows[attack, "failed requests"].values["seamark"] == 0, report.notes
        assert measured_rows[attack, "memory"].is_goal_met(), attack
