"""Reused memory for values of one size that are read and soon released, such as the values of a disk tier.

The kernel clears each page that a process gets, and takes the page back when a large buffer is freed. Both together
take longer than reading a file that the kernel has in memory. Therefore the buffers are reused.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt


class Buffers:
    """A pool of buffers that keeps at most `kept_bytes` of unused buffers. Every thread can use it."""

    def __init__(self, size_bytes: int, kept_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._free_buffers: deque[npt.NDArray[np.uint8]] = deque(maxlen=kept_bytes // max(1, size_bytes))

    def take(self, size_bytes: int) -> memoryview:
        """Return writable memory, which can contain bytes of earlier uses.

        The memory returns to the pool when no view of it exists.
        """
        if size_bytes != self.size_bytes or not self._free_buffers.maxlen:
            return memoryview(bytearray(size_bytes))
        try:
            memory = self._free_buffers.pop()
        except IndexError:
            memory = np.empty(size_bytes, dtype=np.uint8)
        view = memory[:]
        weakref.finalize(view, self._free_buffers.append, memory).atexit = False
        return view.data
