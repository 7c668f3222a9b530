"""Fixtures with a server for each test, which the tests reach only over its port."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from seamark.connector.client.indexes import IndexClient
from tests.connector.server_thread import ServerThread


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerThread]:
    with ServerThread(tmp_path, warehouse=tmp_path.as_uri(), services_workers=0) as server:  # No worker process starts.
        yield server


@pytest.fixture
def client(server: ServerThread) -> Iterator[IndexClient]:
    with closing(IndexClient(server.url)) as client:
        yield client
