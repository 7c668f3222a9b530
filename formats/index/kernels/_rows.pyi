import numpy as np
import numpy.typing as npt

from seamark.formats.index.kernels._bitmap import Slices
from seamark.formats.index.kernels._ordered import Numbers

Words = npt.NDArray[np.uint64]
Column = tuple[Numbers, Slices, Words | None, Words | None, int, int]

def any_row(columns: list[Column], rows: int, among: Words | None) -> bool: ...
