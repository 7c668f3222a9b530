"""One server per kind of storage for the whole module: starting Spark and servers is what costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.services.s3 import S3
from tests.services.seamark import Seamark

STORAGES = ("local files", "S3, signed by the server", "S3, keys from the server")


@dataclass(frozen=True)
class Lake:
    """A server over one kind of storage, and what a client needs besides its URI."""

    server: Seamark
    storage: str
    client_properties: dict[str, str]


@pytest.fixture(scope="module", params=STORAGES)
def lake(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lake]:
    home = tmp_path_factory.mktemp("lake")
    warehouse, env = "", {}
    properties: dict[str, str] = {}
    if request.param.startswith("S3"):
        s3: S3 = request.getfixturevalue("s3")
        warehouse = f"s3://{s3.create_bucket()}/warehouse"
        access = "signing" if "signed" in request.param else "static"
        delegation = "remote-signing" if access == "signing" else "vended-credentials"
        env = {**s3.seamark_env(), "SEAMARK_S3_CLIENT_ACCESS": access}
        properties = {"header.X-Iceberg-Access-Delegation": delegation}
    with Seamark(home, warehouse=warehouse, env=env) as server:
        yield Lake(server, request.param, properties)


@pytest.fixture
def quiet_network() -> Iterator[None]:
    """For clients that leave sockets to the garbage collector; their warnings are not ours to mend."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield


def rows(frame: Any) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in frame.collect()]
