"""Random tables and skewed workloads, for tests of the advisor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.names import make_table_path
from seamark.connector.client.policies import change_table_properties
from seamark.connector.write.appends import append
from seamark.formats.iceberg.metadata.properties import TARGET_FILE_BYTES
from tests.connector.lake import open_catalog

TABLE = "db.t"
FILES, ROWS = 48, 2000
CODES, REGIONS = 400, 8


@dataclass(frozen=True)
class Workload:
    """Conditions with weights.

    Attributes:
        conditions: Functions that draw a condition in SQL.
        weights: The relative frequencies of the conditions. Their sum can differ from 1.
    """

    conditions: Sequence[Callable[[np.random.Generator], str]]
    weights: Sequence[float]

    def draw(self, rng: np.random.Generator, count: int) -> list[str]:
        condition_numbers = rng.choice(len(self.conditions), count, p=np.array(self.weights) / sum(self.weights))
        return [self.conditions[number](rng) for number in condition_numbers]


def make_rows(rng: np.random.Generator, rows: int = ROWS) -> pa.Table:
    """Return the rows of one file. All columns cover their whole range in each file."""
    weights = 1.0 / np.arange(1, CODES + 1)
    return pa.table(
        {
            "id": rng.integers(0, 1 << 40, rows),
            "code": [f"c{code:04d}" for code in rng.choice(CODES, rows, p=weights / weights.sum())],
            "region": rng.integers(0, REGIONS, rows),
            "amount": np.exp(rng.standard_normal(rows)),
            "day": rng.integers(0, 365, rows),
            "note": [f"{number:x}" * 3 for number in rng.integers(0, 1 << 40, rows)],
        }
    )


def make_table(client: IndexClient, rng: np.random.Generator, files: int = FILES, rows: int = ROWS) -> pa.Table:
    """Create `db.t` with unsorted rows and no index, and return its rows.

    The target file size of the table is the size of its files.

    Args:
        files: The number of files.
        rows: The number of rows of a file.
    """
    return create_table(client, [make_rows(rng, rows) for _ in range(files)])


def create_table(client: IndexClient, parts: Sequence[pa.Table]) -> pa.Table:
    """Create `db.t` with one file for each part, and return all rows. The target file size is the size of the files."""
    with open_catalog(client.url) as catalog:
        catalog.create_namespace_if_not_exists("db")
        catalog.create_table(TABLE, schema=parts[0].schema)
    for part in parts:
        append(client, TABLE, part)
    sizes = client.files(TABLE)["file_size_in_bytes"].to_pylist()
    change_table_properties(client, TABLE, {TARGET_FILE_BYTES: str(int(np.mean(sizes)))}, ())
    return pa.concat_tables(parts)


def draw_workload(rng: np.random.Generator) -> Workload:
    """Return a workload of five conditions. Their frequencies are 1, 1/4, 1/9, 1/16 and 1/25, in random order."""

    def draw_days(rng: np.random.Generator) -> str:
        start = rng.integers(0, 335)  # The 30 days end within the 365 days of the table.
        return f"day >= {start} AND day < {start + 30}"

    def draw_recent_days(rng: np.random.Generator) -> str:
        return f"day >= {rng.integers(350, 360)}"

    def draw_code(rng: np.random.Generator) -> str:
        return f"code = 'c{rng.integers(0, CODES):04d}'"

    def draw_region_and_days(rng: np.random.Generator) -> str:
        return f"region = {rng.integers(0, REGIONS)} AND {draw_days(rng)}"

    def draw_amount(rng: np.random.Generator) -> str:
        return f"amount > {rng.uniform(3, 8):.3f}"

    conditions = [draw_days, draw_recent_days, draw_code, draw_region_and_days, draw_amount]
    weights = 1.0 / np.arange(1, len(conditions) + 1) ** 2
    return Workload(conditions, [float(weight) for weight in rng.permutation(weights)])


def run_statements(client: IndexClient, wheres: Sequence[str]) -> None:
    """Plan the statements, as the Trino proxy does, so that the server records them.

    `kept-max` is 0, so the server creates no plan table for a plan that keeps any file.
    """
    for where in wheres:
        client._request_json("POST", f"{make_table_path(TABLE)}/plan-tables", {}, {"predicate": where, "kept-max": 0})


def measure_planned_bytes(client: IndexClient, wheres: Sequence[str]) -> float:
    """Return the mean number of bytes that the server's planner keeps for a condition."""
    return float(np.mean([client.explain(TABLE, where).bytes for where in wheres]))
