"""Tests that compare the advisor's predictions with results: proposals are applied, and statements planned again."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from seamark.commands.main import cli
from seamark.commands.maintenance import advise
from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.policies import load_advice
from seamark.connector.jobs.advice import apply_proposal
from tests.connector.advice.workloads import TABLE, draw_workload, make_table, measure_planned_bytes, run_statements
from tests.connector.server_thread import ServerThread
from tests.seeds import examples, first_seed, mark_fast


def apply_best_proposal(client: IndexClient, case: int) -> tuple[float, float, float]:
    """Apply the first proposal that a client can apply, for a random table and workload.

    Returns:
        The mean bytes that the planner keeps for a recorded statement: before the change, as predicted, and after it.
    """
    rng = np.random.default_rng(first_seed() + case)
    make_table(client, rng)
    wheres = draw_workload(rng).draw(rng, examples(120, 25))
    run_statements(client, wheres)
    bytes_before = measure_planned_bytes(client, wheres)
    advice = load_advice(client, TABLE)
    # The server draws other literals for the recorded statements, so its figures differ from those of the statements.
    assert advice["before"]["bytes"] == pytest.approx(bytes_before, rel=0.1)
    best = next(proposal for proposal in advice["proposals"] if proposal["change"]["kind"] != "none")
    applied_proposal = apply_proposal(client, TABLE, best, wait_s=10)
    assert load_advice(client, TABLE)["applied"][0]["proposal"] == best
    bytes_after = measure_planned_bytes(client, wheres)
    # After the change, fewer files remain, so that the same difference in files is a larger fraction.
    assert applied_proposal["measured"]["bytes"] == pytest.approx(bytes_after, rel=0.35)
    return bytes_before, best["predicted"]["bytes"], bytes_after


@pytest.mark.parametrize("case", mark_fast(range(4), 0))
def test_first_proposal_saves_about_as_many_bytes_as_predicted(client: IndexClient, case: int) -> None:
    bytes_before, predicted_bytes, bytes_after = apply_best_proposal(client, case)
    assert bytes_after < bytes_before
    assert predicted_bytes == pytest.approx(bytes_after, rel=0.4)


@pytest.mark.slow
def test_most_predictions_are_within_a_fifth_of_the_result(tmp_path: Path) -> None:
    """The history records statements without their literals, so the prediction draws other values."""
    ratios = []
    for case in range(10):
        home = tmp_path / str(case)
        home.mkdir()
        server = ServerThread(home, warehouse=home.as_uri(), services_workers=0)
        server.start()
        try:
            with closing(IndexClient(server.url)) as client:
                _, predicted_bytes, bytes_after = apply_best_proposal(client, 100 + case)
        finally:
            server.stop()
        ratios.append(predicted_bytes / bytes_after)
    near_ratios = [ratio for ratio in ratios if 0.8 <= ratio <= 1.2]
    # One of the ten predictions may differ by more than a fifth.
    assert len(near_ratios) >= 0.9 * len(ratios), sorted(round(ratio, 2) for ratio in ratios)


@pytest.mark.slow
def test_commands_show_prediction_and_measurement(client: IndexClient) -> None:
    rng = np.random.default_rng(first_seed())
    make_table(client, rng)
    result = CliRunner().invoke(cli, ["advise", TABLE, "--url", client.url])
    assert "has not seen a statement" in result.output
    run_statements(client, [f"day >= {day} AND day < {day + 30}" for day in range(0, 300, 15)] + ["code = 'c0300'"] * 9)
    result = CliRunner().invoke(cli, ["advise", TABLE, "--url", client.url])
    assert result.exit_code == 0, result.output
    assert "Cluster by day" in result.output
    proposals = load_advice(client, TABLE)["proposals"]
    best = next(proposal for proposal in proposals if proposal["change"]["kind"] != "none")
    assert f"{best['id']}  {best['title']}" in result.output
    assert f"seamark run cluster {TABLE}" in result.output
    history_result = CliRunner().invoke(cli, ["history", TABLE, "--url", client.url])
    assert "day >= ?" in history_result.output
    assert TABLE in CliRunner().invoke(cli, ["history", "--url", client.url]).output
    apply_result = CliRunner().invoke(cli, ["advise", "apply", TABLE, best["id"], "--url", client.url])
    assert apply_result.exit_code == 0, apply_result.output
    assert all(word in apply_result.output for word in ("before", "predicted", "measured"))
    assert best["title"] in apply_result.output
    # The position in a list does not identify a change, because the next list may have a different order.
    for unknown_id in (best["id"], "1"):
        refusal = CliRunner().invoke(cli, ["advise", "apply", TABLE, unknown_id, "--url", client.url])
        assert (refusal.exit_code, f"There is no proposal '{unknown_id}'" in refusal.output) == (1, True)
    second_advice = load_advice(client, TABLE)
    # The clustering must save more than half of the bytes that the planner kept before.
    assert second_advice["before"]["bytes"] < 0.5 * second_advice["applied"][0]["proposal"]["before"]["bytes"]
    manual_proposal = {"change": {"kind": "none"}, "title": "x", "commands": ["ALTER TABLE"]}
    with pytest.raises(InvalidRequest, match="must be made in an engine"):
        apply_proposal(client, TABLE, manual_proposal, wait_s=1)


def test_statements_for_spark_are_marked_and_select_the_catalog() -> None:
    statements = [
        "ALTER TABLE `shop`.`orders` WRITE ORDERED BY `id`",
        "CALL system.rewrite_data_files(table => 'shop')",
    ]
    assert advise._format_commands(statements) == f"in Spark: USE sea; {'; '.join(statements)}"
    assert advise._format_commands(["seamark index create shop.orders id"]) == "seamark index create shop.orders id"
