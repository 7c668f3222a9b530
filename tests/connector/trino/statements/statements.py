"""Random tables and random queries over them, in the SQL that Trino and DuckDB have in common and mean the same by.

A query is built with its scope at hand, so nearly all are valid: who is qualified must be, names of two tables are told
apart, what LIMIT keeps is decided by the order. Spelling is random: case, quotes, comments, spaces, aliases that are
other tables' names, names of WITH that hide tables.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

KINDS = {
    "long": "BIGINT",
    "decimal(9, 2)": "DECIMAL(9, 2)",
    "double": "DOUBLE",
    "string": "VARCHAR",
    "date": "DATE",
    "timestamp": "TIMESTAMP",
    "boolean": "BOOLEAN",
}
VALUES = {
    "long": ["0", "1", "2", "3", "-1"],
    "decimal(9, 2)": ["0", "1.5", "2.25", "3", "-1.5"],
    "double": ["0", "1.5", "2.25", "3", "-1.5"],
    "string": ["''", "'a'", "'ab'", "'abc'", "'b'", "'o''b'", "'é'", "'--'"],
    "date": ["DATE '2020-01-01'", "DATE '2020-01-31'", "DATE '2020-02-29'", "DATE '2021-01-01'"],
    "timestamp": [
        "TIMESTAMP '2020-01-01 00:00:00'",
        "TIMESTAMP '2020-01-31 12:00:00'",
        "TIMESTAMP '2020-02-29 23:59:59.999999'",
        "TIMESTAMP '2021-01-01 00:00:00.5'",
    ],
    "boolean": ["TRUE", "FALSE"],
}
NUMBERS = ("long", "decimal(9, 2)", "double")
COLUMN_NAMES = ["a", "b", "c", "k", "Two Words", "é", "day", 'q"q', "orders"]
TABLE_NAMES = ["t", "u", "orders", "Größe", "two words", "o'brien"]
ALIASES = ["x", "y", "z", "t", "u", "orders", "A b", "ü"]
ROWS_MAX = 8
WORDS = frozenset({"day"})


@dataclass
class Stored:
    name: str
    columns: dict[str, str]


@dataclass
class Column:
    """In a scope: `owner` is the alias that it can be qualified by."""

    name: str
    kind: str
    owner: str | None
    plain: bool = True
    """Whether the name alone may be used: not where USING has merged it in an outer join."""


Scope = list[Column]


@dataclass
class Statements:
    rng: random.Random
    tables: list[Stored] = field(default_factory=list)

    # Tables

    def make_tables(self) -> list[str]:
        """Statements that make them in DuckDB."""
        made = []
        for name in self.rng.sample(TABLE_NAMES, self.rng.randint(2, 4)):
            names = self.rng.sample(COLUMN_NAMES, self.rng.randint(1, 4))
            columns = {one: self.rng.choice([*KINDS, *["long"] * 9]) for one in names}
            self.tables.append(Stored(name, columns))
            typed = ", ".join(f"{quoted(one)} {KINDS[kind]}" for one, kind in columns.items())
            made.append(f"CREATE TABLE {quoted(name)} ({typed})")
            for _ in range(self.rng.choice([0, *[self.rng.randint(4, ROWS_MAX)] * 9])):
                row = ", ".join("NULL" if self.chance(0.25) else self.value(kind) for kind in columns.values())
                made.append(f"INSERT INTO {quoted(name)} VALUES ({row})")
        return made

    def value(self, kind: str) -> str:
        """Few values, so that rows meet."""
        return self.rng.choice(VALUES[kind][: 3 if self.chance(0.7) else None])

    # Spelling

    def space(self) -> str:
        return self.rng.choice([" ", " ", " ", " ", "\n", "  ", " /* FROM t */ ", " -- WHERE 'x\n", "/**/ "])

    def word(self, text: str) -> str:
        return self.rng.choice([text, text, text.lower()])

    def spelled(self, name: str) -> str:
        """An identifier, in whatever case."""
        if self.chance(0.2):
            name = "".join(self.rng.choice([one.upper(), one]) if one.isascii() else one for one in name)
        if name.isascii() and name.isidentifier() and name.lower() not in WORDS and self.chance(0.7):
            return name
        return quoted(name)

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    # Queries

    def query(self, depth: int = 3) -> str:
        return self.with_query([], depth, [])[0]

    def with_query(self, named: list[Stored], depth: int, outer: Scope) -> tuple[str, list[tuple[str, str]]]:
        """The text, and its columns' names and types."""
        known, clauses = list(named), []
        if depth > 1 and self.chance(0.3):
            for name in self.rng.sample(sorted({*ALIASES, *TABLE_NAMES}), self.rng.randint(1, 2)):
                text, columns = self.with_query(known, depth - 1, outer)
                renamed = ""
                if self.chance(0.3):
                    columns = [(f"w{number}", kind) for number, (_, kind) in enumerate(columns)]
                    renamed = f" ({', '.join(self.spelled(one) for one, _ in columns)})"
                clauses.append(f"{self.spelled(name)}{renamed} AS{self.space()}({text})")
                known = [one for one in known if one.name.lower() != name.lower()]
                known.append(Stored(name, dict(columns)))
        text, columns = self.body(known, depth, outer)
        return (f"{self.word('WITH')} {', '.join(clauses)}{self.space()}" if clauses else "") + text, columns

    def body(self, named: list[Stored], depth: int, outer: Scope) -> tuple[str, list[tuple[str, str]]]:
        if depth > 1 and self.chance(0.28):
            left, columns = self.select(named, depth - 1, outer, set_part=True)
            right, others = self.select(named, depth - 1, outer, set_part=True, kinds=[kind for _, kind in columns])
            if [kind for _, kind in columns] == [kind for _, kind in others]:
                word = self.rng.choice(["UNION", "UNION ALL", "INTERSECT", "EXCEPT", "EXCEPT ALL", "INTERSECT ALL"])
                text = f"({left}){self.space()}{word}{self.space()}({right})"
                return text + (self.ordered(len(columns)) if self.chance(0.4) else ""), columns
        return self.select(named, depth, outer)

    def ordered(self, columns: int) -> str:
        """A limit that everybody sees alike: rows are ordered by all that is seen of them."""
        keys = ", ".join(f"{number} {self.rng.choice(['ASC', 'DESC'])} NULLS LAST" for number in range(1, columns + 1))
        offset = f" OFFSET {self.rng.randint(0, 2)}" if self.chance(0.3) else ""
        limit = f" LIMIT {self.rng.randint(1, 5)}"
        return f" ORDER BY {keys}{limit}{offset}" if self.chance(0.8) else f" ORDER BY {keys}"

    def select(
        self, named: list[Stored], depth: int, outer: Scope, *, set_part: bool = False, kinds: list[str] | None = None
    ) -> tuple[str, list[tuple[str, str]]]:
        source, scope = self.source_list(named, depth, outer)
        where = ""
        if self.chance(0.7):
            where = f"{self.space()}{self.word('WHERE')} {self.condition(scope, named, depth, outer)}"
        shape = self.rng.random()
        if shape < 0.2 and kinds is None:
            return self.grouped(source, where, scope, named, depth)
        items, columns = self.projections(scope, named, depth, outer, kinds, window=shape < 0.35)
        distinct = "DISTINCT " if self.chance(0.1) else ""
        text = f"{self.word('SELECT')} {distinct}{', '.join(items)}{self.space()}{self.word('FROM')} {source}{where}"
        if not set_part and self.chance(0.25):
            text += self.ordered(len(columns))
        return text, columns

    def projections(
        self, scope: Scope, named: list[Stored], depth: int, outer: Scope, kinds: list[str] | None, *, window: bool
    ) -> tuple[list[str], list[tuple[str, str]]]:
        names = [one.name.lower() for one in scope]
        owners = {one.owner for one in scope if one.owner is not None}
        if kinds is None and self.chance(0.2) and len(set(names)) == len(names) and all(one.plain for one in scope):
            return ["*"], [(one.name, one.kind) for one in scope]
        if kinds is None and owners and self.chance(0.1) and all(one.plain for one in scope):
            owner = self.rng.choice(sorted(owners))
            own = [one for one in scope if one.owner == owner]
            return [f"{self.spelled(owner)}.*", "1 AS one"], [*((one.name, one.kind) for one in own), ("one", "long")]
        items, columns = [], []
        for number, kind in enumerate(kinds or [None] * self.rng.randint(1, 4)):
            text, found, name = self.projection(scope, named, depth, outer, kind)
            if window and kind is None and number == 0:
                text, found, name = self.window(scope), "long", None
            taken = {one.lower() for one, _ in columns}
            if name is None or name.lower() in taken or self.chance(0.3):
                name = self.rng.choice([f"p{number}", *COLUMN_NAMES])
                name = f"p{number}" if name.lower() in taken else name
                text = f"{text} {self.rng.choice(['AS ', ''])}{quoted(name)}"
            items.append(text)
            columns.append((name, found))
        return items, columns

    def projection(
        self, scope: Scope, named: list[Stored], depth: int, outer: Scope, kind: str | None
    ) -> tuple[str, str, str | None]:
        fitting = [one for one in scope if kind in (None, one.kind) and self.can_name(one, scope)]
        if fitting and self.chance(0.75):
            one = self.rng.choice(fitting)
            return self.reference(one, scope), one.kind, one.name
        kind = kind or self.rng.choice(list(KINDS))
        if kind == "long" and depth > 1 and self.chance(0.4):
            inner, _ = self.with_query(named, depth - 1, [*outer, *scope])
            return f"(SELECT count(*) FROM ({inner}) AS n)", "long", None
        same = [one for one in scope if one.kind == kind and self.can_name(one, scope)]
        if same and self.chance(0.6):
            return f"coalesce({self.reference(self.rng.choice(same), scope)}, {self.literal(kind)})", kind, None
        return f"CAST({self.literal(kind)} AS {KINDS[kind]})", kind, None

    def window(self, scope: Scope) -> str:
        keys = [self.reference(one, scope) for one in scope if self.can_name(one, scope)]
        if not keys:
            return "count(*) OVER ()"
        return self.rng.choice(
            [f"count(*) OVER (PARTITION BY {self.rng.choice(keys)})", f"rank() OVER (ORDER BY {', '.join(keys)})"]
        )

    def grouped(
        self, source: str, where: str, scope: Scope, named: list[Stored], depth: int
    ) -> tuple[str, list[tuple[str, str]]]:
        able = [one for one in scope if self.can_name(one, scope)]
        keys = self.rng.sample(able, min(len(able), self.rng.randint(0, 2)))
        named_keys = [self.reference(one, scope) for one in keys]
        items = [f"{text} AS g{number}" for number, text in enumerate(named_keys)]
        columns = [(f"g{number}", one.kind) for number, one in enumerate(keys)]
        items.append("count(*) AS n")
        columns.append(("n", "long"))
        if able and self.chance(0.5):
            one = self.rng.choice(able)
            items.append(f"{self.rng.choice(['min', 'max'])}({self.reference(one, scope)}) AS m")
            columns.append(("m", one.kind))
        text = f"SELECT {', '.join(items)} FROM {source}{where}"
        if named_keys:
            every = ", ".join(named_keys)
            numbers = ", ".join(str(number) for number in range(1, len(named_keys) + 1))
            sets = [f"ROLLUP ({every})", f"GROUPING SETS (({every}), ())"]
            text += f" GROUP BY {self.rng.choice([every, numbers, *sets])}"
        if self.chance(0.2):
            text += f" HAVING {self.rng.choice(['count(*) > 1', 'count(*) = 0', 'min(1) = 1'])}"
        return text, columns

    # FROM

    def source_list(self, named: list[Stored], depth: int, outer: Scope) -> tuple[str, Scope]:
        text, scope = self.source(named, depth, outer, set())
        for _ in range(self.rng.choice([0, 0, 0, 1, 1, 1, 2]) if depth < 3 else self.rng.choice([0, 1, 1])):
            taken = {one.owner.lower() for one in scope if one.owner is not None}
            if self.chance(0.2):
                right, more = self.unnested(taken) if self.chance(0.2) else self.source(named, depth, outer, taken)
                text, scope = f"{text}{self.space()},{self.space()}{right}", [*scope, *more]
                continue
            right, more = self.bracket(named, depth, outer, taken)
            text, scope = self.joined(text, scope, right, more, named, depth)
        return text, scope

    def unnested(self, taken: set[str]) -> tuple[str, Scope]:
        """Behind a comma: Trino joins it on nothing."""
        alias = self.rng.choice([one for one in ALIASES if one.lower() not in taken])
        column = self.rng.choice(COLUMN_NAMES)
        text = f"UNNEST(ARRAY[{', '.join(VALUES['long'][:3])}]) AS {self.spelled(alias)} ({quoted(column)})"
        return text, [Column(column, "long", alias)]

    def bracket(self, named: list[Stored], depth: int, outer: Scope, taken: set[str]) -> tuple[str, Scope]:
        text, scope = self.source(named, depth, outer, taken)
        if self.chance(0.12):
            inner = {one.owner.lower() for one in scope if one.owner is not None} | taken
            other, more = self.source(named, depth, outer, inner)
            text, scope = self.joined(text, scope, other, more, named, depth)
            return f"({text})", scope
        return text, scope

    def joined(
        self, text: str, scope: Scope, right: str, more: Scope, named: list[Stored], depth: int
    ) -> tuple[str, Scope]:
        kind = self.rng.choice(["JOIN", "INNER JOIN", "LEFT JOIN", "LEFT OUTER JOIN", "RIGHT JOIN", "FULL JOIN"])
        if self.chance(0.08):
            return f"{text} CROSS JOIN {right}", [*scope, *more]
        both = [*scope, *more]
        left_names, right_names = ([one.name.lower() for one in side] for side in (scope, more))
        shared = [
            one
            for one in scope
            if left_names.count(one.name.lower()) == 1
            and right_names.count(one.name.lower()) == 1
            and one.kind == next(other.kind for other in more if other.name.lower() == one.name.lower())
            and one.plain
        ]
        if shared and self.chance(0.3):
            one = self.rng.choice(shared)
            merged = Column(one.name, one.kind, None)
            rest = [other for other in both if other.name.lower() != one.name.lower()]
            return f"{text} {kind} {right} USING ({self.spelled(one.name)})", [merged, *rest]
        on = [self.simple(both)] if self.chance(0.3) else [self.equality(scope, more, both)]
        if self.chance(0.35):
            on.append(self.simple(both))
        word = self.rng.choice(["AND", "AND", "AND", "OR"])
        return f"{text} {kind} {right} ON {f' {word} '.join(on)}", both

    def equality(self, left: Scope, right: Scope, both: Scope) -> str:
        pairs = [
            (one, other)
            for one in left
            for other in right
            if one.kind == other.kind and self.can_name(one, both) and self.can_name(other, both)
        ]
        if not pairs:
            return "1 = 1"
        one, other = self.rng.choice(pairs)
        return f"{self.reference(one, both)} = {self.reference(other, both)}"

    def across(self, scope: Scope) -> str:
        """Columns of two tables are equal."""
        owner = self.rng.choice([one.owner for one in scope])
        sides = ([one for one in scope if one.owner == owner], [one for one in scope if one.owner != owner])
        return self.equality(*sides, scope)

    def source(self, named: list[Stored], depth: int, outer: Scope, taken: set[str]) -> tuple[str, Scope]:
        alias = self.rng.choice([one for one in ALIASES if one.lower() not in taken])
        shape = self.rng.random()
        if shape < 0.05:
            column = self.rng.choice(COLUMN_NAMES)
            rows = ", ".join(f"({one})" for one in VALUES["long"][:3])
            text = f"(VALUES {rows}) AS {self.spelled(alias)} ({quoted(column)})"
            return text, [Column(column, "long", alias)]
        if shape < 0.45 and depth > 1:
            text, columns = self.with_query(named, depth - 1, [])
            text = f"({text}) {self.rng.choice(['AS ', ''])}{self.spelled(alias)}"
        else:
            hidden = {one.name.lower() for one in named}
            able = [*named, *(one for one in self.tables if one.name.lower() not in hidden)]
            one = self.rng.choice([*able, *self.rng.sample(named, min(len(named), 1))])
            columns = list(one.columns.items())
            text = self.spelled(one.name)
            if one.name.lower() not in hidden and self.chance(0.2):
                text = f"main{self.rng.choice(['.', ' . ', '/**/.'])}{text}"
            if one.name.lower() not in taken and self.chance(0.4):
                return text, [Column(name, kind, one.name) for name, kind in columns]
            text = f"{text}{self.space()}{self.rng.choice(['AS ', ''])}{self.spelled(alias)}"
        if self.chance(0.15):
            columns = [(f"r{number}", kind) for number, (_, kind) in enumerate(columns)]
            text += f" ({', '.join(name for name, _ in columns)})"
        return text, [Column(name, kind, alias) for name, kind in columns]

    # Conditions

    def can_name(self, column: Column, scope: Scope) -> bool:
        alone = [one.name.lower() for one in scope].count(column.name.lower()) == 1
        owned = [one for one in scope if one.owner == column.owner and one.name.lower() == column.name.lower()]
        return (alone and column.plain) or (column.owner is not None and len(owned) == 1)

    def reference(self, column: Column, scope: Scope) -> str:
        alone = [one.name.lower() for one in scope].count(column.name.lower()) == 1
        if alone and column.plain and (column.owner is None or self.chance(0.5)):
            return self.spelled(column.name)
        return f"{self.spelled(str(column.owner))}.{self.spelled(column.name)}"

    def literal(self, kind: str) -> str:
        if self.chance(0.03):
            return "NULL"
        text = self.value(kind)
        if kind == "date" and self.chance(0.1):
            return f"{text} {self.rng.choice('+-')} INTERVAL '1' {self.rng.choice(['DAY', 'MONTH', 'YEAR'])}"
        if kind in NUMBERS and self.chance(0.2):
            return f"{text} + {'1' if kind == 'long' else self.rng.choice(['1', '0.5', '-1'])}"
        return f"({text})" if self.chance(0.05) else text

    def condition(self, scope: Scope, named: list[Stored], depth: int, outer: Scope) -> str:
        parts = []
        for _ in range(self.rng.choice([1, 1, 1, 1, 2])):
            if depth > 1 and self.chance(0.2):
                parts.append(self.subquery(scope, named, depth, outer))
            elif outer and self.chance(0.5):
                parts.append(self.correlated(scope, outer))
            elif self.chance(0.2):
                parts.append(self.across(scope))
            else:
                parts.append(self.simple(scope))
        word = self.rng.choice(["AND", "AND", "AND", "OR"])
        text = f"{self.space()}{self.word(word)}{self.space()}".join(parts)
        return f"NOT ({text})" if self.chance(0.15) else text

    def subquery(self, scope: Scope, named: list[Stored], depth: int, outer: Scope) -> str:
        negated = self.rng.choice(["", "NOT "])
        if self.chance(0.5):
            inner, _ = self.with_query(named, depth - 1, [one for one in scope if one.owner is not None])
            return f"{negated}EXISTS ({inner})"
        able = [one for one in scope if self.can_name(one, scope)]
        if not able:
            return self.simple(scope)
        one = self.rng.choice(able)
        inner, _ = self.select(named, depth - 1, [], set_part=True, kinds=[one.kind])
        if self.chance(0.3):
            return f"{self.reference(one, scope)} = (SELECT max(q.m) FROM ({inner}) AS q (m))"
        return f"{self.reference(one, scope)} {negated}IN ({inner})"

    def correlated(self, scope: Scope, outer: Scope) -> str:
        """Qualified by a name that the inner scope has not."""
        own = {one.owner.lower() for one in scope if one.owner is not None}
        pairs = [
            (one, other)
            for one in scope
            for other in outer
            if one.kind == other.kind
            and self.can_name(one, scope)
            and other.owner is not None
            and other.owner.lower() not in own
            and [o.owner for o in outer if o.name.lower() == other.name.lower()].count(other.owner) == 1
        ]
        if not pairs:
            return self.simple(scope)
        one, other = self.rng.choice(pairs)
        away = f"{self.spelled(str(other.owner))}.{self.spelled(other.name)}"
        if self.chance(0.3):
            return f"{away} = {self.literal(other.kind)}"
        return f"{self.reference(one, scope)} = {away}"

    def simple(self, scope: Scope) -> str:
        able = [one for one in scope if self.can_name(one, scope)]
        if not able:
            return self.rng.choice(["1 = 1", "TRUE", "NOT FALSE"])
        text = self.comparison(self.rng.choice(able), scope)
        shape = self.rng.random()
        if shape < 0.12:
            return f"NOT {text}" if self.chance(0.5) else f"NOT ({text})"
        if shape < 0.3:
            return f"({text} {self.rng.choice(['AND', 'OR'])} {self.comparison(self.rng.choice(able), scope)})"
        return text

    def comparison(self, column: Column, scope: Scope) -> str:
        name, kind = self.reference(column, scope), column.kind
        shapes: list[Callable[[], str]] = [
            lambda: f"{name} {self.rng.choice(['=', '<>', '!=', '<', '<=', '>', '>='])} {self.literal(kind)}",
            lambda: f"{name} {self.rng.choice(['<>', '<=', '>='])} {self.literal(kind)}",
            lambda: f"{self.literal(kind)} {self.rng.choice(['=', '<', '>='])} {name}",
            lambda: f"{name} BETWEEN {VALUES[kind][0]} AND {self.literal(kind)}",
            lambda: f"{name} IN ({', '.join(self.literal(kind) for _ in range(self.rng.randint(1, 3)))})",
            lambda: f"{name} NOT IN ({', '.join(self.literal(kind) for _ in range(self.rng.randint(1, 3)))})",
            lambda: f"{name} IS NULL",
            lambda: f"{name} IS NULL OR {name} = {self.literal(kind)}",
            lambda: f"{name} IS NOT NULL",
            lambda: f"{name} IS {self.rng.choice(['', 'NOT '])}DISTINCT FROM {self.literal(kind)}",
            lambda: f"coalesce({name}, {self.literal(kind)}) = {self.literal(kind)}",
            lambda: f"CASE WHEN {name} IS NULL THEN {name} IS NULL ELSE {name} = {self.literal(kind)} END",
        ]
        same = [one for one in scope if one.kind == kind and self.can_name(one, scope)]
        shapes.append(
            lambda: f"{name} {self.rng.choice(['=', '<', '<=', '<>'])} {self.reference(self.rng.choice(same), scope)}"
        )
        if kind == "string":
            patterns = ["'a%'", "'%b'", "'ab'", "'a_'", "'%'", "'o''%'"]
            shapes += [
                lambda: f"{name} {self.rng.choice(['', 'NOT '])}LIKE {self.rng.choice(patterns)}",
                lambda: f"{name} LIKE 'a#%' ESCAPE '#'",
            ]
        if kind == "boolean":
            shapes += [lambda: name, lambda: f"NOT {name}"]
        if kind in ("date", "timestamp"):
            shapes += [
                lambda: f"CAST({name} AS date) {self.rng.choice(['=', '<', '>='])} {self.literal('date')}",
                lambda: f"year({name}) = {self.rng.choice(['2020', '2021'])}",
                lambda: f"extract(YEAR FROM {name}) IN (2020, 2021)",
                lambda: f"{name} < DATE '2020-01-31' + INTERVAL '1' {self.rng.choice(['DAY', 'MONTH', 'YEAR'])}",
            ]
        return self.rng.choice(shapes)()


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
