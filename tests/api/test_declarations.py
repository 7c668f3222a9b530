"""Tests of the routes by which tools declare a state.

A repeated request changes nothing, and fields missing from the body are removed.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.api.client import SCHEMA, Api, build_property_commit

POLICY = "/api/v1/tables/db/t/policy"


async def count_instants(api: Api) -> int:
    return len((await api("GET", "/api/v1/timeline?limit=1000")).json["instants"])


async def read_table_properties(api: Api) -> dict[str, str]:
    loaded_table: dict[str, Any] = (await api("GET", "/v1/namespaces/db/tables/t")).json
    return loaded_table["metadata"]["properties"]  # type: ignore[no-any-return]


async def test_put_creates_a_namespace_and_then_replaces_its_properties(api: Api) -> None:
    answer = await api("PUT", "/api/v1/namespaces/shop", {"properties": {"owner": "ann", "team": "data"}})
    assert answer.status == 200
    assert answer.json["namespace"] == ["shop"]
    location = answer.json["properties"]["location"]
    assert answer.json["properties"] == {"owner": "ann", "team": "data", "location": location}
    replaced_namespace = await api("PUT", "/api/v1/namespaces/shop", {"properties": {"owner": "bob"}})
    assert replaced_namespace.json["properties"] == {"owner": "bob", "location": location}
    assert (await api("GET", "/v1/namespaces/shop")).json == replaced_namespace.json
    nested_namespace = await api("PUT", "/api/v1/namespaces/shop%1Feu", {})
    assert nested_namespace.json["namespace"] == ["shop", "eu"]


async def test_repeated_put_does_not_write_a_namespace(api: Api) -> None:
    body = {"properties": {"owner": "ann"}}
    first_answer = await api("PUT", "/api/v1/namespaces/shop", body)
    store = api.server.components.store
    namespace_before = await store.load_namespace(("shop",))
    assert (await api("PUT", "/api/v1/namespaces/shop", body)).raw == first_answer.raw
    namespace_after = await store.load_namespace(("shop",))
    assert namespace_before is not None
    assert namespace_after is not None
    assert namespace_after.version == namespace_before.version


async def test_concurrent_puts_leave_the_properties_of_one_put(api: Api) -> None:
    bodies = [{"properties": {f"p{n}": "x"}} for n in range(8)]
    answers = await asyncio.gather(*(api("PUT", "/api/v1/namespaces/shop", body) for body in bodies))
    assert {answer.status for answer in answers} == {200}
    properties = (await api("GET", "/v1/namespaces/shop")).json["properties"]
    properties.pop("location")
    assert {"properties": properties} in bodies


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("absent%1Fchild", {}, 404),
        ("shop", {"properties": {"location": "s3://elsewhere/x"}}, 400),
        ("shop", {"properties": ["owner"]}, 400),
    ],
)
async def test_invalid_namespace_is_refused_and_not_created(path: str, body: Any, status: int, api: Api) -> None:
    answer = await api("PUT", f"/api/v1/namespaces/{path}", body)
    assert answer.error[0] == status
    assert (await api("GET", f"/v1/namespaces/{path}")).status == 404


async def test_put_replaces_the_policy_of_a_table_and_keeps_other_properties(api: Api) -> None:
    await api.create_table()
    await api(
        "POST",
        "/v1/namespaces/db/tables/t",
        build_property_commit(**{"owner": "ann", "write.parquet.row-group-limit": "9"}),
    )
    first_policy = {"seamark.compaction.enabled": "true", "seamark.services.priority": "high"}
    answer = await api("PUT", POLICY, {"properties": first_policy})
    assert answer.status == 200
    sources = {entry["name"]: entry["source"] for entry in answer.json["properties"]}
    assert {name for name, source in sources.items() if source == "table"} == first_policy.keys()
    second_policy = {"seamark.compaction.enabled": "false"}
    assert (await api("PUT", POLICY, {"properties": second_policy})).status == 200
    expected_properties = {"owner": "ann", "write.parquet.row-group-limit": "9", **second_policy}
    assert (await read_table_properties(api)).items() >= expected_properties.items()
    assert "seamark.services.priority" not in await read_table_properties(api)


async def test_repeated_policy_makes_no_commit(api: Api) -> None:
    await api.create_table()
    body = {"properties": {"seamark.compaction.enabled": "true"}}
    await api("PUT", POLICY, body)
    count_before = await count_instants(api)
    assert (await api("PUT", POLICY, body)).status == 200
    assert await count_instants(api) == count_before


async def test_unknown_or_invalid_policy_is_refused(api: Api) -> None:
    await api.create_table()
    for properties, message in (
        ({"seamark.compaction.enable": "true"}, "did you mean seamark.compaction.enabled"),
        ({"seamark.compaction.enabled": "perhaps"}, "seamark.compaction.enabled"),
        ({"owner": "ann"}, "is unknown"),
    ):
        answer = await api("PUT", POLICY, {"properties": properties})
        assert answer.error[0] == 400
        assert message in answer.error[2]
    assert (await api("PUT", "/api/v1/tables/db/absent/policy", {"properties": {}})).status == 404


TABLE, VIEW = "/api/v1/tables/db/t", "/api/v1/views/db/v"


def declare_view(sql: str, **properties: str) -> dict[str, Any]:
    representations = [{"sql": sql, "dialect": "spark"}]
    return {
        "schema": SCHEMA,
        "representations": representations,
        "default-namespace": ["db"],
        "properties": properties,
    }


async def test_put_creates_a_table_and_a_repeat_changes_nothing(api: Api) -> None:
    spec = {"spec-id": 0, "fields": [{"source-id": 1, "field-id": 1000, "name": "id", "transform": "identity"}]}
    body = {"schema": SCHEMA, "partition-spec": spec, "properties": {"owner": "ann"}}
    created_table = await api("PUT", TABLE, body)
    assert created_table.status == 200, created_table.raw
    count_before = await count_instants(api)
    assert (await api("PUT", TABLE, body)).json == created_table.json
    assert await count_instants(api) == count_before
    changed_table = await api("PUT", TABLE, {**body, "properties": {"team": "data"}})
    assert changed_table.json["uuid"] == created_table.json["uuid"]
    assert {"owner": "ann", "team": "data"}.items() <= (await read_table_properties(api)).items()


async def test_put_refuses_another_schema_of_a_table(api: Api) -> None:
    assert (await api("PUT", TABLE, {"schema": SCHEMA})).status == 200
    fields = [*SCHEMA["fields"], {"id": 9, "name": "new", "required": False, "type": "long"}]
    for body in (
        {"schema": {**SCHEMA, "fields": fields}},
        {"schema": SCHEMA, "location": "file:///elsewhere"},
        {
            "schema": SCHEMA,
            "partition-spec": {"fields": [{"source-id": 1, "field-id": 1000, "name": "p", "transform": "identity"}]},
        },
    ):
        assert (await api("PUT", TABLE, body)).error[:2] == (409, "AlreadyExistsException")
    refusal = await api("PUT", TABLE, {"schema": SCHEMA, "properties": {"seamark.index.x": "{}"}})
    assert refusal.error[0] == 400
    assert (await api("PUT", "/api/v1/tables/none/t", {"schema": SCHEMA})).error[0] == 404


async def test_put_creates_and_replaces_a_view_and_a_repeat_changes_nothing(api: Api) -> None:
    created_view = await api("PUT", VIEW, declare_view("SELECT 1", owner="ann"))
    assert created_view.status == 200, created_view.raw
    count_before = await count_instants(api)
    assert (await api("PUT", VIEW, declare_view("SELECT 1", owner="ann"))).json == created_view.json
    assert await count_instants(api) == count_before
    assert (await api("PUT", VIEW, declare_view("SELECT 2"))).json["uuid"] == created_view.json["uuid"]
    metadata = (await api("GET", "/v1/namespaces/db/views/v")).json["metadata"]
    current_version = next(
        version for version in metadata["versions"] if version["version-id"] == metadata["current-version-id"]
    )
    assert [version["sql"] for version in current_version["representations"]] == ["SELECT 2"]
    assert metadata["properties"]["owner"] == "ann"
    await api("PUT", TABLE, {"schema": SCHEMA})
    assert (await api("PUT", "/api/v1/views/db/t", declare_view("SELECT 1"))).error[0] == 409
    assert (await api("PUT", VIEW, {**declare_view("SELECT 1"), "representations": []})).error[0] == 400


async def test_concurrent_puts_create_one_table(api: Api) -> None:
    answers = await asyncio.gather(*(api("PUT", TABLE, {"schema": SCHEMA}) for _ in range(6)))
    assert {answer.status for answer in answers} == {200}
    assert len({answer.json["uuid"] for answer in answers}) == 1
