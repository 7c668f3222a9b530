"""Table and view properties that the catalog itself reads, and the checks Java makes when a table is created."""

from __future__ import annotations

import re
from collections.abc import Mapping

from metaserver.errors import BadRequest
from metaserver.iceberg.schema import Schema

FORMAT_VERSION = "format-version"
PREVIOUS_VERSIONS_MAX = "write.metadata.previous-versions-max"
PREVIOUS_VERSIONS_MAX_DEFAULT = 100
METADATA_PATH = "write.metadata.path"
PARQUET_COMPRESSION = "write.parquet.compression-codec"
PARQUET_COMPRESSION_NEW_TABLES = "zstd"

RESERVED = frozenset(
    {
        FORMAT_VERSION,
        "uuid",
        "snapshot-count",
        "current-snapshot-id",
        "current-snapshot-summary",
        "current-snapshot-timestamp-ms",
        "current-schema",
        "default-partition-spec",
        "default-sort-order",
    }
)
"""Names under which engines show metadata as properties; never stored as properties."""

_COMMIT = (
    "commit.retry.num-retries",
    "commit.retry.min-wait-ms",
    "commit.retry.max-wait-ms",
    "commit.retry.total-timeout-ms",
)
_METRICS_COLUMN = "write.metadata.metrics.column."
_ENCRYPTION = frozenset({"encryption.key-id", "encryption.data-key-length"})
_INTEGER = re.compile(r"[+-]?\d{1,10}")


def unreserved(properties: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in properties.items() if key not in RESERVED}


def as_int(properties: Mapping[str, str], name: str, default: int) -> int:
    """The property as a 32-bit integer. Raises BadRequest when it is set to something else."""
    value = properties.get(name)
    if value is None:
        return default
    if _INTEGER.fullmatch(value) is None or not -(2**31) <= int(value) < 2**31:
        raise BadRequest(f"Property {name} must have an integer value, but is set to {value!r}")
    return int(value)


def as_bool(properties: Mapping[str, str], name: str, default: bool) -> bool:
    """Java's reading: "true" in any case is true, everything else is false."""
    value = properties.get(name)
    return default if value is None else value.lower() == "true"


def metadata_folder(location: str, properties: Mapping[str, str]) -> str:
    """Where the metadata files of a table or view lie."""
    return properties.get(METADATA_PATH, f"{location.rstrip('/')}/metadata").rstrip("/")


def check_new_table(properties: Mapping[str, str], schema: Schema, format_version: int) -> None:
    """What is only checked at creation, so that no existing table breaks. Raises BadRequest."""
    for name in properties:
        if name.startswith(_METRICS_COLUMN):
            column = name.removeprefix(_METRICS_COLUMN)
            if schema.column_named(column) is None:
                raise BadRequest(f"Invalid metrics config, could not find column {column} from table prop {name}")
    for name in _COMMIT:
        if as_int(properties, name, 0) < 0:
            raise BadRequest(f"Table property {name} must have non negative integer value")
    if format_version < 3 and (found := sorted(_ENCRYPTION & properties.keys())):
        raise BadRequest(f"Invalid properties for v{format_version}: {found}")
