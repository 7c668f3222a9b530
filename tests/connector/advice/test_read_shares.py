"""Tests of predicted shares of files, against random files in which each value is looked up."""

from __future__ import annotations

import numpy as np
import pytest

from seamark.formats.index.packing import Longs
from seamark.metaserver.planner.advice.read_shares import ReplayedFiles, compute_read_shares
from seamark.metaserver.planner.advice.replay import DrawnCondition, DrawnStatement, SimulatedLayout, simulate_layout
from seamark.metaserver.planner.advice.row_samples import RowSample, SampledColumn
from tests.seeds import first_seed

FILES, ROWS, SHOPS, DAYS = 32, 100, 400, 365
SHOP, DAY = 1, 2
"""The ids of the columns."""


def make_sample(shops: Longs, days: Longs) -> RowSample:
    """Return all rows of a table as a sample.

    The arrays are int64[files, rows] with the values of the columns SHOP and DAY. In the sample, the code of a value is
    its position among the sorted values of its column, from 1.
    """
    columns = {}
    for column_id, values, count in ((SHOP, shops, SHOPS), (DAY, days, DAYS)):
        file_counts = np.sum([np.bincount(np.unique(file), minlength=count + 1) for file in values], axis=0)
        flat_values = values.ravel().astype(np.int32)
        columns[column_id] = SampledColumn(column_id, "long", np.arange(1, count + 1), flat_values, file_counts)
    return RowSample(columns, len(shops), shops.size)


def make_layout(sample: RowSample, files: int) -> SimulatedLayout:
    """Return the exact bounds of the files of a sample."""
    codes = {column_id: column.codes.reshape(files, -1) for column_id, column in sample.columns.items()}
    return SimulatedLayout(
        lower={column_id: values.min(axis=1) for column_id, values in codes.items()},
        upper={column_id: values.max(axis=1) for column_id, values in codes.items()},
        has_nulls=dict.fromkeys(codes, np.zeros(files, np.bool_)),
        weights=np.full(files, 1 / files),
    )


def draw_statements(sample: RowSample, rng: np.random.Generator, count: int = 120) -> list[DrawnStatement]:
    """Draw statements that compare SHOP with 1 to 3 values. Half of them also compare DAY with a range of 31 days.

    The values are codes of the sample. At least one row of the table satisfies all conditions of a statement.
    """
    statements = []
    for _ in range(count):
        row = rng.integers(sample.rows)
        codes = {sample.columns[SHOP].codes[row], *rng.integers(1, SHOPS + 1, rng.integers(0, 3))}
        conditions = [(DrawnCondition(SHOP, np.isin(np.arange(SHOPS + 1), list(codes)), len(codes)),)]
        if rng.random() < 0.5:
            is_near = np.abs(np.arange(DAYS + 1) - sample.columns[DAY].codes[row]) <= 15
            is_near[0] = False  # The code 0 means null.
            conditions.append((DrawnCondition(DAY, is_near, named_values=0),))  # 0 values mean a range.
        statements.append(DrawnStatement(fingerprint="a", weight=1.0, conditions=tuple(conditions)))
    return statements


def count_read_shares(
    sample: RowSample, files: int, statements: list[DrawnStatement], indexed_id: int | None
) -> list[float]:
    """Return the share of the files that each statement reads.

    A file is read if its bounds permit each condition, and if it has a value of each condition on the column
    `indexed_id`. The values come from the rows of the file.
    """
    codes = {column_id: column.codes.reshape(files, -1) for column_id, column in sample.columns.items()}
    shares = []
    for statement in statements:
        is_read = np.ones(files, np.bool_)
        for (condition,) in statement.conditions:
            matching = np.flatnonzero(condition.matching)
            for number, values in enumerate(codes[condition.column_id]):
                if condition.column_id == indexed_id:
                    is_read[number] &= bool(np.isin(values, matching).any())
                is_read[number] &= bool(((matching >= values.min()) & (matching <= values.max())).any())
        shares.append(float(is_read.mean()))
    return shares


@pytest.mark.parametrize("spread", [0, 20, 100, 10_000])
def test_files_that_bounds_and_an_index_both_leave_out_count_once(spread: int) -> None:
    """With a small spread, rows are nearly sorted by shop, so the bounds of the shop keep few files.

    With the largest spread, the order is random, so the bounds keep all files.
    """
    rng = np.random.default_rng(first_seed() + spread)
    frequencies = 1 / np.arange(1, SHOPS + 1) ** 0.5
    shops = rng.choice(np.arange(1, SHOPS + 1), FILES * ROWS, p=frequencies / frequencies.sum())
    order = np.argsort(shops + rng.uniform(0, spread, len(shops)), kind="stable")
    sample = make_sample(shops[order].reshape(FILES, ROWS), rng.integers(1, DAYS + 1, (FILES, ROWS)))
    statements = draw_statements(sample, rng)
    layout = make_layout(sample, FILES)
    for indexed_id in (None, SHOP):
        # The index keeps no file (0.0) without a matching value.
        indexes = {} if indexed_id is None else {0.0: frozenset([indexed_id])}
        replayed = ReplayedFiles(layout, files=FILES, new_files=FILES, buckets={}, indexes=indexes)
        _, predicted_shares = compute_read_shares(replayed, statements, sample)
        counted_shares = count_read_shares(sample, FILES, statements, indexed_id)
        # The prediction estimates which files the index keeps, so it may differ from the count by 15 %.
        assert predicted_shares.mean() == pytest.approx(np.mean(counted_shares), rel=0.15), indexed_id


def test_index_of_a_table_that_is_clustered_by_the_same_column_keeps_what_the_bounds_keep() -> None:
    """The predicted share of read files is near the share that is counted with the clustered rows and the index."""
    rng = np.random.default_rng(first_seed())
    codes, days = rng.integers(1, SHOPS + 1, (FILES, ROWS)), rng.integers(1, DAYS + 1, (FILES, ROWS))
    sample = make_sample(codes, days)
    statements = draw_statements(sample, rng)
    order = np.argsort(sample.columns[SHOP].codes, kind="stable")
    layout = simulate_layout(sample, order, FILES)
    # The index on SHOP keeps no file (0.0) without a matching value.
    replayed = ReplayedFiles(layout, files=FILES, new_files=FILES, buckets={}, indexes={0.0: frozenset([SHOP])})
    _, predicted_shares = compute_read_shares(replayed, statements, sample)
    clustered = make_sample(codes.ravel()[order].reshape(FILES, ROWS), days.ravel()[order].reshape(FILES, ROWS))
    counted_shares = count_read_shares(clustered, FILES, statements, SHOP)
    assert predicted_shares.mean() == pytest.approx(np.mean(counted_shares), rel=0.3)


def test_index_on_the_column_of_the_buckets_leaves_out_files_of_the_read_bucket() -> None:
    rng = np.random.default_rng(first_seed())
    buckets = 4
    bucket_of_code = np.append(0, rng.permutation(SHOPS) % buckets)
    files = []
    for number in range(FILES):
        own_codes = np.flatnonzero(bucket_of_code[1:] == number % buckets) + 1
        files.append(rng.choice(own_codes, ROWS))
    sample = make_sample(np.array(files), rng.integers(1, DAYS + 1, (FILES, ROWS)))
    statements = [
        DrawnStatement("a", 1.0, ((DrawnCondition(SHOP, np.arange(SHOPS + 1) == code, 1),),))
        for code in rng.choice(sample.columns[SHOP].codes, 60)
    ]
    replayed = ReplayedFiles(make_layout(sample, FILES), FILES, FILES, {SHOP: buckets}, {0.0: frozenset([SHOP])})
    _, predicted_shares = compute_read_shares(replayed, statements, sample)
    counted_shares = count_read_shares(sample, FILES, statements, SHOP)
    assert predicted_shares.mean() == pytest.approx(np.mean(counted_shares), rel=0.15)
