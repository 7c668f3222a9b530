"""Functions that make results of two engines comparable."""

from __future__ import annotations

import math
from collections import Counter
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from seamark.connector.sql.session import SqlResult


def to_comparable_value(value: Any) -> Any:
    """Return the value in a comparable form.

    Sums of doubles depend on the order of the rows, so only six digits are compared. Zeros of both signs are equal, and
    either can represent a group.
    """
    match value:
        case float():
            return "NaN" if math.isnan(value) else float(f"{value:.6g}") + 0.0
        case datetime() if value.tzinfo is not None:
            return value.astimezone(UTC).isoformat()
        case Decimal():
            return str(value)
    return value


def count_rows(result: SqlResult) -> Counter[str]:
    table = result.to_arrow()
    columns = [[to_comparable_value(value) for value in column.to_pylist()] for column in table.columns]
    return Counter(map(repr, zip(*columns, strict=True)))
