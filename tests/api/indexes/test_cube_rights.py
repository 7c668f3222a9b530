"""Tests of the rights to define, build and read a cube that has attributes of a dimension table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.access.standing_rights import StandingRights
from seamark.metaserver.access.tokens import create_token
from seamark.metaserver.access.worker_tokens import ServiceTokens
from seamark.metaserver.catalog.policies import SETTERS, parse_setters
from seamark.metaserver.services.job import Job
from seamark.metaserver.services.launching.dimension_reads import DimensionReads
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.operations import CreateNamespace, RemoveGrant, SaveGrant
from tests.api.client import SCHEMA
from tests.api.plans.test_plan_tables import UserApi
from tests.server.rig import RunningServer, run_server

ATTRIBUTE = "lookup[secret.names@5:1:2:string](id)"


async def create_users(folder: Path, roles: Mapping[str, list[tuple[str, tuple[str, ...]]]]) -> dict[str, str]:
    """Create the namespace `db` and users with roles in namespaces, and return the secrets of their tokens."""
    clock, secrets = SystemClock(), {}
    async with open_store(f"sqlite:///{folder / 'seamark.db'}", clock=clock) as store:
        for name, roles_and_namespaces in roles.items():
            grants = [Grant(name, role, path) for role, path in roles_and_namespaces]
            secrets[name] = await create_token(store, clock, name, ttl_s=None, grants=grants)
        await store.transact([CreateNamespace(path=("db",), properties={})])
    return secrets


async def test_reading_groups_requires_the_right_to_read_the_dimension_table(tmp_path: Path) -> None:
    secrets = await create_users(tmp_path, {"root": [("admin", ())], "rita": [("reader", ("db",))]})
    async with run_server(tmp_path, auth="token") as server:
        root, rita = (UserApi(server, secrets[name]) for name in ("root", "rita"))
        assert (await root("POST", "/v1/namespaces/db/tables", {"name": "t", "schema": SCHEMA})).status == 200
        statuses = {}
        for columns in (["id"], [ATTRIBUTE]):
            body = {"kind": "cube", "columns": columns, "measures": ["count(*)"]}
            index = await root("PUT", "/api/v1/tables/db/t/indexes/c", body)
            assert index.status == 200, index.raw
            request = {"definition-id": index.json["definition-id"], "columns": ["d0", "m0"], "files": ""}
            for name, caller in (("root", root), ("rita", rita)):
                answer = await caller("POST", "/api/v1/tables/db/t/cube-groups", request)
                statuses[columns[0], name] = answer.status
        assert statuses == {
            ("id", "root"): 200,
            ("id", "rita"): 200,
            (ATTRIBUTE, "root"): 200,
            (ATTRIBUTE, "rita"): 403,
        }


async def test_defining_or_building_an_index_requires_the_right_to_read_the_dimension_table(tmp_path: Path) -> None:
    roles = {
        "root": [("admin", ())],
        "wendy": [("writer", ("db",))],
        "rex": [("writer", ("db",)), ("reader", ("secret",))],
    }
    secrets = await create_users(tmp_path, roles)
    json_text = json.dumps({"kind": "cube", "columns": [ATTRIBUTE], "measures": ["count(*)"]})
    texts = {
        "short": f"cube({ATTRIBUTE}; count(*))",
        "bitmap": f"bitmap({ATTRIBUTE})",
        "spaces": f"cube({ATTRIBUTE.replace('@', ' @ ')}; count(*))",
        "JSON": json_text,
        "escaped JSON": json_text.replace("lookup", "\\u006cookup").replace("secret", "\\u0073ecret"),
        "a column that a later commit adds": f"cube({ATTRIBUTE.replace('(id)', '(later)')}; count(*))",
    }

    async def define_cubes(caller: UserApi, number: int) -> dict[str, int]:
        """Define a cube with each request that can define it, and start a build of another index.

        Return the statuses by request. `number` makes the names of the created tables unique.
        """
        statuses = {}
        body = {"kind": "cube", "columns": [ATTRIBUTE], "measures": ["count(*)"]}
        statuses["put"] = (await caller("PUT", "/api/v1/tables/db/t/indexes/c", body)).status
        for form, text in texts.items():
            properties = {"seamark.index.d": text}
            update: dict[str, Any] = {"action": "set-properties", "updates": properties}
            change: dict[str, Any] = {"requirements": [], "updates": [update]}
            statuses[f"update, {form}"] = (await caller("POST", "/v1/namespaces/db/tables/t", change)).status
            transaction = {"table-changes": [{"identifier": {"namespace": ["db"], "name": "t"}, **change}]}
            statuses[f"transaction, {form}"] = (await caller("POST", "/v1/transactions/commit", transaction)).status
            for stage in (False, True):
                name = f"t{number}{len(statuses)}"
                creation = {"name": name, "schema": SCHEMA, "properties": properties, "stage-create": stage}
                statuses[f"create, {stage}, {form}"] = (
                    await caller("POST", "/v1/namespaces/db/tables", creation)
                ).status
        statuses["build"] = (await caller("POST", "/api/v1/tables/db/t/indexes/by_name/builds", {})).status
        return statuses

    async with run_server(tmp_path, auth="token") as server:
        root, wendy, rex = (UserApi(server, secrets[name]) for name in roles)
        assert (await root("POST", "/v1/namespaces/db/tables", {"name": "t", "schema": SCHEMA})).status == 200
        body = {"kind": "cube", "columns": ["id", ATTRIBUTE], "measures": ["count(*)"]}
        assert (await root("PUT", "/api/v1/tables/db/t/indexes/by_name", body)).status == 200
        refused_statuses = await define_cubes(wendy, 1)
        assert set(refused_statuses.values()) == {403}, refused_statuses
        accepted_statuses = await define_cubes(rex, 2)
        assert set(accepted_statuses.values()) <= {200, 204}, accepted_statuses
        answer = await wendy("PUT", "/api/v1/tables/db/t/indexes/c", {"state": "enabled"})
        assert answer.error[0] == 403
        assert "wendy may not readRows in secret" in answer.error[2]


async def test_filter_on_an_attribute_requires_the_right_to_read_the_dimension_table(tmp_path: Path) -> None:
    """Otherwise a caller would learn the attributes of rows from the files that plans keep."""
    secrets = await create_users(
        tmp_path,
        {
            "root": [("admin", ())],
            "rita": [("reader", ("db",))],
            "rex": [("reader", ("db",)), ("reader", ("secret",))],
        },
    )
    async with run_server(tmp_path, auth="token") as server:
        root, rita, rex = (UserApi(server, secrets[name]) for name in secrets)
        assert (await root("POST", "/v1/namespaces/db/tables", {"name": "t", "schema": SCHEMA})).status == 200
        body = {"kind": "bitmap", "columns": [ATTRIBUTE]}
        assert (await root("PUT", "/api/v1/tables/db/t/indexes/spouse", body)).status == 200
        column_filter = {"type": "eq", "term": "spouse", "value": "x"}
        join = {"table": ["secret", "names"], "on": {"id": "id"}, "predicate": "spouse = 'x'"}
        requests = {
            "plan": ("/v1/namespaces/db/tables/t/plan", {"filter": column_filter}),
            "negated": ("/v1/namespaces/db/tables/t/plan", {"filter": {"type": "not", "child": column_filter}}),
            "explain": ("/api/v1/tables/db/t/explain", {"where": "SPOUSE = 'x'"}),
            "explain filter": ("/api/v1/tables/db/t/explain", {"filter": column_filter}),
            "join": ("/api/v1/tables/db/t/explain", {"joins": [join]}),
        }
        for _ in range(2):  # An answer to one caller is not kept for another caller.
            for request_name, (path, request) in requests.items():
                # rex may read the dimension table of the join, but it does not exist.
                allowed_answer = await rex("POST", path, request)
                assert allowed_answer.status == (404 if request_name == "join" else 200), (
                    request_name,
                    allowed_answer.raw,
                )
                refused_answer = await rita("POST", path, request)
                assert refused_answer.error[0] == 403, (request_name, refused_answer.raw)
        term = {"type": "transform", "transform": ATTRIBUTE.removesuffix("(id)"), "term": "id"}
        for caller in (rita, rex):
            direct_answer = await caller("POST", requests["plan"][0], {"filter": {**column_filter, "term": term}})
            assert direct_answer.error[0] == 400, direct_answer.raw
        # A column of the table has priority over an attribute with the same name.
        add_schema = {"action": "add-schema", "schema": build_schema("spouse")}
        update = {"requirements": [], "updates": [add_schema, {"action": "set-current-schema", "schema-id": -1}]}
        assert (await root("POST", "/v1/namespaces/db/tables/t", update)).status == 200
        assert (await rita("POST", requests["plan"][0], {"filter": column_filter})).status == 200


async def test_job_defines_an_index_again_only_for_a_principal_that_may_read_the_dimension_table(
    tmp_path: Path,
) -> None:
    """An index on an attribute stores values of a dimension table, so its author must be allowed to read this table.

    A job with a service token refreshes the index of rex for a new snapshot. After rex loses the right to read the
    dimension table, the change is refused.
    """
    roles = {"root": [("admin", ())], "rex": [("writer", ("db",)), ("reader", ("db", "secret"))]}
    secrets = await create_users(tmp_path, roles)
    # Field 2 (a string) of the row of db.secret.names whose field 1 equals `id`, at the snapshot `{}`.
    attribute = "lookup[db.secret.names@{}:1:2:string](id)"
    async with run_server(tmp_path, auth="token") as server:
        components = server.components
        root, rex = (UserApi(server, secrets[name]) for name in roles)
        service = UserApi(server, ServiceTokens(components.keyring, components.clock).issue(("db",), 60))
        assert (await root("POST", "/v1/namespaces", {"namespace": ["db", "secret"]})).status == 200
        for path, name in (("db", "t"), ("db%1Fsecret", "names")):
            answer = await root("POST", f"/v1/namespaces/{path}/tables", {"name": name, "schema": SCHEMA})
            assert answer.status == 200, answer.raw
        body: dict[str, Any] = {"kind": "bitmap", "columns": [attribute.format(5)]}
        definition = await rex("PUT", "/api/v1/tables/db/t/indexes/i", body)
        assert definition.status == 200, definition.raw
        await check_tables_of_a_job(server, rex, root)
        change = {"columns": [attribute.format(6)], "replaces": definition.json["definition-id"]}
        assert (await service("PUT", "/api/v1/tables/db/t/indexes/i", change)).status == 200
        refusal = await service("PUT", "/api/v1/tables/db/t/indexes/i", change)
        assert refusal.error[0] == 409, "the index has another definition"
        await components.store.transact([RemoveGrant(Grant("rex", "reader", ("db", "secret")))])
        # A writer of `db` also reads its inner namespaces, so this right is removed too.
        await components.store.transact([RemoveGrant(Grant("rex", "writer", ("db",)))])
        definition_id = (await root("GET", "/api/v1/tables/db/t/indexes/i")).json["definition-id"]
        indexer_change = {"columns": [attribute.format(7)], "replaces": definition_id}
        refusal = await root("PUT", "/api/v1/tables/db/t/indexes/i", indexer_change)
        assert refusal.error[0] == 403, "an indexer with another token also acts for rex"
        refusal = await service("PUT", "/api/v1/tables/db/t/indexes/i", {"columns": [attribute.format(7)]})
        assert refusal.error[0] == 403
        assert "rex defined the index and may not read names now" in refusal.error[2]
        # A principal that defines the index without `replaces` becomes its author, and an indexer does not.
        redefinition = await root("PUT", "/api/v1/tables/db/t/indexes/i", {"columns": [attribute.format(7)]})
        indexer_change = {"columns": [attribute.format(8)], "replaces": redefinition.json["definition-id"]}
        assert (await rex("PUT", "/api/v1/tables/db/t/indexes/i", indexer_change)).error[0] == 403
        await components.store.transact([SaveGrant(Grant("rex", "writer", ("db",)))])
        assert (await rex("PUT", "/api/v1/tables/db/t/indexes/i", indexer_change)).status == 200
        table = await root("GET", "/v1/namespaces/db/tables/t")
        assert parse_setters(table.json["metadata"]["properties"]) == {"seamark.index.i": "root"}
        # Only a writer of the warehouse may register files.
        await components.store.transact([SaveGrant(Grant("rex", "writer", namespace=()))])
        await check_registration_of_other_authors(rex, root, table.json)


async def check_tables_of_a_job(server: RunningServer, rex: UserApi, root: UserApi) -> None:
    """Check which dimension tables of other namespaces a job may read for the indexes of the table `t`.

    Each index is on `lookup[TABLE@SNAPSHOT:KEY:FIELD:TYPE](id)`, an attribute of a dimension table. The job may read a
    dimension table as long as the author of the index may read it.
    """
    components = server.components
    assert (await root("POST", "/v1/namespaces", {"namespace": ["other"]})).status == 200
    for name in ("names", "hidden"):
        answer = await root("POST", "/v1/namespaces/other/tables", {"name": name, "schema": SCHEMA})
        assert answer.status == 200, answer.raw
    grant = Grant("rex", "reader", ("other",), "table", "names")
    await components.store.transact([SaveGrant(grant)])
    for caller, name in ((rex, "names"), (root, "hidden")):
        body = {"kind": "bitmap", "columns": [f"lookup[other.{name}@5:1:2:string](id)"]}
        answer = await caller("PUT", f"/api/v1/tables/db/t/indexes/of_{name}", body)
        assert answer.status == 200, answer.raw
    rights = StandingRights(components.store, components.clock, components.settings, components.authorizer)
    reads = DimensionReads(components.store, components.catalog.documents.peek, rights)
    uuid = (await root("GET", "/v1/namespaces/db/tables/t")).json["metadata"]["table-uuid"]
    job = Job("indexing", ("db",), "t", uuid)
    assert set(await reads.list_tables(job)) == {(("other",), "names"), (("other",), "hidden")}
    assert await reads.list_tables(msgspec.structs.replace(job, service="compaction")) == ()
    assert await reads.list_tables(msgspec.structs.replace(job, uuid="another")) == ()
    await components.store.transact([RemoveGrant(grant)])
    assert await reads.list_tables(job) == ((("other",), "hidden"),)
    for name in ("names", "hidden"):
        assert (await root("DELETE", f"/api/v1/tables/db/t/indexes/of_{name}")).status == 204


async def check_registration_of_other_authors(rex: UserApi, root: UserApi, table: dict[str, Any]) -> None:
    """Check that rex may not register or import metadata files whose properties another user or nobody has set.

    The property `SETTERS` of a file names the user who set an index definition or a policy. An admin may register all.
    """
    former_path = Path(table["metadata-location"].removeprefix("file://"))
    statuses = {}
    for number, author in enumerate(("root", "rex", None)):
        metadata = json.loads(former_path.read_bytes())
        metadata["properties"][SETTERS] = json.dumps({"seamark.index.i": author} if author else {})
        # The numbers from 90000 differ from those of the metadata files that the server writes.
        path = former_path.with_name(f"{90000 + number}-{number}.metadata.json")
        path.write_text(json.dumps(metadata))
        request = {"name": "t", "metadata-location": f"file://{path}", "overwrite": True}
        statuses[author] = [
            (await caller("POST", "/v1/namespaces/db/register", request)).status for caller in (rex, root)
        ]
    assert statuses == {"root": [403, 200], "rex": [200, 200], None: [403, 200]}
    policy = "seamark.compaction.enabled"
    for number, setters in enumerate(({policy: "rex"}, {policy: "root"}, {})):
        metadata["properties"] = {
            "history.expire.max-snapshot-age-ms": "1",
            policy: "true",
            SETTERS: json.dumps(setters),
        }
        path = former_path.with_name(f"{90010 + number}-{number}.metadata.json")
        path.write_text(json.dumps(metadata))
        registration = {"name": "t", "metadata-location": f"file://{path}", "overwrite": True}
        import_request = {"metadata-locations": {"new": f"file://{path}"}, "dry-run": True}
        answer = await rex("PUT", "/api/v1/namespaces/db/import", import_request)
        is_refused = policy in answer.json["results"][0]["error"]
        assert (await rex("POST", "/v1/namespaces/db/register", registration)).status == (403 if number else 200)
        assert is_refused == bool(number), answer.json


def build_schema(name: str) -> dict[str, Any]:
    """Return the schema of the test's tables with a further text column of this name."""
    column = {"id": 100, "name": name, "required": False, "type": "string"}
    return {**SCHEMA, "fields": [*SCHEMA["fields"], column]}
