"""Looks up rows by key: on the server, in the files of the table, or in a copy of the table in memory.

    with lookup_table(client, "shop.customers", key=["id"]) as customers:
        customers.get(17)                 # {"id": 17, "name": "Ada"}, or None

A thread updates the copy: it reads new rows continuously, and a later row replaces the earlier row with the same key.
After a change that a continuous read does not return, such as a DELETE, the thread reads the table again.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from seamark.connector.client.client import ARROW_STREAM, SeamarkClient
from seamark.connector.client.commits import sleep_before_attempt
from seamark.connector.client.errors import ClientError, InvalidRequest, NoSuchResource, Refused
from seamark.connector.client.names import Name, make_table_path
from seamark.connector.read.scans import scan
from seamark.connector.streams.reader import CHANGE_TYPE, EARLIEST, StreamReads, iterate
from seamark.formats.protocol.wire import AFTER_HEADER

_WAIT_S = 2.0
"""The maximum time in seconds of one request for new rows. `close` may wait as long."""
_RESTARTS_MAX = 5
"""The maximum number of successive attempts to read the table again."""
_DELETE = "delete"


class LookupFailed(Exception):
    """Raised if the copy of a table in memory, on which lookups run, can no longer be updated.

    The cause of the exception is the failure.
    """


class LookupTable:
    """A copy of a table in memory, by key. `lookup_table` creates it. Any number of threads may look up rows."""

    def __init__(self, reads: StreamReads, key: Sequence[str], columns: Sequence[str] | None, *, rows_max: int) -> None:
        """Start the thread that updates the copy. The arguments have the same meaning as in `lookup_table`."""
        self._reads, self._key, self._columns = reads, tuple(key), columns
        self._rows_max = rows_max
        self._rows: dict[Any, dict[str, Any]] = {}
        self._error: Exception | None = None
        self._failures = 0
        """The number of temporary errors since the table was last read completely."""
        self._restarts = 0
        """The number of restarts after removed rows since the table was last read completely."""
        self._closed = threading.Event()
        self._loaded = threading.Event()
        self._thread = threading.Thread(target=self._run, name="seamark-lookup", daemon=True)
        self._thread.start()

    def __enter__(self) -> LookupTable:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, key: Any) -> dict[str, Any] | None:
        """Return the row with a key, or None if no row has the key.

        Args:
            key: The value of the key column, or a tuple if the key has several columns.

        Raises:
            LookupFailed: The copy can no longer be updated.
        """
        self._check()
        return self._rows.get(key)

    def get_many(self, keys: Sequence[Any]) -> list[dict[str, Any] | None]:
        """Return the row of each key, or None for a key without a row.

        Raises:
            LookupFailed: The copy can no longer be updated.
        """
        self._check()
        rows = self._rows  # The thread may replace the dictionary at any time.
        return [rows.get(key) for key in keys]

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    def wait_until_loaded(self, timeout_s: float | None = None) -> bool:
        """Wait until the present rows of the table have been read. Return False if `timeout_s` has passed.

        Raises:
            LookupFailed: The table cannot be read.
        """
        is_loaded = self._loaded.wait(timeout_s)
        self._check()
        return is_loaded

    def _check(self) -> None:
        if self._error is not None:
            raise LookupFailed(f"The copy of the table can no longer be updated: {self._error}") from self._error

    def _run(self) -> None:
        """Follow the changes of the table until the copy is closed or fails.

        A refused request ends the copy, because its repetition would also be refused. After a temporary error, the
        table is read again. If its rows were removed, it is also read again, but at most `_RESTARTS_MAX` times in
        succession.
        """
        while not self._closed.is_set():
            try:
                self._follow()
            except (InvalidRequest, NoSuchResource) as error:
                # Rows were removed, or the log no longer has the next rows. The copy is correct again after the table
                # has been read from the start.
                if self._restarts == _RESTARTS_MAX:
                    self._fail(error)
                    return
                if self._restarts:  # The table may change each time while it is read again.
                    sleep_before_attempt(self._restarts, first_s=0.1, max_s=2.0)
                self._restarts += 1
            except Refused as error:
                self._fail(error)
                return
            except ClientError:
                sleep_before_attempt(self._failures, first_s=0.2, max_s=5.0)
                self._failures += 1
            except Exception as error:  # noqa: BLE001  the callers of `get` must receive it
                self._fail(error)
                return

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._loaded.set()

    def _follow(self) -> None:
        """Read the table from the start and then its new rows, until the table must be read from the start again.

        Callers see the earlier copy until all present rows have been read. Later changes are applied to the new copy.
        """
        rows: dict[Any, dict[str, Any]] = {}
        for batch in iterate(self._reads, EARLIEST, columns=self._columns, wait_s=_WAIT_S):
            if self._closed.is_set():
                return
            if batch is not None:
                self._apply(batch.rows, rows)
            elif rows is not self._rows:
                self._rows = rows  # All present rows have been read.
                self._failures = self._restarts = 0
                self._loaded.set()

    def _apply(self, batch: pa.RecordBatch, rows: dict[Any, dict[str, Any]]) -> None:
        kinds = batch.column(CHANGE_TYPE).to_pylist()
        for row, kind in zip(batch.drop_columns([CHANGE_TYPE]).to_pylist(), kinds, strict=True):
            key = row[self._key[0]] if len(self._key) == 1 else tuple(row[name] for name in self._key)
            if kind == _DELETE:
                rows.pop(key, None)
            else:
                rows[key] = row
        if len(rows) > self._rows_max:
            raise ValueError(f"the table has more than {self._rows_max:,} keys; increase rows_max if memory allows")


def lookup_table(
    client: SeamarkClient,
    table: Name,
    *,
    key: Sequence[str],
    columns: Sequence[str] | None = None,
    rows_max: int = 10_000_000,
    timeout_s: float | None = 600.0,
) -> LookupTable:
    """Return a copy of a table in memory that is updated continuously. Use it in a `with` block.

    Args:
        client: The client.
        table: A table with at most one row for each key, or a table whose later rows replace earlier rows.
        key: The columns of the key.
        columns: The columns to keep, in addition to the key columns, or None for all columns.
        rows_max: The maximum number of keys in memory.
        timeout_s: The maximum time in seconds to wait until the present rows have been read.

    Raises:
        InvalidRequest: `key` is empty, or `columns` lacks a column of the key.
        LookupFailed: The table cannot be read.
        TimeoutError: The present rows were not read in time.
    """
    if not key:
        raise InvalidRequest("key is empty; set it to the columns that identify a row")
    if columns is not None and (missing := [name for name in key if name not in columns]):
        raise InvalidRequest(f"columns does not contain the key column {missing[0]!r}; add it")
    copy = LookupTable(StreamReads(client, table, changes=True, skip_changes=False), key, columns, rows_max=rows_max)
    try:
        if not copy.wait_until_loaded(timeout_s):
            raise TimeoutError(f"The rows of {table} were not read within {timeout_s} s")
    except BaseException:
        copy.close()
        raise
    return copy


def lookup(
    client: SeamarkClient, table: Name, keys: Mapping[str, Sequence[Any]], *, columns: Sequence[str] | None = None
) -> pa.Table:
    """Return the rows that have one of the keys. The server finds their files with the table's indexes.

    Args:
        client: The client.
        table: The table.
        keys: The values of each key column, by name. Each column has one value for each key.
        columns: The columns to return, or None for all.

    Raises:
        InvalidRequest: The keys do not fit the columns.
        NoSuchResource: The table does not exist.
    """
    names = list(keys)
    lengths = {len(values) for values in keys.values()}
    if not names:
        raise InvalidRequest("keys has no columns; name each key column with the values of the keys")
    if len(lengths) != 1:
        raise InvalidRequest(
            f"the columns of keys have {min(lengths):,} to {max(lengths):,} values; "
            "each column must have one value for each key"
        )
    if not next(iter(lengths)):
        # Without keys, the scan reads no file, and returns an empty table with the columns.
        return scan(client, table, columns, where=False).to_arrow()
    if len(names) == 1:
        key_filter: dict[str, Any] = {"type": "in", "term": names[0], "values": list(dict.fromkeys(keys[names[0]]))}
        return scan(client, table, columns, where=key_filter).to_arrow()
    key_filter = _combine_any([_combine_all(names, values) for values in zip(*keys.values(), strict=True)])
    return scan(client, table, columns, where=key_filter).to_arrow()


def get_rows(
    client: SeamarkClient,
    table: Name,
    keys: Sequence[Any],
    *,
    columns: Sequence[str] | None = None,
    after: str = "",
) -> pa.Table:
    """Return the current rows with the given keys in one request, including rows that wait for a flush.

    The server reads the rows, so the client needs no access to the storage.

    Args:
        client: The client.
        table: The table.
        keys: At most 1,000 keys: mappings from column names to values or, if the key has one column, the values.
        columns: The columns to return, or None for all.
        after: The tokens of writes whose rows the result has to include (`StreamTableWriter.token`).

    Raises:
        InvalidRequest: The keys do not fit the columns.
        NoSuchResource: The table does not exist.
        Refused: The keys have too many rows. The status is 413.
        Unavailable: The server did not receive the rows of the tokens in time.
    """
    body: dict[str, Any] = {"keys": [_to_json(key) for key in keys]}
    if columns is not None:
        body["select"] = list(columns)
    headers = {"Content-Type": "application/json", **({AFTER_HEADER: after} if after else {})}
    path = f"{make_table_path(table)}/rows/get"
    answer = client._request("POST", path, {}, msgspec.json.encode(body), accept=ARROW_STREAM, headers=headers)
    return client._decode_table(answer).replace_schema_metadata(None)


def _to_json(value: Any) -> Any:
    """Return a key in the form of JSON rows: bytes in hexadecimal digits, and times with a zone in UTC."""
    match value:
        case Mapping():
            return {name: _to_json(item) for name, item in value.items()}
        case bytes():
            return value.hex()
        case datetime() if value.tzinfo is not None:
            return value.astimezone(UTC).isoformat()
        case np.generic():
            return _to_json(value.item())
    return value


def _combine_all(names: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    expression: dict[str, Any] = {"type": "eq", "term": names[0], "value": values[0]}
    for name, value in zip(names[1:], values[1:], strict=True):
        expression = {"type": "and", "left": expression, "right": {"type": "eq", "term": name, "value": value}}
    return expression


def _combine_any(expressions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the disjunction of expressions as a balanced tree, so that its depth is small."""
    if len(expressions) == 1:
        return expressions[0]
    middle = len(expressions) // 2
    return {"type": "or", "left": _combine_any(expressions[:middle]), "right": _combine_any(expressions[middle:])}
