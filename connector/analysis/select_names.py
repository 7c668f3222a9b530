"""Resolves the names in one SELECT of sqlglot's tree: the columns of its sources, and its output columns.

A name is resolved only if every engine resolves it in the same way. Comparisons of other names give no condition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from sqlglot import exp

from seamark.connector.analysis.algebra.blocks import JoinTree, SourceJoin
from seamark.connector.analysis.algebra.equivalences import ALWAYS, Predicate
from seamark.connector.analysis.algebra.relations import Relation, Table, is_exact
from seamark.connector.analysis.lexer import UnsupportedStatement
from seamark.connector.plans.conditions import ColumnReference
from seamark.connector.plans.literals import Literal

_LITERALS = (exp.Literal, exp.Neg, exp.Cast, exp.Boolean)
_EXTREMES = (exp.Min, exp.Max)


@dataclass(frozen=True, eq=False)
class NamedSource:
    """A relation in FROM, with the names that qualify its columns.

    Attributes:
        relation: The rows of the relation.
        name: The alias, or the name of the table, or None.
        schema: The schema of a table without an alias, which may precede the table's name. None for other relations.
    """

    relation: Relation
    name: str | None
    schema: str | None = None


@dataclass(frozen=True, eq=False)
class ParsedJoin:
    """A join in FROM, as it was parsed.

    `keeps_left` and `keeps_right` state whether the join keeps rows of this side without a matching row of the other
    side. `using` has the column names of USING.
    """

    left: ParsedTree
    right: ParsedTree
    keeps_left: bool = False
    keeps_right: bool = False
    on: exp.Expr | None = None
    using: tuple[str, ...] = ()


ParsedTree: TypeAlias = int | ParsedJoin
"""A join, or the position of a source in FROM."""


def list_sources(tree: ParsedTree) -> frozenset[int]:
    return frozenset({tree}) if isinstance(tree, int) else list_sources(tree.left) | list_sources(tree.right)


def iter_joins(tree: ParsedTree | None) -> Iterator[ParsedJoin]:
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ParsedJoin):
            yield node
            pending += [node.left, node.right]


def build_join_tree(tree: ParsedTree, predicate_on: Callable[[ParsedJoin], Predicate]) -> JoinTree:
    """Convert the parsed joins of FROM to a tree of `SourceJoin` nodes.

    Conditions are pushed down to the sources along this tree. A join without ON and USING has a predicate that is
    always true.

    Args:
        tree: The parsed tree. A number is the position of a single source in FROM.
        predicate_on: Returns the predicate of a join with ON or USING.
    """
    if isinstance(tree, int):
        return tree
    left, right = build_join_tree(tree.left, predicate_on), build_join_tree(tree.right, predicate_on)
    on = ALWAYS if tree.on is None and not tree.using else predicate_on(tree)
    return SourceJoin(left, right, tree.keeps_left, tree.keeps_right, on)


class SelectNames:
    """Resolves the names in one SELECT, and implements the protocol `Outputs` for its query block.

    Args:
        projections: The expressions after SELECT.
        sources: The relations in FROM.
        tree: The joins of the relations, or None if the SELECT has no FROM.
        relation_names: The names of all relations of the statement.
        find_literal: A function that returns the literal of an expression, or None if it is not a literal.
    """

    def __init__(
        self,
        projections: Sequence[exp.Expr],
        sources: Sequence[NamedSource],
        tree: ParsedTree | None,
        relation_names: frozenset[str],
        find_literal: Callable[[exp.Expr], Literal | None],
    ) -> None:
        self.projections = projections
        self.sources = sources
        self.tree = tree
        self._relation_names = relation_names
        self._find_literal = find_literal

    # The outputs of the block (`algebra.blocks.Outputs`)

    def has(self, name: str) -> bool | None:
        answers: set[bool | None] = {False}
        for projection in self.projections:
            star = find_star_qualifier(projection)
            if star is None:
                answers.add(find_output_name(projection) == name)
            elif star == "":
                answers |= {source.relation.has(name) for source in self.sources}
            else:
                answers |= {source.relation.has(name) for source in self._find_sources(star)} or {None}
        return True if True in answers else None if None in answers else False

    def list_names(self) -> tuple[str | None, ...] | None:
        if len(self.projections) == len(self.sources) == 1 and find_star_qualifier(self.projections[0]) == "":
            return self.sources[0].relation.list_names()
        has_star = any(find_star_qualifier(projection) is not None for projection in self.projections)
        return None if has_star else find_output_names(self.projections)

    def find_reference(self, name: str) -> ColumnReference | None:
        """Return the source column whose unchanged value is the output column `name`, or None.

        Return None also if no other output has the name and SELECT has several stars, because each may have the column.
        """
        stars = []
        for projection in self.projections:
            star = find_star_qualifier(projection)
            if star is not None:
                stars.append(star)
            elif find_output_name(projection) == name:
                return self.resolve_node(projection.this if isinstance(projection, exp.Alias) else projection)
        if len(stars) != 1:
            return None
        return self._resolve_name(name) if stars[0] == "" else self._resolve_name(name, stars[0])

    def find_literal(self, name: str) -> Literal | None:
        if any(find_star_qualifier(projection) is not None for projection in self.projections):
            return None
        names = find_output_names(self.projections)
        literal = self._find_literal(self.projections[names.index(name)].unalias()) if names.count(name) == 1 else None
        return None if literal is None or literal.kind == "null" else literal

    def may_be_null(self, name: str) -> bool:
        return False

    # Columns in the expressions of the SELECT

    def find_kind(self, reference: ColumnReference) -> str | None:
        source, column = reference
        return self.sources[source].relation.find_kind(column)

    def resolve(self, column: exp.Column) -> ColumnReference | None:
        """Return the source column to which a name refers, or None if it is unknown or ambiguous."""
        parts = column.parts
        if not all(isinstance(part, exp.Identifier) for part in parts) or len(parts) > 3:
            return None
        *qualifiers, name = (canonicalize_name(part.name) for part in parts)
        if len(qualifiers) < 2:
            return self._resolve_name(name, *qualifiers)
        # Two qualifiers may be a schema and a table, or a table and a struct column. Trino prefers the schema and
        # table.
        schema, table = qualifiers
        schema_sources = [source for source in self._find_sources(table) if source.schema == schema]
        return self._resolve_name(name, table) if len(schema_sources) == 1 else None

    def resolve_node(self, node: exp.Expr) -> ColumnReference | None:
        """Return the column to which the node refers, or None if the node is not a column."""
        return self.resolve(node) if type(node) is exp.Column else None

    def resolve_stored(self, column: exp.Column) -> ColumnReference | None:
        """Return the column to which a name refers, or the field of a struct column of a table, or None."""
        return self.resolve(column) or self._resolve_field(column)

    def resolve_in(self, tree: ParsedTree, name: str) -> ColumnReference | None:
        """Return the column to which an unqualified name refers in a join.

        A column that USING merges has the value of the left side or, in a row without a left side, of the right side.
        It is the column of one side if the join does not keep unmatched rows of the opposite side.

        The result is None if it is not certain that the name always has the value of one column of a source.
        """
        if isinstance(tree, int):
            has_name = self.sources[tree].relation.has(name)
            if has_name is None:  # The columns are unknown. The name is in this source if no other source has it.
                answers = (source.relation.has(name) for number, source in enumerate(self.sources) if number != tree)
                has_name = all(other is False for other in answers)
            return (tree, name) if has_name and is_plain_name(name) else None
        left, right = self.resolve_in(tree.left, name), self.resolve_in(tree.right, name)
        if name not in tree.using:
            # The engine refuses an ambiguous name, so only one side has the column.
            return left or right if left is None or right is None else None
        if left is None or right is None or (tree.keeps_left and tree.keeps_right):
            return None
        kind = self.find_kind(left)
        if kind is None or self.find_kind(right) != kind:  # If the types differ, the engine converts one of the values.
            return None
        if not tree.keeps_right:  # Each row has a left side, so the merged column is the column of the left side.
            return left
        # Each row has a right side. A left value may be equal to the right value, but differ from it, as 0.0 and -0.0
        # do. For an exact type, equal values are identical.
        return right if is_exact(kind) else None

    def is_outer_name(self, column: exp.Column) -> bool:
        """Return whether a column certainly belongs to an outer block. Return False for a field of a struct."""
        first_part = column.parts[0]
        if not isinstance(first_part, exp.Identifier) or len(column.parts) > 2:
            return False
        name = canonicalize_name(first_part.name)
        if self._find_sources(name) if len(column.parts) == 2 else self._has_alias(name):
            return False
        return all(source.relation.has(name) is False for source in self.sources)

    def _has_alias(self, name: str) -> bool:
        """Return whether SELECT has an alias of this name.

        In WHERE, DuckDB resolves a name to an alias of SELECT before it searches columns of an outer block.
        """
        return any(
            isinstance(projection, exp.Alias) and find_output_name(projection) == name
            for projection in self.projections
        )

    def _resolve_name(self, name: str, qualifier: str | None = None) -> ColumnReference | None:
        if qualifier is not None:
            matching_sources = self._find_sources(qualifier)
            if len(matching_sources) != 1 or matching_sources[0].relation.has(name) is False or not is_plain_name(name):
                return None
            return self.sources.index(matching_sources[0]), name
        return None if self.tree is None else self.resolve_in(self.tree, name)

    def _resolve_field(self, column: exp.Column) -> ColumnReference | None:
        """Return the field `column.field` or `alias.column.field` of a table among the sources.

        The name of the returned column has dots. Return None also if the first name may be the name of a relation in
        the statement.
        """
        parts = column.parts
        if len(parts) < 2 or not all(isinstance(part, exp.Identifier) for part in parts):
            return None
        names = [canonicalize_name(part.name) for part in parts]
        if any("." in name for name in names):
            return None
        qualified_sources = self._find_sources(names[0])
        if qualified_sources:
            names = names[1:]
        if len(names) < 2 or names[0] in self._relation_names or len(qualified_sources) > 1:
            return None
        candidates = [
            source for source in qualified_sources or self.sources if source.relation.has(names[0]) is not False
        ]
        table = candidates[0].relation if len(candidates) == 1 else None
        if not isinstance(table, Table):
            return None
        field = ".".join(names)
        return None if table.find_kind(field) is None else (self.sources.index(candidates[0]), field)

    def _find_sources(self, qualifier: str) -> list[NamedSource]:
        return [source for source in self.sources if source.name == qualifier]


def canonicalize_name(name: str) -> str:
    """Return the form of a name in which Trino compares names, with or without quotes (trinodb/trino#17).

    Raises:
        UnsupportedStatement: Trino compares the name in two ways whose results differ.
    """
    low = name.lower()
    if not name.isascii():
        # Unlike toLowerCase, Java's equalsIgnoreCase first converts each character to upper case.
        upper = [letter.upper() if len(letter.upper()) == 1 else letter for letter in name]
        if "".join(letter.lower() if len(letter.lower()) == 1 else letter for letter in upper) != low:
            raise UnsupportedStatement
    return low


def is_plain_name(name: str) -> bool:
    """Return whether the name is not a hidden column, and the catalog does not read it as a field of a struct."""
    return "$" not in name and "." not in name


def find_star_qualifier(projection: exp.Expr) -> str | None:
    """Return the qualifier of a star, or "" for a star without a qualifier.

    Return None if the projection is not a star.
    """
    if isinstance(projection, exp.Star):
        return ""
    if type(projection) is exp.Column and isinstance(projection.this, exp.Star):
        qualifiers = projection.parts[:-1]
        # Several qualifiers are a table with its schema, or a struct. No source has the name "\0".
        return canonicalize_name(qualifiers[-1].name) if len(qualifiers) == 1 else "\0"
    return None


def find_output_name(projection: exp.Expr) -> str | None:
    if isinstance(projection, exp.Alias):
        return canonicalize_name(projection.alias)
    if type(projection) is exp.Column or isinstance(projection, exp.Dot):
        return canonicalize_name(projection.name) or None
    return None


def find_output_names(projections: Sequence[exp.Expr]) -> tuple[str | None, ...]:
    """Return the names of output columns, none of which is a star.

    A literal, a minimum or a maximum without an alias gets a name that no statement can contain, so that callers can
    refer to it by a name.
    """
    return tuple(
        find_output_name(projection) or (f"\0{number}" if isinstance(projection, (*_LITERALS, *_EXTREMES)) else None)
        for number, projection in enumerate(projections)
    )
