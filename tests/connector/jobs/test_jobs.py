"""The results that jobs report to the scheduler: a job with remaining work fails, so that it is repeated."""

from __future__ import annotations

import pytest

from seamark.connector.client.indexes import IndexClient
from seamark.connector.jobs.jobs import run_compaction, run_expiration, run_indexing
from tests.connector.lake import append_parts, create_lake_table, spread_ids


def test_job_without_work_has_no_totals(client: IndexClient) -> None:
    create_lake_table(client.url)
    append_parts(client.url, "db.t", spread_ids(2))
    for job in (run_indexing, run_compaction, run_expiration):
        assert job(client, ("db", "t")) == {}


def test_job_fails_if_another_process_builds_the_index(client: IndexClient) -> None:
    create_lake_table(client.url)
    append_parts(client.url, "db.t", spread_ids(2))
    client.put_index("db.t", "i", kind="bloom", columns=["id"])
    build = client.start_build("db.t", "i", exclusive=True)
    with pytest.raises(RuntimeError, match="wait for a different builder"):
        run_indexing(client, ("db", "t"))
    client.finish_build("db.t", "i", build["build-id"], outcome="rolled-back")
    assert run_indexing(client, ("db", "t"))["builds"] == 1
    assert run_indexing(client, ("db", "t")).get("builds") is None
    assert client.index("db.t", "i").health == "ok"
