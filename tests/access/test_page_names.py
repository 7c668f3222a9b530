"""Tests that pages of a listing reveal nothing that the reader may not see."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from seamark.metaserver.access.tokens import create_token
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.operations import CreateNamespace
from seamark.metaserver.store.sql.generator_store import GeneratorStore
from tests.server.rig import run_server


async def test_pages_and_tokens_reveal_no_hidden_namespaces(tmp_path: Path) -> None:
    async with run_server(tmp_path) as admin:
        for number in range(10):
            await admin.components.store.transact([CreateNamespace(path=(f"hidden-{number:02}",), properties={})])
        await admin.components.store.transact([CreateNamespace(path=("zoo",), properties={})])
        grants = [Grant("ann", "reader", ("db",)), Grant("ann", "reader", ("zoo",))]
        secret = await create_token(admin.components.store, admin.components.clock, "ann", ttl_s=None, grants=grants)
    async with run_server(tmp_path, auth="token") as server:
        headers = {"Authorization": f"Bearer {secret}"}
        token, pages = "", []
        while token is not None:
            _, page = await server.get(f"/v1/namespaces?pageSize=1&pageToken={token}", headers=headers)
            pages.append(page["namespaces"])
            token = page["next-page-token"]
            if token is not None:
                assert b"hidden" not in base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
                assert b"db" not in base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
        # Pages reveal neither the names nor the number of hidden namespaces.
        assert pages == [[["db"]], [["zoo"]]]


async def test_page_needs_no_work_for_hidden_namespaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_server(tmp_path) as admin:
        paths = [
            *((f"hidden-{number:04}",) for number in range(300)),
            *((f"seen-{number:03}",) for number in range(250)),
        ]
        await admin.components.store.transact([CreateNamespace(path=path, properties={}) for path in paths])
        # Ten of the grants are for namespaces that do not exist.
        grants = [Grant("ann", "reader", (f"seen-{number:03}",)) for number in range(260)]
        secret = await create_token(admin.components.store, admin.components.clock, "ann", ttl_s=None, grants=grants)
    async with run_server(tmp_path, auth="token") as server:
        row_counts: list[int] = []
        listing = GeneratorStore._read_list

        async def count_rows(store: GeneratorStore, make_steps: Any) -> Any:
            rows = await listing(store, make_steps)
            row_counts.append(len(rows) if isinstance(rows, list) else 0)
            return rows

        # A store may define its own `_read_list`. The method that it uses is replaced.
        for store_class in (type(server.components.store), GeneratorStore):
            if "_read_list" in vars(store_class):
                listing = vars(store_class)["_read_list"]
                monkeypatch.setattr(store_class, "_read_list", count_rows)
                break
        headers = {"Authorization": f"Bearer {secret}"}
        for query, expected in (("?pageSize=1&pageToken=", 1), ("?pageSize=100&pageToken=", 100), ("", 250)):
            row_counts.clear()
            _, page = await server.get(f"/v1/namespaces{query}", headers=headers)
            assert len(page["namespaces"]) == expected
            # A page needs at most 4 queries. If they also read the 300 hidden namespaces, they would return more rows.
            assert len(row_counts) <= 4, query
            assert sum(row_counts) <= 300, query
