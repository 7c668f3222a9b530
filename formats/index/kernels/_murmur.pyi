import numpy as np
import numpy.typing as npt

def hash_spans(
    heap: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], seed: int, bits: int
) -> npt.NDArray[np.uint64]: ...
def hash_fixed(heap: npt.NDArray[np.uint8], width: int, seed: int, bits: int) -> npt.NDArray[np.uint64]: ...
