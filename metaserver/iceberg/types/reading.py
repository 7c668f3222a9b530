"""Plain JSON values in, typed structs out: the one gate through which everything a client sent enters this room.

Whatever JSON comes in, the answer is a value of the asked type or `BadRequest` naming the field, because every
struct behind the gate may then be trusted: no function in this room checks a type twice. Integers carry the width
the format gives them (Iceberg spec, "int" and "long"), since a wider one would write metadata that no engine reads.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from metaserver.errors import BadRequest

Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]

T = TypeVar("T")


def read(value: object, kind: type[T], what: str) -> T:
    """`value` as a `kind`; `what` names it in the error ("add-schema update"). Raises BadRequest."""
    try:
        return msgspec.convert(value, kind)
    except RecursionError:
        raise BadRequest(f"Invalid {what}: it is nested too deeply") from None
    except (msgspec.ValidationError, ValueError, TypeError, OverflowError) as error:
        raise BadRequest(f"Invalid {what}: {error}") from None
