"""Tests of indexes over HTTP: a definition commits to the table, and listings report the state of each index."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.api.client import Api, build_property_commit
from tests.api.indexes.indexed import (
    INDEXES,
    begin_build,
    build_index_file,
    define_index,
    list_missing_files,
    load_index,
    register_files,
    write_index_file,
)
from tests.api.plans.planned import append_files, build_data_file
from tests.server.rig import run_server

FILES = [build_data_file(f"file:///t/{n}.parquet", n, n, rows=10 * n) for n in range(1, 7)]


@pytest.fixture
async def api_with_table(api: Api) -> Api:
    """Return the API with `db.t` of 6 files in 2 manifests."""
    await api.create_table()
    await append_files(api, "t", FILES, snapshot_id=1, manifests=2)
    return api


async def read_properties(api: Api) -> dict[str, str]:
    table_properties = (await api("GET", "/v1/namespaces/db/tables/t")).json["metadata"]["properties"]
    return {key: value for key, value in table_properties.items() if key.startswith("seamark.")}


async def commit_table(api: Api, body: dict[str, Any]) -> int:
    return (await api("POST", "/v1/namespaces/db/tables/t", body)).status


async def test_index_is_defined_in_table_properties_and_listed(api_with_table: Api) -> None:
    index = await define_index(api_with_table, "ids", kind="bloom", columns=["id"], fpp=0.001)
    assert json.loads((await read_properties(api_with_table))["seamark.index.ids"]) == {
        "kind": "bloom",
        "columns": ["id"],
        "field-ids": [1],
        "fpp": 0.001,
    }
    body = (await api_with_table("GET", INDEXES)).json
    assert body["snapshot-id"] == 1
    assert index.pop("index-files") == []
    assert body["indexes"] == [index]
    assert index == {
        "name": "ids",
        "kind": "bloom",
        "state": "enabled",
        "definition": "bloom(id, fpp=0.001)",
        "definition-id": index["definition-id"],
        "columns": ["id"],
        "field-ids": [1],
        "measures": [],
        "fpp": 0.001,
        "health": "behind",
        "problem": None,
        "files": 0,
        "files-total": 6,
        "rows": 0,
        "rows-total": 210,
        "lag-files": 6,
        "lag-files-of-refs": 0,
        "audited-ms": None,
        "size-in-bytes": 0,
        "levels": {},
        "misplaced": 0,
        "quarantined": 0,
        "used": None,
    }


async def test_properties_missing_from_the_body_stay_unchanged(api_with_table: Api) -> None:
    await define_index(api_with_table, "i", kind="bloom", columns=["lower(data)"], fpp=0.25)
    paused_index = await define_index(api_with_table, "i", state="paused")
    assert (paused_index["definition"], paused_index["state"], paused_index["health"]) == (
        "bloom(lower(data), fpp=0.25)",
        "paused",
        "paused",
    )
    answer = await define_index(api_with_table, "i", columns=["id"])
    assert (answer["definition"], answer["state"]) == ("bloom(id, fpp=0.25)", "paused")
    other_answer = await define_index(api_with_table, "i", kind="bitmap", state="enabled")
    assert (other_answer["definition"], other_answer["state"]) == ("bitmap(id)", "enabled")


async def test_concurrent_changes_of_one_definition_are_not_lost(api_with_table: Api) -> None:
    definition_id = (await define_index(api_with_table, "i", kind="bloom", columns=["id"]))["definition-id"]
    changes: list[dict[str, Any]] = [
        {"columns": [column], "replaces": definition_id} for column in ("data", "lower(data)")
    ]
    replacements = [api_with_table("PUT", f"{INDEXES}/i", change) for change in changes]
    answers = await asyncio.gather(*replacements)
    assert sorted([answer.status for answer in answers]) == [200, 409], [answer.json for answer in answers]
    changes = [{"fpp": 0.25}, {"state": "paused"}]
    await asyncio.gather(*(api_with_table("PUT", f"{INDEXES}/i", change) for change in changes))
    index = (await api_with_table("GET", f"{INDEXES}/i")).json
    assert (index["fpp"], index["state"]) == (0.25, "paused")


async def test_repeated_definition_commits_nothing(api_with_table: Api) -> None:
    await define_index(api_with_table)
    location_before = (await api_with_table("GET", "/v1/namespaces/db/tables/t")).json["metadata-location"]
    await define_index(api_with_table)
    await define_index(api_with_table, state="enabled")
    assert (await api_with_table("GET", "/v1/namespaces/db/tables/t")).json["metadata-location"] == location_before


async def test_invalid_index_definition_is_rejected(api_with_table: Api) -> None:
    await define_index(api_with_table, "there", kind="record", columns=["id"])
    properties_before = await read_properties(api_with_table)
    cases: list[tuple[str, dict[str, Any], int, str]] = [
        ("i", {"kind": "btree", "columns": ["id"]}, 400, "btree"),
        ("i", {"kind": "bitmap", "columns": ["nope"]}, 400, "no such column"),
        ("i", {"kind": "bitmap", "columns": ["id", "data"]}, 400, "on one column"),
        ("i", {"kind": "bitmap", "columns": ["id"] * 10_000}, 400, "at most 32 columns"),
        ("i", {"kind": "bitmap", "columns": []}, 400, "needs a column"),
        ("i", {"kind": "bitmap"}, 400, "set kind"),
        ("i", {"columns": ["id"]}, 400, "set kind"),
        ("i", {"state": "paused"}, 400, "The table has no index 'i'"),
        ("i", {"kind": "bitmap", "columns": ["id"], "fpp": 0.1}, 400, "fpp"),
        ("i", {"kind": "bloom", "columns": ["id"], "fpp": 7}, 400, "fpp"),
        ("i", {"kind": "bloom", "columns": ["id"], "state": "asleep"}, 400, "asleep"),
        ("i", {"kind": "bloom", "columns": ["id"], "more": 1}, 400, "more"),
        ("i", {"kind": "bloom", "columns": "id"}, 400, "columns"),
        ("-i", {"kind": "bloom", "columns": ["id"]}, 400, "cannot name an index"),
        ("bucket:id", {"kind": "bloom", "columns": ["id"]}, 400, "partition spec"),
        ("twin", {"kind": "record", "columns": ["id"]}, 409, "The index there has the same definition"),
    ]
    for name, body, status, expected in cases:
        answer = await api_with_table("PUT", f"{INDEXES}/{name}", body)
        assert answer.error[0] == status, (expected, answer.raw)
        assert expected in answer.error[2], expected
        assert await read_properties(api_with_table) == properties_before, expected


async def test_name_of_an_index_on_an_attribute_keeps_its_meaning(api_with_table: Api) -> None:
    # The numbers are the snapshot of the dimension table, its key field and its attribute field. Only the snapshot may
    # change under the same name.
    lookup = "lookup[n.shops@{}:{}:{}:string]({})".format
    await define_index(api_with_table, "city", kind="bitmap", columns=[lookup(5, 1, 2, "id")])
    cases: list[tuple[str, str, list[str]]] = [
        ("city", "bitmap", [lookup(5, 3, 2, "id")]),
        ("city", "bitmap", [lookup(6, 1, 3, "id")]),
        ("city", "bloom", [lookup(6, 1, 2, "id").replace("shops", "malls")]),
        ("city", "bitmap", [lookup(6, 1, 2, "data")]),
        ("City", "bitmap", [lookup(6, 1, 3, "id")]),
        ("City", "bitmap", [lookup(6, 1, 2, "id")]),
        ("city", "bitmap", ["data"]),
    ]
    for name, kind, columns in cases:
        answer = await api_with_table("PUT", f"{INDEXES}/{name}", {"kind": kind, "columns": columns})
        assert answer.error[0] == 409, (columns, answer.raw)
        assert "choose another name (--name" in answer.error[2]
    assert "seamark.index.City" not in await read_properties(api_with_table)
    await define_index(api_with_table, "city_of_data", kind="bitmap", columns=[lookup(6, 1, 2, "data")])
    await define_index(api_with_table, "city", state="paused")
    second_definition = await define_index(
        api_with_table, "city", kind="bloom", columns=[lookup(6, 1, 2, "id")], state="enabled"
    )
    assert second_definition["definition"].startswith("bloom(lookup[n.shops@6:1:2:string](id)")


async def test_dropped_index_is_gone_and_reuses_its_files_when_defined_again(api_with_table: Api) -> None:
    await define_index(api_with_table)
    build = await begin_build(api_with_table)
    assert (
        await register_files(api_with_table, build, write_index_file(build, "a", build_index_file(build, FILES[:4])))
    ).status == 200
    assert (await api_with_table("DELETE", f"{INDEXES}/i")).status == 204
    assert await read_properties(api_with_table) == {}
    assert (await api_with_table("GET", f"{INDEXES}/i")).error[0] == 404
    assert (await api_with_table("DELETE", f"{INDEXES}/i")).error[0] == 404
    redefined_index = await define_index(api_with_table, "another")
    assert (redefined_index["files"], redefined_index["rows"], redefined_index["lag-files"]) == (4, 100, 2)


async def test_coverage_counts_files_and_rows_of_the_current_snapshot(api_with_table: Api) -> None:
    await define_index(api_with_table)
    build = await begin_build(api_with_table)
    removed_file = build_data_file("file:///t/gone.parquet", 0, 0, rows=999)
    replacement_file = build_data_file(FILES[0].path, 1, 1, rows=11)
    first_file = write_index_file(build, "one", build_index_file(build, [*FILES[1:3], removed_file, replacement_file]))
    second_file = write_index_file(build, "two", build_index_file(build, FILES[2:6], level=2))
    assert (await register_files(api_with_table, build, first_file, second_file)).status == 200
    index = await load_index(api_with_table)
    assert (index["files"], index["rows"], index["lag-files"], index["health"]) == (5, 200, 1, "behind")
    assert index["levels"] == {"0": 1, "2": 1}
    assert index["size-in-bytes"] == first_file["size-in-bytes"] + second_file["size-in-bytes"]
    assert {file["location"]: (file["files"], file["state"]) for file in index["index-files"]} == {
        first_file["location"]: (4, "live"),
        second_file["location"]: (4, "live"),
    }
    third_file = write_index_file(build, "three", build_index_file(build, FILES))
    await register_files(api_with_table, build, third_file, replaces=[first_file["location"], second_file["location"]])
    index = await load_index(api_with_table)
    assert (index["files"], index["lag-files"], index["health"]) == (6, 0, "ok")
    assert [file["state"] for file in index["index-files"]] == ["superseded", "superseded", "live"]
    await append_files(api_with_table, "t", [build_data_file("file:///t/new.parquet", 9, 9)], snapshot_id=2, parent=1)
    assert (await load_index(api_with_table))["lag-files"] == 1


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
async def test_damaged_index_file_is_quarantined_and_its_data_files_count_as_missing(
    api_with_table: Api, tmp_path: Path, damage: str
) -> None:
    await define_index(api_with_table)
    build = await begin_build(api_with_table)
    data = build_index_file(build, FILES)
    registration = write_index_file(build, "one", data)
    await register_files(api_with_table, build, registration)
    assert (await load_index(api_with_table))["health"] == "ok"
    if damage == "missing":
        Path(registration["location"].removeprefix("file://")).unlink()
    else:
        offset = 90  # Any byte that a checksum of the file covers
        flipped_data = data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :]
        write_index_file(build, "one", data[:-7] if damage == "truncated" else flipped_data)
    async with run_server(tmp_path) as server:  # A new server has not read the file yet.
        other_api = Api(server)
        assert (await load_index(other_api))["files"] == 0
        index = await load_index(other_api)
        assert (index["health"], index["quarantined"], index["lag-files"]) == ("damaged", 1, 6)
        assert registration["location"] in index["index-files"][0]["reason"]
        assert len(await list_missing_files(other_api, build)) == 6
    assert (await load_index(api_with_table))["files"] == 0


async def test_index_property_set_by_an_engine_defines_an_index(api_with_table: Api) -> None:
    assert await commit_table(api_with_table, build_property_commit(**{"seamark.index.typed": "bitmap(data)"})) == 200
    assert (await load_index(api_with_table, "typed"))["definition"] == "bitmap(data)"
    paused_index = await define_index(api_with_table, "typed", state="paused")
    assert (paused_index["field-ids"], paused_index["state"]) == ([2], "paused")


async def test_invalid_index_property_is_listed_with_its_problem_and_can_be_replaced(api_with_table: Api) -> None:
    await commit_table(
        api_with_table,
        build_property_commit(**{"seamark.index.bad": "bitmap(nope)", "seamark.index.b/d": "bitmap(id)"}),
    )
    indexes = (await api_with_table("GET", INDEXES)).json["indexes"]
    assert [(index["name"], index["kind"], index["health"]) for index in indexes] == [
        ("b/d", None, "broken"),
        ("bad", None, "broken"),
    ]
    assert "no such column" in indexes[1]["problem"]
    valid_index = await define_index(api_with_table, "sound", kind="bitmap", columns=["id"])
    assert set(indexes[0]) == set(valid_index) - {"index-files"}
    assert {key for key, value in indexes[0].items() if value is not None} == {"name", "health", "problem"}
    assert (await api_with_table("DELETE", f"{INDEXES}/sound")).status == 204
    assert (await load_index(api_with_table, "bad")) == indexes[1]
    assert "no such column" in (await api_with_table("PUT", f"{INDEXES}/bad", {"state": "paused"})).error[2]
    assert (await api_with_table("POST", f"{INDEXES}/bad/builds")).error[0] == 400
    assert (await define_index(api_with_table, "bad", kind="bitmap", columns=["id"]))["health"] == "behind"
    assert (await api_with_table("DELETE", f"{INDEXES}/b%2Fd")).status == 204
    assert set(await read_properties(api_with_table)) == {"seamark.index.bad"}


async def test_definition_follows_a_rename_and_reports_a_dropped_column(api_with_table: Api) -> None:
    await define_index(api_with_table, "i", kind="bitmap", columns=["data"])
    await commit_table(api_with_table, build_property_commit(**{"seamark.index.typed": "bloom(data)"}))
    build = await begin_build(api_with_table)
    await register_files(api_with_table, build, write_index_file(build, "one", build_index_file(build, FILES)))
    fields = [{"id": 1, "name": "id", "required": True, "type": "long"}]
    renamed_field = {"id": 2, "name": "payload", "required": False, "type": "string"}
    await _change_schema(api_with_table, [*fields, renamed_field], 1)
    index = await load_index(api_with_table)
    assert (index["columns"], index["files"]) == (["payload"], 6)
    assert (await load_index(api_with_table, "typed"))["columns"] == ["payload"]
    await _change_schema(api_with_table, [*fields, {"id": 3, "name": "data", "required": False, "type": "int"}], 2)
    index = await load_index(api_with_table)
    assert (index["health"], index["problem"], index["field-ids"]) == (
        "broken",
        "The column was dropped from the table",
        [2],
    )
    assert (await load_index(api_with_table, "typed"))["field-ids"] == [3]


@pytest.mark.slow
async def test_paused_index_stays_on_its_column(api_with_table: Api) -> None:
    await define_index(api_with_table, "i", kind="bitmap", columns=["data"])
    fields = [{"id": 1, "name": "id", "required": True, "type": "long"}]
    await _change_schema(api_with_table, [*fields, {"id": 3, "name": "data", "required": False, "type": "string"}], 1)
    paused_index = await define_index(api_with_table, "i", state="paused")
    assert (paused_index["state"], paused_index["field-ids"]) == ("paused", [2])
    await _change_schema(api_with_table, fields, 2)
    assert (await define_index(api_with_table, "i", state="enabled"))["field-ids"] == [2]


async def _change_schema(api: Api, fields: list[dict[str, Any]], schema_id: int) -> None:
    schema = {"type": "struct", "schema-id": schema_id, "fields": fields}
    updates = [{"action": "add-schema", "schema": schema}, {"action": "set-current-schema", "schema-id": -1}]
    assert await commit_table(api, {"requirements": [], "updates": updates}) == 200


async def test_bucket_partitions_are_listed_as_indexes_and_cover_their_files(api: Api) -> None:
    spec = {"spec-id": 0, "fields": [{"source-id": 1, "transform": "bucket[8]", "name": "id_bucket"}]}
    await api.create_table(**{"partition-spec": spec})
    indexes = (await api("GET", INDEXES)).json["indexes"]
    assert [(index["name"], index["kind"], index["definition"]) for index in indexes] == [
        ("bucket:id_bucket", "bucket", "bucket(bucket[8](id))")
    ]
    assert (await load_index(api, "bucket:id_bucket")) == indexes[0]
    assert "partition spec" in (await api("DELETE", f"{INDEXES}/bucket:id_bucket")).error[2]
    assert (await api("POST", f"{INDEXES}/bucket:id_bucket/builds")).error[0] == 400


async def test_indexes_of_a_table_without_a_snapshot_and_an_unknown_index(api: Api) -> None:
    await api.create_table()
    index = await define_index(api)
    assert (index["files-total"], index["health"]) == (0, "ok")
    assert (await api("GET", INDEXES)).json["snapshot-id"] is None
    assert (await api("GET", "/api/v1/tables/db/nope/indexes")).error[0] == 404
    assert (await api("PUT", "/api/v1/tables/db/nope/indexes/i", {"kind": "bitmap", "columns": ["id"]})).error[0] == 404


@pytest.mark.slow
async def test_concurrent_definitions_and_commits_all_succeed(api_with_table: Api) -> None:
    async def define_index(number: int) -> int:
        body = {"kind": "bloom", "columns": ["id"], "fpp": (number + 1) / 100}
        return (await api_with_table("PUT", f"{INDEXES}/i{number}", body)).status

    async def commit_property(number: int) -> int:
        return await commit_table(api_with_table, build_property_commit(**{f"p{number}": "x"}))

    results = await asyncio.gather(*(work(number) for number in range(8) for work in (define_index, commit_property)))
    assert results == [200] * 16
    table_properties = (await api_with_table("GET", "/v1/namespaces/db/tables/t")).json["metadata"]["properties"]
    assert {f"p{number}" for number in range(8)} <= set(table_properties)
    assert set(await read_properties(api_with_table)) == {f"seamark.index.i{number}" for number in range(8)}


async def test_reported_index_use_equals_the_counts_of_the_planner(api: Api) -> None:
    uuid = (await api.create_table())["metadata"]["table-uuid"]
    index = await define_index(api)
    assert index["used"] is None
    usage = api.server.components.usage
    usage.note(uuid, index["definition-id"], files_in=10, files_removed=4, now_ms=50)
    usage.note(uuid, index["definition-id"], files_in=10, files_removed=9, now_ms=60)
    usage.note(uuid, "another", files_in=10, files_removed=9, now_ms=70)
    assert (await load_index(api))["used"] == {"last-ms": 60, "plans": 2, "files-in": 20, "files-removed": 13}


async def test_purging_a_table_deletes_its_index_files(api_with_table: Api) -> None:
    await define_index(api_with_table)
    build = await begin_build(api_with_table)
    registration = write_index_file(build, "one", build_index_file(build, FILES))
    await register_files(api_with_table, build, registration)
    unregistered_file = write_index_file(build, "never-registered", b"x")
    store = api_with_table.server.components.store
    assert (await api_with_table("DELETE", "/v1/namespaces/db/tables/t")).status == 204
    assert len(await store.index_files(build["table-uuid"])) == 1
    (dropped_table,) = (await api_with_table("GET", "/api/v1/dropped")).json["dropped"]
    assert (await api_with_table("POST", f"/api/v1/dropped/{dropped_table['id']}/undrop")).status == 200
    assert (await load_index(api_with_table))["files"] == 6
    assert (await api_with_table("DELETE", "/v1/namespaces/db/tables/t")).status == 204
    (dropped_table,) = (await api_with_table("GET", "/api/v1/dropped")).json["dropped"]
    assert (await api_with_table("DELETE", f"/api/v1/dropped/{dropped_table['id']}")).status == 204
    assert await store.index_files(build["table-uuid"]) == []
    assert not any(
        Path(file["location"].removeprefix("file://")).exists() for file in (registration, unregistered_file)
    )
