"""Opens the source of an import."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from seamark.connector.moving.hadoop_warehouse import HadoopSource
from seamark.connector.moving.rest_catalog import RestSource
from seamark.connector.moving.source import Source


def open_source(address: str, properties: Mapping[str, str], connections: int, *, is_flat: bool = False) -> Source:
    """Open a catalog as the source of an import.

    Args:
        address: The URL of a REST catalog, `thrift://HOST:PORT` of a Hive metastore, or the folder of a Hadoop
            warehouse.
        properties: PyIceberg's properties for the catalog and its storage.
        connections: The maximum number of requests at the same time.
        is_flat: Whether to list only the top-level namespaces of a REST catalog.

    Raises:
        CatalogRefusal: A property is invalid.
        CatalogUnavailable: The catalog does not answer, or refuses the login.
    """
    if address.startswith(("http://", "https://")):
        return RestSource({**properties, "uri": address}, connections, is_flat=is_flat)
    if address.startswith("thrift://"):
        # The libraries of the metastore are imported only for it.
        hive_metastore = importlib.import_module("seamark.connector.moving.hive_metastore")
        source: Source = hive_metastore.HiveSource(address, properties.get("ugi", ""))
        return source
    return HadoopSource(address, properties)
