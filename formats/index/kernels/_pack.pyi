from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from seamark.formats.iceberg.manifests._memory import Memory

Longs: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Lengths: TypeAlias = npt.NDArray[np.int32]
Counts: TypeAlias = tuple[Lengths, Longs]
Bounds: TypeAlias = tuple[Lengths, Longs, Lengths]
Packed: TypeAlias = tuple[int, int, int, int, int | float, int | float, int, bytes, int, int, int, int, int]
Entry: TypeAlias = tuple[
    Packed | None,
    Packed | None,
    tuple[Packed | None, Packed | None, Packed | None, Packed | None],
    int,
    int,
    int,
    int,
]

SOURCES: dict[str, int]

class Packer:
    def __init__(self, heap: Bytes, rows: int) -> None: ...
    def longs(self, values: Longs, present: Bytes | None = None, *, absent_low: bool) -> int: ...
    def doubles(self, values: npt.NDArray[np.float64], present: Bytes | None = None, *, absent_low: bool) -> int: ...
    def bounds(self, source: int, starts: Longs, lengths: Lengths, *, absent_low: bool) -> int: ...
    def column(
        self,
        source: int,
        counts: tuple[Counts | None, Counts | None, Counts | None, Counts | None],
        lower: Bounds | None,
        upper: Bounds | None,
        record_count: int = -1,
    ) -> int: ...
    def pack(self) -> Memory: ...
    def packed(self, job: int) -> Packed | None: ...
    def entry(self, number: int) -> Entry: ...
