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
        "s3_endpoint or azure_endpoint. Empty: further warehouses use the store of the server. An empty URL in the "
        "list allows the stores of AWS and Azure, if the server has its own endpoint.",
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
