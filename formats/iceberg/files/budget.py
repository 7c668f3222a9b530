"""Budgets for fetched bytes and for the memory of decoded data.

A small file can decode to very large data: a dictionary can repeat a value for every row, and a compressed page of
zeros becomes a thousand times larger. Therefore a decoder charges a budget before it allocates memory, and stops at the
limit.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from seamark.formats.iceberg.files.parquet import Unreadable
from seamark.formats.runtime.lazy_module import LazyModule

if TYPE_CHECKING:
    import pyarrow.compute as pc
else:
    pc = LazyModule("pyarrow.compute")


class Budget:
    """A number of bytes that may be used, of which some are already charged. Threads can share a budget."""

    def __init__(self, limit_bytes: int, error_start: str) -> None:
        """Create a budget of `limit_bytes`.

        Args:
            limit_bytes: The size of the budget.
            error_start: The words of the error message before "more than … bytes", such as "decoded it takes".
        """
        self.limit_bytes = self._left_bytes = limit_bytes
        self._error_start = error_start
        self._lock = threading.Lock()

    @property
    def left_bytes(self) -> int:
        return max(0, self._left_bytes)

    def take(self, size_bytes: int, path: str) -> None:
        """Charge some bytes.

        Raises:
            Unreadable: The budget has fewer bytes left. Nothing is charged.
        """
        with self._lock:
            if size_bytes > self._left_bytes:
                raise Unreadable(path, f"{self._error_start} more than {self.limit_bytes:,} bytes")
            self._left_bytes -= size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Return charged bytes to the budget."""
        with self._lock:
            self._left_bytes += size_bytes


class BudgetShare(Budget):
    """The part of a budget that a task uses. When the context ends, its charges are returned to the budget."""

    def __init__(self, whole_budget: Budget) -> None:
        self._whole_budget = whole_budget
        self._taken_bytes = 0
        self.limit_bytes = whole_budget.limit_bytes

    @property
    def left_bytes(self) -> int:
        return self._whole_budget.left_bytes

    def take(self, size_bytes: int, path: str) -> None:
        self._whole_budget.take(size_bytes, path)
        self._taken_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        self._whole_budget.give_back(size_bytes)
        self._taken_bytes -= size_bytes

    def __enter__(self) -> BudgetShare:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back(self._taken_bytes)


def create_decoding_budget(limit_bytes: int) -> Budget:
    return Budget(limit_bytes, "decoded it takes")


def compute_expanded_bytes(array: pa.Array) -> int:
    """Return the memory that an array would use if each row had its own copy of its value.

    The array is not expanded. The function is for arrays whose rows share values (dictionaries, runs, views).
    """
    return int(_measure_values(array).sum()) + _OFFSET_BYTES * len(array)


def has_shared_values(kind: pa.DataType) -> bool:
    """Return whether rows of an array of this type can share the bytes of a value."""
    is_view = pa.types.is_string_view(kind) or pa.types.is_binary_view(kind)
    return bool(is_view or pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind))


def _measure_values(values: pa.Array) -> npt.NDArray[np.int64]:
    """Return the size of each value in bytes, int64[n], as if each row had its own copy.

    Rows of a dictionary, of runs or of views share values. The distinct values of a dictionary or of runs can
    themselves be a dictionary or runs.
    """
    kind = values.type
    if pa.types.is_dictionary(kind):
        sizes = np.zeros(len(values), dtype=np.int64)
        is_present = values.indices.is_valid().to_numpy(zero_copy_only=False)
        if is_present.any():
            sizes[is_present] = _measure_values(values.dictionary)[values.indices.drop_null().to_numpy()]
        return sizes
    if pa.types.is_run_end_encoded(kind):
        # The end of a run can exceed the number of rows by any amount, so a product of lengths could overflow.
        ends = np.clip(values.run_ends.to_numpy().astype(np.int64) - values.offset, 0, len(values))
        return np.repeat(_measure_values(values.values), np.diff(ends, prepend=np.int64(0)))
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        # A view has four numbers; the first number is the length.
        views = np.frombuffer(values.buffers()[1], dtype=np.int32)
        sizes = views.reshape(-1, 4)[values.offset : values.offset + len(values), 0].astype(np.int64)
        return sizes * values.is_valid().to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]
    if any(is_kind(kind) for is_kind in _HAS_ANY_LENGTH):
        lengths = pc.fill_null(pc.binary_length(values), 0)
        return lengths.to_numpy(zero_copy_only=False).astype(np.int64)  # type: ignore[no-any-return]
    try:
        width = kind.bit_width // 8 + 1  # A value of a few bits takes a byte as well.
    except ValueError:  # The type is nested. Such columns are not indexed.
        width = int(values.nbytes)
    return np.full(len(values), width, dtype=np.int64)


_OFFSET_BYTES = 8
"""The size of the offset of a row's value."""
_HAS_ANY_LENGTH = (
    pa.types.is_binary,
    pa.types.is_string,
    pa.types.is_large_binary,
    pa.types.is_large_string,
)
