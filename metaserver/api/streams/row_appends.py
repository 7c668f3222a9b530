"""Appends rows to one or several stream tables. The rows of all tables are stored together with their dead letters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Annotated, NamedTuple

import msgspec

from seamark.formats.protocol.wire import AFTER_HEADER, check_name, format_path
from seamark.formats.runtime.errors import BadRequest, CommitUnknown
from seamark.metaserver.api.http.describe import Parameter, ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call
from seamark.metaserver.api.http.parameters.fresh import encode_rows_token
from seamark.metaserver.api.plans.planning import POINTERS
from seamark.metaserver.api.streams.dead_letters import load_dead_letters
from seamark.metaserver.catalog.values import LoadedTable
from seamark.metaserver.log.port import Acknowledgement
from seamark.metaserver.store.model import NamespacePath
from seamark.metaserver.streams.appends import PRODUCER_CHARACTERS_MAX, ProducerKey, TableRows
from seamark.metaserver.streams.incoming.dead_letters import DeadLetter, DeadLetters, pack_letters
from seamark.metaserver.streams.incoming.prepared_rows import JoinedRows, PreparedRows, RowPreparation
from seamark.metaserver.streams.stream_properties import check_stream_table, read_shard_count

PRODUCER_PARAMETERS = (
    Parameter(
        "producer",
        "query",
        "The name of the writer, which is unique among the writers of this principal to this table. If a writer "
        "sends a name and repeats a request with the same sequence, no rows are added again.",
        {"type": "string", "maxLength": PRODUCER_CHARACTERS_MAX},
    ),
    Parameter(
        "sequence",
        "query",
        "The number of the request among the requests of the producer: 0, 1, 2, …",
        {"type": "integer", "minimum": 0},
    ),
)
UNKNOWN_OUTCOME = ResponseSpec(
    500,
    "CommitStateUnknownException: the log did not confirm the rows, but may have them. A producer must repeat the "
    "request with the same sequence",
)
"""The answer if the disk or Kafka fails while it stores the rows."""
_SEQUENCE_MAX = 1 << 62
_SEQUENCE_DIGITS_MAX = 19


class RowPosition(msgspec.Struct, frozen=True):
    """The position of rows in the log."""

    shard: int
    offset: Annotated[int, doc("The offset of the first row.")]
    end: Annotated[int, doc("The offset after the last row.")]


class AppendedRows(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of an append to one table."""

    rows: Annotated[int, doc("The number of rows that fit the table. They are durable.")]
    duplicate: Annotated[bool, doc("Whether an earlier request of the producer appended the rows.")]
    positions: Annotated[list[RowPosition], doc("The positions of the rows. There are none for an old duplicate.")]
    rejected: Annotated[int, doc("The number of rows that do not fit the table. They are in the dead-letter table.")]
    token: Annotated[
        str,
        doc(
            f"A later read that sends this token in the header {AFTER_HEADER} includes the rows. The token is empty if "
            "no rows fit."
        ),
    ]
    last_sequence: Annotated[
        int | None, doc("The number of the producer's last request. It is absent unless this request is older.")
    ] = None


class RowTarget(NamedTuple):
    """A stream table to which a request appends rows.

    Attributes:
        loaded: The table.
        dead_letters: The dead-letter table of the table, or None.
    """

    loaded: LoadedTable
    dead_letters: DeadLetters | None

    @property
    def uuid(self) -> str:
        assert self.loaded.entry is not None
        return self.loaded.entry.uuid

    def make_preparation(
        self, call: Call, *, is_envelope: bool = False, left_out: AbstractSet[str] = frozenset()
    ) -> RowPreparation:
        """Return the object that prepares rows for the table.

        Args:
            call: The call.
            is_envelope: Whether JSON rows are envelopes of Debezium, which have a row before and after its change.
            left_out: The columns of the rows that have no values and that the table does not have.
        """
        return RowPreparation(
            self.loaded.metadata,
            call.components.streams.row_files,
            read_shard_count(self.loaded),
            is_envelope,
            rejects_rows=self.dead_letters is not None,
            left_out=left_out,
        )


async def load_target(call: Call, namespace: NamespacePath, name: str) -> RowTarget:
    """Return a table to which the caller appends rows.

    Raises:
        NoSuchTable: The table does not exist.
        BadRequest: The table is not a stream table, or its dead-letter table cannot be used.
        Forbidden: The caller may not append rows to its dead-letter table.
    """
    entry = await call.app[POINTERS].load_entry(namespace, name)
    metadata = await call.components.catalog.documents.table(entry.metadata_location)
    check_stream_table(metadata, format_path(namespace, name))
    loaded_table = LoadedTable(entry, metadata)
    return RowTarget(loaded_table, await load_dead_letters(call, loaded_table))


async def append_prepared(
    call: Call,
    rows_by_target: Sequence[tuple[RowTarget, PreparedRows]],
    producer: tuple[str, int] | None,
    *,
    scope: str,
) -> list[AppendedRows]:
    """Append the prepared rows and dead letters of distinct tables, all or none, and return an answer for each table.

    Args:
        call: The call.
        rows_by_target: The tables and their rows.
        producer: The name of the producer, and the number of the request.
        scope: The scope in which the name of the producer is unique. It is the UUID of a table, or `tables` if
            the request may have rows of several tables.

    Raises:
        BadRequest: The dead-letter table of a table is one of the tables.
        CommitUnknown: It is unknown whether the log has the rows.
    """
    appends = [TableRows(target.loaded, rows.batches) for target, rows in rows_by_target if rows.batches is not None]
    letters_by_table: dict[str, list[DeadLetter]] = {}
    dead_letter_tables: dict[str, DeadLetters] = {}
    for target, rows in rows_by_target:
        for row in rows.rejected:
            assert target.dead_letters is not None
            dead_letter_tables[target.dead_letters.uuid] = target.dead_letters
            letters_by_table.setdefault(target.dead_letters.uuid, []).append(
                DeadLetter(target.dead_letters.stream_table_name, row)
            )
    for uuid, rejected_rows in letters_by_table.items():
        if any(target.uuid == uuid for target, _ in rows_by_target):
            raise BadRequest(
                f"{dead_letter_tables[uuid].name} is the dead-letter table of another table; append its rows in "
                "another request"
            )
        packed_letters = pack_letters(
            dead_letter_tables[uuid],
            rejected_rows,
            call.components.streams.row_files,
            now_ms=call.components.clock.now_ms(),
            producer=None if producer is None else producer[0],
        )
        appends.append(TableRows(dead_letter_tables[uuid].loaded, packed_letters))
    acknowledgement = Acknowledgement(())
    producer_key = None if producer is None else ProducerKey(call.principal.name, scope, *producer)
    if appends or producer_key is not None:  # A request of a producer must be recorded even without rows.
        acknowledgement = await _append_to_log(call, appends, producer_key)
    last_sequence = None
    if acknowledgement.duplicate and producer_key is not None:
        last_sequence = await call.components.streams.find_last_sequence(producer_key)
    return [_describe_append(call, target, rows, acknowledgement, last_sequence) for target, rows in rows_by_target]


async def append_joined(call: Call, target: RowTarget, preparation: RowPreparation, rows: JoinedRows) -> AppendedRows:
    """Append the rows of a request together with the rows of concurrent requests, and return its answer.

    Args:
        call: The call.
        target: The table.
        preparation: The preparation of the rows. `can_join` must be true for it and the rows.
        rows: The rows.

    Raises:
        BadRequest: A row does not fit.
        CommitUnknown: It is unknown whether the log has the rows.
    """
    joined_appends = call.components.streams.joined_appends
    try:
        acknowledgement = await joined_appends.append(target.loaded, preparation, rows, call.body_bytes)
    except CommitUnknown as error:
        raise _make_unknown_error() from error
    return _describe_append(call, target, PreparedRows(len(rows), None, []), acknowledgement, None)


async def _append_to_log(call: Call, appends: Sequence[TableRows], producer_key: ProducerKey | None) -> Acknowledgement:
    """Append rows to the log.

    If the outcome is unknown, a request of a producer keeps the original error, because it can be repeated safely.

    Raises:
        CommitUnknown: It is unknown whether the log has the rows.
    """
    try:
        return await call.components.streams.append(appends, producer_key)
    except CommitUnknown as error:
        if producer_key is not None:
            raise
        raise _make_unknown_error() from error


def _make_unknown_error() -> CommitUnknown:
    """Return the error for rows that the log did not confirm."""
    return CommitUnknown(
        "The log did not confirm the rows, so it is unknown whether they are stored. The request has no producer, so a "
        "repeated request may store them twice. Read the table to see whether it has them, and send a producer and a "
        "sequence next time"
    )


def _describe_append(
    call: Call, target: RowTarget, rows: PreparedRows, acknowledgement: Acknowledgement, last_sequence: int | None
) -> AppendedRows:
    """Return the answer for one table of a request.

    Args:
        call: The call.
        target: The table.
        rows: The rows of the table that were appended, and the rejected rows.
        acknowledgement: The answer of the log, with the positions of the rows of all tables.
        last_sequence: The number of the producer's last request if this request is older, or None.
    """
    positions = [
        RowPosition(log_position.shard.number, log_position.offset, log_position.end)
        for log_position in acknowledgement.positions
        if log_position.shard.stream == target.uuid
    ]
    ends = {position.shard: position.end for position in positions}
    table = call.components.streams.tables.get(target.uuid)
    if rows.row_count and not ends and table is not None:
        ends = dict(table.read_watermarks())  # The rows of an old duplicate are somewhere before these offsets.
    token = encode_rows_token(target.uuid, ends) if ends else ""
    return AppendedRows(rows.row_count, acknowledgement.duplicate, positions, len(rows.rejected), token, last_sequence)


def read_producer(query: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the name of the producer and the number of the request, or None if the request has neither.

    Raises:
        BadRequest: One of them is missing or invalid.
    """
    name, sequence = query.get("producer"), query.get("sequence")
    if name is None and sequence is None:
        return None
    if name is None or sequence is None:
        raise BadRequest(f"The query has no {'producer' if name is None else 'sequence'}; send both, or neither")
    check_name(name, "producer")
    if len(name) > PRODUCER_CHARACTERS_MAX:
        raise BadRequest(f"producer has {len(name)} characters; the limit is {PRODUCER_CHARACTERS_MAX}")
    if not (
        sequence.isascii()
        and sequence.isdigit()
        and len(sequence) <= _SEQUENCE_DIGITS_MAX
        and int(sequence) < _SEQUENCE_MAX
    ):
        raise BadRequest(f"sequence is {sequence[:40]!r}; it must be a number, 0 or more")
    return name, int(sequence)
