"""Tests of `seamark health` on tables with known problems."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.transforms import IdentityTransform

from seamark.commands.main import cli
from seamark.connector.client.errors import NoSuchResource
from seamark.connector.client.indexes import IndexClient
from seamark.connector.jobs.jobs import run_indexing
from seamark.connector.jobs.server_jobs import expire
from seamark.connector.write.compaction import compact
from seamark.connector.write.upserts import MERGE_ON_READ, delete, upsert
from tests.connector.lake import open_catalog
from tests.connector.server_thread import ServerThread
from tests.connector.write.test_compaction import BY_PART, build_rows, create_test_table


def list_problems(client: IndexClient) -> list[str]:
    return [problem["problem"] for problem in client.health("db.t")["problems"]]


def run_health(client: IndexClient, *arguments: str) -> str:
    result = CliRunner().invoke(cli, ["health", "db.t", *arguments], env={"SEAMARK_URL": client.url})
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("spec", [PartitionSpec(), BY_PART], ids=["unpartitioned", "by part"])
def test_health_finds_each_problem_until_its_remedy_has_run(
    client: IndexClient, server: ServerThread, spec: PartitionSpec
) -> None:
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, 2, spec)
        assert client.health("db.t")["snapshot-id"] is None
        assert list_problems(client) == []
        for number in range(6):
            upsert(client, "db.t", build_rows(range(number * 9, number * 9 + 9)), keys=["id"])
        delete(client, "db.t", keys=pa.table({"id": list(range(6))}), mode=MERGE_ON_READ)
        client.put_index("db.t", "by_id", kind="bloom", columns=["id"])
        with catalog.load_table("db.t").transaction() as transaction:
            transaction.set_properties({"history.expire.max-snapshot-age-ms": "0"})
        health = client.health("db.t")
        partition_count = 3 if spec.fields else 1
        data, deletes = client.files("db.t", content="data"), client.files("db.t", content="deletes")
        assert (health["files"], health["files-if-compacted"]) == (6 * partition_count, partition_count)
        assert (health["small-files"], health["delete-files"]) == (data.num_rows, deletes.num_rows)
        assert (health["records"], health["deleted-records"]) == (54, 6)
        assert health["size-in-bytes"] == sum(data["file_size_in_bytes"].to_pylist())
        assert list_problems(client) == ["small files", "deleted rows", "expired snapshots"]
        text = run_health(client)
        assert "index by_id" in text
        assert "seamark run expire db.t" in text
        compact(client, "db.t")
        expire(client, "db.t")
        run_indexing(client, ("db", "t"))
        assert list_problems(client) == []
        assert "No problems found" in run_health(client)
        output = CliRunner().invoke(cli, ["health", "db.t", "--json"], env={"SEAMARK_URL": client.url}).output
        assert json.loads(output[output.index("{\n") :])["problems"] == [], "the JSON follows the logs of the server"


def test_health_states_whether_the_server_repairs_a_problem_without_help(
    client: IndexClient, server: ServerThread
) -> None:
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, 2, **{"seamark_compaction_enabled": "true"})
        for number in range(6):
            upsert(client, "db.t", build_rows([number]), keys=["id"])
        (problem,) = client.health("db.t")["problems"]
        assert problem["enabled"] is (server.components.settings.services_workers > 0)
        with pytest.raises(NoSuchResource):
            client.health("db.none")


def test_health_reports_many_manifests(client: IndexClient, server: ServerThread) -> None:
    with open_catalog(server.url) as catalog:
        properties: dict[str, Any] = {"commit_manifest-merge_enabled": "false"}
        create_test_table(catalog, 2, **properties)
        table = catalog.load_table("db.t")
        for number in range(20):
            table.append(build_rows([number]))
        assert "small manifests" in list_problems(client)


@pytest.mark.slow
def test_health_judges_files_of_a_sorted_table_as_compaction_does(client: IndexClient, server: ServerThread) -> None:
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, 2, **{"write_target-file-size-bytes": "5000"})
        for number in range(6):
            upsert(client, "db.t", build_rows([number]), keys=["id"])
        assert "small files" in list_problems(client)
        catalog.load_table("db.t").update_sort_order().asc("id", IdentityTransform()).commit()
        assert "small files" not in list_problems(client), (
            "files of about 1,000 bytes are above a tenth of the target size"
        )
        assert compact(client, "db.t", dry_run=True).files_before == 0
