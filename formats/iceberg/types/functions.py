"""SQL functions that predicates of Seamark's clients may compare, in addition to Iceberg's transforms.

Engines differ about the values of these functions, so no value is computed here. A predicate on a
function only selects files: by an index on the function (`formats/index/keys/functions.py`), or because
the column is not null. Requests of other clients cannot contain these functions.
"""

from __future__ import annotations

from seamark.formats.iceberg.types.types import get_base_name

LOWER, UPPER = "lower", "upper"
_SOURCES = {LOWER: "string", UPPER: "string"}
"""For each function, the type of its column and of its values."""


def is_function(transform: str) -> bool:
    return transform in _SOURCES


def takes(function: str, kind: str) -> bool:
    """Return whether the function takes values of the Iceberg type."""
    return _SOURCES.get(function) == get_base_name(kind)
