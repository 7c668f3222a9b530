"""Convert JSON values from clients to typed structs.

All client input enters this package here. A JSON value becomes a value of the requested type, or `BadRequest` is raised
with the field. Therefore no other function of the package checks types again. Integers have the widths of the format
(Iceberg spec, "int" and "long"), because no engine could read metadata with wider integers.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from seamark.formats.runtime.decoding import convert_values
from seamark.formats.runtime.errors import BadRequest

INT_MAX, LONG_MAX = 2**31 - 1, 2**63 - 1
Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=INT_MAX)]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=LONG_MAX)]

T = TypeVar("T")


def check_number(value: int, largest: int, subject: str) -> None:
    """Check that a number which the server computes fits into its type, because no engine could read a larger number.

    Args:
        value: The number.
        largest: The largest number of the type.
        subject: What the number is, for the error.

    Raises:
        BadRequest: The number is too large.
    """
    if value > largest:
        raise BadRequest(f"The {subject} would be {value}; the largest possible number is {largest}")


def convert_json_value(value: object, kind: type[T], subject: str) -> T:
    """Convert a JSON value to `kind`.

    Args:
        value: The JSON value.
        kind: The type of the result.
        subject: The name of the value in the error, such as "add-schema update".

    Raises:
        BadRequest: The value cannot be converted. The message states the field.
    """
    try:
        return convert_values(value, kind)
    except RecursionError:
        raise BadRequest(f"Invalid {subject}: it is nested too deeply") from None
    except (msgspec.ValidationError, ValueError, TypeError, OverflowError) as error:
        raise BadRequest(f"Invalid {subject}: {error}") from None
