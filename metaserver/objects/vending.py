"""Builds the `config` and `storage-credentials` of a LoadTableResult, with which clients use S3.

Every client receives the address and region, which are not secret. With `s3_client_access = static`, a client that
requests keys (`X-Iceberg-Access-Delegation: vended-credentials`) receives the server's own keys. These keys are not
limited to the table, so use them in trusted networks only. With `sts`, clients get temporary keys of AWS for one table.
Most self-hosted stores do not support STS. For these stores, remote signing and the objects gateway also limit a client
to one table. With `gateway`, clients get the address of the gateway, which accepts only the keys that this catalog
issues for one table.

| s3_client_access | no request | vended-credentials | remote-signing |
|---|---|---|---|
| none | address | address | address |
| signing | signing | address | signing |
| static | address | keys | signing |
| gateway | keys of the table | keys of the table | address |
| sts | keys of the table | keys of the table | address |

If a client lists several mechanisms, it gets the first allowed mechanism. PyIceberg lists `vended-credentials` by
default.
"""

from __future__ import annotations

from collections.abc import Callable

from seamark.formats.storage.locations import Location
from seamark.metaserver.objects.credentials import VendedKeys, load_server_keys
from seamark.metaserver.settings.settings import Settings

VENDED = "vended-credentials"
SIGNING = "remote-signing"

_ALLOWED: dict[str, frozenset[str]] = {
    "none": frozenset(),
    "signing": frozenset((SIGNING,)),
    "static": frozenset((VENDED, SIGNING)),
    "gateway": frozenset((VENDED,)),
    "sts": frozenset((VENDED,)),
}
_BY_DEFAULT = {"signing": SIGNING, "gateway": VENDED, "sts": VENDED}


def build_storage_config(
    settings: Settings,
    table: Location,
    *,
    delegation: str | None,
    sign_path: str,
    refresh_path: str = "",
    vend: Callable[[], VendedKeys] | None = None,
) -> tuple[dict[str, str], list[dict[str, object]]]:
    """Return the config and the storage credentials of a table on S3.

    Args:
        settings: The settings of the warehouse.
        table: The location of the table.
        delegation: The header `X-Iceberg-Access-Delegation` of the client, or None.
        sign_path: The path at which the server signs requests for this table, relative to the catalog's URI.
        refresh_path: The path at which clients get new keys, or an empty text.
        vend: Issues keys of the objects gateway for the table.
    """
    config = build_store_address(settings)
    mechanism = choose_access_mechanism(settings, delegation)
    if mechanism == SIGNING:
        return {**config, **_describe_signing(sign_path)}, []
    if mechanism == VENDED:
        keys = vend() if vend is not None and settings.s3_client_access == "gateway" else load_server_keys(settings)
        secrets = {"s3.access-key-id": keys.access_key_id, "s3.secret-access-key": keys.secret_access_key}
        if keys.token:
            secrets["s3.session-token"] = keys.token
        if isinstance(keys, VendedKeys):
            secrets["s3.session-token-expires-at-ms"] = str(keys.expires_ms)
            if refresh_path:
                secrets["client.refresh-credentials-endpoint"] = refresh_path
        # Send the keys twice. Clients read `storage-credentials` first, but before Iceberg 1.8 they read only `config`.
        return {**config, **secrets}, [{"prefix": f"{table}/", "config": {**config, **secrets}}]
    return config, []


def choose_access_mechanism(settings: Settings, delegation: str | None) -> str | None:
    """Return the mechanism by which a client with this `X-Iceberg-Access-Delegation` header gets access.

    Returns:
        The mechanism, or None if the client gets only the address.
    """
    allowed_mechanisms = _ALLOWED[settings.s3_client_access]
    requested_mechanisms = [name.strip().lower() for name in (delegation or "").split(",") if name.strip()]
    if not requested_mechanisms:
        return _BY_DEFAULT.get(settings.s3_client_access)
    return next((name for name in requested_mechanisms if name in allowed_mechanisms), None)


def get_gateway_address(settings: Settings) -> str:
    """Return the URL of the objects gateway for clients, or an empty text without a gateway."""
    if settings.gateway_url or not settings.gateway_port:
        return settings.gateway_url.rstrip("/")
    # Clients cannot connect to the address that means all addresses. Its loopback address serves the same machine.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104  compared, not bound
    scheme = "https" if settings.tls_cert else "http"
    return (
        f"{scheme}://[{host}]:{settings.gateway_port}" if ":" in host else f"{scheme}://{host}:{settings.gateway_port}"
    )


def build_store_address(settings: Settings) -> dict[str, str]:
    """Return the address of the store for clients, as properties of a FileIO."""
    endpoint = get_gateway_address(settings) if settings.s3_client_access == "gateway" else settings.s3_endpoint
    path_style = (settings.s3_path_style or settings.s3_client_access == "gateway") and bool(endpoint)
    config = {
        "client.region": settings.s3_region,
        "s3.region": settings.s3_region,  # PyIceberg and DuckDB read this name.
        "s3.path-style-access": str(path_style).lower(),
        "s3.force-virtual-addressing": str(not path_style).lower(),  # PyIceberg reads this name.
    }
    if endpoint:
        config["s3.endpoint"] = endpoint
    return config


def _describe_signing(sign_path: str) -> dict[str, str]:
    """Return the properties of remote signing.

    Java since 1.11 reads `signer.endpoint`. PyIceberg and older versions read `s3.signer.endpoint`. Both paths are
    relative to `uri`.
    """
    path = sign_path.lstrip("/")
    return {
        "s3.remote-signing-enabled": "true",
        "signer.endpoint": path,
        "s3.signer.endpoint": path,
        # PyIceberg signs remotely only if these properties request it, and only in its fsspec FileIO.
        "s3.signer": "S3V4RestSigner",
        "py-io-impl": "pyiceberg.io.fsspec.FsspecFileIO",
    }
