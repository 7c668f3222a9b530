"""Conversion of JSON values from clients to typed structs: the single entry point of client input into this package.

Any JSON results in a value of the requested type or in `BadRequest` with the field, so no other function of the package
checks types again. Integers have the widths of the format (Iceberg spec, "int" and "long"), because no engine could
read metadata with wider integers.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from seamark.formats.runtime.decoding import from_values
from seamark.formats.runtime.errors import BadRequest

Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]

T = TypeVar("T")


def read(value: object, kind: type[T], subject: str) -> T:
    """Return `value` as a `kind`; `subject` describes it in the error ("add-schema update").

    Raises BadRequest.
    """
    try:
        return from_values(value, kind)
    except RecursionError:
        raise BadRequest(f"Invalid {subject}: it is nested too deeply") from None
    except (msgspec.ValidationError, ValueError, TypeError, OverflowError) as error:
        raise BadRequest(f"Invalid {subject}: {error}") from None
