"""What ends with the tests of this folder: a Trino that nobody asks any more takes a thirtieth of a core."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deploy.access_rules import access_control
from tests.deploy.shop import Shop, open_shop
from tests.services.s3 import S3
from tests.services.trino_lake import TrinoLake, open_trino_lake


@pytest.fixture(scope="package")
def trino_lake(tmp_path_factory: pytest.TempPathFactory, s3: S3) -> Iterator[TrinoLake]:
    """One Trino, over a server with tables on local files and one with tables in S3.

    A namespace that a test makes is its own; whoever stops any part of it starts it again. It has access control: a
    second Trino that alone has it would take half of the CPU time of its tests to start and to warm up.
    """
    folder = tmp_path_factory.mktemp("trino")
    with open_trino_lake(folder, s3, access_control(folder)) as lake:
        yield lake


@pytest.fixture(scope="package")
def shop(tmp_path_factory: pytest.TempPathFactory, trino_lake: TrinoLake) -> Iterator[Shop]:
    """A shop in the folder's Trino, and a proxy before it."""
    with open_shop(tmp_path_factory.mktemp("shop"), trino_lake) as opened:
        yield opened
