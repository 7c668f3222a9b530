import numpy as np
import numpy.typing as npt

Longs = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Lengths = npt.NDArray[np.int32]

def gather_longs(heap: Bytes, starts: Longs, lengths: Lengths, lower: bool, narrow_counts: bool) -> Longs: ...
def gather_doubles(heap: Bytes, starts: Longs, lengths: Lengths) -> npt.NDArray[np.float64]: ...
def gather_decimals(heap: Bytes, starts: Longs, lengths: Lengths) -> tuple[Longs, npt.NDArray[np.uint64], Bytes]: ...
def scatter(rows: Lengths, values: Longs, count: int) -> Longs: ...
def same(one: Longs, other: Longs) -> bool: ...
def relate(values: Longs, nulls: Longs, nans: Longs) -> tuple[int, int, int, int]: ...
def pack_longs(
    values: Longs, present: Bytes, absent_low: bool
) -> tuple[int, int, int, int, Bytes | None, Bytes | None] | None: ...
def pack_doubles(
    values: npt.NDArray[np.float64], present: Bytes, absent_low: bool
) -> tuple[int, float, float, Bytes, Bytes | None] | None: ...
def pack_spans(
    heap: Bytes, starts: Longs, lengths: Lengths, absent_low: bool
) -> (
    tuple[
        int,
        bytes,
        int,
        int,
        Bytes | None,
        Bytes | None,
        Bytes | None,
        int,
        npt.NDArray[np.uint32] | None,
        Bytes | None,
    ]
    | None
): ...
