import numpy as np
import numpy.typing as npt

def gather_longs(
    heap: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int32],
    values: npt.NDArray[np.int64],
    present: npt.NDArray[np.uint8],
) -> int: ...
def gather_doubles(
    heap: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int32],
    values: npt.NDArray[np.float64],
    present: npt.NDArray[np.uint8],
) -> int: ...
def gather_decimals(
    heap: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int32],
    high: npt.NDArray[np.int64],
    low: npt.NDArray[np.uint64],
    present: npt.NDArray[np.uint8],
) -> int: ...
def common_prefix(
    heap: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int32]
) -> tuple[int, int]: ...
def gather_prefixes(
    heap: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int32],
    skip: int,
    width: int,
    codes: npt.NDArray[np.uint64],
) -> None: ...
def gather_tails(
    heap: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int32],
    skip: int,
    ends: npt.NDArray[np.int64],
    out: npt.NDArray[np.uint8],
) -> None: ...
