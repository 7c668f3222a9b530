"""A selection of a view's files, which pruning narrows stage by stage and block by block.

A block with all or none of its files selected needs no mask. A union consists of narrowed copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from seamark.formats.index.kernels import _scan
from seamark.formats.index.packing import Longs
from seamark.metaserver.planner.view.view import Side, TableView

Expired = Callable[[], bool]
_WAITING_MAX = 16
"""Comparisons that kernels do together."""


class Selection:
    """`state`, uint8[blocks]: 0 selects no row, 1 every row, 2 the rows whose byte in `mask`, uint8[rows], is 1.

    Comparisons wait until the selection is read. Then they are done together, block by block: a plan of
    millions of files waits for memory more than for anything else, and what one comparison leaves of a block is still
    in the processor's cache for the next. If only the rows are read, no mask is made.
    """

    __slots__ = ("_mask", "_state", "_waiting", "view")

    def __init__(
        self, view: TableView, state: npt.NDArray[np.uint8], mask: npt.NDArray[np.uint8] | None = None
    ) -> None:
        """Without a mask no block has state 2."""
        self.view = view
        self._state = state
        self._mask = mask
        self._waiting: list[_scan.Comparison] = []

    @property
    def state(self) -> npt.NDArray[np.uint8]:
        if self._waiting:
            self.apply_waiting()
        return self._state

    @property
    def mask(self) -> npt.NDArray[np.uint8]:
        if self._waiting:
            self.apply_waiting()
        if self._mask is None:
            self._mask = np.empty(self.view.file_count, dtype=np.uint8)
        return self._mask

    def compare(self, side: Side, op: int, literal: float | bytes) -> None:
        """Keeps rows whose value passes `op` of the kernels, or is absent."""
        if len(self._waiting) == _WAITING_MAX:
            self.apply_waiting()
        self._waiting.append((side.layout, side.low, side.high, op, literal))

    def apply_waiting(self) -> None:
        """Does the comparisons that wait."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            _scan.narrow_all(waiting, self.view.extents, self._state, self.mask)

    @property
    def is_empty(self) -> bool:
        """Whether no row is selected, by what is done of the comparisons."""
        state = self._state.tobytes()  # searched in a fraction of the time that `any` takes
        return b"\1" not in state and b"\2" not in state

    @classmethod
    def everything(cls, view: TableView) -> Selection:
        # As `np.ones`, in a third of the time where its code is not in the processor's cache.
        return cls(view, np.frombuffer(bytearray(b"\1" * len(view.blocks)), dtype=np.uint8))

    def copy(self) -> Selection:
        state = self.state.copy()
        return Selection(self.view, state, self.mask.copy() if (state == 2).any() else None)

    def entry_ids(self) -> Longs:
        """int64[selected], ascending entry ids (`view.py`)."""
        return _scan.collect_all(self._waiting, self.view.extents, self._state, self._mask)

    def positions(self) -> Longs:
        """int64[selected], ascending positions in the view, as masks count them."""
        return self.view.positions_of(self.entry_ids())

    def intersect(self, kept: npt.NDArray[np.uint8]) -> None:
        """Narrows to the rows whose byte in `kept` uint8[rows] is 1."""
        _scan.intersect(self.view.extents, self.state, self.mask, kept)

    def count(self) -> int:
        return _scan.count(self.view.extents, self.state, self.mask)

    def file_bytes(self) -> int:
        """Total size of the selected files in bytes; reads every size."""
        total = 0
        for number in np.flatnonzero(self.state).tolist():
            sizes = self.view.blocks[number].longs("file_size_in_bytes")
            if self.state[number] == 2:
                sizes = sizes[self.mask[self.view.starts[number] : self.view.starts[number + 1]] != 0]
            total += int(sizes.sum())
        return total

    def size(self) -> tuple[int, int]:
        """(files, bytes) selected."""
        return self.count(), self.file_bytes()

    def clear(self) -> None:
        self._waiting = []
        self._state[:] = 0

    def copy_block(self, number: int, other: Selection) -> None:
        """Sets the selection of one block to that in `other`."""
        first, end = self.view.starts[number], self.view.starts[number + 1]
        self.state[number] = other.state[number]
        self.mask[first:end] = other.mask[first:end]

    def add(self, other: Selection) -> None:
        _scan.merge(self.view.extents, self.state, self.mask, other.state, other.mask)

    def keep(self, number: int, rows: npt.NDArray[np.bool_]) -> None:
        """Narrows one block to the rows for which `rows` is True."""
        first, end = self.view.starts[number], self.view.starts[number + 1]
        if self.state[number] == 1:
            self.mask[first:end] = rows
        else:
            self.mask[first:end] &= rows.view(np.uint8)
        self.state[number] = 2 if self.mask[first:end].any() else 0

    def check_invariants(self) -> None:
        """AssertionError for an invalid state or mask byte. For tests."""
        assert set(np.unique(self.state).tolist()) <= {0, 1, 2}
        for number in np.flatnonzero(self.state == 2):
            part = self.mask[self.view.starts[number] : self.view.starts[number + 1]]
            assert set(np.unique(part).tolist()) <= {0, 1}


def never() -> bool:
    return False


def narrow_to_any(
    selection: Selection, branches: Iterable[Callable[[Selection], None]], expired: Expired = never
) -> None:
    """Narrows to the union of what each branch narrows to."""
    union: Selection | None = None
    for branch in branches:
        if expired():
            return  # the remaining branches might keep everything, and each would copy the mask
        part = selection.copy()
        branch(part)
        if union is None:
            union = part
        else:
            union.add(part)
    selection.clear()
    if union is not None:
        selection.add(union)  # merges only its own blocks: selections of other blocks may share the mask
