"""Random comparisons of columns, in the SQL that Trino and DuckDB share."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime

KINDS = {
    "long": "BIGINT",
    "decimal(9, 2)": "DECIMAL(9, 2)",
    "decimal(20, 18)": "DECIMAL(20, 18)",
    "double": "DOUBLE",
    "string": "VARCHAR",
    "date": "DATE",
    "timestamp": "TIMESTAMP",
    "boolean": "BOOLEAN",
}
VALUES = {
    "long": ["0", "1", "2", "3", "2020", "9007199254740992", "9007199254740993"],
    "decimal(9, 2)": ["0", "1.5", "2.25", "3", "-1.5", "0.3"],
    "decimal(20, 18)": ["0.3", "1.5", "0.299999999999999999", "3", "0.300000000000000001"],
    "double": ["0", "1.5", "2.25", "3", "-1.5"],
    "string": [
        "''",
        "'a'",
        "'ab'",
        "'abc'",
        "'b'",
        "'o''b'",
        "'é'",
        "'--'",
        "'Ann.Smith@Example.com'",
        "'Kim.Kİssinger'",
        "'Ann.SMITHÉE'",
    ],
    "date": ["DATE '2020-01-01'", "DATE '2020-01-31'", "DATE '2020-02-29'", "DATE '2021-01-01'"],
    "timestamp": [
        "TIMESTAMP '2020-01-01 00:00:00'",
        "TIMESTAMP '2020-01-31 12:00:00'",
        "TIMESTAMP '2020-02-29 23:59:59.999999'",
        "TIMESTAMP '2021-01-01 00:00:00.5'",
        "TIMESTAMP '2020-03-29 02:45:00'",  # This local time does not exist in Berlin.
        "TIMESTAMP '2020-03-29 03:20:00'",
    ],
    "boolean": ["TRUE", "FALSE"],
}
CONVERSION_SENSITIVE_VALUES = {
    "long": ["9007199254740992", "9007199254740993"],
    "decimal(20, 18)": ["0.3", "0.299999999999999999", "0.300000000000000001"],
    "timestamp": ["TIMESTAMP '2020-03-29 02:45:00'", "TIMESTAMP '2020-03-29 03:20:00'"],
}
"""Values that become equal, or change their order, after a conversion to doubles or to times of the session's zone."""
SQL_FORMATS = {
    "%Y": ["2020", "2021", "0033"],
    "%Y-%m": ["2020-01", "2020-1", "2021-01", "2020-02"],
    "%Y%m%d": ["20200131", "20210101"],
    "%Y-%m-%d": ["2020-02-29", "2020-01-31", "2021-01-01"],
    "%Y-%m-%d %H:%i:%s": ["2020-01-31 12:00:00", "2021-01-01 00:00:00"],
    "%d": ["31"],
}
LONG_TEXTS = ["ann.smith@example.com", "ann.smithée", "kim.kissinger"]
MACROS = (
    "CREATE MACRO date_format(t, f) AS strftime(t, replace(replace(f, '%i', '%M'), '%s', '%S'))",
    "CREATE MACRO date_parse(t, f) AS strptime(t, ['%Y-%m-%d %H:%M:%S', '%Y-%m-%d', '%Y%m%d', '%Y-%m', '%Y'])",
    "CREATE MACRO from_iso8601_date(t) AS CAST(t AS DATE)",
)
"""DuckDB macros for functions of Trino."""
ZONE = "Europe/Berlin"
"""The time zone of the session."""
MIXED_NUMBERS = [
    *VALUES["long"],
    *VALUES["decimal(9, 2)"],
    *VALUES["decimal(20, 18)"],
    *(f"{value}e0" for value in ("1", "0.3", "1.5", "-1.5", "9007199254740992", "9007199254740993", "2020")),
    "1e300",
    "CAST(NULL AS DOUBLE)",
    "NULL",
]
MIXED_TIMES = [
    *VALUES["date"],
    *VALUES["timestamp"],
    "CAST('2020-03-29 01:20:00 UTC' AS TIMESTAMP WITH TIME ZONE)",
    "CAST('2020-03-29 01:50:00 UTC' AS TIMESTAMP WITH TIME ZONE)",
    "CAST('2021-01-01 00:00:00 UTC' AS TIMESTAMP WITH TIME ZONE)",
    "current_timestamp",
]
EXACT_KINDS = ("long", "decimal(9, 2)", "decimal(20, 18)", "string", "date", "timestamp")
DAYS_AGO = (datetime.now(UTC).date() - date(2020, 1, 31)).days
"""The number of days from a time in the tables' values to today.

The spans of random expressions of the current time begin or end near these values.
"""
NUMBERS = ("long", "decimal(9, 2)", "decimal(20, 18)", "double")
COLUMN_NAMES = ["a", "b", "c", "k", "Two Words", "é", "day", 'q"q', "orders"]
TABLE_NAMES = ["t", "u", "orders", "Größe", "two words", "o'brien"]
ALIASES = ["x", "y", "z", "t", "u", "orders", "A b", "ü"]
ROWS_MAX = 8
KEYWORDS = frozenset({"day"})
"""Names that a statement must quote."""


@dataclass
class StoredRelation:
    name: str
    columns: dict[str, str]


@dataclass
class ScopeColumn:
    """A column in the scope of a query. `owner` is the alias that can qualify its name."""

    name: str
    kind: str
    owner: str | None
    is_plain: bool = True
    """True if a query may name the column without an alias.

    It is False if USING merges the column in an outer join.
    """


Scope = list[ScopeColumn]
DrawFunctions = list[Callable[[], str]]
"""Functions that each draw a comparison of one form."""


@dataclass
class Comparisons:
    rng: random.Random
    mixed_cases: bool = True
    """True if the operands of a simple CASE may have several types.

    DuckDB compares the operands separately, and Trino converts all of them to one type.
    """

    # Spelling

    def draw_value(self, kind: str) -> str:
        """Return a literal, mostly one of three values, so that rows match each other.

        Sometimes it is a value that changes if it is converted to another type.
        """
        if kind in CONVERSION_SENSITIVE_VALUES and self.draw_chance(0.12):
            return self.rng.choice(CONVERSION_SENSITIVE_VALUES[kind])
        return self.rng.choice(VALUES[kind][: 3 if self.draw_chance(0.7) else None])

    def draw_space(self) -> str:
        return self.rng.choice([" ", " ", " ", " ", "\n", "  ", " /* FROM t */ ", " -- WHERE 'x\n", "/**/ "])

    def draw_word(self, text: str) -> str:
        return self.rng.choice([text, text, text.lower()])

    def spell(self, name: str) -> str:
        """Return the identifier in random case, with or without quotes."""
        if self.draw_chance(0.2):
            name = "".join(self.rng.choice([letter.upper(), letter]) if letter.isascii() else letter for letter in name)
        if name.isascii() and name.isidentifier() and name.lower() not in KEYWORDS and self.draw_chance(0.7):
            return name
        return quote(name)

    def draw_operator(self) -> str:
        """Return a random comparison operator."""
        return self.rng.choice(["=", "<>", "<", "<=", ">", ">="])

    def draw_chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return self.rng.random() < probability

    # Columns

    def can_name(self, column: ScopeColumn, scope: Scope) -> bool:
        """Return whether `scope` allows the column to be named without ambiguity."""
        is_unambiguous = [candidate.name.lower() for candidate in scope].count(column.name.lower()) == 1
        owned_columns = [
            candidate
            for candidate in scope
            if candidate.owner == column.owner and candidate.name.lower() == column.name.lower()
        ]
        return (is_unambiguous and column.is_plain) or (column.owner is not None and len(owned_columns) == 1)

    def write_reference(self, column: ScopeColumn, scope: Scope) -> str:
        is_unambiguous = [candidate.name.lower() for candidate in scope].count(column.name.lower()) == 1
        if is_unambiguous and column.is_plain and (column.owner is None or self.draw_chance(0.5)):
            return self.spell(column.name)
        return f"{self.spell(str(column.owner))}.{self.spell(column.name)}"

    def draw_literal(self, kind: str) -> str:
        if self.draw_chance(0.03):
            return "NULL"
        text = self.draw_value(kind)
        if kind == "date" and self.draw_chance(0.1):
            return f"{text} {self.rng.choice('+-')} INTERVAL '1' {self.rng.choice(['DAY', 'MONTH', 'YEAR'])}"
        if kind in NUMBERS and self.draw_chance(0.2):
            return f"{text} {self.rng.choice('+-')} {'1' if kind == 'long' else self.rng.choice(['1', '0.5', '-1'])}"
        return f"({text})" if self.draw_chance(0.05) else text

    def choose_column(self, side: Scope, scope: Scope) -> ScopeColumn | None:
        candidates = [column for column in side if self.can_name(column, scope)]
        return self.rng.choice(candidates) if candidates else None

    # Conditions on two columns

    def draw_comparison_of_sides(self, left: Scope, right: Scope, joined_scope: Scope) -> str:
        """Return a condition that compares columns of both sides: an equality, or periods of times."""
        pairs = [
            (column, other)
            for column in left
            for other in right
            if column.kind == other.kind and self.can_name(column, joined_scope) and self.can_name(other, joined_scope)
        ]
        periods = self.draw_period_conditions(left, right, joined_scope) if self.draw_chance(0.3) or not pairs else []
        if periods:
            return self.rng.choice(periods)
        if not pairs:
            return "1 = 1"
        first, other = self.rng.choice(pairs)
        return f"{self.write_reference(first, joined_scope)} = {self.write_reference(other, joined_scope)}"

    def draw_period_conditions(self, left: Scope, right: Scope, joined_scope: Scope) -> list[str]:
        """Return conditions that equate the hour, day, month or year of a column with a column of the other side."""
        texts = []
        for first, other in (*((a, b) for a in left for b in right), *((b, a) for a in left for b in right)):
            if (
                first.kind in ("date", "timestamp")
                and self.can_name(first, joined_scope)
                and self.can_name(other, joined_scope)
            ):
                time, period = self.write_reference(first, joined_scope), self.write_reference(other, joined_scope)
                if other.kind in ("date", "timestamp"):
                    unit = self.rng.choice(["hour", "day", "month", "year"] if first.kind == "timestamp" else ["month"])
                    texts.append(f"date_trunc('{unit}', {time}) = {period}")
                    texts += [f"{period} = CAST({time} AS date)"] * 2  # Twice as often as `date_trunc`.
                if other.kind == "long":
                    texts.append(f"year({time}) = {period}")
        return texts

    def draw_cross_condition(self, scope: Scope) -> str:
        """Return a condition that compares columns of two tables: in most cases an equality, else an inequality."""
        owner = self.rng.choice([column.owner for column in scope])
        columns_of_sides = (
            [column for column in scope if column.owner == owner],
            [column for column in scope if column.owner != owner],
        )
        return (
            self.draw_inequality(*columns_of_sides, scope)
            if self.draw_chance(0.35)
            else self.draw_comparison_of_sides(*columns_of_sides, scope)
        )

    def draw_inequality(self, left: Scope, right: Scope, scope: Scope) -> str:
        """Return a condition that compares a column with columns of another table by less or greater."""
        families = (("long",), ("date", "timestamp"), ("double", "decimal(9, 2)"), ("string",))
        candidates = [[column for column in side if self.can_name(column, scope)] for side in (left, right)]
        pairs = [
            (column, other)
            for column in candidates[0]
            for other in candidates[1]
            if any({column.kind, other.kind} <= {*family} for family in families)
        ]
        if not pairs:
            return self.draw_comparison_of_sides(left, right, scope)
        first, other = self.rng.choice(pairs)
        other_columns = [other_column for column, other_column in pairs if column is first]
        low, high = (
            self.write_reference(other_column, scope) for other_column in (other, self.rng.choice(other_columns))
        )
        if self.draw_chance(0.2):
            low, high = self.rng.sample([low, self.draw_literal(first.kind)], 2)
        name = self.write_reference(first, scope)
        return self.rng.choice(
            [
                f"{name} {self.rng.choice(['<', '<=', '>', '>='])} {low}",
                f"{name} BETWEEN {low} AND {high}",
                f"({name} >= {low} AND {high} > {name})",
                f"{name} NOT BETWEEN {low} AND {high}",
            ]
        )

    # Conditions on one column

    def draw_simple_condition(self, scope: Scope) -> str:
        candidates = [column for column in scope if self.can_name(column, scope)]
        if not candidates:
            return self.rng.choice(["1 = 1", "TRUE", "NOT FALSE"])
        text = self.draw_comparison(self.rng.choice(candidates), scope)
        random_number = self.rng.random()
        if random_number < 0.12:
            return f"NOT {text}" if self.draw_chance(0.5) else f"NOT ({text})"
        if random_number < 0.3:
            return (
                f"({text} {self.rng.choice(['AND', 'OR'])} {self.draw_comparison(self.rng.choice(candidates), scope)})"
            )
        return text

    def draw_comparison(self, column: ScopeColumn, scope: Scope) -> str:
        name, kind = self.write_reference(column, scope), column.kind
        draw_functions = [
            *self.list_general_draw_functions(name, kind),
            *self.list_compound_draw_functions(column, name, scope),
        ]
        if kind == "string":
            draw_functions += self.list_pattern_draw_functions(name)
        if kind == "boolean":
            draw_functions += [lambda: name, lambda: f"NOT {name}"]
        if kind in EXACT_KINDS:
            draw_functions += self.list_conditional_draw_functions(name, kind)
        if kind in NUMBERS:
            draw_functions += self.list_arithmetic_draw_functions(name, kind)
        if kind == "string":
            draw_functions += self.list_text_draw_functions(name)
        if kind in ("date", "timestamp"):
            draw_functions += self.list_time_draw_functions(name, kind)
        if kind in (*NUMBERS, "date", "timestamp") and self.draw_chance(0.3):
            draw_functions = self.list_mixed_draw_functions(column, name, scope)
        return self.rng.choice(draw_functions)()

    # Lists of functions that each draw a comparison of one form. `draw_comparison` chooses a function.

    def list_general_draw_functions(self, name: str, kind: str) -> DrawFunctions:
        return [
            lambda: f"{name} {self.rng.choice(['=', '<>', '!=', '<', '<=', '>', '>='])} {self.draw_literal(kind)}",
            lambda: f"{name} {self.rng.choice(['<>', '<=', '>='])} {self.draw_literal(kind)}",
            lambda: f"{self.draw_literal(kind)} {self.rng.choice(['=', '<', '>='])} {name}",
            lambda: f"{name} BETWEEN {VALUES[kind][0]} AND {self.draw_literal(kind)}",
            lambda: f"{name} IN ({', '.join(self.draw_literal(kind) for _ in range(self.rng.randint(1, 3)))})",
            lambda: f"{name} NOT IN ({', '.join(self.draw_literal(kind) for _ in range(self.rng.randint(1, 3)))})",
            lambda: f"{name} IS NULL",
            lambda: f"{name} IS NULL OR {name} = {self.draw_literal(kind)}",
            lambda: f"{name} IS NOT NULL",
            lambda: f"{name} IS {self.rng.choice(['', 'NOT '])}DISTINCT FROM {self.draw_literal(kind)}",
            lambda: f"coalesce({name}, {self.draw_literal(kind)}) = {self.draw_literal(kind)}",
            lambda: f"CASE WHEN {name} IS NULL THEN {name} IS NULL ELSE {name} = {self.draw_literal(kind)} END",
        ]

    def list_compound_draw_functions(self, column: ScopeColumn, name: str, scope: Scope) -> DrawFunctions:
        """Return functions that draw a comparison of a row value, with an array, or with a column of the same type."""
        kind = column.kind
        other_column = self.rng.choice([column for column in scope if self.can_name(column, scope)] or [column])
        pair = f"({name}, {self.write_reference(other_column, scope)})"
        # No row contains null: DuckDB compares rows as values, and Trino compares their fields.
        rows = [f"({self.draw_value(kind)}, {self.draw_value(other_column.kind)})" for _ in range(2)]
        values = ", ".join(VALUES[kind][:2])
        draw_functions: DrawFunctions = [
            lambda: f"{pair} {self.rng.choice(['', 'NOT '])}IN ({', '.join(rows)})",
            lambda: f"{pair} = {rows[0]}",
            lambda: f"{name} IN (SELECT v FROM UNNEST(ARRAY[{values}]) AS w (v))",
            lambda: f"{self.rng.choice(['', 'NOT '])}contains(ARRAY[{values}], {name})",
        ]
        candidates = [column for column in scope if column.kind == kind and self.can_name(column, scope)]
        draw_functions.append(
            lambda: (
                f"{name} {self.rng.choice(['=', '<', '<=', '<>'])} "
                f"{self.write_reference(self.rng.choice(candidates), scope)}"
            )
        )
        return draw_functions

    def list_mixed_draw_functions(self, column: ScopeColumn, name: str, scope: Scope) -> DrawFunctions:
        """Return functions that draw comparisons whose operands have several types.

        Engines convert all operands to a common type before they compare any of them.
        """
        is_number = column.kind in NUMBERS
        literals = [self.rng.choice(MIXED_NUMBERS if is_number else MIXED_TIMES) for _ in range(3)]
        if column.kind in CONVERSION_SENSITIVE_VALUES and self.draw_chance(0.5):
            literals[0] = self.rng.choice(CONVERSION_SENSITIVE_VALUES[column.kind])
            # A double or a time with a time zone decides the common type of the operands.
            literals[1] = "1e300" if is_number else "CAST('2021-01-01 00:00:00 UTC' AS TIMESTAMP WITH TIME ZONE)"
        family = NUMBERS if is_number else ("date", "timestamp")
        other_columns = [column for column in scope if column.kind in family and self.can_name(column, scope)] or [
            column
        ]
        other = self.write_reference(self.rng.choice(other_columns), scope)
        negated = self.rng.choice(["", "NOT "])
        size = self.rng.randint(2, 3)
        text = ", ".join(literals[:size])
        values = [value for value in literals if "NULL" not in value]
        rows = ", ".join(f"({value})" for value in literals[:size])
        # DuckDB compares nulls in rows as values, and Trino does not.
        pairs = ", ".join(
            f"({value}, {number})" for value, number in zip(values or ["1"], ("1", "1.0", "1e0"), strict=False)
        )
        draw_functions: DrawFunctions = [
            lambda: f"{name} {negated}IN ({text})",
            lambda: f"{name} {negated}BETWEEN {literals[0]} AND {literals[1]}",
            lambda: f"{name} {negated}BETWEEN {literals[0]} AND {other}",
            lambda: f"{literals[0]} {negated}BETWEEN {name} AND {literals[1]}",
            lambda: f"({name}, 1) IN ({pairs})",
            lambda: f"{name} {negated}IN (VALUES {rows})",
            lambda: f"{name} = ANY (SELECT v FROM (VALUES {rows}) AS w (v))",
            lambda: f"coalesce({name}, {literals[1]}) {self.draw_operator()} {literals[0]}",
            lambda: f"nullif({name}, {literals[1]}) {self.draw_operator()} {literals[0]}",
            lambda: f"CASE WHEN {name} IS NULL THEN {literals[1]} ELSE {name} END {self.draw_operator()} {literals[0]}",
            # The array contains no null: for null, DuckDB's contains() is false and Trino's is null.
            lambda: f"contains(ARRAY[{', '.join([VALUES[column.kind][0], *values])}], {name})",
        ]
        if is_number and self.mixed_cases:
            draw_functions.append(
                lambda: f"CASE {name} WHEN {literals[0]} THEN TRUE WHEN {literals[1]} THEN TRUE ELSE FALSE END"
            )
        return draw_functions

    def list_pattern_draw_functions(self, name: str) -> DrawFunctions:
        patterns = ["'a%'", "'%b'", "'ab'", "'a_'", "'%'", "'o''%'"]
        return [
            lambda: f"{name} {self.rng.choice(['', 'NOT '])}LIKE {self.rng.choice(patterns)}",
            lambda: f"{name} LIKE 'a#%' ESCAPE '#'",
            lambda: f"{self.rng.choice(['lower', 'upper'])}({name}) {self.rng.choice(['', 'NOT '])}LIKE '%B%'",
            lambda: f"({name} LIKE '%b%' OR {name} NOT LIKE '_b%')",
        ]

    def list_conditional_draw_functions(self, name: str, kind: str) -> DrawFunctions:
        second_literal = self.draw_literal(kind)
        return [
            lambda: f"coalesce({name}, {second_literal}) {self.draw_operator()} {self.draw_literal(kind)}",
            lambda: (
                f"coalesce({name}, {second_literal}) {self.rng.choice(['', 'NOT '])}IN "
                f"({self.draw_literal(kind)}, {second_literal})"
            ),
            lambda: f"nullif({name}, {second_literal}) {self.draw_operator()} {self.draw_literal(kind)}",
            lambda: (
                f"CASE WHEN {name} = {second_literal} THEN 1 WHEN {name} > {second_literal} THEN 2 "
                f"ELSE 3 END {self.draw_operator()} 2"
            ),
            lambda: f"CASE {name} WHEN {second_literal} THEN 'x' END {self.draw_operator()} 'x'",
            lambda: (
                f"CASE WHEN {name} IS NULL THEN {second_literal} ELSE {name} END {self.draw_operator()}"
                f" {self.draw_literal(kind)}"
            ),
            lambda: f"CASE WHEN {name} > {second_literal} THEN TRUE ELSE FALSE END",
        ]

    def list_arithmetic_draw_functions(self, name: str, kind: str) -> DrawFunctions:
        """Return functions that draw comparisons of an arithmetic expression on a column of this type."""
        draw_functions: DrawFunctions = []
        if kind == "long":
            draw_functions += [
                lambda: (
                    f"{name} {self.rng.choice('+-*')} {self.rng.choice('123')} {self.draw_operator()}"
                    f" {self.draw_literal(kind)}"
                ),
                lambda: (
                    f"{self.rng.choice('12')} {self.rng.choice('+-')} {name} {self.draw_operator()}"
                    f" {self.draw_literal(kind)}"
                ),
                lambda: (
                    f"-({name} - {self.rng.choice(['1', '0.5'])}) * 2 "
                    f"{self.rng.choice(['', 'NOT '])}BETWEEN -2 AND {self.draw_literal(kind)}"
                ),
                lambda: f"CAST({name} AS BIGINT) {self.draw_operator()} {self.draw_literal(kind)}",
            ]
        if kind == "decimal(9, 2)":
            draw_functions.append(
                lambda: f"{name} {self.rng.choice('+-')} 0.5 {self.draw_operator()} {self.draw_literal(kind)}"
            )
        factor = self.rng.choice(
            ["1.19", "0.5", "3", "(-2)", "(-0.7)", "100", *(["1.1e0"] if kind == "double" else [])]
        )
        if kind in ("long", "decimal(9, 2)", "double"):
            # DuckDB multiplies numbers of up to 18 digits, so `% 5000` makes them small. nullif replaces 0 by null.
            product = f"{name} * {factor}" if kind != "long" else f"(nullif({name}, {name} // 9) % 5000) * {factor}"
            value = self.rng.choice(["1", "1.785", "-1.5", "2.975", "0", "0.3"])
            draw_functions += [
                lambda: f"{product} {self.draw_operator()} {value}",
                lambda: (
                    f"{value} {self.draw_operator()} {factor} * {name}" if kind != "long" else f"{product} = {value}"
                ),
                lambda: (
                    f"{name} / {factor} {self.draw_operator()} {value}" if kind != "long" else f"{product} < {value}"
                ),
            ]
        return draw_functions

    def list_text_draw_functions(self, name: str) -> DrawFunctions:
        size = self.rng.choice("123")
        return [
            lambda: f"substr({name}, 1, {size}) {self.draw_operator()} {self.draw_value('string')}",
            lambda: (
                f"substring({name}, 1, {size}) {self.rng.choice(['', 'NOT '])}"
                f"IN ('a', 'ab', {self.draw_value('string')})"
            ),
            lambda: f"starts_with({name}, {self.draw_value('string')})",
            lambda: f"lower({name}) {self.rng.choice(['=', '<>'])} {self.draw_value('string')}",
            lambda: f"upper({name}) IN ('A', 'AB', 'O''B')",
            lambda: f"lower({name}) {self.draw_operator()} '{self.rng.choice(LONG_TEXTS)}'",
            lambda: f"upper({name}) IN ('{self.rng.choice(LONG_TEXTS).upper()}', {self.draw_value('string')})",
        ]

    def list_time_draw_functions(self, name: str, kind: str) -> DrawFunctions:
        unit, days = (
            self.rng.choice(["day", "week", "month", "quarter", "year"]),
            DAYS_AGO + self.rng.randint(-9, 9),
        )
        draw_functions: DrawFunctions = [
            lambda: (
                f"date_trunc('{unit}', {name}) {self.draw_operator()} "
                f"{self.draw_value(self.rng.choice(['date', kind]))}"
            ),
            lambda: (
                f"date_trunc('{unit}', {name}) {self.rng.choice(['', 'NOT '])}BETWEEN DATE '2020-01-01' AND"
                f" {self.draw_value('date')}"
            ),
            lambda: f"year({name}) = 2020 AND month({name}) = {self.rng.randint(1, 3)}",
            lambda: f"{name} {self.draw_operator()} current_date - INTERVAL '{days}' DAY",
            lambda: (
                f"{name} BETWEEN current_date - INTERVAL '{days}' DAY AND current_date - INTERVAL '{days - 20}' DAY"
            ),
            lambda: f"CAST({name} AS date) >= CAST(now() AS date) - INTERVAL '{days}' DAY",
            lambda: (
                f"{name} {self.rng.choice('+-')} INTERVAL '{self.rng.randint(1, 40)}' DAY {self.draw_operator()}"
                f" {self.draw_value('date')}"
            ),
            lambda: (
                f"date_diff('day', {name}, {self.draw_value(kind)}) {self.draw_operator()} {self.rng.randint(-40, 40)}"
            ),
        ]
        time_format = self.rng.choice(list(SQL_FORMATS))
        text = self.rng.choice(SQL_FORMATS[time_format])
        draw_functions += [
            lambda: f"date_format({name}, '{time_format}') {self.draw_operator()} '{text}'",
            lambda: (
                f"date_format({name}, '{time_format}') {self.rng.choice(['', 'NOT '])}BETWEEN '{text}' AND '{text}9'"
            ),
            lambda: f"{name} {self.draw_operator()} date_parse('{text}', '{time_format}')",
        ]
        if kind == "date":
            draw_functions += [
                lambda: f"CAST({name} AS varchar) {self.draw_operator()} '{text}'",
                lambda: f"CAST({name} AS varchar) {self.rng.choice(['', 'NOT '])}IN ('2020-01-31', '{text}')",
                lambda: f"CAST({name} AS varchar) {self.rng.choice(['', 'NOT '])}LIKE '{text}%'",
                lambda: f"substr(CAST({name} AS varchar), 1, {len(text)}) = '{text}'",
                lambda: (
                    f"{name} {self.draw_operator()} from_iso8601_date('{self.rng.choice(SQL_FORMATS['%Y-%m-%d'])}')"
                ),
            ]
        draw_functions += [
            lambda: f"CAST({name} AS date) {self.rng.choice(['=', '<', '>='])} {self.draw_literal('date')}",
            lambda: f"year({name}) = {self.rng.choice(['2020', '2021'])}",
            lambda: f"extract(YEAR FROM {name}) IN (2020, 2021)",
            lambda: f"{name} < DATE '2020-01-31' + INTERVAL '1' {self.rng.choice(['DAY', 'MONTH', 'YEAR'])}",
        ]
        return draw_functions


def quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
