from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Layout = npt.NDArray[np.int64]
State = npt.NDArray[np.uint8]
Comparison = tuple[Layout, npt.NDArray[Any], npt.NDArray[Any], int, int | float]

def sketch(codes: int, width: int, rows: int) -> tuple[npt.NDArray[np.uint8], int] | None: ...
def sketch_floats(codes: int, width: int, rows: int) -> npt.NDArray[np.uint8] | None: ...
def narrow_longs(
    layout: Layout, low: Layout, high: Layout, state: State, mask: State, op: int, literal: int
) -> None: ...
def narrow_doubles(
    layout: Layout,
    low: npt.NDArray[np.float64],
    high: npt.NDArray[np.float64],
    state: State,
    mask: State,
    op: int,
    literal: float,
) -> None: ...
def narrow_strings(
    layout: Layout,
    low: npt.NDArray[np.uint64],
    high: npt.NDArray[np.uint64],
    state: State,
    mask: State,
    op: int,
    literal: bytes,
    halves: bool,
) -> None: ...
def narrow_longs_in(
    lower: Layout, upper: Layout, least: Layout, most: Layout, state: State, mask: State, literals: Layout
) -> None: ...
def narrow_all(comparisons: Sequence[Comparison], extents: Layout, state: State, mask: State) -> None: ...
def collect_all(comparisons: Sequence[Comparison], extents: Layout, state: State) -> npt.NDArray[np.int64]: ...
def merge(layout: Layout, state: State, mask: State, other_state: State, other_mask: State) -> None: ...
def intersect(layout: Layout, state: State, mask: State, kept: State) -> None: ...
def count(layout: Layout, state: State, mask: State) -> int: ...
def collect(layout: Layout, state: State, mask: State) -> npt.NDArray[np.int64]: ...
