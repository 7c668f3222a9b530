"""Points of a grid as keys along a space-filling curve: what is near in all attributes is near in the keys' order.

Hilbert's curve by Skilling's transform ("Programming the Hilbert curve", AIP Conference Proceedings 707, 2004), for
any number of dimensions, a bit of all points at a time; the z-order is the same without it: the bits of all attributes
in turn. Each step of Hilbert's curve leads to a neighbour, so that a stretch of it is one region; the z-order jumps.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

HILBERT, ZORDER = "hilbert", "zorder"
CURVES = (HILBERT, ZORDER)

Points = npt.NDArray[np.uint64]


def curve_keys(points: Points, bits: int, curve: str) -> npt.NDArray[np.uint8]:
    """uint8[rows, bytes], which compare as bytes do, of uint64[rows, attributes] below 2**bits. Distinct points have
    distinct keys."""
    axes = points.T.copy()
    if curve == HILBERT:
        _transpose(axes, bits)
    elif curve != ZORDER:
        raise ValueError(f"there is no curve {curve!r}: there are {', '.join(CURVES)}")
    places = np.arange(bits - 1, -1, -1, dtype=np.uint64)
    # [rows, bits, attributes]: of all attributes the highest bit, then of all the next.
    interleaved = (axes.T[:, None, :] >> places[None, :, None]) & np.uint64(1)
    flat = interleaved.astype(np.uint8).reshape(len(points), bits * len(axes))
    return np.packbits(flat, axis=1)


def _transpose(axes: Points, bits: int) -> None:
    """Coordinates into the curve's index, whose bits are spread over the rows of `axes`; in place."""
    first = axes[0]
    for bit in range(bits - 1, 0, -1):
        low = np.uint64((1 << bit) - 1)
        for axis in axes:
            inverted = (axis >> np.uint64(bit)) & np.uint64(1) != 0
            exchanged = np.where(inverted, np.uint64(0), (first ^ axis) & low)
            first ^= np.where(inverted, low, exchanged)
            axis ^= exchanged
    for before, axis in pairwise(axes):
        axis ^= before
    gray = np.zeros_like(first)
    for bit in range(bits - 1, 0, -1):
        gray ^= np.where((axes[-1] >> np.uint64(bit)) & np.uint64(1) != 0, np.uint64((1 << bit) - 1), np.uint64(0))
    axes ^= gray
