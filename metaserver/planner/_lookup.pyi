import numpy as np
import numpy.typing as npt

_Longs = npt.NDArray[np.int64]

def longs(layout: _Longs, segments: _Longs, picks: _Longs) -> _Longs: ...
def doubles(layout: _Longs, segments: _Longs, picks: _Longs) -> npt.NDArray[np.float64]: ...
def strings(
    layout: _Longs, segments: _Longs, picks: _Longs
) -> tuple[_Longs, npt.NDArray[np.uint8], npt.NDArray[np.uint8]]: ...
