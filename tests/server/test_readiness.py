"""Tests that the server is ready if and only if it could write a commit now."""

from __future__ import annotations

import asyncio
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from seamark.formats.runtime.errors import RetryLater
from tests.server.rig import run_server

Usage = namedtuple("Usage", "total used free")


async def test_server_is_not_ready_while_its_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seamark.metaserver.api.admin.readiness.INTERVAL_S", 0.0)
    free_bytes = [10 << 30]
    async with run_server(
        tmp_path / "home", warehouse=f"file://{tmp_path}/warehouse", free_space_min_bytes=1 << 30
    ) as server:

        def read_usage(folder: Any) -> Usage:
            is_warehouse = str(folder).startswith(str(tmp_path / "warehouse"))
            return Usage(100 << 30, 0, free_bytes[0] if is_warehouse else 10 << 30)

        monkeypatch.setattr(shutil, "disk_usage", read_usage)
        assert (await server.get("/readyz"))[0] == 200
        free_bytes[0] = (1 << 30) - 1
        status, body = await server.get("/readyz")
        assert (status, body["checks"]["disk"]) == (503, "full")
        assert (await server.get("/healthz"))[0] == 200
        free_bytes[0] = 2 << 30
        assert (await server.get("/readyz"))[0] == 200


async def test_small_disk_needs_a_twentieth_of_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seamark.metaserver.api.admin.readiness.INTERVAL_S", 0.0)
    async with run_server(tmp_path) as server:
        for free_bytes, status in ((1_000_001, 200), (999_999, 503)):
            monkeypatch.setattr(shutil, "disk_usage", lambda _, free_bytes=free_bytes: Usage(20_000_000, 0, free_bytes))
            assert (await server.get("/readyz"))[0] == status


async def test_server_is_not_ready_when_its_database_takes_no_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_server(tmp_path) as server:

        async def refuse_write(_: Any) -> None:
            raise RetryLater("database or disk is full: /secret/path")

        monkeypatch.setattr(server.components.store, "transact", refuse_write)
        status, body = await server.get("/readyz")
        assert (status, body["checks"]["writes"], body["checks"]["store"]) == (503, "failing", "ok")
        assert "secret" not in str(body)


async def test_many_concurrent_probes_write_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_server(tmp_path) as server:
        writes, transact = [], server.components.store.transact

        async def record_write(operations: Any) -> Any:
            writes.append(operations)
            return await transact(operations)

        monkeypatch.setattr(server.components.store, "transact", record_write)
        answers = await asyncio.gather(*(server.get("/readyz") for _ in range(50)))
        assert {status for status, _ in answers} == {200}
        assert len(writes) == 1
