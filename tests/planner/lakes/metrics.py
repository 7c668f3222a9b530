"""Column metrics as real writers make them: full or truncated bounds, counts only, or no metrics."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.planner.lakes.kinds import FLOATS, compute_java_uuid_order, compute_sort_key, strip_parameters, to_bytes


@dataclass(frozen=True)
class ColumnMetrics:
    """The metrics of one column in a manifest entry; None if the writer omitted them."""

    values: int | None = None
    nulls: int | None = None
    nans: int | None = None
    lower: bytes | None = None
    upper: bytes | None = None


def draw_metrics(rng: random.Random, kind: str, values: Sequence[Any]) -> ColumnMetrics:
    """Return metrics of one column over a file's rows, in a random mode of the writers.

    Bounds never include NaN.
    """
    mode = rng.choices(["full", "truncate", "counts", "none"], [60, 25, 8, 7])[0]
    if mode == "none":
        return ColumnMetrics()
    present_values = [value for value in values if value is not None]
    nans = [value for value in present_values if isinstance(value, float) and math.isnan(value)]
    column_metrics = ColumnMetrics(
        values=None if rng.random() < 0.05 else len(values),
        nulls=None if rng.random() < 0.05 else len(values) - len(present_values),
        nans=None if kind not in FLOATS or rng.random() < 0.15 else len(nans),
    )
    ordered_values = sorted(
        (value for value in present_values if not (isinstance(value, float) and math.isnan(value))),
        key=lambda value: compute_sort_key(kind, value),
    )
    if mode == "counts" or not ordered_values:
        return column_metrics
    minimum, greatest = ordered_values[0], ordered_values[-1]
    if kind in FLOATS and rng.random() < 0.5:  # Some writers do not distinguish the zeros.
        minimum, greatest = (-0.0 if minimum == 0 else minimum), (0.0 if greatest == 0 else greatest)
    if kind == "uuid" and rng.random() < 0.5:
        minimum, greatest = (
            min(ordered_values, key=compute_java_uuid_order),
            max(ordered_values, key=compute_java_uuid_order),
        )
    lower: bytes | None = to_bytes(kind, minimum)
    upper: bytes | None = to_bytes(kind, greatest)
    if mode == "truncate" and strip_parameters(kind) in ("string", "binary", "fixed"):
        length = rng.choice([1, 4, 16, 16, 16])
        lower, upper = to_bytes(kind, minimum[:length]), truncate_upper(greatest, length)
    draw = rng.random()
    return ColumnMetrics(
        column_metrics.values,
        column_metrics.nulls,
        column_metrics.nans,
        None if draw < 0.03 else lower,
        None if draw > 0.97 else upper,
    )


def truncate_upper(value: str | bytes, length: int) -> bytes | None:
    """Return the least bound of at most `length` characters or bytes that is not below `value`, or None."""
    if len(value) <= length:
        return value.encode() if isinstance(value, str) else value
    if isinstance(value, bytes):
        prefix = value[:length].rstrip(b"\xff")
        return prefix[:-1] + bytes([prefix[-1] + 1]) if prefix else None
    text = value[:length].rstrip("\U0010ffff")
    if not text:
        return None
    next_code = ord(text[-1]) + 1
    return (text[:-1] + chr(0xE000 if next_code == 0xD800 else next_code)).encode()
