"""Tests that space-filling curves visit neighbours, and that ranks and keys equal those of plain Python."""

from __future__ import annotations

import datetime
import itertools
import pickle
import random
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from seamark.connector.arrow.arrays import combine_to_array
from seamark.connector.client.errors import InvalidRequest
from seamark.connector.write.clustering import (
    RANK_BITS,
    Attributes,
    Clustering,
    JoinedRows,
    KeyMatcher,
    Ranks,
    choose_range_bounds,
)
from seamark.formats.iceberg.metadata.clustering import CURVES, HILBERT, ZORDER
from seamark.formats.services.curves import (
    FILE_SIZE_SPREAD_FRACTION,
    choose_cell_bounds,
    compute_curve_keys,
    to_sortable_keys,
)
from tests.seeds import first_seed, mark_fast

GRIDS = [(axes, bits) for axes in range(1, 7) for bits in range(1, 7) if axes * bits <= 14]
"""Grids of at most 2**14 points."""


def build_grid(axes: int, bits: int) -> Any:
    return np.array(list(itertools.product(range(1 << bits), repeat=axes)), dtype=np.uint64)


def order_points(points: Any, bits: int, curve: str) -> Any:
    """Return the points in the order of their keys."""
    keys = [bytes(key) for key in compute_curve_keys(points, bits, curve)]
    assert len(set(keys)) == len(points)
    return points[sorted(range(len(keys)), key=keys.__getitem__)].astype(int)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(("axes", "bits"), GRIDS)
def test_hilbert_curve_visits_every_point_once_in_steps_to_neighbours(axes: int, bits: int) -> None:
    steps = np.abs(np.diff(order_points(build_grid(axes, bits), bits, HILBERT), axis=0)).sum(axis=1)
    assert (steps == 1).all()


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(("axes", "bits"), GRIDS)
def test_z_order_interleaves_the_bits_of_all_attributes(axes: int, bits: int) -> None:
    def interleave(point: Any) -> int:
        digits = "".join(format(int(axis) >> bit & 1, "b") for bit in range(bits - 1, -1, -1) for axis in point)
        return int(digits, 2)

    points = build_grid(axes, bits)
    assert order_points(points, bits, ZORDER).tolist() == sorted(points.astype(int).tolist(), key=interleave)


def test_pieces_of_the_hilbert_curve_are_smaller_than_pieces_of_the_z_order() -> None:
    points = build_grid(3, 4)
    box_volumes = {}
    for curve in CURVES:
        pieces = np.array_split(order_points(points, 4, curve), 100)
        box_volumes[curve] = sum(int(np.prod(np.ptp(piece, axis=0) + 1)) for piece in pieces)
    assert box_volumes[HILBERT] < box_volumes[ZORDER]


def test_keys_of_many_wide_attributes_compare_as_bytes() -> None:
    rng = np.random.default_rng(7)
    points = rng.integers(0, 1 << 31, (500, 20), dtype=np.uint64)
    for curve in CURVES:
        keys = compute_curve_keys(points, 31, curve)
        assert keys.shape == (500, -(-20 * 31 // 8))  # 20 attributes of 31 bits, rounded up to whole bytes.
        assert np.array_equal(np.sort(to_sortable_keys(keys)), np.array(sorted(bytes(key) for key in keys)))


def test_unknown_curve_is_refused() -> None:
    with pytest.raises(ValueError, match="hilbert, zorder"):
        compute_curve_keys(build_grid(2, 2), 2, "peano")


# Ranks

KINDS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "int": (pa.int32(), [-5, 0, 3, 3, 3, 3, 100]),
    "long": (pa.int64(), [-(2**63), 2**63 - 1, 0, 1]),
    "double": (pa.float64(), [-1.5, 0.0, 2.5, float("inf"), float("-inf")]),
    "string": (pa.string(), ["", "a", "ab", "b", "é", "z\U0001f600"]),
    "binary": (pa.binary(), [b"", b"\x00", b"\xff", b"a"]),
    "decimal": (pa.decimal128(12, 2), [Decimal("-1.50"), Decimal("0.01"), Decimal("100.00")]),
    "date": (pa.date32(), [datetime.date(1969, 1, 1), datetime.date(2026, 1, 1)]),
    "timestamp": (pa.timestamp("us"), [datetime.datetime(1960, 1, 1), datetime.datetime(2026, 1, 1, 3)]),
    "boolean": (pa.bool_(), [False, True]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_rank_of_a_value_follows_its_position_with_nulls_first(kind: str) -> None:
    arrow_type, values = KINDS[kind]
    rng = random.Random(kind)
    rows = [rng.choice([*values, None]) for _ in range(400)]
    ranks = Ranks.from_sample(pa.array(rows, arrow_type)).rank_values(pa.array(rows, arrow_type)).tolist()
    for row, rank in zip(rows, ranks, strict=True):
        smaller_count = sum(value is None if row is not None else 0 for value in rows)
        smaller_count += sum(value is not None and row is not None and value < row for value in rows)
        equal_count = sum(value == row for value in rows)
        assert rank == ((2 * smaller_count + equal_count) << RANK_BITS) // (2 * len(rows)) or row is None
        assert row is not None or rank < min(
            other_rank for other_row, other_rank in zip(rows, ranks, strict=True) if other_row is not None
        )
    assert max(ranks) < 1 << RANK_BITS


def test_values_rank_between_neighbouring_sampled_values_and_nan_last() -> None:
    sampled_ranks = Ranks.from_sample(pa.array([1.0, 5.0, 5.0, float("nan"), 9.0]))
    ranks = sampled_ranks.rank_values(pa.array([0.0, 1.0, 3.0, 5.0, 7.0, 9.0, 10.0, float("nan")])).tolist()
    assert ranks == sorted(ranks)
    assert len(set(ranks)) == len(ranks)
    assert Ranks.from_sample(pa.array([], pa.string())).rank_values(pa.array(["a", None])).tolist() == [0, 0]


@pytest.mark.few_cases(20)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", KINDS)
def test_values_outside_the_sample_rank_as_if_they_were_in_the_sample(kind: str, seed: int) -> None:
    arrow_type, values = KINDS[kind]
    rng = random.Random(f"{kind} {seed}")
    values_with_nulls = [*rng.sample(values, rng.randrange(len(values) + 1)), *([None] * rng.randrange(2))]
    sample = [rng.choice(values_with_nulls) for _ in range(50)] if values_with_nulls else []
    rows = [rng.choice([*values, None]) for _ in range(30)]
    ranks = Ranks.from_sample(pa.array(sample, arrow_type)).rank_values(pa.array(rows, arrow_type)).tolist()
    nulls = sum(value is None for value in sample)
    for row, rank in zip(rows, ranks, strict=True):
        smaller_count = nulls + sum(value is not None and row is not None and value < row for value in sample)
        equal_count = sum(value is not None and value == row for value in sample)
        doubled_rank = nulls if row is None else 2 * smaller_count + equal_count
        assert rank == min((doubled_rank << RANK_BITS) // max(1, 2 * len(sample)), (1 << RANK_BITS) - 1)


def test_ranks_divide_a_skewed_attribute_by_its_rows() -> None:
    values = pa.array([0] * 10 + [2**i for i in range(1, 31)] * 3)
    # The two highest bits of a rank are the quarter of the rows.
    quarters = Ranks.from_sample(values).rank_values(values) >> np.uint64(RANK_BITS - 2)
    # Rows with equal values have equal ranks, so a quarter of the 100 rows can have some rows more or fewer than 25.
    assert np.bincount(quarters.astype(int)).tolist() == pytest.approx([25, 25, 25, 25], abs=4)


# Columns of joined tables


@pytest.mark.parametrize("seed", mark_fast(range(20), 3))
def test_joined_row_is_found_by_its_whole_key(seed: int) -> None:
    rng = random.Random(seed)
    kinds = rng.sample([pa.int32(), pa.int64(), pa.string()], rng.randint(1, 3))
    row_count = rng.randint(0, 60)

    def build_column(kind: pa.DataType, rows: int) -> pa.Array:
        random_values = [rng.choice([None, *range(6)]) for _ in range(rows)]  # Few values, so that many keys match.
        return pa.array(random_values, pa.int64()).cast(kind)

    table_columns = [build_column(kind, row_count) for kind in kinds]
    # Integers of different widths are equal.
    request_columns = [build_column(pa.int64() if kind == pa.int32() else kind, 200) for kind in kinds]
    keys = list(zip(*(column.to_pylist() for column in table_columns), strict=True))
    requests = zip(*(column.to_pylist() for column in request_columns), strict=True)
    expected = [keys.index(key) if None not in key and key in keys else -1 for key in requests]
    matcher = pickle.loads(pickle.dumps(KeyMatcher(table_columns)))
    assert matcher.find_rows(request_columns).tolist() == expected


def test_joined_row_is_found_by_a_key_of_many_columns_with_many_values() -> None:
    """The product of the counts of distinct values is 2**72, more than a 64-bit number of a key can represent."""
    values = pa.array(range(256))
    matcher = KeyMatcher([values] * 9)
    other_values = pa.array([*range(1, 256), 0])
    assert matcher.find_rows([values] * 9).tolist() == list(range(256))
    assert set(matcher.find_rows([other_values] + [values] * 8).tolist()) == {-1}


NATIONS = pa.table({"id": ["fr", "de"], "continent": ["europe", "europe"], "rank": [2, 1]})
CUSTOMERS = pa.table({"id": [10, 20, 30, 10], "nation": ["fr", "de", "xx", "de"], "city": ["P", "B", None, "never"]})
FACTS = pa.table({"customer": [10, 20, 30, 40, None, 10], "day": [1, 2, 3, 4, 5, 6], "x.y": [0] * 6})
JOINS = {
    "customer": JoinedRows(CUSTOMERS, {"customer": "id"}),
    "nation": JoinedRows(NATIONS, {"customer.nation": "id"}),
}


def test_attributes_are_read_through_keys_of_joined_tables() -> None:
    attributes = Attributes(["day", "customer.city", "nation.rank"], JOINS, FACTS.schema)
    assert attributes.columns == ["day", "customer"]
    actual_values = []
    # `by` has the table and the column of each attribute. The first one, `day`, belongs to no joined table.
    for name, column in attributes.by[1:]:
        values = attributes.table_values(name, column).to_pylist()
        actual_values.append(
            [None if index < 0 else values[index] for index in attributes.find_rows(name, FACTS).tolist()]
        )
    assert actual_values == [["P", "B", None, None, None, "P"], [2, 1, None, None, None, 2]]


@pytest.mark.parametrize("curve", CURVES)
def test_curve_keys_do_not_depend_on_the_batches_of_the_rows(curve: str) -> None:
    rng = random.Random(curve)
    facts = pa.table(
        {
            "customer": [rng.choice([None, 10, 20, 30, 40]) for _ in range(300)],
            "day": [rng.randrange(50) for _ in range(300)],
        }
    )
    attributes = Attributes(["nation.rank", "day", "customer.city"], JOINS, facts.schema)
    # The rank and the city of a customer have the same order, so they would form one group. Without groups, each column
    # is a dimension of the curve. A clustering is pickled when it is sent to a worker.
    clustering = replace(pickle.loads(pickle.dumps(Clustering.from_sample(attributes, facts, curve))), groups=())
    customers = {10: ("P", 2), 20: ("B", 1), 30: (None, None)}
    joined_values = [customers.get(value, (None, None)) for value in facts["customer"].to_pylist()]
    columns = [
        pa.array([rank for _, rank in joined_values], pa.int64()),
        facts["day"].combine_chunks(),
        pa.array([city for city, _ in joined_values], pa.string()),
    ]
    points = np.stack([Ranks.from_sample(column).rank_values(column) for column in columns], axis=1)
    expected = compute_curve_keys(points, RANK_BITS, curve)
    batches = facts.to_batches(max_chunksize=37)  # The batches have different sizes, because 37 does not divide 300.
    assert np.array_equal(np.concatenate([clustering.compute_keys(batch) for batch in batches]), expected)


def test_columns_and_joins_that_cannot_be_clustered_are_refused() -> None:
    schema = FACTS.schema
    nested_table = pa.table({"id": [10], "tags": [["a"]]})
    for columns, joins, expected in (
        ([], {}, "by which"),
        (["no"], {}, "no column 'no'"),
        (["customer.no"], JOINS, "no column 'customer.no'"),
        (["other.city"], JOINS, "no column 'other.city'"),
        (["c.tags"], {"c": JoinedRows(nested_table, {"customer": "id"})}, "cannot be clustered"),
        (["c.id"], {"c": JoinedRows(nested_table, {})}, "'c' is joined on no columns"),
        (["c.id"], {"c": JoinedRows(nested_table, {"customer": "no"})}, "no column 'c.no'"),
        (["c.id"], {"c": JoinedRows(NATIONS, {"customer": "id"})}, "never equal"),
        (
            ["n.id"],
            {**JOINS, "n": JoinedRows(NATIONS, {"customer.nation": "id", "day": "rank"})},
            "columns of several tables",
        ),
    ):
        with pytest.raises(InvalidRequest, match=expected):
            Attributes(columns, joins, schema)
    assert Attributes(["x.y"], JOINS, schema).columns == ["x.y"]


def test_range_bounds_divide_the_rows_into_almost_equal_parts() -> None:
    keys = np.array([bytes([number]) for number in random.Random(1).sample(range(200), 200)], dtype="S1")
    range_bounds = choose_range_bounds(keys, 7)
    counts = np.bincount(np.searchsorted(range_bounds, keys, "right"), minlength=7)
    assert counts.sum() == 200
    assert counts.min() >= 28
    assert counts.max() <= 30
    assert len(choose_range_bounds(keys, 1)) == 0
    assert len(choose_range_bounds(keys[:0], 5)) == 0


@pytest.mark.parametrize("files", [1, 2, 3, 7, 60])
@pytest.mark.parametrize("distinct_count", [1, 5, 1 << 16])
def test_files_end_between_cells_of_the_curve(files: int, distinct_count: int) -> None:
    """Files have about the same size, and the first key of each file is the start of a large cell."""
    rng = np.random.default_rng(first_seed())
    points = rng.integers(0, distinct_count, (6000, 2)).astype(np.uint64)
    keys = np.sort(to_sortable_keys(compute_curve_keys(points, 16, "zorder")))
    bounds = choose_cell_bounds(keys, files)
    assert np.array_equal(bounds, np.sort(bounds))
    assert len(bounds) <= 2 * files
    if distinct_count < 1 << 16:  # Few distinct keys have many rows each, so the sizes cannot be about equal.
        return
    tolerance = 0.1
    sizes = np.diff([0, *np.searchsorted(keys, bounds), len(keys)]) * files / len(keys)
    assert sizes.min() >= 1 - FILE_SIZE_SPREAD_FRACTION - tolerance
    assert sizes.max() <= 1 + FILE_SIZE_SPREAD_FRACTION + tolerance
    last_bits = [
        np.flatnonzero(np.unpackbits(np.frombuffer(bound.ljust(4, b"\0"), np.uint8))).max() for bound in bounds
    ]
    # The start of a large cell has only few bits before its zeros: those of the file number and up to 4 more.
    assert max(last_bits, default=0) < np.log2(files) + 4


@pytest.mark.parametrize("curve", ["hilbert", "zorder"])
def test_queries_read_fewer_rows_with_cell_bounds_than_with_equal_sizes(curve: str) -> None:
    rng = np.random.default_rng(first_seed())
    value_count = 1000
    rows = pa.table({"a": rng.integers(0, value_count, 40_000), "b": rng.integers(0, value_count, 40_000)})
    clustering = Clustering.from_sample(Attributes(["a", "b"], {}, rows.schema), rows, curve)
    keys = to_sortable_keys(clustering.compute_keys(rows))
    order = np.argsort(keys, kind="stable")
    bounds = np.searchsorted(keys[order], choose_cell_bounds(keys, parts=100))
    equal_bounds = np.arange(1, len(bounds) + 1) * len(keys) // (len(bounds) + 1)

    def compute_mean_read_fraction(cuts: npt.NDArray[np.intp]) -> float:
        """Return the mean fraction of the rows that an equality on one of the two columns reads."""
        total = 0
        for column in ("a", "b"):
            for part in np.split(rows[column].to_numpy()[order], cuts):
                total += len(part) * (int(part.max()) - int(part.min()) + 1)
        return total / 2 / len(keys) / value_count

    # A cell contains all points whose keys begin with the same bits. Files of equal size cut the Z-order within its
    # large cells, so the Z-order gains more than the Hilbert curve.
    ratio_max = 0.97 if curve == "hilbert" else 0.75
    assert compute_mean_read_fraction(bounds) < ratio_max * compute_mean_read_fraction(equal_bounds)


def test_columns_of_the_same_order_count_as_one_and_queries_open_fewer_files() -> None:
    """Columns that sort the rows almost alike form one group, which is one dimension of the curve.

    The table has such an order date and ship date, and two columns that are independent of them.
    """
    rng = np.random.default_rng(first_seed())
    order_days = rng.integers(0, 1000, 40_000)
    ship_days = order_days + rng.integers(1, 30, 40_000)
    columns = {"a": order_days, "b": -ship_days, "c": rng.integers(0, 500, 40_000), "d": rng.integers(0, 500, 40_000)}
    table = pa.table(columns)
    clustering = Clustering.from_sample(Attributes(list(columns), {}, table.schema), table.slice(0, 10_000), "hilbert")
    assert clustering.groups == ((0, 1), (2,), (3,))

    def compute_mean_opened_files(clustering: Clustering) -> float:
        """Return the mean number of files, out of 100, that a range with a hundredth of the values opens."""
        order = np.argsort(to_sortable_keys(clustering.compute_keys(table)), kind="stable")
        counts = []
        for values in columns.values():
            files = values[order].reshape(100, -1)
            for low in np.quantile(values, rng.random(50)):
                width = (values.max() - values.min()) / 100
                counts.append(int(((files.max(axis=1) >= low) & (files.min(axis=1) <= low + width)).sum()))
        return float(np.mean(counts))

    # As two columns, the dates would take half of the first bits of the keys, although they sort the rows almost alike.
    assert compute_mean_opened_files(clustering) < 0.9 * compute_mean_opened_files(replace(clustering, groups=()))
    assert len(np.unique(clustering.compute_keys(table), axis=0)) == len(
        np.unique(clustering.compute_points(table), axis=0)
    )


def test_key_keeps_several_columns_of_the_same_order() -> None:
    ordered_values = np.arange(5000)
    columns = {
        "a": ordered_values,
        "b": -ordered_values,
        "c": ordered_values * 3,
        "d": np.random.default_rng(first_seed()).permutation(5000),
    }
    table = pa.table(columns)
    clustering = Clustering.from_sample(Attributes(list(columns), {}, table.schema), table, "hilbert")
    assert clustering.groups == ((0, 1, 2), (3,))
    assert len(np.unique(clustering.compute_keys(table), axis=0)) == len(
        np.unique(clustering.compute_points(table), axis=0)
    )


def test_column_is_copied_only_if_it_has_several_chunks() -> None:
    chunk = pa.array([1, 2, 3])
    assert combine_to_array(pa.chunked_array([chunk])).buffers()[1].address == chunk.buffers()[1].address
    for chunks in ([], [chunk, chunk], [chunk.slice(1)], [chunk.slice(1), chunk]):
        column = pa.chunked_array(chunks, pa.int64())
        assert combine_to_array(column).equals(pa.array(column.to_pylist(), pa.int64()))
        assert combine_to_array(column).offset == 0
