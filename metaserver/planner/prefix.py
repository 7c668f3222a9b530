"""Partition prefixes: some fields of a partition and their values, as a client names them.

Two spellings. A path, as Iceberg lays out data files: `day=2024-01-01/bucket=3`, names and values percent-encoded;
years, months and hours read `2024`, `2024-01` and `2024-01-01-05`, bytes are base64 and `null` is null. Or a JSON
object of values as our answers have them: `{"day": "2024-01-01", "bucket": 3}`. Any fields in any order; they all have
to agree.

A field is known by its name in any partition spec of the table, and is the same field in every spec that has its id, so
that a prefix reaches over the evolution of specs. Files of a spec without one of the fields are in no such partition.

The rule it keeps: a prefix selects the files of its partitions and no others. Pruning keeps what it cannot compare;
here such blocks are looked at row by row.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt

from metaserver.errors import BadRequest
from metaserver.iceberg.expressions import FALSE, Bound, Expression, Op, Value, all_of
from metaserver.iceberg.literals import Above, Below, Between, parse_literal
from metaserver.iceberg.metadata import TableMetadata
from metaserver.iceberg.partition import PartitionField, PartitionSpec
from metaserver.iceberg.transforms import UNITS_PER_DAY, canonical, name_of, result_type
from metaserver.iceberg.types import base_name, canonical_primitive
from metaserver.iceberg.values import parse_iso_date
from metaserver.index.block import Block
from metaserver.index.packing import Form, key_of
from metaserver.planner.prune import Selection, narrow_by_partition
from metaserver.planner.view import TableView
from metaserver.wire import decode_json

TEXT_MAX = 10_000
_NULLS = ("null", "__HIVE_DEFAULT_PARTITION__")
_ORDINAL = {
    "year": re.compile(r"([+-]?\d{1,6})"),
    "month": re.compile(r"([+-]?\d{1,6})-(\d\d)"),
    "hour": re.compile(r"([+-]?\d{1,6}-\d\d-\d\d)-(\d\d)"),
}


@dataclass(frozen=True, slots=True)
class _Raw:
    """A value as it came. `path`: out of a path, in the spelling of file locations."""

    value: object
    path: bool


@dataclass(frozen=True)
class Prefix:
    """`by_spec`: what it demands of the partition values of each spec; None for the empty prefix."""

    by_spec: Mapping[int, Expression] | None = None

    def select(self, view: TableView) -> Selection:
        """The data files of the view that lie in these partitions."""
        selection = Selection.everything(view)
        if self.by_spec is None:
            return selection
        if self._select_whole_blocks(selection):
            return selection
        narrow_by_partition(selection, self.by_spec, lambda: False)
        for spec_id, expression in self.by_spec.items():
            demands = _leaves(expression)
            for demand in demands:
                kept = (selection.state != 0) & ~view.partition(demand.column_id, demand.kind).known
                for number in np.flatnonzero(kept & (view.spec_ids == spec_id)).tolist() if kept.any() else ():
                    block = view.blocks[number]
                    agreeing = [_agrees(block, row, demands) for row in range(block.rows)]
                    selection.keep(number, np.array(agreeing, dtype=np.bool_))
        return selection

    def _select_whole_blocks(self, selection: Selection) -> bool:
        """Decides by the blocks' summaries alone, where each block has one value: manifests written by partition.

        That is the common case, and several times as fast as asking the kernels. False where it is another case; then
        the selection is as it was.
        """
        assert self.by_spec is not None
        view = selection.view
        state: npt.NDArray[np.bool_] = np.zeros(len(view.blocks), dtype=np.bool_)
        for spec_id, expression in self.by_spec.items():
            if expression == FALSE:
                continue
            chosen: npt.NDArray[np.bool_] = view.spec_ids == spec_id
            for demand in _leaves(expression):
                column = view.partition(demand.column_id, demand.kind)
                if demand.op is not Op.EQ or len(column.sides) != 1 or column.sides[0].form is not Form.INTEGERS:
                    return False
                if not column.known[chosen].all():
                    return False
                side, key = column.sides[0], key_of(Form.INTEGERS, demand.kind, demand.values[0])
                chosen &= (side.low <= key) & (side.high >= key)
                # A summary that a null leaves open is no value.
                if not ((side.low == side.high) & (column.nulls == 0))[chosen].all():
                    return False
            state |= chosen
        selection.state[:] = state
        return True


EVERYTHING = Prefix()


def parse_prefix(text: str, metadata: TableMetadata) -> Prefix:
    """BadRequest for a field that no spec has, a value that is none of its field's, and for what is no prefix."""
    wanted = _parsed(text)
    if not wanted:
        return EVERYTHING
    known = {field.name for spec in metadata.partition_specs for field in spec.fields}
    for name in wanted:
        if name not in known:
            there = f"the table's partition fields are {', '.join(sorted(known))}" if known else "the table has none"
            raise BadRequest(f"partition names {name[:100]!r}, which is no partition field: {there}")
    return Prefix(_demands(metadata, wanted))


def _parsed(text: str) -> dict[str, _Raw]:
    if len(text) > TEXT_MAX:
        raise BadRequest(f"partition has {len(text)} characters; at most {TEXT_MAX} are allowed")
    if text.startswith("{"):
        given = decode_json(text.encode("utf-8", "surrogatepass"), "partition")
        return {name: _Raw(value, path=False) for name, value in given.items()}
    found: dict[str, _Raw] = {}
    for part in text.strip("/").split("/") if text.strip("/") else ():
        name, equals, value = part.partition("=")
        name = unquote(name)
        if not equals or not name:
            raise BadRequest(f"partition has {part[:100]!r} where name=value belongs, as in day=2024-01-01/bucket=3")
        if name in found:
            raise BadRequest(f"partition names {name[:100]!r} twice")
        found[name] = _Raw(unquote(value.replace("+", "%2B")), path=True)
    return found


def _demands(metadata: TableMetadata, wanted: dict[str, _Raw]) -> dict[int, Expression]:
    by_spec: dict[int, Expression] = {spec.spec_id: FALSE for spec in metadata.partition_specs}
    problems: dict[str, str] = {}
    read: set[str] = set()
    for spec in metadata.partition_specs:
        demands: list[Expression] = []
        for name, raw in wanted.items():
            field = _field(metadata, spec, name)
            if field is None:
                demands.append(FALSE)
                continue
            try:
                demands.append(_demand(metadata, field, raw))
                read.add(name)
            except ValueError as error:
                problems[name] = str(error)
                demands.append(FALSE)
        by_spec[spec.spec_id] = all_of(*demands)
    for name, problem in problems.items():
        if name not in read:
            raise BadRequest(f"partition field {name}: {problem}")
    return by_spec


def _field(metadata: TableMetadata, spec: PartitionSpec, name: str) -> PartitionField | None:
    """The spec's field of that name, else the one that has the name in another spec."""
    for field in spec.fields:
        if field.name == name:
            return field
    ids = {field.field_id for other in metadata.partition_specs for field in other.fields if field.name == name}
    return next((field for field in spec.fields if field.field_id in ids), None)


def field_kind(metadata: TableMetadata, field: PartitionField) -> str | None:
    """The type of a partition field's values now; None where no schema tells it."""
    if len(field.sources) != 1:
        return None
    source = field.sources[0]
    column = metadata.current_schema.column(source)
    if column is None:
        newest_first = sorted(metadata.schemas, key=lambda schema: schema.id, reverse=True)
        column = next((found for schema in newest_first if (found := schema.column(source)) is not None), None)
    if column is None or not isinstance(column.type, str):
        return None
    return _result_type(field.transform, column.type)


@lru_cache(maxsize=1024)
def _result_type(transform: str, kind: str) -> str:
    return result_type(canonical(transform), canonical_primitive(kind))


def _demand(metadata: TableMetadata, field: PartitionField, raw: _Raw) -> Expression:
    kind = field_kind(metadata, field)
    assert field.field_id is not None  # metadata that is read has been numbered
    if kind is None:
        raise ValueError("its values are of no known type")

    def predicate(op: Op, *values: Value) -> Bound:
        return Bound(op, field.field_id or 0, field.name, kind, "identity", kind, values)

    if raw.value is None or (raw.path and raw.value in _NULLS):
        return predicate(Op.IS_NULL)
    value = _value(name_of(canonical(field.transform)), kind, raw)
    if value is None:
        return FALSE
    if isinstance(value, float) and math.isnan(value):
        return predicate(Op.IS_NAN)
    return predicate(Op.EQ, value)


def _value(transform: str, kind: str, raw: _Raw) -> Value | None:
    """None for a value that none of this type equals. ValueError for what is no value."""
    given = raw.value
    if isinstance(given, str) and transform in _ORDINAL:
        return _ordinal(transform, given)
    if not isinstance(given, bool | int | float | str):
        raise ValueError(f"{str(given)[:100]!r} is no value of type {kind}")
    if isinstance(given, str) and base_name(kind) in ("float", "double") and given.lower().lstrip("+-") in _FLOATS:
        return float(given)
    if raw.path and base_name(kind) in ("binary", "fixed"):
        try:
            return base64.b64decode(str(given), validate=True)
        except binascii.Error:
            raise ValueError(f"{str(given)[:100]!r} is not base64, as bytes are in paths") from None
    try:
        literal = parse_literal(kind, given)
    except BadRequest as error:
        raise ValueError(error.message) from None
    return None if isinstance(literal, Above | Below | Between) else literal


_FLOATS = ("nan", "infinity")


def _ordinal(transform: str, text: str) -> int:
    """Years, months or hours since 1970 (spec, "Partition Transforms") of what Iceberg writes for them."""
    match = _ORDINAL[transform].fullmatch(text)
    example = {"year": "2024", "month": "2024-01", "hour": "2024-01-01-05"}[transform]
    if match is None:
        raise ValueError(f"{text[:100]!r} is no {transform} like {example}")
    if transform == "year":
        return int(match[1]) - 1970
    if transform == "month":
        if not 1 <= int(match[2]) <= 12:
            raise ValueError(f"{text!r} is no month like {example}")
        return (int(match[1]) - 1970) * 12 + int(match[2]) - 1
    if int(match[2]) > 23:
        raise ValueError(f"{text!r} is no hour like {example}")
    return parse_iso_date(match[1]) * 24 + int(match[2])


def _leaves(expression: Expression) -> tuple[Bound, ...]:
    children = getattr(expression, "children", (expression,))
    return tuple(child for child in children if isinstance(child, Bound))


def _agrees(block: Block, row: int, demands: tuple[Bound, ...]) -> bool:
    """As the kernels decide it, of one row, where they cannot: a field that the block lacks, or a date of a time."""
    stored = dict(zip(block.partition_fields, block.partition(row), strict=True))
    values: dict[int, tuple[str, Any]] = {field_id: (kind, value) for (field_id, kind), value in stored.items()}
    for demand in demands:
        kind, value = values.get(demand.column_id, (demand.kind, None))
        if demand.op is Op.IS_NULL:
            agrees = value is None
        elif demand.op is Op.IS_NAN:
            agrees = isinstance(value, float) and math.isnan(value)
        else:
            if kind == "date" and value is not None and demand.kind in UNITS_PER_DAY:
                value *= UNITS_PER_DAY[demand.kind]
            agrees = value is not None and value == demand.values[0]
        if not agrees:
            return False
    return True
