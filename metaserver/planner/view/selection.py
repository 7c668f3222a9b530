"""Selections of the files of a view (`FileSelection`), which pruning narrows."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from seamark.formats.index.kernels import _scan
from seamark.formats.index.packing import Longs
from seamark.metaserver.planner.view.view import ALL_FILES, NO_FILES, SOME_FILES, BoundColumn, TableView

Expired = Callable[[], bool]
_WAITING_MAX = 16
"""The maximum number of comparisons that kernels evaluate together."""


class FileSelection:
    """The selected files of a view. Each file is a row of a block.

    `state`, uint8[blocks], is `NO_FILES`, `ALL_FILES` or `SOME_FILES`: whether no file of the block is selected, all
    files, or some files. In a block with some selected files, each of them has the byte 1 in `mask`, uint8[files].

    Comparisons are queued until the selection is read. Then they are evaluated together, block by block. A plan of
    millions of files mostly waits for memory. If a block is compared several times in succession, its data stay in the
    processor's cache. If only the selected files are read, no mask is made.
    """

    __slots__ = ("_mask", "_state", "_waiting", "view")

    def __init__(
        self, view: TableView, state: npt.NDArray[np.uint8], mask: npt.NDArray[np.uint8] | None = None
    ) -> None:
        """Create a selection.

        Args:
            view: The view.
            state: uint8[blocks]: whether no file, all files or some files of each block are selected.
            mask: uint8[files]: whether each file is selected, for blocks with the state `SOME_FILES`. It may be None
                if there is no such block.
        """
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
        """The mask, with a byte for each file of the view. Pending comparisons are applied first."""
        if self._waiting:
            self.apply_waiting()
        if self._mask is None:
            # The bytes are not initialized. Only those of blocks with the state `SOME_FILES` are read, and a block gets
            # this state only when its bytes are written.
            self._mask = np.empty(self.view.file_count, dtype=np.uint8)
        return self._mask

    def compare(self, side: BoundColumn, op: int, literal: float | bytes) -> None:
        """Keep the files whose value in the column `side` is absent or satisfies a comparison with the literal.

        The comparison is queued, because the compiled code evaluates several comparisons faster in one call. `op` is
        `LE`, `LT`, `GE` or `GT`.
        """
        if len(self._waiting) == _WAITING_MAX:
            self.apply_waiting()
        self._waiting.append((side.layout, side.low, side.high, op, literal))

    def apply_waiting(self) -> None:
        """Apply the queued comparisons."""
        comparisons, self._waiting = self._waiting, []
        if comparisons:
            _scan.narrow_all(comparisons, self.view.extents, self._state, self.mask)

    @property
    def is_empty(self) -> bool:
        """Whether no file is selected. Queued comparisons are not considered."""
        # A search for the states `ALL_FILES` and `SOME_FILES` in bytes is much faster than `any` on the array.
        state = self._state.tobytes()
        return b"\1" not in state and b"\2" not in state

    @classmethod
    def select_all(cls, view: TableView) -> FileSelection:
        # Each block has the state `ALL_FILES`. The result is the same as with `np.ones`. This expression takes a
        # third of the time of `np.ones` if the code of `np.ones` is not in the processor's cache.
        return cls(view, np.frombuffer(bytearray(b"\1" * len(view.blocks)), dtype=np.uint8))

    def copy(self) -> FileSelection:
        """Return a copy that shares neither the states nor the mask with this selection."""
        state = self.state.copy()
        return FileSelection(self.view, state, self.mask.copy() if (state == SOME_FILES).any() else None)

    def list_entry_ids(self) -> Longs:
        """Return the ascending entry ids of the selected files, int64[selected]."""
        return _scan.collect_all(self._waiting, self.view.extents, self._state, self._mask)

    def list_positions(self) -> Longs:
        """Return the ascending positions of the selected files in the view, int64[selected]."""
        return self.view.find_positions(self.list_entry_ids())

    def intersect(self, mask: npt.NDArray[np.uint8]) -> None:
        """Narrow to the files whose byte in `mask`, uint8[files], is 1."""
        _scan.intersect(self.view.extents, self.state, self.mask, mask)

    def count(self) -> int:
        return _scan.count(self.view.extents, self.state, self.mask)

    def sum_file_bytes(self) -> int:
        """Return the total size of the selected files in bytes. The method reads the size of every file."""
        total = 0
        for number in np.flatnonzero(self.state).tolist():
            sizes = self.view.blocks[number].read_longs("file_size_in_bytes")
            if self.state[number] == SOME_FILES:
                sizes = sizes[self.mask[self.view.starts[number] : self.view.starts[number + 1]] != 0]
            total += int(sizes.sum())
        return total

    def measure_size(self) -> tuple[int, int]:
        """Return the number of selected files, and their total bytes."""
        return self.count(), self.sum_file_bytes()

    def clear(self) -> None:
        """Remove all files from the selection."""
        self._waiting = []
        self._state[:] = NO_FILES

    def copy_block(self, number: int, other: FileSelection) -> None:
        """Set the selection of one block to the selection of this block in `other`."""
        first, end = self.view.starts[number], self.view.starts[number + 1]
        self.state[number] = other.state[number]
        self.mask[first:end] = other.mask[first:end]

    def add(self, other: FileSelection) -> None:
        """Add the files of another selection of the same view."""
        _scan.merge(self.view.extents, self.state, self.mask, other.state, other.mask)

    def keep(self, number: int, rows: npt.NDArray[np.bool_]) -> None:
        """Narrow one block to the files for which `rows`, with a value for each file of the block, is True."""
        first, end = self.view.starts[number], self.view.starts[number + 1]
        if self.state[number] == ALL_FILES:
            self.mask[first:end] = rows
        else:
            self.mask[first:end] &= rows.view(np.uint8)
        self.state[number] = SOME_FILES if self.mask[first:end].any() else NO_FILES

    def check_invariants(self) -> None:
        """Check, for tests, that all states are valid, and all mask bytes of blocks with the state `SOME_FILES`."""
        assert set(np.unique(self.state).tolist()) <= {NO_FILES, ALL_FILES, SOME_FILES}
        for number in np.flatnonzero(self.state == SOME_FILES):
            part = self.mask[self.view.starts[number] : self.view.starts[number + 1]]
            assert set(np.unique(part).tolist()) <= {0, 1}


def never_expires() -> bool:
    """Return False. The function is used as `is_expired` where there is no time budget."""
    return False


def narrow_to_any(
    selection: FileSelection, branches: Iterable[Callable[[FileSelection], None]], is_expired: Expired = never_expires
) -> None:
    """Narrow to the union of the files that the branches keep. If the time budget ends, all files are kept.

    Each branch is a function that narrows a copy of the selection.
    """
    union: FileSelection | None = None
    for branch in branches:
        if is_expired():
            return  # The time budget ended before all branches were evaluated, so all files must be kept.
        part = selection.copy()
        branch(part)
        if union is None:
            union = part
        else:
            union.add(part)
    selection.clear()
    if union is not None:
        # The merge changes only blocks of `union`, because other selections may share the mask of the other blocks.
        selection.add(union)
