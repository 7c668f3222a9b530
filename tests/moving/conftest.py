"""Two servers. Tables move from the first to the second, and the second may read the warehouses of both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from seamark.connector.client.indexes import IndexClient
from tests.connector.server_thread import ServerThread


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """Return the folder of the warehouse from which tables move."""
    folder = tmp_path / "lake"
    folder.mkdir()
    return folder


@pytest.fixture
def origin(tmp_path: Path, lake: Path) -> Iterator[IndexClient]:
    """Yield a client of the server from which tables move."""
    with _run_server(tmp_path / "origin", lake.as_uri()) as client:
        yield client


@pytest.fixture
def target(tmp_path: Path, lake: Path) -> Iterator[IndexClient]:
    """Yield a client of the server to which tables move."""
    home = tmp_path / "target"
    with _run_server(home, (home / "warehouse").as_uri(), allowed_locations=(lake.as_uri(),)) as client:
        yield client


@pytest.fixture
def single_target(tmp_path: Path, lake: Path) -> Iterator[IndexClient]:
    """Yield a client of a further server, with the same settings as `target`."""
    home = tmp_path / "single_target"
    with _run_server(home, (home / "warehouse").as_uri(), allowed_locations=(lake.as_uri(),)) as client:
        yield client


@pytest.fixture
def postgres_target(tmp_path: Path, lake: Path, postgres_url: str) -> Iterator[IndexClient]:
    """Yield a client of a server like `target`, with a database in PostgreSQL."""
    home = tmp_path / "target"
    settings = {"database": postgres_url, "allowed_locations": (lake.as_uri(),)}
    with _run_server(home, (home / "warehouse").as_uri(), **settings) as client:
        yield client


@contextmanager
def _run_server(home: Path, warehouse: str, **settings: object) -> Iterator[IndexClient]:
    home.mkdir()
    with (
        ServerThread(home, warehouse=warehouse, services_workers=0, **settings) as server,
        closing(IndexClient(server.url)) as client,
    ):
        yield client
