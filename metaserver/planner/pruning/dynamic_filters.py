"""What a join demands of a column: that its value is one of these keys. Beside the filter, not in it: a hundred
thousand values would be written out, hashed and compared value by value wherever a filter is.

The rule it keeps: few keys are a predicate like any other (`IN`), for which every kind of index, transform and
statistic is of use; of many, what is asked is asked in bulk. All are conjuncts of the filter, and null is none of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from metaserver.iceberg.expressions.expression import FALSE, TRUE, Bound, Expression, Op, all_of
from metaserver.iceberg.expressions.projection import inclusive
from metaserver.iceberg.metadata.partition import PartitionSpec
from metaserver.iceberg.types.transforms import IDENTITY
from metaserver.iceberg.types.values import Value
from metaserver.index.blocks.packing import Form, value_of
from metaserver.index.keys.key_set import KeySet
from metaserver.index.keys.keys import has_codes
from metaserver.planner.pruning.file_pruning import packed_key

FEW = 200
"""So many keys are a predicate."""
LISTED_MAX = 5_000
"""So many are listed for partitions; of more, the range that they span."""


@dataclass(frozen=True, eq=False)
class DynamicFilter:
    """`keys` are of type `kind`, the column's. `name` is the column's full name."""

    column_id: int
    name: str
    kind: str
    keys: KeySet

    @property
    def text(self) -> str:
        """By which it is told from others."""
        return f"{self.column_id} {self.keys.digest}"

    @cached_property
    def spanned(self) -> Expression:
        """What every row that matches satisfies: the keys themselves, or where they are very many, their range."""
        try:
            return self._spanned()
        except UnicodeDecodeError:  # nobody checks that what is in a file as text is text
            return self._predicate(Op.NOT_NULL)

    def _spanned(self) -> Expression:
        if not len(self.keys):
            return FALSE
        if len(self.keys) == 1:
            return self._predicate(Op.EQ, self._value(0))
        if len(self.keys) <= LISTED_MAX:
            # Ascending, as keys are: values of these types have the order of their keys.
            return self._predicate(Op.IN, *(self._value(place) for place in range(len(self.keys))))
        if self.kind == "uuid":  # whose order is not the same for everybody
            return self._predicate(Op.NOT_NULL)
        low, high = self._value(0), self._value(len(self.keys) - 1)
        return all_of(self._predicate(Op.GT_EQ, low), self._predicate(Op.LT_EQ, high))

    def in_partitions(self, spec: PartitionSpec) -> Expression:
        """What the partition of every row that matches satisfies."""
        return inclusive(self.spanned, spec) if spec.fields_of(self.column_id) else TRUE

    def _predicate(self, op: Op, *values: Value) -> Bound:
        return Bound(op, self.column_id, self.name, self.kind, IDENTITY, self.kind, values)

    def _value(self, place: int) -> Value:
        key = self.keys.at(place)
        if self.kind == "string":
            assert isinstance(key, bytes)
            return key.decode()
        return value_of(Form.INTEGERS if has_codes(self.kind) else Form.STRINGS, self.kind, packed_key(key, self.kind))


def parted(dynamic_filters: Iterable[DynamicFilter]) -> tuple[Expression, tuple[DynamicFilter, ...]]:
    """(those with few keys as an expression, the others), both in an order that does not depend on the one given."""
    ordered = sorted(dynamic_filters, key=lambda one: one.text)
    few = [one.spanned for one in ordered if len(one.keys) <= FEW]
    return all_of(*few), tuple(one for one in ordered if len(one.keys) > FEW)


def narrowest_first(dynamic_filters: Sequence[DynamicFilter]) -> tuple[DynamicFilter, ...]:
    """Those with the fewest keys first."""
    return tuple(sorted(dynamic_filters, key=lambda one: len(one.keys)))
