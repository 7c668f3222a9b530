"""Attributes of dimension tables, as dimensions of a cube of facts or as terms of other indexes of facts.

    lookup[shop.suppliers@3051729675574597004:1:4:string](supplier_id)

is the value of field 4 in the row of `shop.suppliers` whose field 1 equals `supplier_id`. The dimension table is read
at the snapshot 3051729675574597004, which never changes, so the value is a function of the key. If there is no such
row, the value is null. The field 0, of type `boolean`, states whether there is such a row. This module has no side
effects.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from seamark.formats.runtime.errors import BadRequest

PREFIX = "lookup["
HAS_PARTNER = 0
"""The id of the attribute that states whether the dimension table has a row with the key."""
KEY_TYPES = frozenset({"int", "long", "string", "date"})
ATTRIBUTE_TYPES = frozenset({"boolean", "int", "long", "string", "date"})
_LOOKUP = re.compile(
    r"lookup\[(?P<table>[^\s\[\]()`,;=:@]+)@(?P<snapshot>\d{1,19}):(?P<key>\d{1,10}):(?P<attribute>\d{1,10})"
    r":(?P<type>[a-z]+)\]"
)
_SHOWN_MAX = 200
_PINNED_SNAPSHOT = re.compile(r"@\d{1,19}:")
_LOOKUP_TEXT = re.compile(r"lookup\[[^\[\]()]*\]")


@dataclass(frozen=True, slots=True)
class DimensionSource:
    """A dimension table at a snapshot, with its key.

    Attributes:
        table: The levels of the namespace, and the name of the table.
        snapshot_id: The snapshot.
        key_id: The field id of the key.
    """

    table: tuple[str, ...]
    snapshot_id: int
    key_id: int


@dataclass(frozen=True, slots=True)
class Lookup:
    """An attribute of a dimension table: for each key in the facts, the value in the row with this key.

    Attributes:
        source: The dimension table.
        attribute_id: The field id of the attribute. `HAS_PARTNER` (0) means a boolean instead: whether the
            dimension table has a row with the key.
        type: The Iceberg type of the attribute.
    """

    source: DimensionSource
    attribute_id: int
    type: str

    @property
    def transform(self) -> str:
        """The text that a term of an index definition has in its field `transform`: `lookup[…]`."""
        source = self.source
        table = ".".join(source.table)
        return f"{PREFIX}{table}@{source.snapshot_id}:{source.key_id}:{self.attribute_id}:{self.type}]"


def parse_lookup(transform: str) -> Lookup | None:
    """Parse a transform of the form `lookup[…]`: an attribute of a dimension table, which is found by a key.

    Return None for any other transform, such as `bucket[16]`.

    Raises:
        BadRequest: The transform begins like an attribute, but is not one.
    """
    return _parse_lookup(transform) if transform.startswith(PREFIX) else None


@lru_cache(maxsize=1024)  # Each request reads the definitions of a table, each of which can have many attributes.
def _parse_lookup(transform: str) -> Lookup:
    match = _LOOKUP.fullmatch(transform)
    table = () if match is None else tuple(match["table"].split("."))
    # A table is in a namespace, so its name has at least two parts.
    if match is None or len(table) < 2 or not all(table):
        raise BadRequest(
            f"{transform[:_SHOWN_MAX]!r} is not an attribute of a dimension table: write "
            "lookup[schema.table@snapshot:key field:attribute field:type]"
        )
    lookup = Lookup(
        DimensionSource(table, int(match["snapshot"]), int(match["key"])), int(match["attribute"]), match["type"]
    )
    if lookup.type not in ATTRIBUTE_TYPES or (lookup.attribute_id == HAS_PARTNER and lookup.type != "boolean"):
        types = ", ".join(sorted(ATTRIBUTE_TYPES))
        raise BadRequest(f"An attribute of the type {lookup.type} cannot be looked up: the types are {types}")
    if lookup.transform != transform:
        raise BadRequest(f"{transform[:_SHOWN_MAX]!r} must be written as {lookup.transform[:_SHOWN_MAX]!r}")
    return lookup


def remove_snapshots(definition_id: str) -> str:
    """Return the id of a definition without the snapshots of dimension tables.

    If the results for two definitions are equal, the definitions differ at most by these snapshots. Other texts of an
    id, such as the names in a name mapping, stay.
    """
    decoded = msgspec.json.decode(definition_id)
    for term in decoded["terms"]:
        if term["transform"].startswith(PREFIX):
            term["transform"] = _PINNED_SNAPSHOT.sub("@:", term["transform"], count=1)
    return msgspec.json.encode(decoded).decode()


def list_tables(text: str) -> frozenset[tuple[str, ...]]:
    """Return the dimension tables of all attributes in a text, such as a term or a definition."""
    tables = set[tuple[str, ...]]()
    for transform in _LOOKUP_TEXT.findall(re.sub(r"\s", "", text)):  # Terms may contain spaces.
        with suppress(BadRequest):  # Other texts in brackets are not attributes.
            lookup = parse_lookup(transform)
            if lookup is not None:
                tables.add(lookup.source.table)
    return frozenset(tables)
