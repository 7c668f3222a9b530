"""Theta sketches of DataSketches: the number of distinct values of a column, in a few kilobytes.

A sketch contains the smallest 4096 hashes of the values. `theta` is the fraction of the hash range that these hashes
cover, so the number of values is the number of hashes divided by `theta`. The relative error is about 1.6 % (one
standard deviation, 1 / sqrt(4096)). With at most 4096 values, the number is exact.

Iceberg defines the blob type apache-datasketches-theta-v1 ("Puffin spec") with the default seed, and values as in
"Binary single-value serialization". The bytes are a compact, ordered sketch of serial version 3 (DataSketches,
PreambleUtil).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from seamark.formats.index.kernels import _murmur
from seamark.formats.runtime.errors import Corrupt

Hashes = npt.NDArray[np.uint64]

SEED = 9001
NOMINAL_ENTRIES = 4096
"""The maximum number of hashes of a sketch. It is the default of DataSketches, Spark and Trino."""
HASHES_MAX = 1 << 20
"""The maximum number of hashes that are read from another writer's sketch."""
_THETA_OF_ALL = (1 << 63) - 1
"""The value of `theta` of a sketch that contains all hashes."""
_SEED_HASH = 0x93CC
"""The hash of the default seed, which a sketch contains."""
_VERSION, _FAMILY = 3, 3
_READ_ONLY, _EMPTY, _COMPACT, _ORDERED = 2, 4, 8, 16
"""Flags in the preamble."""
_LONGS_OF_SINGLE, _LONGS_WITHOUT_THETA, _LONGS_WITH_THETA = 1, 2, 3
"""The number of 64-bit words of the preamble of a single hash, and of several hashes without and with `theta`."""
_THETA_OFFSET = 16
_HEAD, _COUNT = struct.Struct("<BBBBBBH"), struct.Struct("<II")
_NO_HASHES: Hashes = np.zeros(0, dtype=np.uint64)
_BUFFERED_HASHES_MAX = 8 * NOMINAL_ENTRIES
"""The number of hashes that are collected before they are reduced.

After the first reduction, most of the later hashes are above `theta` and are not collected.
"""


def hash_bytes(heap: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64]) -> Hashes:
    """Return the hashes of rows of bytes. Empty rows are omitted, as in DataSketches."""
    return _murmur.hash_spans(heap, starts, SEED, 64)[np.diff(starts) > 0] >> np.uint64(1)  # Hashes have 63 bits.


def hash_fixed(heap: npt.NDArray[np.uint8], width: int) -> Hashes:
    """Return the hashes of rows of `width` bytes each."""
    return _murmur.hash_fixed(heap, width, SEED, 64) >> np.uint64(1)  # Hashes of DataSketches have 63 bits.


@dataclass(frozen=True)
class ThetaSketch:
    """A theta sketch.

    Attributes:
        theta: The upper limit of the hashes.
        hashes: The hashes, ascending and distinct, above 0 and below `theta`.
    """

    theta: int = _THETA_OF_ALL
    hashes: Hashes = field(default_factory=lambda: _NO_HASHES)

    @property
    def estimate(self) -> float:
        return len(self.hashes) * (_THETA_OF_ALL / self.theta)

    @staticmethod
    def union(sketches: Iterable[ThetaSketch]) -> ThetaSketch:
        inputs = list(sketches)
        theta = min((sketch.theta for sketch in inputs), default=_THETA_OF_ALL)
        return _keep_smallest(theta, [sketch.hashes for sketch in inputs])

    def encode(self) -> bytes:
        count, flags = len(self.hashes), _READ_ONLY | _COMPACT | _ORDERED
        if self.theta == _THETA_OF_ALL and count == 0:
            return _HEAD.pack(_LONGS_OF_SINGLE, _VERSION, _FAMILY, 0, 0, flags | _EMPTY, _SEED_HASH)
        if self.theta == _THETA_OF_ALL and count == 1:
            return _HEAD.pack(_LONGS_OF_SINGLE, _VERSION, _FAMILY, 0, 0, flags, _SEED_HASH) + self.hashes.tobytes()
        longs = _LONGS_WITHOUT_THETA if self.theta == _THETA_OF_ALL else _LONGS_WITH_THETA
        head = _HEAD.pack(longs, _VERSION, _FAMILY, 0, 0, flags, _SEED_HASH) + _COUNT.pack(count, 0)
        theta_bytes = b"" if longs == _LONGS_WITHOUT_THETA else struct.pack("<Q", self.theta)
        return head + theta_bytes + self.hashes.astype("<u8").tobytes()

    @staticmethod
    def decode(data: bytes | memoryview) -> ThetaSketch:
        """Decode a compact theta sketch of any writer, in the format of Apache DataSketches.

        If it has more hashes than NOMINAL_ENTRIES, only the smallest are kept. Without a stated count, the sketch has
        one hash. Without a stated `theta`, the sketch contains the hashes of all values.

        Raises:
            Corrupt: The bytes are not a compact theta sketch.
        """
        try:
            longs, version, family, _, _, flags, seed_hash = _HEAD.unpack_from(data)
            if (version, family) != (_VERSION, _FAMILY) or not flags & _COMPACT:
                raise Corrupt(f"a sketch of version {version} and family {family} is not a compact theta sketch")
            if flags & _EMPTY:
                return ThetaSketch()
            if seed_hash != _SEED_HASH:
                raise Corrupt("the seed of a theta sketch differs from Iceberg's seed")
            if longs not in (_LONGS_OF_SINGLE, _LONGS_WITHOUT_THETA, _LONGS_WITH_THETA):
                raise Corrupt(f"a theta sketch has a preamble of {longs} words")
            count, theta = 1, _THETA_OF_ALL
            if longs != _LONGS_OF_SINGLE:
                count, _ = _COUNT.unpack_from(data, _HEAD.size)
            if longs == _LONGS_WITH_THETA:
                (theta,) = struct.unpack_from("<Q", data, _THETA_OFFSET)
            if count > HASHES_MAX or len(data) != 8 * (longs + count):
                raise Corrupt(f"a theta sketch of {len(data):,} bytes states {count:,} hashes, which do not fit")
        except struct.error as error:
            raise Corrupt(f"a theta sketch is too short: {error}") from None
        hashes = np.frombuffer(data, "<u8", count, 8 * longs)
        if not 0 < theta <= _THETA_OF_ALL or (count and not 0 < int(hashes.min()) <= int(hashes.max()) < theta):
            raise Corrupt("theta or a hash of a theta sketch is outside its range")
        return _keep_smallest(theta, [hashes])


class SketchBuilder:
    """A builder of a sketch, which collects hashes in limited memory."""

    def __init__(self) -> None:
        self._sketch = ThetaSketch()
        self._waiting: list[Hashes] = []
        self._count = 0

    def add(self, hashes: Hashes) -> None:
        hashes_below_theta = hashes[hashes < self._sketch.theta] if self._sketch.theta < _THETA_OF_ALL else hashes
        self._waiting.append(hashes_below_theta)
        self._count += len(hashes_below_theta)
        if self._count >= _BUFFERED_HASHES_MAX:
            self._reduce()

    def _reduce(self) -> None:
        self._sketch = _keep_smallest(self._sketch.theta, [self._sketch.hashes, *self._waiting])
        self._waiting, self._count = [], 0

    def build(self) -> ThetaSketch:
        self._reduce()
        return self._sketch


def _keep_smallest(theta: int, parts: list[Hashes]) -> ThetaSketch:
    """Return a sketch of the smallest hashes below `theta` in all parts.

    If there are more hashes than NOMINAL_ENTRIES, the first hash that is not kept becomes the new `theta`, because the
    sketch has all hashes below it. The hash 0 is omitted: DataSketches uses it for empty slots.
    """
    hashes = np.unique(np.concatenate([part for part in parts if len(part)] or [_NO_HASHES])).astype(np.uint64)
    hashes = hashes[(hashes > 0) & (hashes < theta)]
    if len(hashes) > NOMINAL_ENTRIES:
        theta = int(hashes[NOMINAL_ENTRIES])
        hashes = hashes[:NOMINAL_ENTRIES]
    return ThetaSketch(theta, hashes)
