"""Whether one row of a file satisfies several predicates at once, as bitmap indexes tell: of many files, one by one.

All that does not depend on the file is made ready before: the wanted keys as tables, and whom to ask of which file.
What is asked of columns that lie ready for it is asked together (`_rows.pyx`), the narrowest first, and the first row
that is left answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from metaserver.index.files.indexes import OpenIndex
from metaserver.index.kernels._rows import any_row
from metaserver.index.keys.key_set import WantedKeys
from metaserver.index.keys.keys import Bits
from metaserver.index.kinds.bitmap import Bitmap
from metaserver.planner.indexes.coverage import Coverage

if TYPE_CHECKING:
    from metaserver.index.kernels._rows import Column

COLUMNS_MAX = 32
"""That `any_row` takes at once; without the others, which are the widest, it keeps a file at worst."""


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """An index file that can tell."""

    location: str
    bitmap: Bitmap
    records: Sequence[int]
    share: float


class Conjunct:
    """Wanted keys of one index, the index files that can be asked for them, and which of these is of which file."""

    def __init__(
        self,
        keys: WantedKeys,
        coverage: Coverage,
        opened: Mapping[str, OpenIndex],
        damaged: dict[str, str],
    ) -> None:
        """Index files that break are named in `damaged`, and asked no more."""
        self._keys = keys
        self._damaged = damaged
        self.parts = [self._part(part.location, opened) for part in coverage.parts]
        self._part_of, self._file_of = (places.tolist() for places in coverage.places)
        self.share = min((part.share for part in self.parts if part is not None), default=1.0)
        """Which part of the keys that there are is wanted, about."""

    def _part(self, location: str, opened: Mapping[str, OpenIndex]) -> _Part | None:
        """None where it cannot be asked, or says nothing: where all that it holds is wanted."""
        index = opened.get(location)
        if index is None or location in self._damaged or not isinstance(index.index, Bitmap):
            return None
        try:
            if index.index.has_only(self._keys):
                return None
            return _Part(location, index.index, index.files.records.tolist(), index.index.share(self._keys))
        except ValueError as error:
            self._damaged[location] = str(error)
            return None

    @property
    def tells(self) -> bool:
        return any(part is not None for part in self.parts)

    def of(self, row: int) -> tuple[_Part, int] | None:
        """Who tells of a file, and its number there."""
        place = self._part_of[row]
        part = None if place < 0 else self.parts[place]
        return None if part is None else (part, self._file_of[row])

    def column(self, part: _Part, file: int) -> Column | None:
        """As `Bitmap.column`. ValueError for damage, and for a file of another length."""
        if part.bitmap.section(file).rows != part.records[file]:
            raise ValueError(f"file {file} has {part.records[file]} rows; its bitmap is of others")
        table = self._keys.table
        return None if table is None else part.bitmap.column(file, table)

    def rows(self, part: _Part, file: int, among: Bits | None) -> Bits:
        return part.bitmap.rows_with_keys(file, self._keys, among)

    def breaks(self, part: _Part, reason: str) -> None:
        self._damaged[part.location] = reason
        self.parts[self.parts.index(part)] = None


def has_row(conjuncts: Sequence[Conjunct], row: int, others: Callable[[], Bits | None]) -> bool:
    """Whether a row of the file at this row of the view may satisfy all; `others`: those that satisfy what else is
    asked, None for all."""
    columns: list[Column] = []
    asked: list[tuple[Conjunct, _Part]] = []
    apart: list[tuple[Conjunct, _Part, int]] = []
    records = 0
    for one in conjuncts:
        found = one.of(row)
        if found is None:
            continue
        part, file = found
        try:
            column = one.column(part, file)
        except ValueError as error:
            one.breaks(part, str(error))
            continue
        if column is None:
            apart.append((one, part, file))
        else:
            columns.append(column)
            asked.append((one, part))
            records = part.records[file]
    among = others()
    for one, part, file in apart:
        try:
            among = one.rows(part, file, among)
        except ValueError as error:
            one.breaks(part, str(error))
    if not columns:
        return among is None or bool(among.any())
    try:
        return any_row(columns[:COLUMNS_MAX], records, among)
    except ValueError as error:  # nobody knows of which
        for one, part in asked:
            one.breaks(part, str(error))
        return True
