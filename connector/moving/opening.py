"""Opens the source of an import."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from seamark.connector.moving.hadoop_warehouse import HadoopSource
from seamark.connector.moving.rest_catalog import RestSource
from seamark.connector.moving.source import CatalogRefusal, Source

_SOURCES = {
    "thrift": ("seamark.connector.moving.hive_metastore", "HiveSource"),
    "glue": ("seamark.connector.moving.glue", "GlueSource"),
}
"""The modules and classes of sources by the scheme of their addresses."""


def open_source(address: str, properties: Mapping[str, str], connections: int, *, is_flat: bool = False) -> Source:
    """Open a catalog as the source of an import.

    Args:
        address: The URL of a REST catalog, `thrift://HOST:PORT` of a Hive metastore, `glue://REGION` of AWS Glue, or
            the folder of a Hadoop warehouse.
        properties: PyIceberg's properties for the catalog and its storage.
        connections: The maximum number of requests at the same time.
        is_flat: Whether to list only the top-level namespaces of a REST catalog.

    Raises:
        CatalogRefusal: A property is invalid, or a library is not installed.
        CatalogUnavailable: The catalog does not answer, or refuses the login.
    """
    if address.startswith(("http://", "https://")):
        return RestSource({**properties, "uri": address}, connections, is_flat=is_flat)
    for scheme, (module, name) in _SOURCES.items():
        if address.startswith(f"{scheme}://"):
            return _open_source(module, name, address, properties)
    return HadoopSource(address, properties)


def _open_source(module: str, name: str, address: str, properties: Mapping[str, str]) -> Source:
    """Import the module of a source, whose libraries no other source needs, and open the source."""
    try:
        source: Source = getattr(importlib.import_module(module), name)(address, properties)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("seamark"):
            raise
        raise CatalogRefusal(
            f"An import from {address} needs the library {error.name}: pip install 'seamark[moving]'"
        ) from None
    return source
