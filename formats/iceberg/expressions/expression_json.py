"""Conversion of expressions from and to JSON (Iceberg REST spec, schema `Predicate`).

The parser accepts all forms that clients use or may use: constants as booleans and as objects; operands as `term` (Java
and PyIceberg) and as `child`, `left` and `right` (which the spec now prefers); literals with and without an object
around them. The encoder writes the form that both Java's `ExpressionParser` and PyIceberg 0.12 can read: constants
without an object, `term`, `value`, `values`, binary junctions, and values of bound predicates as single-value JSON.

The number of nodes and the depth are limited. A chain of equal junctions, such as a thousand ORs of an engine, counts
as one level, because a loop parses it into one node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from seamark.formats.iceberg.expressions.expression import (
    FALSE,
    TRUE,
    Always,
    And,
    Bound,
    Expression,
    Not,
    Op,
    Or,
    Unbound,
    join_by_and,
    join_by_or,
)
from seamark.formats.iceberg.expressions.typed_literals import TypedLiteral, parse_typed_literal
from seamark.formats.iceberg.types.functions import is_function
from seamark.formats.iceberg.types.transforms import IDENTITY, canonicalize_transform
from seamark.formats.iceberg.types.values import encode_json
from seamark.formats.runtime.errors import BadRequest

DEPTH_MAX = 100
"""The default maximum number of nesting levels. A level takes three stack frames, in this module and in binding."""
NODES_MAX = 200_000
"""The default maximum number of predicates, junctions and values in an expression."""

NO_NULL = "null is not a literal; use is-null or not-null, and finite numbers"
UNARY = frozenset({Op.IS_NULL, Op.NOT_NULL, Op.IS_NAN, Op.NOT_NAN})
SETS = frozenset({Op.IN, Op.NOT_IN})

_LITERAL_FIELDS = ("value", "values", "right")
_PATH_CHARS_MAX, _SHOWN_CHARS_MAX = 200, 60
"""The maximum number of characters of a path, and of a part of the JSON, in an error."""
_OPS = {op.value: op for op in Op}

_Path: TypeAlias = tuple[Any, str]
"""A position in the tree: the path of the parent, or None, and the step from the parent. It becomes text only in
errors.
"""


def parse_expression(
    json: object,
    *,
    depth_max: int = DEPTH_MAX,
    nodes_max: int = NODES_MAX,
    typed: bool = False,
    unknown: bool = False,
    functions: bool = False,
) -> Expression:
    """Parse an expression, and fold constants in its junctions. The result is unbound.

    Args:
        json: The decoded JSON.
        depth_max: The maximum number of nesting levels.
        nodes_max: The maximum number of predicates, junctions and values.
        typed: Whether literals with a `data-type` become a `TypedLiteral` (`comparisons.resolve_literals`). If False,
            the type of the column is used instead.
        unknown: Whether null is accepted as a literal with an unknown value, because PyIceberg writes null for both
            infinities. Set it only for filters that may match more rows.
        functions: Whether terms can be functions of columns (`types/functions.py`), in the form of transforms. Set it
            only for filters that select files.

    Raises:
        BadRequest: The expression is invalid. The message states the position of the error.
    """
    return _Parser(depth_max, nodes_max, typed, unknown, functions).parse_expression(json, (None, "filter"), 0)


class _Parser:
    """The parser of an expression, which counts its nodes."""

    def __init__(
        self, depth_max: int, nodes_max: int, uses_data_types: bool, allows_null: bool, allows_functions: bool
    ) -> None:
        self._depth_max = depth_max
        self._nodes_max = nodes_max
        self._uses_data_types = uses_data_types
        self._allows_null = allows_null
        self._allows_functions = allows_functions
        self._node_count = 0

    def parse_expression(self, json: object, path: _Path, depth: int) -> Expression:
        self._count_nodes(1)
        if depth > self._depth_max:
            raise BadRequest(f"Invalid expression: it is nested deeper than {self._depth_max} levels")
        if not isinstance(json, dict):
            if isinstance(json, bool):
                return Always(json)
            raise _make_error(path, f"expected an object or a boolean, not {_show_json(json)}")
        kind = _read_kind(json, path)
        op = _OPS.get(kind)
        if op is not None:
            return self._parse_predicate(op, json, path)
        match kind:
            case "and" | "or":
                return self._parse_junction(json, kind, path, depth)
            case "not":
                return Not(self.parse_expression(_require_field(json, "child", path), (path, ".child"), depth + 1))
            case "true" | "false":
                return TRUE if kind == "true" else FALSE
            case "literal" if isinstance(json.get("value"), bool):
                return Always(json["value"])
        raise _make_error(path, f"unknown type of expression: {kind!r}")

    def _parse_junction(self, json: dict[str, object], kind: str, path: _Path, depth: int) -> Expression:
        """Parse a junction, and nested junctions of the same kind, as one junction.

        Clients write a long AND as a deep chain of pairs. The loop parses the chain without recursion.

        Args:
            json: The object of the outer junction.
            kind: "and" or "or".
            path: The position of the object, for errors.
            depth: The nesting level of the object.
        """
        children: list[Expression] = []
        # Nodes are parsed from left to right. The stack contains the nodes that are not parsed yet, with the next node
        # on top.
        todo: list[tuple[object, _Path]] = [(json, path)]
        while todo:
            node, node_path = todo.pop()
            if isinstance(node, dict) and "type" in node and _read_kind(node, node_path) == kind:
                self._count_nodes(1)
                todo.append((_require_field(node, "right", node_path), (node_path, _RIGHT)))
                todo.append((_require_field(node, "left", node_path), (node_path, _LEFT)))
            else:
                children.append(self.parse_expression(node, node_path, depth + 1))
        return join_by_and(*children) if kind == "and" else join_by_or(*children)

    def _parse_predicate(self, op: Op, json: dict[str, object], path: _Path) -> Unbound:
        is_unary, has_values = op in UNARY, op in SETS
        term_field = "term"
        if "term" not in json:
            term_field = "child" if is_unary or has_values else "left"
            if term_field not in json and (is_unary or has_values or "right" not in json):
                raise _make_error(path, f"{op} needs a term")
        term = _require_field(json, term_field, path)
        name, transform = (term, IDENTITY) if isinstance(term, str) else _read_term(term, (path, f".{term_field}"))
        if is_function(transform) and not self._allows_functions:
            raise BadRequest(f"Cannot bind {name}: unknown transform {transform}")
        literal_field = None if is_unary else "values" if has_values else "value" if term_field == "term" else "right"
        for field in _LITERAL_FIELDS:
            if field in json and field != literal_field:
                raise _make_error(path, f"{op} has no field {field!r}")
        if literal_field is None:
            return Unbound(op, name, transform, ())
        value = _require_field(json, literal_field, path)
        if has_values:
            return Unbound(op, name, transform, self._parse_values(value, (path, ".values")))
        self._count_nodes(1)
        return Unbound(op, name, transform, (self._parse_literal(value, (path, f".{literal_field}")),))

    def _parse_values(self, json: object, path: _Path) -> tuple[object, ...]:
        data_type = None
        if isinstance(json, dict) and json.get("type") == "literals":
            data_type = json.get("data-type")
            json, path = json.get("values"), (path, ".values")
        if not isinstance(json, list | tuple):
            raise _make_error(path, f"expected an array, not {_show_json(json)}")
        self._count_nodes(len(json))
        return tuple([self._parse_literal(value, (path, f"[{index}]"), data_type) for index, value in enumerate(json)])

    def _parse_literal(self, json: object, path: _Path, data_type: object = None) -> object:
        """Return the value of a literal: a JSON value, or a `TypedLiteral` if its type is known and used.

        Args:
            json: The literal: a plain value, or an object with `value` and perhaps `data-type`.
            path: The position of the literal in the expression, for errors.
            data_type: The name of the literal's type, or None if it is unknown.

        Raises:
            BadRequest: This is not a literal, or it is null and null is not allowed.
        """
        if data_type is None and isinstance(json, (str, int, float)):  # A bool is also an int.
            return json
        if isinstance(json, dict) and json.get("type") == "literal":
            data_type = json.get("data-type", data_type)
            json, path = json.get("value"), (path, ".value")
        if json is None:
            if self._allows_null and data_type is None:
                return None
            raise _make_error(path, NO_NULL)
        if not isinstance(json, (str, int, float)):
            raise _make_error(path, f"expected a literal, not {_show_json(json)}")
        if data_type is None or not self._uses_data_types:
            return json
        if not isinstance(data_type, str):
            raise _make_error(path, f"expected the name of a type, not {_show_json(data_type)}")
        try:
            return parse_typed_literal(data_type, json if isinstance(json, str) else str(json).lower())
        except ValueError as error:
            raise _make_error(path, str(error)) from None

    def _count_nodes(self, nodes: int) -> None:
        """Add to the number of nodes. Raise BadRequest if it exceeds the maximum."""
        self._node_count += nodes
        if self._node_count > self._nodes_max:
            raise BadRequest(f"Invalid expression: it has more than {self._nodes_max} predicates, junctions and values")


_LEFT, _RIGHT = ".left", ".right"


def _render_path(path: _Path) -> str:
    steps = []
    position: _Path | None = path
    while position is not None:
        position, step = position
        steps.append(step)
    text = ""
    for step in reversed(steps):
        # Show only the first links of a chain, because its path grows with every link.
        is_omitted = len(text) >= _PATH_CHARS_MAX and step in (_LEFT, _RIGHT)
        text = f"{text.removesuffix('…')}…" if is_omitted else text + step
    return text


def _read_kind(json: dict[str, object], path: _Path) -> str:
    """Return the `type` of an object: an operator unchanged, and other types in lower case with hyphens.

    A missing type, or a type that is no text, raises the error of `_read_text`.
    """
    kind = json.get("type")
    if isinstance(kind, str):
        return kind if kind in _OPS else kind.lower().replace("_", "-")
    return _read_text(json, "type", path)


def _read_term(json: object, path: _Path) -> tuple[str, str]:
    """Return the name of a term's column, and the term's transform.

    A term is the name of a column, a reference to a column, or a transform of such a term. Some clients write the name
    of a reference into the field `name`, and others into the field `term`.
    """
    if isinstance(json, str):
        return json, IDENTITY
    if not isinstance(json, dict):
        raise _make_error(path, f"expected a column's name or an object, not {_show_json(json)}")
    kind = _read_kind(json, path)
    if kind == "reference":
        field = "name" if "name" in json else "term"
        return _read_text(json, field, path), IDENTITY
    if kind != "transform":
        raise _make_error(path, f"expected a reference or a transform, not {kind!r}")
    inner = _require_field(json, "term", path)
    if isinstance(inner, dict) and _read_kind(inner, (path, ".term")) != "reference":
        raise _make_error((path, ".term"), "expected a column; a transform of anything else is not supported")
    return _read_term(inner, (path, ".term"))[0], canonicalize_transform(_read_text(json, "transform", path))


def _read_text(json: dict[str, object], field: str, path: _Path) -> str:
    value = _require_field(json, field, path)
    if not isinstance(value, str):
        raise _make_error((path, f".{field}"), f"expected a name, not {_show_json(value)}")
    return value


def _require_field(json: dict[str, object], field: str, path: _Path) -> object:
    if field not in json:
        raise _make_error(path, f"missing field {field!r}")
    return json[field]


def _make_error(path: _Path, reason: str) -> BadRequest:
    return BadRequest(f"Invalid expression at {_render_path(path)}: {reason}")


def _show_json(json: object) -> str:
    text = repr(json)
    return text if len(text) <= _SHOWN_CHARS_MAX else text[:_SHOWN_CHARS_MAX] + "…"


def encode_expression(expression: Expression) -> Any:
    """Encode an unbound or bound expression as JSON.

    A junction of many children becomes a balanced binary tree, so that the JSON is not deeply nested.
    """
    match expression:
        case Bound(op, _, name, _, transform, result, values):
            return _encode_predicate(op, name, transform, [encode_json(result, value) for value in values])
        case And(children):
            return _nest_in_pairs("and", children)
        case Or(children):
            return _nest_in_pairs("or", children)
        case Always(value):
            return value
        case Not(child):
            return {"type": "not", "child": encode_expression(child)}
        case Unbound(op, name, transform, literals):
            return _encode_predicate(op, name, transform, list(literals))


def to_transform_json(expression: Expression) -> Any:
    """Encode a bound expression as JSON in which each term is a transform.

    A column becomes its identity transform, which does not change the meaning. Java's readers skip row groups by
    predicates on columns, but not by predicates on transforms (`ParquetMetricsRowGroupFilter.handleNonReference`). So
    clients that receive this form read whole files. Clients that rewrite files need all rows of a file.
    """
    match expression:
        case Bound(name=name, transform=transform):
            term = {"type": "transform", "transform": transform, "term": name}
            return {**encode_expression(expression), "term": term}
        case And(children):
            return _nest_in_pairs("and", children, to_transform_json)
        case Or(children):
            return _nest_in_pairs("or", children, to_transform_json)
    return encode_expression(expression)


def _nest_in_pairs(
    kind: str, children: tuple[Expression, ...], encode: Callable[[Expression], Any] = encode_expression
) -> Any:
    """Return the JSON of a junction as a balanced binary tree, because a junction in JSON has two children.

    Args:
        kind: "and" or "or".
        children: The children of the junction.
        encode: The function that encodes a child.
    """
    if len(children) == 1:
        return encode(children[0])
    middle = len(children) // 2
    left, right = _nest_in_pairs(kind, children[:middle], encode), _nest_in_pairs(kind, children[middle:], encode)
    return {"type": kind, "left": left, "right": right}


def _encode_predicate(op: Op, name: str, transform: str, values: list[object]) -> Any:
    term: object = name if transform == IDENTITY else {"type": "transform", "transform": transform, "term": name}
    json_object: dict[str, object] = {"type": op.value, "term": term}
    if op in SETS:
        json_object["values"] = _encode_values(values)
    elif op not in UNARY:
        json_object["value"] = _encode_literal(values[0])
    return json_object


def _encode_values(values: list[object]) -> object:
    data_types = {value.data_type if isinstance(value, TypedLiteral) else None for value in values}
    if data_types == {None}:
        return values
    if len(data_types) > 1:
        return [_encode_literal(value) for value in values]
    texts = [value.text for value in values if isinstance(value, TypedLiteral)]
    return {"type": "literals", "data-type": data_types.pop(), "values": texts}


def _encode_literal(value: object) -> object:
    if isinstance(value, TypedLiteral):
        return {"type": "literal", "data-type": value.data_type, "value": value.text}
    return value
