"""Rows as JSON: numbers that JSON has as numbers, NaN and infinity as texts, decimals, times and UUIDs as texts, bytes
in base64, nested values as lists and objects."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

import pyarrow as pa


def json_rows(batch: pa.RecordBatch) -> list[list[Any]]:
    """The values of each row, in the order of the columns."""
    columns = [_column(column) for column in batch.columns]
    return [list(row) for row in zip(*columns, strict=True)]


def _column(column: pa.Array) -> list[Any]:
    kind = column.type
    values: list[Any] = column.to_pylist()
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_string(kind) or pa.types.is_null(kind):
        return values
    return [json_value(value) for value in values]


def json_value(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
        case Decimal():
            return format(value, "f")
        case datetime():
            text = value.replace(tzinfo=None).isoformat(" ")
            return text if value.tzinfo is None else f"{text} UTC"
        case date() | time():
            return value.isoformat()
        case bytes():
            return base64.b64encode(value).decode()
        case Mapping():
            return {str(name): json_value(one) for name, one in value.items()}
        case list():
            return [json_value(one) for one in value]
        case tuple():  # an entry of a map
            return [json_value(one) for one in value]
    return value if value is None or isinstance(value, bool | int | str) else str(value)
