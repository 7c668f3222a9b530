"""The encrypted columns that a table declares, and a check that no feature publishes their values.

The server has no keys. It learns only from properties which columns are encrypted: Seamark's own property, and the
properties that configure parquet-java's encryption. Jobs have the keys, and examine the files
(`connector/parquet/copy/protection.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from seamark.formats.iceberg.metadata import clustering, statistics
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.properties import parse_bool, parse_names
from seamark.formats.runtime.errors import BadRequest

ENCRYPTED_COLUMNS = "seamark.encrypted-columns"
"""The property that lists the names of encrypted columns, separated by commas."""
_COLUMN_KEYS, _UNIFORM_KEY = "parquet.encryption.column.keys", "parquet.encryption.uniform.key"
_COMPLETE = "parquet.encryption.complete.columns"
Use = tuple[str, int]
"""A description of a feature that publishes values of a column, and the id of the column."""


def find_encrypted_ids(metadata: TableMetadata) -> frozenset[int]:
    """Return the ids of the declared encrypted columns, of their nested columns, and of the columns around them."""
    properties, columns = metadata.properties, metadata.current_schema.index.by_id
    # With one key for all columns, or if the files are declared as completely encrypted, all columns are secret.
    if properties.get(_UNIFORM_KEY) or parse_bool(properties, _COMPLETE, False):
        return frozenset(columns)
    names = {*_read_declared(metadata), *_parse_key_columns(properties.get(_COLUMN_KEYS, ""))}
    declared_ids = {column_id for column_id, column in columns.items() if column.name in names}
    if not declared_ids:
        return frozenset()
    encrypted_ids = set(declared_ids)
    for column_id in columns:
        ancestors = list(_list_ancestors(metadata, column_id))
        if declared_ids.intersection(ancestors):
            encrypted_ids.add(column_id)
        if column_id in declared_ids:
            encrypted_ids.update(ancestors)
    return frozenset(encrypted_ids)


def _read_declared(metadata: TableMetadata) -> tuple[str, ...]:
    try:
        return parse_names(metadata.properties, ENCRYPTED_COLUMNS, "different columns")
    except BadRequest:
        return ()


def _parse_key_columns(text: str) -> Iterator[str]:
    """Yield the column names in a text such as `key1: a, b.c; key2: d`."""
    for part in text.split(";"):
        yield from (name.strip() for name in part.partition(":")[2].split(",") if name.strip())


def _list_ancestors(metadata: TableMetadata, column_id: int) -> Iterator[int]:
    columns = metadata.current_schema.index.by_id
    parent = columns[column_id].parent
    while parent is not None:
        yield parent
        parent = columns[parent].parent


def check_encrypted_columns(
    metadata: TableMetadata,
    base: TableMetadata | None,
    list_indexed_ids: Callable[[TableMetadata], Iterable[int]] = lambda _: (),
) -> None:
    """Check that a commit publishes no values of encrypted columns.

    The function does not check uses that the table had before the commit, which jobs refuse.

    Args:
        metadata: The table's metadata after the commit.
        base: The metadata before the commit. None for a new table.
        list_indexed_ids: Returns the ids of the columns on which the table has indexes.

    Raises:
        BadRequest: The commit adds a use that publishes the values or the order of an encrypted column, or it
            declares a column as encrypted that has such a use or does not exist.
    """
    properties = metadata.properties
    if not (ENCRYPTED_COLUMNS in properties or _COLUMN_KEYS in properties or _UNIFORM_KEY in properties):
        return
    if base is None or properties.get(ENCRYPTED_COLUMNS) != base.properties.get(ENCRYPTED_COLUMNS):
        names = {column.name for column in metadata.current_schema.index.by_id.values()}
        for name in parse_names(properties, ENCRYPTED_COLUMNS, "different columns"):
            if name not in names:
                raise BadRequest(f"{ENCRYPTED_COLUMNS} names {name[:200]!r}, but the table has no such column")
    former_uses = set() if base is None else set(_list_uses(base, list_indexed_ids(base)))
    for use, column_id in sorted(set(_list_uses(metadata, list_indexed_ids(metadata))) - former_uses):
        column = metadata.current_schema.index.by_id[column_id].name
        raise BadRequest(
            f"The column {column} is encrypted, and {use} would publish its values or their order; choose another "
            "column"
        )


def _list_uses(metadata: TableMetadata, indexed_ids: Iterable[int]) -> Iterator[Use]:
    """Yield the uses that publish values of encrypted columns."""
    secret_ids = find_encrypted_ids(metadata)
    if secret_ids:
        yield from (
            (use, column_id) for use, column_id in _list_all_uses(metadata, indexed_ids) if column_id in secret_ids
        )


def _list_all_uses(metadata: TableMetadata, indexed_ids: Iterable[int]) -> Iterator[Use]:
    """Yield the uses of columns that store their values unencrypted in other files than data files.

    `indexed_ids` contains the ids of indexed columns.
    """
    yield from (("the partition spec", column_id) for column_id in metadata.default_spec.partition_source_ids)
    order = metadata.sort_order(metadata.default_sort_order_id)
    if order is not None:
        yield from (("the sort order", column_id) for column_id in order.column_ids)
    yield from (("an index", column_id) for column_id in indexed_ids)
    for use, names in (
        (clustering.COLUMNS, _list_clustering_columns(metadata)),
        (statistics.COLUMNS, _read_names(metadata, statistics.COLUMNS)),
    ):
        for name in names:
            column = metadata.current_schema.find_column_by_name(name)
            if column is not None:
                yield use, column.id


def _list_clustering_columns(metadata: TableMetadata) -> Iterator[str]:
    """Yield the names of the clustering columns, and of the join columns by which a table is clustered."""
    yield from _read_names(metadata, clustering.COLUMNS)
    try:
        joins = clustering.parse_joins(metadata.properties)
    except BadRequest:
        return
    yield from (name for join in joins.values() for name in join.on)


def _read_names(metadata: TableMetadata, name: str) -> tuple[str, ...]:
    try:
        return parse_names(metadata.properties, name, "columns")
    except BadRequest:
        return ()
