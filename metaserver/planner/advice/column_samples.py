"""Rows of some files, from which explain estimates what a layout or an index would give.

Bounds show where values begin and end, and not how often a value occurs: for a column of six values each file has the
same bounds as for a million values. So the columns that a filter compares are read in a few of the files that the
filter leaves. Reads have limits of files, rows, bytes and time. A column that cannot be read within them has no sample,
but a reason, and then nothing is estimated that needs one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from seamark.formats.iceberg.expressions.expression import And, Bound, Expression
from seamark.formats.iceberg.expressions.projection import project
from seamark.formats.iceberg.files.parquet import Unreadable
from seamark.formats.iceberg.metadata.name_mapping import name_mapping_of
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.index.keys.keys import has_keys
from seamark.formats.runtime.errors import SeamarkError
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.planner.joins.dimension_columns import (
    DimensionColumn,
    FileColumn,
    distinct_keys,
    find_rows_where,
)
from seamark.metaserver.planner.joins.dimensions import ListedFile, list_files_at, read_file_columns
from seamark.metaserver.planner.pruning.file_pruning import narrow_by_partition, narrow_by_stats
from seamark.metaserver.planner.rows.data_columns import DataRows
from seamark.metaserver.planner.scan.scan_plan import ScanPlan
from seamark.metaserver.planner.view.view import Selection, never
from seamark.metaserver.runtime.gathering import gather

COLUMNS_MAX = 4
FILES_MAX, FILES_MIN = 20, 2
ROWS_MAX = 4_000_000
READ_BYTES, DECODED_BYTES = 64 << 20, 128 << 20
SAMPLE_S = 3.0
NOT_SAMPLED = "its values are not sampled"
FUNCTION_NOT_SAMPLED = "values of functions are not sampled"
_FILES_CONCURRENT = 4
_HITS_MIN = 3
"""The number of hits from which the share in a sample is about the share in all files."""
_PROBABILITY_MIN = 0.05
"""The least probability of an observation that does not contradict the assumption."""


@dataclass(frozen=True)
class ColumnSample:
    """A sample of the column in some of the files that the conditions on the column leave.

    Attributes:
        columns: The column in some of these files.
        files_left: The files that the conditions leave, by partition values and bounds.
        rows_left: The rows of these files.
    """

    column: DimensionColumn
    files_left: int
    rows_left: int
    columns: tuple[FileColumn, ...]

    def matches(self, condition: Expression) -> list[int]:
        """Return the number of matching rows in each sampled file.

        Args:
            condition: On this column alone.
        """
        masks = ((find_rows_where(condition, (), {self.column: column}), column) for column in self.columns)
        return [column.rows if mask is None else int(mask.sum()) for mask, column in masks]

    def share_of_rows(self, condition: Expression) -> float:
        """Return the share of the rows in `files_left` that match."""
        rows = sum(column.rows for column in self.columns)
        return sum(self.matches(condition)) / rows if rows else 0.0

    def files_with(self, condition: Expression, values: int | None) -> int | None:
        """Return about how many of `files_left` hold a matching row; None if the sample is too small.

        Args:
            condition: On this column alone.
            values: How many values the condition names; None for a range.
        """
        sampled = len(self.columns)
        hits = sum(count > 0 for count in self.matches(condition))
        if sampled == self.files_left:
            return hits
        share = hits / sampled
        if hits < _HITS_MIN:
            if values is None:
                return None
            # Few hits are less certain than the files of an average value, unless they contradict each other.
            expected = max(1.0 - (1.0 - self.held) ** values, min(hits, 1) / self.files_left)
            share = expected if _is_probable(hits, sampled, expected) else share
        return max(hits, round(self.files_left * share))

    @cached_property
    def held(self) -> float:
        """The share of the files that hold an average value of the column.

        If each file holds each value with the probability p, n p / (1 - (1 - p)^n) of n files hold a value that at
        least one of them holds, on average. This grows with p, so p follows from the average in the sample.
        """
        parts = [column.keys_of_rows(None) for column in self.columns]
        distinct = len(distinct_keys(parts, self.column.kind))
        if not distinct:
            return 0.0
        average, count = sum(map(len, parts)) / distinct, len(parts)
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            expected = count * middle / max(1e-12, 1.0 - (1.0 - middle) ** count)
            low, high = (middle, high) if expected < average else (low, middle)
        return low


Samples = Mapping[int, ColumnSample | str]
"""The samples by column id; a text says why there is no sample."""


def conditions_of_columns(bound: Expression) -> dict[int, list[Bound]]:
    """Return the conditions that all rows must satisfy, on plain columns with ordered values, by the column's id."""
    parts = bound.children if isinstance(bound, And) else (bound,)
    conditions: dict[int, list[Bound]] = {}
    for part in parts:
        if isinstance(part, Bound) and part.transform == IDENTITY and has_keys(part.kind) and part.kind != "boolean":
            conditions.setdefault(part.column_id, []).append(part)
    return conditions


async def sample_columns(objects: ObjectStore, scan: ScanPlan) -> Samples:
    """Read a sample of the columns that the filter of a scan compares.

    Returns:
        Nothing for a scan of one file, about which there is nothing to improve, and for columns beyond `COLUMNS_MAX`.
    """
    if scan.files <= 1:
        return {}
    wanted = list(conditions_of_columns(scan.bound).items())[:COLUMNS_MAX]
    rows = DataRows(
        objects,
        asyncio.get_running_loop(),
        name_mapping_of(scan.metadata.properties),
        READ_BYTES,
        DECODED_BYTES,
    )
    samples: dict[int, ColumnSample | str] = {}
    try:
        async with asyncio.timeout(SAMPLE_S):
            for column_id, parts in wanted:
                samples[column_id] = await _sample(rows, scan, parts)
    except TimeoutError:
        late = f"its values could not be read within {SAMPLE_S:g} s"
        samples.update({column_id: late for column_id, _ in wanted if column_id not in samples})
    return samples


async def _sample(rows: DataRows, scan: ScanPlan, parts: Sequence[Bound]) -> ColumnSample | str:
    column = DimensionColumn(parts[0].column_id, parts[0].kind)
    files = await asyncio.to_thread(_find_files_left, scan, parts)
    chosen = _choose_sample_files(files)
    if len(chosen) < min(FILES_MIN, len(files)):
        return f"its files have too many rows to read some: {files[0].records:,} in one"

    async def read(file: ListedFile) -> FileColumn:
        return (await asyncio.to_thread(read_file_columns, rows, scan.metadata, file, [column]))[column]

    try:
        columns = await gather([partial(read, file) for file in chosen], _FILES_CONCURRENT)
    except Unreadable as error:
        return f"a data file cannot be read: {error}"
    except SeamarkError as error:
        return f"a data file cannot be read: {error.message}"
    return ColumnSample(column, len(files), sum(max(0, file.records) for file in files), tuple(columns))


def _find_files_left(scan: ScanPlan, parts: Sequence[Bound]) -> list[ListedFile]:
    """Return the files that the conditions leave, by partition values and bounds."""
    selection = Selection.everything(scan.view)
    specs = [spec for spec in scan.metadata.partition_specs if spec.spec_id in scan.view.specs]
    for part in parts:
        narrow_by_partition(selection, {spec.spec_id: project(part, spec).possible for spec in specs}, never)
        narrow_by_stats(selection, part, never)
    return list_files_at(scan, selection.entry_ids())


def _choose_sample_files(files: Sequence[ListedFile]) -> list[ListedFile]:
    """Return some files, drawn so that no period in their order matters, and the same for the same files."""
    drawn = np.random.default_rng(len(files)).permutation(len(files))[:FILES_MAX].tolist()
    chosen, rows = [], 0
    for number in sorted(drawn):
        rows += max(0, files[number].records)
        if rows > ROWS_MAX:
            break
        chosen.append(files[number])
    return chosen


def _is_probable(hits: int, count: int, share: float) -> bool:
    """Return whether at least `hits` and at most `hits` are both probable if each has the probability `share`."""
    chances = [_binomial(number, count, share) for number in range(count + 1)]
    return sum(chances[hits:]) >= _PROBABILITY_MIN and sum(chances[: hits + 1]) >= _PROBABILITY_MIN


def _binomial(hits: int, count: int, share: float) -> float:
    ways = float(np.prod([(count - n) / (n + 1) for n in range(hits)])) if hits else 1.0
    return ways * share**hits * (1.0 - share) ** (count - hits)
