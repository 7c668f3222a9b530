"""SQL functions that predicates of Seamark's clients can compare, in addition to Iceberg's transforms.

Engines differ in the values of these functions, so no value is computed here. A predicate on a function only selects
files: by an index on the function (`formats/index/keys/functions.py`), or because the column is not null. Requests of
other clients cannot contain these functions.
"""

from __future__ import annotations

from seamark.formats.iceberg.types.types import get_base_name

LOWER, UPPER = "lower", "upper"
_SOURCES = {LOWER: "string", UPPER: "string"}
"""The type of each function's argument, which is also the type of its result."""


def is_function(transform: str) -> bool:
    return transform in _SOURCES


def accepts_values(function: str, kind: str) -> bool:
    """Return whether the function accepts values of the Iceberg type."""
    return _SOURCES.get(function) == get_base_name(kind)
