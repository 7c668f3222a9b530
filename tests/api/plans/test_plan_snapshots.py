"""Tests of plan snapshots, which only requests with `X-Seamark-Plans` see: their lifetime, and their removal."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

from tests.api.client import Answer
from tests.api.plans.planned import append_files, build_ten_id_files
from tests.api.plans.test_plan_tables import (
    LEASE_S,
    OWN_TABLES,
    STANDARD_TABLES,
    PlanApi,
    list_plan_files,
    open_plan_api,
)
from tests.planner.lakes.entries import read_data_files, read_manifest_list

PLANS_HEADER = {"X-Seamark-Plans": "trino-1"}
HEADER_OF_ANOTHER_ENGINE = {"X-Seamark-Plans": "trino-2"}


async def make_plan(
    plan_api: PlanApi, predicate: str = "id = 5", headers: dict[str, str] = PLANS_HEADER, **body: Any
) -> dict[str, Any]:
    answer = await plan_api("POST", f"{OWN_TABLES}/t/plan-tables", {"predicate": predicate, **body}, headers=headers)
    assert answer.status == 200, answer.raw
    answer_body: dict[str, Any] = answer.json
    return answer_body


async def load_snapshots(
    plan_api: PlanApi, headers: dict[str, str] = PLANS_HEADER, query: str = ""
) -> dict[int, dict[str, Any]]:
    """Load `db.t`, and return the snapshots in the answer by id.

    By default, the request has the header `PLANS_HEADER`, with which the answer also contains plans as snapshots.
    """
    answer = await plan_api("GET", f"{STANDARD_TABLES}/t{query}", headers=headers)
    assert answer.status == 200, answer.raw
    return {snapshot["snapshot-id"]: snapshot for snapshot in answer.json["metadata"]["snapshots"]}


async def request_lease(
    plan_api: PlanApi, ids: list[Any], lease_s: Any, headers: dict[str, str] = PLANS_HEADER
) -> Answer:
    body = {"snapshot-ids": ids, "lease-s": lease_s}
    return await plan_api("POST", f"{OWN_TABLES}/t/plan-snapshots", body, headers=headers)


async def test_plan_is_shown_as_a_snapshot_only_to_requests_with_the_header_of_its_creator(plan_api: PlanApi) -> None:
    """Trino reads a stored plan as a snapshot that the server adds to the table's snapshots.

    Only requests with the same `X-Seamark-Plans` as the request for the plan receive this snapshot.
    """
    snapshot_of_table = (await load_snapshots(plan_api, {}))[1]
    plan = await make_plan(plan_api)
    plan_id = plan["plan-snapshot-id"]
    assert plan["name"] is None
    int_max = (1 << 31) - 1
    assert plan_id > int_max, "Trino must read the id as a bigint"
    snapshots = await load_snapshots(plan_api)
    assert set(snapshots) == {1, plan_id}
    assert snapshots[1] == snapshot_of_table
    snapshot = snapshots[plan_id]
    assert list(read_data_files(read_manifest_list(snapshot["manifest-list"]), 2)) == ["file:///t/data/000000.parquet"]
    assert (snapshot["parent-snapshot-id"], snapshot["schema-id"]) == (1, 0)
    assert snapshot["sequence-number"] == snapshot_of_table["sequence-number"]
    assert snapshot["timestamp-ms"] == snapshot_of_table["timestamp-ms"] - 1  # The newest snapshot is the table's own.
    for headers in ({}, HEADER_OF_ANOTHER_ENGINE):
        for query in ("", "?snapshots=refs"):
            assert set(await load_snapshots(plan_api, headers, query)) == {1}
    assert set(await load_snapshots(plan_api, query="?snapshots=refs")) == {1, plan_id}


async def test_etag_depends_on_the_plans_in_the_answer(plan_api: PlanApi) -> None:
    async def read_status_and_tag(known_tag: str | None = None, query: str = "", **options: str) -> tuple[int, str]:
        headers = {**PLANS_HEADER, **options, **({} if known_tag is None else {"If-None-Match": known_tag})}
        answer = await plan_api("GET", f"{STANDARD_TABLES}/t{query}", headers=headers)
        assert "X-Seamark-Plans" in answer.headers["Vary"]
        return answer.status, answer.headers["ETag"]

    for query, predicate in (("", "id = 25"), ("?snapshots=refs", "id = 35")):
        tag_without_plans = (await read_status_and_tag(query=query))[1]
        plan_id = (await make_plan(plan_api, predicate))["plan-snapshot-id"]
        status, tag_with_plans = await read_status_and_tag(tag_without_plans, query)
        assert (status, tag_with_plans != tag_without_plans) == (200, True)
        assert await read_status_and_tag(tag_with_plans, query) == (304, tag_with_plans)
        answer = await plan_api("GET", f"{STANDARD_TABLES}/t", headers={**PLANS_HEADER, "Accept-Encoding": "gzip"})
        raw = answer.raw if answer.raw[:1] == b"{" else gzip.decompress(answer.raw)
        assert str(plan_id).encode() in raw
        await request_lease(plan_api, [plan_id], 0)
        assert await read_status_and_tag(tag_with_plans, query) == (200, tag_without_plans)


async def test_catalog_with_the_header_resolves_no_plan_names(plan_api: PlanApi) -> None:
    name = (await plan_api.create_plan_table(predicate="id = 5"))["name"]
    assert (await plan_api("GET", f"{STANDARD_TABLES}/{name}")).status == 200
    requests = [
        ("GET", f"{STANDARD_TABLES}/{name}"),
        ("HEAD", f"{STANDARD_TABLES}/{name}"),
        ("GET", f"{STANDARD_TABLES}/{name}/credentials"),
        ("POST", f"{STANDARD_TABLES}/{name}/plan"),
        ("GET", f"/api/v1/tables/db/{name}/files"),
        ("POST", f"/api/v1/tables/db/{name}/explain"),
    ]
    for method, path in requests:
        answer = await plan_api(method, path, {} if method == "POST" else None, headers=PLANS_HEADER)
        assert answer.status == 404, path
        if method != "HEAD":
            assert answer.error[1] == "NoSuchTableException"


async def test_plan_that_is_shown_as_a_snapshot_cannot_be_loaded_by_name(plan_api: PlanApi, tmp_path: Path) -> None:
    """A request with `X-Seamark-Plans` receives the snapshot id of its plan, and no table name.

    A reader can compute the plan's name in the database, but the server must not accept this name.
    """
    await make_plan(plan_api)
    store = plan_api.server.components.store
    digests = {plan.name[:32] for plan in list_plan_files(tmp_path)}
    assert len(digests) == 1
    for digest in digests:
        name = f"t~plan~{digest}"
        assert await store.load_plan_table(("db",), name) is not None
        for headers in ({}, PLANS_HEADER, HEADER_OF_ANOTHER_ENGINE):
            assert (await plan_api("GET", f"{STANDARD_TABLES}/{name}", headers=headers)).status == 404
            assert (await plan_api("POST", f"{OWN_TABLES}/{name}/lease", {}, headers=headers)).status == 404


async def test_plan_snapshots_are_shown_until_withdrawal_or_the_end_of_their_lease(plan_api: PlanApi) -> None:
    first_snapshot_id, second_snapshot_id = [
        (await make_plan(plan_api, f"id = {id_}"))["plan-snapshot-id"] for id_ in (5, 15)
    ]
    assert (await request_lease(plan_api, [first_snapshot_id, 77], 0)).json == {"found": 1}
    assert set(await load_snapshots(plan_api)) == {1, second_snapshot_id}
    assert (await make_plan(plan_api))["plan-snapshot-id"] == first_snapshot_id
    assert set(await load_snapshots(plan_api)) == {1, first_snapshot_id, second_snapshot_id}
    plan_api.advance_leases(0.9)
    assert (await request_lease(plan_api, [second_snapshot_id], LEASE_S)).json == {"found": 1}
    plan_api.advance_leases(0.2)
    assert set(await load_snapshots(plan_api)) == {1, second_snapshot_id}
    assert (await request_lease(plan_api, [second_snapshot_id], 0, HEADER_OF_ANOTHER_ENGINE)).json == {"found": 0}
    plan_api.advance_leases(1)
    assert set(await load_snapshots(plan_api)) == {1}


async def test_plan_withdrawn_by_one_holder_stays_for_another(plan_api: PlanApi) -> None:
    first_snapshot_id, second_snapshot_id = [
        (await make_plan(plan_api, holder=holder))["plan-snapshot-id"] for holder in ("a", "b")
    ]
    assert first_snapshot_id != second_snapshot_id
    assert (await make_plan(plan_api, holder="a"))["plan-snapshot-id"] == first_snapshot_id
    await request_lease(plan_api, [first_snapshot_id], 0)
    assert set(await load_snapshots(plan_api)) == {1, second_snapshot_id}


async def test_plan_is_read_with_the_schema_of_its_request(plan_api: PlanApi) -> None:
    """Under a later schema, `id` may be another column."""
    old_plan_id = (await make_plan(plan_api))["plan-snapshot-id"]
    renamed_schema = {
        "type": "struct",
        "schema-id": 1,
        "fields": [
            {"id": 1, "name": "old", "required": True, "type": "long"},
            {"id": 3, "name": "id", "required": False, "type": "long"},
        ],
    }
    updates = [
        {"action": "add-schema", "schema": renamed_schema, "last-column-id": 3},
        {"action": "set-current-schema", "schema-id": -1},
    ]
    assert (await plan_api("POST", f"{STANDARD_TABLES}/t", {"requirements": [], "updates": updates})).status == 200
    new_plan_id = (await make_plan(plan_api, "old = 5"))["plan-snapshot-id"]
    snapshots = await load_snapshots(plan_api)
    assert (snapshots[old_plan_id]["schema-id"], snapshots[new_plan_id]["schema-id"]) == (0, 1)


async def test_commit_that_removes_a_plans_snapshot_drops_only_the_plan(plan_api: PlanApi) -> None:
    """Spark's `expire_snapshots` removes plan snapshots like this if its catalog sends the header `X-Seamark-Plans`.

    After the commit, Spark deletes the plan's files.
    """
    plan_id = (await make_plan(plan_api))["plan-snapshot-id"]
    await append_files(plan_api, "t", build_ten_id_files(31)[30:], snapshot_id=2, parent=1)
    updates = [{"action": "remove-snapshots", "snapshot-ids": [1, plan_id]}]
    uuid = (await plan_api.load("t"))["metadata"]["table-uuid"]
    body = {"requirements": [{"type": "assert-table-uuid", "uuid": uuid}], "updates": updates}
    answer = await plan_api("POST", f"{STANDARD_TABLES}/t", body, headers=PLANS_HEADER)
    assert answer.status == 200, answer.raw
    assert [snapshot["snapshot-id"] for snapshot in answer.json["metadata"]["snapshots"]] == [2]
    assert set(await load_snapshots(plan_api)) == {2}
    second_id = (await make_plan(plan_api))["plan-snapshot-id"]
    assert second_id != plan_id
    change = {"identifier": {"namespace": ["db"], "name": "t"}, **body}
    change["updates"] = [{"action": "remove-snapshots", "snapshot-ids": [second_id]}]
    answer = await plan_api("POST", "/v1/transactions/commit", {"table-changes": [change]}, headers=PLANS_HEADER)
    assert answer.status == 204, answer.raw
    assert set(await load_snapshots(plan_api)) == {2}


async def test_plan_removed_by_a_commit_is_made_anew_when_requested_again(plan_api: PlanApi, tmp_path: Path) -> None:
    first_id = (await make_plan(plan_api))["plan-snapshot-id"]
    files = set(list_plan_files(tmp_path))
    body = {"requirements": [], "updates": [{"action": "remove-snapshots", "snapshot-ids": [first_id]}]}
    assert (await plan_api("POST", f"{STANDARD_TABLES}/t", body, headers=PLANS_HEADER)).status == 200
    second_id = (await make_plan(plan_api))["plan-snapshot-id"]
    assert second_id != first_id
    assert (await plan_api.server.components.housekeeping.run_round())["plan_tables_cleaned"] == 1
    assert files.isdisjoint(list_plan_files(tmp_path))
    assert set(await load_snapshots(plan_api)) == {1, second_id}


async def test_commit_cannot_make_a_plans_snapshot_part_of_the_table(plan_api: PlanApi) -> None:
    plan_id = (await make_plan(plan_api))["plan-snapshot-id"]
    snapshot = (await load_snapshots(plan_api))[plan_id]
    renumbered_snapshot = {**snapshot, "sequence-number": 2, "snapshot-id": 5, "parent-snapshot-id": 1}
    refused_updates = [
        [{"action": "add-snapshot", "snapshot": {**snapshot, "sequence-number": 2}}],
        [{"action": "Add-Snapshot", "snapshot": renumbered_snapshot}],
        [{"action": "set-snapshot-ref", "ref-name": "main", "type": "branch", "snapshot-id": plan_id}],
        [{"action": "set-snapshot-ref", "ref-name": "kept", "type": "tag", "snapshot-id": plan_id}],
    ]
    for updates in refused_updates:
        answer = await plan_api(
            "POST", f"{STANDARD_TABLES}/t", {"requirements": [], "updates": updates}, headers=PLANS_HEADER
        )
        assert answer.error[:2] == (400, "BadRequestException")
    requirement = {"type": "assert-ref-snapshot-id", "ref": "main", "snapshot-id": plan_id}
    answer = await plan_api(
        "POST", f"{STANDARD_TABLES}/t", {"requirements": [requirement], "updates": []}, headers=PLANS_HEADER
    )
    assert answer.error[:2] == (409, "CommitFailedException")
    await append_files(plan_api, "t", build_ten_id_files(31)[30:], snapshot_id=2, parent=1)
    assert {item["snapshot-id"] for item in (await plan_api.load("t"))["metadata"]["snapshots"]} == {1, 2}


async def test_number_of_shown_plans_is_limited(tmp_path: Path) -> None:
    async with open_plan_api(tmp_path, plan_snapshots_limit=3) as plan_api:
        ids = []
        for number in range(5):
            ids.append((await make_plan(plan_api, f"id = {10 * number}"))["plan-snapshot-id"])
            plan_api.clock.ahead_ms += 10
        assert set(await load_snapshots(plan_api)) == {1, *ids[2:]}


async def test_invalid_plans_header_or_lease_is_rejected(plan_api: PlanApi) -> None:
    for value in ("", "a b", "x" * 101, "\xe9"):
        for method, path in (("GET", f"{STANDARD_TABLES}/t"), ("POST", f"{OWN_TABLES}/t/plan-tables")):
            body = {} if method == "POST" else None
            answer = await plan_api(method, path, body, headers={"X-Seamark-Plans": value})
            assert answer.error[:2] == (400, "BadRequestException"), (value, path)
            assert "X-Seamark-Plans" in answer.error[2]
    plan_id = (await make_plan(plan_api))["plan-snapshot-id"]
    for ids, lease_s in (([], 5), ([plan_id], -1), (["x"], 5), ([1 << 63], 5), ([1] * 1001, 5), ([plan_id], None)):
        assert (await request_lease(plan_api, ids, lease_s)).error[:2] == (400, "BadRequestException")
    assert "X-Seamark-Plans" in (await request_lease(plan_api, [plan_id], 5, {})).error[2]
    assert (await plan_api("POST", f"{OWN_TABLES}/no/plan-snapshots", {}, headers=PLANS_HEADER)).status in (400, 404)
    assert set(await load_snapshots(plan_api)) == {1, plan_id}


async def test_plan_cannot_be_registered_as_a_table(plan_api: PlanApi) -> None:
    """The server deletes the plan's files after the end of its lease."""
    plan = await make_plan(plan_api, headers={})
    loaded_table = await plan_api("GET", f"{STANDARD_TABLES}/{plan['name']}")
    location = loaded_table.json["metadata-location"]
    register_path = STANDARD_TABLES.replace("/tables", "/register")
    for body in ({"name": "u"}, {"name": "t", "overwrite": True}):
        answer = await plan_api("POST", register_path, {**body, "metadata-location": location})
        assert answer.status == 400, answer.raw
        assert "belongs to a plan" in answer.json["error"]["message"]
    assert set(await load_snapshots(plan_api)) == {1}
