"""Tests of the query history of statements that `seamark sql` runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.policies import load_history
from seamark.connector.sql.session import SqlSession
from tests.connector.advice.workloads import TABLE, make_table
from tests.connector.server_thread import ServerThread


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IndexClient]:
    home = tmp_path_factory.mktemp("statements")
    with (
        ServerThread(home, warehouse=home.as_uri(), services_workers=0) as server,
        closing(IndexClient(server.url)) as client,
    ):
        make_table(client, np.random.default_rng(5), files=3)
        yield client


def list_new_shapes(client: IndexClient, statement: str, runs: int = 1) -> list[dict[str, Any]]:
    """Explain a statement, run it `runs` times in an SQL session, and return the shapes with more runs than before.

    A shape is a statement without its literals. The history counts its runs.
    """
    counts_before = {
        shape["fingerprint"]: shape["sums"]["statements"] for shape in load_history(client, TABLE)["shapes"]
    }
    with SqlSession(client.url) as session:
        session.explain(statement)
        for _ in range(runs):
            session.sql(statement).to_arrow()
    shapes = load_history(client, TABLE)["shapes"]
    return [shape for shape in shapes if shape["sums"]["statements"] != counts_before.get(shape["fingerprint"], 0)]


def test_statement_is_recorded_with_its_columns_groupings_and_aggregates(client: IndexClient) -> None:
    statement = "SELECT region, max(day), count(*) FROM db.t WHERE code = 'c0001' GROUP BY region"
    (shape,) = list_new_shapes(client, statement, runs=2)
    assert (shape["engine"], shape["conditions"]) == ("seamark", ["code = ?"])
    assert sorted(shape["columns"]) == ["code", "day", "region"]
    assert (shape["grouping"], sorted(shape["aggregates"])) == (["region"], ["count(*)", "max(day)"])
    # Each run counts once. EXPLAIN does not count.
    sums = shape["sums"]
    assert (sums["statements"], sums["files-before"]) == (2, 6)
    # The engine reports the time of each run, and what it read.
    assert (sums["timed-statements"], sums["timed-files"]) == (2, sums["files-after"])
    assert sums["run-us"] > 0 < sums["timed-bytes"]


def test_statement_with_a_join_counts_once_for_each_reference(client: IndexClient) -> None:
    statement = "SELECT a.day FROM db.t AS a JOIN db.t AS b ON a.id = b.id WHERE b.region = 3 AND b.day < 9"
    shapes = list_new_shapes(client, statement)
    assert [shape["joins"] for shape in shapes] == [["id"], ["id"]]
    assert [shape["sums"]["statements"] for shape in shapes] == [1, 1]
    assert [shape["sums"]["timed-statements"] for shape in shapes] == [1, 1]
    assert {shape["engine"] for shape in shapes} == {"seamark"}
