"""Opens the catalog from which an import reads."""

from __future__ import annotations

from collections.abc import Mapping

from seamark.connector.moving.hadoop_warehouse import HadoopSource
from seamark.connector.moving.rest_catalog import RestSource
from seamark.connector.moving.source import Source


def open_source(address: str, properties: Mapping[str, str], connections: int, *, is_flat: bool = False) -> Source:
    """Open a catalog by its address.

    Args:
        address: The URL of a REST catalog, or the folder of a Hadoop warehouse.
        properties: The properties of PyIceberg for the catalog and its storage.
        connections: The maximum number of requests at the same time.
        is_flat: Whether to list only namespaces of one level of a REST catalog.

    Raises:
        CatalogRefusal: A property is invalid.
        CatalogUnavailable: The catalog does not answer, or refuses the login.
    """
    if address.startswith(("http://", "https://")):
        return RestSource({**properties, "uri": address}, connections, is_flat=is_flat)
    return HadoopSource(address, properties)
