"""Tests of the S3 properties of a loaded table, which depend on the operator's settings and the client's request."""

from __future__ import annotations

import dataclasses

import pytest

from seamark.formats.storage.locations import parse_location
from seamark.metaserver.objects.credentials import VendedKeys
from seamark.metaserver.objects.storages import SERVER_STORAGES
from seamark.metaserver.settings.settings import Settings

TABLE = parse_location("s3://lake/wh/t")
S3 = SERVER_STORAGES["s3"]
SIGN_PATH = "v1/namespaces/n/tables/t/sign"
BASE_SETTINGS = Settings(s3_endpoint="http://store:9000", s3_access_key_id="AKID", s3_secret_access_key="SECRET")
ADDRESS = {
    "s3.endpoint": "http://store:9000",
    "client.region": "us-east-1",
    "s3.region": "us-east-1",
    "s3.path-style-access": "true",
    "s3.force-virtual-addressing": "false",
}
BOTH_MODES = "vended-credentials,remote-signing"


async def vend_config(access: str, delegation: str | None) -> tuple[dict[str, str], list[dict[str, object]]]:
    settings = dataclasses.replace(BASE_SETTINGS, s3_client_access=access)
    return await S3.grant_client_access(settings, TABLE, delegation=delegation, sign_path=SIGN_PATH)


@pytest.mark.parametrize(
    ("access", "delegation", "expected"),
    [
        ("none", None, "address"),
        ("none", BOTH_MODES, "address"),
        ("signing", None, "signing"),
        ("signing", "remote-signing", "signing"),
        ("signing", BOTH_MODES, "signing"),
        ("signing", "vended-credentials", "address"),
        ("static", None, "address"),
        ("static", "vended-credentials", "keys"),
        ("static", "Vended-Credentials , something-new", "keys"),
        ("static", BOTH_MODES, "keys"),
        ("static", "remote-signing,vended-credentials", "signing"),
        ("static", "remote-signing", "signing"),
        ("static", "nonsense", "address"),
        ("static", " , ", "address"),
    ],
)
async def test_client_gets_the_first_requested_kind_of_access_that_is_allowed(
    access: str, delegation: str | None, expected: str
) -> None:
    config, credentials = await vend_config(access, delegation)
    assert ADDRESS.items() <= config.items()
    assert ("s3.remote-signing-enabled" in config) is (expected == "signing")
    assert (config.get("s3.secret-access-key") == "SECRET") is (expected == "keys")
    assert bool(credentials) is (expected == "keys")
    if expected != "keys":
        assert "SECRET" not in f"{config}{credentials}"


async def test_credentials_are_also_given_for_the_tables_prefix() -> None:
    config, [credential] = await vend_config("static", "vended-credentials")
    assert credential["prefix"] == "s3://lake/wh/t/"
    assert credential["config"] == config


async def test_signing_endpoint_is_named_in_every_clients_form() -> None:
    config, _ = await vend_config("signing", None)
    assert config["s3.remote-signing-enabled"] == "true"
    assert config["signer.endpoint"] == config["s3.signer.endpoint"] == SIGN_PATH
    assert config["s3.signer"] == "S3V4RestSigner"


async def test_local_table_needs_no_properties() -> None:
    settings = dataclasses.replace(BASE_SETTINGS, s3_client_access="static")
    assert await SERVER_STORAGES["file"].grant_client_access(
        settings, parse_location("file:/wh/t"), delegation=BOTH_MODES, sign_path=SIGN_PATH
    ) == ({}, [])


async def test_amazon_s3_uses_virtual_hosts_and_needs_no_endpoint() -> None:
    config, _ = await S3.grant_client_access(Settings(), TABLE, delegation=None, sign_path=SIGN_PATH)
    assert "s3.endpoint" not in config
    assert config["s3.path-style-access"] == "false"


@pytest.mark.parametrize("delegation", [None, "vended-credentials", BOTH_MODES])
async def test_clients_get_the_gateways_address_and_credentials_of_the_table(delegation: str | None) -> None:
    settings = dataclasses.replace(BASE_SETTINGS, s3_client_access="gateway", gateway_port=8182, s3_path_style=False)
    keys = VendedKeys("AK", "VENDED", "token", 1_000)
    options = {"sign_path": SIGN_PATH, "refresh_path": "v1/refresh", "vend": lambda: keys}
    config, [credential] = await S3.grant_client_access(settings, TABLE, delegation=delegation, **options)
    assert config["s3.endpoint"] == "http://127.0.0.1:8182"
    assert config["s3.path-style-access"] == "true"
    assert (config["s3.secret-access-key"], config["s3.session-token"]) == ("VENDED", "token")
    assert config["s3.session-token-expires-at-ms"] == "1000"
    assert config["client.refresh-credentials-endpoint"] == "v1/refresh"
    assert credential == {"prefix": "s3://lake/wh/t/", "config": config}
    config, credentials = await S3.grant_client_access(settings, TABLE, delegation="remote-signing", **options)
    assert not credentials
    assert "VENDED" not in f"{config}"
    assert "SECRET" not in f"{config}"
