"""Random aggregate queries with clauses and values that `RandomAggregates` does not have.

The table has names of functions, keywords and mixed case. Its values are at the limits of their types: sums that
overflow, decimals with 38 digits, NaN, infinities, zeros with a sign, and characters beyond the first 65,536.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

import pyarrow as pa

COLUMNS = {
    "k": pa.int32(),
    "count": pa.int64(),
    "Sum": pa.int64(),
    "Mixed Case": pa.string(),
    "order": pa.int32(),
    "x": pa.float64(),
    "date": pa.date32(),
    "ts": pa.timestamp("us"),
    "tz": pa.timestamp("us", tz="UTC"),
    "ok": pa.bool_(),
    "wide": pa.decimal128(38, 0),
    "price": pa.decimal128(12, 2),
    "y": pa.float32(),
}
SCHEMA = pa.schema(list(COLUMNS.items()))
_DAY_US = 86_400_000_000
_TEXTS = ("", "a", "A", "ab", " a", "a ", "it's", "a\\b", "%", "_", "é", "e\u0301", "日本", "🙂", "🙂🙂", "\U0010ffff")
_FLOATS = (0.0, -0.0, 1.5, -2.25, float("nan"), float("inf"), float("-inf"), 1024.0)
_LONGS = (1, -1, 7, 2**53 + 1, 2**62, -(2**62), 2**63 - 1, -(2**63))
_WIDE = (1, -1, 10**20, 3 * 10**37, 10**38 - 1, -(10**38) + 1)
_DAYS = (-400, -1, 0, 1, 30, 31, 58, 59, 365, 19_000)
_TIMES_US = (0, -1, 1, 3_600_000_000, 43_200_000_001)


def draw_rows(rng: random.Random, row_count: int, *, overflows: bool = False) -> pa.Table:
    """Return random rows.

    Args:
        rng: The source of random numbers.
        row_count: The number of rows.
        overflows: Whether sums of `Sum` and `wide` may overflow.
    """
    longs, wide = (_LONGS, _WIDE) if overflows else (_LONGS[:4], _WIDE[:3])

    def draw(name: str) -> object:
        if rng.random() < 0.12:
            return None
        match name:
            case "k":
                return rng.choice((-3, 0, 1, 2, 7))
            case "count":
                return rng.randint(-2, 6)
            case "Sum":
                return rng.choice(longs)
            case "Mixed Case":
                return rng.choice(_TEXTS)
            case "order":
                return rng.choice((1, 2, 3))
            case "x" | "y":
                return rng.choice(_FLOATS)
            case "date":
                return rng.choice(_DAYS)
            case "ts" | "tz":
                return rng.choice(_DAYS) * _DAY_US + rng.choice(_TIMES_US)
            case "ok":
                return rng.random() < 0.5
            case "wide":
                return Decimal(rng.choice(wide))
        return Decimal(rng.randint(-500, 500)).scaleb(-2)

    storage = {"date": pa.int32(), "ts": pa.int64(), "tz": pa.int64()}
    arrays = [
        pa.array([draw(name) for _ in range(row_count)], storage.get(name, kind)).cast(kind)
        for name, kind in COLUMNS.items()
    ]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


@dataclass(frozen=True)
class Dialect:
    """The dialect of an engine, and the forms that its SQL has.

    Attributes:
        quote: The character around names.
        group_all: Whether it has `GROUP BY ALL`.
        ties: Whether it has `FETCH FIRST … ROWS WITH TIES`.
        mixes_grouping_sets: Whether GROUP BY may have keys beside ROLLUP and CUBE.
    """

    quote: str = '"'
    group_all: bool = False
    ties: bool = False
    mixes_grouping_sets: bool = True


DUCKDB = Dialect(group_all=True)
SEAMARK = Dialect(mixes_grouping_sets=False)
TRINO = Dialect(ties=True)
SPARK = Dialect(quote="`", group_all=True)

_DIMENSIONS = {
    "k": ["k", "k + 1", "abs(k)", "k % 3", "CASE WHEN k > 0 THEN 'p' WHEN k = 0 THEN 'z' END", "coalesce(k, -9)",
          "nullif(k, 0)", "-k", "CASE k WHEN 1 THEN 'one' ELSE 'many' END", "k IS NULL", "CAST(k AS double)"],
    "count": ['"count"', '"count" * 2', 'a."COUNT"', 'greatest("count", 2)', 'CAST("count" AS decimal(20, 1))'],
    "Mixed Case": ['"Mixed Case"', 'lower("Mixed Case")', 'length("Mixed Case")', 'substr("Mixed Case", 1, 1)',
                   'a."mixed case"', """coalesce("Mixed Case", '🙂')""", 'trim("Mixed Case")',
                   """"Mixed Case" LIKE '%a%'""", 'upper("Mixed Case")'],
    "order": ['"order"', 'a."order"', '"ORDER" + 1'],
    "x": ["x", "x > 0", "CAST(x AS varchar)", "coalesce(x, 0.5e0)", "x IS NULL"],
    "y": ["y", "y < 1.5", "CAST(y AS varchar)"],
    "date": ['"date"', 'year("date")', 'extract(day FROM "date")', """date_trunc('month', "date")""",
             """"date" + INTERVAL '1' DAY"""],
    "month(date)": ['year("date")', 'month("date")', """date_trunc('month', "date")""", 'quarter("date")',
                    """date_trunc('week', "date")""", 'extract(day FROM "date")'],
    "ts": ["ts", "CAST(ts AS date)", "hour(ts)", "date_trunc('minute', ts)", "extract(second FROM ts)"],
    "day(ts)": ["date_trunc('day', ts)", "CAST(ts AS date)", "year(ts)", "date_trunc('week', ts)", "hour(ts)",
                "extract(dow FROM ts)", "extract(doy FROM ts)"],
    "hour(ts)": ["date_trunc('hour', ts)", "hour(ts)", "CAST(ts AS date)", "minute(ts)"],
    "tz": ["tz", "year(tz)", "tz IS NULL"],
    "day(tz)": ["date_trunc('day', tz)", "year(tz)", "CAST(tz AS date)", "hour(tz)"],
    "ok": ["ok", "NOT ok", "coalesce(ok, FALSE)", "ok IS NOT TRUE"],
    "price": ["price", "price * 2", "CAST(price AS integer)", "price + k"],
    "wide": ["wide", "wide IS NULL"],
}  # fmt: skip
"""The expressions by dimension. Some of them do not follow from the dimension."""
_CONDITIONS = {
    "k": ["k = 1", "k <> 1", "k IN (1, 2)", "k NOT IN (1, 7)", "k IN (1, NULL)", "k NOT IN (1, NULL)",
          "k BETWEEN 0 AND 2", "k NOT BETWEEN 0 AND 2", "k IS NULL", "k IS NOT NULL", "coalesce(k, 2) = 2",
          "CASE WHEN k > 0 THEN k < 5 ELSE k IS NULL END", "k IS DISTINCT FROM 1", "k IS NOT DISTINCT FROM NULL",
          "NOT k = 2", "k + 1 > 2", "k = 1.0", "k < 1.5e0", "nullif(k, 1) IS NULL", "k = '1'", "abs(k) = 3",
          "k > 0 AND k < 7", "(k, ok) = (1, TRUE)"],
    "count": ['"count" > 2', 'a."count" BETWEEN -1 AND 3', '"count" = k', 'NOT ("count" < 3)', '"count" / 2 = 1'],
    "Mixed Case": [""""Mixed Case" = 'a'""", """"Mixed Case" LIKE 'a%'""", """"Mixed Case" NOT LIKE '_'""",
                   """"Mixed Case" LIKE '🙂_'""", """"Mixed Case" > '日'""", """"Mixed Case" >= 'a '""",
                   """"Mixed Case" IN ('it''s', 'a\\b', '🙂')""", """"Mixed Case" NOT IN ('', 'A')""",
                   """length("Mixed Case") = 1""", """"Mixed Case" BETWEEN 'A' AND 'a'""",
                   """lower("Mixed Case") = 'a'""", """"Mixed Case" LIKE '%\\%'""", """"Mixed Case" < '\U0010ffff'"""],
    "order": ['"order" = 2', 'a."order" <> 1', '"order" IN (1, 3)'],
    "x": ["x = 0", "x <> 0", "x > 1", "x <= 1.5", "NOT x < 0", "x IS NULL", "x IN (1.5, 1024)",
          "x = CAST('NaN' AS double)", "x > CAST('Infinity' AS double)", "x BETWEEN -2.25e0 AND 0", "x = -0.0e0"],
    "y": ["y > 0", "y = 1.5", "NOT y <= 0", "y IS NOT NULL", "y <> y"],
    "date": [""""date" = DATE '1970-01-01'""", """"date" < DATE '1970-02-28'""", 'year("date") = 1970',
             """"date" BETWEEN DATE '1969-12-31' AND DATE '1970-01-31'""", """"date" >= '1970-01-02'""",
             """"date" > TIMESTAMP '1970-01-01 12:00:00'"""],
    "month(date)": [""""date" >= DATE '1970-01-01'""", """"date" < DATE '1970-02-01'""", 'month("date") IN (1, 2)',
                    """NOT "date" >= DATE '1971-01-01'""", """"date" >= TIMESTAMP '1970-01-01 00:00:01'""",
                    """"date" > DATE '1970-01-01'""", """"date" <= DATE '1970-01-01'""",
                    """DATE '1970-01-01' <= "date\""""],
    "ts": ["ts >= TIMESTAMP '1970-01-01 00:00:00.000001'", "ts = TIMESTAMP '1970-01-01'", "ts < DATE '1970-01-31'"],
    "day(ts)": ["ts >= DATE '1970-01-01'", "ts < TIMESTAMP '1970-01-31 00:00:00'", "year(ts) = 1970",
                "ts >= TIMESTAMP '1970-01-01 00:00:00.0000001'", "ts <= TIMESTAMP '1970-01-01 00:00:00'",
                "CAST(ts AS date) BETWEEN DATE '1969-12-31' AND DATE '1970-01-01'", "ts IS NOT NULL",
                "ts > TIMESTAMP '1970-01-01 00:00:00.000000'", "ts >= TIMESTAMP '1970-01-01 00:00:00.000001'"],
    "hour(ts)": ["ts >= TIMESTAMP '1970-01-01 01:00:00'", "hour(ts) BETWEEN 1 AND 12", "CAST(ts AS date) IS NULL"],
    "tz": ["tz >= TIMESTAMP '1970-01-01 00:00:00 UTC'", "year(tz) = 1969",
           "tz < TIMESTAMP '1970-01-01 01:00:00 +01:00'", "tz IS NULL"],
    "day(tz)": ["tz >= TIMESTAMP '1970-01-01 00:00:00 UTC'", "CAST(tz AS date) = DATE '1970-01-01'",
                "tz < TIMESTAMP '1970-01-01 00:00:00'", "tz >= DATE '1970-01-02'", "tz IS NOT NULL"],
    "ok": ["ok", "NOT ok", "ok IS NULL", "ok = FALSE", "ok IS NOT TRUE", "coalesce(ok, TRUE)", "ok <> TRUE"],
    "price": ["price > 1.5", "price = 0", "price BETWEEN -1 AND 1.005", "price < 1e0", "price IN (1, 2.50)"],
    "wide": ["wide > 0", f"wide = {10**38 - 1}", "wide < 1e0", "wide IS NOT NULL"],
}  # fmt: skip
_CONDITION_COLUMNS = ("k", "count", "Mixed Case", "order", "x", "date", "ts", "tz", "ok", "price", "wide", "y")
_OPERANDS = ("k", '"count"', '"Sum"', "price", "wide", "x", "y", '"order"', 'k * "count"', "price * (1 - price)",
             '"count" + "order"', "price * 1.5", 'k - "count" * 2', "wide + k", '"Sum" * 2')  # fmt: skip
_ORDERED_OPERANDS = (*_OPERANDS, '"Mixed Case"', '"date"', "ts", "tz", "ok")


class WideQueries:
    """Draws cubes of the table of `draw_rows`, and queries, of which many follow from a cube."""

    def __init__(self, rng: random.Random, dialect: Dialect) -> None:
        self._rng, self._dialect = rng, dialect

    def draw_cube(self) -> tuple[list[str], list[str]]:
        """Return random dimensions and measures of a cube. The names of the columns have their original case."""
        rng = self._rng
        dimensions = rng.sample(list(_DIMENSIONS), rng.randint(1, 5))
        measures = {"count(*)"}
        for _ in range(rng.randint(2, 7)):
            function = rng.choice(("sum", "avg", "count", "min", "max"))
            operand = rng.choice(_ORDERED_OPERANDS if function in ("count", "min", "max") else _OPERANDS)
            measures.add(f"{function}({operand})")
        return dimensions, sorted(measures)

    def draw_query(self, dimensions: Sequence[str], measures: Sequence[str], source: str) -> str:
        """Return a query of a table with this cube."""
        text = self._draw_select(dimensions, measures, source)
        draw = self._rng.random()
        if draw < 0.04:
            text = f"SELECT * FROM ({text}) q"
        elif draw < 0.08:
            text = f"WITH q AS ({text}) SELECT count(*) FROM q"
        elif draw < 0.1:
            text = f"SELECT (SELECT count(*) FROM ({text}) q) + 1 FROM {source} a WHERE k = 1"
        return text if self._dialect.quote == '"' else text.replace('"', self._dialect.quote)

    def _draw_select(self, dimensions: Sequence[str], measures: Sequence[str], source: str) -> str:
        rng = self._rng
        keys = [self._draw_key(dimensions) for _ in range(rng.randint(0, 3))]
        values = [self._draw_value(dimensions, measures) for _ in range(rng.randint(0 if keys else 1, 3))]
        outputs = [self._draw_alias(value) for value in (*keys, *values)]
        if values and rng.random() < 0.2:
            rng.shuffle(outputs)
            shuffled = True
        else:
            shuffled = False
        distinct = "DISTINCT " if rng.random() < 0.1 else ""
        text = f"SELECT {distinct}{', '.join(outputs)} FROM {source} a"
        if rng.random() < 0.6:
            text += f" WHERE {self.draw_condition(dimensions)}"
        positions = ", ".join(map(str, range(1, len(keys) + 1)))
        if keys and not (distinct and not values):
            text += f" GROUP BY {self._draw_grouping(keys, '' if shuffled else positions)}"
        if ((keys and not distinct) or values) and rng.random() < 0.3:
            text += f" HAVING {self._draw_having(dimensions, measures)}"
        return text + self._draw_order(dimensions, measures, outputs, keys, is_distinct=bool(distinct))

    def _draw_key(self, dimensions: Sequence[str]) -> str:
        rng = self._rng
        key = rng.choice(_DIMENSIONS[rng.choice(dimensions)])
        return rng.choice(("'c'", "1 + 1", "NULL")) if rng.random() < 0.02 else key

    def _draw_grouping(self, keys: Sequence[str], positions: str) -> str:
        rng = self._rng
        names = ", ".join(keys)
        draw = rng.random()
        if draw < 0.5:
            return names
        if draw < 0.6 and positions:
            return positions
        if draw < 0.65 and self._dialect.group_all:
            return "ALL"
        if not self._dialect.mixes_grouping_sets and not all(key.strip('"').isidentifier() for key in keys):
            return names
        some_keys = ", ".join(rng.sample(keys, rng.randint(0, len(keys))))
        forms = [f"ROLLUP ({names})", f"CUBE ({names})", f"GROUPING SETS (({names}), ({some_keys}), ())"]
        if len(keys) > 1 and self._dialect.mixes_grouping_sets:
            forms += [f"{keys[0]}, ROLLUP ({', '.join(keys[1:])})", f"CUBE ({keys[0]}), {', '.join(keys[1:])}",
                      f"ROLLUP ({keys[0]}), CUBE ({', '.join(keys[1:])})"]  # fmt: skip
        return rng.choice(forms)

    def _draw_having(self, dimensions: Sequence[str], measures: Sequence[str]) -> str:
        rng = self._rng
        aggregate = self._draw_aggregate(dimensions, measures)
        parts = [f"count(*) > {rng.randint(0, 3)}", f"{aggregate} IS NOT NULL", f"NOT {aggregate} IS NULL",
                 f"count(*) BETWEEN 1 AND {rng.randint(1, 9)}", f"coalesce(count({rng.choice(('1', '*'))}), 0) <> 2",
                 f"CASE WHEN count(*) > 2 THEN {aggregate} IS NULL ELSE TRUE END"]  # fmt: skip
        return rng.choice((" AND ", " OR ")).join(rng.sample(parts, rng.randint(1, 2)))

    def _draw_order(
        self,
        dimensions: Sequence[str],
        measures: Sequence[str],
        outputs: Sequence[str],
        keys: Sequence[str],
        *,
        is_distinct: bool,
    ) -> str:
        """Return an ORDER BY clause or an empty text.

        LIMIT follows an order by all outputs, and WITH TIES keeps equal rows, so all engines have the same result.
        """
        rng = self._rng
        draw = rng.random()
        if draw < 0.15 and not is_distinct:
            value = rng.choice((self._draw_aggregate(dimensions, measures), *keys))
            return f" ORDER BY {value} {rng.choice(('ASC', 'DESC NULLS LAST', 'NULLS FIRST'))}"
        if draw < 0.5:
            positions = rng.sample(range(1, len(outputs) + 1), len(outputs))
            order = ", ".join(f"{number} {rng.choice(('', 'DESC', 'NULLS FIRST'))}".strip() for number in positions)
            if self._dialect.ties and rng.random() < 0.3:
                return f" ORDER BY {positions[0]} FETCH FIRST {rng.randint(1, 3)} ROWS WITH TIES"
            # 0.0 and -0.0 are one group, but their texts differ. So LIMIT could keep either text.
            if any(f"CAST({name} AS varchar)" in " ".join(outputs) for name in "xy") and not all(
                f"CAST({name} AS varchar)" in outputs for name in "xy"
            ):
                return f" ORDER BY {order}"
            offset = f" OFFSET {rng.randint(0, 2)}" if rng.random() < 0.3 and not self._dialect.ties else ""
            return f" ORDER BY {order} LIMIT {rng.choice((0, 1, 3, 1000))}{offset}"
        return ""

    def _draw_alias(self, expression: str) -> str:
        """Return the expression, in a fifth of the cases with an alias.

        The alias may also be the name of a column, of a function, or of another output.
        """
        rng = self._rng
        if rng.random() < 0.2:
            name = rng.choice(("k", "total", '"count"', '"Sum"', '"MIXED CASE"', "q1", "q1", '"🙂"'))
            return f"{expression} AS {name}"
        return expression

    def _draw_value(self, dimensions: Sequence[str], measures: Sequence[str]) -> str:
        """Return an expression of aggregates."""
        rng = self._rng
        aggregate = self._draw_aggregate(dimensions, measures)
        draw = rng.random()
        if draw < 0.65:
            return aggregate
        measure = rng.choice(measures)
        return rng.choice(
            (
                f"coalesce({aggregate}, {aggregate})",
                f"CASE WHEN count(*) > 2 THEN {aggregate} END",
                f"{aggregate} IS NULL",
                f"count(*) * 2 - count({rng.choice(('*', '1'))})",
                f"CASE WHEN {measure} IS NULL THEN 0 ELSE 1 END",
                f"nullif(count(*), {rng.randint(0, 5)})",
                f"CAST(count(*) AS double) / {rng.choice((2, 3))}",
            )
        )

    def _draw_aggregate(self, dimensions: Sequence[str], measures: Sequence[str]) -> str:
        rng = self._rng
        measure = rng.choice(measures)
        draw = rng.random()
        if draw < 0.5:
            return measure
        if draw < 0.65:
            return f"{measure} FILTER (WHERE {self._draw_simple_condition(dimensions)})"
        if draw < 0.8:
            names = [name for name in dimensions if "(" not in name and name not in ("ok", "x", "y")]
            if not names:
                return measure
            name = f'"{rng.choice(names)}"'
            form = rng.choice(("min({})", "max({})", "count(DISTINCT {})", "count({})", "count(DISTINCT {}) FILTER"))
            if form.endswith("FILTER"):
                return f"{form.format(name)} (WHERE {self._draw_simple_condition(dimensions)})"
            return form.format(name)
        if draw < 0.9:
            return rng.choice(("count(1)", "count('x')", "sum(1)", "count(TRUE)", "sum(2)", "count(NULL)", "max(1)"))
        if draw < 0.93:
            return f"count_if({self._draw_simple_condition(dimensions)})"
        if draw < 0.96:
            return f"sum(CASE WHEN {self._draw_simple_condition(dimensions)} THEN 1 ELSE 0 END)"
        return rng.choice(('sum("Sum" + 1)', 'max("count" + k)', 'sum(DISTINCT "count")', "min(-k)", 'avg("order")'))

    def _draw_simple_condition(self, dimensions: Sequence[str]) -> str:
        rng = self._rng
        name = rng.choice(dimensions) if rng.random() < 0.9 else rng.choice(_CONDITION_COLUMNS)
        return rng.choice(_CONDITIONS[name])

    def draw_condition(self, dimensions: Sequence[str], depth: int = 0) -> str:
        rng = self._rng
        draw = rng.random()
        if depth > 2 or draw < 0.45:
            return self._draw_simple_condition(dimensions)
        if draw < 0.55:
            return f"NOT ({self.draw_condition(dimensions, depth + 1)})"
        if draw < 0.6:
            return f"({self._draw_simple_condition(dimensions)}) IS NOT TRUE"
        connective = rng.choice((" AND ", " OR "))
        return f"({connective.join(self.draw_condition(dimensions, depth + 1) for _ in range(2))})"
