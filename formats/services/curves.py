"""Compute the keys of grid points on a space-filling curve.

Points that are close in all attributes often have close keys.

The Hilbert curve uses Skilling's transform ("Programming the Hilbert curve", AIP Conference Proceedings 707, 2004), for
any number of dimensions. It processes one bit of all points at a time. The z-order interleaves the bits without the
transform. Consecutive points of the Hilbert curve are neighbours, so a range of keys is a connected region. The z-order
has jumps. The linear order sorts by the first attribute, and then by the second.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from seamark.formats.iceberg.metadata.clustering import CURVES, HILBERT, LINEAR, ZORDER

Points = npt.NDArray[np.uint64]


def compute_curve_keys(points: Points, bits: int, curve: str) -> npt.NDArray[np.uint8]:
    """Return the keys of points, as uint8[rows, bytes]. Keys are compared as bytes.

    Distinct points have distinct keys.

    Args:
        points: The points, as uint64[rows, attributes]. All coordinates are less than 2**bits.
        bits: The number of bits of each coordinate.
        curve: The name of the curve.

    Raises:
        ValueError: The curve is unknown.
    """
    axes = points.T.copy()
    if curve == HILBERT:
        _transpose(axes, bits)
    elif curve not in (ZORDER, LINEAR):
        raise ValueError(f"there is no curve {curve!r}; the curves are {', '.join(CURVES)}")
    shifts = np.arange(bits - 1, -1, -1, dtype=np.uint64)
    # The shape is [rows, bits, attributes], so the highest bits of all attributes come first.
    interleaved_bits = (axes.T[:, None, :] >> shifts[None, :, None]) & np.uint64(1)
    if curve == LINEAR:  # All bits of the first attribute come first.
        interleaved_bits = interleaved_bits.swapaxes(1, 2)
    flat = interleaved_bits.astype(np.uint8).reshape(len(points), bits * len(axes))
    return np.packbits(flat, axis=1)


def _transpose(axes: Points, bits: int) -> None:
    """Transform coordinates to the Hilbert index, in place.

    The bits of the index are distributed over the rows of `axes`.
    """
    first = axes[0]
    for bit in range(bits - 1, 0, -1):
        low = np.uint64((1 << bit) - 1)
        for axis in axes:
            is_inverted = (axis >> np.uint64(bit)) & np.uint64(1) != 0
            exchanged_bits = np.where(is_inverted, np.uint64(0), (first ^ axis) & low)
            first ^= np.where(is_inverted, low, exchanged_bits)
            axis ^= exchanged_bits
    for previous_axis, axis in pairwise(axes):
        axis ^= previous_axis
    gray = np.zeros_like(first)
    for bit in range(bits - 1, 0, -1):
        gray ^= np.where((axes[-1] >> np.uint64(bit)) & np.uint64(1) != 0, np.uint64((1 << bit) - 1), np.uint64(0))
    axes ^= gray
