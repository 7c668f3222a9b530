"""Reads dimension tables, and looks up their attributes for the keys of facts (`formats/index/keys/lookups.py`)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import AccessDenied, InvalidRequest, NoSuchResource
from seamark.connector.client.values import CURRENT, At
from seamark.connector.read.read_plan import ReadPlan
from seamark.connector.read.scans import TaskReader
from seamark.connector.read.tables import OpenTable, open_table, plan
from seamark.formats.iceberg.expressions.arrow import to_row_type
from seamark.formats.iceberg.expressions.expression import TRUE
from seamark.formats.iceberg.files.parquet import Unreadable
from seamark.formats.iceberg.types.schema import Field
from seamark.formats.index.keys.lookups import (
    ATTRIBUTE_TYPES,
    HAS_PARTNER,
    KEY_TYPES,
    DimensionSource,
    Lookup,
    parse_lookup,
)
from seamark.formats.index.keys.terms import Term, format_term

DIMENSION_ROWS_MAX = 20_000_000
"""The maximum number of rows of a dimension table whose attributes a cube uses."""
DIMENSION_BYTES_MAX = 256 << 20
"""The maximum number of bytes in memory of the keys and attributes of all dimension tables of a cube."""
_TABLE_NUMBERS_MAX = 1_000_000
_TABLE_NUMBERS_PER_KEY = 4
"""The maximum size of an array of all numbers from the first to the last key: absolute, and for each key.
In a larger range of numbers, keys are found with a hash table.
"""
_VIA = re.compile(
    r"\s*(?P<table>\S+)\.(?P<attribute>[^\s.]+)\s+via\s+(?P<key>\S+)\s*=\s*(?P<partner>\S+)\s*", re.IGNORECASE
)

Dimensions = Mapping[DimensionSource, pa.Table]
"""The rows of dimension tables.

The values of the column `key` are distinct. The other columns are attributes, as dictionary arrays, and their names are
their field ids.
"""
NO_DIMENSIONS: Dimensions = {}
CACHED_BYTES_MAX = 64 << 20
"""The maximum number of bytes of the dimension tables that are cached for the next builds of a client."""


class _CachedDimension(NamedTuple):
    """The rows of a dimension table at one snapshot, with the types of its key and of its attributes."""

    key_type: str
    attribute_types: Mapping[int, str]
    table: pa.Table


_CACHED_DIMENSIONS: WeakKeyDictionary[SeamarkClient, dict[DimensionSource, _CachedDimension]] = WeakKeyDictionary()
"""The dimension tables that builds of a client have read, by snapshot. A snapshot never changes.

The server checks the caller's right to read a dimension table at the start of each build.
"""


class DimensionRefused(InvalidRequest):
    """Raised if a cube cannot use a dimension table.

    The message may describe the data of the dimension table, which readers of the facts may not be allowed to see. So
    it is not stored on the timeline of the facts.
    """


def pin_attributes(client: SeamarkClient, columns: Sequence[str], *, add_partners: bool = True) -> list[str]:
    """Return the dimensions of a cube, with attributes of dimension tables in their canonical form.

    An attribute is written as `shop.suppliers.region via supplier_id = id`: `supplier_id` is a column of the indexed
    table, and `id` is the key of the dimension table `shop.suppliers`. The current snapshot of the dimension table
    becomes part of the text.

    Args:
        client: The client.
        columns: The dimensions as the user has written them. Columns that are no attributes are returned unchanged.
        add_partners: Whether to add a further attribute for each key, which states whether the dimension table has a
            row with the key. Only cubes need it.

    Raises:
        InvalidRequest: A dimension table has no such column, no snapshot, or the type of a column is not supported, or
            the attribute has the field id `HAS_PARTNER`.
        NoSuchResource: A dimension table does not exist.
    """
    terms: dict[str, None] = {}
    tables_by_name: dict[str, OpenTable] = {}
    for text in columns:
        match = _VIA.fullmatch(text)
        if match is None:
            terms[text] = None
            continue
        name = match["table"]
        if name not in tables_by_name:
            tables_by_name[name] = open_table(client, tuple(name.split(".")), CURRENT)
        table = tables_by_name[name]
        if table.snapshot_id is None:
            raise InvalidRequest(f"The dimension table {name} has no snapshot: append its rows first")
        key = _find_field(table, match["partner"], KEY_TYPES)
        attribute = _find_field(table, match["attribute"], ATTRIBUTE_TYPES)
        if attribute.id == HAS_PARTNER:
            raise InvalidRequest(
                f"{match['attribute'][:100]} of {name} has the field id {HAS_PARTNER}, which states in indexes that a "
                "key has a partner: add a column with the same values, and use that column"
            )
        source = DimensionSource(tuple(table.name), table.snapshot_id, key.id)
        lookups = [Lookup(source, attribute.id, str(attribute.type))]
        if add_partners:
            lookups.append(Lookup(source, HAS_PARTNER, "boolean"))
        for lookup in lookups:
            terms[format_term(lookup.transform, match["key"])] = None
    return list(terms)


def find_current_terms(client: SeamarkClient, terms: Sequence[Term]) -> list[Term] | None:
    """Return the terms with the current snapshots of their dimension tables.

    Returns:
        None if all snapshots are current, if a table is not visible to the caller or has no snapshot, or if a key or an
        attribute has another type or no longer exists.

    Raises:
        ClientError: A dimension table temporarily cannot be loaded.
    """
    current_terms = []
    tables_by_name: dict[tuple[str, ...], OpenTable] = {}
    for term in terms:
        lookup = parse_lookup(term.transform)
        if lookup is None:
            current_terms.append(term)
            continue
        source = lookup.source
        try:
            table = tables_by_name.get(source.table) or open_table(client, source.table, CURRENT)
        except (InvalidRequest, NoSuchResource, AccessDenied):
            return None
        tables_by_name[source.table] = table
        types_by_id = {field.id: field.type for field in table.schema.fields}
        has_attribute = lookup.attribute_id == HAS_PARTNER or types_by_id.get(lookup.attribute_id) == lookup.type
        if table.snapshot_id is None or types_by_id.get(source.key_id) != term.source or not has_attribute:
            return None
        current_lookup = replace(lookup, source=replace(source, snapshot_id=table.snapshot_id))
        current_terms.append(replace(term, transform=current_lookup.transform))
    return None if current_terms == list(terms) else current_terms


def find_attribute_name(column: str) -> str | None:
    """Return the name of the attribute in a text such as `shop.suppliers.region via supplier_id = id`.

    Returns:
        None if the text is not an attribute.
    """
    match = _VIA.fullmatch(column)
    return None if match is None else match["attribute"]


def _find_field(table: OpenTable, name: str, types: frozenset[str]) -> Field:
    field = next((field for field in table.schema.fields if field.name.lower() == name.lower()), None)
    if field is None or field.type not in types:
        kind = "no such column" if field is None else f"the column has the type {field.type}"
        raise InvalidRequest(f"{'.'.join(table.name)}.{name[:100]}: {kind}; the types are {', '.join(sorted(types))}")
    return field


def read_dimensions(client: SeamarkClient, terms: Iterable[Term], bytes_max: int | None = None) -> Dimensions:
    """Read the dimension tables whose attributes the terms use, at the snapshots of the terms.

    Args:
        client: The client of the catalog.
        terms: The terms of an index, or of several.
        bytes_max: The maximum number of bytes of the keys and attributes in memory, or None for `DIMENSION_BYTES_MAX`.

    Raises:
        DimensionRefused: A dimension table or its snapshot does not exist, a column has another type, a key has several
            rows, or the tables are too large or cannot be read.
    """
    key_types, attributes_by_source = _list_attributes(terms)
    dimensions: dict[DimensionSource, pa.Table] = {}
    for source, attributes in attributes_by_source.items():
        left_bytes = (DIMENSION_BYTES_MAX if bytes_max is None else bytes_max) - sum(
            table.nbytes for table in dimensions.values()
        )
        name = ".".join(source.table)
        try:
            dimensions[source] = _read_or_reuse_dimension(client, source, key_types[source], attributes, left_bytes)
        except NoSuchResource:  # The facts exist, so callers must not take this for a dropped table of facts.
            raise DimensionRefused(f"The dimension table {name} does not exist") from None
        except InvalidRequest as error:
            raise DimensionRefused(error.message) from error
        except (OSError, Unreadable) as error:
            raise DimensionRefused(f"The dimension table {name} cannot be read: {error}") from error
    return dimensions


def are_dimensions_cached(client: SeamarkClient, terms: Iterable[Term]) -> bool:
    """Return whether `read_dimensions` needs no request, because earlier calls of the client have read the tables."""
    key_types, attributes_by_source = _list_attributes(terms)
    cached_dimensions = _CACHED_DIMENSIONS.get(client, {})
    return all(
        (cached_dimension := cached_dimensions.get(source)) is not None
        and cached_dimension.key_type == key_types[source]
        and attributes.items() <= cached_dimension.attribute_types.items()
        for source, attributes in attributes_by_source.items()
    )


def _list_attributes(
    terms: Iterable[Term],
) -> tuple[dict[DimensionSource, str], dict[DimensionSource, dict[int, str]]]:
    """Return the type of the key, and the types of the used attributes by field id, of each dimension table.

    `HAS_PARTNER` is left out: it states whether the table has a row with the key, and so is no column of the table.
    """
    attributes_by_source: defaultdict[DimensionSource, dict[int, str]] = defaultdict(dict)
    key_types: dict[DimensionSource, str] = {}
    for term in terms:
        lookup = parse_lookup(term.transform)
        if lookup is not None:
            key_types[lookup.source] = term.source  # The type of the indexed table's column, which contains keys.
            attributes = attributes_by_source[lookup.source]
            if lookup.attribute_id != HAS_PARTNER:
                attributes[lookup.attribute_id] = lookup.type
    return key_types, attributes_by_source


def _read_or_reuse_dimension(
    client: SeamarkClient, source: DimensionSource, key_type: str, attributes: Mapping[int, str], bytes_max: int
) -> pa.Table:
    """Return the key and the attributes of a dimension table, which an earlier call of the client may have read.

    If the earlier call has read other attributes, all of them are read together, so that the builds of all indexes of a
    table of facts read each dimension table a few times at most.

    Raises:
        InvalidRequest: The table cannot be used, or is too large.
    """
    cached_dimensions = _CACHED_DIMENSIONS.setdefault(client, {})
    cached_dimension = cached_dimensions.get(source)
    names = ["key", *map(str, attributes)]
    attribute_types = {**({} if cached_dimension is None else cached_dimension.attribute_types), **attributes}
    if (
        cached_dimension is None
        or cached_dimension.key_type != key_type
        or cached_dimension.attribute_types != attribute_types
    ):
        try:
            table = _read_dimension(client, source, key_type, attribute_types, bytes_max)
        except InvalidRequest:
            if attribute_types == attributes:
                raise
            attribute_types = {**attributes}  # Together, the attributes may be too large.
            table = _read_dimension(client, source, key_type, attribute_types, bytes_max)
        if table.nbytes + sum(cached.table.nbytes for cached in cached_dimensions.values()) > CACHED_BYTES_MAX:
            cached_dimensions.clear()
        if table.nbytes <= CACHED_BYTES_MAX:
            cached_dimensions[source] = _CachedDimension(key_type, attribute_types, table)
        return table.select(names)
    table = cached_dimension.table.select(names)
    if table.nbytes > bytes_max:
        raise _make_size_error(source)
    return table


def _make_size_error(source: DimensionSource) -> InvalidRequest:
    return InvalidRequest(
        f"The keys and attributes of the dimension tables, up to {'.'.join(source.table)}, have more than "
        f"{DIMENSION_BYTES_MAX:,} bytes in memory, which is the limit of a cube: use fewer attributes"
    )


def _read_dimension(
    client: SeamarkClient, source: DimensionSource, key_type: str, attributes: Mapping[int, str], bytes_max: int
) -> pa.Table:
    """Read the key and the attributes of a dimension table.

    Raises:
        InvalidRequest: A column is missing or has another type, a key has several rows, or the table has more
            than `DIMENSION_ROWS_MAX` rows or `bytes_max` bytes.
    """
    name = ".".join(source.table)
    source_table = open_table(client, source.table, At(snapshot_id=source.snapshot_id))
    fields = {field.id: field for field in source_table.schema.fields}
    types = {source.key_id: key_type, **attributes}
    for field_id, kind in types.items():
        if field_id not in fields or fields[field_id].type != kind:
            raise InvalidRequest(
                f"{name} has no column with the field id {field_id} and the type {kind} at this snapshot"
            )
    tasks = list(plan(client, source_table))
    rows = sum(task.records for task in tasks)
    if rows > DIMENSION_ROWS_MAX:
        raise InvalidRequest(
            f"{name} has {rows:,} rows; a cube uses dimension tables of {DIMENSION_ROWS_MAX:,} rows at most"
        )
    names = [fields[field_id].name for field_id in types]
    read_plan = ReadPlan(source_table.metadata, source_table.schema, tuple(names), TRUE)
    batches: list[pa.RecordBatch] = []
    size_bytes = 0
    for batch in TaskReader(read_plan, source_table.storage).read_all(tasks):
        size_bytes += batch.nbytes
        if size_bytes > bytes_max:
            raise _make_size_error(source)
        batches.append(batch)
    dimension_table = pa.Table.from_batches(batches, read_plan.arrow)
    columns = {
        str(field_id): dimension_table[fields[field_id].name].cast(to_row_type(kind))
        for field_id, kind in types.items()
    }
    # The table is sent to the workers of a build, so it has the key a second time only if the key is an attribute.
    table = pa.table(
        {"key": columns[str(source.key_id)], **{str(field_id): columns[str(field_id)] for field_id in attributes}}
    )
    table = table.filter(pc.is_valid(table["key"])).combine_chunks()
    if pc.count_distinct(table["key"]).as_py() != table.num_rows:
        raise InvalidRequest(
            f"The column {fields[source.key_id].name} of {name} is not a key: a value has several rows"
        )
    encoded_attributes = {str(field_id): _encode_attribute(table[str(field_id)]) for field_id in attributes}
    return pa.table({"key": table["key"], **encoded_attributes})


def _encode_attribute(values: pa.ChunkedArray) -> pa.DictionaryArray:
    """Return the values as a dictionary array with codes of the narrowest integer type.

    Groups are found faster with narrow codes.
    """
    encoded_values = values.combine_chunks().dictionary_encode()
    codes = encoded_values.indices.cast(_choose_code_type(len(encoded_values.dictionary)))
    return pa.DictionaryArray.from_arrays(codes, encoded_values.dictionary)


def look_up_attributes(
    terms: Iterable[Term], columns: Mapping[int, pa.ChunkedArray], dimensions: Dimensions
) -> dict[Term, pa.ChunkedArray]:
    """Return the values of each term that is an attribute of a dimension table, for the rows of a data file.

    The attribute `HAS_PARTNER` is true for a row whose key is in the dimension table.

    Values of the dimension table are returned as dictionary arrays, because a group is found faster by codes than by
    texts.

    Args:
        terms: The terms of an index. Terms that are no attributes are ignored.
        columns: The columns of the data file by field id.
        dimensions: The rows of the dimension tables.

    Raises:
        ValueError: A dimension table has not been read.
    """
    attributes: dict[Term, pa.ChunkedArray] = {}
    positions: dict[tuple[DimensionSource, int], pa.ChunkedArray] = {}
    for term in terms:
        lookup = parse_lookup(term.transform)
        if lookup is None:
            continue
        table = dimensions.get(lookup.source)
        if table is None:
            name = ".".join(lookup.source.table)
            raise ValueError(f"the dimension table {name} has not been read; a later index build adds this data file")
        join_key = (lookup.source, term.column_id)
        if join_key not in positions:
            keys = columns[term.column_id].cast(to_row_type(term.source))
            positions[join_key] = find_places(keys, table["key"].combine_chunks())
        if lookup.attribute_id == HAS_PARTNER:
            attributes[term] = pc.is_valid(positions[join_key])
        else:
            encoded_values = table[str(lookup.attribute_id)].combine_chunks()
            chunks = [
                pa.DictionaryArray.from_arrays(encoded_values.indices.take(chunk), encoded_values.dictionary)
                for chunk in positions[join_key].chunks
            ]
            attributes[term] = pa.chunked_array(chunks, encoded_values.type)
    return attributes


def find_places(keys: pa.ChunkedArray, distinct: pa.Array) -> pa.ChunkedArray:
    """Return the position of each key among distinct keys, or null for a key that is not among them.

    Keys of a dimension table are mostly consecutive numbers. An array of all numbers finds them faster than a hash
    table does.

    Args:
        keys: The keys of facts.
        distinct: The keys of the dimension table, without null.
    """
    if not pa.types.is_integer(distinct.type) or not len(distinct):
        return pc.index_in(keys, value_set=distinct)
    limits = pc.min_max(distinct).as_py()
    smallest, largest = limits["min"], limits["max"]
    if largest - smallest >= max(_TABLE_NUMBERS_MAX, _TABLE_NUMBERS_PER_KEY * len(distinct)):
        return pc.index_in(keys, value_set=distinct)
    positions = np.full(largest - smallest + 1, -1, np.int32)
    positions[distinct.to_numpy().astype(np.int64) - smallest] = np.arange(len(distinct), dtype=np.int32)
    chunks = []
    for chunk in keys.chunks:
        numbers = chunk.fill_null(smallest).to_numpy(zero_copy_only=False)
        is_known = (numbers >= smallest) & (numbers <= largest)
        key_places = positions[np.where(is_known, numbers, smallest).astype(np.int64) - smallest]
        is_absent = ~is_known | (key_places < 0)
        if chunk.null_count:
            is_absent |= chunk.is_null().to_numpy(zero_copy_only=False)
        chunks.append(pa.array(key_places, mask=is_absent))
    return pa.chunked_array(chunks, pa.int32())


def _choose_code_type(count: int) -> pa.DataType:
    """Return the smallest type of codes for this number of values."""
    return next(kind for kind in (pa.int8(), pa.int16(), pa.int32()) if count <= 1 << (kind.bit_width - 1))
