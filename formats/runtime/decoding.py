"""Convert JSON, MessagePack and plain values to typed values, in any thread.

msgspec examines a type when it is first used, and publishes the result before it is complete. If a second thread
decodes the same struct at this time, the process ends with a segmentation fault (msgspec 0.22, `StructInfo_Convert`).
Therefore this module examines all types, one at a time. A complete decoder is safe in all threads.
"""

from __future__ import annotations

from threading import Lock
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")
Part = bytes | bytearray | memoryview

_examination_lock = Lock()
_json_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_msgpack_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
"""The decoders by type. The number of decoders is bounded, because all types are constants of the code."""


@overload
def convert_json(data: Part | str, kind: type[T]) -> T: ...
@overload
def convert_json(data: Part | str, kind: Any) -> Any: ...
def convert_json(data: Part | str, kind: Any) -> Any:
    """Decode JSON to a type.

    The decoder of each type is cached. Decoders are created under a lock, because msgspec then examines the type, which
    is not safe in several threads.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError, RecursionError: `data` is not JSON of this type.
    """
    decoder = _json_decoders.get(kind)
    if decoder is None:
        with _examination_lock:
            decoder = _json_decoders.setdefault(kind, msgspec.json.Decoder(kind))
    return decoder.decode(data)


@overload
def convert_msgpack(data: Part, kind: type[T]) -> T: ...
@overload
def convert_msgpack(data: Part, kind: Any) -> Any: ...
def convert_msgpack(data: Part, kind: Any) -> Any:
    """Decode MessagePack to a type. The errors are the same as those of `convert_json`."""
    return _get_msgpack_decoder(kind).decode(data)


@overload
def convert_values(value: object, kind: type[T]) -> T: ...
@overload
def convert_values(value: object, kind: Any) -> Any: ...
def convert_values(value: object, kind: Any) -> Any:
    """Convert a value that consists of dictionaries, lists and scalars to a type.

    Raises:
        msgspec.ValidationError, RecursionError: The value does not have this type.
    """
    _get_msgpack_decoder(kind)  # The first call for a type makes msgspec examine the type under the lock.
    return msgspec.convert(value, kind)


def convert_attributes(value: object, kind: type[T]) -> T:
    """Return an object of the class `kind`. Its fields are the attributes of `value` with the same names.

    The decoder is not used. The first request for it makes msgspec examine the class under the lock.
    """
    _get_msgpack_decoder(kind)
    return msgspec.convert(value, kind, from_attributes=True)


def _get_msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return the decoder of a type. On first use, create it under a lock.

    msgspec then examines the type, which is not safe in several threads.
    """
    decoder = _msgpack_decoders.get(kind)
    if decoder is None:
        with _examination_lock:
            decoder = _msgpack_decoders.setdefault(kind, msgspec.msgpack.Decoder(kind))
    return decoder
