"""Tests of idempotency keys: a repeated request gets the first answer and has no second effect, for every operation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from seamark.formats.runtime.errors import StorageError
from seamark.metaserver.api.http.bodies import QUICK_BYTES
from seamark.metaserver.store.port import InstantFilter
from tests.api.client import SCHEMA, VIEW_VERSION, Answer, Api, build_append, build_property_commit, create_key
from tests.api.rest.standard import PLANNING_OPERATIONS, read_operations
from tests.server.rig import OffsetClock, run_server

T = "/v1/namespaces/db/tables"
V = "/v1/namespaces/db/views"
REPLACE_VIEW = {"updates": [{"action": "set-properties", "updates": {"x": "1"}}]}
RENAME_BODY = {
    "source": {"namespace": ["db"], "name": "t"},
    "destination": {"namespace": ["db"], "name": "u"},
}


def _build_change(name: str) -> dict[str, Any]:
    return {"table-changes": [{"identifier": {"namespace": ["db"], "name": name}, **build_property_commit(x="1")}]}


async def _do_nothing(api: Api) -> str:
    return ""


async def _create_table(api: Api) -> str:
    return str((await api.create_table())["metadata-location"])


async def _create_view(api: Api) -> str:
    return str((await api.view())["metadata-location"])


async def _unregister_view(api: Api) -> str:
    location = await _create_view(api)
    await api("DELETE", f"{V}/v")
    return location


async def _unregister_table(api: Api) -> str:
    await api.create_table()
    return str((await api("POST", f"{T}/t/unregister")).json["metadata-location"])


@dataclass(frozen=True)
class IdempotencyCase:
    """Two requests of an operation: one that succeeds once after `prepare` has run, and one that is always refused.

    `prepare` returns the metadata location of the table or view that it creates. In a body, `{location}` is replaced by
    this location.

    Attributes:
        status: The status of the first successful request.
        refused_path: The path of the refused request.
        refused_body: The body of the refused request.
        refused_status: The status of the refused request.
    """

    operation: str
    method: str
    path: str
    body: Any
    status: int
    refused_path: str
    refused_body: Any
    refused_status: int
    prepare: Callable[[Api], Awaitable[str]] = field(default=_do_nothing)


CASES = (
    IdempotencyCase(
        "createNamespace", "POST", "/v1/namespaces", {"namespace": ["n"]}, 200,
        "/v1/namespaces", {"namespace": ["db"]}, 409,
    ),
    IdempotencyCase("dropNamespace", "DELETE", "/v1/namespaces/db", None, 204, "/v1/namespaces/none", None, 404),
    IdempotencyCase(
        "updateProperties", "POST", "/v1/namespaces/db/properties", {"updates": {"a": "1"}}, 200,
        "/v1/namespaces/db/properties", {"updates": {"a": "1"}, "removals": ["a"]}, 422,
    ),
    IdempotencyCase(
        "createTable", "POST", T, {"name": "t", "schema": SCHEMA}, 200,
        "/v1/namespaces/none/tables", {"name": "t", "schema": SCHEMA}, 404,
    ),
    IdempotencyCase(
        "registerTable", "POST", "/v1/namespaces/db/register", {"name": "t", "metadata-location": "{location}"}, 200,
        "/v1/namespaces/db/register", {"name": "t", "metadata-location": "file:///etc/passwd"}, 400, _unregister_table,
    ),
    IdempotencyCase(
        "updateTable", "POST", f"{T}/t", build_append(1), 200,
        f"{T}/t", {"requirements": [], "updates": [{"action": "dance"}]}, 400, _create_table,
    ),
    IdempotencyCase("dropTable", "DELETE", f"{T}/t", None, 204, f"{T}/none", None, 404, _create_table),
    IdempotencyCase(
        "unregisterTable", "POST", f"{T}/t/unregister", None, 200,
        f"{T}/none/unregister", None, 404, _create_table,
    ),
    IdempotencyCase(
        "renameTable", "POST", "/v1/tables/rename", RENAME_BODY, 204,
        "/v1/tables/rename", {**RENAME_BODY, "source": {"namespace": ["db"], "name": "none"}}, 404, _create_table,
    ),
    IdempotencyCase(
        "commitTransaction", "POST", "/v1/transactions/commit", _build_change("t"), 204,
        "/v1/transactions/commit", _build_change("none"), 404, _create_table,
    ),
    IdempotencyCase("replaceView", "POST", f"{V}/v", REPLACE_VIEW, 200, f"{V}/none", REPLACE_VIEW, 404, _create_view),
    IdempotencyCase("dropView", "DELETE", f"{V}/v", None, 204, f"{V}/none", None, 404, _create_view),
    IdempotencyCase(
        "renameView", "POST", "/v1/views/rename", {**RENAME_BODY, "source": {"namespace": ["db"], "name": "v"}}, 204,
        "/v1/views/rename", {**RENAME_BODY, "source": {"namespace": ["db"], "name": "none"}}, 404, _create_view,
    ),
    IdempotencyCase(
        "registerView", "POST", "/v1/namespaces/db/register-view",
        {"name": "v", "metadata-location": "{location}"}, 200,
        "/v1/namespaces/db/register-view", {"name": "v", "metadata-location": "file:///etc/passwd"}, 400,
        _unregister_view,
    ),
    IdempotencyCase(  # The specification gives this operation no key, but Java's client may send one.
        "createView", "POST", V, {"name": "v", "schema": SCHEMA, "view-version": VIEW_VERSION}, 200,
        "/v1/namespaces/none/views", {"name": "v", "schema": SCHEMA, "view-version": VIEW_VERSION}, 404,
    ),
)  # fmt: skip


def _fill_placeholders(body: Any, location: str) -> Any:
    return None if body is None else json.loads(json.dumps(body).replace("{location}", location))


async def _read_state(api: Api) -> list[str]:
    """Return all state that a second execution would change: the instants of the timeline, and the namespaces."""
    instants = await api.server.components.store.list_instants(InstantFilter(), limit=1000)
    store = api.server.components.store
    namespaces = [
        str(await store.load_namespace(path)) for path in await store.list_namespaces(parent=(), after=None, limit=100)
    ]
    return [str(instant.id) for instant in instants] + namespaces


def _check_same(first_answer: Answer, second_answer: Answer) -> None:
    assert (second_answer.status, second_answer.raw) == (first_answer.status, first_answer.raw)
    assert second_answer.headers.get("ETag") == first_answer.headers.get("ETag")


def test_every_changing_operation_with_a_key_has_a_case() -> None:
    operations_with_key = {operation.id for operation in read_operations() if operation.has_idempotency_key}
    assert {case.operation for case in CASES} - {"createView"} == operations_with_key - PLANNING_OPERATIONS


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.operation)
async def test_success_is_replayed_without_a_second_execution(api: Api, case: IdempotencyCase) -> None:
    location = await case.prepare(api)
    body, key = _fill_placeholders(case.body, location), create_key()
    first_answer = await api(case.method, case.path, body, key=key)
    assert first_answer.status == case.status, first_answer.raw
    state = await _read_state(api)
    for same_key in (key, key.upper()):
        _check_same(first_answer, await api(case.method, case.path, body, key=same_key))
    assert await _read_state(api) == state


@pytest.mark.few_cases(4)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.operation)
async def test_final_error_is_replayed_after_later_changes(api: Api, case: IdempotencyCase) -> None:
    location = await case.prepare(api)
    body, key = _fill_placeholders(case.refused_body, location), create_key()
    first_answer = await api(case.method, case.refused_path, body, key=key)
    assert first_answer.status == case.refused_status, first_answer.raw
    record = await api.server.components.store.find_idempotency_record(key, api.server.components.clock.now_ms())
    assert record is not None
    assert record.status == case.refused_status
    await api("POST", "/v1/namespaces", {"namespace": ["none"]})
    await api.create_table("none")
    _check_same(first_answer, await api(case.method, case.refused_path, body, key=key))


@pytest.mark.few_cases(4)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.operation)
async def test_key_of_another_request_is_unprocessable(api: Api, case: IdempotencyCase) -> None:
    location = await case.prepare(api)
    key = create_key()
    assert (await api(case.method, case.path, _fill_placeholders(case.body, location), key=key)).status == case.status
    other_answer = await api("POST", "/v1/namespaces", {"namespace": ["another"]}, key=key)
    assert other_answer.error[:2] == (422, "UnprocessableEntityException")
    assert (await api("HEAD", "/v1/namespaces/another")).status == 404
    if case.body is not None:
        answer = await api(case.method, case.path, {**_fill_placeholders(case.body, location), "more": 1}, key=key)
        assert answer.error[:2] == (422, "UnprocessableEntityException")


@pytest.mark.few_cases(4)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.operation)
async def test_one_of_concurrent_requests_with_a_key_runs_and_all_get_its_answer(
    api: Api, case: IdempotencyCase
) -> None:
    location = await case.prepare(api)
    body, key = _fill_placeholders(case.body, location), create_key()
    answers = await asyncio.gather(*(api(case.method, case.path, body, key=key) for _ in range(8)))
    for answer in answers:
        assert answer.status == case.status, answer.raw
        _check_same(answers[0], answer)


async def test_request_that_loses_a_commit_to_its_duplicate_gets_its_success(api: Api) -> None:
    await api.create_table()
    schema = {**SCHEMA, "fields": [*SCHEMA["fields"], {"id": 9, "name": "n", "required": False, "type": "long"}]}
    commit = {
        "requirements": [{"type": "assert-current-schema-id", "current-schema-id": 0}],
        "updates": [{"action": "add-schema", "schema": schema}, {"action": "set-current-schema", "schema-id": -1}],
    }
    key = create_key()
    answers = await asyncio.gather(*(api("POST", f"{T}/t", commit, key=key) for _ in range(5)))
    assert [answer.status for answer in answers] == [200] * 5
    assert len({answer.json["metadata-location"] for answer in answers}) == 1
    assert (await api("POST", f"{T}/t", commit, key=create_key())).status == 409


@pytest.mark.parametrize(
    "key",
    [
        "x",
        "",
        "017f22e2-79b0-4cc3-98c4-dc0c0c07398f",
        "017f22e279b07cc398c4dc0c0c07398f",
        "{017f22e2-79b0-7cc3-98c4-dc0c0c07398f}",
    ],
)
async def test_key_that_is_not_a_uuid7_is_rejected_before_any_effect(api: Api, key: str) -> None:
    answer = await api("POST", "/v1/namespaces", {"namespace": ["n"]}, key=key)
    assert answer.error[:2] == (400, "BadRequestException")
    assert "Idempotency-Key" in answer.error[2]
    assert (await api("HEAD", "/v1/namespaces/n")).status == 404


async def test_equal_body_in_other_bytes_is_the_same_request(api: Api) -> None:
    key = create_key()
    bodies = (
        b'{"namespace":["n"],"properties":{"a":"1","b":"2"}}',
        b'{ "properties": {"b":"2", "a":"1"}, "namespace":["n"]}',
    )
    first_answer, second_answer = [await api("POST", "/v1/namespaces", body, key=key) for body in bodies]
    assert first_answer.status == 200
    _check_same(first_answer, second_answer)


async def test_large_body_with_a_repeated_idempotency_key_is_compared_by_its_bytes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server compares the bytes of a large body with the first request, without decoding them.

    The decoding of a body of 64 MB would block the event loop for seconds and take ten times the memory.
    """
    decode = msgspec.json.decode

    def decode_small_only(data: Any, **arguments: Any) -> Any:
        assert len(data) <= QUICK_BYTES, "a large body is decoded to compare it with the first request"
        return decode(data, **arguments)

    monkeypatch.setattr(msgspec.json, "decode", decode_small_only)
    key, body = create_key(), {"name": "t", "schema": SCHEMA, "properties": {"long": "x" * QUICK_BYTES}}
    first_answer, second_answer = [await api("POST", T, body, key=key) for _ in range(2)]
    assert first_answer.status == 200
    _check_same(first_answer, second_answer)
    other_answer = await api("POST", T, {**body, "properties": {"long": "y" * QUICK_BYTES}}, key=key)
    assert other_answer.error[:2] == (422, "UnprocessableEntityException")


async def test_conflict_that_may_be_retried_is_not_recorded(api: Api) -> None:
    await api.create_table()
    key, body = create_key(), build_append(2, parent=1, sequence=2)
    assert (await api("POST", f"{T}/t", body, key=key)).error[:2] == (409, "CommitFailedException")
    assert (await api("POST", f"{T}/t", build_append(1))).status == 200
    assert (await api("POST", f"{T}/t", body, key=key)).status == 200


async def test_server_error_is_not_recorded(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail_on_full_disk(location: str, data: bytes) -> None:
        raise StorageError("the disk is full")

    key, body = create_key(), {"name": "t", "schema": SCHEMA}
    with monkeypatch.context() as patch:
        patch.setattr(api.server.components.objects, "create", fail_on_full_disk)
        assert (await api("POST", T, body, key=key)).status == 500
    assert (await api("POST", T, body, key=key)).status == 200


async def test_replayed_commit_returns_its_own_outcome_and_not_a_later_one(api: Api) -> None:
    await api.create_table()
    key = create_key()
    first_answer = await api("POST", f"{T}/t", build_property_commit(x="1"), key=key)
    await api("POST", f"{T}/t", build_property_commit(x="2"))
    _check_same(first_answer, await api("POST", f"{T}/t", build_property_commit(x="1"), key=key))
    assert (await api("GET", f"{T}/t")).json["metadata"]["properties"]["x"] == "2"


async def test_key_survives_a_restart_of_the_server(tmp_path: Path) -> None:
    key = create_key()
    answers = []
    for _ in range(2):
        async with run_server(tmp_path) as server:
            api = Api(server)
            answers.append(await api("POST", "/v1/namespaces", {"namespace": ["n"]}, key=key))
    assert answers[0].status == 200
    _check_same(answers[0], answers[1])


async def test_expired_key_counts_as_new(tmp_path: Path) -> None:
    clock = OffsetClock()
    async with run_server(tmp_path, clock=clock, idempotency_ttl_s=600) as server:
        api, key = Api(server), create_key()
        assert (await api("POST", "/v1/namespaces", {"namespace": ["n"]}, key=key)).status == 200
        clock.ahead_ms += 601_000
        assert (await api("POST", "/v1/namespaces", {"namespace": ["n"]}, key=key)).status == 409
