"""Primitive types for the oracles: random values, their bytes, and their order in Avro.

The module follows the Iceberg specification alone (sections "Primitive Types", "Avro" and "Binary single-value
serialization") and shares no code with the planner. Values: bool; int for int, long, date (days), time and timestamps
(micro- or nanoseconds); float; int for decimals (unscaled); str; bytes for uuid, fixed and binary.
"""

from __future__ import annotations

import math
import random
import re
import struct
import uuid
from typing import Any

Value = bool | int | float | str | bytes

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
LONG_MIN, LONG_MAX = -(2**63), 2**63 - 1
DAY_US = 86_400_000_000
TEMPORAL_LONGS = ("time", "timestamp", "timestamptz", "timestamp_ns", "timestamptz_ns")
NANOSECOND_TYPES = ("timestamp_ns", "timestamptz_ns")
FLOATS = ("float", "double")
KINDS = ["boolean", "int", "long", *FLOATS, "date", "time", "timestamp", "timestamptz", "string", "uuid", "fixed"]
KINDS += ["binary", "decimal"]
BYTES = ("uuid", "fixed", "binary")


def strip_parameters(kind: str) -> str:
    """Return the type's name without its parameters."""
    return kind.partition("(")[0].partition("[")[0]


def parse_decimal(kind: str) -> tuple[int, int]:
    """Return precision and scale of a decimal."""
    precision, scale = re.findall(r"\d+", kind)
    return int(precision), int(scale)


def parse_fixed_length(kind: str) -> int:
    return int(kind[len("fixed[") : -1])


def draw_kind(rng: random.Random, version: int) -> str:
    kind: str = rng.choice([*KINDS, "decimal", "string", "uuid", *(NANOSECOND_TYPES if version >= 3 else ())])
    if kind == "fixed":
        return f"fixed[{rng.choice([1, 4, 16, 20])}]"
    if kind == "decimal":
        precision = rng.choice([2, 4, 9, 18, 20, 38])
        return f"decimal({precision}, {rng.randint(0, precision)})"
    return kind


def widen_kind(rng: random.Random, kind: str) -> str | None:
    """Return a type to which the specification allows promotion of this type, or None if there is none."""
    if strip_parameters(kind) == "decimal":
        precision, scale = parse_decimal(kind)
        return f"decimal({rng.randint(precision + 1, 38)}, {scale})" if precision < 38 else None
    return {"int": "long", "float": "double"}.get(kind)


def draw_pool(rng: random.Random, kind: str, size: int) -> list[Value]:
    """Return at most `size` distinct values for rows, without NaN.

    Some values are the minimum or maximum of the type, or next to it.
    """
    values = [_draw_value(rng, kind) for _ in range(size)]
    distinct_values = {(repr(value) if isinstance(value, float) else value): value for value in values}
    return sorted(distinct_values.values(), key=lambda value: compute_sort_key(kind, value))


def compute_sort_key(kind: str, value: Any) -> Any:
    """Return a sort key in the order of the type. For floats it is the total order, in which -0.0 precedes 0.0."""
    return (value, math.copysign(1.0, value)) if kind in FLOATS else value


def compute_java_uuid_order(value: bytes) -> tuple[int, int]:
    """Return a sort key in Java's order of UUIDs: by their two halves, each a signed number."""
    return int.from_bytes(value[:8], "big", signed=True), int.from_bytes(value[8:], "big", signed=True)


def _draw_value(rng: random.Random, kind: str) -> Value:
    name = strip_parameters(kind)
    if name == "boolean":
        return rng.random() < 0.5
    if name in ("int", "long", "date", "decimal", *TEMPORAL_LONGS):
        return _draw_integer(rng, kind)
    if name in FLOATS:
        return _draw_float(rng, kind)
    if name == "string":
        return _draw_text(rng)
    length = {"uuid": 16, "binary": rng.choice([0, 1, 3, 16, 17, 40])}.get(name) if name != "fixed" else None
    size = parse_fixed_length(kind) if length is None else length
    draw = rng.random()
    if draw < 0.15:
        return b"\xff" * size
    if draw < 0.25:
        return b"\x00" * size
    if draw < 0.6:  # The values have a long common prefix.
        return (b"\x7f\xff\x80" * size)[: max(0, size - 1)] + rng.randbytes(min(1, size))
    return rng.randbytes(size)


def get_limits(kind: str) -> tuple[int, int]:
    """Return the least and greatest value of a type that is stored as an integer."""
    name = strip_parameters(kind)
    if name == "decimal":
        greatest = 10 ** parse_decimal(kind)[0] - 1
        return -greatest, greatest
    if name == "time":
        return 0, DAY_US - 1
    return (INT_MIN, INT_MAX) if name in ("int", "date") else (LONG_MIN, LONG_MAX)


def _draw_integer(rng: random.Random, kind: str) -> int:
    """Return a random value of a type whose values are integers.

    Most values are near a common value, which is zero, noon, or 19,000 days after 1970 (in January 2022).
    """
    minimum, greatest = get_limits(kind)
    middle = {"date": 19_000, "time": DAY_US // 2, "timestamp": 19_000 * DAY_US, "timestamptz": 19_000 * DAY_US}
    centre = middle.get(kind, 19_000 * DAY_US * 1000 if kind in NANOSECOND_TYPES else 0)
    # The typical distance between two values, which is an hour for times.
    unit = {"date": 30, "int": 10, "long": 10, "decimal": 5}.get(strip_parameters(kind), 3_600_000_000)
    unit *= 1000 if kind in NANOSECOND_TYPES else 1
    draw = rng.random()
    if draw < 0.06:  # A few values are at or next to a limit of the type, where arithmetic may overflow.
        return rng.choice([minimum, greatest])
    if draw < 0.12:
        return rng.choice([minimum + 1, greatest - 1])
    if draw < 0.2:
        return rng.randint(minimum, greatest)
    if draw < 0.4:  # The values are near zero, which is 1970 for times.
        return max(minimum, min(greatest, rng.randint(-3, 3) * rng.choice([1, unit])))
    return max(minimum, min(greatest, centre + rng.randint(-40, 40) * unit + rng.choice([0, 0, 1, -1])))


def _draw_float(rng: random.Random, kind: str) -> float:
    greatest = 3.4028234663852886e38 if kind == "float" else 1.7976931348623157e308
    tiny = 1e-45 if kind == "float" else 5e-324
    special_values = [0.0, -0.0, math.inf, -math.inf, greatest, -greatest, tiny, -tiny]
    value = rng.choice(special_values) if rng.random() < 0.3 else rng.choice([1.0, 0.1, 1e10]) * rng.randint(-20, 20)
    return to_float32(value) if kind == "float" else value


def to_float32(value: float) -> float:
    """Return the nearest 32-bit float, or an infinity if the value is outside its range."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


ALPHABET = ["a", "b", "z", "\u00e9", "\u00ff", "\u07ff", "\u0800", "\ud7ff", "\ue000", "\uffff"]
ALPHABET += ["\U00010000", "\U0001f600", "\U0010ffff", "\x00", "'", " "]


EDGE = "a" * 15 + "\U0001f600x"


def _draw_text(rng: random.Random) -> str:
    draw = rng.random()
    if draw < 0.08:
        return ""
    if draw < 0.35:  # The values differ only after the length of truncated bounds.
        return "common/prefix/of/" + "".join(rng.choices("ab", k=rng.randint(0, 3)))
    if draw < 0.45:
        return rng.choice(["\U0010ffff" * rng.randint(1, 20), "\uffff" * 18, "\ud7ff" * 17, EDGE, "z" * 300])
    return "".join(rng.choices(ALPHABET, k=rng.randint(1, 20 if draw < 0.6 else 3)))


def to_bytes(kind: str, value: Any) -> bytes:
    """Return the binary single-value serialisation of a value (specification, appendix D)."""
    name = strip_parameters(kind)
    if name == "boolean":
        return b"\x01" if value else b"\x00"
    if name in ("int", "date"):
        return struct.pack("<i", value)
    if name == "long" or name in TEMPORAL_LONGS:
        return struct.pack("<q", value)
    if name in FLOATS:
        return struct.pack("<f" if name == "float" else "<d", value)
    if name == "decimal":
        length = max(1, ((value if value >= 0 else ~value).bit_length() + 8) // 8)
        return int(value).to_bytes(length, "big", signed=True)
    return value.encode() if name == "string" else bytes(value)


def build_avro_type(kind: str, name: str) -> Any:
    """Return Avro's type of a partition value; `name` is unique in the schema for types that need a name."""
    base_kind = strip_parameters(kind)
    logical = {"date": "date", "time": "time-micros"}.get(base_kind)
    if base_kind == "date":
        return {"type": "int", "logicalType": logical}
    if base_kind == "time":
        return {"type": "long", "logicalType": logical}
    if base_kind in TEMPORAL_LONGS:
        unit = "timestamp-nanos" if base_kind in NANOSECOND_TYPES else "timestamp-micros"
        return {"type": "long", "logicalType": unit, "adjust-to-utc": "tz" in base_kind}
    if base_kind == "uuid":
        return {"type": "fixed", "size": 16, "name": f"uuid_{name}", "logicalType": "uuid"}
    if base_kind == "fixed":
        return {"type": "fixed", "size": parse_fixed_length(kind), "name": f"fixed_{name}"}
    if base_kind == "decimal":
        precision, scale = parse_decimal(kind)
        types = {
            "type": "fixed",
            "size": compute_decimal_size(precision),
            "name": f"decimal_{name}",
            "logicalType": "decimal",
        }
        return {**types, "precision": precision, "scale": scale}
    return {"binary": "bytes"}.get(base_kind, base_kind)


def compute_decimal_size(precision: int) -> int:
    """Return the smallest number of bytes that can contain every unscaled value of a precision."""
    greatest: int = 10**precision - 1
    return (greatest.bit_length() + 8) // 8


def to_avro_value(kind: str, value: Any) -> Any:
    if value is not None and strip_parameters(kind) == "decimal":
        return int(value).to_bytes(compute_decimal_size(parse_decimal(kind)[0]), "big", signed=True)
    return value


def to_default_json(kind: str, value: Any) -> Any:
    """Return the JSON single-value serialisation of a column's default (appendix D)."""
    name = strip_parameters(kind)
    if name == "decimal":
        return format_decimal(kind, value)
    if name == "uuid":
        return str(uuid.UUID(bytes=value))
    return value.hex() if name in ("fixed", "binary") else value


def format_decimal(kind: str, unscaled_value: int) -> str:
    """Return an unscaled value as plain decimal digits, with exactly the type's scale."""
    scale = parse_decimal(kind)[1]
    digits = str(abs(unscaled_value)).rjust(scale + 1, "0")
    integer_part, fraction = digits[: len(digits) - scale], digits[len(digits) - scale :]
    return ("-" if unscaled_value < 0 else "") + integer_part + ("." + fraction if scale else "")
