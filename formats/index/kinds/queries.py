"""Queries of index files, which select the data files that may contain a matching row.

The index kind creates a query from a predicate once (`kind.py`). `mark_files` answers it from a local index file, and
`RemoteIndex.probe` from a remote one. This module has no side effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import copysign, prod
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from seamark.formats.iceberg.expressions.expression import Bound
from seamark.formats.iceberg.types.values import FLOATS
from seamark.formats.index.keys.keys import Key, KeyRanges, Keys, has_codes

Flags = npt.NDArray[np.uint8]

KEYS_MAX = 100_000
"""The maximum number of keys of a predicate that are looked up by hash. A longer list would not prune."""
COMBINATIONS_MAX = 10_000
"""The maximum number of combinations of the equalities on the columns of a composite key."""


class IndexQuery(Protocol):
    """A query of the index files of a kind. It is immutable."""

    def mark_files(self, index: Any) -> Flags:
        """Return 1 for each file that may contain a matching row, otherwise 0, as uint8[files].

        Args:
            index: The opened content of an index file, from the index kind that has created this query.

        Raises:
            ValueError: The blob is damaged.
        """
        ...


PredicateKey: TypeAlias = tuple[Bound, tuple[float, ...]]


def make_predicate_key(predicate: Bound) -> PredicateKey:
    """Return the cache key of a predicate.

    The key distinguishes 0.0 and -0.0, which are equal in Python but match different rows.
    """
    if predicate.result not in FLOATS:
        return predicate, ()
    # The text of the predicate is not used, because creating it takes long for 100,000 values, and this runs for every
    # file.
    return predicate, tuple(
        copysign(1.0, value) for value in predicate.values if isinstance(value, float) and not value
    )


def list_point_keys(ranges_of_terms: Sequence[KeyRanges]) -> list[Keys] | None:
    """Return the keys that a matching row can have, as a column for each term, or None if they cannot be listed.

    For several terms, the columns have all combinations of their keys. The keys cannot be listed if a range contains
    many keys, if null or NaN also matches, or if there are too many keys or combinations.

    Args:
        ranges_of_terms: The matching ranges of each indexed term.
    """
    keys_of_terms: list[tuple[Key, ...]] = []
    for ranges in ranges_of_terms:
        if ranges.points is None or ranges.nulls or ranges.nans:  # A query has no keys for null and NaN.
            return None
        keys_of_terms.append(ranges.points)
    combinations_max = KEYS_MAX if len(keys_of_terms) == 1 else COMBINATIONS_MAX
    if prod(map(len, keys_of_terms)) > combinations_max:  # Not the number of literals: 0.0 has two keys.
        return None
    if len(keys_of_terms) == 1:
        return [_encode_literal_keys(keys_of_terms[0], ranges_of_terms[0].kind)]
    rows = list(product(*keys_of_terms))
    return [
        _encode_literal_keys([row[term] for row in rows], ranges.kind) for term, ranges in enumerate(ranges_of_terms)
    ]


def _encode_literal_keys(keys: Sequence[Key], kind: str) -> Keys:
    """Return the keys of literals in the form of a column."""
    if has_codes(kind):
        codes = np.array(keys, dtype=np.uint64)
        return Keys(kind, len(keys), codes, starts=None, heap=None, valid=None, nan=None)
    byte_keys = [key for key in keys if isinstance(key, bytes)]
    starts = np.zeros(len(byte_keys) + 1, dtype=np.int64)
    np.cumsum([len(key) for key in byte_keys], out=starts[1:])
    heap = np.frombuffer(b"".join(byte_keys), dtype=np.uint8)
    return Keys(kind, len(byte_keys), codes=None, starts=starts, heap=heap, valid=None, nan=None)
