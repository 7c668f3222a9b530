"""The key of a stream table. A row replaces earlier rows with the same key."""

from __future__ import annotations

from typing import NamedTuple

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.types.values import FLOATS
from seamark.formats.index.keys.keys import get_family
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.streams.row_files import RowKey

KEY = "seamark.stream.key"
"""The table property with the names of the key columns. If it is absent, the identifier fields are the key."""


def find_key_columns(metadata: TableMetadata) -> tuple[str, ...]:
    """Return the names of the key columns, or no names for a table without a key.

    The key is in the table property `seamark.stream.key`. Without this property, the identifier fields of the schema
    are the key.

    Raises:
        BadRequest: The key is not valid.
    """
    schema = metadata.current_schema
    by_name = {field.name: field for field in schema.fields}
    text = metadata.properties.get(KEY)
    if text is None:
        by_id = {field.id: field.name for field in schema.fields}
        ids = schema.identifier_field_ids
        if any(column_id not in by_id for column_id in ids):
            raise BadRequest(
                f"An identifier field of the table is inside a struct; name the columns of the key in {KEY}, or set it "
                "to an empty text for a table without a key"
            )
        names = tuple(by_id[column_id] for column_id in ids)
    else:
        names = tuple(name.strip() for name in text.split(",")) if text.strip() else ()
        if len(set(names)) < len(names):
            raise BadRequest(f"{KEY} is {text[:200]!r}; it names a column twice")
    for name in names:
        if name not in by_name:
            raise BadRequest(f"{KEY} names the column {name[:200]!r}, which the table does not have")
        kind = by_name[name].type
        if not isinstance(kind, str) or kind in FLOATS:
            raise BadRequest(
                f"The column {name} cannot be a key of a stream table: its type is nested or floating-point"
            )
    return names


def identify_key(metadata: TableMetadata) -> RowKey | None:
    """Return the columns of the key and the families of their types, which determine the shards of rows.

    A family is the set of types whose equal values have the same hash, such as int and long.

    Returns:
        The key. It is empty for a table without a key, and None for an invalid key.
    """
    try:
        names = find_key_columns(metadata)
    except BadRequest:
        return None
    by_name = {field.name: field for field in metadata.current_schema.fields}
    return tuple((by_name[name].id, get_family(str(by_name[name].type))) for name in names)


class _AcceptedKey(NamedTuple):
    """The key in the newest metadata with which rows of a table were accepted.

    Attributes:
        location: The location of the metadata.
        updated_ms: The time of the metadata.
        key: The key (`identify_key`), or None for an invalid key.
    """

    location: str
    updated_ms: int
    key: RowKey | None


class AcceptedKeys:
    """The keys with which this process has accepted rows of each table.

    After a change of the key, an append with the earlier metadata may still be running. It must be refused after a row
    with the new key was accepted, because it could add a second row with the same key.
    """

    def __init__(self) -> None:
        self._newest: dict[str, _AcceptedKey] = {}

    def accept(self, uuid: str, location: str, metadata: TableMetadata) -> bool:
        """Remember the key of rows. Return False if a row with a different key was accepted with later metadata.

        If two metadata files have the same time, it is unknown which is later. Then the second is refused if it has a
        different key.

        Args:
            uuid: The UUID of the table.
            location: The location of the metadata.
            metadata: The metadata with which the rows are prepared for the log.
        """
        newest = self._newest.get(uuid)
        if newest is not None and newest.location == location:
            return True
        accepted_key = _AcceptedKey(location, metadata.last_updated_ms, identify_key(metadata))
        if newest is None or accepted_key.updated_ms > newest.updated_ms:
            self._newest[uuid] = accepted_key
            return True
        return accepted_key.key == newest.key

    def remember_current_key(self, uuid: str, location: str, metadata: TableMetadata) -> None:
        """Remember the key in the current metadata, even if metadata with a later time were accepted before.

        The caller has checked that these metadata are current.
        """
        self._newest[uuid] = _AcceptedKey(location, metadata.last_updated_ms, identify_key(metadata))

    def forget(self, uuid: str) -> None:
        self._newest.pop(uuid, None)
