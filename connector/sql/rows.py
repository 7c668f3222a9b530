"""Converts the rows of a statement to JSON, and reports values that cannot be converted."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from seamark.connector.client.errors import InvalidRequest
from seamark.formats.protocol.json_rows import to_json_rows


def convert_to_json_rows(batch: pa.RecordBatch) -> list[list[Any]]:
    """Return the values of each row, in the order of the columns.

    Raises:
        InvalidRequest: A nested value has a date or a time that Python does not support.
    """
    try:
        return to_json_rows(batch)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
