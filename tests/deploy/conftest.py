"""Fixtures that end with the tests of this folder, because an idle Trino uses a thirtieth of a core."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deploy.access_rules import write_access_control
from tests.deploy.shop import Shop, open_shop
from tests.services.s3 import S3
from tests.services.trino_lake import TrinoLake, open_trino_lake


@pytest.fixture(scope="package")
def trino_lake(tmp_path_factory: pytest.TempPathFactory, s3: S3) -> Iterator[TrinoLake]:
    """Start one Trino over a server with tables on local files and a server with tables in S3.

    Each test uses its own namespaces, and restarts any server that it stops. This Trino has access control, because a
    second Trino for the tests of access control would spend half of their CPU time on its start and warm-up.
    """
    folder = tmp_path_factory.mktemp("trino")
    with open_trino_lake(folder, s3, write_access_control(folder)) as lake:
        yield lake


@pytest.fixture(scope="package")
def shop(tmp_path_factory: pytest.TempPathFactory, trino_lake: TrinoLake) -> Iterator[Shop]:
    """Open a shop in the Trino that all tests of this folder share, and a proxy in front of this Trino."""
    with open_shop(tmp_path_factory.mktemp("shop"), trino_lake) as shop:
        yield shop
