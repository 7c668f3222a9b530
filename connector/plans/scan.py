"""The tables that a statement of any engine reads: their positions in the text, and conditions on the
needed rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from seamark.connector.plans.conditions import Condition, Like, expression_of, references_of, sql_of
from seamark.formats.iceberg.expressions.expression import Expression
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.protocol.wire import MAXIMUM, MINIMUM, RANGE


def columns_of(condition: Condition | None) -> frozenset[str]:
    """Return the columns of a condition; for a field of a struct, return the column of the struct."""
    return (
        frozenset() if condition is None else frozenset(name.partition(".")[0] for _, name in references_of(condition))
    )


@dataclass(frozen=True)
class Join:
    """A row is needed only if a needed row of another scan is equal in the columns `on`, or compared by `ops`."""

    scan: int
    """The position of the other scan among the statement's scans."""
    on: tuple[tuple[str, str], ...]
    """Pairs of columns with equal values: a column of this table, and a column of the other table."""
    transform: str = IDENTITY
    """With a transform of Iceberg there is one pair: the other table's value is the start of the day, month, year or
    hour of this table's; for `year` also the number of the year. With `RANGE`, each pair is compared by its operator in
    `ops`; the pairs have one column of this table. With `MINIMUM` or `MAXIMUM`, this table's value is compared with
    that extreme of the rows of the other table that meet `where`."""
    where: Condition | None = None
    """The other row also meets this condition on its table. Rows with an extreme meet only this condition."""
    any_of: int | None = None
    """The number of a group of alternatives: a row needs only one of the joins with the same number."""
    unless: Condition | None = None
    """Rows of this table that meet it are needed in any case."""
    ops: tuple[str, ...] = ()
    exact: bool = False
    """The extreme is that of exactly the rows that meet `where`; otherwise of some of them."""

    @property
    def is_extreme(self) -> bool:
        return self.transform in (MINIMUM, MAXIMUM)


@dataclass(frozen=True)
class Scan:
    """A reference to a table in a statement.

    Names have the form in which the engine compares them.
    """

    catalog: str | None
    schema: str | None
    table: str
    start: int
    end: int
    """The end of the reference in the statement, which has the characters [start, end); FOR VERSION and the
    alias follow.
    """
    name_start: int
    """The start of the table's name, which follows the catalog and the schema."""
    alias_needed: str | None
    """The alias to add after the new name and after FOR VERSION, if the reference has no alias."""
    snapshot_id: int | None
    """The snapshot of FOR VERSION AS OF, if it is a number."""
    version_span: tuple[int, int] | None
    """The characters of FOR VERSION in the statement."""
    condition: Condition | None
    """The condition that is true for all needed rows.

    Its columns are (0, column), and it has no semi-joins. It must be bound to the schema that the scan reads,
    because in an older schema, a name may belong to another column.
    """
    likes: tuple[tuple[Like, ...], ...] = ()
    """Further conditions, which only filter the rows of a dimension; at least one condition of each tuple is
    true.
    """
    joins: tuple[Join, ...] = ()
    """The joins with other scans; both scans of a join list it."""
    renamable: bool = True
    """Whether the reference can be renamed. False if the statement may qualify columns by the table's schema,
    because an alias has no schema.
    """
    quoted: bool = False
    """Whether the reference is in a text within the statement, in which each quote is doubled."""
    ref: str | None = None
    """The branch or tag of FOR VERSION AS OF.

    The server finds its snapshot when it makes the plan. The rewritten statement names that snapshot or its
    plan table, so the result does not change if the branch moves later.
    """

    @property
    def is_past(self) -> bool:
        """Whether the reference has a version; the engine then reads with the schema of the snapshot."""
        return self.snapshot_id is not None or self.ref is not None

    @cached_property
    def predicate(self) -> str | None:
        """The condition as SQL."""
        return None if self.condition is None else sql_of(self.condition)

    @cached_property
    def filter(self) -> Expression | None:
        """The condition as an Iceberg expression with typed literals."""
        return None if self.condition is None else expression_of(self.condition)

    @property
    def is_restricted(self) -> bool:
        """Whether there is a condition on its rows, or a join that needs no condition on the rows of its table."""
        has_join = any(join.where is not None or join.transform in (RANGE, MINIMUM, MAXIMUM) for join in self.joins)
        return self.condition is not None or bool(self.likes) or has_join

    @cached_property
    def columns(self) -> frozenset[str]:
        """The columns of this table in the condition, in `likes`, and in the conditions of joins."""
        likes = frozenset(one.column[1] for either in self.likes for one in either)
        conditions = (self.condition, *(join.unless for join in self.joins))
        return likes.union(*(columns_of(one) for one in conditions))
