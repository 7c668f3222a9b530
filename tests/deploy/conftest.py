from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deploy.access_rules import open_ruled_trino
from tests.deploy.shop import Shop, open_shop
from tests.services.trino import Trino
from tests.services.trino_lake import TrinoLake


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory, trino_lake: TrinoLake) -> Iterator[Shop]:
    """A shop in the session's Trino, and a proxy before it."""
    with open_shop(tmp_path_factory.mktemp("shop"), trino_lake) as opened:
        yield opened


@pytest.fixture(scope="session")
def ruled_trino(tmp_path_factory: pytest.TempPathFactory, trino_lake: TrinoLake) -> Iterator[Trino]:
    """The session's one Trino with access control, over the server with tables on local files."""
    with open_ruled_trino(tmp_path_factory.mktemp("ruled"), trino_lake.seamark.base_url) as trino:
        yield trino
