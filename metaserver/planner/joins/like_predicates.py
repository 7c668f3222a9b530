"""LIKE predicates on the rows of a dimension table.

Iceberg expressions support only LIKE patterns that are prefixes. A dimension's columns are in memory, so its rows are
filtered by whole patterns. The predicate may also convert the column to lower or upper case. The rule of
`dimension_columns.py` applies: a row is excluded only if it matches for no client. Engines convert non-ASCII characters
in different ways, so a predicate that converts the case keeps rows with these characters. Rows with truncated keys are
also kept. The functions have no side effects.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from seamark.formats.index.keys.keys import Mask
from seamark.formats.index.keys.ranks import CLIPPED_BYTES, Distinct
from seamark.formats.protocol.wire import PATTERN_MAX
from seamark.metaserver.planner.joins.dimension_columns import Columns, DimensionColumn, intersect_masks


class LikePredicate(msgspec.Struct, frozen=True, rename="kebab", omit_defaults=True, forbid_unknown_fields=True):
    """The predicate `column LIKE pattern ESCAPE escape`, or NOT LIKE.

    A null value satisfies neither LIKE nor NOT LIKE.
    """

    column: str
    pattern: Annotated[str, msgspec.Meta(max_length=PATTERN_MAX)]
    escape: Annotated[str, msgspec.Meta(min_length=1, max_length=1)] | None = None
    function: Literal["lower", "upper"] | None = None
    """The function that is applied to the column before it is compared with the pattern."""
    negated: bool = False

    @property
    def regex(self) -> str:
        """The pattern as a regular expression for RE2.

        Raises:
            ValueError: The escape character precedes a character other than itself, % and _.
        """
        parts, characters = [], iter(self.pattern)
        for character in characters:
            if character == self.escape:
                character = next(characters, "")
                if character not in ("%", "_", self.escape):
                    raise ValueError(f"the escape character {self.escape!r} must precede %, _ or itself")
                parts.append(re.escape(character))
            else:
                parts.append({"%": ".*", "_": "."}.get(character) or re.escape(character))
        return rf"(?s)\A{''.join(parts)}\z"


class BoundLike(NamedTuple):
    """A LIKE predicate with the column that it is bound to."""

    column: DimensionColumn
    predicate: LikePredicate


AnyLike = tuple[BoundLike, ...]
"""A disjunction of LIKE predicates."""


def list_like_columns(likes: Sequence[AnyLike]) -> list[DimensionColumn]:
    """Return the columns that the LIKE predicates compare."""
    return [like.column for alternatives in likes for like in alternatives]


def match_rows_by_like(likes: Sequence[AnyLike], columns: Columns) -> Mask | None:
    """Return whether each row may match all of `likes`, bool[rows]. None means all rows.

    Each item of `likes` is a list of alternatives. A row matches the item if it matches one of them.
    """
    mask: Mask | None = None
    for alternatives in likes:
        is_match = np.logical_or.reduce(
            [columns[like.column].mark_matching_rows(partial(_match_keys, like.predicate)) for like in alternatives]
        )
        mask = intersect_masks(mask, is_match)
    return mask


def _match_keys(predicate: LikePredicate, keys: Distinct) -> Mask:
    """Return whether each key may match the predicate, bool[keys].

    A truncated key may always match, because its end is unknown. With `lower` or `upper`, so may a key with characters
    outside of ASCII, because engines convert them in different ways.
    """
    assert keys.starts is not None
    assert keys.heap is not None
    if not len(keys):
        return np.zeros(0, dtype=np.bool_)
    starts = np.ascontiguousarray(keys.starts, dtype=np.int64)
    heap = np.ascontiguousarray(keys.heap)
    texts = pa.LargeStringArray.from_buffers(len(keys), pa.py_buffer(starts), pa.py_buffer(heap))
    is_unknown: Mask = np.diff(starts) >= CLIPPED_BYTES
    if predicate.function is not None:
        is_unknown |= ~pc.string_is_ascii(texts).to_numpy(zero_copy_only=False)
        texts = (pc.ascii_lower if predicate.function == "lower" else pc.ascii_upper)(texts)
    try:
        matches: Mask = pc.match_substring_regex(texts, pattern=predicate.regex).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid:  # The pattern needs more memory than RE2 allows.
        return np.ones(len(keys), dtype=np.bool_)
    is_match: Mask = (matches != predicate.negated) | is_unknown
    return is_match
