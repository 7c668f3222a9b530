"""The first proposals of the advisor against an exhaustive search over layouts and indexes.

The search knows all rows and all statements with their literals, and cuts the rows into files itself. The advisor knows
shapes without literals and a sample.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.names import table_path
from seamark.connector.client.policies import change_table_properties, load_advice
from seamark.connector.write.appends import append
from seamark.formats.iceberg.metadata.properties import TARGET_FILE_BYTES
from seamark.formats.services.curves import compute_curve_keys
from tests.connector.advice.workloads import FILES, TABLE, draw_workload, make_table, run_statements
from tests.connector.lake import open_catalog
from tests.seeds import first_seed

COLUMNS = ("code", "region", "amount", "day")
BITS = 16


Codes = npt.NDArray[np.int64]


class ExactTable:
    """All rows of a table as codes, and the conditions of all statements as masks over the codes."""

    def __init__(self, rows: pa.Table, wheres: Sequence[str]) -> None:
        self.codes: dict[str, Codes] = {}
        self.ranks: dict[str, Codes] = {}
        self.matching: list[dict[str, Codes]] = []
        distinct: dict[str, list[Any]] = {}
        for column in COLUMNS:
            values, codes, counts = np.unique(rows[column].to_numpy(), return_inverse=True, return_counts=True)
            distinct[column], self.codes[column] = values.tolist(), codes
            self.ranks[column] = ((np.cumsum(counts) - counts // 2) * ((1 << BITS) - 1) // len(rows))[codes]
        for where in wheres:
            masks = {}
            for column, conditions in split_by_column(where).items():
                text = f"SELECT coalesce({conditions}, false) FROM (SELECT unnest($v) AS {column})"
                masks[column] = np.array([row[0] for row in duckdb.execute(text, {"v": distinct[column]}).fetchall()])
            self.matching.append({column: np.concatenate([[0], np.cumsum(mask)]) for column, mask in masks.items()})

    def count_files(self, columns: Sequence[str]) -> float:
        """Return the mean number of files that a statement reads, if a Hilbert curve orders the rows.

        A file is read if each condition alone is true for a value between the smallest and the largest value of its
        column.
        """
        points = np.stack([self.ranks[column] for column in columns], axis=1).astype(np.uint64)
        keys = compute_curve_keys(points, BITS, "hilbert")
        files = np.array_split(np.lexsort(keys.T[::-1]), FILES)
        lower = {column: np.array([codes[file].min() for file in files]) for column, codes in self.codes.items()}
        upper = {column: np.array([codes[file].max() for file in files]) for column, codes in self.codes.items()}
        counts = []
        for matching in self.matching:
            is_kept = np.ones(FILES, dtype=bool)
            for column, totals in matching.items():
                is_kept &= totals[upper[column] + 1] > totals[lower[column]]
            counts.append(int(is_kept.sum()))
        return float(np.mean(counts))


def split_by_column(where: str) -> dict[str, str]:
    """Return the conditions of each column."""
    parts: dict[str, list[str]] = {}
    for part in where.split(" AND "):
        parts.setdefault(part.split()[0], []).append(part)
    return {column: " AND ".join(conditions) for column, conditions in parts.items()}


def count_indexed(rows: pa.Table, wheres: Sequence[str], column: str) -> float:
    """Return the mean number of present files that have a row with the value of an equality on the column."""
    parts = np.array_split(rows[column].to_numpy(), FILES)
    counts = []
    for where in wheres:
        equal = re.search(rf"\b{column} = '?(\w+)'?", where)
        counts.append(FILES if equal is None else sum(bool((part.astype(str) == equal[1]).any()) for part in parts))
    return float(np.mean(counts))


@pytest.mark.slow
@pytest.mark.parametrize("case", range(8))
def test_first_five_proposals_have_most_of_the_best_gain(client: IndexClient, case: int) -> None:
    rng = np.random.default_rng(first_seed() + 500 + case)
    rows = make_table(client, rng)
    wheres = draw_workload(rng).draw(rng, 80)
    run_statements(client, wheres)
    proposals = load_advice(client, TABLE)["proposals"]
    exact = ExactTable(rows, wheres)
    gains: dict[tuple[str, ...], float] = {}
    for count in (1, 2):
        for columns in combinations(COLUMNS, count):
            gains[columns] = FILES - exact.count_files(columns)
    for column in COLUMNS:
        gains["index", column] = FILES - count_indexed(rows, wheres, column)
    proposed = [0.0]
    for proposal in proposals[:5]:
        change = proposal["change"]
        key = ("index", *change["columns"]) if change["kind"] == "add-index" else tuple(sorted(change["columns"]))
        by_columns = {key if key[0] == "index" else tuple(sorted(key)): gain for key, gain in gains.items()}
        proposed.append(by_columns.get(key, 0.0))
    assert max(proposed) >= 0.8 * max(gains.values()), (gains, [proposal["title"] for proposal in proposals])
    assert proposals[0]["pays-after-days"] <= 30


def test_no_proposal_is_made_for_statements_that_no_layout_helps(client: IndexClient) -> None:
    make_table(client, np.random.default_rng(first_seed()))
    run_statements(client, [f"day >= {day}" for day in (0, 1, 2)] + ["note <> 'x'"])
    advice = load_advice(client, TABLE)
    assert (advice["proposals"], advice["before"]["files"]) == ([], FILES)
    assert "no change would save" in advice["reason"]


def test_commands_quote_names(client: IndexClient) -> None:
    """A writer chooses the names of columns, and an administrator copies the commands."""
    name = "c'; rm -rf ~ `x`"
    rows = pa.table({name: np.arange(4000) % 97, "n": np.arange(4000)})
    with open_catalog(client.url) as catalog:
        catalog.create_namespace_if_not_exists("db")
        catalog.create_table(TABLE, schema=rows.schema)
    for start in range(0, 4000, 500):
        append(client, TABLE, rows.slice(start, 500))
    change_table_properties(client, TABLE, {TARGET_FILE_BYTES: "3000"}, ())
    plan = {"filter": {"type": "eq", "term": name, "value": 5}, "kept-max": 0}
    for _ in range(99):
        client._request_json("POST", f"{table_path(TABLE)}/plan-tables", {}, plan)
    proposals = load_advice(client, TABLE)["proposals"]
    shells = [shlex.split(one) for proposal in proposals for one in proposal["commands"] if one.startswith("seamark")]
    assert shells
    assert all(";" not in words and "rm" not in words for words in shells)
    statements = [one for proposal in proposals for one in proposal["commands"] if one.startswith("ALTER")]
    assert all("`c'; rm -rf ~ ``x```" in one for one in statements)
