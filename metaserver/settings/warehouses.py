"""The settings of further warehouses, which admins create while the server runs; a part of the settings in
`settings.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from seamark.formats.storage.storages import STORAGES
from seamark.metaserver.settings.services import setting


@dataclass(frozen=True, kw_only=True)
class WarehouseSettings:
    """The settings of further warehouses."""

    warehouse_roots: tuple[str, ...] = setting(
        (),
        "URIs below which an admin can create further warehouses (`seamark warehouse create`). If it is empty, no "
        "further warehouses can be created. The server reads and writes all objects there, so name only folders and "
        "buckets that contain nothing else.",
        schemes=STORAGES,
    )
    warehouse_endpoints: tuple[str, ...] = setting(
        (),
        "URLs of the S3-compatible stores and Azure Blob services that a further warehouse can use as its own "
        "s3_endpoint or azure_endpoint. If the list is empty, further warehouses use the store of the server. An "
        "empty URL in the list allows the stores of AWS and Azure, if the server itself uses another endpoint.",
        schemes=("http", "https"),
    )
    warehouse_event_targets: tuple[str, ...] = setting(
        (),
        "URLs of the receivers of events that a further warehouse can name in webhook_urls, openlineage_url, "
        "event_kafka and event_nats, without user and password. A URL that ends with a slash allows all URLs, topics "
        "or subjects below it. If the list is empty, further warehouses send no events.",
        schemes=("http", "https", "kafka", "nats", "tls"),
    )
    warehouses_limit: int = setting(
        16,
        "Maximum number of further warehouses that an admin can create. If it is n, each of them has 1/n of the "
        "server's budgets for caches, rows of stream tables and connections to PostgreSQL (at least 2 connections). "
        "So together they use as much as the server's own warehouse.",
        minimum=1,
        maximum=256,
    )
    federation_uri: str = setting(
        "",
        "URI of an Iceberg REST catalog. A further warehouse with this setting is federated: it shows the tables of "
        "that catalog, and is read-only. warehouse_endpoints must contain the URI. The server's own warehouse cannot "
        "have this setting.",
        schemes=("http", "https"),
    )
    federation_warehouse: str = setting(
        "",
        "Name of the warehouse to use in the catalog of federation_uri. If it is empty, the catalog uses its default.",
    )
    federation_token: str = setting("", "Bearer token for the catalog of federation_uri.", secret=True)
    federation_credential: str = setting(
        "",
        "Client id and secret for the catalog of federation_uri, as ID:SECRET. The catalog exchanges them for tokens "
        "(OAuth2 client credentials).",
        secret=True,
    )
    federation_scope: str = setting(
        "",
        "OAuth2 scope that the server requests with federation_credential, such as PRINCIPAL_ROLE:ALL for Apache "
        "Polaris.",
    )
    federation_fresh_s: float = setting(
        2.0,
        "Seconds for which the server uses an answer of the catalog of federation_uri. After that, it requests the "
        "answer again, with its ETag if it has one. With 0, each request of a client causes a request to the catalog.",
        minimum=0,
        maximum=3600,
    )
    federation_timeout_s: float = setting(
        30.0,
        "Seconds after which a request that waits for the catalog of federation_uri is refused with 503.",
        minimum=0.1,
        maximum=300,
    )
    federation_read_timeout_s: float = setting(
        5.0,
        "Seconds without a byte from the catalog of federation_uri after which a request to the catalog fails with "
        "503. If the catalog then does not answer a request for /v1/config either, the server answers such requests "
        "with 503 at once, until the catalog answers again. A request of a client may need several requests to the "
        "catalog; federation_timeout_s limits their total time.",
        minimum=0.1,
        maximum=300,
    )
    federation_requests_limit: int = setting(
        64,
        "Maximum number of requests in one process that wait for the catalog of federation_uri at the same time. "
        "Further requests are refused with 503.",
        minimum=1,
        maximum=10_000,
    )
