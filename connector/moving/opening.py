"""Opens the source of an import."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from seamark.connector.moving.rest_catalog import RestSource
from seamark.connector.moving.source import CatalogRefusal, Source
from seamark.formats.runtime.lazy_module import LazyModule

if TYPE_CHECKING:
    from seamark.connector.moving import glue, hadoop_warehouse, hive_metastore
else:  # No other source needs their libraries, whose import takes up to a second.
    glue = LazyModule("seamark.connector.moving.glue")
    hadoop_warehouse = LazyModule("seamark.connector.moving.hadoop_warehouse")
    hive_metastore = LazyModule("seamark.connector.moving.hive_metastore")


def open_source(address: str, properties: Mapping[str, str], connections: int, *, is_flat: bool = False) -> Source:
    """Open a catalog as the source of an import.

    The libraries for Hive and Glue are imported when they are used, because an installation may not have them.

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
    try:
        if address.startswith("thrift://"):
            return hive_metastore.HiveSource(address, properties)
        if address.startswith("glue://"):
            return glue.GlueSource(address, properties)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("seamark"):
            raise
        raise CatalogRefusal(
            f"An import from {address} needs the library {error.name}: pip install 'seamark[moving]'"
        ) from None
    return hadoop_warehouse.HadoopSource(address, properties)
