"""Converts JSON, MessagePack and plain values to typed values, in any thread.

msgspec examines a type when it is first used, and publishes the result before it is complete. If a second
thread decodes the same struct at this time, the process ends with a segmentation fault (msgspec 0.22,
`StructInfo_Convert`). Therefore all types are examined here, one at a time. A complete decoder is safe in
all threads.
"""

from __future__ import annotations

from threading import Lock
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")
Part = bytes | bytearray | memoryview

_examining = Lock()
_json: dict[Any, msgspec.json.Decoder[Any]] = {}
_msgpack: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
"""The decoders by type. The types are those that the code names, so the number of decoders is bounded."""


@overload
def convert_json(data: Part | str, kind: type[T]) -> T: ...
@overload
def convert_json(data: Part | str, kind: Any) -> Any: ...
def convert_json(data: Part | str, kind: Any) -> Any:
    """Return the value of JSON of this type.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError, RecursionError: `data` is not JSON of this type.
    """
    decoder = _json.get(kind)
    if decoder is None:
        with _examining:
            decoder = _json.setdefault(kind, msgspec.json.Decoder(kind))
    return decoder.decode(data)


@overload
def convert_msgpack(data: Part, kind: type[T]) -> T: ...
@overload
def convert_msgpack(data: Part, kind: Any) -> Any: ...
def convert_msgpack(data: Part, kind: Any) -> Any:
    """Return the value of MessagePack of this type. It raises the same errors as `convert_json`."""
    return _make_msgpack_decoder(kind).decode(data)


@overload
def convert_values(value: object, kind: type[T]) -> T: ...
@overload
def convert_values(value: object, kind: Any) -> Any: ...
def convert_values(value: object, kind: Any) -> Any:
    """Convert a value of dicts, lists and scalars to this type.

    Raises:
        msgspec.ValidationError, RecursionError: The value does not have this type.
    """
    _make_msgpack_decoder(kind)  # This examines the type.
    return msgspec.convert(value, kind)


def convert_attributes(value: object, kind: type[T]) -> T:
    """Return a `kind` with the attributes of `value` that have the names of its fields."""
    _make_msgpack_decoder(kind)
    return msgspec.convert(value, kind, from_attributes=True)


def _make_msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    decoder = _msgpack.get(kind)
    if decoder is None:
        with _examining:
            decoder = _msgpack.setdefault(kind, msgspec.msgpack.Decoder(kind))
    return decoder
