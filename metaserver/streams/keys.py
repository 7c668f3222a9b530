"""The key of a stream table: later rows replace earlier rows with the same key."""

from __future__ import annotations

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.types.values import FLOATS
from seamark.formats.runtime.errors import BadRequest

KEY = "seamark.stream.key"
"""The property with the names of the key columns. If it is absent, the identifier fields are the key."""


def key_of(metadata: TableMetadata) -> tuple[str, ...]:
    """Return the names of the key columns; empty for a table without a key.

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
