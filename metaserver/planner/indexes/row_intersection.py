"""Row intersection: a check by bitmap indexes whether a single row of a file satisfies several predicates.

Data that do not depend on the data file are prepared first: the tables of keys, and the index file that covers each
data file. Columns that a kernel can read are intersected together (`_rows.pyx`), in ascending order of their share
of keys, until a common row is found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from seamark.formats.index.kernels._rows import any_row
from seamark.formats.index.keys.key_set import WantedKeys
from seamark.formats.index.keys.keys import Bits
from seamark.formats.index.kinds.bitmap import Bitmap
from seamark.metaserver.index.files.indexes import OpenIndex
from seamark.metaserver.planner.indexes.coverage import Coverage

if TYPE_CHECKING:
    from seamark.formats.index.kernels._rows import Column

COLUMNS_MAX = 32
"""The maximum number of columns of `any_row`.

If there are more columns, the columns with the largest share of keys are not evaluated. This may keep more files, which
is safe.
"""


@dataclass(frozen=True, slots=True, eq=False)
class _ConjunctIndexFile:
    """An index file that can evaluate a conjunct.

    Attributes:
        location: The location of the index file.
        bitmap: The bitmaps of the index file.
        records: The number of rows of each data file in the index file.
        share: The approximate share of the index file's keys that the conjunct selects.
    """

    location: str
    bitmap: Bitmap
    records: Sequence[int]
    share: float


class Conjunct:
    """The keys of one conjunct, the index files that can evaluate it, and the index file that covers each data file."""

    def __init__(
        self,
        keys: WantedKeys,
        coverage: Coverage,
        indexes_by_location: Mapping[str, OpenIndex],
        damaged_files: dict[str, str],
    ) -> None:
        """Prepare the conjunct.

        Args:
            keys: The keys that match.
            coverage: The files that the index files cover.
            indexes_by_location: The index files in memory, by location.
            damaged_files: The reasons why index files are damaged, by location. The conjunct adds the damaged index
                files that it finds, and does not use them again.
        """
        self._keys = keys
        self._damaged_files = damaged_files
        self.parts = [self._open_conjunct_file(part.location, indexes_by_location) for part in coverage.parts]
        self._part_numbers, self._file_numbers = (numbers.tolist() for numbers in coverage.by_position)
        self.share = min((part.share for part in self.parts if part is not None), default=1.0)
        """The approximate fraction of the existing keys that the conjunct selects."""

    def _open_conjunct_file(
        self, location: str, indexes_by_location: Mapping[str, OpenIndex]
    ) -> _ConjunctIndexFile | None:
        """Return the bitmaps of the index file at this location, with the share of its keys that the conjunct selects.

        If the index file is damaged, the method also records the reason in `_damaged_files`.

        Returns:
            None if the index file cannot be used. Also None if the conjunct selects all keys of the index file,
            because it then excludes no row.
        """
        index = indexes_by_location.get(location)
        if index is None or location in self._damaged_files or not isinstance(index.index, Bitmap):
            return None
        try:
            if index.index.has_only(self._keys):
                return None
            return _ConjunctIndexFile(
                location, index.index, index.files.records.tolist(), index.index.share(self._keys)
            )
        except ValueError as error:
            self._damaged_files[location] = str(error)
            return None

    @property
    def can_prune(self) -> bool:
        """Whether any index file can evaluate the conjunct."""
        return any(part is not None for part in self.parts)

    def find_index_file(self, position: int) -> tuple[_ConjunctIndexFile, int] | None:
        """Return (part of the index file that covers the data file, number of the data file in it).

        `position` is the position of the data file in the view.
        """
        number = self._part_numbers[position]
        part = None if number < 0 else self.parts[number]
        return None if part is None else (part, self._file_numbers[position])

    def find_column(self, part: _ConjunctIndexFile, file: int) -> Column | None:
        """Return the bitmaps of a data file in the form that compiled code reads, or None if they have no such form.

        Raises:
            ValueError: The column is damaged, or its number of rows is not that of the data file.
        """
        if part.bitmap.open_section(file).rows != part.records[file]:
            raise ValueError(
                f"file {file} has {part.records[file]} rows, but its bitmap has {part.bitmap.open_section(file).rows}"
            )
        table = self._keys.bit_table
        return None if table is None else part.bitmap.find_column(file, table)

    def find_rows(self, part: _ConjunctIndexFile, file: int, candidate_rows: Bits | None) -> Bits:
        """Return the rows of a data file that satisfy the conjunct, among the rows in `candidate_rows`."""
        return part.bitmap.find_rows_with_keys(file, self._keys, candidate_rows)

    def mark_damaged(self, part: _ConjunctIndexFile, reason: str) -> None:
        """Record that an index file is damaged, and do not use it again."""
        self._damaged_files[part.location] = reason
        self.parts[self.parts.index(part)] = None


def has_row(conjuncts: Sequence[Conjunct], position: int, find_other_rows: Callable[[], Bits | None]) -> bool:
    """Return whether a row of the file at this position in the view may satisfy all conjuncts.

    Args:
        find_other_rows: Returns the rows that satisfy the rest of the expression, or None for all rows.
    """
    columns: list[Column] = []
    used_parts: list[tuple[Conjunct, _ConjunctIndexFile]] = []
    # The conjuncts whose columns the compiled code cannot read.
    other_conjuncts: list[tuple[Conjunct, _ConjunctIndexFile, int]] = []
    records = 0
    for conjunct in conjuncts:
        part_and_file = conjunct.find_index_file(position)
        if part_and_file is None:
            continue
        part, file = part_and_file
        try:
            column = conjunct.find_column(part, file)
        except ValueError as error:
            conjunct.mark_damaged(part, str(error))
            continue
        if column is None:
            other_conjuncts.append((conjunct, part, file))
        else:
            columns.append(column)
            used_parts.append((conjunct, part))
            records = part.records[file]
    candidate_rows = find_other_rows()
    for conjunct, part, file in other_conjuncts:
        try:
            candidate_rows = conjunct.find_rows(part, file, candidate_rows)
        except ValueError as error:
            conjunct.mark_damaged(part, str(error))
    if not columns:
        return candidate_rows is None or bool(candidate_rows.any())
    try:
        # The compiled code reads at most `COLUMNS_MAX` columns. Without the others, it may find a row that does not
        # match, so a file may stay that could be left out.
        return any_row(columns[:COLUMNS_MAX], records, candidate_rows)
    except ValueError as error:  # The compiled code does not report which column is damaged.
        for conjunct, part in used_parts:
            conjunct.mark_damaged(part, str(error))
        return True
