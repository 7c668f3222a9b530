"""Finds the kind of the values of each column name in a DuckDB statement.

DuckDB converts compared values, such as texts to numbers and integers to floats. A condition can prune files in its
written form only if no conversion could change its result. Therefore each name has a kind. A name has no kind if it may
refer to columns of different kinds, or to a computed value.

In DuckDB, NaN equals NaN and is larger than all numbers, but Iceberg's bounds ignore NaN. Therefore columns of doubles
are used only in conditions that are false for NaN. Columns of 32-bit floats are never used, because DuckDB rounds
constants to 32 bits to compare them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal

from sqlglot import exp

_KINDS_BY_TYPE = {"int": "integer", "long": "integer", "string": "text"}
_UNCHANGED = frozenset({"boolean", "date", "double", "timestamp", "timestamptz", "uuid"})
_DIGITS_MAX = 18
"""The maximum number of digits of a number that DuckDB certainly reads as an integer."""
_NUMERIC = frozenset({"integer", "double"})
_DAY = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
_DATE = re.compile(_DAY, re.ASCII)
_TIME = r"[0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{1,6})?)?"
_ZONE = r"Z| UTC|[+-][0-9]{2}(?::[0-9]{2})?"
_TIMESTAMP = re.compile(rf"({_DAY})(?:[ T]({_TIME}))?({_ZONE})?", re.ASCII)
_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?|\.[0-9]+", re.ASCII)
_SHORT_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?", re.ASCII)
_INTEGER_END = 1 << 31
"""The first number that does not fit into DuckDB's INTEGER of 32 bits."""
_STAR_LEVELS_MAX = 20
"""The maximum depth of nested queries that each select `*` from the next query."""
_Type = exp.DType
_TIMES = frozenset({"date", "timestamp", "timestamptz"})
_LOCAL_TYPES = {_Type.TIMESTAMP, _Type.TIMESTAMPNTZ}


def find_kind(iceberg_type: str) -> str | None:
    """Return the kind of an Iceberg type, or None if comparisons of the type cannot prune files.

    Types of one kind, such as int and long, are compared in the same way.
    """
    if iceberg_type.startswith("decimal("):
        return iceberg_type.replace(" ", "")
    return iceberg_type if iceberg_type in _UNCHANGED else _KINDS_BY_TYPE.get(iceberg_type)


def replace_node(old: exp.Expr, new: exp.Expr) -> None:
    """Replace `old` by `new` in the tree, with the same result as `old.replace(new)`.

    `old.replace(new)` copies the whole list that contains `old`. For an IN with 24,000 values, all replacements
    together took 44 seconds.
    """
    parent, key, index = old.parent, old.arg_key, old.index
    if parent is None or key is None or index is None or new is old:
        old.replace(new)
        return
    parent.set("", None)  # sqlglot has no argument of this name. Setting it only clears cached hashes.
    parent.args[key][index] = new
    new.parent, new.arg_key, new.index = parent, key, index
    old.parent = old.arg_key = old.index = None


class NameKinds:
    """The kinds of the names in a statement."""

    def __init__(
        self, tree: exp.Expr, tables: Iterable[Mapping[str, str]], qualifiers: frozenset[str] | None = None
    ) -> None:
        """Find the kinds of the names in a statement.

        A name may get several kinds, or the kind None, which is the kind of a value that cannot be used. In both cases
        `find_kind` returns None.

        Args:
            tree: The statement.
            tables: The columns of the known tables: Iceberg types by lower-case name.
            qualifiers: The qualifiers of known columns, or None if the columns of all tables are known. A column with
                another qualifier has no kind.
        """
        self._qualifiers = qualifiers
        self._kinds_by_name: defaultdict[str, set[str | None]] = defaultdict(set)
        for columns in tables:
            for name, iceberg_type in columns.items():
                self._kinds_by_name[name.lower()].add(find_kind(iceberg_type))
        stored_names = set(self._kinds_by_name)
        nodes = list(tree.find_all(exp.TableAlias, exp.Table, exp.Alias, exp.SetOperation))
        relations = {node.name.lower() for node in nodes if isinstance(node, exp.TableAlias | exp.Table)}
        self._structs = {name.partition(".")[0] for name in stored_names if "." in name} - relations
        names_by_alias: defaultdict[str, set[str]] = defaultdict(set)
        for node in nodes:
            match node:
                case exp.Alias():
                    # An alias of a column, or of its minimum or maximum, has the kinds of the column. If there is also
                    # a stored column with the name of the alias, the alias must be for a column of this name.
                    name, column = node.alias.lower(), find_extreme_column(node.this)
                    if type(column) is exp.Column and (name not in stored_names or column.name.lower() == name):
                        names_by_alias[name].add(column.name.lower())
                    else:  # The value is computed.
                        self._kinds_by_name[name].add(None)
                case exp.TableAlias():  # Its columns may be names for the values of VALUES or UNNEST.
                    for number, column_name in enumerate(node.columns):
                        self._kinds_by_name[column_name.name.lower()].add(
                            find_literal_kind(_find_column_values(node.parent, number))
                        )
                case exp.SetOperation():
                    self._add_kinds_of_combined_columns(node, names_by_alias)
        self._propagate_kinds(names_by_alias)

    def find_kind(self, column: exp.Expr | None) -> str | None:
        """Return the kind of all columns with the same name as this column, or None if it is unknown.

        The name alone decides, because the scope of a name is not resolved. If columns of the same name have different
        kinds, the kind is unknown. If the qualifier is the name of a struct, the column is a field of the struct.
        """
        if type(column) is not exp.Column:
            return None
        name, qualifier = column.name.lower(), column.table.lower()
        if qualifier in self._structs:
            name, qualifier = f"{qualifier}.{name}", column.db.lower()
        if self._qualifiers is not None and qualifier not in self._qualifiers:
            return None
        kinds = self._kinds_by_name.get(name, set())
        return next(iter(kinds)) if len(kinds) == 1 else None

    def _propagate_kinds(self, names_by_alias: Mapping[str, set[str]]) -> None:
        """Add to each alias the kinds of its columns, which may be aliases themselves.

        Each round passes kinds over one more alias, so the loop ends after a round without a new kind.
        """
        for _ in range(1 + len(names_by_alias)):
            kind_count = sum(map(len, self._kinds_by_name.values()))
            for name, columns in names_by_alias.items():
                for column in columns:
                    self._kinds_by_name[name] |= self._kinds_by_name.get(column, {None})
            if sum(map(len, self._kinds_by_name.values())) == kind_count:
                return

    def _add_kinds_of_combined_columns(
        self, set_operation: exp.SetOperation, names_by_alias: defaultdict[str, set[str]]
    ) -> None:
        """Record that each column of a set operation also has the kind of the column with which it is combined.

        UNION and similar operations convert combined columns to one type.
        """
        sides = [find_projections(side) for side in (set_operation.this, set_operation.expression)]
        for left_output, right_output in zip(*sides, strict=False):
            name, other = _name_output(left_output), _name_output(right_output)
            if name != other:
                names_by_alias[name].add(other)
                names_by_alias[other].add(name)


def find_extreme_column(node: exp.Expr) -> exp.Expr:
    """Return the argument of a minimum or maximum, which has the same type, or otherwise `node` itself."""
    is_extreme = isinstance(node, exp.Min | exp.Max) and not node.args.get("expressions")
    return node.this if is_extreme else node


def find_literal_kind(nodes: Sequence[exp.Expr]) -> str | None:
    """Return the kind of constants in DuckDB, before DuckDB converts them for a comparison."""
    kinds = {_find_literal_kind(node) for node in nodes if not isinstance(node, exp.Null)}
    return kinds.pop() if len(kinds) == 1 else None


def _find_literal_kind(node: exp.Expr) -> str | None:
    """Return the kind of one constant: an integer, a text or a date. Return None for any other node."""
    number = node.this if isinstance(node, exp.Neg) else node
    if isinstance(number, exp.Literal) and not number.is_string:
        # DuckDB reads longer numbers as DOUBLE.
        return "integer" if str(number.this).isdigit() and len(str(number.this)) <= _DIGITS_MAX else None
    text, target = _read_text(node)
    if text is None or target not in (None, _Type.DATE):
        return None
    return "text" if target is None else "date" if _DATE.fullmatch(text) else None


def _find_column_values(rows: exp.Expr | None, number: int) -> list[exp.Expr]:
    """Return the values of a column of VALUES, or of UNNEST of a list. The result is empty if they are unknown."""
    if isinstance(rows, exp.CTE):  # This is `WITH v (a) AS (VALUES …)`.
        query = rows.this
        source = query.args.get("from_") if isinstance(query, exp.Select) and query.is_star else None
        rows = source.this if source is not None and isinstance(source.this, exp.Values) else None
        if rows is None or {name for name, value in query.args.items() if value} != {"expressions", "from_"}:
            return []
    match rows:
        case exp.Values():
            value_rows = [
                expression.expressions if isinstance(expression, exp.Tuple) else [expression]
                for expression in rows.expressions
            ]
            return [row[number] for row in value_rows] if all(number < len(row) for row in value_rows) else []
        case exp.Unnest() if len(rows.expressions) == 1 and number == 0 and isinstance(rows.expressions[0], exp.Array):
            return list(rows.expressions[0].expressions)
    return []


def find_projections(query: exp.Expr) -> list[exp.Expr]:
    """Return the expressions of a query's columns in order.

    `SELECT *` from a subquery or from a name in WITH is resolved. The list is empty if the columns are unknown, for
    example for `*` of a table.
    """
    for _ in range(_STAR_LEVELS_MAX):
        while isinstance(query, exp.Subquery | exp.SetOperation):
            query = query.this
        if not isinstance(query, exp.Select) or not any(expression.is_star for expression in query.expressions):
            return list(query.expressions) if isinstance(query, exp.Select) else []
        source = query.args["from_"].this if query.args.get("from_") is not None else None
        is_only_star = (
            len(query.expressions) == 1 and type(query.expressions[0]) is exp.Star and _reads_plain_star(query)
        )
        if not is_only_star or source is None or source.args.get("joins") or source.alias_column_names:
            return []
        if isinstance(source, exp.Table):
            source = _find_with_query(source)
        if not isinstance(source, exp.Subquery | exp.Select | exp.SetOperation):
            return []
        query = source
    return []


def _reads_plain_star(query: exp.Select) -> bool:
    """Return whether a query selects from only one source, and its `*` excludes and replaces no columns."""
    return not any(query.args.get(name) for name in ("joins", "laterals")) and not any(
        query.expressions[0].args.values()
    )


def _find_with_query(table: exp.Table) -> exp.Expr | None:
    """Return the query of the name in WITH to which a relation refers.

    The result is None if there is no such name, or if its columns are renamed.
    """
    child: exp.Expr = table
    while len(table.parts) == 1 and (parent := child.parent) is not None:
        clause = parent.args.get("with_")
        definitions = clause.expressions if isinstance(clause, exp.With) and clause is not child else []
        if isinstance(parent, exp.With):
            definitions = parent.expressions[: child.index]
        for definition in definitions:
            if definition.alias.lower() == table.name.lower():
                is_plain = not definition.parent.args.get("recursive") and not definition.alias_column_names
                return definition.this if is_plain else None
        child = parent
    return None


def _name_output(projection: exp.Expr) -> str:
    """Return the name of a column in the result. It is empty for a value without a name."""
    return projection.alias_or_name.lower() if isinstance(projection, exp.Alias | exp.Column) else ""


def to_constant(node: exp.Expr | None, kind: str, *, utc: bool) -> exp.Expr | None:
    """Return a constant in Trino's SQL, or None if DuckDB would convert a column of this kind to compare it.

    Args:
        node: The constant in DuckDB's SQL.
        kind: The kind of the column with which it is compared.
        utc: Whether the session's time zone is UTC.
    """
    while isinstance(node, exp.Paren):
        node = node.this
    match node:
        case exp.Null():
            return node.copy()
        case exp.Boolean():
            return node.copy() if kind == "boolean" else None
        case exp.Neg():
            inner = to_constant(node.this, kind, utc=utc) if not isinstance(node.this, exp.Neg) else None
            return exp.Neg(this=inner) if isinstance(inner, exp.Literal) and not inner.is_string else None
        case exp.Literal() if not node.is_string:
            numeric = kind in _NUMERIC or kind.startswith("decimal(")
            return node.copy() if numeric and _NUMBER.fullmatch(str(node.this)) else None
        case exp.Expr() if kind in _TIMES and (current := _to_current_time(node)) is not None:
            return current
        case exp.Add() | exp.Sub() if kind == "date" and isinstance(node.expression, exp.Interval):
            day = to_constant(node.this, kind, utc=utc)
            return None if day is None else type(node)(this=day, expression=node.expression.copy())
        case exp.Add() | exp.Sub() if kind == "integer" or kind.startswith("decimal("):
            total = _add_numbers(node)
            return None if total is None or (kind == "integer" and total % 1) else _make_number(total)
    text, target = _read_text(node)
    if text is None:
        return None
    if kind == "text":
        return exp.Literal.string(text) if target is None else None
    if kind == "uuid":
        return _cast(text, "UUID") if target in (None, _Type.UUID) else None
    if kind == "date":
        return _cast(text, "DATE") if target in (None, _Type.DATE) and _DATE.fullmatch(text) else None
    return _to_timestamp(text, target, kind, utc=utc)


def _add_numbers(node: exp.Expr | None) -> Decimal | None:
    """Return the result of added and subtracted numbers, as in `BETWEEN 1200 AND 1200 + 11`.

    The result is None unless DuckDB adds the numbers as INTEGER or as short decimals. It is also None if a sum does not
    fit INTEGER, because the query then fails.
    """
    while isinstance(node, exp.Paren):
        node = node.this
    match node:
        case exp.Neg() if isinstance(node.this, exp.Literal):
            value = _add_numbers(node.this)
            return None if value is None else -value
        case exp.Literal() if not node.is_string and _SHORT_NUMBER.fullmatch(str(node.this)):
            return Decimal(str(node.this))
        case exp.Add() | exp.Sub():
            left, right = _add_numbers(node.this), _add_numbers(node.expression)
            if left is None or right is None:
                return None
            total = left - right if isinstance(node, exp.Sub) else left + right
            return total if abs(total) < _INTEGER_END else None
    return None


def _make_number(value: Decimal) -> exp.Expr:
    number = exp.Literal.number(format(abs(value), "f"))
    return exp.Neg(this=number) if value < 0 else number


def _to_current_time(node: exp.Expr) -> exp.Expr | None:
    """Return the current time, or a time some days or intervals from it, in Trino's SQL, or None for any other node."""
    if isinstance(node, exp.CurrentDate | exp.CurrentTimestamp | exp.Localtimestamp):
        return node.copy()
    if isinstance(node, exp.Anonymous) and node.name.lower() == "now" and not node.expressions:
        return exp.CurrentTimestamp()
    current, interval = (
        _to_current_time(node.this) if isinstance(node, exp.Add | exp.Sub) else None,
        node.args.get("expression"),
    )
    if isinstance(interval, exp.Literal) and not interval.is_string and str(interval.this).isdigit():
        interval = exp.Interval(this=exp.Literal.string(interval.this), unit=exp.Var(this="DAY"))
    if current is None or not isinstance(interval, exp.Interval):
        return None
    return type(node)(this=current, expression=interval.copy())


def _read_text(node: exp.Expr | None) -> tuple[str | None, exp.DType | None]:
    """Return the text of a string literal, and the type to which it is cast, or None if there is no cast.

    The text is None if the node is not a string. Callers handle literals of numbers before.
    """
    match node:
        case exp.Literal():
            return str(node.this), None
        case exp.Cast() if type(node) is exp.Cast and isinstance(node.this, exp.Literal) and not node.to.expressions:
            return (str(node.this.this), node.to.this) if node.this.is_string else (None, None)
    return None, None


def _to_timestamp(text: str, target: exp.DType | None, kind: str, *, utc: bool) -> exp.Expr | None:
    """Return a text as a time literal of a column's type, in Trino's form.

    The result is None if the text is not a time, or if the engines may read it differently.

    Args:
        text: The text.
        target: The type to which the statement casts the text, or None if there is no cast.
        kind: The Iceberg type of the column.
        utc: Whether the session's time zone is UTC. If not, a time without a zone is no value of a `timestamptz`.
    """
    match = _TIMESTAMP.fullmatch(text)
    if match is None:
        return None
    day, time, zone = match.groups()
    if target is _Type.DATE and (time or zone):
        return None
    if kind == "timestamp":
        is_local = target is None or target in _LOCAL_TYPES or target is _Type.DATE
        return _cast(f"{day} {time or '00:00'}", "TIMESTAMP(6)") if is_local and zone is None else None
    if kind != "timestamptz" or target not in (None, _Type.TIMESTAMPTZ) or (zone is None and not utc):
        return None
    try:
        offset = "+00:00" if zone in (None, "Z", " UTC") else zone if ":" in zone else f"{zone}:00"
        moment = datetime.fromisoformat(f"{day}T{time or '00:00'}{offset}").astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    return _cast(moment.strftime("%Y-%m-%d %H:%M:%S.%f UTC"), "TIMESTAMP(6) WITH TIME ZONE")


def _cast(text: str, target: str) -> exp.Expr:
    return exp.cast(exp.Literal.string(text), exp.DataType.build(target, dialect="trino"))


def list_columns(node: exp.Expr) -> Iterator[exp.Column]:
    """Yield the columns of an expression that are not in nested queries."""
    for child in node.walk(prune=lambda inner_node: isinstance(inner_node, exp.Query)):
        if type(child) is exp.Column:
            yield child
