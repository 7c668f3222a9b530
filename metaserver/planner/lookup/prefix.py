"""Partition prefixes: some fields of a partition and their values, as a client names them.

Two spellings. A path, as Iceberg lays out data files: `day=2024-01-01/bucket=3`, names and values percent-encoded;
years, months and hours read `2024`, `2024-01` and `2024-01-01-05`, bytes are base64 and `null` is null. Or a JSON
object of values as our answers have them: `{"day": "2024-01-01", "bucket": 3}`. Any fields in any order; they all have
to agree.

A field is known by its name in any partition spec of the table, and is the same field in every spec that has its id, so
that a prefix reaches over the evolution of specs. Files of a spec without one of the fields are in no such partition.

The rule it keeps: a prefix selects the files of its partitions and no others. Pruning keeps what it cannot compare;
here such blocks are looked at row by row.

What is kept: of tables how their fields are read and some prefixes that were, of views which blocks hold which value.
No answer is: a prefix that was never asked before takes 10 µs longer than one that was.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import unquote
from weakref import WeakKeyDictionary

import numpy as np

from metaserver.errors import BadRequest
from metaserver.iceberg.expressions.expression import FALSE, Bound, Expression, Op, all_of
from metaserver.iceberg.expressions.literals import Above, Below, Between, parse_literal
from metaserver.iceberg.metadata.metadata import TableMetadata
from metaserver.iceberg.metadata.partition import PartitionField, PartitionSpec
from metaserver.iceberg.types.schema import Schema
from metaserver.iceberg.types.transforms import UNITS_PER_DAY, canonical, name_of, result_type
from metaserver.iceberg.types.types import base_name, canonical_primitive
from metaserver.iceberg.types.values import Value, decimal_scale, parse_iso_date
from metaserver.index.blocks.block import Block
from metaserver.index.blocks.packing import NONE, Form, Longs, key_of
from metaserver.planner.pruning.file_pruning import narrow_by_partition
from metaserver.planner.view.selection import Selection
from metaserver.planner.view.view import TableView
from metaserver.wire import decode_json

TEXT_MAX = 10_000
_NULLS = ("null", "__HIVE_DEFAULT_PARTITION__")
_ORDINAL = {
    "year": re.compile(r"([+-]?\d{1,6})"),
    "month": re.compile(r"([+-]?\d{1,6})-(\d\d)"),
    "hour": re.compile(r"([+-]?\d{1,6}-\d\d-\d\d)-(\d\d)"),
}


class _Raw(NamedTuple):
    """A value as it came. `path`: out of a path, in the spelling of file locations."""

    value: object
    path: bool


@dataclass(frozen=True)
class Prefix:
    """`by_spec`: what it demands of the partition values of each spec; None for the empty prefix."""

    by_spec: Mapping[int, Expression] | None = None

    def whole_blocks(self, view: TableView) -> Longs | None:
        """int64[n], ascending: the blocks whose files are all in these partitions, where no other block has any.

        That is so where each block has one value: manifests written by partition, the common case. It is looked up, and
        no kernel is asked. None where it is not so, or not known.
        """
        if self.by_spec is None:
            return np.flatnonzero(view.extents[:, 4])
        found: list[Longs] = []
        for spec_id, expression in self.by_spec.items():
            if expression == FALSE:
                continue
            agreeing: Longs | None = None
            for demand in _leaves(expression):
                numbers = _values_of(view, spec_id, demand).blocks_with(demand)
                if numbers is None:
                    return None
                agreeing = numbers if agreeing is None else np.intersect1d(agreeing, numbers, assume_unique=True)
            if agreeing is not None and len(agreeing):
                found.append(agreeing)
        return found[0] if len(found) == 1 else np.sort(np.concatenate(found)) if found else _NO_BLOCKS

    def select(self, view: TableView) -> Selection:
        """The data files of the view that lie in these partitions, whatever its blocks hold."""
        selection = Selection.everything(view)
        if self.by_spec is None:
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


class _BlockValues:
    """A partition field in the blocks of one spec: which of them hold one value only, and what that is.

    `complete` is False where that cannot be told of every block: floats, and types that have to be converted.
    """

    def __init__(self, view: TableView, spec_id: int, field_id: int, kind: str) -> None:
        column = view.partition(field_id, kind)
        mine = [number for number in np.flatnonzero(view.spec_ids == spec_id).tolist() if view.blocks[number].rows]
        self.complete = bool(column.known[mine].all()) and all(side.form is not Form.FLOATS for side in column.sides)
        self.some_null = any(column.nulls[number] == 2 for number in mine)
        by_key: dict[_Key, list[int]] = {}
        mixed: list[int] = []
        for number in mine:
            packed = column.packed[number]
            if packed is None:
                by_key.setdefault(None, []).append(number)
            elif packed.width == 0 and packed.presence == NONE:
                by_key.setdefault(packed.common if packed.form == Form.STRINGS else packed.base, []).append(number)
            else:
                mixed.append(number)
        self._by_key = {key: np.array(numbers, dtype=np.int64) for key, numbers in by_key.items()}
        self._mixed = []
        for side in column.sides:
            of_side = [number for number in mixed if side.packed[number] is not None]
            if of_side:
                self._mixed.append((side.form, side.low[of_side], side.high[of_side]))
        self._forms = [side.form for side in column.sides]

    def blocks_with(self, demand: Bound) -> Longs | None:
        """int64[n], ascending; None where some block may hold other values beside the one that is asked for."""
        if not self.complete:
            return None
        if demand.op is Op.IS_NULL:
            return None if self.some_null else self._by_key.get(None, _NO_BLOCKS)
        if demand.op is not Op.EQ:
            return None
        for form, low, high in self._mixed:
            key = key_of(form, demand.kind, demand.values[0])
            place = np.uint64(int.from_bytes(key[:8].ljust(8, b"\0"), "big")) if isinstance(key, bytes) else key
            if ((low <= place) & (high >= place)).any():
                return None
        found = _NO_BLOCKS
        for form in self._forms:
            numbers = self._by_key.get(key_of(form, demand.kind, demand.values[0]), _NO_BLOCKS)
            found = numbers if not len(found) else np.sort(np.concatenate([found, numbers]))
        return found


_NO_BLOCKS: Longs = np.empty(0, dtype=np.int64)
_Key = int | float | bytes | None
_known_values: WeakKeyDictionary[TableView, dict[tuple[int, int, str], _BlockValues]] = WeakKeyDictionary()
"""By spec, partition field and type: no more of them than the table's specs have fields."""


def _values_of(view: TableView, spec_id: int, demand: Bound) -> _BlockValues:
    of_view = _known_values.get(view)
    if of_view is None:
        of_view = _known_values[view] = {}
    key = (spec_id, demand.column_id, demand.kind)
    found = of_view.get(key)
    if found is None:
        found = of_view[key] = _BlockValues(view, *key)
    return found


EVERYTHING = Prefix()


def parse_prefix(text: str, metadata: TableMetadata) -> Prefix:
    """BadRequest for a field that no spec has, a value that is none of its field's, and for what is no prefix."""
    kept = _kept_of(metadata)
    known = kept.prefixes.get(text)
    if known is not None:
        return known
    wanted = _parsed(text)
    if not wanted:
        return EVERYTHING
    fields = kept.fields
    for name in wanted:
        if name not in fields:
            there = f"the table's partition fields are {', '.join(sorted(fields))}" if fields else "the table has none"
            raise BadRequest(f"partition names {name[:100]!r}, which is no partition field: {there}")
    prefix = Prefix(_demands(fields, wanted))
    if len(text) <= _KEPT_TEXT_MAX:
        if len(kept.prefixes) >= _PREFIXES_MAX:
            kept.prefixes.clear()
        kept.prefixes[text] = prefix
    return prefix


class _Field(NamedTuple):
    """A partition field as one spec has it. `kind` is None where no schema tells the type of its values.

    `base` is the type without its parameters, `written` the type as which values are read.
    """

    id: int
    name: str
    transform: str
    kind: str | None
    base: str
    written: str


_Fields = Mapping[str, Mapping[int, _Field | None]]
"""By the name that a client gives, for each of the table's specs; None where that has no such field."""


class _Kept(NamedTuple):
    """`specs` and `schemas` are held so that their identities, under which this is kept, stay theirs."""

    specs: tuple[PartitionSpec, ...]
    schemas: tuple[Schema, ...]
    fields: _Fields
    prefixes: dict[str, Prefix]


_TABLES_MAX, _PREFIXES_MAX, _KEPT_TEXT_MAX = 64, 256, 200
"""Versions of tables of which is kept what their fields are, prefixes kept of each, characters of those: all in all
some 20 MB at worst."""
_tables: OrderedDict[tuple[int, int, int], _Kept] = OrderedDict()


def _kept_of(metadata: TableMetadata) -> _Kept:
    specs, schemas = metadata.partition_specs, metadata.schemas
    key = (id(specs), id(schemas), metadata.current_schema_id)
    kept = _tables.get(key)
    if kept is None:
        names = {field.name for spec in specs for field in spec.fields}
        fields = {name: {spec.spec_id: _field(metadata, spec, name) for spec in specs} for name in names}
        kept = _tables[key] = _Kept(specs, schemas, fields, {})
        while len(_tables) > _TABLES_MAX:
            _tables.popitem(last=False)
    return kept


def _parsed(text: str) -> dict[str, _Raw]:
    if len(text) > TEXT_MAX:
        raise BadRequest(f"partition has {len(text)} characters; at most {TEXT_MAX} are allowed")
    if text.startswith("{"):
        given = decode_json(text.encode("utf-8", "surrogatepass"), "partition")
        return {name: _Raw(value, path=False) for name, value in given.items()}
    found: dict[str, _Raw] = {}
    for part in text.strip("/").split("/") if text.strip("/") else ():
        name, equals, value = part.partition("=")
        name = unquote(name) if "%" in name else name
        if not equals or not name:
            raise BadRequest(f"partition has {part[:100]!r} where name=value belongs, as in day=2024-01-01/bucket=3")
        if name in found:
            raise BadRequest(f"partition names {name[:100]!r} twice")
        found[name] = _Raw(unquote(value.replace("+", "%2B")), path=True)
    return found


def _demands(fields: _Fields, wanted: dict[str, _Raw]) -> dict[int, Expression]:
    by_spec: dict[int, Expression] = {}
    problems: dict[str, str] = {}
    read: set[str] = set()
    for name, raw in wanted.items():
        for spec_id, field in fields[name].items():
            demand: Expression = FALSE
            if field is not None:
                try:
                    demand = _demand(field, raw)
                    read.add(name)
                except ValueError as error:
                    problems[name] = str(error)
            by_spec[spec_id] = all_of(by_spec[spec_id], demand) if spec_id in by_spec else demand
    for name, problem in problems.items():
        if name not in read:
            raise BadRequest(f"partition field {name}: {problem}")
    return by_spec


def _field(metadata: TableMetadata, spec: PartitionSpec, name: str) -> _Field | None:
    """The spec's field of that name, else the one that has the name in another spec."""
    found = next((field for field in spec.fields if field.name == name), None)
    if found is None:
        ids = {field.field_id for other in metadata.partition_specs for field in other.fields if field.name == name}
        found = next((field for field in spec.fields if field.field_id in ids), None)
        if found is None:
            return None
    assert found.field_id is not None  # metadata that is read has been numbered
    kind = field_kind(metadata, found)
    base = base_name(kind or "")
    # A decimal cut down by `truncate` may have a digit more than the column's type has.
    written = f"decimal(38, {decimal_scale(kind or '')})" if base == "decimal" else kind or ""
    return _Field(found.field_id, found.name, name_of(canonical(found.transform)), kind, base, written)


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


def _demand(field: _Field, raw: _Raw) -> Expression:
    kind = field.kind
    if kind is None:
        raise ValueError("its values are of no known type")
    if raw.value is None or (raw.path and raw.value in _NULLS):
        return Bound(Op.IS_NULL, field.id, field.name, kind, "identity", kind, ())
    value = _value(field, raw)
    if value is None:
        return FALSE
    if isinstance(value, float) and math.isnan(value):
        return Bound(Op.IS_NAN, field.id, field.name, kind, "identity", kind, ())
    return Bound(Op.EQ, field.id, field.name, kind, "identity", kind, (value,))


def _value(field: _Field, raw: _Raw) -> Value | None:
    """None for a value that none of this type equals. ValueError for what is no value."""
    given = raw.value
    if isinstance(given, str):
        if field.transform in _ORDINAL:
            return _ordinal(field.transform, given)
        if field.base in ("float", "double") and given.lower().lstrip("+-") in _FLOATS:
            return float(given)
        if raw.path and field.base in ("binary", "fixed"):
            try:
                return base64.b64decode(given, validate=True)
            except binascii.Error:
                raise ValueError(f"{given[:100]!r} is not base64, as bytes are in paths") from None
    elif not isinstance(given, bool | int | float):
        raise ValueError(f"{str(given)[:100]!r} is no value of type {field.kind}")
    try:
        literal = parse_literal(field.written, given)
    except BadRequest as error:
        raise ValueError(error.message) from None
    return None if isinstance(literal, _BESIDE) else literal


_BESIDE = (Above, Below, Between)
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
    if isinstance(expression, Bound):
        return (expression,)
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
