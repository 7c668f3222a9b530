"""Tests that random queries on random and nested views give the same rows over views with only the required rows.

The plan view also contains no rows that the view did not have. DuckDB runs both statements, as in
`test_scans_oracle.py`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import duckdb
import pytest

from seamark.connector.analysis.algebra.relations import COMPUTED
from seamark.connector.analysis.lexer import UnsupportedStatement
from seamark.connector.analysis.scans import find_result_types, find_scans, parse_query, read_from_view
from seamark.connector.analysis.views import BEFORE, plan_view_query
from seamark.connector.plans.scan import Scan
from seamark.connector.plans.splices import Replacement, splice
from tests.connector.analysis.comparisons import StoredRelation, quote
from tests.connector.analysis.statements import RandomStatements
from tests.connector.analysis.test_scans_oracle import KnownColumns, count_rows, draw_lakes, store_plan_tables

QUERIES_PER_LAKE = 40
VIEWS = 5
VIEWS_MAX = 16
"""The largest number of plan views that are made for one statement."""
DEPTH_MAX = 4
ROWS_MAX = 60
"""The largest number of rows of a view. Views that join nested views could otherwise have millions."""


class ViewColumns:
    """The columns of each table that `KnownColumns` selects, and the columns of each view.

    A view can read the views before it.
    """

    def __init__(self, expected: KnownColumns, views: Mapping[str, StoredRelation], texts: Mapping[str, str]) -> None:
        self._known_columns = expected
        self._views: dict[str, dict[str, str]] = {}
        for name, view in views.items():
            columns = {column.lower(): kind for column, kind in view.columns.items()}
            try:
                types = find_result_types(parse_query(texts[name]), tuple(columns), find_columns=self)
            except UnsupportedStatement:
                types = {}
            self._views[name] = {
                column: kind if types.get(column) == kind else COMPUTED for column, kind in columns.items()
            }

    def __call__(self, names: tuple[str | None, str | None, str]) -> Mapping[str, str] | None:
        return self._views.get(names[2]) or self._known_columns(names)


def make_views(
    statements: RandomStatements, connection: duckdb.DuckDBPyConnection
) -> tuple[dict[str, StoredRelation], dict[str, str]]:
    """Return random views and their texts. A view reads tables and the views before it."""
    views, texts, tables = {}, {}, statements.tables
    while len(views) < VIEWS:
        name = f"v{len(views)}"
        statements.tables = [*tables, *[view for view in views.values() for _ in range(3)]]
        text, columns = statements.draw_with_query([], statements.rng.choice([1, 1, 2]), [])
        if len({column.lower() for column, _ in columns}) < len(columns):
            continue
        try:
            if len(connection.execute(f"FROM ({text}) LIMIT {ROWS_MAX + 1}").fetchall()) > ROWS_MAX:
                continue
            connection.execute(f"CREATE VIEW {name} AS {text}")
        except duckdb.Error:
            continue
        views[name], texts[name] = StoredRelation(name, dict(columns)), text
    statements.tables = tables
    return views, texts


def drop_view_scans(scans: tuple[Scan, ...], views: Mapping[str, StoredRelation]) -> tuple[Scan, ...]:
    """Return the scans without those of views. The joins among the remaining scans stay."""
    numbers = {number: left for left, number in enumerate(n for n, scan in enumerate(scans) if scan.table not in views)}
    return tuple(
        replace(
            scans[number],
            joins=tuple(replace(j, scan=numbers[j.scan]) for j in scans[number].joins if j.scan in numbers),
        )
        for number in numbers
    )


@dataclass
class PlanViews:
    """The plan views of the statements on one random lake."""

    rng: random.Random
    connection: duckdb.DuckDBPyConnection
    view_columns: ViewColumns
    views: Mapping[str, StoredRelation]
    texts: Mapping[str, str]
    counts: Counter[str]
    remaining_views: int = 0
    """The number of views that the test may still replace, because nested views can contain very many views."""

    def replace_views(self, scans: tuple[Scan, ...], depth: int = 0) -> tuple[list[Replacement], list[str]]:
        """Return replacements of views by plan views, and the names of the plan views."""
        replacements, names = [], []
        for number, scan in enumerate(scans):
            name = f"{scan.table}~plan~{depth}~{number}"
            is_looked_into = scan.table in self.views and self.remaining_views > 0 and depth < DEPTH_MAX
            if is_looked_into and self.store_plan_view(scan, name, depth):
                replacements.append(read_from_view(scan, name))
                names.append(name)
        return replacements, names

    def store_plan_view(self, scan: Scan, name: str, depth: int) -> bool:
        """Store the rows of the plan view as the table `name`. Return False if the plan leaves nothing out."""
        self.remaining_views -= 1
        text, predicate = self.texts[scan.table], scan.predicate or "TRUE"
        view_query = plan_view_query(text, scan.table, predicate)
        inner = find_scans(view_query, find_columns=self.view_columns)
        assert all(
            len(BEFORE) <= replacement.start < replacement.end <= len(BEFORE) + len(text) for replacement in inner
        )
        # One view in ten keeps its nested views.
        replacements, names = self.replace_views(inner, depth + 1) if self.rng.random() < 0.9 else ([], [])
        remaining_scans = drop_view_scans(inner, self.views)
        if not names and not any(scan.predicate or scan.joins for scan in remaining_scans):
            return False
        _, pruned_scans, _ = store_plan_tables(self.rng, self.connection, view_query, remaining_scans)
        cut_text = splice(
            view_query,
            [
                *replacements,
                *(read_from_view(scan, plan) for scan, plan in zip(remaining_scans, pruned_scans, strict=True)),
            ],
        )
        self.connection.execute(f"CREATE TABLE {quote(name)} AS {cut_text}")
        # The plan view has exactly the rows of the view that match the predicate.
        allowed_rows = count_rows(self.connection, f"SELECT * FROM {scan.table} WHERE {predicate}")
        assert count_rows(self.connection, f"FROM {quote(name)}") == allowed_rows, (
            f"{view_query}\n-- became\n{cut_text}"
        )
        self.drop([*names, *pruned_scans])
        self.counts["views cut"] += 1
        self.counts["views cut within views"] += depth > 0
        self.counts["views requested within views"] += depth > 0 and scan.predicate is not None
        return True

    def drop(self, names: list[str]) -> None:
        for name in names:
            self.connection.execute(f"DROP TABLE {quote(name)}")


def run_campaign(seed: int, lakes_count: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for rng, statements, connection in draw_lakes(seed, lakes_count):
        # Without this, DuckDB 2.0 evaluates EXISTS over a LEFT JOIN with an empty table as false.
        connection.execute("PRAGMA disable_optimizer")
        views, texts = make_views(statements, connection)
        views_with_columns = ViewColumns(KnownColumns(rng, statements.tables), views, texts)
        views_without_columns = PlanViews(rng, connection, views_with_columns, views, texts, counts)
        statements.tables = [*statements.tables, *[view for view in views.values() for _ in range(3)]]
        for _ in range(QUERIES_PER_LAKE):
            text = statements.draw_query(rng.choice([1, 1, 2, 2, 3]))
            try:
                expected = count_rows(connection, text)
            except duckdb.Error:
                counts["invalid"] += 1
                continue
            counts["queries"] += 1
            counts["with rows"] += bool(expected)
            scans = find_scans(text, find_columns=views_with_columns)
            counts["views asked"] += sum(scan.table in views and scan.predicate is not None for scan in scans)
            views_without_columns.remaining_views = VIEWS_MAX
            replacements, names = views_without_columns.replace_views(scans)
            spliced_text = splice(text, replacements)
            remaining_scans = drop_view_scans(scans, views)
            pruned_rows, pruned_scans, _ = store_plan_tables(rng, connection, text, remaining_scans)
            joined_text = splice(
                text,
                [
                    *replacements,
                    *(read_from_view(scan, name) for scan, name in zip(remaining_scans, pruned_scans, strict=True)),
                ],
            )
            for became in (spliced_text, pruned_rows, joined_text):
                assert count_rows(connection, became) == expected, f"seed {seed}\n{texts}\n{text}\n-- became\n{became}"
            views_without_columns.drop([*names, *pruned_scans])
    return counts


def check_campaign_counts(counts: Counter[str]) -> None:
    assert counts["invalid"] < 0.15 * counts["queries"], counts
    assert counts["with rows"] > 0.2 * counts["queries"], counts
    assert counts["views asked"] > 0.05 * counts["queries"], counts
    assert counts["views cut"] > 0.3 * counts["views asked"], counts
    assert counts["views cut within views"] > 0.1 * counts["views cut"], counts
    assert counts["views requested within views"] > 0.005 * counts["views cut"], counts


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "lakes"), [(25, 2), (21, 4), (22, 4), (25, 4)])
def test_random_queries_keep_their_rows_over_pruned_views(seed: int, lakes: int) -> None:
    check_campaign_counts(run_campaign(seed, lakes))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(300, 310))
def test_thousands_of_queries_over_views_keep_their_rows(seed: int) -> None:
    check_campaign_counts(run_campaign(seed, 20))
