"""Memory for values of one size that are read and soon released, as those of a disk tier.

The kernel clears each page that a process gets, and takes it back when a large buffer is freed. Both together take
longer than reading a file that the kernel has in memory. So buffers are used again.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt


class Buffers:
    """Keeps at most `kept_bytes` of buffers that are not in use.

    For any thread.
    """

    def __init__(self, size_bytes: int, kept_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._free: deque[npt.NDArray[np.uint8]] = deque(maxlen=kept_bytes // max(1, size_bytes))

    def take(self, size_bytes: int) -> memoryview:
        """Writable memory, which may contain bytes of earlier uses.

        It is used again once no view of it is left.
        """
        if size_bytes != self.size_bytes or not self._free.maxlen:
            return memoryview(bytearray(size_bytes))
        try:
            memory = self._free.pop()
        except IndexError:
            memory = np.empty(size_bytes, dtype=np.uint8)
        lent = memory[:]
        weakref.finalize(lent, self._free.append, memory).atexit = False
        return lent.data
