"""Tests of proposals for cubes, sort orders, and tables that are worth pinning."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.names import make_table_path
from seamark.connector.client.policies import load_advice
from seamark.connector.index.builds import build
from seamark.connector.jobs.advice import NOT_INDEXED, apply_proposal
from seamark.metaserver.api.admin import advice
from tests.connector.advice.workloads import TABLE, make_table, run_statements
from tests.connector.index.test_building import RecordingWorkers
from tests.seeds import first_seed


def plan_aggregates(client: IndexClient, grouping_column: str, engine: str = "duckdb", runs: int = 60) -> None:
    """Plan `runs` aggregate queries that group by a column and compare the region, as the engine's client does."""
    # With kept-max 0, the server stores no plan table, but it records the query.
    aggregates = [{"function": "max", "column": "day"}, {"function": "count"}]
    body = {"predicate": "region <= 6", "kept-max": 0, "engine": engine, "grouping": [grouping_column]}
    for _ in range(runs):
        client._request_json("POST", f"{make_table_path(TABLE)}/plan-tables", {}, {**body, "aggregates": aggregates})


def list_proposals(client: IndexClient, kind: str) -> list[dict[str, Any]]:
    return [proposal for proposal in load_advice(client, TABLE)["proposals"] if proposal["kind"] == kind]


def test_cube_is_proposed_for_the_aggregate_queries_that_it_answers(client: IndexClient) -> None:
    make_table(client, np.random.default_rng(first_seed()), files=6)
    plan_aggregates(client, "region")
    plan_aggregates(client, "id", runs=20)  # Each row has its own id, so no cube can answer these queries.
    (cube,) = list_proposals(client, "cube")
    command, _ = cube["commands"]
    options = "--columns region --measures 'count(*),max(day)'"
    assert command == f"seamark index create {TABLE} --kind cube {options} --name by_region"
    # The cube answers 60 of the 80 queries without reading rows.
    assert cube["predicted"]["bytes"] == pytest.approx(cube["before"]["bytes"] * 20 / 80, rel=0.05)
    applied_proposal = apply_proposal(client, TABLE, cube, wait_s=10)
    assert applied_proposal["measured"]["bytes"] == pytest.approx(cube["predicted"]["bytes"], rel=0.05)
    assert list_proposals(client, "cube") == []
    # Files without an entry do not fail a proposal, because queries use the cube for the other files.
    proposal = {**cube, "change": {**cube["change"], "index-name": "by_id", "columns": ["id"]}}
    assert "2,000 groups for 2,000 rows" in apply_proposal(client, TABLE, proposal, wait_s=10)[NOT_INDEXED]
    workers = RecordingWorkers()
    report = build(client, TABLE, "by_id", workers)
    assert (report.files_not_indexed, workers.groups) == (6, []), "refused files are read again"
    assert "2,000 groups for 2,000 rows" in report.json["reason"]


@pytest.mark.slow
def test_no_cube_is_proposed_for_an_engine_that_does_not_use_cubes(client: IndexClient) -> None:
    make_table(client, np.random.default_rng(first_seed()), files=3)
    plan_aggregates(client, "region", engine="spark")
    assert list_proposals(client, "cube") == []


@pytest.mark.slow
def test_sort_order_is_proposed_and_the_pin_is_the_last_proposal_that_pays(
    client: IndexClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_table(client, np.random.default_rng(first_seed()), files=12)
    run_statements(client, [f"region = {day % 8} AND day >= {day} AND day < {day + 20}" for day in range(0, 340, 4)])
    orders = list_proposals(client, "sort-order")
    assert orders[0]["commands"][0] in (
        "ALTER TABLE db.t WRITE ORDERED BY region, day",
        "ALTER TABLE db.t WRITE ORDERED BY day, region",
    )
    assert orders[0]["predicted"]["bytes"] < 0.7 * orders[0]["before"]["bytes"]
    assert list_proposals(client, "pin") == []
    # The gateway has room to pin all files of the table in its cache.
    monkeypatch.setattr(advice, "_find_pinnable_bytes", lambda _: 1 << 40)
    proposals = load_advice(client, TABLE)["proposals"]
    days = [proposal["pays-after-days"] for proposal in proposals]
    paying_proposals = [
        proposal for proposal, count in zip(proposals, days, strict=True) if count is not None and count <= 30
    ]
    assert [proposal["kind"] for proposal in paying_proposals].index("pin") == len(paying_proposals) - 1 > 0
    assert paying_proposals[-1]["predicted"] == paying_proposals[-1]["before"]
    assert paying_proposals[-1]["commands"] == ["ALTER TABLE db.t SET TBLPROPERTIES ('seamark.cache.pinned'='true')"]
