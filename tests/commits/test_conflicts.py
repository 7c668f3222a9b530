"""Tests of random pairs of changes from one snapshot. Commits are correct, and no independent change is rejected."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.api.client import Api
from tests.commits.model import ConcurrentChanges
from tests.commits.reader import check_snapshots, find_snapshot, read_snapshot_rows
from tests.seeds import first_seed
from tests.server.rig import run_server

SEED = first_seed("COMMIT_SEED")


async def _commit_pair(api: Api, seed: int, name: str, outcomes: Counter[str]) -> None:
    """Commit two random changes that are based on one snapshot, and compare the outcome with the model.

    The first change must succeed. If the second succeeds, the model must allow the rows. Otherwise the model must
    allow the rejection, and the rows are those of the first change. `outcomes` counts the cases.
    """
    case = await ConcurrentChanges.make(api, seed, name)
    label = f"COMMIT_SEED={seed} {case.first_change} {case.second_change}"
    first_body, second_body = case.build_body(case.first_change), case.build_body(case.second_change)
    first_answer = await case.lake.send(first_body)
    assert first_answer.status == 200, (label, first_answer.raw)
    second_answer = await case.lake.send(second_body)
    metadata = await case.lake.read_metadata()
    check_snapshots(metadata)
    actual_rows = Counter(read_snapshot_rows(find_snapshot(metadata)))
    if second_answer.status == 200:
        assert actual_rows in case.list_allowed_results(), (label, actual_rows, case.list_allowed_results())
    else:
        assert second_answer.error[:2] == (409, "CommitFailedException"), (label, second_answer.raw)
        assert not case.must_commit(), (label, second_answer.error)
        assert actual_rows == Counter(case.first_change.apply(case.list_rows())), label
    outcomes[f"{case.second_change.kind} {'committed' if second_answer.status == 200 else 'refused'}"] += 1


async def _run_campaign(api: Api, count: int) -> Counter[str]:
    print(f"conflicts: COMMIT_SEED={SEED} is the seed of the first of {count} pairs")
    outcomes: Counter[str] = Counter()
    for number in range(count):
        await _commit_pair(api, SEED + number, f"t{number}", outcomes)
    print(dict(outcomes))
    return outcomes


async def test_committed_changes_are_serialisable_and_independent_changes_are_committed(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        outcomes = await _run_campaign(Api(server), 30)
    assert sum(count for name, count in outcomes.items() if name.endswith("committed")) > 5


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_thousand_pairs_of_changes_are_serialisable(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        outcomes = await _run_campaign(Api(server), int(os.environ.get("COMMIT_PAIRS", "1000")))
    assert {name.split()[0] for name in outcomes if name.endswith("refused")} >= {
        "delete",
        "update",
        "compact",
        "count",
    }
