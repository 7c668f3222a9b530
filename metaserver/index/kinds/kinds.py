"""The kinds of indexes that have files, by name: how a blob of each is opened, written and merged. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from metaserver.index.kinds import bitmap, bloom, record
from metaserver.index.kinds.bitmap import Bitmap
from metaserver.index.kinds.bloom import Bloom
from metaserver.index.kinds.record import Record


class Kind(NamedTuple):
    open: Callable[[memoryview], Bloom | Bitmap | Record]
    """Of a blob, which is kept alive. ValueError for one that is damaged."""
    encode: Callable[[Sequence[Any]], Iterable[Any]]
    """The buffers of a blob, of what `build` of the same kind made of each data file, in this order."""
    merge: Callable[[Sequence[Any]], Iterable[Any]]
    """The same of (opened blob, bool[files] of those that are kept) each."""


KINDS = {
    "bloom": Kind(Bloom, bloom.encode, bloom.merge),
    "bitmap": Kind(Bitmap, bitmap.encode, bitmap.merge),
    "record": Kind(Record, record.encode, record.merge),
}
