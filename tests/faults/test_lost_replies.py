"""Tests of lost requests and replies: after the retry, the change was made exactly once and no live file was deleted.

Neither the server nor a client that mistakes a success for a failure may delete a live file (apache/iceberg#13867).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
import requests
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import CommitStateUnknownException
from pyspark.sql import SparkSession

from tests.catalog.rig import SCHEMA
from tests.faults.rigs.http import HttpClient, OutcomeUnknown, create_key
from tests.faults.rigs.lossy_proxy import FAULTS, LossyProxy, make_fault_chooser, run_lossy_proxy
from tests.services.seamark import Seamark
from tests.services.spark import new_catalog

LOST = (OutcomeUnknown, requests.exceptions.ConnectionError, CommitStateUnknownException)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seamark]:
    with Seamark(tmp_path_factory.mktemp("lossy") / "home") as server:
        yield server


@pytest.fixture
def proxy(server: Seamark) -> Iterator[LossyProxy]:
    with run_lossy_proxy(server.base_url) as proxy:
        yield proxy


def _repeat_until_answered(call: Callable[[], tuple[int, Any]]) -> tuple[int, Any]:
    """Repeat the same request until an answer of the server itself arrives."""
    for _ in range(50):
        try:
            status, body = call()
        except (OutcomeUnknown, ValueError):  # ValueError: the load balancer's answer is not JSON.
            continue
        return status, body
    raise AssertionError("no answer in 50 attempts")


def _is_change(method: str, path: str) -> bool:
    return method in ("POST", "DELETE")


@pytest.mark.parametrize("has_key", [True, False], ids=["with a key", "without a key"])
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_repeat_after_a_lost_reply_gets_the_first_answer(proxy: LossyProxy, seed: int, has_key: bool) -> None:
    client, name = HttpClient(proxy.base_url), f"t{seed}{has_key}"
    assert client.create_table(name)[0] == 200
    proxy.choose_fault = make_fault_chooser(seed, rate=0.6, applies=_is_change)
    for snapshot_id in range(1, 31):
        key = create_key() if has_key else None
        parent = snapshot_id - 1 or None
        status, body = _repeat_until_answered(
            lambda number=snapshot_id, parent=parent, key=key: client.append(number, parent, number, name, key)
        )
        assert status == 200, f"seed {seed}: {body}"
        assert body["metadata"]["current-snapshot-id"] == snapshot_id
    assert {fault for fault, *_ in proxy.requests} >= {*FAULTS}, f"seed {seed} did not test all outcomes"
    proxy.choose_fault = lambda method, path: None
    assert client.read_chain(name) == list(range(1, 31))


@pytest.mark.parametrize("seed", [11, pytest.param(12, marks=pytest.mark.slow)])
def test_creates_renames_drops_and_undrops_with_keys_are_executed_once(proxy: LossyProxy, seed: int) -> None:
    client, namespace = HttpClient(proxy.base_url), f"n{seed}"
    proxy.choose_fault = make_fault_chooser(seed, rate=0.6, applies=_is_change)

    def change(method: str, path: str, body: Any = None) -> Any:
        headers = {"Idempotency-Key": create_key()}
        status, answer = _repeat_until_answered(lambda: client.call(method, path, body, headers))
        assert status in (200, 204), f"seed {seed}: {method} {path}: {answer}"
        return answer

    change("POST", "/v1/namespaces", {"namespace": [namespace]})
    for number in range(8):
        creation = change("POST", f"/v1/namespaces/{namespace}/tables", {"name": f"a{number}", "schema": SCHEMA})
        old_name, new_name = ({"namespace": [namespace], "name": f"{letter}{number}"} for letter in "ab")
        change("POST", "/v1/tables/rename", {"source": old_name, "destination": new_name})
        change("DELETE", f"/v1/namespaces/{namespace}/tables/b{number}")
        change(
            "POST",
            f"/v1/namespaces/{namespace}/register",
            {"name": f"c{number}", "metadata-location": creation["metadata-location"]},
        )
    proxy.choose_fault = lambda method, path: None
    _, body = client.call("GET", f"/v1/namespaces/{namespace}/tables")
    assert [identifier["name"] for identifier in body["identifiers"]] == [f"c{number}" for number in range(8)]
    _, body = client.call("GET", f"/api/v1/dropped?namespace={namespace}")
    assert [row["name"] for row in body["dropped"]] == [f"b{number}" for number in range(8)]


def test_repeat_of_a_commit_whose_metadata_file_is_deleted_never_reports_failure(
    start_seamark: Callable[..., Seamark],
) -> None:
    """After a 404 or 409, Java would delete the manifests of a valid commit."""
    server = start_seamark(env={"SEAMARK_METADATA_CACHE_BYTES": "0"})
    client, key = HttpClient(server.base_url), create_key()
    assert client.create_table("brief")[0] == 200
    trimming = {"write.metadata.previous-versions-max": "1", "write.metadata.delete-after-commit.enabled": "true"}
    path = "/v1/namespaces/db/tables/brief"
    status, body = client.call(
        "POST", path, {"requirements": [], "updates": [{"action": "set-properties", "updates": trimming}]}
    )
    assert status == 200, body
    uuid = body["metadata"]["table-uuid"]
    first_append: dict[str, Any] = {"snapshot_id": 1, "parent": None, "sequence": 1, "name": "brief", "key": key}
    assert client.append(**first_append)[0] == 200
    for snapshot_id in range(2, 6):  # These commits delete the metadata file of the first commit.
        assert client.append(snapshot_id, snapshot_id - 1, sequence=snapshot_id, name="brief")[0] == 200
    status, body = client.append(**first_append)
    assert status == 200, body
    assert (body["metadata"]["table-uuid"], body["metadata"]["current-snapshot-id"]) == (uuid, 5)
    assert client.call("DELETE", path)[0] == 204
    status, body = client.append(**first_append)
    assert (status, body["error"]["type"]) == (500, "CommitStateUnknownException")


def _match_commits(name: str) -> Callable[[str, str], bool]:
    """Return a function that returns True if a (method, path) is a commit to the table `name`."""
    return lambda method, path: method == "POST" and path.endswith(f"/tables/{name}")


def _count_expected_rows(proxy: LossyProxy, name: str) -> int:
    """Return the expected number of rows: one for each commit that the server answered with 200."""
    is_commit = _match_commits(name)
    return sum(status == 200 for _, method, path, status in proxy.requests if is_commit(method, path))


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("seed", [21, pytest.param(22, marks=pytest.mark.slow)])
def test_pyiceberg_appends_are_applied_once_and_can_be_read(server: Seamark, proxy: LossyProxy, seed: int) -> None:
    name = f"py{seed}"
    rows = pa.table({"id": pa.array([1], pa.int64())})
    acknowledged_count = unknown_count = 0
    with RestCatalog("lossy", uri=proxy.base_url) as catalog:
        catalog.create_namespace_if_not_exists("db")
        catalog.create_table(f"db.{name}", schema=rows.schema)
        proxy.choose_fault = make_fault_chooser(seed, rate=0.6, applies=_match_commits(name))
        for _ in range(12):
            try:
                catalog.load_table(f"db.{name}").append(rows)
                acknowledged_count += 1
            except LOST:
                unknown_count += 1
    assert min(acknowledged_count, unknown_count) > 0, f"seed {seed} did not test all outcomes"
    with RestCatalog("direct", uri=server.base_url) as catalog:
        table = catalog.load_table(f"db.{name}")
        assert table.scan().to_arrow().num_rows == len(table.snapshots()) == _count_expected_rows(proxy, name), (
            f"seed {seed}"
        )
    assert acknowledged_count <= _count_expected_rows(proxy, name) <= acknowledged_count + unknown_count


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.parametrize("seed", [31])
def test_spark_inserts_are_applied_once_and_can_be_read(
    spark: SparkSession, server: Seamark, proxy: LossyProxy, seed: int
) -> None:
    name = f"spark{seed}"
    catalog = new_catalog(spark, proxy.base_url)
    spark.sql(f"CREATE NAMESPACE IF NOT EXISTS {catalog}.db")
    spark.sql(f"CREATE TABLE {catalog}.db.{name} (id bigint) USING iceberg")
    proxy.choose_fault = make_fault_chooser(seed, rate=0.6, applies=_match_commits(name))
    acknowledged_count = unknown_count = 0
    for number in range(10):
        try:
            spark.sql(f"INSERT INTO {catalog}.db.{name} VALUES ({number})")
            acknowledged_count += 1
        except Exception as error:  # noqa: BLE001  Spark wraps Java's exception in a general class
            print(f"insert {number}: {str(error).splitlines()[0][:200]}")
            unknown_count += 1
    print([(fault, status) for fault, _, path, status in proxy.requests if path.endswith(name)])
    # Iceberg 1.11 gives up after a lost reply. Iceberg 1.12 repeats the commit with its idempotency key, and all
    # succeed.
    faults = {
        fault for fault, method, path, _ in proxy.requests if fault and method == "POST" and path.endswith(f"/{name}")
    }
    assert acknowledged_count, f"seed {seed} did not test all outcomes"
    assert {"lost request", "lost reply"} <= faults, f"seed {seed} did not test all outcomes"
    ids = [row.id for row in spark.table(f"{new_catalog(spark, server.base_url)}.db.{name}").collect()]
    assert len(ids) == len(set(ids)), f"seed {seed}: a row occurs twice: {sorted(ids)}"
    assert acknowledged_count <= len(ids) <= acknowledged_count + unknown_count
    assert len(HttpClient(server.base_url).read_chain(name)) == len(ids)
