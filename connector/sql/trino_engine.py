"""Runs a statement on Trino. The text is sent unchanged, because the dialect is Trino's SQL.

If the URL is that of Seamark's proxy, the proxy rewrites the statement to read fewer files. Rows arrive in pages, and
are returned as record batches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import pyarrow as pa

from seamark.connector.client.errors import InvalidRequest, ServerFailed, Unreachable
from seamark.formats.runtime.lazy_module import LazyModule

if TYPE_CHECKING:
    from trino import auth as trino_auth
    from trino import dbapi
    from trino import exceptions as trino_errors
else:
    dbapi, trino_auth = LazyModule("trino.dbapi"), LazyModule("trino.auth")
    trino_errors = LazyModule("trino.exceptions")

PAGE_ROWS = 1000
_CATALOG = "seamark"
_DECIMAL = re.compile(r"decimal\((\d+), *(\d+)\)")
_TIME = re.compile(r"time(?:\(\d+\))?")
_NESTED = re.compile(r"(array|map|row)\((.*)\)", re.DOTALL)
_ROW_FIELD = re.compile(r"(?:\"((?:[^\"]|\"\")*)\"|([^\s\"(),]+)) (?!with )(.+)", re.DOTALL)
"""Matches a field with a name: the quoted or the plain name, and the type."""
_OS_REASON = re.compile(r"\[Errno -?[0-9]+\] ([^\"')]+)")
_REQUESTS_AT = re.compile(r"host='([^']+)', port=([0-9]+)")
"""Matches the host and the port in the message of a connection error of `requests`."""
_ARROW_TYPES = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "real": pa.float32(),
    "double": pa.float64(),
    "varbinary": pa.binary(),
    "date": pa.date32(),
    "unknown": pa.null(),
}


@dataclass(frozen=True)
class TrinoAddress:
    """The address of a Trino: `http://user@host:port/?catalog=name`."""

    host: str
    port: int
    scheme: str
    user: str
    catalog: str

    @classmethod
    def parse(cls, url: str) -> TrinoAddress:
        """Parse the URL of a Trino.

        The URL contains no password. The environment variable SEAMARK_TRINO_PASSWORD contains it.

        Raises:
            ValueError: The text is not a valid URL of a Trino.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.password:
            raise ValueError(f"{url!r} is not the URL of a Trino; write http://user@host:port?catalog=name")
        parameters = parse_qs(parts.query)
        if set(parameters) - {"catalog"}:
            raise ValueError(f"{url!r} has unknown parameters; the URL of a Trino can have only the parameter catalog")
        port = parts.port or (443 if parts.scheme == "https" else 8080)
        catalog = parameters.get("catalog", [_CATALOG])[0]
        return cls(parts.hostname, port, parts.scheme, parts.username or "seamark", catalog)


class TrinoRows:
    """The result of one statement: its schema, and its batches of rows. The caller closes the result."""

    def __init__(
        self, address: TrinoAddress, text: str, *, schema: str | None = None, password: str | None = None
    ) -> None:
        """Run a statement.

        Raises:
            InvalidRequest: Trino refuses the statement.
            Unreachable: Trino does not respond.
            ServerFailed: The statement fails in Trino.
        """
        auth = None
        if password is not None:
            auth = trino_auth.BasicAuthentication(address.user, password)
        self._connection: Any = dbapi.connect(  # type: ignore[no-untyped-call]
            host=address.host,
            port=address.port,
            user=address.user,
            catalog=address.catalog,
            schema=schema,
            http_scheme=address.scheme,
            auth=auth,
            timezone="UTC",
        )
        try:
            self._cursor = self._connection.cursor()
            self._cursor.execute(text)
            columns = self._cursor.description or []
        except (trino_errors.Error, OSError) as error:
            self.close()
            raise _to_client_error(error) from None
        self.types = tuple(str(column.type_code) for column in columns)
        self.schema = pa.schema(
            [(str(column.name), find_arrow_type(kind)) for column, kind in zip(columns, self.types, strict=True)]
        )
        self._converters = [_make_converter(field.type) for field in self.schema]

    def read_batches(self) -> Iterator[pa.RecordBatch]:
        while True:
            try:
                rows = self._cursor.fetchmany(PAGE_ROWS)
            except (trino_errors.Error, OSError) as error:
                raise _to_client_error(error) from None
            if not rows:
                return
            arrays = [
                pa.array([None if row[position] is None else convert(row[position]) for row in rows], field.type)
                for position, (field, convert) in enumerate(zip(self.schema, self._converters, strict=True))
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def close(self) -> None:
        """Close the connection, and cancel the statement if it is still running."""
        cursor = getattr(self, "_cursor", None)
        if cursor is not None:
            cursor.cancel()
        self._connection.close()


def find_arrow_type(kind: str) -> pa.DataType:
    """Return the Arrow type for the name of a Trino type. A type without an Arrow type becomes a string.

    Times have microseconds, which is the precision of Iceberg.
    """
    match = _DECIMAL.fullmatch(kind)
    if match is not None:
        return pa.decimal128(int(match[1]), int(match[2]))
    nested_match = _NESTED.fullmatch(kind)
    if nested_match is not None:
        arguments = _split_arguments(nested_match[2])
        if nested_match[1] == "row":
            return pa.struct([_parse_row_field(number, text) for number, text in enumerate(arguments)])
        types = [find_arrow_type(text) for text in arguments]
        if len(types) == (2 if nested_match[1] == "map" else 1):
            return pa.map_(*types) if nested_match[1] == "map" else pa.list_(*types)
    if _TIME.fullmatch(kind):
        return pa.time64("us")
    if kind.startswith("timestamp"):
        return pa.timestamp("us", tz="UTC" if kind.endswith("with time zone") else None)
    return _ARROW_TYPES.get(kind, pa.string())


def _split_arguments(text: str) -> list[str]:
    """Return the parts between the commas that are outside of parentheses and quotes."""
    arguments, depth, start, is_quoted = [], 0, 0, False
    for position, letter in enumerate(text):
        if letter == '"':
            is_quoted = not is_quoted
        elif not is_quoted and letter == "," and depth == 0:
            arguments.append(text[start:position].strip())
            start = position + 1
        elif not is_quoted:
            depth += (letter == "(") - (letter == ")")
    return [*arguments, text[start:].strip()]


def _parse_row_field(number: int, text: str) -> pa.Field:
    """Return a field of a row. A field without a name is named by its position."""
    match = _ROW_FIELD.fullmatch(text)
    if match is None:
        return pa.field(f"field{number}", find_arrow_type(text))
    quoted_name, plain_name, type_text = match.groups()
    name = plain_name if quoted_name is None else quoted_name.replace('""', '"')
    return pa.field(name, find_arrow_type(type_text))


def _make_converter(kind: pa.DataType) -> Callable[[Any], Any]:
    """Return a function that converts a value of Trino's client to a value for Arrow. It is not called for None.

    Times with a zone are converted to UTC. Any type that became a string is converted with `str`.
    """
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return lambda value: value.astimezone(UTC)
    if pa.types.is_string(kind):
        return str
    if pa.types.is_list(kind):
        convert = _make_converter(kind.value_type)
        return lambda values: [None if value is None else convert(value) for value in values]
    if pa.types.is_map(kind):
        convert_key, convert_item = _make_converter(kind.key_type), _make_converter(kind.item_type)
        return lambda pairs: [
            (convert_key(key), None if value is None else convert_item(value)) for key, value in pairs.items()
        ]
    if pa.types.is_struct(kind):
        fields = [(field.name, _make_converter(field.type)) for field in kind]
        return lambda row: {
            name: None if value is None else convert_field(value)
            for (name, convert_field), value in zip(fields, row, strict=True)
        }
    return lambda value: value


def _to_client_error(error: Exception) -> Exception:
    if isinstance(error, trino_errors.TrinoUserError):
        return InvalidRequest(f"Trino refuses the statement: {error.message}", status=400)
    if isinstance(error, trino_errors.TrinoQueryError):
        return ServerFailed(f"Trino failed: {error.message}", status=500)
    if isinstance(error, trino_errors.Error | OSError):
        text = str(error)
        reason, address_match = _OS_REASON.search(text), _REQUESTS_AT.search(text)
        address_text = "" if address_match is None else f" at {address_match[1]}:{address_match[2]}"
        return Unreachable(f"Trino does not answer{address_text}: {text if reason is None else reason[1]}")
    return error
