"""An exhaustive search over layouts and indexes, which knows all rows and all statements with their literals."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from seamark.formats.services.curves import compute_curve_keys
from tests.connector.advice.workloads import FILES

RANK_BITS = 16
Gains = dict[tuple[str, ...], float]

Codes = npt.NDArray[np.int64]


class ExactTable:
    """All rows of a table as codes, and the conditions of all statements over the codes.

    Attributes:
        codes: The code of each row's value by column. Codes are the positions of the sorted distinct values.
        ranks: The rank of each row's value by column, as a number of RANK_BITS bits.
        matching_codes: For each statement and each compared column, the number of matching codes below each code.
    """

    def __init__(self, rows: pa.Table, wheres: Sequence[str], columns: Sequence[str]) -> None:
        self.codes: dict[str, Codes] = {}
        self.ranks: dict[str, Codes] = {}
        self.matching_codes: list[dict[str, Codes]] = []
        distinct_values: dict[str, list[Any]] = {}
        for column in columns:
            values, codes, counts = np.unique(rows[column].to_numpy(), return_inverse=True, return_counts=True)
            distinct_values[column], self.codes[column] = values.tolist(), codes
            # The rank of a value is the middle of its positions in the sorted rows, scaled to RANK_BITS bits.
            self.ranks[column] = ((np.cumsum(counts) - counts // 2) * ((1 << RANK_BITS) - 1) // len(rows))[codes]
        for where in wheres:
            masks = {}
            for column, conditions in split_by_column(where).items():
                text = f"SELECT coalesce({conditions}, false) FROM (SELECT unnest($v) AS {column})"
                masks[column] = np.array(
                    [row[0] for row in duckdb.execute(text, {"v": distinct_values[column]}).fetchall()]
                )
            # Prefix sums: the difference of two of them is the number of matching codes in a range of codes.
            self.matching_codes.append(
                {column: np.concatenate([[0], np.cumsum(mask)]) for column, mask in masks.items()}
            )

    def count_files(self, columns: Sequence[str]) -> float:
        """Return the mean number of files that a statement reads if the rows are in the order of a Hilbert curve.

        A file is read if each condition is true for some value between the smallest and the largest value of its
        column.
        """
        points = np.stack([self.ranks[column] for column in columns], axis=1).astype(np.uint64)
        keys = compute_curve_keys(points, RANK_BITS, "hilbert")
        files = np.array_split(np.lexsort(keys.T[::-1]), FILES)
        lower = {column: np.array([codes[file].min() for file in files]) for column, codes in self.codes.items()}
        upper = {column: np.array([codes[file].max() for file in files]) for column, codes in self.codes.items()}
        counts = []
        for totals_by_column in self.matching_codes:
            is_kept = np.ones(FILES, dtype=bool)
            for column, totals in totals_by_column.items():
                # The difference is the number of matching codes in the range of the file.
                is_kept &= totals[upper[column] + 1] > totals[lower[column]]
            counts.append(int(is_kept.sum()))
        return float(np.mean(counts))


def split_by_column(where: str) -> dict[str, str]:
    """Split a condition into the conditions on each column, by column name."""
    parts: dict[str, list[str]] = {}
    for part in where.split(" AND "):
        parts.setdefault(part.split()[0], []).append(part)
    return {column: " AND ".join(conditions) for column, conditions in parts.items()}


def count_files_with_value(rows: pa.Table, wheres: Sequence[str], column: str) -> float:
    """Return the mean number of files that a statement reads with an exact index on the column.

    The files have equal numbers of consecutive rows. A statement that does not compare the column reads all files.
    """
    parts = np.array_split(rows[column].to_numpy(), FILES)
    counts = []
    for where in wheres:
        equality = re.search(rf"\b{column} = '?(\w+)'?", where)
        counts.append(
            FILES if equality is None else sum(bool((part.astype(str) == equality[1]).any()) for part in parts)
        )
    return float(np.mean(counts))


def find_gains(rows: pa.Table, wheres: Sequence[str], columns: Sequence[str]) -> Gains:
    """Return the mean number of files that a statement saves with each clustering and with each index.

    The key of a clustering has its one or two columns, sorted. The key of an index has the word `index` and its column.
    """
    exact_table = ExactTable(rows, wheres, columns)
    gains: Gains = {}
    for count in (1, 2):
        for chosen_columns in combinations(columns, count):
            gains[tuple(sorted(chosen_columns))] = FILES - exact_table.count_files(chosen_columns)
    for column in columns:
        gains["index", column] = FILES - count_files_with_value(rows, wheres, column)
    return gains


def find_best_gain(proposals: Sequence[Mapping[str, Any]], gains: Gains) -> float:
    """Return the best gain of the advisor's first five proposals.

    A proposal without a gain counts as 0.

    Args:
        proposals: The proposals of the advisor, the best first.
        gains: The gain by change. The key of an index is the word `index` and its column, and the key of a clustering
            has its columns.
    """
    best = 0.0
    for proposal in proposals[:5]:
        change = proposal["change"]
        columns = tuple(sorted(change["columns"]))
        best = max(best, gains.get(("index", *columns) if change["kind"] == "add-index" else columns, 0.0))
    return best
