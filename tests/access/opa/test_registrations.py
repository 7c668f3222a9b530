"""Tests of registrations and imports by callers whom a policy restricts to one namespace."""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path
from typing import Any

from aiohttp import web

from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.access.tokens import create_token
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.open import open_store
from tests.access.opa.recorded import ALLOW_PATH, BATCH_PATH
from tests.access.opa.test_opa import PolicyServer, run_policy_server
from tests.api.client import SCHEMA, VIEW_VERSION, Api
from tests.api.rest.test_permissions import UsersApi
from tests.server.rig import run_server

SHOP, HR = "/v1/namespaces/shop", "/v1/namespaces/hr"


class ShopPolicy(PolicyServer):
    """A policy that allows root everything.

    It allows other principals to browse the warehouse and all namespaces, and everything in the namespace `shop`
    except the table `hidden`. It fails for questions about the table `unanswered`.
    """

    async def handle(self, request: web.Request) -> web.Response:
        question = (await request.json())["input"]
        self.requests.append((request.path, question))
        objects = question.get("objects", [question.get("object")])
        if any(securable.get("name") == "unanswered" for securable in objects):
            return web.Response(status=500)

        def is_allowed(securable: dict[str, Any]) -> bool:
            is_seen = question["privileges"] == ["browse"] and securable["kind"] in ("warehouse", "namespace")
            is_of_shop = securable["namespace"][:1] == ["shop"] and securable.get("name") != "hidden"
            return question["principal"]["name"] == "root" or is_seen or is_of_shop

        if "objects" in question:
            positions = [position for position, securable in enumerate(question["objects"]) if is_allowed(securable)]
            return web.json_response({"result": positions})
        return web.json_response({"result": is_allowed(question["object"])})


async def test_tenant_of_a_policy_registers_and_imports_only_what_it_could_create(tmp_path: Path) -> None:
    clock, secrets = SystemClock(), {}
    async with open_store(f"sqlite:///{tmp_path}/seamark.db", clock=clock, queue_limit=10) as store:
        for name in ("root", "tina"):
            secrets[name] = await create_token(store, clock, name, None, [Grant(name, "admin")])
    async with run_policy_server(ShopPolicy()) as policy:
        settings: dict[str, Any] = {"opa_url": policy.url + ALLOW_PATH, "opa_batch_url": policy.url + BATCH_PATH}
        async with run_server(tmp_path, auth="token", opa_cache_s=0, **settings) as server:
            users_api = UsersApi(Api(server), secrets)
            for namespace in ("shop", "hr"):
                assert (await users_api("root", "POST", "/v1/namespaces", {"namespace": [namespace]})).status == 200
            await _check_views(users_api)
            await _check_tables(users_api)
            policy.requests.clear()
            await _check_decisions(users_api, policy)


async def _check_views(users_api: UsersApi) -> None:
    """Check that a user can register only a view that runs with the user's own rights, and that nobody else owns."""
    body = {"name": "v", "schema": SCHEMA, "view-version": VIEW_VERSION}
    view = (await users_api("tina", "POST", f"{SHOP}/views", body)).json
    secret = (await users_api("root", "POST", f"{HR}/views", {**body, "name": "secret"})).json
    assert (await users_api("root", "DELETE", f"{HR}/views/secret")).status == 204
    table = await users_api("tina", "POST", f"{SHOP}/tables", {"name": "mine", "schema": SCHEMA, "stage-create": True})
    folder = table.json["metadata"]["location"]

    async def register_and_import(location: str) -> list[int]:
        """Return the statuses of a registration and of an import of the metadata file."""
        name = f"v{uuid.uuid4().hex}"
        registration = {"name": name, "metadata-location": location}
        import_body = {"metadata-location": location, "keep-owner": True}
        return [
            (await users_api("tina", "PUT", f"/api/v1/views/shop/{name}/import", import_body)).status,
            (await users_api("tina", "POST", f"{SHOP}/register-view", registration)).status,
        ]

    def write_metadata_file(**changes: Any) -> str:
        metadata = {
            **view["metadata"],
            "view-uuid": str(uuid.uuid4()),
            "location": f"{folder}/{uuid.uuid4()}",
            **changes,
        }
        path = Path(metadata["location"].removeprefix("file://"), "metadata", "00000-x.metadata.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(metadata))
        return f"file://{path}"

    assert await register_and_import(write_metadata_file(properties={"trino.run-as-owner": "root"})) == [403, 403]
    assert await register_and_import(secret["metadata-location"]) == [403, 403]
    assert await register_and_import(write_metadata_file(**{"view-uuid": secret["metadata"]["view-uuid"]})) == [
        403,
        403,
    ]
    assert (await register_and_import(write_metadata_file()))[0] == 200
    assert (await register_and_import(write_metadata_file(properties={"trino.run-as-owner": "tina"})))[0] == 200


async def _check_tables(users_api: UsersApi) -> None:
    """Check that a user registers and imports only tables that the policy allows, and that name no forbidden table."""

    async def create_and_unregister(properties: dict[str, str]) -> str:
        body = {"name": "t", "schema": SCHEMA, "properties": properties}
        assert (await users_api("root", "POST", f"{SHOP}/tables", body)).status == 200
        return str((await users_api("root", "POST", f"{SHOP}/tables/t/unregister", {})).json["metadata-location"])

    location = await create_and_unregister({"seamark.stream.dead-letter-table": "hr.salaries"})
    registration = {"name": "t", "metadata-location": location}
    answer = await users_api("tina", "POST", f"{SHOP}/register", registration)
    assert answer.status in (403, 404), answer.raw
    answer = await users_api("root", "PUT", "/api/v1/tables/shop/t/import", {"metadata-location": location})
    assert answer.error[0] == 400
    assert "names another table" in answer.error[2]
    assert (await users_api("root", "POST", f"{SHOP}/register", registration)).status == 200

    body = {"name": "moved", "schema": SCHEMA}
    assert (await users_api("root", "POST", f"{SHOP}/tables", body)).status == 200
    moved_location = (await users_api("root", "POST", f"{SHOP}/tables/moved/unregister", {})).json["metadata-location"]
    locations = {"hidden": moved_location, "t": location, "moved": moved_location, "none": f"{moved_location}.none"}
    import_request = {"metadata-locations": locations, "dry-run": True}
    for is_dry_run in (True, False):
        answer = await users_api(
            "tina", "PUT", "/api/v1/namespaces/shop/import", import_request | {"dry-run": is_dry_run}
        )
        assert answer.status == 200
        results = {result["name"]: result for result in answer.json["results"]}
        assert [name for name, result in results.items() if "error" not in result] == ["t", "moved"]
        assert results["moved"]["is-new"]
        assert "does not exist" in results["hidden"]["error"]
    answer = await users_api("tina", "PUT", "/api/v1/namespaces/hr/import", import_request)
    assert answer.status == 403
    for name in ("hidden", "none"):
        assert (await users_api("root", "GET", f"{SHOP}/tables/{name}")).status == 404


async def _check_decisions(users_api: UsersApi, policy: ShopPolicy) -> None:
    """Check that an import of many tables needs one request to the policy server.

    The import fails with 503 if the policy server fails. The audit log contains the refusal of the table `hidden`,
    which the caller tried to import before.
    """
    locations = {f"t{number}": "file:///none" for number in range(100)}
    body = {"metadata-locations": locations, "dry-run": True}
    assert (await users_api("tina", "PUT", "/api/v1/namespaces/shop/import", body)).status == 200
    assert len([question for _, question in policy.requests if question["operation"] == "importTable"]) == 1
    body = {"metadata-locations": {**locations, "unanswered": "file:///none"}, "dry-run": True}
    assert (await users_api("tina", "PUT", "/api/v1/namespaces/shop/import", body)).status == 503
    records: list[tuple[str, int]] = []
    async with asyncio.timeout(60):
        while not records:
            audit = (await users_api("root", "GET", "/api/v1/audit")).json["records"]
            records = [
                (record["who"], record["status"])
                for record in audit
                if record["resource"] == "/api/v1/tables/shop/hidden/import"
            ]
    assert set(records) == {("tina", 404)}
