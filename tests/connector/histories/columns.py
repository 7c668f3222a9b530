"""Columns of random tables: all primitive types, and structs, lists and maps of them.

Primitive values are as in `typed.py`. The value of a struct is a dict of its fields' values by id, the value of a list
a list, and the value of a map a list of pairs.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from tests.connector.read import typed
from tests.planner.lakes.literal_forms import render

STRUCT, LIST, MAP = "struct", "list", "map"
NESTED_KINDS = (STRUCT, LIST, MAP)
PROMOTIONS = {
    "int": ("long",),
    "float": ("double",),
    "decimal(9, 2)": ("decimal(18, 2)", "decimal(38, 2)"),
    "date": ("timestamp", "timestamp_ns"),
}
_V3_KINDS = ("timestamp_ns", "timestamptz_ns")
_MAP_KEYS = ("string", "int", "date")
_UNITS = {"int": 1, "long": 1, "date": 1, "time": 1_800_000_000, "decimal(9, 2)": 50, "decimal(38, 10)": 10**10}
_UNITS |= {"timestamp": typed.DAY_US // 3, "timestamptz": typed.DAY_US // 3}
_UNITS |= dict.fromkeys(_V3_KINDS, typed.DAY_US * 333)
"""The step between drawn values, by type. With few steps, rows have equal values and equal partitions."""
_ENDINGS = ("", "\0", "é", "\U0001f600", "z" * 20, " cliente llamó por teléfono", "é" * 12, "a" + "日本" * 6)
"""Endings of long texts. Their characters have one to four bytes, and writers cut the texts for bounds."""
_LONG_END = 2**63


@dataclass(eq=False)
class RandomColumn:
    """A column of a random table.

    `children` has the fields of a struct, the element of a list, or the key and value of a map.
    """

    id: int
    name: str
    kind: str
    children: list[RandomColumn] = field(default_factory=list)
    initial_default: Any = None

    def walk(self) -> Iterator[RandomColumn]:
        yield self
        for child in self.children:
            yield from child.walk()

    @property
    def type_json(self) -> Any:
        match self.kind:
            case "struct":
                return {"type": STRUCT, "fields": [child.json for child in self.children]}
            case "list":
                (element,) = self.children
                return {
                    "type": LIST,
                    "element-id": element.id,
                    "element-required": False,
                    "element": element.type_json,
                }
            case "map":
                key, value = self.children
                json = {"type": MAP, "key-id": key.id, "key": key.type_json}
                return {**json, "value-id": value.id, "value-required": False, "value": value.type_json}
        return self.kind

    @property
    def json(self) -> dict[str, Any]:
        json: dict[str, Any] = {"id": self.id, "name": self.name, "required": False, "type": self.type_json}
        if self.initial_default is not None:
            default = render(self.kind, self.initial_default, "spec")
            json |= {"initial-default": default, "write-default": default}
        return json

    def take_ids(self, json: dict[str, Any]) -> None:
        """Set the ids of the column and its children to the ids that the server has assigned."""
        self.id = json["id"]
        kind = json["type"]
        match self.kind:
            case "struct":
                for child, input_field in zip(self.children, kind["fields"], strict=True):
                    child.take_ids(input_field)
            case "list":
                self.children[0].take_ids({"id": kind["element-id"], "type": kind["element"]})
            case "map":
                for name, child in zip(("key", "value"), self.children, strict=True):
                    child.take_ids({"id": kind[f"{name}-id"], "type": kind[name]})

    # Values

    def read_value(self, row: dict[int, Any]) -> Any:
        """Return the column's value in a row or struct, or its initial default if the row is older."""
        return row.get(self.id, self.initial_default)

    def build_array(self, values: Sequence[Any]) -> pa.Array:
        match self.kind:
            case "struct":
                arrays = [
                    child.build_array([None if value is None else child.read_value(value) for value in values])
                    for child in self.children
                ]
                fields = [pa.field(child.name, array.type) for child, array in zip(self.children, arrays, strict=True)]
                return pa.StructArray.from_arrays(
                    arrays, fields=fields, mask=pa.array([value is None for value in values], pa.bool_())
                )
            case "list" | "map":
                flat_values = [item for value in values for item in value or ()]
                offsets, end = list[int | None](), 0
                for value in values:
                    offsets.append(None if value is None else end)
                    end += len(value or ())
                starts = pa.array([*offsets, end], pa.int32())
                if self.kind == LIST:
                    return pa.ListArray.from_arrays(starts, self.children[0].build_array(flat_values))
                return pa.MapArray.from_arrays(
                    starts,
                    *(
                        child.build_array([child_values[n] for child_values in flat_values])
                        for n, child in enumerate(self.children)
                    ),
                )
        return typed.build_array(self.kind, values)

    def to_plain_values(self, column: pa.Array) -> list[Any]:
        """Return the values of an Arrow array in plain Python: structs as dicts, maps as pairs, times as integers."""
        validity = column.is_valid().to_pylist()
        match self.kind:
            case "struct":
                parts = [child.to_plain_values(column.field(n)) for n, child in enumerate(self.children)]
                ids = [child.id for child in self.children]
                return [
                    dict(zip(ids, [part[n] for part in parts], strict=True)) if is_present else None
                    for n, is_present in enumerate(validity)
                ]
            case "list" | "map":
                values = [column.values] if self.kind == LIST else [column.keys, column.items]
                child_values = [
                    child.to_plain_values(value) for child, value in zip(self.children, values, strict=True)
                ]
                child_lists = child_values[0] if self.kind == LIST else list(zip(*child_values, strict=True))
                starts = column.offsets.to_pylist()
                return [
                    child_lists[starts[n] : starts[n + 1]] if is_present else None
                    for n, is_present in enumerate(validity)
                ]
        return typed.to_plain(self.kind, column)

    def freeze(self, value: Any) -> Hashable:
        """Return a hashable form of the value, in which NaN equals NaN, and -0.0 differs from 0.0."""
        if value is None:
            return None
        match self.kind:
            case "struct":
                return tuple(child.freeze(child.read_value(value)) for child in self.children)
            case "list":
                return tuple(map(self.children[0].freeze, value))
            case "map":
                key, other = self.children
                return frozenset((key.freeze(map_key), other.freeze(map_value)) for map_key, map_value in value)
        if isinstance(value, float):
            return "NaN" if value != value else struct.pack("<d", value)
        return type(value).__name__, value

    def draw_value(self, rng: random.Random) -> Any:
        match self.kind:
            case "struct":
                return {child.id: child.draw_or_null(rng) for child in self.children}
            case "list":
                return [self.children[0].draw_or_null(rng) for _ in range(rng.choice((0, 1, 2, 5)))]
            case "map":
                key, value = self.children
                keys = {key.draw_value(rng) for _ in range(rng.choice((0, 1, 2)))}
                return [(item, value.draw_or_null(rng)) for item in sorted(keys)]
        return draw_value(rng, self.kind)

    def draw_or_null(self, rng: random.Random) -> Any:
        return None if rng.random() < 0.2 else self.draw_value(rng)

    # Promotion

    def promote(self, kind: str) -> None:
        unit = {"timestamp": typed.DAY_US, "timestamp_ns": typed.DAY_US * 1000}.get(kind)
        if self.kind == "date" and unit is not None and self.initial_default is not None:
            self.initial_default *= unit
        self.kind = kind

    def promote_value(self, row: dict[int, Any], kind: str) -> None:
        """Convert the column's value in a row to the promoted type. Only values of dates change."""
        unit = {"timestamp": typed.DAY_US, "timestamp_ns": typed.DAY_US * 1000}.get(kind)
        if self.kind == "date" and unit is not None and row.get(self.id) is not None:
            row[self.id] *= unit

    def can_promote(self, rows: Sequence[dict[int, Any]], kind: str) -> bool:
        unit = typed.DAY_US * 1000 if kind == "timestamp_ns" else 1
        return all(
            abs(int(row[self.id]) * unit) < _LONG_END for row in rows if unit > 1 and row.get(self.id) is not None
        )


def list_kinds(version: int) -> list[str]:
    return [kind for kind in typed.SAMPLES if version >= 3 or kind not in _V3_KINDS]


def draw_value(rng: random.Random, kind: str) -> Any:
    """Return an edge value of the type, or one of a few values, so that values of several rows are equal."""
    if kind not in typed.SAMPLES:  # The type is the result of a promotion.
        return rng.randint(-500, 500)
    if rng.random() < 0.5:
        return rng.choice(typed.SAMPLES[kind])
    if kind in _UNITS:
        return rng.randint(0 if kind == "time" else -20, 40) * _UNITS[kind]
    match kind:
        case "float" | "double":
            return rng.randint(-5, 20) / 4
        case "string":
            return rng.choice("abcxyz") * rng.randint(1, 3) + rng.choice(_ENDINGS)
        case "uuid":
            return bytes([*[0] * 15, rng.randint(0, 30)])
        case "fixed[3]":
            return bytes(rng.choices(range(4), k=3))
        case "binary":
            return rng.randbytes(rng.choice((1, 2, 20)))
    return rng.choice(typed.SAMPLES[kind])


def compute_key(value: Any) -> Any:
    """Convert a value so that equal keys have equal results. Both zeros are one key, and all NaNs are one key."""
    return ("NaN" if value != value else value + 0.0) if isinstance(value, float) else value
