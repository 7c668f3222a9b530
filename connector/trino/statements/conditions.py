"""What a condition says of single columns: a weaker condition that is true wherever the whole is.

SQL's logic has three values, and a row counts where its condition is *true*. So a part that is not understood becomes
"true" in the place where it stands: below AND it goes, an OR with it goes whole. NOT is pushed down to the comparisons,
which keep it (`NOT ("a" = 1)`): negating them here would say something else of nulls and of NaN.

A condition is None where it says nothing: it is true for every row.

That a column's value is one of those that another table has in a column (`Match`) is a condition like any other: it is
asked of whatever the other table holds, and is never negated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

from sqlglot import exp

from seamark.connector.plans.quotes import quoted_name, quoted_text
from seamark.connector.trino.statements.literals import LiteralText, parse_literal

Place: TypeAlias = tuple[int, str]
"""The number of a source within its block, and the name of a column."""
LEAVES_MAX = 5_000
"""A condition with more leaves is given up: names that are used twice, of names that are used twice, and so on."""
_COMPARED = {exp.EQ: "=", exp.NEQ: "<>", exp.LT: "<", exp.LTE: "<=", exp.GT: ">", exp.GTE: ">="}
_NULL_SAFE = {exp.NullSafeEQ: "IS NOT DISTINCT FROM", exp.NullSafeNEQ: "IS DISTINCT FROM"}
_READ = frozenset({"this", "expression", "expressions", "low", "high", "to", "negate"})
"""Parts of sqlglot's nodes that are read here. A node with another one means something else."""


@dataclass(frozen=True)
class ColumnComparison:
    """A comparison of one column with literals: `before`, the column, `after`."""

    place: Place
    before: str
    after: str
    rejects_null: bool
    """Never true where the column is null."""
    zones: frozenset[str] = frozenset()
    """Which zones its literals are of (`literals.py`): where the column is of another, the session's decides."""
    size: int = 1

    def moved(self, to: Move) -> ColumnComparison | None:
        place = to(self.place)
        return None if place is None else replace(self, place=place)


@dataclass(frozen=True)
class Match:
    """Some row of a stored table, that matters itself, has the same values and no nulls: `pairs` of a place and the
    table's column. `of` is the reference to the table (`scopes.Table`)."""

    pairs: tuple[tuple[Place, str], ...]
    of: object
    rejects_null: ClassVar[bool] = True
    size: ClassVar[int] = 1

    def moved(self, to: Move) -> Match | None:
        """With fewer pairs it says less."""
        pairs = tuple((place, column) for old, column in self.pairs if (place := to(old)) is not None)
        return Match(pairs, self.of) if pairs else None


@dataclass(frozen=True)
class All:
    parts: tuple[Condition, ...]
    size: int


@dataclass(frozen=True)
class Any:
    parts: tuple[Condition, ...]
    size: int


Atom: TypeAlias = ColumnComparison | Match
Condition: TypeAlias = Atom | All | Any
Resolve: TypeAlias = Callable[[exp.Column], Place | None]
Move: TypeAlias = Callable[[Place], Place | None]
"""From a place to another; None where there is none that is sure to hold the same."""


def all_of(parts: Iterable[Condition | None]) -> Condition | None:
    kept: dict[Condition, None] = {}
    size = 0
    for given in parts:
        for part in given.parts if isinstance(given, All) else () if given is None else (given,):
            if part not in kept and size + part.size <= LEAVES_MAX:
                kept[part] = None
                size += part.size
    return next(iter(kept)) if len(kept) == 1 else All(tuple(kept), size) if kept else None


def any_of(parts: Iterable[Condition | None]) -> Condition | None:
    kept: dict[Condition, None] = {}
    for part in parts:
        if part is None:
            return None
        kept[part] = None
    size = sum(part.size for part in kept)
    if not kept or size > LEAVES_MAX:
        return None
    return next(iter(kept)) if len(kept) == 1 else Any(tuple(kept), size)


def move(condition: Condition | None, to: Move) -> Condition | None:
    """The same said of other places; what has none is not said."""
    return weaken(condition, lambda atom: atom.moved(to))


def weaken(condition: Condition | None, keep: Callable[[Atom], Atom | None]) -> Condition | None:
    """With each atom as `keep` has it; None for one of which nothing is to be said."""
    match condition:
        case All(parts):
            return all_of(weaken(part, keep) for part in parts)
        case Any(parts):
            return any_of(weaken(part, keep) for part in parts)
        case None:
            return None
    return keep(condition)


def rejects_null(condition: Condition | None) -> bool:
    """Whether it is true for no row in which all columns are null, as an outer join adds them."""
    match condition:
        case All(parts):
            return any(rejects_null(part) for part in parts)
        case Any(parts):
            return all(rejects_null(part) for part in parts)
        case None:
            return False
    return condition.rejects_null


def places_of(condition: Condition) -> frozenset[Place]:
    """Of all its atoms."""
    match condition:
        case ColumnComparison():
            return frozenset({condition.place})
        case Match():
            return frozenset(place for place, _ in condition.pairs)
    return frozenset().union(*(places_of(part) for part in condition.parts))


def sql_of(condition: Condition, name: Callable[[Place], str]) -> str:
    """Of one without matches."""
    match condition:
        case All(parts):
            return "(" + " AND ".join(sql_of(part, name) for part in parts) + ")"
        case Any(parts):
            return "(" + " OR ".join(sql_of(part, name) for part in parts) + ")"
        case Match():
            raise ValueError("a match cannot be written as SQL")
    return f"{condition.before}{quoted_name(name(condition.place))}{condition.after}"


class ConditionReader:
    """Reads conditions of one statement. `casts_decimal`: see `literals.parse_literal`."""

    def __init__(self, *, casts_decimal: bool) -> None:
        self._casts_decimal = casts_decimal

    def read(self, node: exp.Expr, resolve: Resolve, *, negated: bool = False) -> Condition | None:
        """What holds wherever `node` is true, or with `negated` wherever it is false."""
        match node:
            case exp.Paren():
                return self.read(node.this, resolve, negated=negated)
            case exp.Not():
                return self.read(node.this, resolve, negated=not negated)
            case exp.And() | exp.Or():
                parts = (self.read(part, resolve, negated=negated) for part in node.flatten())
                return all_of(parts) if isinstance(node, exp.And) != negated else any_of(parts)
        leaf = self._leaf(node, resolve)
        if leaf is None or not negated:
            return leaf
        # Whatever it is, a null below NOT stays one: but IS NULL and IS DISTINCT FROM are never null.
        rejects = leaf.rejects_null if _has_nulls(node) else not leaf.rejects_null
        return ColumnComparison(leaf.place, f"NOT ({leaf.before}", f"{leaf.after})", rejects, leaf.zones)

    def _leaf(self, node: exp.Expr, resolve: Resolve) -> ColumnComparison | None:
        if type(node) is exp.Column:
            term = _term(node, resolve)
            return None if term is None else term.compared("", "", ())
        if not _is_plain(node):
            return None
        kind = type(node)
        if kind in _COMPARED:
            return self._compared(node, f" {_COMPARED[kind]} ", resolve)
        if kind in _NULL_SAFE:
            return self._null_safe(node, _NULL_SAFE[kind], resolve)
        match node:
            case exp.Escape() if type(node.this) is exp.Like and _is_plain(node.this):
                escape = node.expression
                if not isinstance(escape, exp.Literal) or not escape.is_string:
                    return None
                return self._like(node.this, f" ESCAPE {quoted_text(str(escape.this))}", resolve)
            case exp.Like():
                return self._like(node, "", resolve)
            case exp.Is() if isinstance(node.expression, exp.Null):
                term = _term(node.this, resolve)
                if term is None:
                    return None
                nulls = not node.args.get("negate")
                return term.compared("", f" IS {'' if nulls else 'NOT '}NULL", (), rejects_null=not nulls)
        if node.args.get("negate"):
            return None
        match node:
            case exp.Between():
                term, bounds = _term(node.this, resolve), [self._written(node.args[one]) for one in ("low", "high")]
                low, high = bounds
                if term is None or low is None or high is None:
                    return None
                return term.compared("", f" BETWEEN {low.sql} AND {high.sql}", (low, high))
            case exp.In() if node.expressions:
                term, given = _term(node.this, resolve), [self._written(one) for one in node.expressions]
                literals = [one for one in given if one is not None]
                if term is None or len(literals) < len(given):
                    return None
                return term.compared("", f" IN ({', '.join(one.sql for one in literals)})", literals)
        return None

    def _written(self, node: exp.Expr) -> LiteralText | None:
        return parse_literal(node, casts_decimal=self._casts_decimal)

    def _compared(self, node: exp.Expr, op: str, resolve: Resolve) -> ColumnComparison | None:
        literal = self._written(node.expression)
        if literal is not None:
            term = _term(node.this, resolve)
            return None if term is None else term.compared("", f"{op}{literal.sql}", (literal,))
        literal, term = self._written(node.this), _term(node.expression, resolve)
        return None if term is None or literal is None else term.compared(f"{literal.sql}{op}", "", (literal,))

    def _null_safe(self, node: exp.Expr, op: str, resolve: Resolve) -> ColumnComparison | None:
        literal, term = self._written(node.expression), _term(node.this, resolve)
        if term is None or literal is None:
            return None
        same, null = type(node) is exp.NullSafeEQ, literal.kind == "null"
        return term.compared("", f" {op} {literal.sql}", (literal,), rejects_null=same != null)

    def _like(self, node: exp.Expr, escape: str, resolve: Resolve) -> ColumnComparison | None:
        term, pattern = _term(node.this, resolve), node.expression
        if term is None or not isinstance(pattern, exp.Literal) or not pattern.is_string:
            return None
        word = "NOT LIKE" if node.args.get("negate") else "LIKE"
        return term.compared("", f" {word} {quoted_text(str(pattern.this))}{escape}", ())


@dataclass(frozen=True)
class _Term:
    """A column, or the day or the year of one: `before`, the column, `after`."""

    place: Place
    before: str = ""
    after: str = ""
    kinds: frozenset[str] | None = None
    """Of the literals that it may be compared with; None: any."""

    def compared(
        self, before: str, after: str, literals: Iterable[LiteralText], *, rejects_null: bool = True
    ) -> ColumnComparison | None:
        given = [one for one in literals if one.kind != "null"]
        kinds = {one.kind for one in given}
        if self.kinds is not None and not kinds <= self.kinds:
            return None
        if "double" in kinds and len(kinds) > 1:  # then all are compared as doubles, which not all integers are
            return None
        # The day of a timestamp with a zone has none: it is the day in UTC, where Iceberg keeps them.
        zones = frozenset() if self.kinds is not None else frozenset(one.zone for one in given if one.zone is not None)
        return ColumnComparison(self.place, f"{before}{self.before}", f"{self.after}{after}", rejects_null, zones)


def _term(node: exp.Expr, resolve: Resolve) -> _Term | None:
    while type(node) is exp.Paren:
        node = node.this
    if type(node) is exp.Column:
        place = resolve(node)
        return None if place is None else _Term(place)
    if not _is_plain(node):
        return None
    before, inner, after, kinds = "", None, "", frozenset({"date"})
    match node:
        case exp.Cast() if type(node) is exp.Cast and node.to.this is exp.DataType.Type.DATE:
            before, inner, after = "CAST(", node.this, " AS DATE)"
        case exp.Date() if not node.expressions:
            before, inner, after = "CAST(", node.this, " AS DATE)"
        case exp.Year():
            before, inner, after, kinds = "YEAR(", node.this, ")", frozenset({"integer"})
        case exp.Extract() if type(node.this) is exp.Var and node.name.upper() == "YEAR":
            before, inner, after, kinds = "YEAR(", node.expression, ")", frozenset({"integer"})
    if type(inner) is not exp.Column:
        return None
    place = resolve(inner)
    return None if place is None else _Term(place, before, after, kinds)


def _has_nulls(node: exp.Expr) -> bool:
    """Whether the comparison is null for null."""
    return not isinstance(node, exp.Is | exp.NullSafeEQ | exp.NullSafeNEQ)


def _is_plain(node: exp.Expr) -> bool:
    return all(name in _READ for name, value in node.args.items() if value)
