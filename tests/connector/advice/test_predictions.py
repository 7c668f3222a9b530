"""The advisor's predictions against results: proposals are applied, and the same statements are planned again."""

from __future__ import annotations

import numpy as np
import pytest
from click.testing import CliRunner

from seamark.commands.main import cli
from seamark.connector.client.errors import BadRequest
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.policies import load_advice
from seamark.connector.jobs.advice import apply_proposal
from tests.connector.advice.workloads import TABLE, make_table, planned_bytes, random_workload, run_statements
from tests.seeds import first_seed, quick


@pytest.mark.parametrize("case", quick(range(12), 2))
def test_applied_proposals_save_about_the_bytes_that_were_predicted(client: IndexClient, case: int) -> None:
    """The replay draws its own values, so a second sample of the workload is planned before and after."""
    rng = np.random.default_rng(first_seed() + case)
    make_table(client, rng)
    workload = random_workload(rng)
    run_statements(client, workload.draw(rng, 60))
    asked = workload.draw(rng, 60)
    advice = load_advice(client, TABLE)
    before = planned_bytes(client, asked)
    assert advice["before"]["bytes"] == pytest.approx(before, rel=0.1)
    best = advice["proposals"][0]
    applied = apply_proposal(client, TABLE, best, wait_s=10)
    after = planned_bytes(client, asked)
    assert after < before
    # The replay measures the applied layout with the statements that it used for the prediction.
    assert best["predicted"]["bytes"] == pytest.approx(applied["measured"]["bytes"], rel=0.5)
    assert load_advice(client, TABLE)["applied"][0]["proposal"] == best


def test_commands_show_prediction_and_measurement(client: IndexClient) -> None:
    rng = np.random.default_rng(first_seed())
    make_table(client, rng)
    shown = CliRunner().invoke(cli, ["advise", TABLE, "--url", client.url])
    assert "has not seen a statement" in shown.output
    run_statements(client, [f"day >= {day} AND day < {day + 30}" for day in range(0, 300, 7)] + ["code = 'c0300'"] * 9)
    shown = CliRunner().invoke(cli, ["advise", TABLE, "--url", client.url])
    assert shown.exit_code == 0, shown.output
    assert "Cluster by day" in shown.output
    assert f"seamark run cluster {TABLE}" in shown.output
    history = CliRunner().invoke(cli, ["history", TABLE, "--url", client.url])
    assert "day >= ?" in history.output
    assert TABLE in CliRunner().invoke(cli, ["history", "--url", client.url]).output
    applied = CliRunner().invoke(cli, ["advise", "apply", TABLE, "1", "--url", client.url])
    assert applied.exit_code == 0, applied.output
    assert all(word in applied.output for word in ("before", "predicted", "measured"))
    refused = CliRunner().invoke(cli, ["advise", "apply", TABLE, "99", "--url", client.url])
    assert (refused.exit_code, "There is no proposal 99" in refused.output) == (1, True)
    again = load_advice(client, TABLE)
    assert again["before"]["bytes"] < 0.5 * again["applied"][0]["proposal"]["before"]["bytes"]
    by_hand = {"change": {"kind": "none"}, "title": "x", "commands": ["ALTER TABLE"]}
    with pytest.raises(BadRequest, match="An engine makes the change"):
        apply_proposal(client, TABLE, by_hand, wait_s=1)
