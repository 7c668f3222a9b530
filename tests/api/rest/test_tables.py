"""Tests of tables over HTTP: create, load, commit, register, unregister, drop, credentials, metrics, signing."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from seamark.cache.memory import MemoryCache
from seamark.metaserver.api.plans import column_reads
from seamark.metaserver.api.rest import tables
from seamark.metaserver.store.model import NAMED_COLUMNS, UNKNOWN_COLUMNS
from tests.api.client import SCHEMA, Api, build_append, build_property_commit
from tests.server.rig import run_server

TABLES = "/v1/namespaces/db/tables"
STATIC_S3 = {
    "warehouse": "s3://bucket/lake",
    "s3_endpoint": "http://127.0.0.1:1",
    "s3_access_key_id": "AKID",
    "s3_secret_access_key": "a-secret",
    "s3_client_access": "static",
}


async def test_created_table_is_loaded_as_in_the_create_answer(api: Api) -> None:
    created_table = await api.create_table(properties={"a": "1"})
    assert set(created_table) == {"metadata-location", "metadata", "config"}
    assert created_table["metadata"]["properties"]["a"] == "1"
    assert created_table["metadata"]["schemas"][0]["fields"] == SCHEMA["fields"]
    assert Path(created_table["metadata-location"].removeprefix("file://")).exists()
    assert (await api("GET", f"{TABLES}/t")).json == created_table


async def test_table_without_its_namespace_is_not_created(api: Api) -> None:
    answer = await api("POST", "/v1/namespaces/non-existing/tables", {"name": "t", "schema": SCHEMA})
    assert answer.error == (404, "NoSuchNamespaceException", "Namespace does not exist: non-existing")


async def test_name_belongs_to_either_a_table_or_a_view(api: Api) -> None:
    await api.create_table("t")
    await api.view("v")
    for name in ("t", "v"):
        answer = await api("POST", TABLES, {"name": name, "schema": SCHEMA})
        assert answer.error[:2] == (409, "AlreadyExistsException")


async def test_staged_table_does_not_exist_until_it_is_committed(api: Api) -> None:
    staged_table = await api("POST", TABLES, {"name": "s", "schema": SCHEMA, "stage-create": True})
    assert staged_table.status == 200
    assert "metadata-location" not in staged_table.json
    assert (await api("HEAD", f"{TABLES}/s")).status == 404
    metadata = staged_table.json["metadata"]
    commit: dict[str, Any] = {
        "requirements": [{"type": "assert-create"}],
        "updates": [
            {"action": "assign-uuid", "uuid": metadata["table-uuid"]},
            {"action": "upgrade-format-version", "format-version": 2},
            {"action": "add-schema", "schema": SCHEMA, "last-column-id": 2},
            {"action": "set-current-schema", "schema-id": -1},
            {"action": "add-spec", "spec": {"spec-id": 0, "fields": []}},
            {"action": "set-default-spec", "spec-id": -1},
            {"action": "add-sort-order", "sort-order": {"order-id": 0, "fields": []}},
            {"action": "set-default-sort-order", "sort-order-id": -1},
            {"action": "set-location", "location": metadata["location"]},
        ],
    }
    committed_table = await api("POST", f"{TABLES}/s", commit)
    assert committed_table.status == 200, committed_table.raw
    assert committed_table.json["metadata"]["table-uuid"] == metadata["table-uuid"]
    second_answer = await api("POST", f"{TABLES}/s", commit)
    assert second_answer.error[0] == 409


async def test_commit_returns_the_new_metadata_and_its_location(api: Api) -> None:
    created_table = await api.create_table()
    answer = (await api("POST", f"{TABLES}/t", build_property_commit(x="1"))).json
    assert set(answer) == {"metadata-location", "metadata"}
    assert answer["metadata"]["properties"]["x"] == "1"
    assert answer["metadata-location"] != created_table["metadata-location"]
    loaded_table = (await api("GET", f"{TABLES}/t")).json
    assert (loaded_table["metadata-location"], loaded_table["metadata"]) == (
        answer["metadata-location"],
        answer["metadata"],
    )


async def test_failed_requirement_is_a_conflict_that_may_be_retried(api: Api) -> None:
    await api.create_table()
    answer = await api(
        "POST", f"{TABLES}/t", {"requirements": [{"type": "assert-table-uuid", "uuid": "x"}], "updates": []}
    )
    assert answer.error[:2] == (409, "CommitFailedException")


async def test_unknown_updates_and_requirements_are_bad_requests(api: Api) -> None:
    await api.create_table()
    for body in (
        {"requirements": [], "updates": [{"action": "conquer-world"}]},
        {"requirements": [{"type": "assert-sunshine"}], "updates": []},
    ):
        assert (await api("POST", f"{TABLES}/t", body)).error[:2] == (400, "BadRequestException")


async def test_commit_to_a_missing_table_is_not_found(api: Api) -> None:
    assert (await api("POST", f"{TABLES}/none", build_property_commit(x="1"))).error[:2] == (
        404,
        "NoSuchTableException",
    )


async def test_append_sent_twice_gets_the_first_answer_twice(api: Api) -> None:
    """If a client gets a 409 after a lost answer, it deletes live files (apache/iceberg#13867)."""
    await api.create_table()
    first_answer = await api("POST", f"{TABLES}/t", build_append(7))
    second_answer = await api("POST", f"{TABLES}/t", build_append(7))
    assert (first_answer.status, second_answer.status) == (200, 200)
    assert second_answer.json == first_answer.json


async def test_repeated_commit_is_recognised_under_other_spellings_of_actions_and_types(api: Api) -> None:
    await api.create_table()
    append_request = build_append(7)
    for item, key in [
        *((requirement, "type") for requirement in append_request["requirements"]),
        *((update, "action") for update in append_request["updates"]),
    ]:
        item[key] = item[key].upper()
    answers = [await api("POST", f"{TABLES}/t", body) for body in (append_request, append_request, build_append(7))]
    assert [answer.status for answer in answers] == [200] * 3
    assert answers[1].json == answers[2].json == answers[0].json


async def test_head_reports_whether_a_table_exists(api: Api) -> None:
    await api.create_table()
    assert (await api("HEAD", f"{TABLES}/t")).status == 204
    missing_answer = await api("HEAD", f"{TABLES}/none")
    assert (missing_answer.status, missing_answer.raw) == (404, b"")


async def test_dropped_table_is_not_found_and_its_files_remain(api: Api) -> None:
    location = (await api.create_table())["metadata-location"]
    assert (await api("DELETE", f"{TABLES}/t")).status == 204
    assert (await api("GET", f"{TABLES}/t")).error[:2] == (404, "NoSuchTableException")
    assert Path(location.removeprefix("file://")).exists()
    assert (await api("DELETE", f"{TABLES}/t")).error[:2] == (404, "NoSuchTableException")


async def test_drop_with_purge_is_recorded(api: Api) -> None:
    for name, flag in (("a", "purgeRequested=true"), ("b", "purgeRequested=True"), ("c", "purgeRequested=false")):
        await api.create_table(name)
        assert (await api("DELETE", f"{TABLES}/{name}?{flag}")).status == 204
    dropped_entries = await api.server.components.store.list_dropped(("db",), None, 10)
    assert {dropped_entry.entry.name: dropped_entry.purge for dropped_entry in dropped_entries} == {
        "a": True,
        "b": True,
        "c": False,
    }
    assert (await api("DELETE", f"{TABLES}/x?purgeRequested=perhaps")).error[0] == 400


async def test_table_can_be_unregistered_and_registered_again(api: Api) -> None:
    await api.create_table()
    committed_table = (await api("POST", f"{TABLES}/t", build_property_commit(x="1"))).json
    answer = await api("POST", f"{TABLES}/t/unregister")
    assert (answer.status, answer.json) == (200, committed_table)
    assert (await api("HEAD", f"{TABLES}/t")).status == 404
    assert (await api("POST", f"{TABLES}/t", build_property_commit(x="2"))).error[0] == 404
    body = {"name": "again", "metadata-location": committed_table["metadata-location"]}
    registered_table = await api("POST", "/v1/namespaces/db/register", body)
    assert registered_table.status == 200
    assert registered_table.json["metadata"] == committed_table["metadata"]
    assert (await api("POST", "/v1/namespaces/db/register", body)).error[:2] == (409, "AlreadyExistsException")
    assert (await api("POST", "/v1/namespaces/db/register", {**body, "overwrite": True})).status == 200


async def test_register_does_not_overwrite_with_a_table_that_is_live_under_another_name(api: Api) -> None:
    first_table, second_table = await api.create_table("first"), await api.create_table("second")
    for name in ("second", "new"):
        body = {"name": name, "metadata-location": first_table["metadata-location"], "overwrite": True}
        answer = await api("POST", "/v1/namespaces/db/register", body)
        assert answer.error[:2] == (409, "AlreadyExistsException")
        assert "live under another name" in answer.error[2]
    assert (await api("GET", f"{TABLES}/second")).json["metadata"] == second_table["metadata"]
    assert (await api("HEAD", f"{TABLES}/new")).status == 404
    # A registration may use the metadata of this table or of a dropped table.
    body = {"name": "second", "metadata-location": second_table["metadata-location"], "overwrite": True}
    assert (await api("POST", "/v1/namespaces/db/register", body)).status == 200
    assert (await api("DELETE", f"{TABLES}/first")).status == 204
    body["metadata-location"] = first_table["metadata-location"]
    assert (await api("POST", "/v1/namespaces/db/register", body)).status == 200
    assert (await api("GET", f"{TABLES}/second")).json["metadata"] == first_table["metadata"]


async def test_register_of_a_file_outside_the_warehouse_is_rejected(api: Api) -> None:
    answer = await api("POST", "/v1/namespaces/db/register", {"name": "x", "metadata-location": "file:///etc/passwd"})
    assert answer.error[:2] == (400, "BadRequestException")
    assert "outside the warehouse" in answer.error[2]


async def test_error_for_a_missing_metadata_file_differs_from_the_error_for_a_missing_table(api: Api) -> None:
    location = (await api.create_table())["metadata-location"]
    etag = (await api("GET", f"{TABLES}/t")).headers["ETag"]
    Path(location.removeprefix("file://")).unlink()
    for headers in ({}, {"If-None-Match": etag}):
        answer = await api("GET", f"{TABLES}/t", headers=headers)
        assert answer.error[:2] == (404, "NotFoundException")


async def test_credentials_of_a_table_on_local_files_are_an_empty_list(api: Api) -> None:
    await api.create_table()
    answer = await api("GET", f"{TABLES}/t/credentials")
    assert (answer.status, answer.json) == (200, {"storage-credentials": []})
    assert (await api("GET", f"{TABLES}/none/credentials")).error[:2] == (404, "NoSuchTableException")


@pytest.mark.slow
async def test_invalid_and_large_metrics_reports_are_not_stored(api: Api) -> None:
    uuid = (await api.create_table())["metadata"]["table-uuid"]
    report = {
        "report-type": "commit-report",
        "table-name": "t",
        "snapshot-id": 5,
        "sequence-number": 1,
        "operation": "append",
        "metrics": {},
    }
    answer = await api("POST", f"{TABLES}/t/metrics", report)
    assert (answer.status, answer.raw) == (204, b"")
    reports = await api.server.components.store.list_metrics_reports(uuid, None, 10)
    assert [metrics_report.report for metrics_report in reports] == [report]
    assert (await api("POST", f"{TABLES}/t/metrics", {"report-type": "gossip"})).error[0] == 400
    refusal = await api("POST", f"{TABLES}/t/metrics", {**report, "metadata": {"x": "y" * 150_000}})
    assert refusal.error[0] == 413
    assert len(await api.server.components.store.list_metrics_reports(uuid, None, 10)) == 1


@pytest.mark.slow
async def test_page_of_reports_is_small_enough_for_the_largest_reports(api: Api) -> None:
    """A page has at most 32 reports, also if a client requests more.

    With the largest reports of 128 KiB, a page of 1,000 would block the event loop while it is decoded and encoded.
    """
    await api.create_table()
    for number in range(40):
        report = {"report-type": "scan-report", "table-name": "t", "snapshot-id": number, "filter": True, "metrics": {}}
        assert (await api("POST", f"{TABLES}/t/metrics", report)).status == 204
    snapshot_ids, token, page_lengths = [], "", []
    while token is not None:
        page = (await api("GET", f"/api/v1/tables/db/t/metrics?pageSize=1000{token and '&pageToken=' + token}")).json
        snapshot_ids += [item["report"]["snapshot-id"] for item in page["reports"]]
        page_lengths.append(len(page["reports"]))
        token = page["next-page-token"]
    assert snapshot_ids == list(range(40))
    assert max(page_lengths) <= 32


class _PlansOfOneThread(MemoryCache[int, int | None]):
    """A cache of plans that only one thread may use.

    Another thread could find an entry that the cache removes before it records the use of the entry.
    """

    def __contains__(self, key: object) -> bool:
        assert threading.current_thread() is threading.main_thread()
        return super().__contains__(key)


async def test_report_names_only_columns_of_its_table(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the server stored an id beyond 64 bits, it would lose the counts of all tables.

    The server reads a report with a long filter in another thread.
    """
    reader_threads: list[int] = []
    read_scan_report = column_reads.read_scan_report

    def record_thread(*args: Any, **options: Any) -> Any:
        reader_threads.append(threading.get_ident())
        return read_scan_report(*args, **options)

    monkeypatch.setattr(tables, "read_scan_report", record_thread)
    await api.create_table("other")
    await api.create_table()
    usage = api.server.components.catalog.column_usage
    cached_plans_max = 10_000  # More than the test needs
    monkeypatch.setattr(usage, "plans", _PlansOfOneThread(cached_plans_max))
    report = {"report-type": "scan-report", "snapshot-id": -1, "filter": True, "projected-field-ids": [1]}
    changed_fields: tuple[dict[str, Any], ...] = (
        {"projected-field-ids": [2, 2**63, 2**200, -3, 77, True, "1", None]},
        {"projected-field-ids": 5},
        {"projected-field-names": {"id": 1}},
        {"projected-field-ids": [], "projected-field-names": "id"},
        {"schema-id": 2**70, "metadata": []},
        {"filter": {"type": "in", "term": "id", "values": list(range(3000))}},
    )
    assert (await api("POST", f"{TABLES}/other/metrics", report)).status == 204
    for fields in changed_fields:
        answer = await api("POST", f"{TABLES}/t/metrics", {**report, **fields})
        assert answer.status == 204, answer.raw
    # Only the last report is read in another thread, because it has a long filter.
    assert [thread == threading.get_ident() for thread in reader_threads] == [True] * len(changed_fields) + [False]
    for name, columns in (("other", {1, NAMED_COLUMNS}), ("t", {1, 2, NAMED_COLUMNS, UNKNOWN_COLUMNS})):
        entry = (await api.server.components.catalog.tables.load(("db",), name)).entry
        assert entry is not None
        assert {table_read.column_id for table_read in await usage.flush_and_list_table_reads(entry.uuid)} == columns, (
            name
        )


async def test_timeline_keeps_the_beginning_of_a_long_summary(api: Api) -> None:
    await api.create_table()
    body = build_append(1)
    body["updates"][0]["snapshot"]["summary"] |= {"operation": "append", "added-records": "9" * 100_000}
    assert (await api("POST", f"{TABLES}/t", body)).status == 200
    instants = (await api("GET", "/api/v1/tables/db/t/timeline")).json["instants"]
    assert instants[-1]["summary"]["added-records"] == "9" * 100
    assert instants[-1]["summary"]["operation"] == "append"


async def test_report_for_a_table_that_does_not_exist_yet_is_accepted_and_dropped(api: Api) -> None:
    """Spark sends this report before it creates a table together with its rows (CREATE TABLE AS SELECT)."""
    report = {"report-type": "scan-report", "table-name": "later", "snapshot-id": 1, "filter": True, "metrics": {}}
    assert (await api("POST", f"{TABLES}/later/metrics", report)).status == 204
    await api.create_table("later")
    uuid = (await api("GET", f"{TABLES}/later")).json["metadata"]["table-uuid"]
    assert await api.server.components.store.list_metrics_reports(uuid, since=None, limit=10) == []
    tables_of_missing_namespace = TABLES.replace("/db/", "/none/")
    assert (await api("POST", f"{tables_of_missing_namespace}/later/metrics", report)).error[:2] == (
        404,
        "NoSuchNamespaceException",
    )
    assert (await api("POST", f"{TABLES}/none/metrics", {"report-type": "gossip"})).error[0] == 400


async def test_signing_for_a_table_on_local_files_is_rejected(api: Api) -> None:
    await api.create_table()
    body = {"region": "us-east-1", "uri": "http://s3/bucket/x", "method": "GET", "headers": {}}
    assert (await api("POST", f"{TABLES}/t/sign", body)).error[0] == 400
    assert (await api("POST", f"{TABLES}/none/sign", body)).error[:2] == (404, "NoSuchTableException")


async def test_stored_keys_are_sent_only_on_request(tmp_path: Path) -> None:
    async with run_server(tmp_path, **STATIC_S3) as server:
        api = Api(server)
        location = "s3://bucket/lake/db/t"
        staged_body = {"name": "t", "schema": SCHEMA, "location": location, "stage-create": True}
        for requested_access, is_vended in (("", False), ("vended-credentials", True), ("remote-signing", False)):
            headers = {"X-Iceberg-Access-Delegation": requested_access} if requested_access else {}
            answer = (await api("POST", TABLES, staged_body, headers=headers)).json
            assert (answer["config"].get("s3.secret-access-key") == "a-secret") is is_vended
            assert bool(answer.get("storage-credentials")) is is_vended
            assert answer["config"].get("s3.remote-signing-enabled") == (
                "true" if requested_access == "remote-signing" else None
            )


@pytest.mark.parametrize("action", [[], {}, 1])
async def test_action_that_is_not_a_string_is_refused(api: Api, action: object) -> None:
    await api.create_table()
    change = {"requirements": [], "updates": [{"action": action}]}
    assert (await api("POST", f"{TABLES}/t", change)).error[0] == 400
    body = {"table-changes": [{"identifier": {"namespace": ["db"], "name": "t"}, **change}]}
    assert (await api("POST", "/v1/transactions/commit", body)).error[0] == 400
