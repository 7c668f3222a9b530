"""Tests of the rights to read the groups of a cube that has attributes of a dimension table."""

from __future__ import annotations

from pathlib import Path

from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.access.tokens import create_token
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.operations import CreateNamespace
from tests.api.client import SCHEMA
from tests.api.plans.test_plan_tables import UserApi
from tests.server.rig import running

ATTRIBUTE = "lookup[secret.names@5:1:2:string](id)"


async def test_groups_require_the_right_to_read_the_dimension_table(tmp_path: Path) -> None:
    clock, secrets = SystemClock(), {}
    async with open_store(f"sqlite:///{tmp_path / 'seamark.db'}", clock=clock) as store:
        for name, role, path in (("root", "admin", ()), ("rita", "reader", ("db",))):
            secrets[name] = await create_token(store, clock, name, None, [Grant(name, role, path)])
        await store.transact([CreateNamespace(path=("db",), properties={})])
    async with running(tmp_path, auth="token") as server:
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
