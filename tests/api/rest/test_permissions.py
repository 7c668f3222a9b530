"""Tests of permissions on the Iceberg routes: roles for namespaces, filtered listings, and locations of tables."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.access.tokens import create_token
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.operations import SaveGrant
from tests.api.client import SCHEMA, VIEW_VERSION, Answer, Api, build_property_commit, create_key
from tests.server.rig import run_server

GRANTS = (
    Grant("root", "admin"),
    Grant("wendy", "writer", ("db",)),
    Grant("rita", "reader", ("db",)),
    Grant("deep", "reader", ("other", "inner")),
)


class UsersApi:
    """An API client for the users of a server with logins. `users_api("rita", "GET", …)` sends a request as rita."""

    def __init__(self, api: Api, secrets: dict[str, str]) -> None:
        self.api = api
        self._secrets = secrets

    def get_secret(self, name: str) -> str:
        return self._secrets[name]

    async def __call__(self, name: str, method: str, path: str, body: Any = None, **options: Any) -> Answer:
        headers = {"Authorization": f"Bearer {self._secrets[name]}", **options.pop("headers", {})}
        return await self.api(method, path, body, headers=headers, **options)


@pytest.fixture
async def users_api(tmp_path: Path) -> AsyncIterator[UsersApi]:
    secrets, clock = {}, SystemClock()
    async with open_store(f"sqlite:///{tmp_path}/seamark.db", clock=clock, queue_limit=10) as store:
        for name in ("root", "wendy", "rita", "deep", "nobody"):
            grants = [grant for grant in GRANTS if grant.principal == name]
            secrets[name] = await create_token(store, clock, name, None, grants)
    async with run_server(tmp_path, auth="token") as server:
        users_api = UsersApi(Api(server), secrets)
        for path in (["other"], ["other", "inner"], ["db", "sub"]):
            assert (await users_api("root", "POST", "/v1/namespaces", {"namespace": path})).status == 200
        for namespace in ("db", "other"):
            body = {"name": "t", "schema": SCHEMA}
            assert (await users_api("root", "POST", f"/v1/namespaces/{namespace}/tables", body)).status == 200
        yield users_api


async def test_every_request_requires_a_login(users_api: UsersApi) -> None:
    answer = await users_api.api("GET", "/v1/namespaces")
    assert answer.error[:2] == (401, "NotAuthorizedException")


@pytest.mark.parametrize(
    ("principal", "visible_namespaces", "namespaces_below_other"),
    [
        ("root", [["db"], ["other"]], [["other", "inner"]]),
        ("rita", [["db"]], None),
        ("deep", [["other"]], [["other", "inner"]]),
        ("nobody", [], None),
    ],
)
async def test_listing_omits_objects_that_the_caller_may_not_browse(
    users_api: UsersApi, principal: str, visible_namespaces: list[Any], namespaces_below_other: list[Any] | None
) -> None:
    assert (await users_api(principal, "GET", "/v1/namespaces")).json["namespaces"] == visible_namespaces
    answer = await users_api(principal, "GET", "/v1/namespaces?parent=other")
    if namespaces_below_other is None:
        assert answer.error[:2] == (403, "ForbiddenException")
    else:
        assert answer.json["namespaces"] == namespaces_below_other


@pytest.mark.parametrize(
    ("principal", "read_status", "write_status"),
    [("root", 200, 200), ("wendy", 200, 200), ("rita", 200, 403), ("nobody", 403, 403)],
)
async def test_reading_and_writing_require_their_roles(
    users_api: UsersApi, principal: str, read_status: int, write_status: int
) -> None:
    table = "/v1/namespaces/db/tables/t"
    for path in (table, "/v1/namespaces/db/tables", "/v1/namespaces/db", f"{table}/credentials"):
        assert (await users_api(principal, "GET", path)).status == read_status
    assert (await users_api(principal, "POST", f"{table}/plan", {})).status == read_status
    assert (await users_api(principal, "POST", f"{table}/tasks", {"plan-task": "x"})).status == (
        404 if read_status == 200 else read_status
    )
    assert (await users_api(principal, "POST", table, build_property_commit(x="1"))).status == write_status
    answer = await users_api(principal, "POST", "/v1/namespaces/db/tables", {"name": "n", "schema": SCHEMA})
    assert answer.status == write_status
    if write_status == 403:
        assert answer.error[1] == "ForbiddenException"
        assert "writer" in answer.error[2] or "reader" in answer.error[2]


async def test_hidden_name_is_refused_whether_it_exists_or_not(users_api: UsersApi) -> None:
    for name in ("t", "none"):
        assert (await users_api("rita", "GET", f"/v1/namespaces/other/tables/{name}")).status == 403


async def test_rename_and_transaction_require_rights_on_every_namespace_they_touch(users_api: UsersApi) -> None:
    identifier, other_identifier = {"namespace": ["db"], "name": "t"}, {"namespace": ["other"], "name": "t"}
    for source, destination in (
        (identifier, {**other_identifier, "name": "u"}),
        (other_identifier, {**identifier, "name": "u"}),
    ):
        body = {"source": source, "destination": destination}
        assert (await users_api("wendy", "POST", "/v1/tables/rename", body)).status == 403
    changes = [
        {"identifier": changed_identifier, **build_property_commit(x="1")}
        for changed_identifier in (identifier, other_identifier)
    ]
    assert (await users_api("wendy", "POST", "/v1/transactions/commit", {"table-changes": changes})).status == 403
    answer = await users_api("root", "GET", "/v1/namespaces/db/tables/t")
    assert "x" not in answer.json["metadata"]["properties"]


async def test_idempotency_key_belongs_to_one_principal(users_api: UsersApi) -> None:
    key, body = create_key(), {"namespace": ["db", "n"]}
    assert (await users_api("wendy", "POST", "/v1/namespaces", body, key=key)).status == 200
    assert (await users_api("root", "POST", "/v1/namespaces", body, key=key)).status == 422


async def test_missing_role_is_not_recorded_under_the_idempotency_key(users_api: UsersApi) -> None:
    key, body = create_key(), {"namespace": ["db", "n"]}
    assert (await users_api("rita", "POST", "/v1/namespaces", body, key=key)).status == 403
    await users_api.api.server.components.store.transact([SaveGrant(grant=Grant("rita", "writer", ("db",)))])
    assert await _await_status_after_grant(lambda: users_api("rita", "POST", "/v1/namespaces", body, key=key)) == 200


async def test_timeline_names_the_principal(users_api: UsersApi) -> None:
    await users_api("wendy", "POST", "/v1/namespaces/db/tables/t", build_property_commit(x="1"))
    newest_instant = (await users_api("root", "GET", "/api/v1/timeline?order=desc&limit=1")).json["instants"][0]
    assert (newest_instant["who"], newest_instant["action"]) == ("wendy", "commit")


@pytest.mark.parametrize("folder", ["db/mine", "db/sub/t/deep"])
async def test_writer_chooses_locations_below_its_own_namespace(users_api: UsersApi, folder: str) -> None:
    location = f"{users_api.api.server.components.settings.make_warehouse_uri()}/{folder}"
    body = {"name": "n", "schema": SCHEMA, "location": location}
    assert (await users_api("wendy", "POST", "/v1/namespaces/db/tables", body)).status == 200
    namespace_request = {"namespace": ["db", "n"], "properties": {"location": f"{location}-ns"}}
    assert (await users_api("wendy", "POST", "/v1/namespaces", namespace_request)).status == 200


async def test_no_location_may_overlap_files_of_other_tables(users_api: UsersApi) -> None:
    other_location = (await users_api("root", "GET", "/v1/namespaces/other/tables/t")).json["metadata"]["location"]
    location_update = {"requirements": [], "updates": [{"action": "set-location", "location": other_location}]}
    view = {"name": "v", "schema": SCHEMA, "view-version": VIEW_VERSION, "location": other_location}
    change = {"identifier": {"namespace": ["db"], "name": "t"}, **location_update}
    attempts: dict[str, tuple[str, Any]] = {
        "create": ("/v1/namespaces/db/tables", {"name": "n", "schema": SCHEMA, "location": other_location}),
        "stage": (
            "/v1/namespaces/db/tables",
            {"name": "n", "schema": SCHEMA, "location": other_location, "stage-create": True},
        ),
        "commit": ("/v1/namespaces/db/tables/t", location_update),
        "transaction": ("/v1/transactions/commit", {"table-changes": [change]}),
        "view": ("/v1/namespaces/db/views", view),
        "namespace": ("/v1/namespaces", {"namespace": ["db", "n"], "properties": {"location": other_location}}),
        "properties": ("/v1/namespaces/db/properties", {"updates": {"location": other_location}}),
        "inner properties": ("/v1/namespaces/db%1Fsub/properties", {"updates": {"location": other_location}}),
        "register": ("/v1/namespaces/db/register", {"name": "n", "metadata-location": f"{other_location}/x"}),
    }
    for description, (path, body) in attempts.items():
        answer = await users_api("wendy", "POST", path, body)
        assert answer.error[:2] == (403, "ForbiddenException"), description
    answer_to_admin = await users_api("root", "POST", *attempts["create"])
    assert answer_to_admin.error[:2] == (400, "BadRequestException"), "an admin may not use the location either"


async def test_dropped_table_hidden_from_the_caller_is_not_found(users_api: UsersApi) -> None:
    assert (await users_api("root", "DELETE", "/v1/namespaces/other/tables/t")).status == 204
    dropped_entries = (await users_api("root", "GET", "/api/v1/dropped?namespace=other")).json["dropped"]
    for method, ending in (("POST", "/undrop"), ("DELETE", "")):
        for principal in ("wendy", "nobody"):
            dropped_ids = (dropped_entries[0]["id"], create_key())
            answers = [
                await users_api(principal, method, f"/api/v1/dropped/{dropped_id}{ending}")
                for dropped_id in dropped_ids
            ]
            existing_error, invented_error = (answer.error[:2] for answer in answers)
            assert existing_error == invented_error
            assert principal == "nobody" or existing_error == (404, "NotFoundException")
            assert not any(b"other" in answer.raw for answer in answers)
    assert (await users_api("root", "POST", f"/api/v1/dropped/{dropped_entries[0]['id']}/undrop")).status == 200


async def test_caller_who_may_list_dropped_tables_learns_which_role_is_missing(users_api: UsersApi) -> None:
    assert (await users_api("root", "DELETE", "/v1/namespaces/db/tables/t")).status == 204
    dropped_id = (await users_api("rita", "GET", "/api/v1/dropped?namespace=db")).json["dropped"][0]["id"]
    assert (await users_api("rita", "POST", f"/api/v1/dropped/{dropped_id}/undrop")).error[0] == 403
    assert (await users_api("wendy", "DELETE", f"/api/v1/dropped/{dropped_id}")).error[0] == 403


async def test_empty_transaction_is_rejected_and_not_recorded(users_api: UsersApi) -> None:
    for principal in ("nobody", "rita"):
        key = create_key()
        answer = await users_api(principal, "POST", "/v1/transactions/commit", {"table-changes": []}, key=key)
        assert answer.error[:2] == (403, "ForbiddenException"), "rights are checked before the body"
        store = users_api.api.server.components.store
        assert await store.find_idempotency_record(key, 0) is None


async def test_timeline_hides_locations_that_its_reader_may_not_see(users_api: UsersApi) -> None:
    identifiers = {
        "source": {"namespace": ["db"], "name": "t"},
        "destination": {"namespace": ["other"], "name": "hidden"},
    }
    assert (await users_api("root", "POST", "/v1/tables/rename", identifiers)).status == 204
    shown_destinations = {}
    for principal in ("rita", "root"):
        for ending in ("", "?order=desc", "?wait=0.1", "?action=rename"):
            answer = await users_api(principal, "GET", f"/api/v1/tables/db/t/timeline{ending}")
            renames = [instant for instant in answer.json["instants"] if instant["action"] == "rename"]
            shown_destinations[principal, ending] = [rename["summary"].get("to") for rename in renames]
            assert principal == "root" or b"hidden" not in answer.raw
    assert {
        tuple(destinations) for (principal, _), destinations in shown_destinations.items() if principal == "root"
    } == {("other.hidden",)}
    assert {
        tuple(destinations) for (principal, _), destinations in shown_destinations.items() if principal == "rita"
    } == {(None,)}
    stream = await _read_event_stream(users_api, "rita", "/api/v1/tables/db/t/timeline")
    assert b"rename" in stream
    assert b"hidden" not in stream


async def test_timeline_shows_a_new_name_only_if_its_reader_may_browse_it(users_api: UsersApi) -> None:
    identifiers = {"source": {"namespace": ["db"], "name": "t"}, "destination": {"namespace": ["db"], "name": "new"}}
    assert (await users_api("root", "POST", "/v1/tables/rename", identifiers)).status == 204
    instants = (await users_api("rita", "GET", "/api/v1/tables/db/new/timeline?action=rename")).json["instants"]
    assert [instant["summary"]["to"] for instant in instants] == ["db.new"]
    denial = {"principal": "rita", "privilege": "browse", "namespace": ["db"], "table": "new", "deny": True}
    assert (await users_api("root", "PUT", "/api/v1/grants", denial)).status == 204
    (instant,) = (await users_api("rita", "GET", "/api/v1/tables/db/t/timeline?action=rename")).json["instants"]
    assert {"to", "to-namespace"}.isdisjoint(instant["summary"])


async def _read_event_stream(users_api: UsersApi, principal: str, path: str) -> bytes:
    """Return the data of an event stream up to the event of the rename."""
    headers = {"Authorization": f"Bearer {users_api.get_secret(principal)}", "Accept": "text/event-stream"}
    server, body = users_api.api.server, b""
    async with asyncio.timeout(60), server.http.get(server.url + path, headers=headers) as answer:
        while b"rename" not in body or not body.endswith(b"\n\n"):
            body += await answer.content.readany()
    return body


async def _await_status_after_grant(send_request: Callable[[], Any]) -> int:
    """Repeat a request until its status is not 403, and return the status.

    The server caches grants for a short time.
    """
    for _ in range(1000):  # At most 50 seconds, which suffices on a busy machine
        status = (await send_request()).status
        if status != 403:
            return int(status)
        await asyncio.sleep(0.05)
    return 403


async def test_confined_writer_cannot_make_a_view_run_with_the_rights_of_another_user(users_api: UsersApi) -> None:
    body = {"name": "v", "schema": SCHEMA, "view-version": VIEW_VERSION, "properties": {"trino.run-as-owner": "root"}}
    refusal = await users_api("wendy", "POST", "/v1/namespaces/db/views", body)
    assert refusal.error[:2] == (403, "ForbiddenException")
    assert "trino.run-as-owner" in refusal.error[2]
    assert (await users_api("root", "POST", "/v1/namespaces/db/views", body)).status == 200
