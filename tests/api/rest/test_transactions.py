"""Tests of commits to several tables, and of renames of tables."""

from __future__ import annotations

from typing import Any

from tests.api.client import Api, build_property_commit

COMMIT = "/v1/transactions/commit"


def _build_change(name: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"identifier": {"namespace": ["db"], "name": name}, **body}


async def _read_property(api: Api, name: str) -> str | None:
    loaded_table = (await api("GET", f"/v1/namespaces/db/tables/{name}")).json
    property_value = loaded_table["metadata"]["properties"].get("x")
    return None if property_value is None else str(property_value)


async def test_transaction_changes_all_of_its_tables(api: Api) -> None:
    for name in ("a", "b"):
        await api.create_table(name)
    answer = await api(
        "POST", COMMIT, {"table-changes": [_build_change(name, build_property_commit(x="1")) for name in ("b", "a")]}
    )
    assert (answer.status, answer.raw) == (204, b"")
    assert [await _read_property(api, name) for name in ("a", "b")] == ["1", "1"]


async def test_one_rejected_change_cancels_the_whole_transaction(api: Api) -> None:
    for name in ("a", "b"):
        await api.create_table(name)
    invalid_change = {"requirements": [{"type": "assert-table-uuid", "uuid": "other"}], "updates": []}
    answer = await api(
        "POST",
        COMMIT,
        {"table-changes": [_build_change("a", build_property_commit(x="1")), _build_change("b", invalid_change)]},
    )
    assert answer.error[:2] == (409, "CommitFailedException")
    missing_changes = {
        "table-changes": [
            _build_change("a", build_property_commit(x="1")),
            _build_change("none", build_property_commit(x="1")),
        ]
    }
    assert (await api("POST", COMMIT, missing_changes)).error[:2] == (404, "NoSuchTableException")
    assert await _read_property(api, "a") is None


async def test_change_without_a_table_and_empty_change_are_malformed(api: Api) -> None:
    for changes in ([], [build_property_commit(x="1")]):
        assert (await api("POST", COMMIT, {"table-changes": changes})).error[0] == 400


async def test_table_is_renamed_into_another_namespace(api: Api) -> None:
    created_table = await api.create_table()
    await api("POST", "/v1/namespaces", {"namespace": ["other"]})
    source, target = {"namespace": ["db"], "name": "t"}, {"namespace": ["other"], "name": "u"}
    answer = await api("POST", "/v1/tables/rename", {"source": source, "destination": target})
    assert (answer.status, answer.raw) == (204, b"")
    assert (await api("GET", "/v1/namespaces/other/tables/u")).json["metadata"] == created_table["metadata"]
    repeated_answer = await api("POST", "/v1/tables/rename", {"source": source, "destination": target})
    assert repeated_answer.error[:2] == (404, "NoSuchTableException")


async def test_rename_to_a_taken_name_or_a_missing_namespace_is_rejected(api: Api) -> None:
    await api.create_table("a")
    await api.view("v")
    source = {"namespace": ["db"], "name": "a"}
    for namespace, name, error in (
        ("db", "v", (409, "AlreadyExistsException")),
        ("none", "a", (404, "NoSuchNamespaceException")),
    ):
        body = {"source": source, "destination": {"namespace": [namespace], "name": name}}
        assert (await api("POST", "/v1/tables/rename", body)).error[:2] == error
