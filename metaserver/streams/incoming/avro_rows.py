"""Reads rows from an Avro object container file, which contains the schema of its writer. The module does no I/O.

The input is not trusted. The reader of manifests, which has limits, parses and inflates the container. A schema is
accepted only if each value of an array, of a map and of the file takes at least one byte. The schema must be neither
recursive nor deep, so that no decoder runs out of stack.

Decoded values may need much more memory than their bytes in the file: a null takes at most one byte, and each nested
record becomes a dictionary. So an upper bound of the memory is computed before rows are decoded. For several rates of
memory per byte of the file, the compiler computes the *excess* of each type: the maximum, over all values, of the
memory of a value minus the rate times its bytes. The excess of an array or a map is 0 if the excess of its items is not
positive, and infinite otherwise. At each rate, the rows need at most their number times the excess of a row, plus the
rate times the bytes of the file. The smallest of these bounds must be within `_MEMORY_BYTES_MAX`. This also limits the
time of one row, which is decoded in one call.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any, NamedTuple

import fastavro
import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from seamark.formats.iceberg.manifests.avro import read_container
from seamark.formats.runtime.errors import BadRequest, Corrupt, TooLarge

MAGIC = b"Obj\x01"
INFLATED_BYTES_MAX = 16 << 20
"""The maximum size of the inflated rows of one file."""
_SCHEMA_CHARACTERS_MAX = 256 << 10
_DEPTH_MAX = 16
_TYPES_MAX = 5_000
"""The maximum number of types in a schema. A named type counts each time that it is used."""
_SCHEMAS_MAX = 100
"""The maximum number of schemas that are kept in memory."""
_MEMORY_BYTES_MAX = 256 << 20
"""The maximum memory of the decoded rows of one file."""
_RATES: NDArray[np.float64] = 6.0 * 2.0 ** (np.arange(96) / 4)
"""The rates for which a bound is computed, in bytes of memory per byte of the file.

The rates rise from 6 to about 10^8. Each is 2^(1/4) times the rate before it, so the best of these rates is close to
the best of all rates. A character that takes one byte in the file takes at most 5 bytes in Python and Arrow together,
so the lowest rate is sufficient for the characters of strings.
"""
_NULL_BYTES = 64
_VALUE_BYTES = 96
_BINARY_BYTES = 160
_DECIMAL_BYTES = 256
_LIST_BYTES = 256
_MAP_BYTES = 320
_ENTRY_BYTES = 256
_RECORD_BYTES = 224
"""The maximum memory of a value of each type, without its bytes in the file, its items and its fields.

It includes the object in Python, its places in a dictionary and in lists, converted copies, and the value in Arrow.
"""
_SLOT_BYTES = 16
"""The maximum size of a number, an offset or a decimal in Arrow. A null takes the same space as a value."""

_DECIMAL_DIGITS_MAX, _DECIMAL_STORED_BYTES_MAX = 38, 17
"""The maximum precision of a decimal, and the maximum size of its stored number, which has 38 digits and a sign."""

Convert = Callable[[Any], Any]
_PRIMITIVES = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
}
_LOGICAL = {
    ("int", "date"): pa.date32(),
    ("int", "time-millis"): pa.time32("ms"),
    ("long", "time-micros"): pa.time64("us"),
    ("long", "timestamp-millis"): pa.timestamp("ms", "UTC"),
    ("long", "timestamp-micros"): pa.timestamp("us", "UTC"),
    ("long", "timestamp-nanos"): pa.timestamp("ns", "UTC"),
    ("long", "local-timestamp-millis"): pa.timestamp("ms"),
    ("long", "local-timestamp-micros"): pa.timestamp("us"),
    ("long", "local-timestamp-nanos"): pa.timestamp("ns"),
}
"""The Arrow types of the logical types whose values are equal to the stored numbers."""


class _Column(NamedTuple):
    """A type of Avro, and its equivalent in Arrow.

    Attributes:
        type: The type in Arrow.
        plain: The Avro schema without logical types, with which values are decoded.
        has_bytes: Whether each value takes at least one byte.
        nullable: Whether a value may be null.
        convert: Converts a decoded value to the value for Arrow, or None if no conversion is needed.
        excess: Numbers that bound the memory of a decoded value. For each rate in `_RATES` (bytes of memory per byte of
            the file), it is the maximum memory of a value minus the rate times its bytes in the file.
        slot_bytes: The size of a null in Arrow.
    """

    type: pa.DataType
    plain: Any
    excess: NDArray[np.float64]
    slot_bytes: int = _SLOT_BYTES
    has_bytes: bool = True
    nullable: bool = False
    convert: Convert | None = None


class _RowReader(NamedTuple):
    """Decodes the rows of files with one schema.

    Attributes:
        schema: The schema of a row without logical types.
        columns: The columns by name.
        excess: For each rate in `_RATES` (bytes of memory per byte of the file), the maximum memory of a decoded row
            beyond the rate times its bytes in the file.
    """

    schema: Any
    columns: dict[str, _Column]
    excess: NDArray[np.float64]

    def bound_memory(self, rows: int, size_bytes: int) -> float:
        """Return an upper bound of the memory of decoded rows in bytes.

        The memory is at most a rate times the bytes of the file, plus the maximum memory of each row beyond that
        (`excess`). So each rate of memory per byte gives an upper bound. The result is the lowest of them.

        Args:
            rows: The number of rows.
            size_bytes: The size of the inflated rows.
        """
        return float(np.min(rows * self.excess + _RATES * size_bytes)) if rows else 0.0


def read_avro(data: bytes, subject: str, *, rows_max: int) -> pa.RecordBatch:
    """Return the rows of an Avro object container file.

    Args:
        data: The file.
        subject: The description of the file, for messages.
        rows_max: The maximum number of rows.

    Raises:
        BadRequest: The file is damaged, or its schema has a type that is not supported.
        TooLarge: The file has too many rows, or the decoded rows may need too much memory.
    """
    try:
        container = read_container(data, subject, inflated_limit_bytes=INFLATED_BYTES_MAX)
    except Corrupt as error:
        raise BadRequest(error.message) from None
    reader = _compile_schema(container.metadata["avro.schema"])
    counts, edges = container.counts.tolist(), container.edges.tolist()
    if sum(counts) > rows_max:
        raise TooLarge(f"{subject} has more than {rows_max:,} rows; send them in several messages")
    memory_bytes = reader.bound_memory(sum(counts), edges[-1])
    if memory_bytes > _MEMORY_BYTES_MAX:
        raise TooLarge(
            f"{subject} has {sum(counts):,} rows in {edges[-1]:,} bytes, which may need {memory_bytes:,.0f} bytes of "
            f"memory by their schema; the limit is {_MEMORY_BYTES_MAX:,} bytes. Send the rows in several messages"
        )
    rows: list[Any] = []
    for count, start, end in zip(counts, edges[:-1], edges[1:], strict=True):
        block = io.BytesIO(container.heap[start:end].tobytes())
        try:
            rows += [fastavro.schemaless_reader(block, reader.schema, None) for _ in range(count)]
        except (EOFError, ValueError, IndexError, TypeError, OverflowError, UnicodeDecodeError) as error:
            raise BadRequest(f"{subject} has a row that does not have its schema: {str(error)[:200]}") from None
        if block.tell() != end - start:
            raise BadRequest(f"{subject} has a block with more bytes than its rows have")
    try:
        arrays = {name: _to_array([row[name] for row in rows], column) for name, column in reader.columns.items()}
        return pa.record_batch(arrays)
    except MemoryError:  # Do not treat it as an `ArrowException`, of which a subclass is also a MemoryError.
        raise
    except (pa.ArrowException, ValueError, OverflowError, TypeError) as error:
        raise BadRequest(f"{subject} has a value that does not have its type: {str(error)[:200]}") from None


def _to_array(values: list[Any], column: _Column) -> pa.Array:
    if column.convert is not None:
        values = [None if value is None else column.convert(value) for value in values]
    return pa.array(values, column.type)


@lru_cache(_SCHEMAS_MAX)
def _compile_schema(text: str) -> _RowReader:
    """Return the reader for rows with a schema.

    A row must have at least one byte. Otherwise, a tiny file could contain any number of rows.

    Raises:
        BadRequest: The schema is invalid, or not supported.
    """
    if len(text) > _SCHEMA_CHARACTERS_MAX:
        raise BadRequest(
            f"The Avro schema has {len(text):,} characters; the limit is {_SCHEMA_CHARACTERS_MAX:,} characters"
        )
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"The Avro schema is not valid JSON: {error}") from None
    if not isinstance(schema, dict) or schema.get("type") != "record":
        raise BadRequest("The Avro schema is not a record; the rows of a table are records")
    compiler = _Compiler()
    columns = compiler.read_fields(schema, 0)
    if not any(column.has_bytes for column in columns.values()):
        raise BadRequest("The Avro schema has no field with a value")
    fields = [{"name": name, "type": column.plain} for name, column in columns.items()]
    plain_schema = {"type": "record", "name": "row", "fields": fields}
    try:
        return _RowReader(fastavro.parse_schema(plain_schema), columns, _sum_excess(columns))
    except (ValueError, TypeError, KeyError, fastavro.schema.SchemaParseException) as error:
        raise BadRequest(f"The Avro schema is invalid: {str(error)[:200]}") from None


class _NamedType(NamedTuple):
    """A named type, and the namespace in which it is defined."""

    schema: Mapping[str, Any]
    namespace: str


class _Compiler:
    """Translates the types of one schema. Each reference to a named type is replaced by the type, with a new name."""

    def __init__(self) -> None:
        self._named_types: dict[str, _NamedType] = {}
        self._open_names: set[str] = set()
        """The full names of the records that contain the current type."""
        self._namespace = ""
        self._types = 0

    def read_fields(self, schema: Mapping[str, Any], depth: int) -> dict[str, _Column]:
        """Return the fields of a record by name.

        While the fields are read, names without a namespace belong to the namespace of the record, and the record
        counts as open. So a field whose type is the record itself can be refused.

        Raises:
            BadRequest: A field is invalid, occurs twice, or has a type that is not supported.
        """
        fields = schema.get("fields")
        if not isinstance(fields, list):
            raise BadRequest("The Avro schema has a record without a list of fields")
        name, outer = self._define(schema), self._namespace
        self._namespace = name.rpartition(".")[0]
        self._open_names.add(name)
        columns: dict[str, _Column] = {}
        for field in fields:
            if not isinstance(field, dict) or not isinstance(field.get("name"), str) or "type" not in field:
                raise BadRequest("The Avro schema has a field without a name or a type")
            if field["name"] in columns:
                raise BadRequest(f"The Avro schema has the field {field['name'][:100]!r} twice in a record")
            columns[field["name"]] = self.read_type(field["type"], depth + 1)
        self._open_names.remove(name)
        self._namespace = outer
        return columns

    def read_type(self, schema: Any, depth: int) -> _Column:
        """Return the column for a type in an Avro schema.

        Args:
            schema: The decoded JSON of the type: a name, a union as a list, or an object.
            depth: The number of types around this type.

        Raises:
            BadRequest: The type is not supported.
        """
        self._types += 1
        if depth > _DEPTH_MAX or self._types > _TYPES_MAX:
            raise BadRequest(
                f"The Avro schema has more than {_DEPTH_MAX} levels or more than {_TYPES_MAX:,} types; flatten it"
            )
        if isinstance(schema, list):
            return self._read_union(schema, depth)
        if isinstance(schema, str):
            return self._read_name(schema, depth)
        if not isinstance(schema, dict):
            raise BadRequest(f"The Avro schema has {str(schema)[:100]!r} in the place of a type")
        match schema.get("type"):
            case "record":
                return self._read_record(schema, depth)
            case "array":
                return self._read_array(schema, depth)
            case "map":
                return self._read_map(schema, depth)
            case "enum":
                return self._read_enum(schema)
            case "fixed":
                return self._read_fixed(schema)
            case str() as name if name in _PRIMITIVES:
                return _read_primitive(name, schema)
            case other:
                return self.read_type(other, depth + 1)

    def _define(self, schema: Mapping[str, Any]) -> str:
        """Add a named type, and return its full name (Avro 1.12, "Names").

        A type may be read again through its name, but a second definition with the same name is refused.

        Raises:
            BadRequest: The type has no valid name, or a name that is already defined.
        """
        name, namespace = schema.get("name"), schema.get("namespace", self._namespace)
        if not isinstance(name, str) or not isinstance(namespace, str):
            raise BadRequest("The Avro schema has a named type without a valid name")
        full_name = name if "." in name or not namespace else f"{namespace}.{name}"
        if self._named_types.setdefault(full_name, _NamedType(schema, self._namespace)).schema is not schema:
            raise BadRequest(f"The Avro schema defines the type {full_name[:100]!r} twice")
        return full_name

    def _read_name(self, name: str, depth: int) -> _Column:
        if name in _PRIMITIVES:
            return _read_primitive(name, {})
        if name == "null":
            excess = _compute_excess(_NULL_BYTES, 0)
            return _Column(pa.null(), "null", excess, slot_bytes=0, has_bytes=False, nullable=True)
        full_name = name if "." in name or not self._namespace else f"{self._namespace}.{name}"
        if full_name in self._open_names:
            raise BadRequest(f"The Avro schema is recursive: the type {full_name[:100]!r} contains itself")
        named_type = self._named_types.get(full_name)
        if named_type is None:
            raise BadRequest(f"The Avro schema names the unknown type {full_name[:100]!r}")
        outer, self._namespace = self._namespace, named_type.namespace
        column = self.read_type(named_type.schema, depth + 1)
        self._namespace = outer
        return column

    def _read_union(self, schema: list[Any], depth: int) -> _Column:
        """Return the column of a value that may be null.

        Its excess, the memory of a value beyond a rate times its bytes in the file, is that of null or of the value,
        the larger of both. The byte in the file that selects the type reduces it by one rate.

        Raises:
            BadRequest: The union has other types than null and one type, or the type is not supported.
        """
        value_types = [value_type for value_type in schema if value_type != "null"]
        if len(value_types) != 1 or len(schema) > 2:
            raise BadRequest("The Avro schema has a union other than of null and one type; use a nullable column")
        column = self.read_type(value_types[0], depth + 1)
        plain_schema = ["null" if value_type == "null" else column.plain for value_type in schema]
        excess = np.maximum(column.excess, _NULL_BYTES + column.slot_bytes) - _RATES
        return column._replace(plain=plain_schema, excess=excess, has_bytes=True, nullable=True)

    def _read_record(self, schema: Mapping[str, Any], depth: int) -> _Column:
        """Return the column of a record, whose values are decoded as dictionaries.

        The plain schema, with which fastavro decodes values, has no logical types, and a distinct name for each record.
        A null record also takes the space of a null in the column of each field (`slot_bytes`).
        """
        type_number = self._types
        columns = self.read_fields(schema, depth)
        fields = [pa.field(name, column.type, nullable=column.nullable) for name, column in columns.items()]
        plain_schema = {
            "type": "record",
            "name": f"r{type_number}",
            "fields": [{"name": name, "type": column.plain} for name, column in columns.items()],
        }
        converts = {name: column.convert for name, column in columns.items() if column.convert is not None}

        def convert(value: Any) -> Any:
            for name, convert_field in converts.items():
                if value[name] is not None:
                    value[name] = convert_field(value[name])
            return value

        has_bytes = any(column.has_bytes for column in columns.values())
        return _Column(
            pa.struct(fields),
            plain_schema,
            _sum_excess(columns),
            slot_bytes=1 + sum(column.slot_bytes for column in columns.values()),
            has_bytes=has_bytes,
            convert=convert if converts else None,
        )

    def _read_array(self, schema: Mapping[str, Any], depth: int) -> _Column:
        """Return the column of an array. An array takes at least one byte in the file.

        Its excess is the memory of the list and of all items beyond a rate times their bytes in the file.
        """
        item = self._read_item(schema.get("items"), depth)
        return _Column(
            pa.list_(pa.field("element", item.type, nullable=item.nullable)),
            {"type": "array", "items": item.plain},
            _compute_excess(_LIST_BYTES, 1) + _compute_excess_of_items(item.excess),
            convert=item.convert and _convert_list(item.convert),
        )

    def _read_map(self, schema: Mapping[str, Any], depth: int) -> _Column:
        """Return the column of a map with text keys. A map, and each of its keys, takes at least one byte in the file.

        Its excess is the memory of the map and of all entries beyond a rate times their bytes in the file.
        """
        item_column = self._read_item(schema.get("values"), depth)
        convert_item = item_column.convert

        def convert(value: Any) -> Any:
            if convert_item is None:
                return list(value.items())
            return [(key, None if item is None else convert_item(item)) for key, item in value.items()]

        entry_excess = item_column.excess + _compute_excess(_ENTRY_BYTES, 1)
        excess = _compute_excess(_MAP_BYTES, 1) + _compute_excess_of_items(entry_excess)
        plain_schema = {"type": "map", "values": item_column.plain}
        return _Column(pa.map_(pa.string(), item_column.type), plain_schema, excess, convert=convert)

    def _read_item(self, schema: Any, depth: int) -> _Column:
        """Return the type of the values of an array or a map.

        Values without bytes, such as nulls, are refused, because a tiny file could contain any number of them.

        Raises:
            BadRequest: The type is not supported, or its values may have no bytes.
        """
        item = self.read_type(schema, depth + 1)
        if not item.has_bytes:
            raise BadRequest("The Avro schema has an array or a map of values without bytes")
        return item

    def _read_enum(self, schema: Mapping[str, Any]) -> _Column:
        """Return the column of an enum, whose values become strings.

        Raises:
            BadRequest: The enum has no symbols or no valid name.
        """
        symbols = schema.get("symbols")
        if not isinstance(symbols, list) or not all(isinstance(symbol, str) for symbol in symbols):
            raise BadRequest("The Avro schema has an enum without symbols")
        self._define(schema)
        # In Arrow, each value contains the characters of its symbol, which take at most four bytes each.
        memory_bytes = _VALUE_BYTES + 4 * max(map(len, symbols), default=0)
        # Each enum gets a distinct name, because fastavro does not accept a name twice.
        plain_schema = {"type": "enum", "name": f"e{self._types}", "symbols": symbols}
        return _Column(pa.string(), plain_schema, _compute_excess(memory_bytes, 1))

    def _read_fixed(self, schema: Mapping[str, Any]) -> _Column:
        """Return the column of values of a fixed size, which are bytes or decimals.

        Raises:
            BadRequest: The size, the name or the decimal is invalid.
        """
        size = schema.get("size")
        if not isinstance(size, int) or not 1 <= size <= INFLATED_BYTES_MAX:
            raise BadRequest("The Avro schema has a fixed type without a valid size")
        self._define(schema)
        plain_schema = {"type": "fixed", "name": f"f{self._types}", "size": size}
        decimal = _read_decimal(schema, plain_schema, size)
        if decimal is not None:
            return decimal
        # The memory counts the `size` bytes of a value twice: in the object in Python, and in the Arrow column.
        excess = _compute_excess(_BINARY_BYTES + 2 * size, size)
        return _Column(pa.binary(size), plain_schema, excess, slot_bytes=_SLOT_BYTES + size)


def _read_primitive(name: str, schema: Mapping[str, Any]) -> _Column:
    """Return the column of a primitive type. A logical type determines the type in Arrow."""
    kind = _LOGICAL.get((name, str(schema.get("logicalType"))))
    decimal = _read_decimal(schema, name, 1) if name == "bytes" else None
    if decimal is not None:
        return decimal
    memory_bytes = _BINARY_BYTES if name in ("bytes", "string") else _VALUE_BYTES
    # A float takes 4 bytes in the file, and a double 8 bytes. A value of another type takes at least one byte.
    file_bytes_min = {"float": 4, "double": 8}.get(name, 1)
    excess = _compute_excess(memory_bytes, file_bytes_min)
    return _Column(_PRIMITIVES[name] if kind is None else kind, name, excess)


def _read_decimal(schema: Mapping[str, Any], plain_schema: Any, size_bytes: int) -> _Column | None:
    """Return the type of decimals that are stored as bytes, or None if the bytes are not decimals.

    Args:
        schema: The type.
        plain_schema: The type without its logical type.
        size_bytes: The minimum size of a value in the file.

    Raises:
        BadRequest: The precision or the scale is not supported.
    """
    precision, scale = schema.get("precision"), schema.get("scale", 0)
    if schema.get("logicalType") != "decimal" or not isinstance(precision, int) or not isinstance(scale, int):
        return None
    if not 0 <= scale <= precision or not 1 <= precision <= _DECIMAL_DIGITS_MAX:
        raise BadRequest(f"The Avro schema has a decimal of precision {precision} and scale {scale}; at most 38 digits")

    def convert(value: bytes) -> Decimal:
        if len(value) > _DECIMAL_STORED_BYTES_MAX:  # A long number takes long to parse.
            raise ValueError(f"a decimal of {len(value)} bytes")
        # Parse the number from text, because decimal arithmetic rounds to 28 digits.
        return Decimal(f"{int.from_bytes(value, 'big', signed=True)}E-{scale}")

    # The memory of a value is that of its bytes and of the number.
    excess = _compute_excess(_DECIMAL_BYTES + size_bytes, size_bytes)
    return _Column(pa.decimal128(precision, scale), plain_schema, excess, convert=convert)


def _compute_excess(memory_bytes: int, size_bytes: int) -> NDArray[np.float64]:
    """Return the memory of a value beyond a rate times its size in the file, for each rate in `_RATES`.

    A rate is a number of bytes of memory per byte of the file. A negative result means that the value needs less.
    """
    return memory_bytes - size_bytes * _RATES


def _sum_excess(columns: Mapping[str, _Column]) -> NDArray[np.float64]:
    """Return the excess of a record for each rate in `_RATES`: its memory minus the rate times its size in the file.

    The record is decoded as a dictionary. The excess is that of the dictionary plus that of each value.
    """
    return sum((column.excess for column in columns.values()), _compute_excess(_RECORD_BYTES, 0))


def _compute_excess_of_items(excess: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the excess of all items of an array, for each rate in `_RATES`.

    The excess is the memory minus the rate times the size in the file. The number of items is not known. So the result
    is infinite at rates at which the excess of a single item is positive, and 0 at the other rates.

    Args:
        excess: The excess of one item, for each rate.
    """
    return np.where(excess > 0, np.inf, 0.0)


def _convert_list(convert: Convert) -> Convert:
    return lambda values: [None if value is None else convert(value) for value in values]
