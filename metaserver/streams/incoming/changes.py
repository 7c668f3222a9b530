"""Reads rows with their kind, which is the effect of a row on the stored row with the same key. The functions are pure.

A plain row may state its kind in the field `_op`: `insert`, `update` or `delete`. In an envelope of Debezium, the field
`op` states the kind, and `before` and `after` contain the row. Both forms become a `RowWithKind`.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.log.port import RowKind

KIND_FIELD = "_op"
KINDS = {kind.name.lower(): kind for kind in RowKind}
_ENVELOPE_FIELDS = frozenset(("before", "after", "op"))
_UNAVAILABLE = "__debezium_unavailable_value"
"""The text that Debezium sends in place of a large value that an update has not changed."""
_UNAVAILABLE_VALUES = (
    _UNAVAILABLE,
    b64encode(_UNAVAILABLE.encode()).decode(),
    _UNAVAILABLE.encode().hex(),
    [_UNAVAILABLE],
)
"""The forms of `_UNAVAILABLE`: text, bytes in base64 or hexadecimal digits, and arrays of text."""
_SCALE_MAX = 1_000
"""The maximum scale of a decimal in a message."""
_PRECISION_MAX = 38
"""The maximum precision of an Iceberg decimal."""
_DAY_US = 86_400_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DEBEZIUM_KINDS = {"c": RowKind.INSERT, "r": RowKind.INSERT, "u": RowKind.UPDATE, "d": RowKind.DELETE}


class RowWithKind(NamedTuple):
    """A row of a request.

    Attributes:
        kind: The kind of the row, or None if the request does not state it.
        values: The values by column.
    """

    kind: RowKind | None
    values: Mapping[str, Any]


def read_row_with_kind(row: Any, *, has_kind: bool) -> list[RowWithKind]:
    """Return a JSON row and its kind: insert, update or delete.

    The result is a list of one item, because a message of Debezium (`read_debezium`) may have several rows.

    Args:
        row: The decoded JSON.
        has_kind: Whether the field `_op` is the kind of the row, and not a column of the table.

    Raises:
        BadRequest: The row is not an object, or its kind is unknown. The message continues a sentence: the caller puts
            its subject before it, such as "Row 3".
    """
    if not isinstance(row, dict):
        raise BadRequest(f"is {show_json(row)}, and not an object with the columns")
    if not has_kind or KIND_FIELD not in row:
        return [RowWithKind(None, row)]
    return [RowWithKind(parse_kind(row[KIND_FIELD]), {name: row[name] for name in row if name != KIND_FIELD})]


def parse_kind(value: Any) -> RowKind | None:
    """Return the kind with this name, or None for null.

    Raises:
        BadRequest: The kind is unknown. The caller puts the subject of the message before it, such as "Row 3".
    """
    if value is None:
        return None
    kind = KINDS.get(value) if isinstance(value, str) else None
    if kind is None:
        raise BadRequest(f"has the {KIND_FIELD} {show_json(value)}; it has to be one of {', '.join(KINDS)}")
    return kind


def read_debezium(message: Any, key: Sequence[str]) -> list[RowWithKind]:
    """Return the changes in an envelope, the form in which Debezium describes a change of a row.

    A tombstone, and a message with the op `m`, have no changes. An update that changes the key has two: the deletion of
    the row with the old key, and the new row.

    Args:
        message: The decoded JSON of the message's value, with or without `schema` and `payload`.
        key: The names of the key columns. They are empty for a table without a key.

    Raises:
        BadRequest: The message is not an envelope, or its change cannot be applied. The caller puts the subject of the
            error's text before it, such as "Row 3".
    """
    envelope, schema = _open_message(message)
    if envelope is None:
        return []
    converters = _read_converters(schema)
    if not isinstance(envelope, dict) or not envelope.keys() & _ENVELOPE_FIELDS or "op" not in envelope:
        raise BadRequest(f"is {show_json(message)}, and not an envelope of Debezium with op, before and after")
    op = envelope["op"]
    kind = _DEBEZIUM_KINDS.get(op) if isinstance(op, str) else None
    if kind is None:
        if op == "m":  # The message comes from the database's log, and does not describe a row.
            return []
        raise BadRequest(f"has the op {show_json(op)}; only c, r, u and d change rows. Truncate the table by a commit")
    image_before, image_after = (_read_image(envelope, name, converters) for name in ("before", "after"))
    if kind is RowKind.DELETE:
        if image_before is None:
            raise BadRequest("deletes a row and has no before; set the table's replica identity so that it has the key")
        # Use only the key of a deleted row, because other columns may be missing or have no value.
        return [
            RowWithKind(
                kind, {name: image_before[name] for name in image_before if name in key} if key else image_before
            )
        ]
    if image_after is None:
        raise BadRequest(f"has the op {op} and no after")
    changes = [RowWithKind(kind, image_after)]
    if kind is RowKind.UPDATE and image_before is not None and key and all(name in image_before for name in key):
        old_key = {name: image_before[name] for name in key}
        if any(old_key[name] is not None and old_key[name] != image_after.get(name) for name in key):
            changes.insert(0, RowWithKind(RowKind.DELETE, old_key))
    return changes


def _open_message(message: Any) -> tuple[Any, Any]:
    """Return the envelope and the schema of a message, or None in place of a missing part.

    Kafka Connect can write a message as an object with only the members `schema` and `payload`. Any other message is
    the envelope itself.
    """
    if isinstance(message, dict) and "payload" in message and message.keys() <= {"schema", "payload"}:
        return message["payload"], message.get("schema")
    return message, None


class DebeziumValue(NamedTuple):
    """A value of a changed row.

    Attributes:
        column: The name of the column.
        value: The value in the message. It is None for a null, and for a value that the database did not send.
        kind: The Iceberg type according to the schema of the message, or `struct` for a type without an equivalent. It
            is None without a schema.
    """

    column: str
    value: Any
    kind: str | None


def list_debezium_values(message: Any, names: AbstractSet[str]) -> list[DebeziumValue]:
    """Return the values of an inserted or updated row in the columns that are not in `names`.

    The result for an invalid envelope, which `read_debezium` reports, is empty.
    """
    envelope, schema = _open_message(message)
    is_change = isinstance(envelope, dict) and envelope.get("op") in ("c", "r", "u")
    row = envelope.get("after") if is_change else None
    if not isinstance(row, dict) or row.keys() <= names:
        return []
    kinds = {name: _find_type(column) for name, column in _list_columns(schema, ("after",))}
    return [
        DebeziumValue(name, None if row[name] in _UNAVAILABLE_VALUES else row[name], kinds.get(name))
        for name in row
        if name not in names
    ]


def _list_columns(schema: Any, images: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name and the schema of each column in some images of a row, such as `after`."""
    for image in _list_objects(schema.get("fields")) if isinstance(schema, dict) else ():
        if image.get("field") in images:
            for column in _list_objects(image.get("fields")):
                if isinstance(column.get("field"), str):
                    yield column["field"], column


def _find_type(column: Mapping[str, Any]) -> str:
    """Return the Iceberg type of a column in the schema of a message, or `struct` if there is no equivalent."""
    meaning, kind = column.get("name"), column.get("type")
    if meaning == "org.apache.kafka.connect.data.Decimal":
        parameters = column.get("parameters")
        precision = str(parameters.get("connect.decimal.precision", "")) if isinstance(parameters, dict) else ""
        if not (precision.isascii() and precision.isdecimal() and len(precision) <= 2):
            return "struct"
        # Iceberg has no negative scale, and no scale above the precision.
        digits, scale = int(precision), _read_scale(parameters)
        return f"decimal({digits}, {scale})" if 0 <= scale <= digits <= _PRECISION_MAX and digits else "struct"
    if isinstance(meaning, str) and meaning in _MEANING_TYPES:
        return _MEANING_TYPES[meaning]
    return _PLAIN_TYPES.get(kind, "struct") if isinstance(kind, str) else "struct"


_PLAIN_TYPES: Mapping[str, str] = {
    **dict.fromkeys(("int8", "int16", "int32"), "int"),
    **dict.fromkeys(("float", "float32"), "float"),
    **dict.fromkeys(("double", "float64"), "double"),
    "int64": "long",
    "boolean": "boolean",
    "string": "string",
    "bytes": "binary",
}
"""The Iceberg type of each type of Kafka Connect."""
_MEANING_TYPES: Mapping[str, str] = {
    "io.debezium.time.Date": "date",
    "org.apache.kafka.connect.data.Date": "date",
    "io.debezium.time.Timestamp": "timestamp",
    "org.apache.kafka.connect.data.Timestamp": "timestamp",
    "io.debezium.time.MicroTimestamp": "timestamp",
    "io.debezium.time.NanoTimestamp": "timestamp_ns",
    "io.debezium.time.ZonedTimestamp": "timestamptz",
    "io.debezium.time.Time": "time",
    "org.apache.kafka.connect.data.Time": "time",
    "io.debezium.time.MicroTime": "time",
}
"""The Iceberg type of each semantic type. Semantic types that are missing here, such as enums, have the type of their
values."""


def _read_image(
    envelope: Mapping[str, Any], name: str, converters: Mapping[str, Callable[[Any], Any]]
) -> dict[str, Any] | None:
    """Return a row of an envelope, with converted values, or None if the envelope does not have the row.

    Args:
        envelope: The envelope.
        name: The name of the row in the envelope: `before` or `after`.
        converters: The functions that convert values, by column.

    Raises:
        BadRequest: The row is not an object, lacks a value, or has a value that cannot be converted.
    """
    image = envelope.get(name)
    if image is None:
        return None
    if not isinstance(image, dict):
        raise BadRequest(f"has the {name} {show_json(image)}, and not an object with the columns")
    if columns_without_value := [column for column, value in image.items() if value in _UNAVAILABLE_VALUES]:
        raise BadRequest(
            f"lacks the value of {columns_without_value[0]}, which the database did not send again; set the table's "
            "replica identity to FULL"
        )
    try:
        return {
            column: converters[column](value) if column in converters and value is not None else value
            for column, value in image.items()
        }
    except (TypeError, ValueError, OverflowError) as error:
        raise BadRequest(f"has a value in {name} that does not fit the schema of its message: {error}") from None


def _read_converters(schema: Any) -> dict[str, Callable[[Any], Any]]:
    """Return, by column, the functions that convert Debezium's values to JSON rows, from the schema of a message."""
    converters: dict[str, Callable[[Any], Any]] = {}
    for name, column in _list_columns(schema, ("before", "after")):
        if (converter := _find_converter(column.get("name"), column)) is not None:
            converters[name] = converter
    return converters


def _list_objects(value: Any) -> Iterable[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _find_converter(kind: Any, column: Mapping[str, Any]) -> Callable[[Any], Any] | None:
    """Return the function that converts values of a semantic type of Debezium or Kafka Connect.

    The result is None if the values need no conversion.

    Raises:
        BadRequest: The scale of a decimal is invalid.
    """
    if kind == "org.apache.kafka.connect.data.Decimal":
        scale = _read_scale(column.get("parameters"))
        return lambda value: _read_decimal(value, scale)
    if column.get("type") == "bytes":  # JSON rows contain binary values in hexadecimal.
        return lambda value: b64decode(value, validate=True).hex()
    return _CONVERTERS.get(kind) if isinstance(kind, str) else None


def _read_scale(parameters: Any) -> int:
    """Return the scale of a decimal, which Kafka Connect sends as text. The default is 0.

    Raises:
        BadRequest: The scale is not a number, or is too large.
    """
    text = str(parameters.get("scale", 0)) if isinstance(parameters, dict) else "0"
    digits = text.removeprefix("-")
    # Check the length first, because a very long number takes long to parse.
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 4 and int(digits) <= _SCALE_MAX):
        raise BadRequest(f"has a schema with a decimal of the scale {show_json(text)}; the limit is {_SCALE_MAX}")
    return int(text)


def _read_decimal(value: Any, scale: int) -> Any:
    """Return a decimal as text. Debezium sends the digits without a decimal point, as an integer in base64.

    A value that is not text is returned unchanged. The conversion of the row checks its type.
    """
    if not isinstance(value, str):
        return value
    unscaled_value = int.from_bytes(b64decode(value, validate=True), "big", signed=True)
    if scale < 0:
        return str(unscaled_value) + "0" * -scale
    digits = str(abs(unscaled_value)).rjust(scale + 1, "0")  # At least one digit precedes the point.
    sign = "-" if unscaled_value < 0 else ""
    return f"{sign}{digits[: len(digits) - scale]}{'.' if scale else ''}{digits[len(digits) - scale :]}"


def _add_to_epoch(value: Any, **unit: float) -> datetime:
    """Return the time that is a number of units after the epoch.

    Args:
        value: The number of units.
        unit: The unit, as the only argument of `timedelta`, such as `milliseconds=1`.

    Raises:
        ValueError: The value is not an integer.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{show_json(value)} is not a number")
    ((name, factor),) = unit.items()
    return _EPOCH + timedelta(**{name: value * factor})


def _format_timestamp(moment: datetime) -> str:
    return moment.replace(tzinfo=None).isoformat(timespec="microseconds")


def _parse_time_of_day(value: Any, unit_us: int) -> str:
    moment = _add_to_epoch(value, microseconds=unit_us)
    if not 0 <= value * unit_us < _DAY_US:  # MySQL's TIME may be a duration.
        raise ValueError(f"{value} is not a time of day")
    return moment.time().isoformat(timespec="microseconds")


def _format_nanoseconds(value: Any) -> str:
    seconds, nanoseconds = divmod(int(value), 1_000_000_000)
    return f"{(_EPOCH + timedelta(seconds=seconds)).replace(tzinfo=None).isoformat()}.{nanoseconds:09d}"


_CONVERTERS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(
        ("io.debezium.time.Date", "org.apache.kafka.connect.data.Date"),
        lambda value: _add_to_epoch(value, days=1).date().isoformat(),
    ),
    **dict.fromkeys(
        ("io.debezium.time.Timestamp", "org.apache.kafka.connect.data.Timestamp"),
        lambda value: _format_timestamp(_add_to_epoch(value, milliseconds=1)),
    ),
    "io.debezium.time.MicroTimestamp": lambda value: _format_timestamp(_add_to_epoch(value, microseconds=1)),
    "io.debezium.time.NanoTimestamp": _format_nanoseconds,
    **dict.fromkeys(
        ("io.debezium.time.Time", "org.apache.kafka.connect.data.Time"),
        lambda value: _parse_time_of_day(value, 1_000),
    ),
    "io.debezium.time.MicroTime": lambda value: _parse_time_of_day(value, 1),
}
"""The conversion for each semantic type. Values of all other types already have the form of JSON rows."""


def take_kinds(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, list[RowKind | None] | None]:
    """Return the rows without the column `_op`, and their kinds, or None if this column is missing.

    Raises:
        BadRequest: A kind is unknown. The message contains the number of the row in the batch.
    """
    kind_index = batch.schema.get_field_index(KIND_FIELD)
    if kind_index < 0:
        return batch, None
    kinds = []
    for number, value in enumerate(batch.column(kind_index).to_pylist()):
        try:
            kinds.append(parse_kind(value))
        except BadRequest as error:
            raise BadRequest(f"Row {number} {error.message}") from None
    names = [name for name in batch.schema.names if name != KIND_FIELD]
    return batch.select(names), kinds


def encode_kinds(kinds: Sequence[RowKind | None], key: Sequence[str], first_row: int = 0) -> bytes:
    """Encode the kinds for the log, one byte for each row. The result for a table without a key is empty.

    If the table has a key, a row without a kind is an update.

    Args:
        kinds: The kinds of the rows.
        key: The names of the key columns. They are empty for a table without a key.
        first_row: The number of the first row for messages.

    Raises:
        BadRequest: The table has no key, and a row is not an insert. The message contains the number of the row.
    """
    if not key:
        for number, kind in enumerate(kinds):
            if kind not in (None, RowKind.INSERT):
                raise BadRequest(
                    f"Row {first_row + number} has the kind {kind.name.lower()}, and the table has no key; only "
                    "inserts are possible. Set seamark.stream.key, or identifier fields"
                )
        return b""
    return bytes(RowKind.UPDATE if kind is None else kind for kind in kinds)


def make_default_kinds(row_count: int, key: Sequence[str]) -> bytes:
    """Return the kinds of rows for which the sender has given no kind, in the form of `encode_kinds`.

    Such rows are updates if the table has a key. For a table without a key, the result is empty.

    Args:
        row_count: The number of rows.
        key: The names of the key columns. They are empty for a table without a key.
    """
    return bytes([RowKind.UPDATE]) * row_count if key else b""


def show_json(value: Any) -> str:
    """Return a value as short JSON for messages."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


_SHOWN_CHARACTERS = 100
