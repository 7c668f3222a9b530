"""Fixtures with a server for each test, which the tests reach only over its port."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from seamark.connector.client.indexes import IndexClient
from tests.connector.server_thread import ServerThread


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerThread]:
    server = ServerThread(tmp_path, warehouse=tmp_path.as_uri(), services_workers=0)  # No worker process starts.
    server.start()
    yield server
    server.stop()


@pytest.fixture
def client(server: ServerThread) -> Iterator[IndexClient]:
    new_client = IndexClient(server.url)
    yield new_client
    new_client.close()
