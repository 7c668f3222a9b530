"""Random statements with SQL that DuckDB accepts and Trino does not: operands of different types, and NaN."""

from __future__ import annotations

from tests.connector.analysis.comparisons import ALIASES, COLUMN_NAMES, Scope, ScopeColumn, StoredRelation, quote
from tests.connector.analysis.statements import RandomStatements

LOOSE_CONDITIONS = {
    "long": ["'2'", "1.5", "2.0", "1e0", "'-1'"],
    "decimal(9, 2)": ["'1.5'", "2.25e0", "1.501"],
    "decimal(20, 18)": ["'0.3'", "0.3e0", "1.501"],
    "double": ["'NaN'::DOUBLE", "'1.5'", "'inf'::DOUBLE", "1.5::FLOAT"],
    "string": ["'B'", "E'a'"],
    "date": ["'2020-01-31'", "TIMESTAMP '2020-01-31 12:00:00'", "TIMESTAMP '2020-01-31 00:00:00'"],
    "timestamp": ["'2020-01-31'", "'2020-01-31 12:00:00'", "DATE '2020-01-31'", "'2020-01-31T12:00:00'"],
    "boolean": ["'true'", "1"],
}
COMPARABLE_TYPES = {("long", "double"), ("decimal(9, 2)", "long"), ("double", "decimal(9, 2)"), ("timestamp", "date")}


"""Pairs of different types that DuckDB compares."""
TEXTS_BY_FORMAT = {
    "%Y": ["2020", "2021", "0033"],
    "%Y-%m": ["2020-01", "2020-1", "2021-01"],
    "%Y%m%d": ["20200131", "20210101"],
    "%Y-%m-%d": ["2020-02-29", "2020-01-31"],
    "%d": ["31"],
}


class LooseStatements(RandomStatements):
    other_groups = ("ALL",)
    listed_share = 0.7

    def draw_body(self, relations: list[StoredRelation], depth: int, outer: Scope) -> tuple[str, list[tuple[str, str]]]:
        """Return a query. Some queries are set operations between `SELECT *` from names in WITH and from subqueries."""
        if depth < 2 or not self.draw_chance(0.1):
            return super().draw_body(relations, depth, outer)
        kinds = [self.rng.choice(["long", "long", "string", "date", "double"]) for _ in range(self.rng.randint(1, 3))]
        first_name, second_name, alias = self.rng.sample(ALIASES, 3)
        left, columns = self.draw_select(relations, depth - 1, outer, in_set_operation=True, kinds=kinds)
        right, _ = self.draw_select(relations, depth - 1, outer, in_set_operation=True, kinds=kinds)
        right_side = self.rng.choice(
            [self.spell(second_name), f"(SELECT * FROM {self.spell(second_name)}) AS s", f"({right}) AS s"]
        )
        set_operator = self.rng.choice(["UNION", "UNION ALL", "UNION ALL", "INTERSECT", "EXCEPT"])
        clauses = f"WITH {self.spell(first_name)} AS ({left}), {self.spell(second_name)} AS ({right})"
        joined_text = f"SELECT * FROM {self.spell(first_name)} {set_operator} SELECT * FROM {right_side}"
        return f"SELECT * FROM ({clauses} {joined_text}) AS {self.spell(alias)}", columns

    def draw_value(self, kind: str) -> str:
        return "'NaN'" if kind == "double" and self.draw_chance(0.15) else super().draw_value(kind)

    def draw_literal(self, kind: str) -> str:
        return self.rng.choice(LOOSE_CONDITIONS[kind]) if self.draw_chance(0.25) else super().draw_literal(kind)

    def draw_comparison(self, column: ScopeColumn, scope: Scope) -> str:
        if column.kind == "string" and self.draw_chance(0.1):
            name, negation = self.write_reference(column, scope), self.rng.choice(["", "NOT "])
            return f"{name} {negation}ILIKE '{self.rng.choice('%_')}B%'"
        if self.draw_chance(0.12):
            return self.draw_list_condition(column, scope)
        if column.kind == "long" and self.draw_chance(0.12):
            return (
                f"{self.write_reference(column, scope)} // {self.rng.choice('2357')}"
                f" {self.draw_operator()} {self.draw_literal('long')}"
            )
        if column.kind in ("date", "timestamp") and self.draw_chance(0.1):
            form = self.rng.choice(list(TEXTS_BY_FORMAT))
            text = f"strftime({self.write_reference(column, scope)}, '{form}')"
            op = self.rng.choice(["=", "=", "<>", "<", "<=", ">", ">="])
            return f"{text} {op} '{self.rng.choice(TEXTS_BY_FORMAT[form])}'"
        return super().draw_comparison(column, scope)

    def draw_list_condition(self, column: ScopeColumn, scope: Scope) -> str:
        """Return a condition with a list, a row value, CASE or `if`, sometimes with nulls and values of other types."""
        name, negated = self.write_reference(column, scope), self.rng.choice(["", "", "NOT "])
        other_column = self.choose_column(scope, scope) or column
        values = ", ".join(self.draw_any_value(column.kind) for _ in range(2))
        row = f"({self.draw_any_value(column.kind)}, {self.draw_any_value(other_column.kind)})"
        function = self.rng.choice(["list_contains", "contains", "list_has"])
        return self.rng.choice(
            [
                f"{name} {negated}IN (SELECT unnest([{values}]))",
                f"{negated}{function}([{values}], {name})",
                f"({name}, {self.write_reference(other_column, scope)}) {negated}IN ({row}, {row})",
                f"({name}, {self.write_reference(other_column, scope)}) = {row}",
                f"CASE {name} WHEN {self.draw_any_value(column.kind)} THEN 'x' ELSE 'y' END {self.draw_operator()} 'x'",
                f"CASE WHEN {self.draw_simple_condition(scope)} THEN 'x' WHEN"
                f" {self.draw_simple_condition(scope)} THEN 'y' END {self.draw_operator()} 'x'",
                f"if({self.draw_simple_condition(scope)}, {name}, {self.draw_any_value(column.kind)})"
                f" {self.draw_operator()}"
                f" {self.draw_any_value(column.kind)}",
            ]
        )

    def draw_any_value(self, kind: str) -> str:
        if self.draw_chance(0.1):
            return "NULL"
        return self.rng.choice(LOOSE_CONDITIONS[kind]) if self.draw_chance(0.1) else self.draw_value(kind)

    def draw_unnest(self, used_names: set[str]) -> tuple[str, Scope]:
        """Return a list of literals as a source, with or without column names."""
        alias = self.rng.choice([alias for alias in ALIASES if alias.lower() not in used_names])
        kinds = [self.rng.choice(["long", "long", "string", "date"]) for _ in range(self.rng.randint(1, 2))]
        names = self.rng.sample(COLUMN_NAMES, self.rng.randint(0, len(kinds)))
        text = f" ({', '.join(map(quote, names))})" if names else ""
        if self.draw_chance(0.3):
            # Without a column name, DuckDB calls the column `unnest`.
            names, kinds = [*names[:1], "unnest"][:1], kinds[:1]
            text = f" ({quote(names[0])})" if names != ["unnest"] else ""
            values = f"unnest([{', '.join(self.draw_any_value(kinds[0]) for _ in range(2))}])"
        else:
            names += [f"col{number}" for number in range(len(names), len(kinds))]
            rows = (f"({', '.join(map(self.draw_any_value, kinds))})" for _ in range(self.rng.randint(1, 3)))
            values = f"(VALUES {', '.join(rows)})"
        scope = [ScopeColumn(name, kind, alias) for name, kind in zip(names, kinds, strict=True)]
        return f"{values} AS {self.spell(alias)}{text}", scope

    def draw_qualify(self, scope: Scope) -> str:
        if self.draw_chance(0.9):
            return ""
        extra_condition = (
            f" {self.rng.choice(['AND', 'OR'])} {self.draw_simple_condition(scope)}" if self.draw_chance(0.3) else ""
        )
        return f" QUALIFY {self.draw_window(scope)} <= {self.rng.randint(1, 3)}{extra_condition}"

    def draw_correlated_condition(self, scope: Scope, outer: Scope) -> str:
        """Return a condition on a column of the outer query.

        In some cases the column has no qualifier, and its name can also be the name of an output of the subquery.
        """
        column_names = {column.name.lower() for column in scope}
        pairs = [
            (column, outer_column)
            for column in scope
            for outer_column in outer
            if column.kind == outer_column.kind
            and self.can_name(column, scope)
            and outer_column.name.lower() not in column_names
        ]
        if not pairs or self.draw_chance(0.7):
            return super().draw_correlated_condition(scope, outer)
        inner_column, outer_column = self.rng.choice(pairs)
        return f"{self.write_reference(inner_column, scope)} = {self.spell(outer_column.name)}"

    def draw_comparison_of_sides(self, left: Scope, right: Scope, joined_scope: Scope) -> str:
        pairs = [
            (column, right_column)
            for column in left
            for right_column in right
            if (
                (column.kind, right_column.kind) in COMPARABLE_TYPES
                or (right_column.kind, column.kind) in COMPARABLE_TYPES
            )
            and self.can_name(column, joined_scope)
            and self.can_name(right_column, joined_scope)
        ]
        if not pairs or self.draw_chance(0.6):
            return super().draw_comparison_of_sides(left, right, joined_scope)
        left_column, right_column = self.rng.choice(pairs)
        return f"{self.write_reference(left_column, joined_scope)} = {self.write_reference(right_column, joined_scope)}"
