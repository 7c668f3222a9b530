"""Tests of views over HTTP."""

from __future__ import annotations

from tests.api.client import SCHEMA, VIEW_VERSION, Api

VIEWS = "/v1/namespaces/db/views"


def _build_version(sql: str) -> dict[str, object]:
    representations = [{"type": "sql", "sql": sql, "dialect": "spark"}]
    return {**VIEW_VERSION, "version-id": 2, "schema-id": 0, "representations": representations}


async def test_created_view_is_loaded_as_in_the_create_answer(api: Api) -> None:
    created_view = await api.view(properties={"a": "1"})
    assert set(created_view) == {"metadata-location", "metadata", "config"}
    assert created_view["metadata"]["properties"] == {"a": "1"}
    assert (await api("GET", f"{VIEWS}/v")).json == created_view


async def test_views_and_tables_are_listed_separately(api: Api) -> None:
    await api.view()
    await api.create_table()
    assert (await api("GET", VIEWS)).json["identifiers"] == [{"namespace": ["db"], "name": "v"}]
    assert (await api("GET", "/v1/namespaces/db/tables")).json["identifiers"] == [{"namespace": ["db"], "name": "t"}]
    assert (await api("GET", "/v1/namespaces/none/views")).error[:2] == (404, "NoSuchNamespaceException")


async def test_view_cannot_have_a_taken_name(api: Api) -> None:
    await api.create_table()
    body = {"name": "t", "schema": SCHEMA, "view-version": VIEW_VERSION, "properties": {}}
    assert (await api("POST", VIEWS, body)).error[:2] == (409, "AlreadyExistsException")


async def test_replaced_view_has_its_new_version(api: Api) -> None:
    await api.view()
    body = {
        "updates": [
            {"action": "add-view-version", "view-version": _build_version("SELECT 2")},
            {"action": "set-current-view-version", "view-version-id": -1},
        ]
    }
    replaced_answer = await api("POST", f"{VIEWS}/v", body)
    assert replaced_answer.status == 200, replaced_answer.raw
    metadata = replaced_answer.json["metadata"]
    current_version = next(
        version for version in metadata["versions"] if version["version-id"] == metadata["current-version-id"]
    )
    assert current_version["representations"][0]["sql"] == "SELECT 2"
    assert (await api("GET", f"{VIEWS}/v")).json == replaced_answer.json


async def test_failed_view_requirement_is_a_conflict(api: Api) -> None:
    await api.view()
    uuid = "00000000-0000-4000-8000-000000000000"
    body = {"requirements": [{"type": "assert-view-uuid", "uuid": uuid}], "updates": []}
    assert (await api("POST", f"{VIEWS}/v", body)).error[:2] == (409, "CommitFailedException")
    assert (await api("POST", f"{VIEWS}/v", {"updates": [{"action": "sing"}]})).error[0] == 400


async def test_dropped_view_is_not_found(api: Api) -> None:
    await api.view()
    assert (await api("HEAD", f"{VIEWS}/v")).status == 204
    assert (await api("DELETE", f"{VIEWS}/v")).status == 204
    missing_answer = await api("HEAD", f"{VIEWS}/v")
    assert (missing_answer.status, missing_answer.raw) == (404, b"")
    for method in ("GET", "DELETE"):
        assert (await api(method, f"{VIEWS}/v")).error[:2] == (404, "NoSuchViewException")


async def test_view_is_registered_from_its_metadata_file(api: Api) -> None:
    created_view = await api.view()
    await api("DELETE", f"{VIEWS}/v")
    body = {"name": "again", "metadata-location": created_view["metadata-location"]}
    registered_answer = await api("POST", "/v1/namespaces/db/register-view", body)
    assert (registered_answer.status, registered_answer.json) == (200, created_view)
    assert (await api("POST", "/v1/namespaces/db/register-view", body)).error[:2] == (409, "AlreadyExistsException")


async def test_view_is_renamed_into_another_namespace(api: Api) -> None:
    await api.view()
    await api("POST", "/v1/namespaces", {"namespace": ["other"]})
    source = {"namespace": ["db"], "name": "v"}
    target = {"namespace": ["other"], "name": "w"}
    assert (await api("POST", "/v1/views/rename", {"source": source, "destination": target})).status == 204
    assert (await api("HEAD", "/v1/namespaces/other/views/w")).status == 204
    answer = await api("POST", "/v1/views/rename", {"source": source, "destination": target})
    assert answer.error[:2] == (404, "NoSuchViewException")
