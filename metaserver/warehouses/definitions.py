"""Checks the definition of a further warehouse: its name and its own settings. `places.py` checks its location.

An admin of the server defines warehouses over HTTP, and the operator limits the definitions: endpoints must be in
`warehouse_endpoints`. A warehouse with its own endpoint needs
its own keys, so that the keys of the server are never sent to another store. A warehouse never gives the keys of the
server to clients, because these keys give access to the files of all warehouses.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode, urlsplit, urlunsplit

import msgspec

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.decoding import convert_json
from seamark.formats.runtime.errors import BadRequest, ConfigError, StorageError
from seamark.formats.storage.locations import Location
from seamark.metaserver.access.protectors import KeyProtector, WrongKey, find_key_file, open_protector
from seamark.metaserver.objects.storages import SERVER_STORAGES
from seamark.metaserver.runtime.home import find_sqlite_file
from seamark.metaserver.settings.settings import FIELDS, Settings
from seamark.metaserver.settings.sources import check_consistency, convert_setting
from seamark.metaserver.store.model import StoredWarehouse
from seamark.metaserver.warehouses.event_targets import EVENT_TARGETS, check_event_targets, drop_refused_targets

NAME_PATTERN = "[a-z0-9][a-z0-9_-]{0,62}"
RESERVED_NAMES = frozenset(
    (
        *("config", "functions", "namespaces", "oauth", "tables", "transactions", "views"),
        *("api", "default", "v1", "warehouses"),
    )
)
"""Names that are segments of paths, or that users could confuse with the warehouse of the server."""
STORAGE_SETTINGS = (
    *("s3_endpoint", "s3_region", "s3_path_style", "s3_client_access"),
    *("azure_endpoint", "azure_client_access", "gcs_client_access", "s3_backend"),
)
FEDERATION_SETTINGS = ("federation_uri", "federation_warehouse", "federation_scope", "federation_fresh_s")
STORAGE_CREDENTIALS = ("s3_access_key_id", "s3_secret_access_key", "azure_account_key")
EVENT_SETTINGS = ("event_kafka", "openlineage_namespace")
EVENT_CREDENTIALS = ("webhook_urls", "webhook_secret", "event_nats", "openlineage_url", "openlineage_api_key")
CREDENTIALS = (*STORAGE_CREDENTIALS, "federation_token", "federation_credential", *EVENT_CREDENTIALS)
"""The secret settings that a warehouse can have.

A key of Google Cloud is not among them, because it contains URLs to which the server would send requests.
"""
_ENDPOINT_KEYS = {"s3_endpoint": "s3_secret_access_key", "azure_endpoint": "azure_account_key"}
"""The credential that a warehouse with its own endpoint needs."""
_OWN_STORE_SETTINGS = ("s3_region", "s3_path_style")
"""The settings that determine the host of a request to S3.

A warehouse that uses the keys of the server cannot have them.
"""
_SERVER_KEYS = (
    *STORAGE_CREDENTIALS,
    *("azure_tenant_id", "azure_client_id", "azure_client_secret", "s3_folder"),
    *("s3_sts_role", "s3_sts_external_id", "s3_sts_endpoint"),
)
"""The settings of the server that do not apply to a warehouse with its own credentials."""
_S3_STORE = (
    *("s3_endpoint", "s3_access_key_id", "s3_secret_access_key", "s3_folder"),
    *("s3_sts_role", "s3_sts_external_id", "s3_sts_endpoint"),
)
"""The settings of the server that do not apply to a warehouse with an `s3_backend`."""
DEFAULTS = (
    "scan_planning_mode",
    "drop_retention_s",
    "metrics_retention_s",
    "audit_retention_s",
    "query_history_days",
    "timeline_keep",
    "services_workers",
)
QUOTAS = (
    "namespace_entries_limit",
    "namespace_properties_limit",
    "plan_tables_limit",
    "plan_tables_bytes",
    "indexes_limit",
)
WAREHOUSE_SETTINGS = (*STORAGE_SETTINGS, *DEFAULTS, *QUOTAS, *EVENT_SETTINGS, *FEDERATION_SETTINGS)
"""The settings that a warehouse can have, without its credentials."""
_SHARED_BUDGETS = (
    "metadata_cache_bytes",
    "commit_memory_bytes",
    "plan_memory_bytes",
    "plan_answers_bytes",
    "plan_disk_bytes",
    "plan_table_memory_bytes",
    "join_memory_bytes",
    "index_memory_bytes",
    "index_disk_bytes",
    "cube_memory_bytes",
    "cube_disk_bytes",
    "stream_memory_bytes",
    "stream_log_waiting_bytes",
    "stream_log_retention_bytes",
    "gateway_requests_limit",
    "gateway_uploads_limit",
    "gateway_cache_memory_bytes",
    "gateway_cache_disk_bytes",
    "gateway_cache_fetch_bytes",
    "gateway_send_bytes",
)
"""The budgets of which each further warehouse gets a fraction, but at least the minimum value of the setting."""
_NAME = re.compile(rf"{NAME_PATTERN}\Z")
_OWN_SETTINGS_MAX = 64
_SEAL_CONTEXT = b"seamark warehouse credentials "
"""The text before the id of a warehouse in the context of its encrypted credentials.

Credentials can be decrypted only with the context with which they were encrypted, so not for another warehouse.
"""


def is_warehouse_name(text: str) -> bool:
    """Return whether a further warehouse can have this name."""
    return _NAME.match(text) is not None and text not in RESERVED_NAMES


def check_warehouse_name(name: str, settings: Settings) -> str:
    """Return the name if a new warehouse can have it.

    Raises:
        BadRequest: The name is malformed or reserved, or equals the prefix of the server.
    """
    if _NAME.match(name) is None:
        raise BadRequest(
            f"The warehouse name {name[:80]!r} is invalid: it has 1 to 63 characters a-z, 0-9, _ or -, and begins with "
            "a letter or a digit"
        )
    if name in RESERVED_NAMES or name == settings.prefix:
        raise BadRequest(f"The warehouse name {name!r} is reserved; choose another")
    return name


def check_settings(values: Mapping[str, Any], allowed_names: tuple[str, ...], settings: Settings) -> dict[str, Any]:
    """Return the values of a warehouse's own settings, converted to the types of the settings.

    Raises:
        BadRequest: A name is not in `allowed_names`, a value is invalid, an endpoint is not allowed, or there are too
            many settings.
    """
    if len(values) > _OWN_SETTINGS_MAX:
        raise BadRequest(f"The warehouse has {len(values)} settings; the limit is {_OWN_SETTINGS_MAX}")
    converted_settings = {}
    for name, value in values.items():
        if name not in allowed_names:
            raise BadRequest(
                f"A warehouse cannot have the setting {name[:80]!r} here; use one of {', '.join(allowed_names)}"
            )
        try:
            converted_settings[name] = convert_setting(name, value, "the request")
        except ConfigError as error:
            raise BadRequest(error.message) from None
        if name in EVENT_TARGETS:
            check_event_targets(name, converted_settings[name], settings)
        elif "http" in FIELDS[name].metadata["schemes"]:
            _check_endpoint(name, converted_settings[name], settings)
    return converted_settings


def _check_endpoint(name: str, url: str, settings: Settings) -> None:
    """Check that the operator allows an endpoint. An empty URL is always allowed if the server has no endpoint itself.

    Raises:
        BadRequest: The endpoint is not allowed.
    """
    if not url and not getattr(settings, name):
        return
    if url.rstrip("/") not in {endpoint.rstrip("/") for endpoint in settings.warehouse_endpoints}:
        raise BadRequest(
            f"{name} is {url[:200]!r}, which is not an allowed endpoint; have the operator add it to the setting "
            "warehouse_endpoints"
        )


def check_definition(settings: Settings, own_settings: Mapping[str, Any], credentials: Mapping[str, Any]) -> None:
    """Check that the own settings and the credentials of a warehouse can be used together.

    Raises:
        BadRequest: The settings and credentials contradict each other, or a setting is missing.
    """
    for endpoint, key in _ENDPOINT_KEYS.items():
        is_other_store = own_settings.get(endpoint, getattr(settings, endpoint)) != getattr(settings, endpoint)
        if is_other_store and not credentials.get(key):
            raise BadRequest(
                f"A warehouse with its own {endpoint} needs {key} in credentials, because the keys of the server are "
                "for the store of the server"
            )
    for name in _OWN_STORE_SETTINGS:
        is_other_host = own_settings.get(name, getattr(settings, name)) != getattr(settings, name)
        if is_other_host and not credentials.get("s3_secret_access_key"):
            raise BadRequest(
                f"A warehouse with its own {name} needs s3_secret_access_key in credentials, because with the keys of "
                "the server it would reach other buckets and hosts"
            )
    removes_backend = own_settings.get("s3_backend") == "" and settings.s3_backend != ""
    if removes_backend and not credentials.get("s3_secret_access_key"):
        raise BadRequest(
            "A warehouse without the s3_backend of the server needs s3_secret_access_key in credentials, because the "
            "server has no keys of an S3 store"
        )
    if own_settings.get("s3_backend") and own_settings.get("federation_uri"):
        raise BadRequest(
            "A federated warehouse cannot have its own s3_backend, because its clients get no keys of the gateway"
        )
    if not own_settings.get("federation_uri"):
        unused_names = [name for name in (*own_settings, *credentials) if name.startswith("federation_")]
        if unused_names:
            raise BadRequest(f"The warehouse has {unused_names[0]} and no federation_uri; set both or neither")
    access = own_settings.get("s3_client_access")
    if access == "gateway" and own_settings.get("federation_uri"):
        raise BadRequest(
            "s3_client_access of a federated warehouse cannot be gateway, because keys of the gateway would stay valid "
            "after the other catalog drops a table; use signing"
        )
    if access == "static" and not credentials.get("s3_secret_access_key"):
        raise BadRequest(
            "s3_client_access = static gives clients the keys of the server, which reach all warehouses; set "
            "credentials of the warehouse, or use signing"
        )
    try:
        check_consistency(make_settings(settings, _UNSAVED, own_settings, credentials))
    except ConfigError as error:
        raise BadRequest(error.message) from None


def check_services(settings: Settings, own_settings: Mapping[str, Any]) -> None:
    """Check that the server can run the table services for which a new definition of a warehouse asks.

    A stored definition is not checked, because the server can have fewer workers than before.

    Raises:
        BadRequest: The definition asks for more workers than a warehouse can have.
    """
    workers = own_settings.get("services_workers", 0)
    if workers and own_settings.get("federation_uri"):
        raise BadRequest(
            f"services_workers of a federated warehouse is {workers}, but must be 0, because the warehouse is read-only"
        )
    if workers > min(1, settings.services_workers):
        raise BadRequest(
            f"services_workers of a warehouse is {workers}, but can only be 0, or 1 if the server runs table services"
        )


_UNSAVED = StoredWarehouse("unsaved", "0" * 32, "file:///unsaved", "/unsaved", {}, None, 0, "")
"""A placeholder for a warehouse whose definition is checked before the warehouse is stored."""


def make_settings(
    settings: Settings, warehouse: StoredWarehouse, own_settings: Mapping[str, Any], credentials: Mapping[str, Any]
) -> Settings:
    """Return the settings with which the components of a warehouse are opened.

    Args:
        settings: The settings of the server.
        warehouse: The record of the warehouse, with its name, id and location.
        own_settings: The own settings of the warehouse.
        credentials: The own settings of the warehouse that are secret.
    """
    has_storage_keys = any(credentials.get(name) for name in STORAGE_CREDENTIALS)
    backend = choose_backend(settings, own_settings, has_s3_keys=bool(credentials.get("s3_secret_access_key")))
    values: dict[str, Any] = {
        "home": settings.home / "warehouses" / warehouse.id,
        "database": make_database_url(settings, warehouse.id),
        "warehouse": warehouse.location,
        "prefix": warehouse.name,
        "encryption_key_file": str(find_key_file(settings).absolute()),
        "allowed_locations": (),
        "warehouse_roots": (),
        "federation_uri": "",
        "federation_warehouse": "",
        "federation_token": "",
        "federation_credential": "",
        "federation_scope": "",
        # A warehouse has no peers, and sends events only to its own targets.
        "peer_address": "",
        "peer_listen": "",
        "stream_log": make_log_url(settings.stream_log, warehouse.id),
        "services_workers": min(1, settings.services_workers),
        "webhook_urls": (),
        "webhook_secret": "",  # With the key of the server, a warehouse could send events that look like the server's.
        "event_kafka": "",
        "event_nats": "",
        "openlineage_url": "",
        "openlineage_api_key": "",
        "parquet_key_file": "",
        "parquet_kms": "",
        "plan_disk_folder": "",
        "index_disk_folder": "",
        "gateway_cache_folder": "",
        "s3_client_access": _choose_client_access(
            settings,
            has_credentials=has_storage_keys,
            is_federated=bool(own_settings.get("federation_uri")),
            has_backend=bool(backend),
        ),
        "sql_statements_limit": max(1, settings.sql_statements_limit // settings.warehouses_limit),
        "pg_pool_max": max(2, settings.pg_pool_max // settings.warehouses_limit),
    }
    for name in _SHARED_BUDGETS:
        values[name] = max(FIELDS[name].metadata["minimum"], getattr(settings, name) // settings.warehouses_limit)
    if has_storage_keys:
        values |= dict.fromkeys(_SERVER_KEYS, "")
    if backend:
        values |= dict.fromkeys(_S3_STORE, "")
    values |= {**own_settings, **credentials, "s3_backend": backend}
    # A replica can have fewer workers than the replica that created the warehouse.
    values["services_workers"] = min(values["services_workers"], 1, settings.services_workers)
    if values["federation_uri"]:  # The tables are in the other catalog, which has its own services.
        values["services_workers"] = 0
    return dataclasses.replace(settings, **values)


def choose_backend(settings: Settings, own_settings: Mapping[str, Any], *, has_s3_keys: bool) -> str:
    """Return the setting `s3_backend` of a warehouse.

    A warehouse with its own keys of an S3 store does not use the cloud of the server.
    """
    default = "" if has_s3_keys else settings.s3_backend
    return str(own_settings.get("s3_backend", default))


def _choose_client_access(settings: Settings, *, has_credentials: bool, is_federated: bool, has_backend: bool) -> str:
    """Return the default value of `s3_client_access` of a warehouse: how its clients access objects on S3.

    The default is never `static`, with which clients would get the keys of the server.

    Args:
        settings: The settings of the server.
        has_credentials: Whether the warehouse has its own keys of a storage.
        is_federated: Whether the tables are in another catalog. Then clients get no keys of the gateway, because the
            keys would stay valid after the other catalog drops a table.
        has_backend: Whether the objects of the warehouse's `s3://` locations are in a cloud other than S3.
    """
    if settings.s3_client_access == "gateway" and not is_federated:
        return "gateway"
    if has_backend:
        # Only the gateway finds the objects of the other cloud at their `s3://` locations. If the server has such a
        # backend too, its own setting has already decided above whether clients use the gateway.
        return "gateway" if settings.gateway_port and not settings.s3_backend else "none"
    is_folder = bool(settings.s3_folder) and not has_credentials
    if is_folder or settings.s3_client_access == "none":
        return "none"
    # A warehouse with its own credentials does not use the role of the server for STS, so the server signs requests.
    return "sts" if settings.s3_client_access == "sts" and not has_credentials else "signing"


def make_log_url(server_log: str, warehouse_id: str) -> str:
    """Return the setting `stream_log` of a warehouse, whose topics are apart from those of the server.

    The name of a topic continues with `journal`, `rows` or `in` after the prefix of the server, so no topic of the
    server begins with the id of a warehouse.
    """
    return f"{server_log}.{warehouse_id}" if server_log else ""


def make_database_url(settings: Settings, warehouse_id: str) -> str:
    """Return the URL of a warehouse's database.

    The database is a file beside the SQLite database of the server, or a schema in the PostgreSQL database of the
    server.
    """
    file = find_sqlite_file(settings)
    if file is not None:
        return f"sqlite:///{quote(str(file.with_name(f'{file.stem}-{warehouse_id}.db')).lstrip('/'))}"
    parts = urlsplit(settings.make_database_url())
    query = "&".join(part for part in (parts.query, urlencode({"search_path": f"seamark_{warehouse_id}"})) if part)
    return urlunsplit(parts._replace(query=query))


def prepare_folder(location: Location, settings: Settings) -> None:
    """Create the folder of a local warehouse, or check the location of a remote warehouse without a request.

    Raises:
        BadRequest: No objects can be created at the location.
    """
    try:
        SERVER_STORAGES[location.scheme].prepare_root(location, settings)
    except (ConfigError, StorageError) as error:
        raise BadRequest(error.message.replace("--warehouse", "another location")) from None


async def seal_credentials(
    settings: Settings, clock: Clock, warehouse_id: str, credentials: Mapping[str, Any]
) -> bytes | None:
    """Return the encrypted credentials of a warehouse, or None if it has no credentials."""
    if not credentials:
        return None
    protector = _open_protector(settings, clock)
    return await protector.seal(msgspec.json.encode(credentials), _SEAL_CONTEXT + warehouse_id.encode())


async def open_credentials(settings: Settings, clock: Clock, warehouse: StoredWarehouse) -> dict[str, Any]:
    """Return the credentials of a warehouse.

    Raises:
        ConfigError: The credentials are encrypted with a key that this server does not have.
    """
    if warehouse.credentials is None:
        return {}
    protector = _open_protector(settings, clock)
    try:
        credentials_json = await protector.open(warehouse.credentials, _SEAL_CONTEXT + warehouse.id.encode())
    except WrongKey as error:
        raise ConfigError(
            f"The credentials of the warehouse {warehouse.name} are encrypted with the key {error}, which this server "
            "does not have; set them again with seamark warehouse change"
        ) from None
    return convert_json(credentials_json, dict[str, Any])


async def reencrypt_credentials(settings: Settings, clock: Clock, warehouse: StoredWarehouse) -> bytes | None:
    """Return the credentials encrypted with the current key, or None if this is not necessary.

    Raises:
        ConfigError: The credentials are encrypted with a key that this server does not have.
    """
    if warehouse.credentials is None or _open_protector(settings, clock).is_current(warehouse.credentials):
        return None
    return await seal_credentials(settings, clock, warehouse.id, await open_credentials(settings, clock, warehouse))


def _open_protector(settings: Settings, clock: Clock) -> KeyProtector:
    protector = open_protector(settings, clock, create=True)
    assert protector is not None
    return protector


async def load_settings(settings: Settings, clock: Clock, warehouse: StoredWarehouse) -> Settings:
    """Return the settings with which the components of a stored warehouse are opened.

    Raises:
        ConfigError: The credentials cannot be decrypted, or the operator no longer allows the settings.
    """
    own_settings = drop_refused_targets(warehouse.settings, settings, warehouse.name)
    try:
        own_settings = check_settings(own_settings, WAREHOUSE_SETTINGS, settings)
        credentials = await load_credentials(settings, clock, warehouse)
        check_definition(settings, own_settings, credentials)
    except BadRequest as error:
        raise ConfigError(f"The warehouse {warehouse.name} cannot be opened: {error.message}") from None
    return make_settings(settings, warehouse, own_settings, credentials)


async def load_credentials(settings: Settings, clock: Clock, warehouse: StoredWarehouse) -> dict[str, Any]:
    """Return the credentials of a warehouse, without the receivers of events that the operator no longer allows.

    Raises:
        ConfigError: The credentials cannot be decrypted.
        BadRequest: A stored credential is invalid.
    """
    credentials = await open_credentials(settings, clock, warehouse)
    return check_settings(drop_refused_targets(credentials, settings, warehouse.name), CREDENTIALS, settings)
