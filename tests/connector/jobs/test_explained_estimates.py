"""Tests that the estimates of explain are close to the number of files after a clustering or an index build."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from seamark.commands.explain import suggest_improvements
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.policies import change_table_properties
from seamark.connector.client.values import Explanation
from seamark.connector.index.builds import InProcessWorkers, build
from seamark.connector.jobs.clustering import cluster_incrementally
from seamark.connector.jobs.statistics import compute_statistics
from seamark.connector.write.appends import append
from tests.connector.lake import open_catalog
from tests.seeds import first_seed, mark_fast

COLUMNS = "seamark.clustering.columns"
TARGET = "write.target-file-size-bytes"
FILES, ROWS_PER_FILE = 48, 300
COLORS = ("red", "green", "blue", "black", "white", "grey")


def draw_rows(rng: np.random.Generator, file_number: int) -> pa.Table:
    """Return the rows of one file.

    `color` has six values. `code` has two hundred values, some of them frequent. `amount` is skewed, `id` is unique,
    `day` follows the order of the files, and `note` is a random text.
    """
    code_count = 200
    weights = 1.0 / np.arange(1, code_count + 1)
    return pa.table(
        {
            "id": rng.permutation(FILES * ROWS_PER_FILE)[:ROWS_PER_FILE] * FILES + file_number,
            "color": [COLORS[index] for index in rng.integers(0, len(COLORS), ROWS_PER_FILE)],
            "code": [f"code {index:03d}" for index in rng.choice(code_count, ROWS_PER_FILE, p=weights / weights.sum())],
            "amount": np.exp(2 * rng.standard_normal(ROWS_PER_FILE)),
            "day": np.full(ROWS_PER_FILE, file_number // 3),
            "note": [f"{index:x}" * 4 for index in rng.integers(0, 1 << 30, ROWS_PER_FILE)],
        }
    )


def create_table(client: IndexClient, rng: np.random.Generator) -> pa.Table:
    """Create the table `db.t`, whose target file size is the size of its files, and return its rows."""
    parts = [draw_rows(rng, number) for number in range(FILES)]
    with open_catalog(client.url) as catalog:
        catalog.create_namespace_if_not_exists("db")
        catalog.create_table("db.t", schema=parts[0].schema)
    for part in parts:
        append(client, "db.t", part)
    sizes = client.files("db.t")["file_size_in_bytes"].to_pylist()
    change_table_properties(client, "db.t", {TARGET: str(int(np.mean(sizes)))}, ())
    return pa.concat_tables(parts)


def index_layouts(explanation: Explanation) -> dict[tuple[str, ...], tuple[int, int]]:
    return {tuple(layout["columns"]): (layout["files"], layout["files-in"]) for layout in explanation.layouts}


def is_close(estimate: int, true_files: int) -> bool:
    """Return True if the estimate is within two files or within a factor of two."""
    return abs(estimate - true_files) <= 2 or true_files / 2 <= estimate <= 2 * true_files


@pytest.mark.slow
@pytest.mark.parametrize("case", mark_fast(range(6), 1))
def test_clustered_table_keeps_about_as_many_files_as_explain_estimated(client: IndexClient, case: int) -> None:
    rng = np.random.default_rng(first_seed() + case)
    table = create_table(client, rng)
    amounts = np.sort(table["amount"].to_numpy()).tolist()
    conditions = {
        "color": [
            f"color = '{rng.choice(COLORS)}'",
            "color IN ('red', 'blue')",
            "color > 'green' AND color < 'white'",
        ],
        "code": ["code = 'code 000'", f"code = 'code {rng.integers(60, 200):03d}'", "code = 'code 0505'"],
        "amount": [f"amount < {amounts[int(share * len(amounts))]!r}" for share in (0.5, 0.1, 0.01)],
        "id": [f"id = {table['id'][int(rng.integers(len(table)))].as_py()}", "id BETWEEN 1000 AND 30000"],
    }
    estimates_by_condition: dict[str, tuple[int, int]] = {}
    for column, wheres in conditions.items():
        for where in wheres:
            reported_layouts = index_layouts(client.explain("db.t", where))
            if (column,) in reported_layouts:
                estimates_by_condition[where] = reported_layouts[column,]
            else:
                estimates_by_condition[where] = FILES, FILES
    # Explain proposes a layout for most of the 11 conditions.
    assert sum(estimate < FILES for estimate, _ in estimates_by_condition.values()) >= 8, estimates_by_condition
    for column, wheres in conditions.items():
        change_table_properties(client, "db.t", {COLUMNS: column}, ())
        assert cluster_incrementally(client, "db.t", full=True).commits
        files = len(client.files("db.t"))
        for where in wheres:
            explanation, (estimate, estimated_files) = client.explain("db.t", where), estimates_by_condition[where]
            if estimate < FILES:
                assert is_close(estimated_files, files), (where, estimated_files, files)
                assert is_close(estimate, explanation.files), (where, estimate, explanation.files)
            else:
                # A layout for which Explain gives no estimate must not leave out most of the files.
                assert explanation.files > 0.4 * files, (where, explanation.files, files)
            repeated_layouts = [columns for columns in index_layouts(explanation) if set(columns) <= {column}]
            assert not repeated_layouts, (where, explanation.layouts)


@pytest.mark.parametrize("case", mark_fast(range(6), 1))
def test_index_keeps_about_as_many_files_as_explain_estimated(client: IndexClient, case: int) -> None:
    """Explain proposes no index that would leave out few files."""
    rng = np.random.default_rng(first_seed() + 100 + case)
    table = create_table(client, rng)
    amounts = np.sort(table["amount"].to_numpy()).tolist()
    conditions = {
        "color = 'blue'": "bloom",
        "color IN ('red', 'none')": "bloom",
        "code = 'code 000'": "bloom",
        f"code = 'code {rng.integers(150, 200):03d}'": "bloom",
        "code = 'code 0505'": "bloom",
        f"id = {table['id'][int(rng.integers(len(table)))].as_py()}": "bloom",
        f"amount < {amounts[20]!r}": "bitmap",
        f"amount < {amounts[len(amounts) // 2]!r}": "bitmap",
    }
    terms_by_condition: dict[str, dict[str, Any]] = {}
    for where in conditions:
        terms = client.explain("db.t", where).terms
        terms_by_condition[where] = next(term for term in terms if term["filter"]["type"] != "not-null")
    # Nearly all files contain each color and the most frequent code.
    assert [terms_by_condition[where]["index-kind"] for where in list(conditions)[:3]] == [None] * 3
    assert terms_by_condition["code = 'code 0505'"]["index-kind"] == "bloom"
    for column, kind in (("color", "bloom"), ("code", "bloom"), ("id", "bloom"), ("amount", "bitmap")):
        client.put_index("db.t", f"{kind}_{column}", kind=kind, columns=[column])
        build(client, "db.t", f"{kind}_{column}", InProcessWorkers())
    for where, term in terms_by_condition.items():
        true_files = client.explain("db.t", where).files
        if term["index-files"] is None:
            assert term["index-note"] or term["files-left"] <= FILES // 2, (where, term)
        elif term["index-kind"] is None:
            # An index that is not proposed must not leave out most of the files.
            assert true_files > 0.3 * term["files-left"], (where, term, true_files)
        else:
            assert is_close(term["index-files"], true_files), (where, term, true_files)


@pytest.mark.slow
def test_proposed_layout_keeps_the_columns_that_the_table_is_already_clustered_by(client: IndexClient) -> None:
    """The property `seamark.clustering.columns` names the columns. A new proposal keeps them and may add others."""
    create_table(client, np.random.default_rng(5))
    id_condition = "id BETWEEN 1000 AND 30000"
    assert ("id",) in index_layouts(client.explain("db.t", id_condition))
    change_table_properties(client, "db.t", {COLUMNS: "color"}, ())
    assert {tuple(columns) for columns in index_layouts(client.explain("db.t", id_condition))} == {("color", "id")}
    assert index_layouts(client.explain("db.t", "color = 'red'")) == {}
    assert not any(
        "seamark.clustering" in line for line in suggest_improvements("db.t", client.explain("db.t", "color = 'red'"))
    )


@pytest.mark.slow
def test_explain_gives_no_estimate_for_a_value_without_a_sample(client: IndexClient) -> None:
    """The data files cannot be read. When the table has statistics, they give the number of distinct values."""
    create_table(client, np.random.default_rng(6))
    paths = [Path(path.removeprefix("file://")) for path in client.files("db.t")["file_path"].to_pylist()]
    content_by_path = {path: path.read_bytes() for path in paths}
    for path in paths:
        path.write_bytes(b"x" * len(content_by_path[path]))
    explanation = client.explain("db.t", "color = 'red'")
    assert explanation.layouts == ()
    assert [unknown_layout["column"] for unknown_layout in explanation.unknown_layouts] == ["color"]
    lines = list(suggest_improvements("db.t", explanation))
    assert any("The effect of a layout by color is unknown: a data file cannot be read" in line for line in lines)
    assert any("The number of files that an index would keep is unknown" in line for line in lines)
    assert not any("about" in line for line in lines)
    for path in paths:
        path.write_bytes(content_by_path[path])
    compute_statistics(client, "db.t")
    for path in paths:
        path.write_bytes(b"x" * len(content_by_path[path]))
    (estimate, estimated_files) = index_layouts(client.explain("db.t", "color = 'red'"))["color",]
    assert is_close(estimate, estimated_files // len(COLORS))
