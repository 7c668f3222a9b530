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
FILE_SIZE_SPREAD_FRACTION = 0.28
"""The maximum deviation of a file in a layer from the target size, as a fraction of the target size.

It is large enough that files of about the target size can end at a border between large cells, although the sizes are
estimated from a sample.
"""


def compute_curve_keys(points: Points, bits: int, curve: str) -> npt.NDArray[np.uint8]:
    """Return the keys of points, as uint8[rows, bytes]. The order of the keys, as bytes, is the order along the curve.

    A key consists of all bits of the coordinates, so distinct points have distinct keys. The highest bits of all
    coordinates come first, except on the linear curve, which sorts by one coordinate after the other. For the Hilbert
    curve, the coordinates are transformed first.

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
    """Transform coordinates to their positions on the Hilbert curve, in place.

    The steps are those of Skilling, "Programming the Hilbert curve" (2004). The bits of a position are distributed over
    the rows of `axes`: its highest bit is the highest bit of the first row.

    Args:
        axes: The coordinates, uint64[attributes, rows].
        bits: The number of bits of each coordinate.
    """
    first_axis = axes[0]
    for bit in range(bits - 1, 0, -1):
        lower_bits = np.uint64((1 << bit) - 1)
        for axis in axes:
            is_inverted = (axis >> np.uint64(bit)) & np.uint64(1) != 0
            exchanged_bits = np.where(is_inverted, np.uint64(0), (first_axis ^ axis) & lower_bits)
            first_axis ^= np.where(is_inverted, lower_bits, exchanged_bits)
            axis ^= exchanged_bits
    for previous_axis, axis in pairwise(axes):
        axis ^= previous_axis
    # Convert from the Gray code.
    correction = np.zeros_like(first_axis)
    for bit in range(bits - 1, 0, -1):
        lower_bits = np.uint64((1 << bit) - 1)
        correction ^= np.where((axes[-1] >> np.uint64(bit)) & np.uint64(1) != 0, lower_bits, np.uint64(0))
    axes ^= correction


def to_sortable_keys(keys: npt.NDArray[np.uint8]) -> npt.NDArray[np.bytes_]:
    """Return the keys as an array of byte strings, bytes[rows], which numpy can sort and search."""
    sortable: npt.NDArray[np.bytes_] = np.ascontiguousarray(keys).view(f"S{keys.shape[1]}").reshape(len(keys))
    return sortable


def choose_cell_bounds(keys: npt.NDArray[np.bytes_], parts: int) -> npt.NDArray[np.bytes_]:
    """Return boundaries between cells of the curve that divide the rows into about `parts` files.

    A cell contains all points with the same first bits. A boundary at which a high bit of the keys changes separates
    large cells. A file with keys on both sides of this boundary would contain a part of both cells. Therefore each
    boundary is moved by up to `FILE_SIZE_SPREAD_FRACTION` of a file to the position at which the highest possible bit
    changes. The ranges of the files are then almost cubes, and fewer files match a predicate.

    Args:
        keys: The keys of a sample of the rows.
        parts: The number of files.
    """
    sorted_keys = np.sort(keys)
    size = len(sorted_keys) / max(1, parts)  # The number of sampled rows of a file.
    bounds: list[bytes] = []
    start = 0
    smallest_fraction, largest_fraction = 1 - FILE_SIZE_SPREAD_FRACTION, 1 + FILE_SIZE_SPREAD_FRACTION
    while (remaining := len(sorted_keys) - start) > max(1, largest_fraction * size):
        target = size
        minimum, maximum = smallest_fraction * size, min(largest_fraction * size, remaining - smallest_fraction * size)
        if maximum < minimum:  # The remaining rows fill less than two files, so each file gets a half of them.
            target = remaining / 2
            minimum, maximum = smallest_fraction * target, largest_fraction * target
        first, last = start + max(1, int(minimum)), start + max(1, int(maximum))
        cell = _find_cell_bound(sorted_keys[first - 1 : last + 1], start + target - first)
        if cell is None:  # All rows have the same key.
            start = last
            continue
        position, bound = cell
        start = first + position
        bounds.append(bound)
    return np.array(bounds, dtype=keys.dtype)


def _find_cell_bound(keys: npt.NDArray[np.bytes_], target_position: float) -> tuple[int, bytes] | None:
    """Return the position of the best boundary between two cells, and the first key of the cell after the boundary.

    A cell is the set of all keys with the same first bits. The best boundary is where the highest possible bit changes.
    If this bit changes several times, it is the change nearest to the target. The first key of the cell has zeros after
    this bit. If all keys are equal, the result is None.

    Args:
        keys: The keys in ascending order.
        target_position: The preferred position.
    """
    width = keys.dtype.itemsize
    key_bytes = np.frombuffer(keys.tobytes(), dtype=np.uint8).reshape(len(keys), width)
    changed_bits = np.unpackbits(key_bytes[1:] ^ key_bytes[:-1], axis=1)
    # Bit 0 is the highest bit of a key. Equal neighbours have no changed bit.
    first_changed_bits = np.where(changed_bits.any(axis=1), changed_bits.argmax(axis=1), 8 * width)
    bit = int(first_changed_bits.min())
    if bit == 8 * width:
        return None
    positions = np.flatnonzero(first_changed_bits == bit)
    position = int(positions[np.abs(positions - target_position).argmin()])
    bound_bits = np.unpackbits(key_bytes[position + 1])
    bound_bits[bit + 1 :] = 0
    return position, np.packbits(bound_bits).tobytes()
