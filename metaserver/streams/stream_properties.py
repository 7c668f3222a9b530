"""Reads the properties of a stream table: whether rows can be appended, its number of shards, and its flush interval.

The functions are pure.
"""

from __future__ import annotations

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.properties import parse_bool, parse_int
from seamark.formats.protocol.wire import FRESH_FOLDER, STREAM_ENABLED
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.catalog.values import LoadedTable

ENABLED, SHARDS = STREAM_ENABLED, "seamark.stream.shards"
FLUSH_INTERVAL = "seamark.stream.flush-interval-ms"
FLUSH_INTERVAL_MS_MIN = 100
SHARDS_MAX = 64
"""The maximum number of shards of a table."""
_FORMAT_VERSION_MIN = 2
"""The minimum format version of a stream table."""
_INTERVAL_DIGITS_MAX = 9
"""The maximum number of digits of a valid flush interval: about eleven days."""


def read_shard_count(loaded_table: LoadedTable) -> int:
    """Return the number of shards of a table.

    The number is fixed when the first row is appended, because the key of a row determines its shard. Before that, it
    is the number in the table's properties.
    """
    assert loaded_table.entry is not None
    shards = parse_int(loaded_table.metadata.properties, SHARDS, 1)
    return len(loaded_table.entry.parse_flushed_offsets()) or min(max(1, shards), SHARDS_MAX)


def is_stream_table(metadata: TableMetadata) -> bool:
    """Return whether the table property that enables the stream is true."""
    return parse_bool(metadata.properties, ENABLED, False)


def check_stream_table(metadata: TableMetadata, subject: str) -> None:
    """Check that rows can be appended to the table.

    Raises:
        BadRequest: Rows cannot be appended. The message contains the reason.
    """
    if not is_stream_table(metadata):
        raise BadRequest(f"{subject} is not a stream table; set its property {ENABLED} to true")
    if metadata.format_version < _FORMAT_VERSION_MIN:
        raise BadRequest(
            f"{subject} has format version {metadata.format_version}; a stream table needs version 2 or 3. Upgrade it"
        )
    # A missing property is valid, so its default is the minimum.
    if not parse_int(metadata.properties, FLUSH_INTERVAL, FLUSH_INTERVAL_MS_MIN) >= FLUSH_INTERVAL_MS_MIN:
        interval = metadata.properties[FLUSH_INTERVAL]
        raise BadRequest(
            f"{subject}: {FLUSH_INTERVAL} is {interval!r}; it has to be at least {FLUSH_INTERVAL_MS_MIN} ms"
        )
    if not 1 <= parse_int(metadata.properties, SHARDS, 1) <= SHARDS_MAX:
        raise BadRequest(
            f"{subject}: {SHARDS} is {metadata.properties[SHARDS]!r}; it is a number from 1 to {SHARDS_MAX}"
        )


def read_interval_ms(metadata: TableMetadata) -> int | None:
    """Return the flush interval in the table's properties, or None if there is no valid interval."""
    text = metadata.properties.get(FLUSH_INTERVAL, "")
    return max(FLUSH_INTERVAL_MS_MIN, int(text)) if text.isdecimal() and len(text) <= _INTERVAL_DIGITS_MAX else None


def make_fresh_folder_location(metadata: TableMetadata) -> str:
    """Return the location of the folder for files and snapshots with rows that no commit has added to the table yet."""
    return f"{metadata.location.rstrip('/')}/{FRESH_FOLDER}"
