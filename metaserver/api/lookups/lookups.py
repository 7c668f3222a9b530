"""The route that finds rows of a snapshot by their keys, from a record index.

The answer states which rows it does not cover. Rows of files that the index does not describe may be missing
(`complete`, `uncovered-files`). A row is `undecided` if it is unknown whether a delete removed it. A key without a row
is listed as missing, which is certain only if the answer is complete.

Keys are JSON or an Arrow IPC stream, according to the header Content-Type. The header Accept selects the format of the
answer. Arrow allows up to a million keys.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import msgspec
import numpy as np
import pyarrow as pa
from aiohttp import web

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.index.definitions import IndexDefinition, read_definitions
from seamark.formats.index.keys.keys import Keys, Mask
from seamark.formats.index.keys.terms import Term, resolve_term
from seamark.formats.index.kinds.kinds import KINDS
from seamark.formats.index.kinds.record import COLUMNS_MAX
from seamark.formats.index.packing import Longs
from seamark.formats.protocol.wire import decode_json, encode_json
from seamark.formats.runtime.errors import BadRequest, TooLarge
from seamark.metaserver.api.formats import arrow
from seamark.metaserver.api.formats.listings import FileListing
from seamark.metaserver.api.http.bodies import parse_body
from seamark.metaserver.api.http.components import COMPONENTS
from seamark.metaserver.api.http.describe import BodySize, Parameter, ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.api.http.parameters.requests import read_boolean_query
from seamark.metaserver.api.http.parameters.snapshots import SNAPSHOT, find_requested_snapshot, resolve_snapshot_id
from seamark.metaserver.api.indexes.indexes import find_defined_index
from seamark.metaserver.planner.indexes.resolver import IndexResolver
from seamark.metaserver.planner.lookup.lookup import find_files_at
from seamark.metaserver.planner.rows.lookup_keys import build_keys, decode_json_keys, extract_term_arrays
from seamark.metaserver.planner.rows.record_lookup import KEYS_MAX, LocatedRows, Locator
from seamark.metaserver.planner.rows.row_deletes import RowDeletes
from seamark.metaserver.planner.scan.request import ScanRequest
from seamark.metaserver.planner.scan.scan_plan import ScanPlan
from seamark.metaserver.planner.view.view import TableView
from seamark.metaserver.streams.incoming.arrow_body import read_stream

JSON_KEYS_MAX = 100_000
JSON_BODY_BYTES = 4 << 20
"""The maximum size in bytes of a request in JSON.

Decoding this size holds the GIL for 10 ms. Larger requests must use Arrow, whose decoding does not hold the GIL so
long.
"""
JSON_ROWS_MAX = 100_000
UNCOVERED_MAX = 1000
"""The maximum number of uncovered files that the answer names."""
_LISTED_INDEXES_MAX = 20
"""The maximum number of indexes that an error names."""
_PIECE_BYTES = 1 << 18
"""The size of the slices in which a large answer is sent."""
_ROWS_PER_PIECE = 2_000
"""The number of rows in a piece of JSON that is encoded in one call."""
_ROWS_PER_BATCH = 1 << 16
_IN_LOOP_BODY_BYTES_MAX = 64 << 10
"""The maximum size of a JSON body that is parsed in the event loop."""
_IN_LOOP_KEYS_MAX = 200
"""The maximum number of keys or rows that are processed in the event loop.

Larger numbers are processed in a thread.
"""

LOCATOR: web.AppKey[Locator] = web.AppKey("locator", Locator)
COVERS: web.AppKey[IndexResolver] = web.AppKey("covers", IndexResolver)
DELETED: web.AppKey[RowDeletes] = web.AppKey("deleted", RowDeletes)


class LookupKeysRequest(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """A request for the rows with some keys."""

    keys: Annotated[
        msgspec.Raw,
        doc(
            f"At most {JSON_KEYS_MAX:,} keys. A key is a list of values, or an object with a value for each column. "
            "For an index on one column, it may also be the value.",
            type="array",
            examples=[[17, 18], [["2024-01-01", 5]], [{"day": "2024-01-01", "id": 5}]],
        ),
    ]
    index: Annotated[str | None, doc("The name of a record index. The alternative is to set `columns`.")] = None
    columns: Annotated[list[str] | None, doc("The columns of the index, in the order of the values in keys.")] = None
    snapshot_id: int | None = None
    ref: str | None = None
    as_of: Annotated[int | None, doc("A time in milliseconds since the epoch.")] = None
    partitions: Annotated[bool, doc("Whether rows contain the partition of their file.")] = False


class LocatedRow(msgspec.Struct, rename="kebab", omit_defaults=True, gc=False):
    """A row with one of the keys."""

    key: Annotated[int, doc("The number of the key in the request, from 0.")]
    file_path: str
    position: Annotated[int, doc("The position of the row in the file, from 0.")]
    undecided: Annotated[
        bool, doc("True if it is unknown whether the row is deleted. Otherwise, the field is absent.")
    ] = False
    spec_id: Annotated[
        int | msgspec.UnsetType, doc("The id of the partition spec. It is present if partitions are requested.")
    ] = msgspec.UNSET
    partition: Annotated[
        Any, doc("The partition of the file. It is present if partitions are requested.", type="object")
    ] = msgspec.UNSET


class FileProblem(msgspec.Struct, rename="kebab"):
    """A file that could not be read, with the reason."""

    file_path: str
    problem: str


class LookupKeysResponse(msgspec.Struct, rename="kebab"):
    """The rows with some keys. The answer is encoded in parts, and `rows` and `missing` are the last parts."""

    snapshot_id: int | None
    index: str
    columns: Annotated[list[str], doc("The columns of the index, in order.")]
    keys: Annotated[int, doc("The number of requested keys.")]
    complete: Annotated[
        bool, doc("False if the index does not cover all live files. Uncovered files may contain more rows.")
    ]
    uncovered_files: int
    uncovered: Annotated[list[str], doc(f"The paths of the first {UNCOVERED_MAX} uncovered files.")]
    undecided: Annotated[int, doc("The number of undecided rows.")]
    problems: Annotated[
        list[FileProblem],
        doc("The first files that could not be read within the limits, so that rows are undecided."),
    ]
    rows: Annotated[
        list[LocatedRow] | msgspec.UnsetType,
        doc("All rows with one of the keys that are not deleted, in the order of the keys."),
    ] = msgspec.UNSET
    missing: Annotated[
        list[int] | msgspec.UnsetType,
        doc("The numbers of the keys without a row in the covered files."),
    ] = msgspec.UNSET


@dataclass(frozen=True)
class _KeyQuery:
    """A parsed request: the keys, as JSON rows or an Arrow table, and the options."""

    index: str | None
    columns: list[str] | None
    requested_keys: Any
    snapshot_id: int | None
    partitions: bool


@Route(
    "POST",
    "/api/v1/tables/{namespace}/{table}/lookup",
    "lookupKeys",
    "Find rows by key in a snapshot, and return the data file and the position of each row",
    tags=("indexes",),
    parameters=(
        Parameter(
            "index", "query", "The name of the record index, if the body is an Arrow stream.", {"type": "string"}
        ),
        Parameter(
            "partitions", "query", "The field `partitions`, if the body is an Arrow stream.", {"type": "boolean"}
        ),
        *SNAPSHOT,
    ),
    body_size=BodySize.LARGE,
    answers=(
        ResponseSpec(
            200,
            "The rows. With `Accept: application/vnd.apache.arrow.stream`, the answer is an Arrow IPC stream with the "
            "columns key, file_path, position and undecided. The other fields are metadata of its schema",
            LookupKeysResponse,
        ),
        ResponseSpec(
            400, "A key is not a value of its column, or the record index does not exist; the message states which"
        ),
        ResponseSpec(404, "The table or the index does not exist"),
        ResponseSpec(406, "The client accepts neither JSON nor Arrow"),
        ResponseSpec(
            413, f"The request has more than {KEYS_MAX:,} keys ({JSON_KEYS_MAX:,} in JSON), or they have too many rows"
        ),
    ),
).takes_bytes(LookupKeysRequest)
async def lookup_keys(call: Call, data: bytes) -> web.Response:
    """Find rows by key in a snapshot, and return the data file and the position of each row."""
    wants_arrow = arrow.wants_arrow(call.headers)
    loaded_table = await call.components.catalog.tables.load(call.namespace, call.name)
    metadata, entry = loaded_table.metadata, loaded_table.entry
    assert entry is not None
    key_query = await _parse_request(call, data, metadata)
    definition, terms = _find_record_index(metadata, key_query)
    columns, possible_keys = await _convert_keys(call, terms, key_query.requested_keys, len(data))
    ordered_columns = [columns[terms.index(term)] for term in definition.terms]
    scan = await call.components.planner.bind_and_plan(metadata, ScanRequest(snapshot_id=key_query.snapshot_id))
    located_rows = await call.app[LOCATOR].locate(scan, definition, ordered_columns, possible_keys, entry)
    answer = _LookupAnswer(metadata, scan, definition, columns[0].rows, key_query, located_rows)
    if not wants_arrow and len(located_rows.query) > JSON_ROWS_MAX:
        rows_text = f"{len(located_rows.query):,} rows; JSON answers have at most {JSON_ROWS_MAX:,}"
        raise TooLarge(f"The keys have {rows_text}; request Arrow (Accept: {arrow.ARROW_STREAM})")
    encode_answer: Callable[[], Sequence[bytes | memoryview]] = (
        answer.encode_arrow if wants_arrow else answer.encode_json
    )
    is_small = len(located_rows.query) + answer.keys <= _IN_LOOP_KEYS_MAX
    pieces = encode_answer() if is_small else await asyncio.to_thread(encode_answer)
    content_type = arrow.ARROW_STREAM if wants_arrow else "application/json"
    body = b"".join(pieces) if sum(map(len, pieces)) <= _PIECE_BYTES else _iterate_slices(pieces)
    return web.Response(body=body, content_type=content_type, headers={"Vary": "Accept"})


async def _parse_request(call: Call, body: bytes, metadata: TableMetadata) -> _KeyQuery:
    """Parse a request in JSON or Arrow.

    Raises:
        BadRequest: The request is invalid.
        TooLarge: The request has too many keys or bytes in JSON.
    """
    if call.content_type == arrow.ARROW_STREAM:
        snapshot_id = find_requested_snapshot(call.query, metadata)
        table = await asyncio.to_thread(read_stream, body, "The body", rows_max=KEYS_MAX)
        columns = None if "index" in call.query else list(table.column_names)
        return _KeyQuery(
            call.query.get("index"), columns, table, snapshot_id, read_boolean_query(call.query, "partitions")
        )
    if len(body) > JSON_BODY_BYTES:
        limit_text = f"at most {JSON_BODY_BYTES:,} bytes"
        raise TooLarge(f"Keys in JSON may have {limit_text}; send more as Arrow (Content-Type: {arrow.ARROW_STREAM})")
    lookup, rows = (
        _parse_json(body)
        if len(body) <= _IN_LOOP_BODY_BYTES_MAX
        else await call.run_in_turn(partial(_parse_json, body))
    )
    if len(rows) > JSON_KEYS_MAX:
        raise TooLarge(f"The request has {len(rows):,} keys in JSON; send more than {JSON_KEYS_MAX:,} as Arrow")
    columns = lookup.columns
    # A key that is an object names the columns of the index.
    if lookup.index is None and columns is None and rows and isinstance(rows[0], dict):
        columns = list(rows[0])
    snapshot_id = resolve_snapshot_id(metadata, lookup.snapshot_id, lookup.ref, lookup.as_of)
    return _KeyQuery(lookup.index, columns, rows, snapshot_id, lookup.partitions)


def _parse_json(body: bytes) -> tuple[LookupKeysRequest, list[Any]]:
    """Return the request and its keys from a JSON body.

    Raises:
        BadRequest: The body is invalid.
    """
    lookup = parse_body(body, LookupKeysRequest)
    rows = decode_json(bytes(lookup.keys), "keys")
    if not isinstance(rows, list):
        raise BadRequest(f"keys is {repr(rows)[:80]}; it must be a list")
    return lookup, rows


def _find_record_index(metadata: TableMetadata, query: _KeyQuery) -> tuple[IndexDefinition, tuple[Term, ...]]:
    """Return the record index of a request, and its terms in the order of the values in the keys.

    Raises:
        BadRequest: The request is invalid.
        NotFound: The index does not exist.
    """
    by_name = read_definitions(metadata).by_name
    record_indexes = [index for index in by_name.values() if KINDS[index.kind].answers_keys and index.enabled]
    indexes_text = (
        ", ".join(f"{index.name} on {index.text}" for index in record_indexes[:_LISTED_INDEXES_MAX]) or "none"
    )
    terms = None
    if query.columns is not None:
        if len(query.columns) > COLUMNS_MAX:
            raise BadRequest(f"columns has {len(query.columns)} columns; a record index has at most {COLUMNS_MAX}")
        terms = tuple(resolve_term(text, metadata.current_schema, metadata.schemas) for text in query.columns)
    if query.index is not None:
        definition = find_defined_index(metadata, query.index)
        if not KINDS[definition.kind].answers_keys:
            raise BadRequest(
                f"The index {definition.name} is {definition.text}, and only record indexes find keys; the table has: "
                f"{indexes_text}"
            )
        if not definition.enabled:
            raise BadRequest(f"The index {definition.name} is paused; resume it before you look up keys")
        if terms is not None and _list_identities(terms) != _list_identities(definition.terms):
            raise BadRequest(
                f"The index {definition.name} is {definition.text}, not on {', '.join(query.columns or ())}"
            )
        return definition, definition.terms if terms is None else _order_terms(definition, terms)
    if terms is None:
        raise BadRequest(f"The request names no index; set index or columns. The record indexes are: {indexes_text}")
    for definition in record_indexes:
        if _list_identities(definition.terms) == _list_identities(terms):
            return definition, _order_terms(definition, terms)
    raise BadRequest(
        f"No record index is on {', '.join(query.columns or ())[:200]}; the record indexes are: {indexes_text}"
    )


def _list_identities(terms: Sequence[Term]) -> list[tuple[int, str]]:
    return sorted((term.column_id, term.transform) for term in terms)


def _order_terms(definition: IndexDefinition, terms: Sequence[Term]) -> tuple[Term, ...]:
    """Return the definition's terms in the order of `terms`."""
    terms_by_key = {(term.column_id, term.transform): term for term in definition.terms}
    return tuple(terms_by_key[term.column_id, term.transform] for term in terms)


async def _convert_keys(
    call: Call, terms: Sequence[Term], requested_keys: Any, body_bytes: int
) -> tuple[list[Keys], Mask | None]:
    """Convert the keys of a request to the form of the index, in a thread if there are many.

    Args:
        call: The request.
        terms: The columns of the index, in the order of the values in the keys.
        requested_keys: An Arrow table, or JSON rows.
        body_bytes: The size of the request's body.

    Returns:
        The columns of the keys, and a mask of the keys that can exist. The mask is None if all keys can exist.

    Raises:
        BadRequest: A key is invalid.
        RetryLater, TooManyRequests: See `Call.reserve_memory`.
        TooLarge: The keys need more memory than a request body may have.
    """
    if isinstance(requested_keys, pa.Table):
        arrays, shared_bytes = await asyncio.to_thread(extract_term_arrays, terms, requested_keys)
        # Rows of a dictionary array share values, but each key has its own copy.
        if shared_bytes > (limit := call.components.settings.body_limit_bytes):
            raise TooLarge(
                f"The keys take {shared_bytes:,} bytes if each row has its own value; the limit is {limit:,}. Send "
                "them in several requests"
            )
        call.reserve_memory(shared_bytes)
        return await asyncio.to_thread(build_keys, terms, arrays), None
    if len(requested_keys) <= _IN_LOOP_KEYS_MAX and body_bytes <= _IN_LOOP_BODY_BYTES_MAX:
        return decode_json_keys(terms, requested_keys)
    return await call.run_in_turn(partial(decode_json_keys, terms, requested_keys))


async def _iterate_slices(pieces: Sequence[bytes | memoryview]) -> AsyncIterator[bytes]:
    """Yield the parts of a large answer in slices of limited size, so that copying a slice does not take long."""
    for piece in pieces:
        view = memoryview(piece)
        for start in range(0, len(view), _PIECE_BYTES):
            yield bytes(view[start : start + _PIECE_BYTES])


@dataclass(frozen=True)
class _LookupAnswer:
    """The answer to a lookup. A large answer is encoded in a thread."""

    metadata: TableMetadata
    scan: ScanPlan
    definition: IndexDefinition
    keys: int
    query: _KeyQuery
    located: LocatedRows

    def _describe_answer(self) -> LookupKeysResponse:
        """Return the fields of the answer other than the rows and the missing keys."""
        located_rows = self.located
        uncovered_paths = list_paths(self.scan.view, located_rows.uncovered[:UNCOVERED_MAX])
        return LookupKeysResponse(
            snapshot_id=self.query.snapshot_id,
            index=self.definition.name,
            columns=[term.text for term in self.definition.terms],
            keys=self.keys,
            complete=not len(located_rows.uncovered),
            uncovered_files=len(located_rows.uncovered),
            uncovered=uncovered_paths,
            undecided=int(np.count_nonzero(located_rows.undecided)),
            problems=[FileProblem(path, reason) for path, reason in located_rows.problems.items()],
        )

    def _list_missing(self) -> Longs:
        is_missing = np.ones(self.keys, dtype=np.bool_)
        is_missing[self.located.query] = False
        return np.flatnonzero(is_missing)

    def _list_files(self) -> tuple[Longs, list[str], list[list[Any]]]:
        """Return the files that contain a located row.

        Returns:
            The number of each file of the view among these files, the paths of these files, and their spec ids and
            partitions, if the request asks for partitions.
        """
        view = self.scan.view
        has_rows = np.zeros(view.file_count, dtype=np.bool_)
        has_rows[self.located.data_file] = True
        positions = np.flatnonzero(has_rows)
        file_numbers = np.cumsum(has_rows) - 1
        partition_columns: list[list[Any]] = []
        if self.query.partitions:
            files_with_rows = find_files_at(view, view.find_entry_ids(positions))
            files = FileListing(self.metadata, files_with_rows, find_files_at(view, positions[:0]), None)
            partition_columns = files.list_json_columns(("spec-id", "partition"), 0, files.total)
        return file_numbers, list_paths(view, positions), partition_columns

    def encode_json(self) -> list[bytes]:
        """Encode the answer as pieces of JSON.

        The pieces are not joined, because joining holds the GIL, as encoding does.
        """
        located_rows = self.located
        file_numbers, paths, file_columns = self._list_files()
        # Cut off the closing brace, because the rows and the missing keys follow as further fields.
        pieces = [encode_json(self._describe_answer())[:-1] + b',"rows":[']
        for start in range(0, len(located_rows.query), _ROWS_PER_PIECE):
            part = slice(start, start + _ROWS_PER_PIECE)
            columns = (
                located_rows.query[part],
                file_numbers[located_rows.data_file[part]],
                located_rows.position[part],
            )
            values = zip(*(column.tolist() for column in columns), located_rows.undecided[part].tolist(), strict=True)
            rows = [
                LocatedRow(key, paths[file], position, is_undecided, *(column[file] for column in file_columns))
                for key, file, position, is_undecided in values
            ]
            pieces += [b"," if start else b"", encode_json(rows)[1:-1]]
        missing_keys = self._list_missing().tolist()
        pieces.append(b'],"missing":' + encode_json(missing_keys) + b"}")
        return pieces

    def encode_arrow(self) -> list[memoryview]:
        """Encode the answer as batches of an Arrow IPC stream.

        All batches share a dictionary of paths and a dictionary of partitions.
        """
        located_rows = self.located
        file_numbers, paths, file_columns = self._list_files()
        schema_metadata = {**msgspec.to_builtins(self._describe_answer()), "missing": len(self._list_missing())}
        metadata = {
            name: value if isinstance(value, str) else encode_json(value).decode()
            for name, value in schema_metadata.items()
        }
        path_texts = pa.array(paths, pa.string())
        spec_ids = pa.array(file_columns[0] if file_columns else [], pa.int32())
        partition_texts = pa.array(
            [encode_json(partition).decode() for partition in file_columns[1]] if file_columns else [], pa.string()
        )
        sink = pa.BufferOutputStream()
        writer = None
        # An answer without rows has one empty batch, which defines the schema of the stream.
        for start in range(0, max(1, len(located_rows.query)), _ROWS_PER_BATCH):
            part = slice(start, start + _ROWS_PER_BATCH)
            files = pa.array(file_numbers[located_rows.data_file[part]].astype(np.int32))
            columns = {
                "key": pa.array(located_rows.query[part]),
                "file_path": pa.DictionaryArray.from_arrays(files, path_texts),
                "position": pa.array(located_rows.position[part]),
                "undecided": pa.array(located_rows.undecided[part]),
            }
            if file_columns:
                columns["spec_id"] = spec_ids.take(files)
                columns["partition"] = pa.DictionaryArray.from_arrays(files, partition_texts)
            batch = pa.record_batch(columns).replace_schema_metadata(metadata)
            writer = writer or pa.ipc.new_stream(sink, batch.schema)
            writer.write_batch(batch)
        assert writer is not None
        writer.close()
        return [memoryview(sink.getvalue())]


def list_paths(view: TableView, positions: Any) -> list[str]:
    """Return the paths of the data files at these ascending positions in a view, the list of a snapshot's files."""
    texts = (
        find_files_at(view, view.find_entry_ids(positions)).read_texts("file_path").list_values()
        if len(positions)
        else []
    )
    return [(text or b"").decode("utf-8", "replace") for text in texts]


def add_components(app: web.Application) -> None:
    components = app[COMPONENTS]
    app[COVERS] = IndexResolver(components.indexes)
    app[DELETED] = RowDeletes(components.objects, components.settings.decoded_limit_bytes)
    app[LOCATOR] = Locator(app[COVERS], app[DELETED], components.usage, components.clock)
