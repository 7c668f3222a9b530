"""Convert comparisons of columns with typed literals to Iceberg predicates that keep at least the matching rows.

Engines differ about NaN, and about literals that are not values of the column's type. A predicate keeps the rows that
any engine would return. A comparison that engines evaluate in incompatible ways is not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from seamark.formats.iceberg.expressions.expression import (
    FALSE,
    TRUE,
    Always,
    And,
    Expression,
    Not,
    Op,
    Or,
    Unbound,
    join_by_and,
    join_by_or,
)
from seamark.formats.iceberg.expressions.typed_literals import (
    AmbiguousRounding,
    Inconvertible,
    TypedLiteral,
    convert_literal,
)
from seamark.formats.iceberg.types.functions import accepts_values, is_function
from seamark.formats.iceberg.types.near_names import find_near_names
from seamark.formats.iceberg.types.schema import ListType, MapType, Schema, StructType, describe_type
from seamark.formats.iceberg.types.transforms import IDENTITY, accepts_type, compute_result_type
from seamark.formats.iceberg.types.types import canonicalize_primitive, get_base_name
from seamark.formats.iceberg.types.values import FLOATS
from seamark.formats.runtime.errors import BadRequest

OPPOSITE = {
    Op.EQ: Op.NOT_EQ,
    Op.NOT_EQ: Op.EQ,
    Op.LT: Op.GT_EQ,
    Op.LT_EQ: Op.GT,
    Op.GT: Op.LT_EQ,
    Op.GT_EQ: Op.LT,
}
_LISTED_MAX = 1_000
"""The maximum number of ambiguous literals in a list whose possible values are all listed. A range replaces more."""
NESTED = frozenset({"struct", "list", "map"})
_OPERATOR_FOR_INEXACT = {Op.LT: Op.LT_EQ, Op.GT: Op.GT_EQ}
"""The operators for a literal outside the column's type, which engines round up or down."""
UNITS = frozenset({"year", "month", "day", "hour"})
_CALENDAR = ("date", "timestamp", "timestamptz", "timestamp_ns", "timestamptz_ns")


class ComparedTerm(NamedTuple):
    """A column or its transform, which is compared with literals."""

    name: str
    kind: str
    """The type of the compared value, which is the result of the transform."""
    transform: str = IDENTITY
    origin: int = 0
    """The value that the transform maps to 0, such as 1970 for years."""

    def make_predicate(self, op: Op, *literals: object) -> Unbound:
        return Unbound(op, self.name, self.transform, literals)

    @property
    def not_null(self) -> Unbound:
        return Unbound(Op.NOT_NULL, self.name, IDENTITY, ())


class Comparisons:
    """Comparisons with the columns of some schemas.

    Names are case-insensitive. If several schemas have a name, the first schema is used.

    Args:
        schemas: The schemas.
        nan_above: Whether NaN is greater than all numbers, as in Spark.
    """

    def __init__(self, schemas: tuple[Schema, ...], nan_above: bool = False) -> None:
        self._schemas = schemas
        self._nan_above = nan_above
        self.exact = True
        """Whether all literals so far are values of their columns' types."""

    def make_term(self, name: str, transform: str = IDENTITY) -> ComparedTerm | None:
        """Return the term of a column or of its transform, or None.

        The result is None if the column is nested, or if the transform does not accept its type.

        Raises:
            BadRequest: No column has this name, or several columns have it.
        """
        column, kind = self._find_column(name)
        if kind in NESTED:
            return None
        if transform == IDENTITY:
            return ComparedTerm(column, kind)
        if is_function(transform):
            return ComparedTerm(column, kind, transform) if accepts_values(transform, kind) else None
        if not accepts_type(transform, kind) or (transform in UNITS and kind not in _CALENDAR):
            return None
        return ComparedTerm(column, compute_result_type(transform, kind), transform)

    def bind_typed(self, predicate: Unbound, literals: tuple[TypedLiteral, ...], *, negated: bool) -> Expression:
        """Return the predicate, or its negation, with values of the column's type.

        The result keeps at least the same rows. It is TRUE if the predicate cannot be converted. A literal that is no
        value of the type equals no value, so NOT IN and `not-eq` use only exact values.

        Args:
            predicate: The predicate.
            literals: The literals of the predicate.
            negated: Whether the negation of the predicate is returned.

        Raises:
            BadRequest: No column has the name in the predicate, or several columns have it.
        """
        term = self.make_term(predicate.name, predicate.transform)
        op = predicate.op
        if term is None:
            return TRUE
        try:
            match op:
                case Op.IN | Op.NOT_IN:
                    if (op is Op.IN) != negated:
                        return self.make_equality(term, literals)
                    exact = self.list_exact_values(term, literals)
                    return term.make_predicate(Op.NOT_IN, *exact) if exact else TRUE
                case Op.STARTS_WITH | Op.NOT_STARTS_WITH:
                    if term.kind != "string" or literals[0].kind != "text":
                        return TRUE
                    selects_prefix = (op is Op.STARTS_WITH) != negated
                    return term.make_predicate(
                        Op.STARTS_WITH if selects_prefix else Op.NOT_STARTS_WITH, literals[0].text
                    )
            op = OPPOSITE[op] if negated else op
            if op is Op.NOT_EQ:
                value, is_exact = self.fit_literal(literals[0], term)
                return term.make_predicate(op, value) if is_exact else TRUE
            return self.make_comparison(op, term, literals[0], negated)
        except Inconvertible:
            return TRUE

    def make_comparison(self, op: Op, term: ComparedTerm, literal: TypedLiteral, negated: bool) -> Expression:
        """Return a comparison of the term with the literal.

        If the literal is rounded, the operator is widened, so that no row is lost: `<` becomes `<=`, for example.

        Args:
            op: The operator, which is already the opposite if `negated` is True.
            term: The compared column or transform.
            literal: The literal.
            negated: Whether the comparison was negated.

        Raises:
            Inconvertible: Engines compare the literal with the term in different ways.
        """
        if op is Op.EQ:
            return self.make_equality(term, (literal,))
        try:
            value, exact = self.fit_literal(literal, term)
        except AmbiguousRounding as ambiguous:
            # Use the lowest or the highest possible value, so that the predicate keeps the rows of every engine.
            value, exact = ambiguous.values[0 if op in (Op.GT, Op.GT_EQ) else -1], False
        if not exact:
            op = _OPERATOR_FOR_INEXACT.get(op, op)
        if op is Op.NOT_EQ:
            return join_by_and(term.not_null, term.make_predicate(op, value)) if exact else term.not_null
        predicate = term.make_predicate(op, value)
        # In Spark, NaN is greater than all numbers. In Trino, NaN is unordered, so the opposite of a comparison is true
        # for NaN.
        includes_nan = negated and not self._nan_above
        if get_base_name(term.kind) in FLOATS and (op in (Op.GT, Op.GT_EQ) or includes_nan):
            return join_by_or(predicate, term.make_predicate(Op.IS_NAN))
        return predicate

    def make_equality(self, term: ComparedTerm, literals: Sequence[TypedLiteral]) -> Expression:
        """Return the condition that the term equals one of the literals.

        If engines round a literal to different values, all these values are listed. If this makes the list too long,
        the range of all these values is used instead.

        Raises:
            Inconvertible: Engines compare a literal with the term in different ways.
        """
        values: list[object] = []
        ambiguous: list[AmbiguousRounding] = []
        for literal in literals:
            try:
                values.append(self.fit_literal(literal, term)[0])
            except AmbiguousRounding as error:
                ambiguous.append(error)
        if len(ambiguous) > _LISTED_MAX:
            low, high = (
                min(float(error.values[0]) for error in ambiguous),
                max(float(error.values[-1]) for error in ambiguous),
            )
            range_condition = join_by_and(
                term.make_predicate(Op.GT_EQ, repr(low)), term.make_predicate(Op.LT_EQ, repr(high))
            )
            return join_by_or(range_condition, *([term.make_predicate(Op.IN, *values)] if values else []))
        values += [value for error in ambiguous for value in error.values]
        return term.make_predicate(Op.EQ if len(values) == 1 else Op.IN, *values) if values else FALSE

    def list_exact_values(self, term: ComparedTerm, literals: Iterable[TypedLiteral]) -> list[object]:
        """Return the literals that are exactly values of the term's type.

        The type cannot represent the other literals. Also left out are literals that engines may round to different
        values of the type. If a literal is left out, `self.exact` becomes False.

        Raises:
            Inconvertible: Engines compare a literal with the term in different ways.
        """
        values: list[object] = []
        for literal in literals:
            try:
                value, exact = self.fit_literal(literal, term)
            except AmbiguousRounding:
                continue
            if exact:
                values.append(value)
        return values

    def fit_literal(self, literal: TypedLiteral, term: ComparedTerm) -> tuple[object, bool]:
        """Convert a literal to a value for a term. Also return whether the value is exact.

        If a literal is not exact, `exact` of this object becomes False, because the filter can match more rows.

        Raises:
            Inconvertible: Engines compare the literal with the term in different ways.
            AmbiguousRounding: Engines may round the literal to different values, and NaN is not above all numbers.
        """
        try:
            value, exact = convert_literal(literal, term.kind, term.transform, term.origin)
        except AmbiguousRounding as error:
            # Spark, whose order has NaN above all numbers, rounds the literal only once. Trino may round it twice.
            if not self._nan_above:
                self.exact = False
                raise
            value, exact = error.nearest
        self.exact &= exact
        return value, exact

    def _find_column(self, name: str) -> tuple[str, str]:
        """Return the full name and the type of a column in the first schema that has it.

        The case of the name is ignored if no column has exactly this name.

        Raises:
            BadRequest: No column has this name, or several columns have it.
        """
        for schema in self._schemas:
            exact_match = schema.find_column_by_name(name)
            matching_ids = {
                column_id for full_name, column_id in schema.index.by_name.items() if full_name.lower() == name.lower()
            }
            column = exact_match or (schema.column(next(iter(matching_ids))) if matching_ids else None)
            if column is None:
                continue
            if exact_match is None and len(matching_ids) > 1:
                raise BadRequest(f"Cannot resolve column '{name}' case-insensitively: it matches several columns")
            if isinstance(column.type, StructType | ListType | MapType):
                return column.name, describe_type(column.type)
            try:
                return column.name, canonicalize_primitive(column.type)
            except BadRequest:  # The type belongs to a later format version.
                return column.name, column.type
        similar_names = find_near_names(name, (other for schema in self._schemas for other in schema.index.by_name))
        hint = f"; did you mean {' or '.join(similar_names)}?" if similar_names else ""
        raise BadRequest(f"Cannot find column '{name}' in the table's schemas{hint}")


def resolve_literals(expression: Expression, schema: Schema, schemas: Iterable[Schema]) -> Expression:
    """Replace typed literals in an unbound expression by values of the columns' types.

    The result is true for at least the same rows.

    Args:
        expression: The unbound expression. A typed literal is a literal with the type that the client gave it.
        schema: The schema in which names of columns are looked up first.
        schemas: All schemas of the table. The newest is searched first.

    Raises:
        BadRequest: A predicate with a typed literal names an unknown column.
    """
    other_schemas = sorted(
        (other for other in schemas if other is not schema), key=lambda other: other.id, reverse=True
    )
    comparisons = Comparisons((schema, *other_schemas))

    def resolve(node: Expression, negated: bool) -> Expression:
        """Return the node, or its negation, without typed literals.

        A negation is moved to the predicates, because a converted predicate may match more rows. Its negation would
        then match too few rows.
        """
        match node:
            case Not(child):
                return resolve(child, not negated)
            case And(children) | Or(children):
                parts = [resolve(child, negated) for child in children]
                return (join_by_and if isinstance(node, And) != negated else join_by_or)(*parts)
            case Always(value):
                return Always(value != negated)
            case Unbound() if node.literals:
                literals = tuple(literal for literal in node.literals if isinstance(literal, TypedLiteral))
                if len(literals) == len(node.literals):
                    return comparisons.bind_typed(node, literals, negated=negated)
        return Not(node) if negated else node

    return resolve(expression, False)
