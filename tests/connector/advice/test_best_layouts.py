"""Tests that compare the first proposals of the advisor with an exhaustive search over layouts and indexes.

The search (`exact_layouts.py`) knows all rows and all statements with their literals, and divides the rows into files
itself. The advisor knows only statement shapes without literals, and a sample.
"""

from __future__ import annotations

import shlex

import numpy as np
import pyarrow as pa
import pytest

from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.names import make_table_path
from seamark.connector.client.policies import change_table_properties, load_advice
from seamark.connector.write.appends import append
from seamark.formats.iceberg.metadata.properties import TARGET_FILE_BYTES
from tests.connector.advice.benchmarks import BENCHMARKS
from tests.connector.advice.exact_layouts import find_best_gain, find_gains, split_by_column
from tests.connector.advice.workloads import (
    FILES,
    ROWS,
    TABLE,
    create_table,
    draw_workload,
    make_table,
    run_statements,
)
from tests.connector.lake import open_catalog
from tests.seeds import first_seed

COLUMNS = ("code", "region", "amount", "day")


@pytest.mark.slow
@pytest.mark.parametrize("case", range(8))
def test_one_of_the_first_five_proposals_gains_80_percent_of_the_best_layout(client: IndexClient, case: int) -> None:
    rng = np.random.default_rng(first_seed() + 500 + case)  # Each case has its own rows and statements.
    rows = make_table(client, rng)
    wheres = draw_workload(rng).draw(rng, count=80)
    run_statements(client, wheres)
    proposals = load_advice(client, TABLE)["proposals"]
    gains = find_gains(rows, wheres, COLUMNS)
    titles = [proposal["title"] for proposal in proposals]
    assert find_best_gain(proposals, gains) >= 0.8 * max(gains.values()), (gains, titles)
    assert proposals[0]["pays-after-days"] <= 30


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_one_of_the_first_five_proposals_gains_80_percent_of_the_best_layout_of_a_benchmark(
    client: IndexClient, benchmark: str
) -> None:
    """`find_best_gain` compares the first five proposals."""
    make_part, queries = BENCHMARKS[benchmark]
    rng = np.random.default_rng(first_seed() + 600)
    rows = create_table(client, [make_part(rng, ROWS) for _ in range(FILES)])
    wheres = list(queries) * 4  # Each query runs four times.
    run_statements(client, wheres)
    proposals = load_advice(client, TABLE)["proposals"]
    compared_columns = sorted({column for where in queries for column in split_by_column(where)})
    gains = find_gains(rows, wheres, compared_columns)
    largest_gains = sorted(gains.items(), key=lambda pair: -pair[1])[:5]
    titles = [proposal["title"] for proposal in proposals]
    assert find_best_gain(proposals, gains) >= 0.8 * largest_gains[0][1], (largest_gains, titles)
    assert proposals[0]["pays-after-days"] <= 30


@pytest.mark.slow
def test_no_proposal_is_made_for_statements_that_no_layout_helps(client: IndexClient) -> None:
    make_table(client, np.random.default_rng(first_seed()))
    run_statements(client, [f"day >= {day}" for day in (0, 1, 2)] + ["note <> 'x'"])
    advice = load_advice(client, TABLE)
    assert (advice["proposals"], advice["before"]["files"]) == ([], FILES)
    assert "no change would save" in advice["reason"]


def test_printed_commands_quote_names_of_columns(client: IndexClient) -> None:
    """The column names come from writers, and an administrator copies the commands."""
    name = "c'; rm -rf ~ `x`"
    rows = pa.table({name: np.arange(4000) % 97, "n": np.arange(4000)})
    with open_catalog(client.url) as catalog:
        catalog.create_namespace_if_not_exists("db")
        catalog.create_table(TABLE, schema=rows.schema)
    for start in range(0, 4000, 500):
        append(client, TABLE, rows.slice(start, 500))
    # With this target size, the table has several files after a change of its layout.
    change_table_properties(client, TABLE, {TARGET_FILE_BYTES: "3000"}, ())
    plan = {"filter": {"type": "eq", "term": name, "value": 5}, "kept-max": 0}
    for _ in range(99):  # The statements are frequent enough that a change of the layout is proposed.
        client._request_json("POST", f"{make_table_path(TABLE)}/plan-tables", {}, plan)
    proposals = load_advice(client, TABLE)["proposals"]
    command_words = [
        shlex.split(command)
        for proposal in proposals
        for command in proposal["commands"]
        if command.startswith("seamark")
    ]
    assert command_words
    assert all(";" not in words and "rm" not in words for words in command_words)
    statements = [command for proposal in proposals for command in proposal["commands"] if command.startswith("ALTER")]
    assert all("`c'; rm -rf ~ ``x```" in statement for statement in statements)
