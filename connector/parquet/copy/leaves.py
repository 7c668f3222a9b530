"""Matches the leaf columns of Parquet files by Iceberg field ids, and decides which chunks can be copied.

A leaf column is identified by the field ids on its path. Groups without an id, as in lists, are identified by position.
A chunk can be copied to a file with a different schema under two conditions: each node of the path has the same
repetition, and the leaf column has the same physical and logical type. Its pages then decode to the same values. Names
are not compared, because Iceberg renames columns without rewriting files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from seamark.formats.iceberg.files import thrift
from seamark.formats.iceberg.files.footer import ParquetFooter, read_structures
from seamark.formats.iceberg.files.thrift import Fields

# The field ids of SchemaElement.
_TYPE, _LENGTH, _REPETITION, _NAME, _CHILDREN, _CONVERTED, _SCALE, _PRECISION, _ID, _LOGICAL = range(1, 11)
_REQUIRED, _REPEATED = 0, 2
_INT32, _INT64, _FIXED_LEN_BYTE_ARRAY = 1, 2, 7
_DEPTH_MAX = 64
Logical = tuple[Any, ...]
# ConvertedType → LogicalType as (field id of the union, parameters).
_STRING, _MAP, _LIST, _ENUM, _DECIMAL, _DATE, _TIME, _TIMESTAMP, _INTEGER = 1, 2, 3, 4, 5, 6, 7, 8, 10
_JSON, _BSON = 12, 13
_CONVERTED_DECIMAL = 5
_MILLIS, _MICROS = 1, 2
_CONVERTED_TYPES: dict[int, Logical] = {
    0: (_STRING,),
    1: (_MAP,),
    2: (_MAP,),
    3: (_LIST,),
    4: (_ENUM,),
    6: (_DATE,),
    7: (_TIME, True, _MILLIS),
    8: (_TIME, True, _MICROS),
    9: (_TIMESTAMP, True, _MILLIS),
    10: (_TIMESTAMP, True, _MICROS),
    # UINT_8 to UINT_64, and INT_8 to INT_64.
    **{11 + number: (_INTEGER, 8 << number, False) for number in range(4)},
    **{15 + number: (_INTEGER, 8 << number, True) for number in range(4)},
    19: (_JSON,),
    20: (_BSON,),
}


class Leaf(NamedTuple):
    """A leaf column of a Parquet file.

    Attributes:
        ids: The field ids on the column's path, with None for a node without an id.
        shape: The types and repetitions on the path, which must be equal for a chunk to be copied.
        names: The names on the path in the file.
    """

    ids: tuple[int | None, ...]
    shape: tuple[Any, ...]
    names: tuple[bytes, ...]
    order: bytes
    """The encoded column order, by which the values of statistics are compared."""

    @property
    def is_required(self) -> bool:
        """Whether the outermost node of the column is required. The first item of a node's shape is its repetition."""
        return bool(self.shape[0][0] == _REQUIRED)

    @property
    def path(self) -> str:
        """The name of the column in pyarrow and in Parquet's key tools."""
        return b".".join(self.names).decode(errors="replace")


def list_leaves(footer: ParquetFooter) -> list[Leaf]:
    """Return the leaf columns in the order of the chunks.

    Raises:
        ValueError: The schema is invalid.
    """
    try:
        return _read_leaves(footer)
    except (TypeError, AttributeError, KeyError) as error:  # The fields have an unexpected type.
        raise ValueError(f"the schema is invalid: {error!r}") from None


def _read_leaves(footer: ParquetFooter) -> list[Leaf]:
    """Return the leaf columns of a footer's schema in their order.

    The schema is a list of its nodes in depth-first order. The first node is the root, and each group has the number of
    its children.

    Raises:
        ValueError: The schema is invalid.
    """
    elements = footer.elements
    if not elements:
        raise ValueError("the file has no schema")
    orders = _read_orders(footer)
    leaves: list[Leaf] = []

    def walk(position: int, ids: tuple[int | None, ...], shape: tuple[Any, ...], names: tuple[bytes, ...]) -> int:
        if len(names) > _DEPTH_MAX:
            raise ValueError("the schema is too deep")
        if position >= len(elements):
            raise ValueError("the schema ends within a group")
        element = elements[position]
        ids, names = (*ids, _read_value(element, _ID)), (*names, bytes(_read_value(element, _NAME) or b""))
        shape = (*shape, _read_shape(element))
        children = _read_value(element, _CHILDREN)
        position += 1
        if children is None:
            number = len(leaves)
            order = orders[number] if orders is not None and number < len(orders) else b""
            leaves.append(Leaf(ids, shape, names, order))
            return position
        for _ in range(children):
            position = walk(position, ids, shape, names)
        return position

    position = 1
    for _ in range(_read_value(elements[0], _CHILDREN) or 0):
        position = walk(position, (), (), ())
    if position != len(elements):
        raise ValueError("the schema has elements outside of the root")
    for group in footer.groups:
        if len(group.chunks) != len(leaves):
            raise ValueError(f"a row group has {len(group.chunks)} columns, but the schema has {len(leaves)}")
    return leaves


def _read_orders(footer: ParquetFooter) -> list[bytes] | None:
    if footer.orders is None:
        return None
    return [thrift.write_structure(order) for order in read_structures(footer.orders)]


def _read_value(element: Fields, number: int) -> Any:
    return element.get(number, (0, None))[1]


def _read_shape(element: Fields) -> tuple[Any, ...]:
    """Return the repetition, the physical type, the length and the logical type of a node."""
    physical, repetition = _read_value(element, _TYPE), _read_value(element, _REPETITION)
    logical = _read_logical_type(element)
    if physical is None and (repetition == _REPEATED or _read_value(element, _ID) is None):
        logical = ()  # Writers differ in the annotations of the inner groups of lists and maps.
    length = _read_value(element, _LENGTH) if physical == _FIXED_LEN_BYTE_ARRAY else None
    return repetition, physical, length, logical


def _read_logical_type(element: Fields) -> Logical:
    """Return the logical type of a schema element, in a form that is equal for equal types.

    Returns:
        The number of the type in Parquet's union LogicalType, followed by its parameters. An older converted type
        becomes the equivalent logical type or, if there is none, -1 and its number. The result is empty without a
        type, and for signed integers of the size of their physical type.
    """
    union, converted_type = _read_value(element, _LOGICAL), _read_value(element, _CONVERTED)
    logical: Logical
    if union:
        number, (_, inner) = next(iter(union.items()))
        logical = number, *_read_parameters(number, inner)
    elif converted_type == _CONVERTED_DECIMAL:
        logical = _DECIMAL, _read_value(element, _SCALE) or 0, _read_value(element, _PRECISION) or 0
    elif converted_type is not None:
        logical = _CONVERTED_TYPES.get(converted_type, (-1, converted_type))
    else:
        return ()
    physical = _read_value(element, _TYPE)
    if logical in ((_INTEGER, 32, True), (_INTEGER, 64, True)) and physical in (_INT32, _INT64):
        return ()  # The logical type follows from the physical type.
    return logical


def _read_parameters(number: int, inner: Any) -> tuple[Any, ...]:
    """Return the parameters of a Parquet logical type, such as the scale and the precision of a decimal.

    Args:
        number: The number of the type in the union LogicalType.
        inner: The decoded structure of the type, with pairs (Thrift type, value) by field id.
    """
    if not isinstance(inner, dict):
        return ()
    # The first two fields are scale and precision of a decimal, isAdjustedToUTC and unit of a time, and bitWidth and
    # isSigned of an integer.
    if number == _DECIMAL:
        return _read_value(inner, 1) or 0, _read_value(inner, 2) or 0
    if number in (_TIME, _TIMESTAMP):
        unit = _read_value(inner, 2) or {}
        return inner.get(1, (thrift.FALSE, None))[0] == thrift.TRUE, next(iter(unit), 0)
    if number == _INTEGER:
        return _read_value(inner, 1) or 0, inner.get(2, (thrift.FALSE, None))[0] == thrift.TRUE
    return tuple((key, repr(value)) for key, value in inner.items())


def find_required_columns(leaves: Sequence[Leaf]) -> frozenset[int]:
    """Return the field ids of the required columns that are not structs, lists or maps."""
    return frozenset(
        leaf.ids[0] for leaf in leaves if len(leaf.ids) == 1 and leaf.ids[0] is not None and leaf.is_required
    )


class LeafMatch(NamedTuple):
    """The leaf columns of a file that match the leaf columns of a target.

    Attributes:
        columns: For each leaf column of the target, the index of the matching leaf column of the file, or -1 if the
            file does not have the top-level column.
        reason: The reason why chunks of the file cannot be copied, or "" if they can be copied.
    """

    columns: Sequence[int]
    reason: str = ""


def match_leaves(target: Sequence[Leaf], leaves: Sequence[Leaf]) -> LeafMatch:
    """Match the leaf columns of a file with those of a target by the field ids on their paths.

    Nothing can be copied if an id is missing or repeated, or if a column has another type or structure than the target.
    A column that the file does not have is -1 in the result.
    """
    if repeated_ids := [ids for ids, count in Counter(leaf.ids for leaf in leaves).items() if count > 1]:
        return LeafMatch((), f"the file has several columns with the field ids {repeated_ids[0]}")
    if any(leaf.ids[0] is None for leaf in leaves):
        return LeafMatch((), "the file has columns without field ids")
    positions = {leaf.ids: number for number, leaf in enumerate(leaves)}
    top_ids = {leaf.ids[0] for leaf in leaves}
    columns = []
    for leaf in target:
        position = positions.get(leaf.ids, -1)
        if position < 0:
            if leaf.ids[0] in top_ids:
                return LeafMatch((), f"the column {leaf.names[0].decode(errors='replace')} has a different structure")
        elif leaves[position].shape != leaf.shape or leaves[position].order != leaf.order:
            reason = "has a different type or nullability, or statistics of a different order"
            return LeafMatch((), f"the column {leaf.path} {reason}")
        columns.append(position)
    return LeafMatch(columns)
