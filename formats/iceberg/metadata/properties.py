"""The table and view properties that the catalog reads, and Java's checks of them when a table is created."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.protocol.wire import fold_name
from seamark.formats.runtime.decoding import convert_json
from seamark.formats.runtime.errors import BadRequest
from seamark.formats.runtime.memoization import memoize
from seamark.formats.storage.storages import STORAGES

FORMAT_VERSION = "format-version"
TARGET_FILE_BYTES = "write.target-file-size-bytes"
TARGET_FILE_BYTES_DEFAULT = 512 << 20
PREVIOUS_VERSIONS_MAX = "write.metadata.previous-versions-max"
PREVIOUS_VERSIONS_MAX_DEFAULT = 100
METADATA_PATH = "write.metadata.path"
PARQUET_COMPRESSION = "write.parquet.compression-codec"
PARQUET_COMPRESSION_NEW_TABLES = "zstd"

PROPERTY_NAME_CHARACTERS_MAX = 2_000

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
"""The names under which engines show metadata as properties. They are never stored as properties."""

_CLIENT_FAMILIES = frozenset(
    (
        *("client", "aws", "glue", "dynamodb", "lakeformation", "kms", "sts"),
        *("gcs", "gcp", "gs", "adls", "azure", "abfs", "abfss", "wasb", "wasbs", "oss", "aliyun", "dlf", "cos", "obs"),
        *("adlfs", "ecs", "dell", "hf", "hdfs", "fs", "hadoop", "dfs", "hive", "jdbc", "bigquery"),
        *("rest", "http", "https", "http-client", "proxy", "header", "headers", "ssl", "tls", "signer", "io"),
        *("auth", "oauth", "oauth2", "sigv4", "token", "credential", "credentials", "storage-credentials"),
    )
)
"""The first segments (up to a dot) of property names that select a client's hosts, credentials, signers and key stores.

The families of the storages are added to them.
"""
_CLIENT_PREFIXES = (
    *("rest-", "oauth2-", "oauth-", "token-", "signer-", "encryption.kms"),
    *("parquet.crypto.", "parquet.encryption.kms.", "orc.key.provider", "orc.kms"),
)
_CLIENT_KEYS = frozenset(
    ("uri", "url", "warehouse", "prefix", "scope", "audience", "resource", "botocore_session", "catalog-backend")
)
_CODE_SUFFIXES = ("-impl", ".impl", "_impl", "-factory", ".factory", "-class-name")
_COLUMN_PROPERTY = re.compile(r"write\..*\.column\..*", re.DOTALL)

_COMMIT_PROPERTIES = (
    "commit.retry.num-retries",
    "commit.retry.min-wait-ms",
    "commit.retry.max-wait-ms",
    "commit.retry.total-timeout-ms",
)

_METRICS_COLUMN = "write.metadata.metrics.column."
_ENCRYPTION_PROPERTIES = frozenset({"encryption.key-id", "encryption.data-key-length"})
_INTEGER = re.compile(r"[+-]?\d{1,19}")
_INTEGER_CHARACTERS_MAX = 20
_COUNT_DIGITS_MAX = 19
_ENCRYPTION_MIN_FORMAT_VERSION = 3
_SHOWN_NAMES_MAX = 5


@memoize(8192)
def configures_client(name: str) -> bool:
    """Return whether a property with this name configures a client's catalog.

    Such a property selects the host to which a client connects, the receiver of its secrets, or code that it loads.
    Case and surrounding spaces are ignored, and full-width letters count as normal letters.

    In PyIceberg, table properties override catalog properties when it opens files (`_load_file_io` merges catalog <
    table < `config`). PyIceberg and Java load the location provider that a table names. The prefixes are those of
    PyIceberg's `io` and `catalog.rest`, and of Java's `*Properties` classes. All names with a prefix are refused,
    because later releases add names.
    """
    key = fold_name(name)
    if _COLUMN_PROPERTY.fullmatch(key):
        return False  # The rest of this name is the name of a column.
    family = key.partition(".")[0].strip()
    return (
        key in _CLIENT_KEYS
        or family in _CLIENT_FAMILIES
        or any(family in rules.property_families for rules in STORAGES.values())
        or key.startswith(_CLIENT_PREFIXES)
        or key.endswith(_CODE_SUFFIXES)
    )


def check_client_properties(properties: Mapping[str, str], subject: str) -> None:
    """Check that properties do not configure a client's catalog, and that their names are not too long.

    Args:
        properties: The properties.
        subject: The owner of the properties, for errors.

    Raises:
        BadRequest: A property is refused. The message names it.
    """
    longest = max(properties, key=len, default="")
    if len(longest) > PROPERTY_NAME_CHARACTERS_MAX:
        raise BadRequest(
            f"{subject} cannot have a property whose name has {len(longest):,} characters ({longest[:40]!r}…); the "
            f"limit is {PROPERTY_NAME_CHARACTERS_MAX:,} characters"
        )
    refused_names = sorted(key for key in properties if configures_client(key))
    if refused_names:
        raise BadRequest(
            f"{subject} cannot have {', '.join(repr(key[:100]) for key in refused_names[:_SHOWN_NAMES_MAX])}: "
            "such a property decides to which host a client connects, where its secrets go or which code it loads. "
            "Set it in the configuration of the client's catalog instead"
        )


def remove_client_properties(properties: Mapping[str, str]) -> dict[str, str]:
    """Return the properties without those that configure a client's catalog.

    Older versions or other catalogs may have stored such properties. Clients must not receive them.
    """
    return {key: value for key, value in properties.items() if not configures_client(key)}


def drop_reserved(properties: Mapping[str, str]) -> dict[str, str]:
    """Return the properties without those that are never stored."""
    return {key: value for key, value in properties.items() if key not in RESERVED}


def parse_count(values: Mapping[str, str], name: str, default: int) -> int:
    """Return the number with the key `name` from a snapshot's summary or from properties.

    If the value is absent, or is not a number of up to 19 digits, the result is the default.
    """
    text = values.get(name, "")
    return int(text) if text.isdecimal() and len(text) <= _COUNT_DIGITS_MAX else default


def parse_int(properties: Mapping[str, str], name: str, default: int) -> int:
    """Return the property as a 32-bit integer.

    Raises:
        BadRequest: The value is not a 32-bit integer.
    """
    return _read_integer(properties, name, default, 32)


def parse_long(properties: Mapping[str, str], name: str, default: int) -> int:
    """Return the property as a 64-bit integer.

    Raises:
        BadRequest: The value is not a 64-bit integer.
    """
    return _read_integer(properties, name, default, 64)


def _read_integer(properties: Mapping[str, str], name: str, default: int, bits: int) -> int:
    value = properties.get(name)
    if value is None:
        return default
    limit = 1 << (bits - 1)
    if len(value) > _INTEGER_CHARACTERS_MAX or _INTEGER.fullmatch(value) is None or not -limit <= int(value) < limit:
        raise BadRequest(f"Property {name} must have an integer value, but is set to {value[:100]!r}")
    return int(value)


def parse_bool(properties: Mapping[str, str], name: str, default: bool) -> bool:
    """Return the property as a boolean, parsed as in Java.

    The text "true" in upper or lower case is true. All other values are false.
    """
    value = properties.get(name)
    return default if value is None else value.lower() == "true"


def parse_names(
    properties: Mapping[str, str], name: str, subject: str, *, minimum: int = 0, maximum: int = 1 << 31
) -> tuple[str, ...]:
    """Return the names in the property, separated by commas or as a JSON list, or () if it is not set.

    Args:
        properties: The properties.
        name: The name of the property.
        subject: The text that describes the names in the error: "it must name …".
        minimum: The minimum number of names.
        maximum: The maximum number of names.

    Raises:
        BadRequest: The value is not a list of different names, or has fewer than `minimum` or more than `maximum`
            names.
    """
    text = properties.get(name, "").strip()
    if not text:
        return ()
    try:
        names = convert_json(text, tuple[str, ...]) if text.startswith("[") else tuple(map(str.strip, text.split(",")))
    except msgspec.MsgspecError:
        names = ("",)
    if not minimum <= len(names) <= maximum or len(set(names)) < len(names) or not all(names):
        raise BadRequest(
            f"{name} is {text[:200]!r}; it must name {subject}, separated by commas, or be a JSON list of names"
        )
    return names


def get_metadata_folder(location: str, properties: Mapping[str, str]) -> str:
    """Return the folder of the metadata files of a table or view."""
    return properties.get(METADATA_PATH, f"{location.rstrip('/')}/metadata").rstrip("/")


def check_new_table(properties: Mapping[str, str], schema: Schema, format_version: int) -> None:
    """Check the properties of a new table.

    The properties of existing tables are not checked, so that these tables stay usable.

    Raises:
        BadRequest: A property is invalid.
    """
    for name in properties:
        if name.startswith(_METRICS_COLUMN):
            column = name.removeprefix(_METRICS_COLUMN)
            if schema.find_column_by_name(column) is None:
                raise BadRequest(f"Invalid metrics config, could not find column {column} from table prop {name}")
    for name in _COMMIT_PROPERTIES:
        if parse_int(properties, name, 0) < 0:
            raise BadRequest(f"Table property {name} must have non negative integer value")
    if format_version < _ENCRYPTION_MIN_FORMAT_VERSION and (
        encryption_properties := sorted(_ENCRYPTION_PROPERTIES & properties.keys())
    ):
        raise BadRequest(f"Invalid properties for v{format_version}: {encryption_properties}")
