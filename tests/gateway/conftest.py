"""A server for each kind of store behind the gateway. All tests of this folder share it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gateway.rig import GatewayRig, open_rig
from tests.services.s3 import S3


@pytest.fixture(scope="session")
def store_rig(tmp_path_factory: pytest.TempPathFactory, s3: S3) -> Iterator[GatewayRig]:
    with open_rig(tmp_path_factory.mktemp("gateway-store"), s3) as rig:
        yield rig


@pytest.fixture(scope="session")
def folder_rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayRig]:
    with open_rig(tmp_path_factory.mktemp("gateway-folder"), None) as rig:
        yield rig


@pytest.fixture(params=["store", "folder"])
def rig(request: pytest.FixtureRequest) -> GatewayRig:
    return request.getfixturevalue(f"{request.param}_rig")
