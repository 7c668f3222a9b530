"""What index files are asked: which of their data files may hold a row that matches. Pure.

A question is made once of a predicate, and put to index files that are here (`of`) and, range by range, to those that
are not (`cold.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from metaserver.index.bitmap import Bitmap
from metaserver.index.bloom import Bloom
from metaserver.index.hashing import Hashes, hash_halves
from metaserver.index.keys import KeyRanges, Keys
from metaserver.index.record import Found, Record

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


Question = BloomQuestion | BitmapQuestion | RecordQuestion


def files_of(found: Found, files: int) -> Flags:
    """uint8[files]: those that have a row among what was found."""
    flags = np.zeros(files, dtype=np.uint8)
    flags[found[1]] = 1
    return flags
