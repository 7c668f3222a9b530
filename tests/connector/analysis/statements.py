"""Random tables and random queries on them, in the SQL that has the same meaning in Trino and DuckDB.

The generator knows the scope of each query, so nearly all queries are valid: ambiguous names are qualified, and an
ORDER BY decides which rows LIMIT keeps. Some things are random: case, quotes, comments, spaces, aliases that are names
of other tables, and names in WITH that hide tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from tests.connector.analysis.comparisons import (
    ALIASES,
    COLUMN_NAMES,
    KINDS,
    ROWS_MAX,
    TABLE_NAMES,
    VALUES,
    Comparisons,
    Scope,
    ScopeColumn,
    StoredRelation,
    quote,
)


@dataclass
class RandomStatements(Comparisons):
    tables: list[StoredRelation] = field(default_factory=list)
    recursive_share: float = 0.08
    """The share of the names in WITH that are recursive.

    They use UNION without ALL, so that they end for any rows. Trino has only UNION ALL.
    """

    listed_share: ClassVar[float] = 0.2
    """The share of lists of literals among the sources after a comma."""
    other_groups: ClassVar[tuple[str, ...]] = ()
    """Clauses that may follow GROUP BY instead of a list of columns."""

    # Tables

    def make_tables(self) -> list[str]:
        """Return the statements that create the tables in DuckDB."""
        statements = []
        for name in self.rng.sample(TABLE_NAMES, self.rng.randint(2, 4)):
            names = self.rng.sample(COLUMN_NAMES, self.rng.randint(1, 4))
            # Longs and strings are frequent, so that many columns can be compared and joined.
            columns = {name: self.rng.choice([*KINDS, *["long"] * 8, *["string"] * 2]) for name in names}
            self.tables.append(StoredRelation(name, columns))
            typed_columns = ", ".join(f"{quote(column)} {KINDS[kind]}" for column, kind in columns.items())
            statements.append(f"CREATE TABLE {quote(name)} ({typed_columns})")
            # One table in ten is empty.
            for _ in range(self.rng.choice([0, *[self.rng.randint(4, ROWS_MAX)] * 9])):
                row = ", ".join(
                    "NULL" if self.draw_chance(0.25) else self.draw_value(kind) for kind in columns.values()
                )
                statements.append(f"INSERT INTO {quote(name)} VALUES ({row})")
        return statements

    # Queries

    def draw_query(self, depth: int = 3) -> str:
        return self.draw_with_query([], depth, [])[0]

    def draw_with_query(
        self, relations: list[StoredRelation], depth: int, outer: Scope
    ) -> tuple[str, list[tuple[str, str]]]:
        """Return the text of a query, and the names and types of its columns.

        Args:
            relations: The named queries of outer WITH clauses, which hide tables with the same names.
            depth: The query has subqueries only if this is more than 1.
            outer: The columns of the outer queries.
        """
        visible_tables, clauses, words = list(relations), [], "WITH"
        if depth > 1 and self.draw_chance(0.3):
            for name in self.rng.sample(sorted({*ALIASES, *TABLE_NAMES}), self.rng.randint(1, 2)):
                column_list, recursive = (
                    "",
                    self.draw_recursive(visible_tables, name) if self.draw_chance(self.recursive_share) else None,
                )
                text, columns = recursive or self.draw_with_query(visible_tables, depth - 1, outer)
                if recursive:
                    words, column_list = "WITH RECURSIVE", " (rn)"
                elif self.draw_chance(0.3):
                    columns = [(f"w{number}", kind) for number, (_, kind) in enumerate(columns)]
                    column_list = f" ({', '.join(self.spell(column) for column, _ in columns)})"
                clauses.append(f"{self.spell(name)}{column_list} AS{self.draw_space()}({text})")
                visible_tables = [table for table in visible_tables if table.name.lower() != name.lower()]
                visible_tables.append(StoredRelation(name, dict(columns)))
        text, columns = self.draw_body(visible_tables, depth, outer)
        return (f"{self.draw_word(words)} {', '.join(clauses)}{self.draw_space()}" if clauses else "") + text, columns

    def draw_body(self, relations: list[StoredRelation], depth: int, outer: Scope) -> tuple[str, list[tuple[str, str]]]:
        if depth > 1 and self.draw_chance(0.28):
            left, columns = self.draw_select(relations, depth - 1, outer, in_set_operation=True)
            right, right_columns = self.draw_select(
                relations, depth - 1, outer, in_set_operation=True, kinds=[kind for _, kind in columns]
            )
            if [kind for _, kind in columns] == [kind for _, kind in right_columns]:
                word = self.rng.choice(["UNION", "UNION ALL", "INTERSECT", "EXCEPT", "EXCEPT ALL", "INTERSECT ALL"])
                text = f"({left}){self.draw_space()}{word}{self.draw_space()}({right})"
                return text + (self.draw_order(len(columns)) if self.draw_chance(0.4) else ""), columns
        return self.draw_select(relations, depth, outer)

    def draw_order(self, columns: int) -> str:
        """Return an ORDER BY, in most cases with a LIMIT.

        The rows are ordered by all columns, so every engine keeps the same rows.
        """
        keys = ", ".join(f"{number} {self.rng.choice(['ASC', 'DESC'])} NULLS LAST" for number in range(1, columns + 1))
        offset = f" OFFSET {self.rng.randint(0, 2)}" if self.draw_chance(0.3) else ""
        limit = f" LIMIT {self.rng.randint(1, 5)}"
        return f" ORDER BY {keys}{limit}{offset}" if self.draw_chance(0.8) else f" ORDER BY {keys}"

    def draw_select(
        self,
        relations: list[StoredRelation],
        depth: int,
        outer: Scope,
        *,
        in_set_operation: bool = False,
        kinds: list[str] | None = None,
    ) -> tuple[str, list[tuple[str, str]]]:
        """Return a SELECT and its columns. If it is in a set operation, it has no ORDER BY."""
        source, scope = self.draw_source_list(relations, depth, outer)
        where = ""
        if self.draw_chance(0.7):
            where = (
                f"{self.draw_space()}{self.draw_word('WHERE')} {self.draw_condition(scope, relations, depth, outer)}"
            )
        random_number = self.rng.random()
        if random_number < 0.05 and kinds is None:
            return self.draw_filtered_query(source, where, scope)
        if random_number < 0.2 and kinds is None:
            return self.draw_grouped_query(source, where, scope, relations, depth)
        items, columns = self.draw_projections(scope, relations, depth, outer, kinds, window=random_number < 0.35)
        distinct_keyword = "DISTINCT " if self.draw_chance(0.1) else ""
        text = f"{self.draw_word('SELECT')} {distinct_keyword}{', '.join(items)}{self.draw_space()}"
        text += f"{self.draw_word('FROM')} {source}{where}"
        text += self.draw_qualify(scope)
        if not in_set_operation and self.draw_chance(0.25):
            text += self.draw_order(len(columns))
        return text, columns

    def draw_projections(
        self,
        scope: Scope,
        relations: list[StoredRelation],
        depth: int,
        outer: Scope,
        kinds: list[str] | None,
        *,
        window: bool,
    ) -> tuple[list[str], list[tuple[str, str]]]:
        names = [column.name.lower() for column in scope]
        owners = {column.owner for column in scope if column.owner is not None}
        if (
            kinds is None
            and self.draw_chance(0.2)
            and len(set(names)) == len(names)
            and all(column.is_plain for column in scope)
        ):
            return ["*"], [(column.name, column.kind) for column in scope]
        if kinds is None and owners and self.draw_chance(0.1) and all(column.is_plain for column in scope):
            owner = self.rng.choice(sorted(owners))
            owner_columns = [column for column in scope if column.owner == owner]
            return [f"{self.spell(owner)}.*", "1 AS one"], [
                *((column.name, column.kind) for column in owner_columns),
                ("one", "long"),
            ]
        items, columns = [], []
        for number, kind in enumerate(kinds or [None] * self.rng.randint(1, 4)):
            text, result, name = self.draw_projection(scope, relations, depth, outer, kind)
            if window and kind is None and number == 0:
                text, result, name = self.draw_window(scope), "long", None
            used_names = {column.lower() for column, _ in columns}
            if name is None or name.lower() in used_names or self.draw_chance(0.3):
                name = self.rng.choice([f"p{number}", *COLUMN_NAMES])
                name = f"p{number}" if name.lower() in used_names else name
                text = f"{text} {self.rng.choice(['AS ', ''])}{quote(name)}"
            items.append(text)
            columns.append((name, result))
        return items, columns

    def draw_projection(
        self, scope: Scope, relations: list[StoredRelation], depth: int, outer: Scope, kind: str | None
    ) -> tuple[str, str, str | None]:
        matching_columns = [column for column in scope if kind in (None, column.kind) and self.can_name(column, scope)]
        if matching_columns and self.draw_chance(0.75):
            column = self.rng.choice(matching_columns)
            text = self.write_reference(column, scope)
            return f"({text})" if self.draw_chance(0.05) else text, column.kind, column.name
        kind = kind or self.rng.choice(list(KINDS))
        if kind == "long" and self.draw_chance(0.3):
            aggregate = self.draw_aggregate_subquery(scope, relations, "count(*)")
            if aggregate is not None:
                return f"({aggregate})", "long", None
        if kind == "long" and depth > 1 and self.draw_chance(0.4):
            inner, _ = self.draw_with_query(relations, depth - 1, [*outer, *scope])
            return f"(SELECT count(*) FROM ({inner}) AS n)", "long", None
        candidates = [column for column in scope if column.kind == kind and self.can_name(column, scope)]
        if candidates and self.draw_chance(0.6):
            return (
                f"coalesce({self.write_reference(self.rng.choice(candidates), scope)}, {self.draw_literal(kind)})",
                kind,
                None,
            )
        return f"CAST({self.draw_literal(kind)} AS {KINDS[kind]})", kind, None

    def draw_qualify(self, scope: Scope) -> str:
        """Return no QUALIFY clause. A subclass for a dialect with QUALIFY can return one."""
        return ""

    def draw_window(self, scope: Scope) -> str:
        keys = [self.write_reference(column, scope) for column in scope if self.can_name(column, scope)]
        if not keys:
            return "count(*) OVER ()"
        return self.rng.choice(
            [f"count(*) OVER (PARTITION BY {self.rng.choice(keys)})", f"rank() OVER (ORDER BY {', '.join(keys)})"]
        )

    def draw_grouped_query(
        self, source: str, where: str, scope: Scope, relations: list[StoredRelation], depth: int
    ) -> tuple[str, list[tuple[str, str]]]:
        candidates = [column for column in scope if self.can_name(column, scope)]
        keys = self.rng.sample(candidates, min(len(candidates), self.rng.randint(0, 2)))
        named_keys = [self.write_reference(key, scope) for key in keys]
        items = [f"{text} AS g{number}" for number, text in enumerate(named_keys)]
        columns = [(f"g{number}", key.kind) for number, key in enumerate(keys)]
        items.append("count(*) AS n")
        columns.append(("n", "long"))
        if candidates and self.draw_chance(0.5):
            column = self.rng.choice(candidates)
            items.append(f"{self.rng.choice(['min', 'max'])}({self.write_reference(column, scope)}) AS m")
            columns.append(("m", column.kind))
        text = f"SELECT {', '.join(items)} FROM {source}{where}"
        if named_keys:
            key_list = ", ".join(named_keys)
            numbers = ", ".join(str(number) for number in range(1, len(named_keys) + 1))
            first, last = named_keys[0], named_keys[-1]
            sets = [f"ROLLUP ({key_list})", f"GROUPING SETS (({key_list}), ())"]
            sets += [f"{first}, ROLLUP ({last})", f"GROUPING SETS (({key_list}), {first})", f"CUBE ({last}), {first}"]
            sets.append(f"GROUPING SETS (({first}), ({last}, {first}))")
            text += f" GROUP BY {self.rng.choice([key_list, numbers, *sets, *self.other_groups])}"
        if self.draw_chance(0.35):
            conditions = ["count(*) > 1", "count(*) = 0", "min(1) = 1"]
            conditions += [self.draw_comparison(key, [*keys]) for key in keys if self.can_name(key, scope)] * 2
            word = self.rng.choice(["AND", "AND", "OR"])
            text += f" HAVING {f' {word} '.join(f'({condition})' for condition in self.rng.sample(conditions, 2))}"
        return text, columns

    def draw_filtered_query(self, source: str, where: str, scope: Scope) -> tuple[str, list[tuple[str, str]]]:
        """Return a query with one group of all rows.

        In most cases each aggregate counts only the rows that pass a condition, which is in a FILTER or in its
        argument.
        """
        candidates = [column for column in scope if self.can_name(column, scope)]
        items = []
        for number in range(self.rng.randint(1, 2)):
            column = self.write_reference(self.rng.choice(candidates), scope) if candidates else "1"
            aggregate = f"count({column})" if candidates else "count(*)"
            filter_clause = f" FILTER (WHERE {self.draw_simple_condition(scope)})" if self.draw_chance(0.9) else ""
            aggregates = [
                f"sum(CASE WHEN {self.draw_simple_condition(scope)} THEN 2 WHEN"
                f" {self.draw_simple_condition(scope)} THEN 3 END)"
            ]
            aggregates += [
                f"count_if({self.draw_simple_condition(scope)})",
                f"count(DISTINCT CASE {column} WHEN {column} THEN {column} END)",
            ]
            aggregates += [
                f"max(CASE WHEN {self.draw_simple_condition(scope)} THEN"
                f" 1{self.rng.choice(['', ' ELSE NULL', ' ELSE 0'])} END)"
            ]
            text = f"{aggregate}{filter_clause}" if self.draw_chance(0.5) else self.rng.choice(aggregates)
            items.append(f"coalesce({text}, 0) + {number} AS n{number}")
        return f"SELECT {', '.join(items)} FROM {source}{where}", [
            (f"n{number}", "long") for number in range(len(items))
        ]

    def draw_latest(self) -> tuple[str, list[tuple[str, str]]]:
        """Return a query for the first rows of each key, or for the row numbers of all rows.

        The rows are ordered by all columns, so the first row is always the same.
        """
        table = self.rng.choice(self.tables)
        names = [quote(column) for column in table.columns]
        keys = ", ".join(self.rng.sample(names, self.rng.randint(1, min(2, len(names)))))
        order = ", ".join(f"{name} {self.rng.choice(['', 'DESC'])} NULLS LAST" for name in names)
        # Half of the queries number the rows. Ranks can have several first rows.
        function = self.rng.choice(["row_number", "row_number", "rank", "dense_rank"])
        number = f"{function}() OVER (PARTITION BY {keys} ORDER BY {order})"
        if self.draw_chance(0.2):
            number = f"{number} + count(*) OVER (PARTITION BY {self.rng.choice(names)})"
        text = f"SELECT {', '.join(names)}, {number} AS rn FROM main.{quote(table.name)}"
        columns = [*table.columns.items(), ("rn", "long")]
        if self.draw_chance(0.6):
            return f"SELECT * FROM ({text}) AS ranked WHERE rn = 1", columns
        return text, columns

    def draw_recursive(self, relations: list[StoredRelation], name: str) -> tuple[str, list[tuple[str, str]]] | None:
        """Return a recursive query on up to three bigint columns of a table, and its columns.

        The first step returns a column of the table. Each further step selects the rows whose second column has a value
        of the previous step, and returns their third column. If no table has a bigint column, the result is None.
        """
        hidden_names = {relation.name.lower() for relation in relations} | {name.lower()}
        candidates = [
            table
            for table in self.tables
            if table.name.lower() not in hidden_names and "long" in table.columns.values()
        ]
        if not candidates:
            return None
        table = self.rng.choice(candidates)
        scope = [ScopeColumn(column, kind, "step") for column, kind in table.columns.items()]
        long_columns = [column for column in scope if column.kind == "long"]
        start, previous_column, next_column = (self.rng.choice(long_columns) for _ in range(3))
        from_table = f"{self.spell(table.name)} AS step"
        first = (
            f"SELECT {self.write_reference(start, scope)} FROM {from_table} WHERE {self.draw_simple_condition(scope)}"
        )
        step_condition = (
            f"{self.draw_simple_condition(scope)} AND step.{quote(previous_column.name)} = {self.spell(name)}.rn"
        )
        text = f"SELECT step.{quote(next_column.name)} FROM {from_table}, {self.spell(name)} WHERE {step_condition}"
        return f"{first} UNION {text}", [("rn", "long")]

    # FROM

    def draw_source_list(self, relations: list[StoredRelation], depth: int, outer: Scope) -> tuple[str, Scope]:
        text, scope = self.draw_source(relations, depth, outer, set())
        for _ in range(self.rng.choice([0, 0, 0, 1, 1, 1, 2]) if depth < 3 else self.rng.choice([0, 1, 1])):
            used_names = {column.owner.lower() for column in scope if column.owner is not None}
            if self.draw_chance(0.2):
                right, right_scope = (
                    self.draw_unnest(used_names)
                    if self.draw_chance(self.listed_share)
                    else self.draw_source(relations, depth, outer, used_names)
                )
                text, scope = f"{text}{self.draw_space()},{self.draw_space()}{right}", [*scope, *right_scope]
                continue
            if self.draw_chance(0.12):
                text, scope = self.draw_lateral_join(text, scope, relations, used_names)
                continue
            right, right_scope = self.draw_source_or_join(relations, depth, outer, used_names)
            text, scope = self.draw_join(text, scope, right, right_scope, relations, depth, outer)
        return text, scope

    def draw_unnest(self, used_names: set[str]) -> tuple[str, Scope]:
        """Return a list of literals as a source after a comma, because Trino does not join UNNEST with a condition."""
        alias = self.rng.choice([alias for alias in ALIASES if alias.lower() not in used_names])
        column = self.rng.choice(COLUMN_NAMES)
        text = f"UNNEST(ARRAY[{', '.join(VALUES['long'][:3])}]) AS {self.spell(alias)} ({quote(column)})"
        return text, [ScopeColumn(column, "long", alias)]

    def draw_lateral_join(
        self, text: str, scope: Scope, relations: list[StoredRelation], used_names: set[str]
    ) -> tuple[str, Scope]:
        alias = self.rng.choice([alias for alias in ALIASES if alias.lower() not in used_names])
        query = self.draw_lateral_query(scope, relations) if self.draw_chance(0.6) else None
        if query is not None:
            inner, columns = query
            step_columns = [ScopeColumn(name, kind, alias) for name, kind in columns]
            kind = self.rng.choice(["CROSS JOIN", ",", "LEFT JOIN", "LEFT JOIN", "JOIN"])
            join_condition = ""
            if kind not in ("CROSS JOIN", ","):
                join_condition = (
                    f" ON {self.draw_simple_condition([*scope, *step_columns]) if self.draw_chance(0.4) else 'TRUE'}"
                )
            return f"{text} {kind} LATERAL ({inner}) AS {self.spell(alias)}{join_condition}", [*scope, *step_columns]
        aggregate = self.draw_aggregate_subquery(scope, relations, "count(*) AS n, min(1) AS m")
        if aggregate is None:
            return text, scope
        join, join_condition = self.rng.choice([("CROSS JOIN", ""), ("LEFT JOIN", " ON TRUE")])
        step_columns = [ScopeColumn("n", "long", alias), ScopeColumn("m", "long", alias)]
        return f"{text} {join} LATERAL ({aggregate}) AS {self.spell(alias)}{join_condition}", [*scope, *step_columns]

    def draw_lateral_query(
        self, scope: Scope, relations: list[StoredRelation]
    ) -> tuple[str, list[tuple[str, str]]] | None:
        """Return a query for the rows of a table that have the outer row's value in a column.

        Some queries join the rows, group them, or return only the first of them.
        """
        correlated_pair = self.draw_correlated_pair(scope, relations)
        if correlated_pair is None:
            return None
        table, name, outer_text = correlated_pair
        table_columns = [ScopeColumn(column, kind, "qq") for column, kind in table.columns.items()]
        source, inner = f"{self.spell(table.name)} AS qq", table_columns
        if self.draw_chance(0.4):
            hidden_names = {relation.name.lower() for relation in relations}
            other_table = self.rng.choice([table for table in self.tables if table.name.lower() not in hidden_names])
            other_columns = [ScopeColumn(column, kind, "rr") for column, kind in other_table.columns.items()]
            inner = [*table_columns, *other_columns]
            join_condition = self.draw_comparison_of_sides(table_columns, other_columns, inner)
            if self.draw_chance(0.3):
                join_condition += f" AND {self.draw_simple_condition(inner)}"
            join = self.rng.choice(["JOIN", "LEFT JOIN", "RIGHT JOIN", "FULL JOIN"])
            source = f"{source} {join} {self.spell(other_table.name)} AS rr ON {join_condition}"
        where = (
            f"qq.{self.spell(name)} ="
            f" {outer_text}{f' AND {self.draw_simple_condition(inner)}' if self.draw_chance(0.4) else ''}"
        )
        candidates = [column for column in inner if self.can_name(column, inner)]
        group_columns = self.rng.sample(candidates, min(len(candidates), self.rng.randint(1, 2)))
        columns = [(f"l{number}", column.kind) for number, column in enumerate(group_columns)]
        items = [f"{self.write_reference(column, inner)} AS l{number}" for number, column in enumerate(group_columns)]
        if self.draw_chance(0.3):
            keys = ", ".join(str(number) for number in range(1, len(items) + 1))
            text = f"SELECT {', '.join([*items, 'count(*) AS ln'])} FROM {source} WHERE {where} GROUP BY {keys}"
            return text, [*columns, ("ln", "long")]
        text = f"SELECT {self.rng.choice(['', '', 'DISTINCT '])}{', '.join(items)} FROM {source} WHERE {where}"
        return text + (self.draw_order(len(columns)) if self.draw_chance(0.4) else ""), columns

    def draw_aggregate_subquery(self, scope: Scope, relations: list[StoredRelation], aggregates: str) -> str | None:
        """Return a query for an aggregate of the rows that have the outer row's value in a column."""
        correlated_pair = self.draw_correlated_pair(scope, relations)
        if correlated_pair is None:
            return None
        table, name, outer_text = correlated_pair
        columns = [ScopeColumn(name, table.columns[name], "qq")]
        extra_condition = f" AND {self.draw_simple_condition(columns)}" if self.draw_chance(0.3) else ""
        condition = f"qq.{self.spell(name)} = {outer_text}{extra_condition}"
        return f"SELECT {aggregates} FROM {self.spell(table.name)} AS qq WHERE {condition}"

    def draw_correlated_pair(
        self, scope: Scope, relations: list[StoredRelation]
    ) -> tuple[StoredRelation, str, str] | None:
        """Return a table, one of its columns, and a column of the outer row with the same type.

        Return None if no column fits.
        """
        hidden_names = {relation.name.lower() for relation in relations}
        pairs = [
            (table, name, column)
            for table in self.tables
            if table.name.lower() not in hidden_names
            for name, kind in table.columns.items()
            for column in scope
            if column.kind == kind and column.owner is not None and self.can_name(column, scope)
        ]
        if not pairs:
            return None
        table, name, column = self.rng.choice(pairs)
        return table, name, f"{self.spell(str(column.owner))}.{self.spell(column.name)}"

    def draw_source_or_join(
        self, relations: list[StoredRelation], depth: int, outer: Scope, used_names: set[str]
    ) -> tuple[str, Scope]:
        """Return a source or, in parentheses, a join of two sources."""
        text, scope = self.draw_source(relations, depth, outer, used_names)
        if self.draw_chance(0.12):
            all_used_names = {column.owner.lower() for column in scope if column.owner is not None} | used_names
            other, other_scope = self.draw_source(relations, depth, outer, all_used_names)
            text, scope = self.draw_join(text, scope, other, other_scope, relations, depth, outer)
            return f"({text})", scope
        return text, scope

    def draw_join_condition(self, scope: Scope, other_scope: Scope, joined_scope: Scope) -> str:
        return (
            self.draw_inequality(scope, other_scope, joined_scope)
            if self.draw_chance(0.15)
            else self.draw_comparison_of_sides(scope, other_scope, joined_scope)
        )

    def draw_join(
        self,
        text: str,
        scope: Scope,
        right: str,
        other_scope: Scope,
        relations: list[StoredRelation],
        depth: int,
        outer: Scope,
    ) -> tuple[str, Scope]:
        kind = self.rng.choice(["JOIN", "INNER JOIN", "LEFT JOIN", "LEFT OUTER JOIN", "RIGHT JOIN", "FULL JOIN"])
        if self.draw_chance(0.08):
            return f"{text} CROSS JOIN {right}", [*scope, *other_scope]
        joined_scope = [*scope, *other_scope]
        left_names, right_names = (
            [scope_column.name.lower() for scope_column in side] for side in (scope, other_scope)
        )
        shared_columns = [
            scope_column
            for scope_column in scope
            if left_names.count(scope_column.name.lower()) == 1
            and right_names.count(scope_column.name.lower()) == 1
            and scope_column.kind
            == next(other.kind for other in other_scope if other.name.lower() == scope_column.name.lower())
            and scope_column.is_plain
        ]
        if shared_columns and self.draw_chance(0.3):
            column = self.rng.choice(shared_columns)
            merged_column = ScopeColumn(column.name, column.kind, None)
            remaining_columns = [other for other in joined_scope if other.name.lower() != column.name.lower()]
            return f"{text} {kind} {right} USING ({self.spell(column.name)})", [merged_column, *remaining_columns]
        conditions = (
            [self.draw_simple_condition(joined_scope)]
            if self.draw_chance(0.3)
            else [self.draw_join_condition(scope, other_scope, joined_scope)]
        )
        if self.draw_chance(0.35):
            conditions.append(self.draw_simple_condition(joined_scope))
        if depth > 1 and self.draw_chance(0.12):
            conditions.append(self.draw_subquery(joined_scope, relations, depth, outer))
        word = self.rng.choice(["AND", "AND", "AND", "OR"])
        return f"{text} {kind} {right} ON {f' {word} '.join(conditions)}", joined_scope

    def draw_source(
        self, relations: list[StoredRelation], depth: int, outer: Scope, used_names: set[str]
    ) -> tuple[str, Scope]:
        alias = self.rng.choice([alias for alias in ALIASES if alias.lower() not in used_names])
        random_number = self.rng.random()
        if random_number < 0.05:
            column = self.rng.choice(COLUMN_NAMES)
            rows = ", ".join(f"({value})" for value in VALUES["long"][:3])
            text = f"(VALUES {rows}) AS {self.spell(alias)} ({quote(column)})"
            return text, [ScopeColumn(column, "long", alias)]
        if random_number < 0.11:
            text, columns = self.draw_latest()
            text = f"({text}) AS {self.spell(alias)}"
        elif random_number < 0.45 and depth > 1:
            text, columns = self.draw_with_query(relations, depth - 1, [])
            text = f"({text}) {self.rng.choice(['AS ', ''])}{self.spell(alias)}"
        else:
            hidden_names = {relation.name.lower() for relation in relations}
            candidates = [*relations, *(table for table in self.tables if table.name.lower() not in hidden_names)]
            relation = self.rng.choice([*candidates, *self.rng.sample(relations, min(len(relations), 1))])
            columns = list(relation.columns.items())
            text = self.spell(relation.name)
            if relation.name.lower() not in hidden_names and self.draw_chance(0.2):
                text = f"main{self.rng.choice(['.', ' . ', '/**/.'])}{text}"
            if relation.name.lower() not in used_names and self.draw_chance(0.4):
                return text, [ScopeColumn(name, kind, relation.name) for name, kind in columns]
            text = f"{text}{self.draw_space()}{self.rng.choice(['AS ', ''])}{self.spell(alias)}"
        if self.draw_chance(0.15):
            columns = [(f"r{number}", kind) for number, (_, kind) in enumerate(columns)]
            text += f" ({', '.join(name for name, _ in columns)})"
        return text, [ScopeColumn(name, kind, alias) for name, kind in columns]

    # Conditions

    def draw_condition(self, scope: Scope, relations: list[StoredRelation], depth: int, outer: Scope) -> str:
        conditions = []
        for _ in range(self.rng.choice([1, 1, 1, 1, 2])):
            candidates = [column for column in scope if self.can_name(column, scope)]
            column = self.rng.choice(candidates) if candidates and self.draw_chance(0.1) else None
            extreme = (
                None
                if column is None
                else self.draw_extreme_comparison(column, self.write_reference(column, scope), relations)
            )
            if extreme is not None:
                conditions.append(extreme)
            elif depth > 1 and self.draw_chance(0.2):
                conditions.append(self.draw_subquery(scope, relations, depth, outer))
            elif outer and self.draw_chance(0.5):
                conditions.append(self.draw_correlated_condition(scope, outer))
            elif self.draw_chance(0.2):
                conditions.append(self.draw_cross_condition(scope))
            elif self.draw_chance(0.25):
                owners = sorted({str(column.owner) for column in scope if column.owner is not None})
                sides = [[column for column in scope if column.owner == owner] for owner in owners]
                alternatives = [
                    self.draw_comparison(column, scope)
                    for side in sides
                    if (column := self.choose_column(side, scope)) is not None
                ]
                conditions.append(
                    f"({' OR '.join(alternatives)})" if alternatives else self.draw_simple_condition(scope)
                )
            else:
                conditions.append(self.draw_simple_condition(scope))
        word = self.rng.choice(["AND", "AND", "AND", "OR"])
        text = f"{self.draw_space()}{self.draw_word(word)}{self.draw_space()}".join(conditions)
        return f"NOT ({text})" if self.draw_chance(0.15) else text

    def draw_subquery(self, scope: Scope, relations: list[StoredRelation], depth: int, outer: Scope) -> str:
        """Return a condition with a subquery: EXISTS, IN, ANY, or a comparison with its result."""
        negated = self.rng.choice(["", "NOT "])
        if self.draw_chance(0.5):
            inner, _ = self.draw_with_query(
                relations, depth - 1, [column for column in scope if column.owner is not None]
            )
            return f"{negated}EXISTS ({inner})"
        candidates = [column for column in scope if self.can_name(column, scope)]
        if not candidates:
            return self.draw_simple_condition(scope)
        column = self.rng.choice(candidates)
        aggregate = self.draw_aggregate_subquery(scope, relations, "count(*)")
        if aggregate is not None and self.draw_chance(0.2):
            return f"({aggregate}) {self.rng.choice(['=', '>', '<'])} 1"
        if self.draw_chance(0.2):
            inner, _ = self.draw_select(
                relations, depth - 1, [], in_set_operation=True, kinds=[column.kind, candidates[0].kind]
            )
            pair = [self.write_reference(column, scope), self.write_reference(candidates[0], scope)]
            # Engines compare rows with nulls differently, so these rows are excluded.
            text = " AND ".join(f"{name} IS NOT NULL" for name in pair)
            return f"({', '.join(pair)}) {negated}IN ({inner}) AND {text}"
        inner, _ = self.draw_select(relations, depth - 1, [], in_set_operation=True, kinds=[column.kind])
        if self.draw_chance(0.2):
            return f"{self.write_reference(column, scope)} = ANY ({inner})"
        if self.draw_chance(0.2):
            return f"{self.write_reference(column, scope)} = (SELECT q.m FROM ({inner}) AS q (m) ORDER BY 1 LIMIT 1)"
        if self.draw_chance(0.3):
            return f"{self.write_reference(column, scope)} = (SELECT max(q.m) FROM ({inner}) AS q (m))"
        if self.draw_chance(0.3):
            return (
                self.draw_extreme_comparison(column, self.write_reference(column, scope), relations)
                or f"{self.write_reference(column, scope)} = ANY ({inner})"
            )
        if self.draw_chance(0.2):
            return f"{self.write_reference(column, scope)} {self.rng.choice(['<', '<=', '>', '>='])} ANY ({inner})"
        return f"{self.write_reference(column, scope)} {negated}IN ({inner})"

    def draw_extreme_comparison(self, column: ScopeColumn, name: str, relations: list[StoredRelation]) -> str | None:
        """Return a comparison of the column with minimums or maximums of other columns.

        A BETWEEN can have a literal as its lower limit. The result is None if no table has a fitting column.
        """
        extremes = [self.draw_extreme_subquery(column.kind, relations) for _ in range(2)]
        if extremes[0] is None:
            return None
        op = self.rng.choice(["=", "=", "<", "<=", ">", ">="])
        low, high = (extremes[0] if self.draw_chance(0.5) else self.draw_literal(column.kind), extremes[1])
        return self.rng.choice(
            [f"{name} {op} {extremes[0]}", f"{extremes[0]} {op} {name}", f"{name} BETWEEN {low} AND {high}"]
        )

    def draw_extreme_subquery(self, kind: str, relations: list[StoredRelation]) -> str | None:
        """Return a subquery for the minimum or maximum of a column in some rows of a table, or None if none fits."""
        extreme = self.draw_extreme(kind, relations)
        return None if extreme is None else f"(SELECT {extreme[0]} FROM {extreme[1]})"

    def draw_extreme(self, kind: str, relations: list[StoredRelation]) -> tuple[str, str, str] | None:
        """Return a minimum or maximum of this type, the rows that it is computed from, and a column of these rows.

        Return None if no column fits.
        """
        hidden_names = {relation.name.lower() for relation in relations}
        tables = [*relations, *(table for table in self.tables if table.name.lower() not in hidden_names)]
        columns = [
            (table, name) for table in tables for name, column_kind in table.columns.items() if column_kind == kind
        ]
        if not columns:
            return None
        table, column = self.rng.choice(columns)
        scope = [ScopeColumn(name, column_kind, "q") for name, column_kind in table.columns.items()]
        where = f" WHERE {self.draw_simple_condition(scope)}" if self.draw_chance(0.6) else ""
        rows = f"{quote(table.name)} AS q{where}"
        if self.draw_chance(0.15):
            rows = f"(SELECT {self.rng.choice(['', 'DISTINCT '])}q.* FROM {rows}) AS q"
        extreme = f"{self.rng.choice(['max', 'min'])}(q.{quote(column)})"
        return extreme, rows, f"q.{quote(self.rng.choice(list(table.columns)))}"

    def draw_named_extreme_query(self) -> str | None:
        """Return a query that compares a column with a minimum or maximum in WITH, or None if no column fits."""
        table = self.rng.choice(self.tables)
        column, kind = self.rng.choice(list(table.columns.items()))
        random_extreme = self.draw_extreme(kind, [])
        if random_extreme is None:
            return None
        extreme, rows, group_column = random_extreme
        query_ends = [
            "",
            "",
            "",
            f" GROUP BY {group_column}",
            " LIMIT 1",
            " HAVING count(*) > 1",
            f" UNION ALL SELECT {self.draw_value(kind)}",
        ]
        named_queries = [f"m AS (SELECT {extreme} AS e FROM {rows}{self.rng.choice(query_ends)})"]
        if self.draw_chance(0.4):
            inner = f"SELECT q.* FROM {rows}"
            inner = self.rng.choice(
                [inner, f"{inner} LIMIT 1", f"({inner}) LIMIT 1", f"SELECT DISTINCT q.* FROM {rows}"]
            )
            named_queries = [f"r AS ({inner})", f"m AS (SELECT {extreme} AS e FROM r AS q)"]
        if self.draw_chance(0.4):
            named_queries.append(
                f"n (e) AS ({self.rng.choice(['SELECT e FROM m', 'SELECT * FROM m WHERE e IS NOT NULL'])})"
            )
        # The name of a query in WITH is its first letter.
        name, op = named_queries[-1][0], self.rng.choice(["=", "=", "<", "<=", ">", ">="])
        comparison = f"o.{quote(column)} {op} {{}}" if self.draw_chance(0.7) else f"{{}} {op} o.{quote(column)}"
        condition, join = comparison.format(f"{name}.e"), self.rng.choice(["JOIN", "LEFT JOIN", "RIGHT JOIN"])
        source = f"{quote(table.name)} AS o"
        body = self.rng.choice(
            [
                f"SELECT o.* FROM {source}, {name} WHERE {condition}",
                f"SELECT o.* FROM {source} {join} {name} ON {condition}",
                f"SELECT o.* FROM {source} WHERE {comparison.format(f'(SELECT e FROM {name})')}",
                f"SELECT o.* FROM {source} WHERE EXISTS (SELECT 1 FROM {name} WHERE {condition})",
                f"SELECT o.* FROM {source} WHERE o.{quote(column)} IN (SELECT e FROM {name})",
            ]
        )
        return f"WITH {', '.join(named_queries)} {body}"

    def draw_correlated_condition(self, scope: Scope, outer: Scope) -> str:
        """Return a condition on a column of the outer query.

        The column is qualified by an alias that the inner scope does not have.
        If no column fits, return a condition on the inner query alone.
        """
        owners = {column.owner.lower() for column in scope if column.owner is not None}
        pairs = [
            (column, other)
            for column in scope
            for other in outer
            if column.kind == other.kind
            and self.can_name(column, scope)
            and other.owner is not None
            and other.owner.lower() not in owners
            and [o.owner for o in outer if o.name.lower() == other.name.lower()].count(other.owner) == 1
        ]
        if not pairs:
            return self.draw_simple_condition(scope)
        first, other = self.rng.choice(pairs)
        outer_text = f"{self.spell(str(other.owner))}.{self.spell(other.name)}"
        if self.draw_chance(0.3):
            return f"{outer_text} = {self.draw_literal(other.kind)}"
        return f"{self.write_reference(first, scope)} = {outer_text}"
