"""Scans: references to tables in a statement of any engine, with conditions on the needed rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from seamark.connector.plans.conditions import Condition, Like, build_expression, list_references, write_sql
from seamark.formats.iceberg.expressions.expression import Expression
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.protocol.wire import MAXIMUM, MINIMUM, RANGE

_JOIN_COLUMNS_MAX = 32
"""The maximum number of join columns in the query history."""


def list_columns(condition: Condition | None) -> frozenset[str]:
    """Return the columns of a condition. A field of a struct counts as the column of the struct."""
    return (
        frozenset()
        if condition is None
        else frozenset(name.partition(".")[0] for _, name in list_references(condition))
    )


@dataclass(frozen=True)
class Join:
    """A join with another scan.

    A row is needed only if the other scan has a needed row with equal values in the columns `on`. If `ops` is set, its
    operators compare the values instead.
    """

    scan: int
    """The number of the other scan in the statement."""
    on: tuple[tuple[str, str], ...]
    """Pairs of columns with equal values: a column of this table, and a column of the other table."""
    transform: str = IDENTITY
    """The transform of the join.

    With a transform of Iceberg, there is one pair. The other table's value is the start of the day, month, year or hour
    of this table's value. For `year`, it may also be the number of the year. With `RANGE`, each pair is compared by its
    operator in `ops`, and all pairs have the same column of this table. With `MINIMUM` or `MAXIMUM`, this table's value
    is compared with the minimum or maximum of the other table's rows that meet `where`.
    """
    where: Condition | None = None
    """A condition that the other row also meets. For `MINIMUM` and `MAXIMUM`, the other rows have no further condition.
    """
    any_of: int | None = None
    """The number of a group of alternative joins, or None.

    A row is needed if at least one of the joins with the same number finds a matching row in its other table.
    """
    exempt_condition: Condition | None = None
    """A condition on rows of this table. Rows that meet it are needed without the join."""
    ops: tuple[str, ...] = ()
    exact: bool = False
    """Whether a minimum or maximum is computed from exactly the rows that meet `where`.

    Otherwise it is computed from some of them.
    """

    @property
    def is_extreme(self) -> bool:
        return self.transform in (MINIMUM, MAXIMUM)


@dataclass(frozen=True, slots=True)
class TableUse:
    """The use of a table by a query, for the query history. Some names may belong to other tables of the query.

    Attributes:
        grouping: The names of the columns by which the query groups.
        aggregates: The functions, each with the name of its column, or an empty name if the argument is not a column.
        columns: The names of the columns that the query reads, or empty if they are unknown.
        joins: The names of the columns by which the query joins other tables.
        counts: Whether the query counts in the history. An explained query does not count.
    """

    grouping: tuple[str, ...] = ()
    aggregates: tuple[tuple[str, str], ...] = ()
    columns: tuple[str, ...] = ()
    joins: tuple[str, ...] = ()
    counts: bool = True

    def build_body(self) -> dict[str, object]:
        """Return the use of the table, for the query history, as fields of a plan request."""
        if not self.counts:  # The query is only explained. The server must not count it, so it needs no other field.
            return {"counts": False}
        names_by_field = {"columns": self.columns, "grouping": self.grouping, "join-columns": self.joins}
        fields: dict[str, object] = {field: list(names) for field, names in names_by_field.items() if names}
        if self.aggregates:
            fields["aggregates"] = [{"function": function, "column": column} for function, column in self.aggregates]
        return fields


NO_USE = TableUse()
UNCOUNTED_USE = TableUse(counts=False)


@dataclass(frozen=True)
class Scan:
    """A reference to a table in a statement.

    Names are normalized to the form in which the engine compares them.
    """

    catalog: str | None
    schema: str | None
    table: str
    start: int
    end: int
    """The end of the reference, which is at the characters [start, end). FOR VERSION and the alias follow it."""
    name_start: int
    """The start of the table's name, which follows the catalog and the schema in the reference."""
    alias_needed: str | None
    """The alias to add after the new name and after FOR VERSION, if the reference has no alias."""
    snapshot_id: int | None
    """The snapshot id in FOR VERSION AS OF, or None."""
    version_span: tuple[int, int] | None
    """The characters of FOR VERSION in the statement, or None."""
    condition: Condition | None
    """A condition that is true for all needed rows.

    Its columns are (0, column), and it has no semi-joins. It must be bound to the schema that the scan reads, because a
    name may belong to another column in an older schema.
    """
    likes: tuple[tuple[Like, ...], ...] = ()
    """Further conditions, which only filter the rows of a dimension. At least one condition of each tuple is true."""
    joins: tuple[Join, ...] = ()
    """The joins with other scans. Both scans of a join list it."""
    renamable: bool = True
    """Whether the reference can be renamed.

    It cannot if the statement may qualify columns by the table's schema, because an alias has no schema.
    """
    quoted: bool = False
    """Whether the reference is in a string literal of the statement, so that each quote is doubled."""
    ref: str | None = None
    """The branch or tag in FOR VERSION AS OF, or None.

    The server resolves it when it creates the plan. The rewritten statement names the resolved snapshot or its plan
    table, so the result does not change if the branch moves later.
    """
    query_use: TableUse = NO_USE
    """How the query uses the table, without the columns of joins."""

    @property
    def selects_version(self) -> bool:
        """Whether the reference selects a snapshot, branch or tag by FOR VERSION AS OF.

        If so, the engine reads with the schema of the snapshot.
        """
        return self.snapshot_id is not None or self.ref is not None

    @cached_property
    def predicate(self) -> str | None:
        """The condition as SQL, or None."""
        return None if self.condition is None else write_sql(self.condition)

    @cached_property
    def filter(self) -> Expression | None:
        """The condition as an Iceberg expression with typed literals, or None."""
        return None if self.condition is None else build_expression(self.condition)

    @property
    def is_restricted(self) -> bool:
        """Whether the query needs only some rows of the table.

        The reasons are a condition on the table, LIKE predicates, a join with a table that has a condition, or a join
        that restricts the rows even if the other table has no condition, such as a comparison with its maximum.
        """
        has_join = any(join.where is not None or join.transform in (RANGE, MINIMUM, MAXIMUM) for join in self.joins)
        return self.condition is not None or bool(self.likes) or has_join

    @cached_property
    def use(self) -> TableUse:
        """The use of the table by the query, with the columns of joins.

        At most `_JOIN_COLUMNS_MAX` columns are listed, sorted by name. Comparisons with a minimum or maximum are left
        out.
        """
        joins = {column for join in self.joins if not join.is_extreme for column, _ in join.on}
        return replace(self.query_use, joins=tuple(sorted(joins)[:_JOIN_COLUMNS_MAX])) if joins else self.query_use

    @cached_property
    def columns(self) -> frozenset[str]:
        """The columns of this table in the condition, in `likes`, and in the `exempt_condition` of each join."""
        likes = frozenset(like.column[1] for alternatives in self.likes for like in alternatives)
        conditions = (self.condition, *(join.exempt_condition for join in self.joins))
        return likes.union(*(list_columns(condition) for condition in conditions))
