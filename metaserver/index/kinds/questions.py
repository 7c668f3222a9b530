"""What index files are asked: which of their data files may hold a row that matches. Pure.

A question is made once of a predicate, and put to index files that are here (`of`) and, range by range, to those that
are not (`cold.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import copysign
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from metaserver.iceberg.expressions.expression import Bound
from metaserver.iceberg.types.values import FLOATS
from metaserver.index.keys.hashing import Hashes, hash_halves
from metaserver.index.keys.key_set import KeySet
from metaserver.index.keys.keys import KeyRanges, Keys
from metaserver.index.kinds.bitmap import Bitmap
from metaserver.index.kinds.bloom import Bloom
from metaserver.index.kinds.record import Found, Record

Flags = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class BloomQuestion:
    """Whether there is a key with one of these hashes (seed 0)."""

    hashes: Hashes

    def of(self, index: Bloom | Bitmap | Record) -> Flags:
        """uint8[files]: 1 where a file may hold such a row. ValueError where the index is damaged."""
        assert isinstance(index, Bloom)
        return index.probe(self.hashes)


@dataclass(frozen=True, slots=True, eq=False)
class BitmapQuestion:
    """Whether there is a key in these ranges, or null or NaN if they say so."""

    ranges: KeyRanges

    def of(self, index: Bloom | Bitmap | Record) -> Flags:
        """As of `BloomQuestion`."""
        assert isinstance(index, Bitmap)
        return index.files_with(self.ranges)


@dataclass(frozen=True, slots=True, eq=False)
class KeysQuestion:
    """Whether there is one of these keys, which are many."""

    keys: KeySet

    def of(self, index: Bloom | Bitmap | Record) -> Flags:
        """As of `BloomQuestion`."""
        assert isinstance(index, Bitmap)
        return index.files_with_keys(self.keys)


@dataclass(frozen=True, slots=True, eq=False)
class RecordQuestion:
    """Whether there is a row with one of these hashes, whose halves are given (seeds 0 and 1)."""

    high: Hashes
    low: Hashes

    @staticmethod
    def about(columns: Sequence[Keys]) -> RecordQuestion:
        """Keys in rows, one column for each of their parts."""
        return RecordQuestion(*hash_halves(columns))

    def of(self, index: Bloom | Bitmap | Record) -> Flags:
        """As of `BloomQuestion`."""
        assert isinstance(index, Record)
        return files_of(index.lookup(self.high, self.low), index.files)


Question = BloomQuestion | BitmapQuestion | KeysQuestion | RecordQuestion

PredicateKey: TypeAlias = tuple[Bound, tuple[float, ...]]


def key_of_predicate(predicate: Bound) -> PredicateKey:
    """What is kept by predicate is kept by this: 0.0 and -0.0 are equal to Python, and what they ask is not."""
    if predicate.result not in FLOATS:
        return predicate, ()
    # Not by text, which for a hundred thousand values takes long to write, and is asked for file by file.
    return predicate, tuple(
        copysign(1.0, value) for value in predicate.values if isinstance(value, float) and not value
    )


def files_of(found: Found, files: int) -> Flags:
    """uint8[files]: those that have a row among what was found."""
    flags = np.zeros(files, dtype=np.uint8)
    flags[found[1]] = 1
    return flags
