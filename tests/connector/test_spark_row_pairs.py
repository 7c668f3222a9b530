"""The pairs of rows that a MERGE joins, against a comparison of every pair."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa

from seamark.connector.spark.query.conditions import SparkColumn
from seamark.connector.spark.statements.collected_rows import find_ordinals
from seamark.connector.spark.statements.key_values import select_fitting_rows
from seamark.connector.spark.statements.row_changes import match_rows
from seamark.connector.write.latest_rows import find_latest_rows
from seamark.formats.iceberg.types.schema import Field, Schema
from tests.seeds import first_seed


def test_pairs_contain_all_rows_with_equal_keys() -> None:
    seed = first_seed()
    rng = random.Random(seed)
    for _ in range(200):
        stored_keys = np.array([rng.randrange(6) for _ in range(rng.randrange(8))], dtype=np.int64)
        source_keys = np.array([rng.randrange(-1, 6) for _ in range(rng.randrange(8))], dtype=np.int64)
        expected = sorted(
            (stored_row, source_row)
            for stored_row, stored_key in enumerate(stored_keys)
            for source_row, source_key in enumerate(source_keys)
            if stored_key == source_key
        )
        pairs = match_rows(stored_keys, source_keys, len(expected))
        assert pairs is not None
        assert sorted(zip(*map(np.ndarray.tolist, pairs), strict=True)) == expected, f"seed {seed}"
        if expected:
            assert match_rows(stored_keys, source_keys, len(expected) - 1) is None


def test_row_has_the_ordinal_of_the_target_row_with_its_key() -> None:
    """The key has two columns. One is an int that is compared with bigints, some of which do not fit into an int."""
    seed = first_seed()
    rng = random.Random(seed)
    schema = Schema((Field(1, "a", False, "int"), Field(2, "b", False, "string"), Field(3, "c", False, "int")), 0)
    columns = [SparkColumn("a", "int"), SparkColumn("b", "string")]
    for size in (0, 1, 3, 40):
        # The numbers 2**31 and -(2**40) do not fit into an int.
        rows = [(rng.choice((None, 1, 2, 3, 1 << 31, -(1 << 40))), rng.choice((None, "", "x"))) for _ in range(size)]
        values = pa.table(
            {"a": pa.array([a for a, _ in rows], pa.int64()), "b": pa.array([b for _, b in rows], pa.string())}
        )
        matching_rows = select_fitting_rows(values, columns).combine_chunks()
        keys = find_latest_rows(matching_rows.to_batches(), schema, ["b", "a"]).keys
        numbered_rows = list(zip(*(column.to_pylist() for column in reversed(keys.columns)), strict=True))
        fitting_rows = {row for row in rows if None not in row and -(1 << 31) <= row[0] < 1 << 31}  # type: ignore[operator]
        assert len(numbered_rows) == len(fitting_rows)
        assert set(numbered_rows) == fitting_rows
        actual = find_ordinals(keys, values, columns).tolist()
        assert actual == [numbered_rows.index(row) if row in fitting_rows else -1 for row in rows], f"seed {seed}"
