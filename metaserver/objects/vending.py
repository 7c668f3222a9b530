"""Storage access for clients: the `config` and `storage-credentials` of a LoadTableResult.

Every client receives the address and region, which are not secret. The server's own keys go only to a client that
requests them (`X-Iceberg-Access-Delegation: vended-credentials`), if the operator sets `s3_client_access = static`.
They are not limited to the table, so this is for trusted networks. STS is not supported, because most self-hosted
stores lack its short-lived keys; remote signing gives the same limits without it.

| s3_client_access | no request | vended-credentials | remote-signing |
|---|---|---|---|
| none | address | address | address |
| signing | signing | address | signing |
| static | address | keys | signing |

A client that lists several gets the first that is allowed. PyIceberg lists vended-credentials by default.
"""

from __future__ import annotations

from seamark.metaserver.objects.credentials import server_keys
from seamark.metaserver.objects.locations import parse_location
from seamark.metaserver.settings import Settings

VENDED = "vended-credentials"
SIGNING = "remote-signing"

_ALLOWED: dict[str, frozenset[str]] = {
    "none": frozenset(),
    "signing": frozenset((SIGNING,)),
    "static": frozenset((VENDED, SIGNING)),
}


def storage_config(
    settings: Settings, table_location: str, *, delegation: str | None, sign_path: str
) -> tuple[dict[str, str], list[dict[str, object]]]:
    """(config, storage_credentials); both empty for a table on files.

    `delegation` is the header `X-Iceberg-Access-Delegation`, or None. `sign_path` is the path for signing this table's
    requests, relative to the catalog's URI and percent-encoded: `v1/…/tables/t/sign`.
    """
    at = parse_location(table_location, "The table's location")
    if at.scheme != "s3":
        return {}, []
    config = _address(settings)
    mechanism = _choose(settings, delegation)
    if mechanism == SIGNING:
        return {**config, **_signing(sign_path)}, []
    if mechanism == VENDED:
        keys = server_keys(settings)
        secrets = {"s3.access-key-id": keys.access_key_id, "s3.secret-access-key": keys.secret_access_key}
        if keys.token:
            secrets["s3.session-token"] = keys.token
        # Twice: clients read `storage-credentials` first; those before Iceberg 1.8 read `config` only.
        return {**config, **secrets}, [{"prefix": f"{at}/", "config": {**config, **secrets}}]
    return config, []


def _choose(settings: Settings, delegation: str | None) -> str | None:
    allowed = _ALLOWED[settings.s3_client_access]
    requested = [name.strip().lower() for name in (delegation or "").split(",") if name.strip()]
    if not requested:
        return SIGNING if settings.s3_client_access == "signing" else None
    return next((name for name in requested if name in allowed), None)


def _address(settings: Settings) -> dict[str, str]:
    path_style = settings.s3_path_style and bool(settings.s3_endpoint)
    config = {
        "client.region": settings.s3_region,
        "s3.region": settings.s3_region,  # PyIceberg's and DuckDB's name for it
        "s3.path-style-access": str(path_style).lower(),
        "s3.force-virtual-addressing": str(not path_style).lower(),  # PyIceberg's
    }
    if settings.s3_endpoint:
        config["s3.endpoint"] = settings.s3_endpoint
    return config


def _signing(sign_path: str) -> dict[str, str]:
    """Java since 1.11 reads `signer.endpoint`; PyIceberg and older versions read `s3.signer.endpoint`. Both are below
    `uri`.
    """
    path = sign_path.lstrip("/")
    return {
        "s3.remote-signing-enabled": "true",
        "signer.endpoint": path,
        "s3.signer.endpoint": path,
        # PyIceberg signs remotely only on request, and only in its fsspec FileIO.
        "s3.signer": "S3V4RestSigner",
        "py-io-impl": "pyiceberg.io.fsspec.FsspecFileIO",
    }
