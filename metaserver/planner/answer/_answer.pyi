import numpy as np
import numpy.typing as npt

CONSTANT: int
CHOICE: int
NUMBER: int
ITEMS: int
TEXT: int
HEX: int

def write(
    rows: npt.NDArray[np.int64], parts: tuple[tuple[object, ...], ...], block_rows: int, separator: bytes
) -> bytes: ...
