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
from seamark.connector.analysis.views import QUERY_PREFIX, plan_view_query
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
    """A function that returns the columns of a table or view with their types.

    Tables have the columns that `KnownColumns` selects. A column of a view has the type COMPUTED if the analysis of the
    view's text does not find the type of the stored column. A view can read the views before it.
    """

    def __init__(
        self, known_columns: KnownColumns, views: Mapping[str, StoredRelation], texts: Mapping[str, str]
    ) -> None:
        self._known_columns = known_columns
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
    """Return random views of at most ROWS_MAX rows, and their texts.

    A view reads tables and the views before it.
    """
    views, texts, tables = {}, {}, statements.tables
    while len(views) < VIEWS:
        name = f"v{len(views)}"
        # Each view is in the list three times, so that views are often nested.
        statements.tables = [*tables, *[view for view in views.values() for _ in range(3)]]
        depth = statements.rng.choice([1, 1, 2])  # Most views have no subquery.
        text, columns = statements.draw_with_query([], depth, outer=[])
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
    """Return the scans of tables without the scans of views.

    Joins with views are dropped. The other joins get the new positions of their scans.
    """
    new_numbers = {
        number: new_number
        for new_number, number in enumerate(n for n, scan in enumerate(scans) if scan.table not in views)
    }
    return tuple(
        replace(
            scans[number],
            joins=tuple(
                replace(join, scan=new_numbers[join.scan]) for join in scans[number].joins if join.scan in new_numbers
            ),
        )
        for number in new_numbers
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

    def store_plan_views(self, scans: tuple[Scan, ...], depth: int = 0) -> tuple[list[Replacement], list[str]]:
        """Store a plan view, which has only the needed rows, for each view that is read.

        Return the replacements of the views by plan views in the statement, and the names of the plan views.
        """
        replacements, plan_views = [], []
        for number, scan in enumerate(scans):
            name = f"{scan.table}~plan~{depth}~{number}"
            may_be_planned = scan.table in self.views and self.remaining_views > 0 and depth < DEPTH_MAX
            if may_be_planned and self.store_plan_view(scan, name, depth):
                replacements.append(read_from_view(scan, name))
                plan_views.append(name)
        return replacements, plan_views

    def store_plan_view(self, scan: Scan, name: str, depth: int) -> bool:
        """Store the needed rows of a view as the table `name`. Return False if the plan leaves nothing out."""
        self.remaining_views -= 1
        text, predicate = self.texts[scan.table], scan.predicate or "TRUE"
        view_query = plan_view_query(text, scan.table, predicate)
        inner_scans = find_scans(view_query, find_columns=self.view_columns)
        # The view's text follows the text QUERY_PREFIX, and each of its tables must be found within the view's text.
        assert all(
            len(QUERY_PREFIX) <= replacement.start < replacement.end <= len(QUERY_PREFIX) + len(text)
            for replacement in inner_scans
        )
        # One view in ten keeps its nested views.
        replacements, plan_views = (
            self.store_plan_views(inner_scans, depth + 1) if self.rng.random() < 0.9 else ([], [])
        )
        table_scans = drop_view_scans(inner_scans, self.views)
        if not plan_views and not any(scan.predicate or scan.joins for scan in table_scans):
            return False
        _, plan_tables, _ = store_plan_tables(self.rng, self.connection, view_query, table_scans)
        pruned_text = splice(
            view_query,
            [
                *replacements,
                *(read_from_view(scan, plan) for scan, plan in zip(table_scans, plan_tables, strict=True)),
            ],
        )
        self.connection.execute(f"CREATE TABLE {quote(name)} AS {pruned_text}")
        # The plan view has exactly the rows of the view that match the predicate.
        allowed_rows = count_rows(self.connection, f"SELECT * FROM {scan.table} WHERE {predicate}")
        assert count_rows(self.connection, f"FROM {quote(name)}") == allowed_rows, (
            f"{view_query}\n-- became\n{pruned_text}"
        )
        self.drop([*plan_views, *plan_tables])
        self.counts["views pruned"] += 1
        self.counts["views pruned within views"] += depth > 0
        self.counts["views requested within views"] += depth > 0 and scan.predicate is not None
        return True

    def drop(self, names: list[str]) -> None:
        for name in names:
            self.connection.execute(f"DROP TABLE {quote(name)}")


def run_campaign(seed: int, lake_count: int) -> Counter[str]:
    """Check that random statements return the same rows after their views and tables are replaced.

    Views are replaced by their needed rows (plan views), tables by their needed rows (plan tables), or both.

    Returns:
        The number of statements and views by what was replaced.
    """
    counts: Counter[str] = Counter()
    for rng, statements, connection in draw_lakes(seed, lake_count):
        # Without this, DuckDB 2.0 evaluates EXISTS over a LEFT JOIN with an empty table as false.
        connection.execute("PRAGMA disable_optimizer")
        views, texts = make_views(statements, connection)
        view_columns = ViewColumns(KnownColumns(rng, statements.tables), views, texts)
        plan_views = PlanViews(rng, connection, view_columns, views, texts, counts)
        # Each view is in the list three times, because the campaign tests views more than tables.
        statements.tables = [*statements.tables, *[view for view in views.values() for _ in range(3)]]
        for _ in range(QUERIES_PER_LAKE):
            text = statements.draw_query(depth=rng.choice([1, 1, 2, 2, 3]))
            try:
                expected = count_rows(connection, text)
            except duckdb.Error:
                counts["invalid"] += 1
                continue
            counts["queries"] += 1
            counts["with rows"] += bool(expected)
            scans = find_scans(text, find_columns=view_columns)
            counts["views with a condition"] += sum(
                scan.table in views and scan.predicate is not None for scan in scans
            )
            plan_views.remaining_views = VIEWS_MAX
            replacements, plan_view_names = plan_views.store_plan_views(scans)
            text_over_views = splice(text, replacements)
            table_scans = drop_view_scans(scans, views)
            text_over_tables, plan_tables, _ = store_plan_tables(rng, connection, text, table_scans)
            text_over_both = splice(
                text,
                [
                    *replacements,
                    *(read_from_view(scan, name) for scan, name in zip(table_scans, plan_tables, strict=True)),
                ],
            )
            for changed_text in (text_over_views, text_over_tables, text_over_both):
                assert count_rows(connection, changed_text) == expected, (
                    f"seed {seed}\n{texts}\n{text}\n-- became\n{changed_text}"
                )
            plan_views.drop([*plan_view_names, *plan_tables])
    return counts


def check_campaign_counts(counts: Counter[str]) -> None:
    assert counts["invalid"] < 0.15 * counts["queries"], counts
    assert counts["with rows"] > 0.2 * counts["queries"], counts
    assert counts["views with a condition"] > 0.05 * counts["queries"], counts
    assert counts["views pruned"] > 0.3 * counts["views with a condition"], counts
    assert counts["views pruned within views"] > 0.1 * counts["views pruned"], counts
    assert counts["views requested within views"] > 0.005 * counts["views pruned"], counts


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "lake_count"), [(25, 2), (21, 4), (22, 4), (25, 4)])
def test_random_queries_keep_their_rows_over_pruned_views(seed: int, lake_count: int) -> None:
    check_campaign_counts(run_campaign(seed, lake_count))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(300, 310))
def test_thousands_of_queries_over_views_keep_their_rows(seed: int) -> None:
    check_campaign_counts(run_campaign(seed, 20))
