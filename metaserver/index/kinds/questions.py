"""What index files are asked: which of their data files may hold a row that matches. Pure.

A question is made once of a predicate by the index kind (`kind.py`), and put to index files that are here (`of`) and,
range by range, to those that are not (`RemoteIndex.ask`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import copysign, prod
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from seamark.metaserver.iceberg.expressions.expression import Bound
from seamark.metaserver.iceberg.types.values import FLOATS
from seamark.metaserver.index.keys.keys import Key, KeyRanges, Keys, has_codes

Flags = npt.NDArray[np.uint8]

KEYS_MAX = 100_000
"""Keys that one predicate may look for by hash; longer lists prove nothing."""
COMBINATIONS_MAX = 10_000
"""Keys that equalities on the columns of one composite key may stand for."""


class Question(Protocol):
    """Immutable; of one index kind."""

    def of(self, index: Any) -> Flags:
        """uint8[files]: 1 where a file may hold such a row. `index`: a blob opened by the kind that made the question.
        ValueError where it is damaged."""
        ...


PredicateKey: TypeAlias = tuple[Bound, tuple[float, ...]]


def key_of_predicate(predicate: Bound) -> PredicateKey:
    """What is kept by predicate is kept by this: 0.0 and -0.0 are equal to Python, and what they ask is not."""
    if predicate.result not in FLOATS:
        return predicate, ()
    # Not by text, which for a hundred thousand values takes long to write, and is asked for file by file.
    return predicate, tuple(
        copysign(1.0, value) for value in predicate.values if isinstance(value, float) and not value
    )


def point_keys(asked: Sequence[KeyRanges]) -> list[Keys] | None:
    """The keys of which a matching row has one, a column for each term; of several terms all combinations. None where
    the ranges are more than single keys, or the keys too many."""
    lists: list[tuple[Key, ...]] = []
    for ranges in asked:
        if ranges.points is None or ranges.nulls or ranges.nans:  # neither null nor NaN is a key of a literal
            return None
        lists.append(ranges.points)
    if prod(map(len, lists)) > (KEYS_MAX if len(lists) == 1 else COMBINATIONS_MAX):  # a zero stands for two
        return None
    if len(lists) == 1:
        return [_literal_keys(lists[0], asked[0].kind)]
    rows = list(product(*lists))
    return [_literal_keys([row[place] for row in rows], ranges.kind) for place, ranges in enumerate(asked)]


def _literal_keys(keys: Sequence[Key], kind: str) -> Keys:
    """As if they were a column."""
    if has_codes(kind):
        return Keys(kind, len(keys), np.array(keys, dtype=np.uint64), None, None, None, None)
    spelled = [key for key in keys if isinstance(key, bytes)]
    starts = np.zeros(len(spelled) + 1, dtype=np.int64)
    np.cumsum([len(key) for key in spelled], out=starts[1:])
    return Keys(kind, len(spelled), None, starts, np.frombuffer(b"".join(spelled), dtype=np.uint8), None, None)
