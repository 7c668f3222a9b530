"""One SELECT block: its joined sources, and how conditions are pushed down to them.

- A condition on the rows of an inner join is pushed to both sides.
- An outer join keeps all rows of its preserved side, so ON is pushed to the other side only. A condition from above the
  join is pushed to the other side only if it is true for no row of nulls: otherwise a preserved row whose partner was
  removed would pass.
- A condition on a grouping key is pushed to the rows of the groups. Of sets of groups, it is a key of every set.
- If all aggregates of a block without groups have FILTER, only rows that meet one of these conditions count.
- A condition on a column is also true for an equal column of the same type. Columns are equal by AND, or by each branch
  of OR.
- A disjunction of conditions on several sources is a disjunction of semi-joins for a source that is joined with them.
- If a row is used only with a join partner, and its columns equal columns of a stored table, its values are among the
  values of these columns. The same is true of IN and EXISTS, if the subquery creates no rows itself.
- HAVING on a grouping key is a condition on the rows of the groups.
- A condition on a column by which every window function of the block is partitioned is pushed to the partitions' rows.
- A subquery in an expression is a separate query. If its WHERE compares a column with a column of this block, only rows
  with values of needed rows of this block are needed. The same applies to LATERAL.
- VALUES and UNNEST of literals are lists of values for the columns that are equal to theirs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from sqlglot import exp

from seamark.connector.analysis.algebra.equivalences import (
    Equal,
    at_reference,
    comparable,
    groups_of,
    on_references,
    pairs_by_partner,
    partner_values,
    period_of,
    period_semi_joins,
    push_disjunction_across_join,
    restricted,
    semi_joins,
)
from seamark.connector.analysis.algebra.relations import (
    Origin,
    RenamedColumns,
    Scope,
    canonical_name,
    is_exact,
    is_plain_name,
    literal_output,
    output_name,
    output_names,
    star_qualifier,
)
from seamark.connector.analysis.block_sources import BlockSource, struct_field
from seamark.connector.analysis.comparisons import decided
from seamark.connector.analysis.conditions import ConditionReader, conjuncts, is_plain
from seamark.connector.analysis.joined_sources import (
    JoinedSource,
    Tree,
    inner_joins,
    seen_by_lateral,
    seen_in_on,
    sources_of,
)
from seamark.connector.analysis.operands import class_of_kind, class_of_literal
from seamark.connector.plans.conditions import (
    LEAVES_MAX,
    AllOf,
    ColumnReference,
    Condition,
    SemiJoin,
    all_of,
    any_of,
    comparisons_of,
    move,
    references_of,
    rejects_null,
    weaken,
)
from seamark.connector.plans.literals import Literal


@dataclass
class Block:
    """One SELECT. `passes`: conditions on its result may be pushed to its sources (`queries.py`)."""

    projections: list[exp.Expr]
    where: exp.Expr | None
    sources: list[BlockSource]
    tree: Tree | None
    passes: bool
    needs_rows: bool
    """If no row of the sources meets WHERE, the block has no row."""
    inner: list[tuple[exp.Expr, Scope, exp.Expr | None]]
    """Subqueries in its expressions, with the ON that they are in."""
    reader: ConditionReader
    relation_names: frozenset[str] = frozenset()  # of all relations of the statement
    having: exp.Expr | None = None
    is_grouped: bool = False
    keys: list[exp.Expr] = field(default_factory=list)
    """The grouping keys of which each group has one value."""
    filters: tuple[exp.Expr, ...] = ()
    """If there are some, only rows count that meet one of them (FILTER of aggregates)."""
    windows: tuple[exp.Window, ...] = ()
    laterals: tuple[int, ...] = ()  # the positions of LATERAL subqueries among the sources
    correlated: Condition | None = None
    """A condition on rows of the sources that follows from the rows of an outer block."""
    _late: dict[int, Condition | None] = field(default_factory=dict)  # conditions on LATERAL subqueries
    _kinds: dict[str, str | None] = field(default_factory=dict)  # without it, nested blocks need exponential time

    def has(self, column: str) -> bool | None:
        answers: set[bool | None] = {False}
        for projection in self.projections:
            star = star_qualifier(projection)
            if star is None:
                answers.add(output_name(projection) == column)
            elif star == "":
                answers |= {source.result.has(column) for source in self.sources}
            else:
                answers |= {source.result.has(column) for source in self._qualified(star)} or {None}
        return True if True in answers else None if None in answers else False

    def names(self) -> tuple[str | None, ...] | None:
        if len(self.projections) == len(self.sources) == 1 and star_qualifier(self.projections[0]) == "":
            return self.sources[0].result.names()
        has_star = any(star_qualifier(one) is not None for one in self.projections)
        return None if has_star else output_names(self.projections)

    def kind(self, column: str) -> str | None:
        if column not in self._kinds:
            reference = self._output(column)
            self._kinds[column] = None if reference is None else self._kind(reference)
        return self._kinds[column]

    def origin(self, columns: Sequence[str]) -> Origin | None:
        references = [self._output(one) for one in columns]
        sources = {None if reference is None else reference[0] for reference in references}
        number = sources.pop() if len(sources) == 1 else None
        if number is None:
            return None
        return self.sources[number].result.origin([reference[1] for reference in references if reference is not None])

    def values(self, column: str) -> tuple[Literal, ...] | None:
        reference = self._output(column)
        return None if reference is None else self.sources[reference[0]].result.values(reference[1])

    def value_class(self, column: str) -> str | None:
        literal = literal_output(self.projections, column, self.reader.literal)
        return class_of_kind(self.kind(column)) if literal is None else class_of_literal(literal)

    def push_down(self, wanted: Condition | None) -> None:
        if self.tree is not None:
            literal_of = partial(literal_output, self.projections, literal_of=self.reader.literal)
            wanted = weaken(wanted, partial(decided, literal_of=literal_of))
            above = move(wanted, lambda reference: self._output(reference[1])) if self.passes else None
            if self.is_grouped:
                above = on_references(above, self._key_references())
            above = all_of([self._before_windows(above), self._of_groups(), self._of_filters(), self.correlated])
            if self.where is not None:
                equal = self._equals(self.where)
                above = self._implied(all_of([self._held(self.where, equal), above]), equal)
                above = all_of([above, *self._across(above, equal)])
            self._ask(self.tree, above)
        # After the sources, because conditions on these also hold for equal columns of correlated subqueries.
        for _, query, on in self.inner:
            self._correlate(query, None if on is None else seen_in_on(on, self.tree))
            query.push_down(None)
        for number in self.laterals:
            query = self.sources[number].result
            self._correlate(
                query.inner if isinstance(query, RenamedColumns) else query, seen_by_lateral(number, self.tree)
            )
            query.push_down(self._late.get(number))

    def _before_windows(self, condition: Condition | None) -> Condition | None:
        """The part of a condition on the result that leaves out whole partitions of every window function."""
        for window in self.windows:
            keys = window.args.get("partition_by") or []
            condition = on_references(condition, {self._resolve(key) for key in keys if type(key) is exp.Column})
        return condition

    def _of_groups(self) -> Condition | None:
        """The part of HAVING that leaves out groups by their keys."""
        if self.having is None:
            return None
        keys = self._key_references()

        def key(column: exp.Column) -> ColumnReference | None:
            reference = self._resolve(column)
            return reference if reference in keys else None

        return self.reader.read(self.having, key, self._kind)

    def _key_references(self) -> set[ColumnReference | None]:
        return {self._resolve(key) for key in self.keys if type(key) is exp.Column}

    def _of_filters(self) -> Condition | None:
        """A condition that is true for each row that an aggregate counts."""
        if not self.filters:
            return None
        return any_of(self.reader.read(one, self._stored, self._kind) for one in self.filters)

    def _correlate(self, query: Scope, seen: frozenset[int] | None) -> None:
        """Adds the condition on the rows of a subquery that this block's rows imply: its WHERE compares columns of its
        sources with columns of this block, of which only rows are needed that meet their own conditions. `seen`: the
        sources that the subquery sees, None for all; another name may be that of an outer block."""
        if not isinstance(query, Block):
            return
        parts: list[Condition | None] = []
        for own, reference in self._pairs_of(query):
            if seen is not None and reference[0] not in seen:
                continue
            partner = self.sources[reference[0]].result
            parts += semi_joins([(own, reference[1])], partner)
            found = partner.origin([reference[1]])
            if found is not None and partner.kind(reference[1]) == query._kind(own):
                table, (column,) = found
                alone = at_reference(on_references(table.predicate, {(0, column)}), own)
                parts.append(comparisons_of(alone))
        query.correlated = all_of(parts)

    def _ask(self, tree: Tree, wanted: Condition | None) -> None:
        """`wanted` is true for each row of the join that can change the result."""
        if isinstance(tree, int):
            alone = move(restricted(wanted, frozenset({tree})), lambda reference: (0, reference[1]))
            if tree in self.laterals:
                self._late[tree] = alone
            else:
                self.sources[tree].result.push_down(alone)
        elif tree.keeps_left or tree.keeps_right:
            self._ask_outer(tree, wanted)
        else:
            self._ask_inner(tree, wanted)

    def _ask_inner(self, tree: JoinedSource, wanted: Condition | None) -> None:
        """Nested inner joins are processed together: each row meets every ON, for any number of tables."""
        sides, joins = inner_joins(tree)
        equal = [one for join in joins for one in (*self._equals_on(join), *self._merges(join))]
        ons = [restricted(self._held(join.on, [], sources_of(join)), sources_of(join)) for join in joins]
        held = self._implied(all_of([wanted, *ons, *self._partners(equal)]), equal)
        held = all_of([held, *self._across(held, equal)])
        number_of = {source: number for number, side in enumerate(sides) for source in sources_of(side)}
        asked: list[list[Condition | None]] = [[] for _ in sides]
        for part in held.parts if isinstance(held, AllOf) else () if held is None else (held,):
            numbers = {number_of[source] for source, _ in references_of(part) if source in number_of}
            for number in numbers:
                asked[number].append(part)
        for side, parts in zip(sides, asked, strict=True):
            self._ask(side, all_of(parts))

    def _ask_outer(self, tree: JoinedSource, wanted: Condition | None) -> None:
        left, right = sources_of(tree.left), sources_of(tree.right)
        # A row with nulls for the other side does not meet the condition from above: the side is not kept.
        keeps_left = tree.keeps_left and not rejects_null(restricted(wanted, right))
        keeps_right = tree.keeps_right and not rejects_null(restricted(wanted, left))
        tree = replace(tree, keeps_left=keeps_left, keeps_right=keeps_right)
        if not (keeps_left or keeps_right):
            self._ask_inner(tree, wanted)
            return
        equal = [*self._equals_on(tree), *self._merges(tree)]
        on = restricted(self._held(tree.on, equal, left | right), left | right)
        for side, own, other, kept, other_kept in (
            (tree.left, left, right, tree.keeps_left, tree.keeps_right),
            (tree.right, right, left, tree.keeps_right, tree.keeps_left),
        ):
            asked = None if other_kept else restricted(wanted, own)
            if not kept:  # a row is used only with a partner that matters and meets ON
                beside = self._implied(all_of([restricted(wanted, other), on]), equal)
                asked = all_of([asked, restricted(beside, own)])
            self._ask(side, asked)

    def _held(self, node: exp.Expr | None, equal: list[Equal], seen: frozenset[int] | None = None) -> Condition | None:
        """A condition that is true for each row where `node` is true and these columns are equal. `seen`: the sources
        that `node` sees, by default all."""
        read = None if node is None else self.reader.read(node, self._stored, self._kind)
        return all_of([read, *self._partners(equal), *self._found_in(node), *self._periods(node, seen)])

    def _across(self, condition: Condition | None, equal: list[Equal]) -> Iterator[Condition | None]:
        return push_disjunction_across_join(condition, equal, lambda number: self.sources[number].result)

    def _periods(self, node: exp.Expr | None, seen: frozenset[int] | None) -> Iterator[SemiJoin]:
        """Columns whose day, month, year or hour is a value of another source, for each row where `node` is true."""
        for part in conjuncts(node):
            sides = (part.this, part.expression) if type(part) is exp.EQ else ()
            for side, other in zip(sides, reversed(sides), strict=True):
                period, column = period_of(side), other.unnest()
                reference = None if period is None else self._resolve(period.column)
                there = self._resolve(column) if type(column) is exp.Column else None
                if period is None or reference is None or there is None or reference[0] == there[0]:
                    continue
                if seen is None or {reference[0], there[0]} <= seen:
                    partner = self.sources[there[0]].result
                    yield from period_semi_joins(period, reference, self._kind(reference), partner, there[1])

    # Equal columns

    def _equals(self, node: exp.Expr | None) -> list[Equal]:
        """Columns that are equal for each row where `node` is true. Of OR those that each branch requires."""
        found: list[Equal] = []
        for part in conjuncts(node):
            if isinstance(part, exp.Or):
                found += self._equals_in_each(part)
            sides = (part.this, part.expression) if type(part) is exp.EQ else ()
            references = [self._resolve(side) for side in sides if type(side) is exp.Column]
            known = [reference for reference in references if reference is not None]
            if len(known) == 2 and comparable(*(self._kind(reference) for reference in known)):
                found.append((known[0], known[1]))
        return found

    def _equals_in_each(self, either: exp.Or) -> list[Equal]:
        common: dict[Equal, None] | None = None
        for branch in either.flatten():
            equal = {(min(one), max(one)): None for one in self._equals(branch)}
            common = equal if common is None else {one: None for one in common if one in equal}
            if not common:
                break
        return list(common or ())

    def _equals_on(self, join: JoinedSource) -> list[Equal]:
        """The equal columns of ON, which sees the sources of its join only: another name may be of an outer block."""
        own = sources_of(join)
        return [(one, other) for one, other in self._equals(join.on) if one[0] in own and other[0] in own]

    def _merges(self, join: JoinedSource) -> Iterator[Equal]:
        """The equal columns of USING."""
        for column in join.using:
            one, other = (self._resolve_in(side, column) for side in (join.left, join.right))
            if one is not None and other is not None and comparable(self._kind(one), self._kind(other)):
                yield one, other

    def _partners(self, equal: list[Equal]) -> Iterator[Condition]:
        """Columns of a source whose values are among those of another source."""
        for (_, partner), found in pairs_by_partner(equal).items():
            yield from partner_values(found, self.sources[partner].result)

    def _found_in(self, node: exp.Expr | None) -> Iterator[Condition]:
        """Columns whose values are among the values of subqueries in `node`, for each row where it is true."""
        for part in conjuncts(node):
            match part:
                case exp.In() if {name for name, value in part.args.items() if value} == {"this", "query"}:
                    query = self._query(part.args["query"])
                    columns = part.this.expressions if isinstance(part.this, exp.Tuple) else [part.this]
                    yield from self._among(columns, query)
                case exp.EQ():
                    for column, other in ((part.this, part.expression), (part.expression, part.this)):
                        inner = other.this if isinstance(other, exp.Any) else other
                        query = self._query(inner)
                        if query is not None:
                            yield from self._among([column], query)
                    continue
                case exp.Exists():
                    query = self._query(part.this)
                case _:
                    continue
            if isinstance(query, Block) and query.needs_rows:
                yield from self._correlated(query)

    def _among(self, columns: Sequence[exp.Expr], query: Scope | None) -> Iterator[Condition]:
        """Columns of this block that are equal, all together, to the columns of a row of the query."""
        names = None if query is None else query.names()
        if query is None or names is None or len(names) != len(columns):
            return
        if len(names) == 1 and isinstance(query, Block):
            yield from self._extremes(columns[0], query)
        pairs = []
        for column, name in zip(columns, names, strict=True):
            reference = self._resolve(column) if type(column) is exp.Column else None
            if reference is not None and name is not None and comparable(self._kind(reference), query.kind(name)):
                pairs.append((reference, name))
        if pairs:
            yield from partner_values(pairs, query)

    def _extremes(self, column: exp.Expr, query: Block) -> Iterator[Condition]:
        """`c = (SELECT max(x) …)`: a value of x."""
        extreme = query.projections[0].unalias()
        if type(extreme) not in (exp.Min, exp.Max) or not is_plain(extreme) or extreme.args.get("expressions"):
            return
        reference = self._resolve(column) if type(column) is exp.Column else None
        inner = query._resolve(extreme.this) if type(extreme.this) is exp.Column else None
        if reference is not None and inner is not None and comparable(self._kind(reference), query._kind(inner)):
            yield from partner_values([(reference, inner[1])], query.sources[inner[0]].result)

    def _query(self, node: exp.Expr) -> Scope | None:
        return next((result for one, result, _ in self.inner if one is node), None)

    def _correlated(self, query: Block) -> Iterator[SemiJoin]:
        """Columns of this block that the WHERE of a subquery compares with its own columns."""
        pairs: defaultdict[int, list[tuple[ColumnReference, str]]] = defaultdict(list)
        for own, reference in self._pairs_of(query):
            pairs[own[0]].append((reference, own[1]))
        for number, found in pairs.items():
            yield from semi_joins(found, query.sources[number].result)

    def _pairs_of(self, query: Block) -> Iterator[Equal]:
        """Columns of a subquery's sources that its WHERE requires to be equal to columns of this block."""
        for part in conjuncts(query.where):
            if type(part) is not exp.EQ or type(part.this) is not exp.Column or type(part.expression) is not exp.Column:
                continue
            for inside, outside in ((part.this, part.expression), (part.expression, part.this)):
                own = query._resolve(inside)
                reference = self._resolve(outside) if query._is_foreign(outside) else None
                if own is not None and reference is not None and comparable(self._kind(reference), query._kind(own)):
                    yield own, reference

    def _is_foreign(self, column: exp.Column) -> bool:
        """Whether it is certain that the column is not one of this block, by its qualifier, and is no struct field."""
        first = column.parts[0]
        if not isinstance(first, exp.Identifier) or len(column.parts) > 2:
            return False
        name = canonical_name(first.name)
        if self._qualified(name) if len(column.parts) == 2 else self._has_alias(name):
            return False
        return all(source.result.has(name) is False for source in self.sources)

    def _has_alias(self, name: str) -> bool:
        """Whether SELECT gives this name: DuckDB finds it in WHERE before the columns of an outer block."""
        return any(isinstance(one, exp.Alias) and output_name(one) == name for one in self.projections)

    def _kind(self, reference: ColumnReference) -> str | None:
        return self.sources[reference[0]].result.kind(reference[1])

    def _implied(self, condition: Condition | None, equal: list[Equal]) -> Condition | None:
        """The condition, and its parts on single columns also for the columns that are equal to these."""
        groups = groups_of(one for one in equal if self._kind(one[0]) == self._kind(one[1]))
        if condition is None or not groups:
            return condition
        given = condition.parts if isinstance(condition, AllOf) else (condition,)
        parts: list[Condition | None] = list(given)
        for part in given:
            references = references_of(part)
            if len(references) == 1 and len(parts) < LEAVES_MAX:  # `all_of` takes no more
                (reference,) = references
                parts += [at_reference(part, other) for other in sorted(groups.get(reference, references) - references)]
        return all_of(parts)

    def _output(self, name: str) -> ColumnReference | None:
        """None if the name may be ambiguous: more than one star, or a star beside other columns."""
        stars = []
        for projection in self.projections:
            star = star_qualifier(projection)
            if star is not None:
                stars.append(star)
            elif output_name(projection) == name:
                column = projection.this if isinstance(projection, exp.Alias) else projection
                return self._resolve(column) if type(column) is exp.Column else None
        if len(stars) != 1:
            return None
        return self._resolve_name(name) if stars[0] == "" else self._resolve_name(name, stars[0])

    def _resolve(self, column: exp.Column) -> ColumnReference | None:
        parts = column.parts
        if not all(isinstance(part, exp.Identifier) for part in parts) or len(parts) > 3:
            return None
        *qualifiers, name = (canonical_name(part.name) for part in parts)
        if len(qualifiers) < 2:
            return self._resolve_name(name, *qualifiers)
        # A table with its schema, or a field of a struct. Trino prefers the table.
        schema, table = qualifiers
        of_schema = [one for one in self._qualified(table) if one.schema == schema]
        return self._resolve_name(name, table) if len(of_schema) == 1 else None

    def _stored(self, column: exp.Column) -> ColumnReference | None:
        """A column, or a field of a struct of a table."""
        return self._resolve(column) or struct_field(column, self.sources, self.relation_names)

    def _resolve_name(self, name: str, qualifier: str | None = None) -> ColumnReference | None:
        if qualifier is not None:
            matching = self._qualified(qualifier)
            if len(matching) != 1 or matching[0].result.has(name) is False or not is_plain_name(name):
                return None
            return self.sources.index(matching[0]), name
        return None if self.tree is None else self._resolve_in(self.tree, name)

    def _resolve_in(self, tree: Tree, name: str) -> ColumnReference | None:
        """The column that an unqualified name refers to in a join.

        A column merged by USING has the value of the left side, or of the right side if the row has no left side. It is
        the column of one side if the join keeps no row of the other side without a partner.
        """
        if isinstance(tree, int):
            has = self.sources[tree].result.has(name)
            if has is None:
                others = (source.result.has(name) for number, source in enumerate(self.sources) if number != tree)
                has = all(other is False for other in others)
            return (tree, name) if has and is_plain_name(name) else None
        left, right = self._resolve_in(tree.left, name), self._resolve_in(tree.right, name)
        if name not in tree.using:
            # If both sides had the column, the name would be ambiguous, and the statement would fail.
            return left or right if left is None or right is None else None
        if left is None or right is None or (tree.keeps_left and tree.keeps_right):
            return None
        kind = self._kind(left)
        if kind is None or self._kind(right) != kind:  # otherwise it is converted
            return None
        return left if not tree.keeps_right else right if is_exact(kind) else None

    def _qualified(self, qualifier: str) -> list[BlockSource]:
        return [source for source in self.sources if source.name == qualifier]
