"""Pages of a listing tell nothing about what the reader may not see."""

from __future__ import annotations

import base64
from pathlib import Path

from seamark.metaserver.access.tokens import create_token
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.operations import CreateNamespace
from tests.server.rig import running


async def test_no_page_or_token_tells_of_namespaces_that_one_may_not_see(tmp_path: Path) -> None:
    async with running(tmp_path) as admin:
        for number in range(10):
            await admin.parts.store.transact([CreateNamespace(path=(f"hidden-{number:02}",), properties={})])
        await admin.parts.store.transact([CreateNamespace(path=("zoo",), properties={})])
        grants = [Grant("ann", "reader", ("db",)), Grant("ann", "reader", ("zoo",))]
        secret = await create_token(admin.parts.store, admin.parts.clock, "ann", None, grants)
    async with running(tmp_path, auth="token") as server:
        headers = {"Authorization": f"Bearer {secret}"}
        token, pages = "", []
        while token is not None:
            _, page = await server.get(f"/v1/namespaces?pageSize=1&pageToken={token}", headers=headers)
            pages.append(page["namespaces"])
            token = page["next-page-token"]
            if token is not None:
                assert b"hidden" not in base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
                assert b"db" not in base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
        # Neither a name nor how many there are: pages hold what is visible, one after the other.
        assert pages == [[["db"]], [["zoo"]]]
