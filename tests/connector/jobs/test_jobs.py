"""Tests of the results that jobs report to the scheduler: a job with remaining work is repeated."""

from __future__ import annotations

import pytest

from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.rewrite_lease import RewriteRunning
from seamark.connector.jobs.jobs import (
    RETRY_BUSY_TABLE_S,
    build_all_indexes,
    run_compaction,
    run_expiration,
    run_indexing,
)
from seamark.formats.protocol.wire import RECHECK_AFTER
from tests.connector.lake import append_parts, create_lake_table, spread_ids


def test_job_without_work_has_no_totals(client: IndexClient) -> None:
    create_lake_table(client.url)
    append_parts(client.url, "db.t", spread_ids(2))
    for job in (run_indexing, run_compaction, run_expiration):
        assert job(client, ("db", "t")) == {}


def test_job_waits_while_another_process_builds_the_index(client: IndexClient) -> None:
    create_lake_table(client.url)
    append_parts(client.url, "db.t", spread_ids(2))
    client.put_index("db.t", "i", kind="bloom", columns=["id"])
    build = client.start_build("db.t", "i", exclusive=True)
    assert run_indexing(client, ("db", "t")) == {RECHECK_AFTER: RETRY_BUSY_TABLE_S}
    with pytest.raises(RewriteRunning, match="different builder has an index"):
        build_all_indexes(client, ("db", "t"), wait_s=0.0)
    client.finish_build("db.t", "i", build["build-id"], outcome="rolled-back")
    assert run_indexing(client, ("db", "t"))["builds"] == 1
    assert run_indexing(client, ("db", "t")).get("builds") is None
    assert client.index("db.t", "i").health == "ok"
