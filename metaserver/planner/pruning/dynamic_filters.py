"""Dynamic filters, as Trino calls them: conditions from joins that the value of a column is one of many keys.

Dynamic filters are not part of the filter expression. An expression compares, hashes and writes its values one by one,
which is too slow for a hundred thousand keys. A dynamic filter with few keys becomes an `IN` predicate, which
every index kind, transform and statistic supports. A dynamic filter with many keys is evaluated in bulk. All
dynamic filters are conjuncts of the filter. Null is never a key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from seamark.formats.iceberg.expressions.expression import FALSE, TRUE, Bound, Expression, Op, join_by_and
from seamark.formats.iceberg.expressions.projection import project_inclusive
from seamark.formats.iceberg.metadata.partition import PartitionSpec
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.iceberg.types.values import Value
from seamark.formats.index.keys.key_set import KeySet
from seamark.formats.index.keys.keys import has_codes
from seamark.formats.index.packing import Form, decode_value
from seamark.metaserver.planner.pruning.file_pruning import pack_key

PREDICATE_KEYS_MAX = 200
"""The maximum number of keys of a dynamic filter that becomes an `IN` predicate."""
LISTED_MAX = 5_000
"""The maximum number of keys that a condition on partitions lists.

If there are more keys, the condition uses the range of the keys.
"""


@dataclass(frozen=True, eq=False)
class DynamicFilter:
    """A condition that the value of a column is one of many keys.

    Attributes:
        column_id: The field id of the column.
        name: The full name of the column.
        kind: The Iceberg type of the column and of the keys.
        keys: The keys.
    """

    column_id: int
    name: str
    kind: str
    keys: KeySet

    @property
    def text(self) -> str:
        """A text that identifies the filter in cache keys."""
        return f"{self.column_id} {self.keys.digest}"

    @cached_property
    def as_condition(self) -> Expression:
        """A condition that every matching row satisfies.

        The condition lists the keys, or has the range of the keys if there are more than `LISTED_MAX`. If the keys are
        many UUIDs, or include invalid UTF-8, the condition is only that the value is not null.
        """
        try:
            return self._build_condition()
        except UnicodeDecodeError:  # Strings in data files may be invalid UTF-8.
            return self._make_predicate(Op.NOT_NULL)

    def _build_condition(self) -> Expression:
        """Return the condition that the column has one of the keys, or is in their range if there are many keys.

        A range cannot express many UUIDs, so the condition is then only that the value is not null.

        Raises:
            UnicodeDecodeError: A key is a text that is not valid UTF-8.
        """
        if not len(self.keys):
            return FALSE
        if len(self.keys) == 1:
            return self._make_predicate(Op.EQ, self._decode_value(0))
        if len(self.keys) <= LISTED_MAX:
            # Keys are in ascending order, and values of these types have the order of their keys.
            return self._make_predicate(Op.IN, *(self._decode_value(position) for position in range(len(self.keys))))
        if self.kind == "uuid":  # Clients order UUIDs differently.
            return self._make_predicate(Op.NOT_NULL)
        low, high = self._decode_value(0), self._decode_value(len(self.keys) - 1)
        return join_by_and(self._make_predicate(Op.GT_EQ, low), self._make_predicate(Op.LT_EQ, high))

    def project_to_partitions(self, spec: PartitionSpec) -> Expression:
        """Return the condition on partition values that every matching row satisfies."""
        return project_inclusive(self.as_condition, spec) if spec.list_fields_with_source(self.column_id) else TRUE

    def _make_predicate(self, op: Op, *values: Value) -> Bound:
        return Bound(op, self.column_id, self.name, self.kind, IDENTITY, self.kind, values)

    def _decode_value(self, position: int) -> Value:
        """Return the value of a key.

        Raises:
            UnicodeDecodeError: The key is a text that is not valid UTF-8.
        """
        key = self.keys.get_key(position)
        if self.kind == "string":
            assert isinstance(key, bytes)
            return key.decode()
        return decode_value(
            Form.INTEGERS if has_codes(self.kind) else Form.STRINGS, self.kind, pack_key(key, self.kind)
        )


def split_by_size(dynamic_filters: Iterable[DynamicFilter]) -> tuple[Expression, tuple[DynamicFilter, ...]]:
    """Split filters into an expression for filters with few keys, and a tuple of the filters with many keys.

    The result does not depend on the order of the input.
    """
    sorted_filters = sorted(dynamic_filters, key=lambda dynamic_filter: dynamic_filter.text)
    small_filters = [
        dynamic_filter for dynamic_filter in sorted_filters if len(dynamic_filter.keys) <= PREDICATE_KEYS_MAX
    ]
    large_filters = tuple(
        dynamic_filter for dynamic_filter in sorted_filters if len(dynamic_filter.keys) > PREDICATE_KEYS_MAX
    )
    return join_by_and(*(dynamic_filter.as_condition for dynamic_filter in small_filters)), large_filters


def sort_narrowest_first(dynamic_filters: Sequence[DynamicFilter]) -> tuple[DynamicFilter, ...]:
    """Return the filters in ascending order of their numbers of keys."""
    return tuple(sorted(dynamic_filters, key=lambda dynamic_filter: len(dynamic_filter.keys)))
