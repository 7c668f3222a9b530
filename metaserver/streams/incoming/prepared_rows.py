"""Prepares the rows of a request for the log: reads their kinds, conforms their columns, and chooses their shards.

If a row does not fit the table, the whole request is refused. However, if the table has a dead-letter table, only the
rows that do not fit are rejected. The module does no I/O.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.log.port import Batch, RowKind
from seamark.metaserver.streams.incoming.changes import (
    KIND_FIELD,
    RowWithKind,
    encode_kinds,
    make_default_kinds,
    read_debezium,
    read_row_with_kind,
    take_kinds,
)
from seamark.metaserver.streams.incoming.rows import RejectedRow, to_batch
from seamark.metaserver.streams.keys import find_key_columns
from seamark.metaserver.streams.row_files import RowFiles

REJECTED_ROWS_MAX = 1_000
"""The maximum number of rejected rows of a request. Finding a rejected row takes some milliseconds."""
_ROW_NUMBER = re.compile(r"^Row 0,? ")
"""Matches the number of the row in a message about a row that was prepared alone."""


class _TooManyRejected(BadRequest):
    """Raised if so many rows do not fit that the request is refused.

    An error of one row only rejects this row. This error ends the search for such rows instead, and refuses the
    request.
    """


JoinedRows: TypeAlias = Sequence[Mapping[str, Any]] | pa.RecordBatch
"""The JSON rows or Arrow rows of a request that may become a part of a larger batch."""


class PreparedRows(NamedTuple):
    """Rows for the log.

    Attributes:
        row_count: The number of rows that fit.
        batches: The rows that fit: one batch for a table without a key, or batches by shard for a table with a key. It
            is None if there are no rows.
        rejected: The rows that do not fit, in the order of the request.
    """

    row_count: int
    batches: Batch | Mapping[int, Batch] | None
    rejected: list[RejectedRow]


class _ReadRows(NamedTuple):
    """The changes of JSON rows.

    Attributes:
        values: The values of each change by column.
        kinds: The kind of each change. It is empty for a table without a key.
        row_numbers: The number of the row to which each change belongs.
    """

    values: Sequence[Mapping[str, Any]]
    kinds: bytes
    row_numbers: Sequence[int]


class _ConformedRows(NamedTuple):
    """Rows with the table's columns, and the kind of each row, which is empty for a table without a key."""

    rows: pa.RecordBatch
    kinds: bytes


@dataclass(frozen=True)
class RowPreparation:
    """The preparation of the rows of one request.

    Attributes:
        metadata: The table's metadata.
        row_files: Conforms and packs rows.
        shards: The number of shards of the table.
        is_envelope: Whether JSON rows are envelopes of Debezium.
        rejects_rows: Whether only the rows that do not fit are rejected. Otherwise, the whole request is refused.
        left_out: The columns without values that the table does not have. They are left out of the rows.
    """

    metadata: TableMetadata
    row_files: RowFiles
    shards: int
    is_envelope: bool = False
    rejects_rows: bool = False
    left_out: AbstractSet[str] = frozenset()

    def prepare_json(self, row_values: Sequence[Any], lines: Sequence[bytes] | None = None) -> PreparedRows:
        """Prepare JSON rows.

        Args:
            row_values: The result of `decode_rows`.
            lines: The text of each row, if the rows are JSON lines.

        Raises:
            BadRequest: A row does not fit, or too many rows are rejected. The message contains the number of the row,
                the column and the value.
        """
        key = find_key_columns(self.metadata)
        read_rows, rejected_rows = self._read_changes(row_values, key)

        def conform(rows: Sequence[int]) -> _ConformedRows:
            is_whole = len(rows) == len(read_rows.values)
            values = read_rows.values if is_whole else [read_rows.values[row] for row in rows]
            kinds = read_rows.kinds if is_whole or not key else bytes(read_rows.kinds[row] for row in rows)
            batch = to_batch(values, self.metadata.current_schema)
            return _ConformedRows(self.row_files.conform(batch, self.metadata, kinds, key), kinds)

        conformed_rows, reasons = self._conform(conform, len(read_rows.values))
        if reasons:
            # Reject all changes of a message if one of them does not fit.
            rejected_rows |= {read_rows.row_numbers[row]: reason for row, reason in reasons.items()}
            accepted_rows = [
                row for row in range(len(read_rows.values)) if read_rows.row_numbers[row] not in rejected_rows
            ]
            conformed_rows = [conform(accepted_rows)] if accepted_rows else []
        rejected = [
            RejectedRow(
                encode_json(row_values[number]) if lines is None else lines[number].decode("utf-8", "replace"),
                rejected_rows[number],
            )
            for number in sorted(rejected_rows)
        ]
        return self._pack(conformed_rows, key, rejected)

    def accepts_joined_rows(self, rows: JoinedRows) -> bool:
        """Return whether `prepare_joined`, which prepares several requests at once, may prepare the rows of a request.

        The result of `prepare_joined` is the same as that of `prepare_json` or `prepare_arrow` only under conditions.
        Rows state no kind (insert, update or delete), and no row is rejected alone. The table has no key, or a single
        shard. Arrow columns must be concatenated without conversion.
        """
        if self.is_envelope or self.rejects_rows or self.left_out:
            return False
        if isinstance(rows, pa.RecordBatch):
            if KIND_FIELD in rows.schema.names or any(map(_is_compound, rows.schema.types)):
                return False
        elif set(map(type, rows)) != {dict} or any(KIND_FIELD in row for row in rows):
            return False
        return self.shards == 1 or not find_key_columns(self.metadata)

    def prepare_joined(self, requests: Sequence[JoinedRows]) -> PreparedRows:
        """Prepare the rows of several requests as one batch, in their order.

        Args:
            requests: The rows of each request. `accepts_joined_rows` must have accepted them.

        Raises:
            BadRequest: A row does not fit. The number of the row in the message is not its number in its request.
        """
        key = find_key_columns(self.metadata)
        parts: list[_ConformedRows] = []
        # Conform requests with different columns separately, because a missing column gets its default.
        for _, requests_with_columns in itertools.groupby(requests, key=_identify_columns):
            batch = _join_rows(list(requests_with_columns), self.metadata)
            kinds = make_default_kinds(batch.num_rows, key)
            parts.append(_ConformedRows(self.row_files.conform(batch, self.metadata, kinds, key), kinds))
        return self._pack(parts, key, [])

    def _read_changes(self, row_values: Sequence[Any], key: Sequence[str]) -> tuple[_ReadRows, dict[int, str]]:
        """Return the changes of JSON rows, and the reasons for invalid rows, by the number of the row.

        A row is one change, but an envelope of Debezium may have none or two. The field `_op` is the kind of a row,
        unless the table has a column with this name.

        Raises:
            BadRequest: A row is invalid, and the whole request must be refused.
        """
        has_kind = all(field.name != KIND_FIELD for field in self.metadata.current_schema.fields)
        is_plain = not self.is_envelope and set(map(type, row_values)) <= {dict}
        if is_plain and not (has_kind and any(KIND_FIELD in row for row in row_values)):
            kinds = make_default_kinds(len(row_values), key)  # No row states a kind, so no loop is needed.
            return _ReadRows(
                [self._drop_left_out_columns(row) for row in row_values], kinds, range(len(row_values))
            ), {}
        changes: list[RowWithKind] = []
        row_numbers: list[int] = []
        rejected_rows: dict[int, str] = {}
        for number, row in enumerate(row_values):
            try:
                if isinstance(row, RejectedRow):
                    raise BadRequest(row.reason)
                row_changes = (
                    read_debezium(row, key) if self.is_envelope else read_row_with_kind(row, has_kind=has_kind)
                )
                encode_kinds([change.kind for change in row_changes], key, number)
            except BadRequest as error:
                if not self.rejects_rows:
                    message = error.message if error.message.startswith("Row ") else f"Row {number} {error.message}"
                    raise BadRequest(message) from None
                rejected_rows[number] = error.message
                continue
            changes += row_changes
            row_numbers += [number] * len(row_changes)
        kinds = encode_kinds([change.kind for change in changes], key)
        return _ReadRows(
            [self._drop_left_out_columns(change.values) for change in changes], kinds, row_numbers
        ), rejected_rows

    def _drop_left_out_columns(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the values of a row without the columns in `left_out`, which the table does not have."""
        if self.left_out.isdisjoint(values):
            return values
        return {name: value for name, value in values.items() if name not in self.left_out}

    def prepare_arrow(self, batches: Sequence[pa.RecordBatch]) -> PreparedRows:
        """Prepare Arrow rows.

        Raises:
            BadRequest: A row does not fit, and the table has no dead-letter table. Or too many rows do not fit. The
                message contains the column and the value. Or a kind is invalid, or envelopes of Debezium are expected.
        """
        if self.is_envelope:
            raise BadRequest("Envelopes of Debezium are JSON; send them as application/json or application/x-ndjson")
        key = find_key_columns(self.metadata)
        has_kind = all(field.name != KIND_FIELD for field in self.metadata.current_schema.fields)
        parts: list[_ConformedRows] = []
        rejected: list[RejectedRow] = []
        first = 0
        for batch in batches:
            if batch.num_rows:
                stated_kinds: Sequence[RowKind | None] | None
                rows, stated_kinds = take_kinds(batch) if has_kind else (batch, None)
                if stated_kinds is None:
                    kinds = make_default_kinds(batch.num_rows, key)
                else:
                    kinds = encode_kinds(stated_kinds, key, first)
                if self.left_out:
                    rows = rows.drop_columns(sorted(self.left_out))
                conformed_rows, reasons = self._conform(_ArrowRows(self, rows, kinds, key).conform, rows.num_rows)
                parts += conformed_rows
                rejected += [
                    RejectedRow(_show_arrow_row(batch.slice(row, 1)), reason) for row, reason in sorted(reasons.items())
                ]
            first += batch.num_rows
        return self._pack(parts, key, rejected)

    def _conform(self, conform: Any, count: int) -> tuple[list[_ConformedRows], dict[int, str]]:
        """Conform rows to the columns of the table.

        If `rejects_rows` is set, rows that do not fit are left out. Repeated halving finds them: if a range fails, both
        halves are tried. Otherwise, an error refuses all rows.

        Args:
            conform: Conforms the rows with the numbers in a range, and raises BadRequest if one of them does not fit.
            count: The number of rows.

        Returns:
            The rows that fit, in order, and the reasons for the rejected rows, by the number of the row.
        """
        conformed_rows: list[_ConformedRows] = []
        reasons: dict[int, str] = {}

        def search(rows: range) -> None:
            if not rows:
                return
            try:
                conformed_rows.append(conform(rows))
            except _TooManyRejected:
                raise
            except BadRequest as error:
                if not self.rejects_rows:
                    raise
                if len(rows) == 1:
                    if len(reasons) == REJECTED_ROWS_MAX:
                        raise _TooManyRejected(
                            f"More than {REJECTED_ROWS_MAX:,} rows do not fit, so none was appended. One of them: "
                            f"{error.message}"
                        ) from None
                    reasons[rows[0]] = _ROW_NUMBER.sub("", error.message)
                    return
                middle = len(rows) // 2
                search(rows[:middle])
                search(rows[middle:])

        search(range(count))
        return conformed_rows, reasons

    def _pack(self, parts: Sequence[_ConformedRows], key: Sequence[str], rejected: list[RejectedRow]) -> PreparedRows:
        """Pack rows into the batches of the shards.

        Rows of a table without a key can be added to any shard, so they remain one batch. With a key, the key of a row
        determines its shard.

        Args:
            parts: The rows that fit.
            key: The names of the key columns. They are empty for a table without a key.
            rejected: The rejected rows.
        """
        if not parts:
            return PreparedRows(0, None, rejected)
        rows = pa.concat_batches([part.rows for part in parts]) if len(parts) > 1 else parts[0].rows
        kinds = b"".join(part.kinds for part in parts)
        if not key:
            return PreparedRows(rows.num_rows, Batch(rows.num_rows, self.row_files.pack(rows, self.metadata)), rejected)
        if self.shards == 1:
            batch = Batch(rows.num_rows, self.row_files.pack(rows, self.metadata, key), kinds)
            return PreparedRows(rows.num_rows, {0: batch}, rejected)
        shards = pa.array(self.row_files.compute_shards(rows, self.metadata, key, self.shards))
        batches = {}
        for shard in sorted(pc.unique(shards).to_pylist()):
            is_in_shard = pc.equal(shards, shard)
            rows_of_shard = rows.filter(is_in_shard)
            packed_rows = self.row_files.pack(rows_of_shard, self.metadata, key)
            kinds_of_shard = bytes(itertools.compress(kinds, is_in_shard.to_pylist()))
            batches[shard] = Batch(rows_of_shard.num_rows, packed_rows, kinds_of_shard)
        return PreparedRows(rows.num_rows, batches, rejected)


def _identify_columns(rows: JoinedRows) -> AbstractSet[str] | pa.Schema:
    """Return a value that is equal for rows with the same columns, whose rows can be prepared together.

    It consists of the names of the columns of JSON rows, or is the schema of Arrow rows.
    """
    return rows.schema if isinstance(rows, pa.RecordBatch) else set().union(*rows)


def _join_rows(requests: Sequence[JoinedRows], metadata: TableMetadata) -> pa.RecordBatch:
    """Return the rows of requests with the same columns as one batch.

    Raises:
        BadRequest: A JSON row does not fit.
    """
    if isinstance(requests[0], pa.RecordBatch):
        return pa.concat_batches(requests) if len(requests) > 1 else requests[0]
    return to_batch([row for request in requests for row in request], metadata.current_schema)


def _is_compound(kind: pa.DataType) -> bool:
    """Return whether values of an Arrow type are nested, or refer to values in a dictionary."""
    return not (pa.types.is_primitive(kind) or kind in _TEXT_TYPES)


_TEXT_TYPES = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


@dataclass(frozen=True)
class _ArrowRows:
    """Arrow rows of one batch, and their kinds.

    `conform` converts the rows with the numbers in a range to the columns of the table.
    """

    preparation: RowPreparation
    rows: pa.RecordBatch
    kinds: bytes
    key: Sequence[str]

    def conform(self, numbers: range) -> _ConformedRows:
        first, end = numbers[0], numbers[-1] + 1
        kinds = self.kinds[first:end]
        rows = self.rows.slice(first, end - first)
        preparation = self.preparation
        return _ConformedRows(preparation.row_files.conform(rows, preparation.metadata, kinds, self.key), kinds)


def _show_arrow_row(row: pa.RecordBatch) -> str:
    """Return the only row of a batch as JSON."""
    try:
        return encode_json(row.to_pylist()[0])
    except (ValueError, OverflowError):  # Python cannot represent some values, such as dates after the year 9999.
        columns = zip(row.schema.names, row.columns, strict=True)
        return encode_json({name: column.to_string(skip_new_lines=True) for name, column in columns})


def encode_json(row: Any) -> str:
    """Return a row as JSON. Values without an equivalent in JSON become text."""
    return msgspec.json.encode(row, enc_hook=str).decode()
