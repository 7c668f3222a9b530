"""Tests of a local folder as the store of `s3://` locations: the contract, and paths that leave the folder."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import BadRequest, ConfigError
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.objects.router import open_objects
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.settings.sources import check_consistency
from tests.objects.contract import ObjectStoreContract


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[ObjectStore]:
    settings = Settings(home=tmp_path, warehouse="s3://lake/wh", s3_folder=str(tmp_path / "objects"))
    async with open_objects(settings, SystemClock()) as objects:
        yield objects


@pytest.fixture
def base() -> str:
    return "s3://lake/wh/corner"


class TestFolderContract(ObjectStoreContract):
    """The contract's tests. The server's router opens the store by the scheme of the location, as in production."""


async def test_bucket_is_a_folder_and_links_out_of_the_folder_are_rejected(
    store: ObjectStore, base: str, tmp_path: Path
) -> None:
    await store.create(f"{base}/x", b"x")
    assert (tmp_path / "objects/lake/wh/corner/x").read_bytes() == b"x"
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "objects/lake/wh/out").symlink_to(tmp_path)
    with pytest.raises(BadRequest, match="symbolic link"):
        await store.read("s3://lake/wh/out/secret")


@pytest.mark.parametrize(
    "settings",
    [
        {"s3_folder": "relative"},
        {"s3_folder": "/f", "s3_endpoint": "http://s3:9000"},
        {"s3_folder": "/f", "s3_access_key_id": "AK", "s3_secret_access_key": "SK"},
        {"s3_folder": "/f", "s3_client_access": "signing"},
        {"s3_client_access": "gateway"},
        {"gateway_url": "http://gateway:8182/path"},
    ],
)
def test_contradictory_settings_are_rejected(settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        check_consistency(Settings(**settings))  # type: ignore[arg-type]
