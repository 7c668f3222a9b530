import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int32]
Starts = npt.NDArray[np.int64]
Mask = npt.NDArray[np.uint8]

ORDERS: dict[str, int]

def unusable_bounds(
    heap: Mask,
    order: int,
    low_rows: Rows,
    low_starts: Starts,
    low_lengths: Rows,
    high_rows: Rows,
    high_starts: Starts,
    high_lengths: Rows,
) -> tuple[Mask, Mask] | None: ...
