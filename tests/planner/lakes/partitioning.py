"""Partition transforms for the oracles, from the specification's text ("Partition Transforms" and appendix B)."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

import mmh3
import numpy as np

from tests.planner.lakes.kinds import DAY_US, NANOSECOND_TYPES, get_limits, strip_parameters

HOUR_US = 3_600_000_000
TRUNCATED_KINDS = ("int", "long", "decimal", "string", "binary")
TIME_KINDS = ("timestamp", "timestamptz", *NANOSECOND_TYPES)


def parse_width(transform: str) -> int:
    """Return the N of bucket[N] or truncate[N]."""
    return int(transform[transform.index("[") + 1 : -1])


def infer_result_kind(transform: str, kind: str) -> str:
    """Return the type of the transform's values."""
    name = strip_parameters(transform)
    if name in ("identity", "truncate", "void"):
        return kind
    return "date" if name == "day" else "int"


def draw_transform(rng: random.Random, kind: str, values: list[Any], *, void: bool = False) -> str:
    """Return a transform that the specification allows on `kind` and that is defined for all of `values`."""
    name = strip_parameters(kind)
    # Java cannot read the fixed partition values that it writes (InternalReader), so they are rare.
    choices = ["identity", "identity"] if name != "fixed" or rng.random() < 0.1 else ["bucket[8]"]
    if name not in ("boolean", "float", "double"):
        choices += [f"bucket[{rng.choice([1, 2, 4, 16])}]"] * 2
    if name in TRUNCATED_KINDS:
        width = rng.choice([2, 3, 10] if name == "decimal" else [1, 2, 5, 10, 100])
        minimum = get_limits(kind)[0] if name in ("int", "long") else None
        # For a smaller number, the result is outside the type's range, and writers differ.
        if minimum is None or all(value >= minimum + width for value in values):
            choices += [f"truncate[{width}]"] * 2
    if name in ("date", *TIME_KINDS):
        choices += ["year", "month", "day"] * 2
    if name in TIME_KINDS and all(has_hour(kind, value) for value in values):
        choices += ["hour"]
    return "void" if void and rng.random() < 0.1 else rng.choice(choices)


def apply(transform: str, kind: str, value: Any) -> Any:
    """Return the partition value of one column value; null gives null."""
    if value is None or transform == "void":
        return None
    # In Python True equals 1, so the cache must distinguish their types.
    return value if transform == "identity" else _apply_transform(transform, kind, value, isinstance(value, bool))


@lru_cache(maxsize=200_000)
def _apply_transform(transform: str, kind: str, value: Any, is_boolean: bool) -> Any:
    """Return the transformed value. The argument `is_boolean` only gives True and 1 separate entries in the cache."""
    name = strip_parameters(transform)
    if name == "bucket":
        return (mmh3.hash(_to_hash_bytes(kind, value)) & 0x7FFFFFFF) % parse_width(transform)
    if name == "truncate":
        width = parse_width(transform)
        return value[:width] if isinstance(value, str | bytes) else value - value % width
    micros = to_micros(kind, value)
    if name == "hour":
        return micros // HOUR_US
    days = value if kind == "date" else micros // DAY_US
    if name == "day":
        return days
    unit = "M" if name == "month" else "Y"
    return int(np.datetime64(days, "D").astype(f"datetime64[{unit}]").astype(np.int64))


def has_hour(kind: str, value: int) -> bool:
    """Return whether the hours of a timestamp since the epoch fit into an int."""
    return abs(to_micros(kind, value)) < 2**31 * HOUR_US


def to_micros(kind: str, value: int) -> int:
    """Return a timestamp in microseconds, rounded down. The type `kind` says whether `value` is in nanoseconds."""
    return value // 1000 if kind in NANOSECOND_TYPES else value


def _to_hash_bytes(kind: str, value: Any) -> bytes:
    name = strip_parameters(kind)
    if name == "decimal":
        length = max(1, ((value if value >= 0 else ~value).bit_length() + 8) // 8)
        return int(value).to_bytes(length, "big", signed=True)
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    if kind in NANOSECOND_TYPES:
        value = to_micros(kind, value)  # The hash of nanoseconds is the hash of their microseconds.
    return int(value).to_bytes(8, "little", signed=True)
