"""Random queries on a small star schema. Each query has exactly one result, apart from the order of rows."""

from __future__ import annotations

import random
from collections.abc import Sequence

TABLES = {
    "sales": {
        "id": "bigint",
        "item": "int",
        "store": "bigint",
        "day": "date",
        "at": "timestamp",
        "nt": "timestamp_ntz",
        "price": "decimal(9,2)",
        "weight": "double",
        "note": "string",
        "ok": "boolean",
        "info.code": "int",
        "info.tag": "string",
    },
    "items": {"i_id": "bigint", "brand": "int", "color": "string", "size": "int"},
    "brands": {"b_id": "int", "b_name": "string"},
    "stores": {"s_id": "bigint", "city": "string", "opened": "date"},
}
JOINS = {
    ("sales", "items"): ("item", "i_id"),
    ("sales", "stores"): ("store", "s_id"),
    ("items", "brands"): ("brand", "b_id"),
    ("stores", "sales"): ("opened", "day"),
}
_DAYS = ("2026-01-05", "2026-01-20", "2026-02-01", "2026-03-10", "1969-12-31")
_JOIN_KINDS = ("JOIN", "LEFT JOIN", "RIGHT JOIN", "FULL JOIN", "LEFT SEMI JOIN", "LEFT ANTI JOIN")
_LEFT_ONLY_JOIN_KINDS = _JOIN_KINDS[4:]
"""Joins that return only columns of the left side."""


_CONVERTED_COLUMNS = (("item", "store", "bigint"), ("price", "id", "decimal(9,2)"), ("day", "nt", "timestamp_ntz"))
"""Pairs of fact columns that a set operation converts, with their common type."""


class Queries:
    """Draws random queries.

    `past` contains clauses that name earlier snapshots of the facts, such as `VERSION AS OF 1`. If it is empty, no
    query reads earlier snapshots.
    """

    def __init__(self, rng: random.Random, db: str, past: Sequence[str] = ()) -> None:
        self._rng = rng
        self._db = db
        self._past = past
        self._alias_count = 0

    def query(self) -> str:
        """Return a random query of a random form."""
        rng = self._rng
        drawers = [
            self._draw_lateral,
            self._draw_set_operation,
            self._draw_window_query,
            self._draw_shadowing_query,
            self._draw_mixed_type_query,
            self._draw_comparison_query,
        ]
        # The forms below 9 are drawn here, and each further form by a function.
        form_number = rng.randrange(9 + len(drawers) + bool(self._past))
        if form_number >= 9:
            return [*drawers, self._draw_time_travel][form_number - 9]()
        if form_number < 4:
            return self._draw_select()[0]
        if form_number == 4:
            select, columns = self._draw_select(1)
            word = rng.choice(["UNION", "UNION ALL", "INTERSECT", "EXCEPT", "EXCEPT ALL"])
            return f"SELECT * FROM ({select} {word} {select}) u WHERE {self._draw_condition(columns, 'u')}"
        if form_number == 5:
            table = rng.choice(["sales", "items"])
            selects = [
                f"SELECT * FROM {self._db}.{table} WHERE {self._draw_table_condition(table, table)}" for _ in range(2)
            ]
            word = rng.choice(["UNION", "UNION ALL", "INTERSECT", "EXCEPT"])
            columns = {name: name for name in TABLES[table]}
            where = self._draw_condition({name: TABLES[table][name] for name in columns}, "u")
            return f"SELECT * FROM ({selects[0]} {word} {selects[1]}) u WHERE {where}"
        if form_number == 6:
            inner, columns = self._draw_select(1)
            a, b = rng.sample(list(columns), 1)[0], rng.sample(list(columns), 1)[0]
            condition = f"a.{a} = b.{a}" if rng.random() < 0.7 or columns[a] != columns[b] else f"a.{a} = b.{b}"
            word = rng.choice(["JOIN", "LEFT JOIN", "LEFT SEMI JOIN"])
            return (
                f"WITH w AS ({inner}) SELECT a.* FROM w a {word} w b ON {condition} AND "
                f"{self._draw_condition(columns, 'b')} WHERE {self._draw_condition(columns, 'a')}"
            )
        return self._draw_grouped_query() if form_number == 7 else self._draw_filtered_aggregate_query()

    def _create_alias(self) -> str:
        self._alias_count += 1
        return f"t{self._alias_count}"

    def _draw_lateral(self) -> str:
        """Return a query with a lateral subquery, and in some cases with a join in the subquery.

        The subquery returns aggregates, groups or first rows, from rows that equal the outer row in a column. In three
        of ten cases, it is a scalar subquery. If no column can be joined, the query has no subquery.
        """
        rng = self._rng
        inner, columns = self._draw_select(1)
        pairs = [
            (column, other, other_column)
            for (first, second), (left, right) in JOINS.items()
            for column, other, other_column in ((left, second, right), (right, first, left))
            if column in columns
        ]
        if not pairs:
            return f"SELECT * FROM ({inner}) o WHERE {self._draw_condition(columns, 'o')}"
        column, other, other_column = rng.choice(pairs)
        numeric = next(name for name, kind in TABLES[other].items() if kind in ("bigint", "int"))
        source, inner_pair = f"{self._db}.{other} x", self._draw_pair({"x": other}, set())
        if inner_pair is not None and rng.random() < 0.4:
            (_, source_column), (table, inner_column) = inner_pair
            join = rng.choice(["JOIN", "LEFT JOIN"])
            source += (
                f" {join} {self._db}.{table} y ON x.{source_column} = y.{inner_column} AND"
                f" {self._draw_table_condition(table, 'y')}"
            )
        where = f"x.{other_column} = o.{column}" + (
            f" AND {self._draw_table_condition(other, 'x')}" if rng.random() < 0.7 else ""
        )
        body = rng.choice(
            [
                f"SELECT count(*) AS n, max(x.{numeric}) AS m FROM {source} WHERE {where}",
                f"SELECT 1 AS n, x.{numeric} AS m FROM {source} WHERE {where} ORDER BY x.{numeric} DESC LIMIT 2",
                f"SELECT count(*) AS n, x.{numeric} AS m FROM {source} WHERE {where} GROUP BY x.{numeric}",
                f"SELECT DISTINCT 2 AS n, x.{numeric} AS m FROM {source} WHERE {where}",
            ]
        )
        join = rng.choice([", LATERAL ({}) q", "JOIN LATERAL ({}) q ON true", "LEFT JOIN LATERAL ({}) q ON q.m > 3"])
        outer = rng.choice(
            ["true", "q.n > 0", "q.n = 0", "q.m IS NULL", f"q.m < 60 AND {self._draw_condition(columns, 'o')}"]
        )
        if rng.random() < 0.3:
            text = f"(SELECT max(x.{numeric}) FROM {source} WHERE {where})"
            return f"SELECT o.*, {text} AS m FROM ({inner}) o WHERE {self._draw_condition(columns, 'o')}"
        return f"SELECT o.*, q.n, q.m FROM ({inner}) o {join.format(body)} WHERE {outer}"

    def _draw_comparison_query(self) -> str:
        """Return a query that compares a column with a maximum or minimum, or with a column of another table."""
        rng = self._rng
        column, table, other_column = rng.choice(
            [
                *(("day", "sales", "day"), ("id", "sales", "id"), ("nt", "sales", "nt"), ("item", "sales", "item")),
                *(("day", "stores", "opened"), ("id", "items", "i_id"), ("item", "items", "size")),
                *(("price", "sales", "price"), ("weight", "sales", "weight"), ("note", "sales", "note")),
                ("note", "items", "color"),
            ]
        )
        op = rng.choice(["=", "<", "<=", ">", ">="])
        rows = f"{self._db}.{table} q" + (
            f" WHERE {self._draw_table_condition(table, 'q')}" if rng.random() < 0.7 else ""
        )
        values = [f"(SELECT {extreme}(q.{other_column}) FROM {rows})" for extreme in rng.sample(["max", "min"], 2)]
        sales = f"SELECT f.id, f.{column} FROM {self._db}.sales f"
        where = f" AND {self._draw_table_condition('sales', 'f')}" if rng.random() < 0.3 else ""
        if rng.random() < 0.3:
            extreme = rng.choice(["max", "min"])
            named_queries = (
                f"WITH m AS (SELECT {extreme}(q.{other_column}) AS e FROM {rows}), n AS (SELECT e AS l FROM m)"
            )
            name, compared_column = rng.choice([("m", "m.e"), ("n", "n.l")])
            return rng.choice(
                [
                    f"{named_queries} {sales}, {name} WHERE f.{column} {op} {compared_column}{where}",
                    f"{named_queries} {sales} {rng.choice(_JOIN_KINDS)} {name} "
                    f"ON f.{column} {op} {compared_column}{where}",
                    f"{named_queries} {sales} WHERE f.{column} {op} (SELECT {compared_column} FROM {name}){where}",
                ]
            )
        if rng.random() < 0.6:
            between_condition = f"f.{column} BETWEEN {values[0]} AND {values[1]}"
            return f"{sales} WHERE {rng.choice([f'f.{column} {op} {values[0]}', between_condition])}{where}"
        kind = rng.choice(_JOIN_KINDS)
        end = f" AND f.{column} {rng.choice(['<', '<='])} q.{other_column}" if rng.random() < 0.5 else ""
        join_condition = f"f.{column} {op} q.{other_column}{end} AND {self._draw_table_condition(table, 'q')}"
        return (
            f"{sales} {kind} {self._db}.{table} q ON {join_condition} WHERE {self._draw_table_condition('sales', 'f')}"
        )

    def _draw_set_operation(self) -> str:
        rng = self._rng
        inner, columns = self._draw_select(1)
        a, b = list(columns)[:2]
        sets = rng.choice(
            [
                *(f"ROLLUP (g.{a}, g.{b})", f"CUBE (g.{a}, g.{b})", f"g.{a}, ROLLUP (g.{b})"),
                *(f"GROUPING SETS ((g.{a}, g.{b}), (g.{a}))", f"GROUPING SETS ((g.{b}), (g.{a}), ())"),
            ]
        )
        keys = {name: columns[name] for name in (a, b)}
        having = f" HAVING {self._draw_condition(keys, 'g')}" if rng.random() < 0.5 else ""
        text = f"SELECT g.{a}, g.{b}, count(*) AS n FROM ({inner}) g GROUP BY {sets}{having}"
        return f"SELECT * FROM ({text}) h WHERE {self._draw_condition(keys, 'h')}" if rng.random() < 0.6 else text

    def _draw_window_query(self) -> str:
        """Return a query with window functions and a filter on the key, such as the latest row of each key.

        Some of the queries are the input of a join.
        """
        rng = self._rng
        inner, columns = self._draw_select(1)
        keys = rng.sample(list(columns), rng.choice([1, 1, 2]))
        order = ", ".join(f"{name} {rng.choice(['', 'DESC', 'NULLS LAST'])}" for name in columns)
        windows = f"row_number() OVER (PARTITION BY {', '.join(keys)} ORDER BY {order}) AS rn"
        if rng.random() < 0.3:
            windows += f", count(*) OVER (PARTITION BY {rng.choice(keys)}) AS n"
        text = f"(SELECT *, {windows} FROM ({inner})) w"
        first = "w.rn = 1 AND " if rng.random() < 0.7 else ""
        where = self._draw_condition({name: columns[name] for name in keys}, "w")
        pairs = [(left, joined_table, right) for (_, joined_table), (left, right) in JOINS.items() if left in columns]
        if pairs and rng.random() < 0.5:
            column, other, other_column = rng.choice(pairs)
            kind = rng.choice(_JOIN_KINDS)
            text += (
                f" {kind} {self._db}.{other} d ON w.{column} = d.{other_column} AND"
                f" {self._draw_table_condition(other, 'd')}"
            )
        return f"SELECT w.* FROM {text} WHERE {first}{where}"

    def _draw_shadowing_query(self) -> str:
        """Return a query in which names of a WITH clause hide tables, and names of an inner WITH hide those names."""
        rng = self._rng
        where = [self._draw_table_condition("sales", "sales") for _ in range(4)]
        inner = f"(WITH sales AS (SELECT * FROM sales WHERE {where[1]}) SELECT * FROM sales WHERE {where[2]})"
        other_table = rng.choice([inner, f"{self._db}.sales", "items"])
        first = f"WITH sales AS (SELECT * FROM {self._db}.sales WHERE {where[0]}), items AS (SELECT * FROM sales)"
        kind = rng.choice(_JOIN_KINDS)
        return (
            f"{first} SELECT sales.id, sales.note FROM sales {kind} {other_table} b ON sales.id = b.id "
            f"AND {self._draw_table_condition('sales', 'b')} WHERE {where[3]}"
        )

    def _draw_mixed_type_query(self) -> str:
        """Return a set operation on columns of two types."""
        rng = self._rng
        first, other, kind = rng.choice(_CONVERTED_COLUMNS)
        sides = [
            f"SELECT {name} AS v, id FROM {self._db}.sales WHERE {self._draw_table_condition('sales', 'sales')}"
            for name in (first, other)
        ]
        rng.shuffle(sides)
        word = rng.choice(["UNION", "UNION ALL", "INTERSECT", "INTERSECT ALL", "EXCEPT", "EXCEPT ALL"])
        columns = {"v": kind, "id": "bigint"}
        return f"SELECT * FROM ({sides[0]} {word} {sides[1]}) u WHERE {self._draw_condition(columns, 'u')}"

    def _draw_time_travel(self) -> str:
        """Return a query on earlier snapshots of the facts, in WITH or in FROM, alone or with the current facts."""
        rng = self._rng
        past = f"{self._db}.sales{rng.choice(self._past)}"
        has_name = rng.random() < 0.5
        source = (
            f"(SELECT * FROM {past} a WHERE {self._draw_table_condition('sales', 'a')})" if rng.random() < 0.5 else past
        )
        text = f"WITH s AS (SELECT * FROM {source}) " if has_name else ""
        text += f"SELECT p.id, p.note, p.item FROM {'s' if has_name else source} p"
        if rng.random() < 0.6:
            other, column = rng.choice([("sales", "id"), ("items", "i_id"), ("sales", "id")])
            join_column = "id" if other == "sales" else "item"
            text += (
                f" {rng.choice(_JOIN_KINDS)} {self._db}.{other} c ON p.{join_column} = c.{column} AND"
                f" {self._draw_table_condition(other, 'c')}"
            )
        return f"{text} WHERE {self._draw_table_condition('sales', 'p')}"

    def _draw_grouped_query(self) -> str:
        rng = self._rng
        inner, columns = self._draw_select(1)
        key = rng.choice(list(columns))
        having = rng.choice(["count(*) > 1", self._draw_condition({key: columns[key]}, "g"), "true"])
        group = rng.choice([f"GROUP BY g.{key}", f"GROUP BY ROLLUP (g.{key})"])
        return f"SELECT g.{key}, count(*) AS n FROM ({inner}) g {group} HAVING {having}"

    def _draw_filtered_aggregate_query(self) -> str:
        """Return a query with aggregates that have filters."""
        rng = self._rng
        table, alias = rng.choice(["sales", "sales", "items"]), self._create_alias()
        number = rng.choice([name for name, kind in TABLES[table].items() if kind in ("int", "bigint")])
        conditions = [self._draw_table_condition(table, alias) for _ in range(3)]
        parts = [
            f"count(*) FILTER (WHERE {conditions[0]})",
            f"max({alias}.{number}) FILTER (WHERE {conditions[1]}) + 1",
            f"sum(CASE WHEN {conditions[2]} THEN {alias}.{number} END)",
            f"count(DISTINCT IF({conditions[0]}, {alias}.{number}, NULL))",
            f"avg(CASE WHEN {conditions[1]} THEN 2 WHEN {conditions[2]} THEN {alias}.{number} ELSE "
            f"{rng.choice(['NULL', '7'])} END)",
        ]
        sample = ", ".join(rng.sample(parts, rng.randint(1, 3)))
        condition = f" WHERE {self._draw_table_condition(table, alias)}" if rng.random() < 0.3 else ""
        return f"SELECT {sample} FROM {self._draw_source(table, 1)} {alias}{condition}"

    def _draw_select(self, depth: int = 0) -> tuple[str, dict[str, str]]:
        """Return a query and the types of its columns."""
        rng = self._rng
        table = rng.choice(["sales", "sales", "sales", "items", "stores"])
        alias = self._create_alias()
        sources = {alias: table}
        hidden_names: set[str] = set()
        text = f"FROM {self._draw_source(table, depth)} {alias}"
        for _ in range(rng.choice([0, 1, 1, 2])):
            pair = self._draw_pair(sources, hidden_names)
            if pair is None:
                break
            (old_alias, column), (other, other_column) = pair
            new_alias, kind = self._create_alias(), rng.choice(_JOIN_KINDS + ("JOIN",) * 5)
            condition = f" AND {self._draw_table_condition(other, new_alias)}" if rng.random() < 0.3 else ""
            equality = "<=>" if rng.random() < 0.05 else "="
            sides = f"{self._draw_side(old_alias, column)} {equality} {self._draw_side(new_alias, other_column)}"
            text += f" {kind} {self._draw_source(other, depth)} {new_alias} ON {sides}{condition}"
            sources[new_alias] = other
            hidden_names |= {new_alias} if kind in _LEFT_ONLY_JOIN_KINDS else set()
        if table == "sales" and rng.random() < 0.2:
            # Join with a list of values, with the last sale of each item, or with values of some stores.
            text += rng.choice(
                [
                    f" JOIN VALUES (3, 'x'), (7, NULL), (NULL, 'y') AS v{alias} (k, l) ON v{alias}.k = {alias}.item",
                    f" JOIN (SELECT item, max(id) AS last FROM {self._db}.sales x{alias} "
                    f"WHERE {self._draw_table_condition('sales', f'x{alias}')} GROUP BY item) l{alias} "
                    f"ON {alias}.item = l{alias}.item AND {alias}.id = l{alias}.last",
                    f" JOIN (SELECT min(s_id) AS low, max(opened) AS high FROM {self._db}.stores x{alias} "
                    f"WHERE x{alias}.city > 'c{rng.randrange(6)}') l{alias} "
                    f"ON {alias}.item = l{alias}.low AND {alias}.day = l{alias}.high",
                ]
            )
        visible_sources = {name: source for name, source in sources.items() if name not in hidden_names}
        where = [
            self._draw_table_condition(source, name) for name, source in visible_sources.items() if rng.random() < 0.7
        ]
        if rng.random() < 0.3:
            where.append(self._draw_subquery(rng.choice(list(visible_sources.items()))))
        if len(visible_sources) > 1 and rng.random() < 0.3:
            parts = [
                self._draw_table_condition(source, name)
                for name, source in rng.sample(list(visible_sources.items()), 2)
            ]
            if rng.random() < 0.3:
                name, source = rng.choice(list(visible_sources.items()))
                parts[0] = f"({parts[0]} AND {self._draw_table_condition(source, name)})"
            where.append(f"({' OR '.join(parts)})")
        columns = {
            name: (alias, kind)
            for alias, source in visible_sources.items()
            for name, kind in TABLES[source].items()
            if "." not in name
        }
        chosen_columns = rng.sample(list(columns), min(len(columns), rng.randint(2, 4)))
        named_text = ", ".join(f"{columns[name][0]}.{name}" for name in chosen_columns)
        text = f"SELECT {named_text} {text}" + (f" WHERE {' AND '.join(where)}" if where else "")
        return text, {name: columns[name][1] for name in chosen_columns}

    def _draw_side(self, alias: str, column: str) -> str:
        """Return an operand of a join condition."""
        if column != "day" or self._rng.random() < 0.5:
            return f"{alias}.{column}"
        return self._rng.choice([f"CAST({alias}.at AS date)", f"CAST({alias}.nt AS date)", f"trunc({alias}.day, 'MM')"])

    def _draw_source(self, table: str, depth: int) -> str:
        rng = self._rng
        if depth >= 2 or rng.random() < 0.75:
            return f"{self._db}.{table}"
        return f"(SELECT * FROM {self._db}.{table} WHERE {self._draw_table_condition(table, table)})"

    def _draw_pair(
        self, sources: dict[str, str], hidden_names: set[str]
    ) -> tuple[tuple[str, str], tuple[str, str]] | None:
        """Return an alias and its column, and another table and its column that can be joined with it.

        Return None if no column can be joined.
        """
        pairs = []
        for alias, table in sources.items():
            if alias in hidden_names:
                continue
            for (first, other), (column, other_key) in JOINS.items():
                pairs += [((alias, column), (other, other_key))] if first == table else []
                pairs += [((alias, other_key), (first, column))] if other == table else []
        return self._rng.choice(pairs) if pairs else None

    def _draw_subquery(self, outer_source: tuple[str, str]) -> str:
        rng = self._rng
        alias, table = outer_source
        pair = self._draw_pair({alias: table}, set())
        assert pair is not None
        (_, column), (other, other_column) = pair
        inner = self._create_alias()
        where = self._draw_table_condition(other, inner)
        source = f"{self._db}.{other} {inner}"
        number = next(name for name, kind in TABLES[other].items() if kind in ("bigint", "int"))
        return rng.choice(
            [
                f"{alias}.{column} IN (SELECT {other_column} FROM {source} WHERE {where})",
                f"{alias}.{column} NOT IN "
                f"(SELECT {other_column} FROM {source} WHERE {where} AND {other_column} IS NOT NULL)",
                f"{alias}.{column} NOT IN (SELECT {other_column} FROM {source} WHERE {where})",
                f"EXISTS (SELECT 1 FROM {source} WHERE {inner}.{other_column} = {alias}.{column} AND {where})",
                f"NOT EXISTS (SELECT 1 FROM {source} WHERE {inner}.{other_column} = {alias}.{column} AND {where})",
                f"{alias}.{column} = (SELECT max({other_column}) FROM {source} WHERE {where})",
                f"(SELECT count(*) FROM {source} WHERE {inner}.{other_column} = {alias}.{column} AND {where}) < 3",
                f"({alias}.{column} IN (SELECT {other_column} FROM {source} WHERE {where}) "
                f"OR {self._draw_table_condition(table, alias)})",
                f"(SELECT min({number}) FROM {source} WHERE {where}) > 3",
            ]
        )

    # Conditions

    def _draw_table_condition(self, table: str, alias: str) -> str:
        return self._draw_condition(TABLES[table], alias)

    def _draw_condition(self, columns: dict[str, str], alias: str, depth: int = 0) -> str:
        rng = self._rng
        if depth < 2 and rng.random() < 0.35:
            first, other = (self._draw_condition(columns, alias, depth + 1) for _ in range(2))
            return rng.choice([f"({first} AND {other})", f"({first} OR {other})", f"NOT ({first} OR {other})"])
        name, kind = rng.choice(list(columns.items()))
        if {"item", "store"} <= columns.keys() and rng.random() < 0.04:
            value_rows = "(3, 4L), (7, 1L), (0, 5L)" if rng.random() < 0.8 else "(3, 4L), (7, CAST(NULL AS bigint))"
            pairs = [f"IN ({value_rows})", f"NOT IN ({value_rows})", *(f"{op} (3, 4L)" for op in ("<", "<=", ">", "="))]
            return f"({alias}.item, {alias}.store) {rng.choice(pairs)}"
        function = self._draw_function(f"{alias}.{name}", kind) if rng.random() < 0.35 else None
        if function is not None:
            return f"NOT ({function})" if rng.random() < 0.15 else function
        comparison = self._draw_plain_comparison(f"{alias}.{name}", kind)
        return f"NOT ({comparison})" if rng.random() < 0.15 else comparison

    def _draw_plain_comparison(self, column: str, kind: str) -> str:
        rng = self._rng
        op = rng.choice(["=", "<", "<=", ">", ">=", "<>", "<=>", "="])
        if rng.random() < 0.08:
            return f"{column} IS {rng.choice(['', 'NOT '])}NULL"
        day = rng.choice(_DAYS)
        match kind:
            case "int" | "bigint":
                value = rng.choice([-1, 3, 7, 15, 40, 111])
                return rng.choice(
                    [
                        f"{column} {op} {value}",
                        f"{column} {op} {value}L",
                        f"{column} {op} '{value}'",
                        f"{column} {op} {value}.5",
                        f"{column} BETWEEN {value} AND {value + rng.choice([2, 30])}",
                        f"{column} IN ({value}, {value + 1}, {rng.choice(['NULL', '5'])})",
                        f"{column} + 1 {op} {value}",
                        f"CAST({column} AS string) {op} '{value}'",
                        f"{value} {op} {column}",
                        f"{column} {op} CAST({value} AS double)",
                    ]
                )
            case "date":
                return rng.choice(
                    [
                        f"{column} {op} DATE'{day}'",
                        f"{column} {op} '{day}'",
                        f"{column} {op} TIMESTAMP'{day} 10:00:00'",
                        f"year({column}) {op} 2026",
                        f"{column} {op} DATE'{day}' + INTERVAL 3 DAYS",
                        f"{column} > current_date() - INTERVAL 100 YEARS",
                    ]
                )
            case "timestamp" | "timestamp_ntz":
                word = kind.upper()
                return rng.choice(
                    [
                        f"{column} {op} {word}'{day} 11:30:00'",
                        f"{column} {op} TIMESTAMP_NTZ'{day} 03:00:00'",
                        f"{column} {op} TIMESTAMP'{day} 03:00:00+02:00'",
                        f"CAST({column} AS date) {op} DATE'{day}'",
                        f"{column} {op} '{day} 04:00:00'",
                        f"year({column}) {op} 2026",
                    ]
                )
            case "decimal(9,2)":
                value = rng.choice(["3", "10.25", "7.125", "'12.5'", "2.5D", "CAST(10.25 AS decimal(20,5))"])
                return f"{column} {op} {value}"
            case "double":
                value = rng.choice(["2.5", "0.0D", "-0.0D", "double('NaN')", "double('Infinity')", "1e0", "'1.5'"])
                return f"{column} {op} {value}"
            case "string":
                text = rng.choice(["a1", "a", "red", "blue", "c5", ""])
                return rng.choice(
                    [
                        f"{column} {op} '{text}'",
                        f"{column} LIKE '{text}%'",
                        f"{column} LIKE '%{text}'",
                        f"{column} NOT LIKE '{text}%'",
                        f"{column} IN ('{text}', 'red')",
                        f"startswith({column}, '{text}')",
                        f"upper({column}) {op} '{text.upper()}'",
                        f"try_cast({column} AS int) {op} 5",
                        f"CAST({column} AS char(4)) {op} '{text}'",
                        f"CAST({column} AS char(4)) {op} '{text}  '",
                        f"CAST({column} AS binary) {op} X'6131'",
                        f"rtrim({column}) {op} '{text}'",
                    ]
                )
        return rng.choice([column, f"{column} {op} true", f"{column} IS NOT TRUE"])

    def _draw_function(self, column: str, kind: str) -> str | None:
        """Return a comparison of a function of the column, or None."""
        rng = self._rng
        op = rng.choice(["=", "<", "<=", ">", ">=", "<>", "="])
        day = rng.choice([*_DAYS, "2026-01-01", "2026-03-01"])
        match kind:
            case "int" | "bigint":
                value = rng.choice([-1, 0, 1, 3, 7, 15, 40, 111])
                return rng.choice(
                    [
                        f"{column} DIV {rng.choice([4, 30, -3])} {op} {value}",
                        f"2 * {column} + 1 {op} {value}",
                        f"{value} - {column} {op} {rng.choice([2, -20])}",
                        f"-{column} {op} -({value})",
                        f"CAST({column} AS decimal(20,2)) + 1.5 {op} {value}",
                        f"coalesce({column}, {rng.choice([3, 7])}) {op} {value}",
                        f"nullif({column}, 3) {op} {value}",
                        f"CASE WHEN {column} < {value} THEN 1 WHEN {column} IS NULL THEN 2 ELSE 3 END {op} 2",
                        f"CASE {column} WHEN {value} THEN 'a' WHEN 5 THEN 'b' END {op} 'a'",
                        f"CASE WHEN {column} > {value} THEN {column} < 60 ELSE {column} = 3 END",
                        f"if({column} > {value}, {column} < 60, NULL)",
                        f"array_contains(array(1, {value}), {column})",
                        f"{column} IN (SELECT explode(array(3, {value})))",
                    ]
                )
            case "date":
                unit = rng.choice(["MM", "YEAR", "QUARTER", "week", "DAY"])
                return rng.choice(
                    [
                        f"(year({column}) = 2026 AND month({column}) = {rng.choice([1, 2, 13])})",
                        f"trunc({column}, '{unit}') {op} DATE'{day}'",
                        f"date_trunc('{unit}', {column}) {op} TIMESTAMP'{day} 00:00:00'",
                        f"date_trunc('month', {column}) {op} DATE'{day}'",
                        f"date_format({column}, '{rng.choice(['yyyy-MM', 'yyyyMM'])}') {op} '{day[:7]}'",
                        f"{column} + INTERVAL '{rng.choice([1, 30, -2])}' DAY {op} DATE'{day}'",
                        f"{column} + INTERVAL '1' MONTH {op} DATE'{day}'",
                        f"{column} + INTERVAL '25' HOUR {op} TIMESTAMP'{day} 01:00:00'",
                        f"date_sub({column}, {rng.choice([0, 5, 40])}) {op} DATE'{day}'",
                        f"coalesce({column}, DATE'2026-01-20') {op} DATE'{day}'",
                        f"CAST({column} AS timestamp_ntz) {op} TIMESTAMP_NTZ'{day} 10:00:00'",
                    ]
                )
            case "timestamp" | "timestamp_ntz":
                unit = rng.choice(["year", "MM", "week", "dd", "hour", "minute"])
                word = kind.upper()
                return rng.choice(
                    [
                        f"date_trunc('{unit}', {column}) {op} {word}'{day} 00:00:00'",
                        f"(year({column}) = 2026 AND month({column}) = 1)",
                        f"{column} + INTERVAL '90' MINUTE {op} {word}'{day} 02:00:00'",
                        f"{column} - INTERVAL '1' DAY {op} {word}'{day} 02:00:00'",
                        f"date_format({column}, 'yyyy-MM-dd') {op} '{day}'",
                        f"coalesce({column}, {word}'2026-01-05 10:00:00') {op} {word}'{day} 02:00:00'",
                        f"trunc({column}, 'MM') {op} DATE'{day}'",
                    ]
                )
            case "decimal(9,2)":
                value = rng.choice(["3", "10.25", "7.125"])
                return rng.choice(
                    [
                        f"{column} + 1.25 {op} {value}",
                        f"2 * {column} {op} {value}",
                        f"-{column} {op} -({value})",
                        f"coalesce({column}, 7.5) {op} {value}",
                        f"CAST({column} AS decimal(38,10)) - 1 {op} {value}",
                    ]
                )
            case "string":
                text = rng.choice(["a1", "a", "red", "blue", "c5", "A1", "RED"])
                return rng.choice(
                    [
                        f"substr({column}, {rng.choice([0, 1, 2, -2])}, 2) {op} '{text}'",
                        f"left({column}, {rng.choice([1, 2, 3])}) {op} '{text}'",
                        f"lower({column}) {op} '{text}'",
                        f"upper({column}) {op} '{text}'",
                        f"lower({column}) IN ('{text}', 'red')",
                        f"contains({column}, '{text[1:]}')",
                        f"endswith({column}, '{text[-1]}')",
                        f"lower({column}) LIKE '%{text[-1]}%'",
                        f"coalesce({column}, 'red') {op} '{text}'",
                        f"CASE WHEN {column} LIKE 'a%' THEN 'a' ELSE {column} END {op} '{text}'",
                    ]
                )
            case "boolean":
                return rng.choice([f"coalesce({column}, true)", f"CASE WHEN {column} THEN {column} ELSE NULL END"])
        return None
