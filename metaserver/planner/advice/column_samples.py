"""Samples of columns, from which explain estimates the effect of a layout or an index.

The bounds of a file show its smallest and largest value, but not how often a value occurs: a column of six values can
have the same bounds in each file as a column of a million values. So explain reads the columns that the filter
compares in a few of the files that the filter keeps. The numbers of files, rows and bytes, and the time, are limited.
If a column cannot be read within these limits, a text says why it has no sample, and explain omits the estimates that
need the sample.
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
from seamark.formats.iceberg.metadata.name_mapping import read_name_mapping
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.index.keys.keys import has_keys
from seamark.formats.runtime.errors import SeamarkError
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.planner.joins.dimension_columns import (
    DimensionColumn,
    FileColumn,
    find_rows_where,
    union_keys,
)
from seamark.metaserver.planner.joins.dimensions import ListedFile, list_files_at, read_file_columns
from seamark.metaserver.planner.pruning.file_pruning import narrow_by_partition, narrow_by_stats
from seamark.metaserver.planner.rows.data_columns import DataRows
from seamark.metaserver.planner.scan.scan_plan import ScanPlan
from seamark.metaserver.planner.view.selection import FileSelection, never_expires
from seamark.metaserver.runtime.gathering import gather

COLUMNS_MAX = 4
FILES_MAX, FILES_MIN = 20, 2
ROWS_MAX = 4_000_000
READ_BYTES, DECODED_BYTES = 64 << 20, 128 << 20
"""The maximum number of bytes that are read from data files for a sample, and of bytes after decompression."""
SAMPLE_S = 3.0
NOT_SAMPLED = "the values are not sampled"
FUNCTION_NOT_SAMPLED = "values of functions are not sampled"
_CONCURRENT_FILES_MAX = 4
_HITS_MIN = 3
"""The minimum number of hits for which the share in the sample is used as the share in all files."""
_BISECTION_STEPS = 50
"""The number of steps that find a probability. Each step halves the error, so it ends below a double's precision."""
_PROBABILITY_MIN = 0.05
"""An observation with a smaller probability contradicts the assumed share of files."""


@dataclass(frozen=True)
class ColumnSample:
    """A sample of one column, from some of the files that the conditions on the column keep.

    Attributes:
        column: The column.
        files_left: The number of files that the conditions keep, by partition values and bounds.
        rows_left: The number of rows in the files that the conditions keep.
        columns: The column's values in each sampled file.
    """

    column: DimensionColumn
    files_left: int
    rows_left: int
    columns: tuple[FileColumn, ...]

    def count_matching_rows(self, condition: Expression) -> list[int]:
        """Return the number of matching rows in each sampled file. Without a mask, all rows match.

        Args:
            condition: A condition that compares only this column.
        """
        masks = ((find_rows_where(condition, (), {self.column: column}), column) for column in self.columns)
        return [column.rows if mask is None else int(mask.sum()) for mask, column in masks]

    def compute_share_of_rows(self, condition: Expression) -> float:
        """Return the share of the sampled rows that match the condition, which compares only this column."""
        rows = sum(column.rows for column in self.columns)
        return sum(self.count_matching_rows(condition)) / rows if rows else 0.0

    def estimate_files(self, condition: Expression, values: int | None) -> int | None:
        """Estimate how many of `files_left` have a row that matches the condition.

        Args:
            condition: A condition that compares only this column.
            values: The number of values that the condition names, or None for a range.

        Returns:
            None if the sample is too small for an estimate.
        """
        sampled_files = len(self.columns)
        hits = sum(count > 0 for count in self.count_matching_rows(condition))
        if sampled_files == self.files_left:  # All files are sampled, so the number is exact.
            return hits
        share = hits / sampled_files
        if hits < _HITS_MIN:
            if values is None:  # For a range, there is no average value from which the share could follow.
                return None
            # A share that is measured from few hits is uncertain. Use the probability that a file contains at least
            # one of the values, if each value is as frequent as an average value, unless the hits contradict it.
            average_share = max(1.0 - (1.0 - self.presence_probability) ** values, min(hits, 1) / self.files_left)
            share = average_share if _is_probable(hits, sampled_files, average_share) else share
        return max(hits, round(self.files_left * share))

    @cached_property
    def presence_probability(self) -> float:
        """The probability that a file contains a given value of the column.

        The estimate assumes that this probability is the same for all values. Let p be the probability, and n the
        number of sampled files. Then a value that occurs in at least one sampled file occurs on average in
        n p / (1 - (1 - p)^n) of them. This number grows with p, so bisection finds the p that gives the average of
        the sample.
        """
        keys_of_files = [column.collect_keys(None) for column in self.columns]
        distinct_keys = len(union_keys(keys_of_files, self.column.kind))
        if not distinct_keys:
            return 0.0
        sampled_files = len(keys_of_files)
        files_per_key = sum(map(len, keys_of_files)) / distinct_keys
        low, high = 0.0, 1.0
        for _ in range(_BISECTION_STEPS):
            middle = (low + high) / 2
            # The lower bound of the divisor prevents a division by 0 if `middle` is very small.
            expected_files = sampled_files * middle / max(1e-12, 1.0 - (1.0 - middle) ** sampled_files)
            low, high = (middle, high) if expected_files < files_per_key else (low, middle)
        return low


Samples = Mapping[int, ColumnSample | str]
"""A mapping from column id to the sample of the column, or to a text that says why the column has no sample."""


def group_conditions_by_column(bound: Expression) -> dict[int, list[Bound]]:
    """Return, by column id, the conditions that all rows must satisfy.

    Only conditions on plain columns whose values have an order are returned. Booleans are left out: nearly all files
    contain both values, so no layout helps.
    """
    parts = bound.children if isinstance(bound, And) else (bound,)
    conditions: dict[int, list[Bound]] = {}
    for part in parts:
        if isinstance(part, Bound) and part.transform == IDENTITY and has_keys(part.kind) and part.kind != "boolean":
            conditions.setdefault(part.column_id, []).append(part)
    return conditions


async def sample_columns(objects: ObjectStore, scan: ScanPlan) -> Samples:
    """Read a sample of the columns that the filter of a scan compares.

    Returns:
        Samples of at most `COLUMNS_MAX` columns. The result is empty if the scan has only one file, because no layout
        would then read fewer files.
    """
    if scan.files <= 1:
        return {}
    condition_parts = list(group_conditions_by_column(scan.bound).items())[:COLUMNS_MAX]
    rows = DataRows(
        objects,
        asyncio.get_running_loop(),
        read_name_mapping(scan.metadata.properties),
        READ_BYTES,
        DECODED_BYTES,
    )
    samples: dict[int, ColumnSample | str] = {}
    try:
        async with asyncio.timeout(SAMPLE_S):
            for column_id, parts in condition_parts:
                samples[column_id] = await _sample_column(rows, scan, parts)
    except TimeoutError:
        timeout_reason = f"the values could not be read within {SAMPLE_S:g} s"
        samples.update({column_id: timeout_reason for column_id, _ in condition_parts if column_id not in samples})
    return samples


async def _sample_column(rows: DataRows, scan: ScanPlan, parts: Sequence[Bound]) -> ColumnSample | str:
    """Read a sample of the column that `parts` compare, or return a text that says why it cannot be read."""
    column = DimensionColumn(parts[0].column_id, parts[0].kind)
    files = await asyncio.to_thread(_find_files_left, scan, parts)
    sample_files = _choose_sample_files(files)
    if len(sample_files) < min(FILES_MIN, len(files)):
        return f"the files have too many rows for a sample: one file has {files[0].records:,}"

    async def read(file: ListedFile) -> FileColumn:
        return (await asyncio.to_thread(read_file_columns, rows, scan.metadata, file, [column]))[column]

    try:
        columns = await gather([partial(read, file) for file in sample_files], _CONCURRENT_FILES_MAX)
    except Unreadable as error:
        return f"a data file cannot be read: {error}"
    except SeamarkError as error:
        return f"a data file cannot be read: {error.message}"
    return ColumnSample(column, len(files), sum(max(0, file.records) for file in files), tuple(columns))


def _find_files_left(scan: ScanPlan, parts: Sequence[Bound]) -> list[ListedFile]:
    """Return the files that the conditions `parts` keep, by partition values and bounds."""
    selection = FileSelection.select_all(scan.view)
    specs = [spec for spec in scan.metadata.partition_specs if spec.spec_id in scan.view.specs]
    for part in parts:
        narrow_by_partition(selection, {spec.spec_id: project(part, spec).possible for spec in specs}, never_expires)
        narrow_by_stats(selection, part, never_expires)
    return list_files_at(scan, selection.list_entry_ids())


def _choose_sample_files(files: Sequence[ListedFile]) -> list[ListedFile]:
    """Choose files at random, so that a periodic order of the files does not bias the sample.

    At most FILES_MAX files are drawn. They are taken in the order of `files`, as long as they have at most ROWS_MAX
    rows in total.

    The seed is the number of files, so the same files always give the same choice.
    """
    drawn_numbers = np.random.default_rng(len(files)).permutation(len(files))[:FILES_MAX].tolist()
    sample_files, rows = [], 0
    for number in sorted(drawn_numbers):
        rows += max(0, files[number].records)
        if rows > ROWS_MAX:
            break
        sample_files.append(files[number])
    return sample_files


def _is_probable(hits: int, count: int, share: float) -> bool:
    """Return whether `hits` of `count` is a probable result if each file has a hit with the probability `share`.

    The result is not probable if so many hits, or so few hits, would be rare.
    """
    probabilities = [_compute_binomial(number, count, share) for number in range(count + 1)]
    return sum(probabilities[hits:]) >= _PROBABILITY_MIN and sum(probabilities[: hits + 1]) >= _PROBABILITY_MIN


def _compute_binomial(hits: int, count: int, share: float) -> float:
    """Return the probability of exactly `hits` hits in `count` trials with the hit probability `share`."""
    combinations = float(np.prod([(count - n) / (n + 1) for n in range(hits)])) if hits else 1.0
    return combinations * share**hits * (1.0 - share) ** (count - hits)
