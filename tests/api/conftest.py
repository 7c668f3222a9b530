"""A server for each test, and a client for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.api.client import Api
from tests.api.plans.planned import append_files, build_ten_id_files
from tests.server.rig import run_server


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with run_server(tmp_path) as server:
        yield Api(server)


@pytest.fixture
async def api_with_files(api: Api) -> Api:
    """Return the API of a server where `db.t` has 30 files in 3 manifests."""
    await api.create_table()
    await append_files(api, "t", build_ten_id_files(30), snapshot_id=1, manifests=3)
    return api
