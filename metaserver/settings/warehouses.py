"""The settings of further warehouses, which admins create while the server runs. They are a part of `settings.py`."""

from __future__ import annotations

from dataclasses import dataclass

from seamark.formats.storage.storages import STORAGES
from seamark.metaserver.settings.services import setting


@dataclass(frozen=True, kw_only=True)
class WarehouseSettings:
    warehouse_roots: tuple[str, ...] = setting(
        (),
        "URIs below which an admin can create further warehouses (`seamark warehouse create`). Empty: none. The server "
        "reads and writes all objects there, so name folders and buckets that contain nothing else.",
        schemes=STORAGES,
    )
    warehouse_endpoints: tuple[str, ...] = setting(
        (),
        "URLs of S3-compatible stores, and of Azure's Blob service, that a further warehouse can name as its own "
        "s3_endpoint or azure_endpoint. If the list is empty, further warehouses use the store of the server. An empty "
        "URL in the list allows the stores of AWS and Azure, if the server has its own endpoint.",
        schemes=("http", "https"),
    )
    warehouses_limit: int = setting(
        16,
        "Further warehouses that an admin can create. Each has this fraction of the server's budgets for caches, rows "
        "of stream tables and connections to PostgreSQL (at least 2), so that together they use as much as the "
        "server's own warehouse.",
        minimum=1,
        maximum=256,
    )
    federation_uri: str = setting(
        "",
        "URI of an Iceberg REST catalog. A further warehouse with this setting is federated: it shows the tables of "
        "that catalog, and is read-only. The URI must be in warehouse_endpoints. The server's own warehouse cannot "
        "have it.",
        schemes=("http", "https"),
    )
    federation_warehouse: str = setting(
        "", "The warehouse of the catalog in federation_uri. If it is empty, the catalog chooses its default."
    )
    federation_token: str = setting("", "Bearer token for the catalog in federation_uri.", secret=True)
    federation_credential: str = setting(
        "",
        "ID:SECRET for the catalog in federation_uri, which exchanges it for tokens (OAuth2 client credentials).",
        secret=True,
    )
    federation_scope: str = setting("", "Scope of these tokens, such as PRINCIPAL_ROLE:ALL for Apache Polaris.")
    federation_fresh_s: float = setting(
        2.0,
        "Seconds for which an answer of the catalog in federation_uri is used. Then the server requests it again, with "
        "the ETag of the answer if there is one. With 0, the server asks for each request.",
        minimum=0,
        maximum=3600,
    )
    federation_timeout_s: float = setting(
        30.0,
        "Seconds after which a request that waits for the catalog in federation_uri is refused with 503.",
        minimum=0.1,
        maximum=300,
    )
    federation_read_timeout_s: float = setting(
        15.0,
        "Seconds without a byte from the catalog in federation_uri after which a request to it fails with 503. A "
        "request of a client may need several such requests, and federation_timeout_s limits them together.",
        minimum=0.1,
        maximum=300,
    )
    federation_requests_limit: int = setting(
        64,
        "Maximum number of requests in one process that wait for the catalog in federation_uri at the same time. "
        "Further requests are refused with 503.",
        minimum=1,
        maximum=10_000,
    )
