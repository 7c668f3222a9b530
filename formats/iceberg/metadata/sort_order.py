"""Sort orders (Iceberg spec: "Sorting"): their JSON structs and compatibility with a schema.

Order id 0 is the unsorted order. All other orders have at least one field.
"""

from __future__ import annotations

import msgspec

from seamark.formats.iceberg.types.reading import Int32
from seamark.formats.iceberg.types.schema import Schema, describe_type, is_primitive
from seamark.formats.iceberg.types.transforms import accepts_type, canonicalize_transform
from seamark.formats.runtime.errors import BadRequest


class SortField(msgspec.Struct, frozen=True, omit_defaults=True, rename="kebab"):
    """A field of a sort order: a transform of a column, with a direction and the order of nulls."""

    transform: str
    direction: str
    null_order: str
    source_id: Int32 | None = None
    source_ids: tuple[Int32, ...] = ()

    @property
    def sources(self) -> tuple[int, ...]:
        return self.source_ids if self.source_id is None else (self.source_id,)

    def describe(self) -> str:
        sources = ", ".join(map(str, self.sources))
        nulls = self.null_order.upper().replace("-", " ")
        return f"{self.transform}({sources}) {self.direction.upper()} {nulls}"


class SortOrder(msgspec.Struct, frozen=True, rename="kebab"):
    order_id: Int32
    fields: tuple[SortField, ...]

    @property
    def column_ids(self) -> frozenset[int]:
        """The columns that decide the order of rows."""
        return frozenset(source for field in self.fields for source in field.sources)


UNSORTED = SortOrder(0, ())


def normalize_order(order: SortOrder) -> SortOrder:
    """Return the client's order in canonical form.

    Raises:
        BadRequest: The order is invalid.
    """
    if not order.fields:
        if order.order_id != 0:
            raise BadRequest("Unsorted order ID must be 0")
        return UNSORTED
    if order.order_id == 0:
        raise BadRequest("Sort order ID 0 is reserved for unsorted order")
    return SortOrder(order.order_id, tuple(_normalize_field(field) for field in order.fields))


def _normalize_field(field: SortField) -> SortField:
    """Return a field in canonical form. Raise BadRequest if it is invalid.

    A single source column is always stored as `source_id`, and several columns as `source_ids`.
    """
    direction, null_order, sources = field.direction.lower(), field.null_order.lower(), field.sources
    if direction not in ("asc", "desc"):
        raise BadRequest(f"Invalid sort direction: {field.direction} (asc or desc)")
    if null_order not in ("nulls-first", "nulls-last"):
        raise BadRequest(f"Unexpected null order: {field.null_order} (nulls-first or nulls-last)")
    if not sources:
        raise BadRequest("Invalid sort field: missing required field `source-id`")
    has_single_source = len(sources) == 1
    return SortField(
        canonicalize_transform(field.transform),
        direction,
        null_order,
        sources[0] if has_single_source else None,
        () if has_single_source else sources,
    )


def check_compatible(order: SortOrder, schema: Schema) -> None:
    """Check that each field can be computed from the schema's columns.

    Raises:
        BadRequest: A field cannot be computed.
    """
    for field in order.fields:
        for source_id in field.sources:
            column = schema.column(source_id)
            if column is None:
                raise BadRequest(f"Cannot find source column for sort field: {field.describe()}")
            if not is_primitive(column.type) or not isinstance(column.type, str):
                raise BadRequest(f"Cannot sort by non-primitive source field: {describe_type(column.type)}")
            if not accepts_type(canonicalize_transform(field.transform), column.type):
                raise BadRequest(f"Invalid source type {column.type} for transform: {field.transform}")
