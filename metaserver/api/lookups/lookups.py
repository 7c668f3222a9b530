"""Our own route that finds rows by their keys, as a record index has them, in a snapshot.

The rule it keeps: what the answer leaves open, it says. Rows of files that the index does not describe may be missing
(`complete`, `uncovered-files`); a row that a delete may have taken, about which nothing certain could be read, is
`undecided`. A key without a row is listed as missing, which is final only in a complete answer.

Keys are JSON or an Arrow IPC stream, by Content-Type; answers likewise, by Accept. Up to a million keys come in Arrow.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from aiohttp import web

from metaserver.api.formats import arrow
from metaserver.api.formats.arrow_body import read_stream
from metaserver.api.formats.listings import FileListing
from metaserver.api.http.describe import NAMESPACE, TABLE, Parameter, ResponseSpec, describe
from metaserver.api.http.keys import CATALOG, CLOCK, INDEXES, OBJECTS, PLANNER, SETTINGS, USAGE
from metaserver.api.http.requests import allow, boolean_query, parse_body, path_name, path_namespace, read_body
from metaserver.api.http.snapshots import SNAPSHOT, snapshot_of, wanted_snapshot
from metaserver.api.indexes.indexes import defined_index
from metaserver.errors import BadRequest, TooLarge
from metaserver.iceberg.metadata.metadata import TableMetadata
from metaserver.index.blocks.packing import Longs
from metaserver.index.files.definitions import RECORD, IndexDefinition, read_definitions
from metaserver.index.keys.keys import Keys, Mask
from metaserver.index.keys.terms import Term, resolve
from metaserver.planner.indexes.resolver import IndexResolver
from metaserver.planner.lookup.lookup import files_at
from metaserver.planner.rows.lookup_keys import keys_of_arrow, keys_of_json
from metaserver.planner.rows.record_lookup import KEYS_MAX, LocatedRows, Locator
from metaserver.planner.rows.row_deletes import RowDeletes, names_of
from metaserver.planner.scan.request import ScanRequest
from metaserver.planner.scan.scan import Scan
from metaserver.planner.view.view import TableView
from metaserver.wire import decode_json, encode_json

JSON_KEYS_MAX = 100_000
JSON_BODY_BYTES = 4 << 20
"""Decoding JSON holds Python's lock: 10 ms for so much. What is larger is sent as Arrow, which does not."""
JSON_ROWS_MAX = 100_000
UNCOVERED_MAX = 1000
"""Uncovered files that are named."""
_PIECE_BYTES = 1 << 18
_ROWS_A_PIECE = 2_000
_ROWS_A_BATCH = 1 << 16
_QUICK_BODY = 64 << 10
_IN_THREAD = 200
"""Keys, or rows; more are worked on in a thread."""

LOCATOR: web.AppKey[Locator] = web.AppKey("locator", Locator)
COVERS: web.AppKey[IndexResolver] = web.AppKey("covers", IndexResolver)
DELETED: web.AppKey[RowDeletes] = web.AppKey("deleted", RowDeletes)

_COUNT = {"type": "integer"}
_PROBLEMS_SCHEMA: dict[str, Any] = {
    "type": "array",
    "description": "Files that could not be read, or not within bounds, so that rows are undecided; the first of them.",
    "items": {
        "type": "object",
        "required": ["file-path", "problem"],
        "properties": {"file-path": {"type": "string"}, "problem": {"type": "string"}},
    },
}
LOOKUP_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": [
        "snapshot-id",
        "index",
        "columns",
        "keys",
        "complete",
        "uncovered-files",
        "uncovered",
        "rows",
        "missing",
        "undecided",
        "problems",
    ],
    "properties": {
        "snapshot-id": {"type": ["integer", "null"]},
        "index": {"type": "string"},
        "columns": {"type": "array", "items": {"type": "string"}, "description": "What the index is on, in its order."},
        "keys": {"type": "integer", "description": "How many keys were asked for."},
        "complete": {
            "type": "boolean",
            "description": "False where live files are not covered by the index: they may hold more rows.",
        },
        "uncovered-files": _COUNT,
        "uncovered": {
            "type": "array",
            "items": {"type": "string"},
            "description": f"Paths of the uncovered files, the first {UNCOVERED_MAX}.",
        },
        "rows": {
            "type": "array",
            "description": "All rows that have one of the keys and are not deleted, in the order of the keys.",
            "items": {
                "type": "object",
                "required": ["key", "file-path", "position"],
                "properties": {
                    "key": {"type": "integer", "description": "Number of the key in the request, from 0."},
                    "file-path": {"type": "string"},
                    "position": {"type": "integer", "description": "Of the row in the file, from 0."},
                    "undecided": {
                        "type": "boolean",
                        "description": "True where the row may be deleted; left out where it is not.",
                    },
                    "spec-id": {"type": "integer", "description": "Where partitions were asked for."},
                    "partition": {"type": "object", "description": "Where partitions were asked for."},
                },
            },
        },
        "missing": {
            "type": "array",
            "items": {"type": "integer"},
            "description": "Numbers of the keys that no row has, as far as the index covers the files.",
        },
        "undecided": {"type": "integer", "description": "How many rows are undecided."},
        "problems": _PROBLEMS_SCHEMA,
    },
}
_BODY: dict[str, Any] = {
    "type": "object",
    "required": ["keys"],
    "additionalProperties": False,
    "properties": {
        "index": {"type": "string", "description": "Name of a record index; or say its columns."},
        "columns": {
            "type": "array",
            "items": {"type": "string"},
            "description": "Columns of the index, in the order in which keys list their values.",
        },
        "keys": {
            "type": "array",
            "maxItems": JSON_KEYS_MAX,
            "description": "Each a list of values, an object by column, or of an index on one column its value.",
            "examples": [[17, 18], [["2024-01-01", 5]], [{"day": "2024-01-01", "id": 5}]],
        },
        "snapshot-id": _COUNT,
        "ref": {"type": "string"},
        "as-of": {"type": "integer", "description": "Milliseconds since the epoch."},
        "partitions": {"type": "boolean", "description": "Whether rows tell the partition of their file."},
    },
}


class _Lookup(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    keys: msgspec.Raw
    index: str | None = None
    columns: list[str] | None = None
    snapshot_id: int | None = None
    ref: str | None = None
    as_of: int | None = None
    partitions: bool = False


class _Row(msgspec.Struct, rename="kebab", omit_defaults=True, gc=False):
    key: int
    file_path: str
    position: int
    undecided: bool = False
    spec_id: int | msgspec.UnsetType = msgspec.UNSET
    partition: Any = msgspec.UNSET


@dataclass(frozen=True)
class _Asked:
    """`given` is the request's keys: rows of JSON, or an Arrow table."""

    index: str | None
    columns: list[str] | None
    given: Any
    snapshot_id: int | None
    partitions: bool


@describe(
    "lookupKeys",
    "Finds the rows of keys in a snapshot, as data file and position, by a record index",
    tags=("indexes",),
    parameters=(
        NAMESPACE,
        TABLE,
        Parameter("index", "query", "The same as in the body, for an Arrow body.", {"type": "string"}),
        Parameter("partitions", "query", "The same as in the body, for an Arrow body.", {"type": "boolean"}),
        *SNAPSHOT,
    ),
    body=_BODY,
    answers=(
        ResponseSpec(
            200,
            "The rows. With `Accept: application/vnd.apache.arrow.stream` an Arrow IPC stream: columns key, file_path, "
            "position, undecided, the rest as metadata of its schema",
            {"$ref": "#/components/schemas/Lookup"},
        ),
        ResponseSpec(
            400, "A key is not a value of its column, or the record index does not exist; the message states which"
        ),
        ResponseSpec(404, "No such table, or no such index"),
        ResponseSpec(406, "Neither JSON nor Arrow is accepted"),
        ResponseSpec(413, f"More than {KEYS_MAX:,} keys, {JSON_KEYS_MAX:,} in JSON, or too many rows"),
    ),
)
async def lookup_keys(request: web.Request) -> web.Response:
    namespace = path_namespace(request)
    allow(request, namespace)
    wants_arrow = arrow.wants_arrow(request)
    loaded = await request.app[CATALOG].tables.load(namespace, path_name(request, "table"))
    metadata, entry = loaded.metadata, loaded.entry
    assert entry is not None
    asked = await _asked(request, metadata)
    definition, terms = _record_index(metadata, asked)
    columns, possible = await _keys(terms, asked.given)
    in_order = [columns[terms.index(term)] for term in definition.terms]
    scan = await request.app[PLANNER].scan(metadata, ScanRequest(snapshot_id=asked.snapshot_id))
    located = await request.app[LOCATOR].locate(scan, definition, in_order, possible, entry)
    told = _Told(metadata, scan, definition, columns[0].rows, asked, located)
    if not wants_arrow and len(located.query) > JSON_ROWS_MAX:
        rows = f"{len(located.query):,} rows; JSON answers have at most {JSON_ROWS_MAX:,}"
        raise TooLarge(f"The keys have {rows}, ask for Arrow (Accept: {arrow.ARROW_STREAM})")
    work: Callable[[], Sequence[bytes | memoryview]] = told.arrow if wants_arrow else told.json
    small = len(located.query) + told.keys <= _IN_THREAD
    pieces = work() if small else await asyncio.to_thread(work)
    content_type = arrow.ARROW_STREAM if wants_arrow else "application/json"
    body = b"".join(pieces) if sum(map(len, pieces)) <= _PIECE_BYTES else _sent(pieces)
    return web.Response(body=body, content_type=content_type, headers={"Vary": "Accept"})


async def _asked(request: web.Request, metadata: TableMetadata) -> _Asked:
    body = await read_body(request)
    if request.content_type == arrow.ARROW_STREAM:
        snapshot_id = wanted_snapshot(request, metadata)
        table = await asyncio.to_thread(read_stream, body, "The body", rows_max=KEYS_MAX)
        columns = None if "index" in request.query else list(table.column_names)
        return _Asked(request.query.get("index"), columns, table, snapshot_id, boolean_query(request, "partitions"))
    if len(body) > JSON_BODY_BYTES:
        most = f"at most {JSON_BODY_BYTES:,} bytes"
        raise TooLarge(f"Keys in JSON have {most}; send more as Arrow (Content-Type: {arrow.ARROW_STREAM})")
    wanted, rows = _read(body) if len(body) <= _QUICK_BODY else await asyncio.to_thread(_read, body)
    if len(rows) > JSON_KEYS_MAX:
        raise TooLarge(f"{len(rows):,} keys are too many in JSON; send more than {JSON_KEYS_MAX:,} as Arrow")
    columns = wanted.columns
    if wanted.index is None and columns is None and rows and isinstance(rows[0], dict):
        columns = list(rows[0])
    snapshot_id = snapshot_of(metadata, wanted.snapshot_id, wanted.ref, wanted.as_of)
    return _Asked(wanted.index, columns, rows, snapshot_id, wanted.partitions)


def _read(body: bytes) -> tuple[_Lookup, list[Any]]:
    wanted = parse_body(body, _Lookup)
    rows = decode_json(bytes(wanted.keys), "keys")
    if not isinstance(rows, list):
        raise BadRequest(f"keys is to be a list, not {repr(rows)[:80]}")
    return wanted, rows


def _record_index(metadata: TableMetadata, asked: _Asked) -> tuple[IndexDefinition, tuple[Term, ...]]:
    """The index, and its terms in the order in which keys have them. BadRequest, NotFound."""
    by_name = read_definitions(metadata).by_name
    usable = [one for one in by_name.values() if one.kind == RECORD and one.enabled]
    there = ", ".join(f"{one.name} on {one.text}" for one in usable[:20]) or "none"
    terms = None
    if asked.columns is not None:
        terms = tuple(resolve(text, metadata.current_schema, metadata.schemas) for text in asked.columns)
    if asked.index is not None:
        definition = defined_index(metadata, asked.index)
        if definition.kind != RECORD:
            raise BadRequest(
                f"The index {definition.name} is {definition.text}; keys are looked up in record indexes: {there}"
            )
        if not definition.enabled:
            raise BadRequest(f"The index {definition.name} is paused; resume it to look up keys in it")
        if terms is not None and _identities(terms) != _identities(definition.terms):
            raise BadRequest(
                f"The index {definition.name} is {definition.text}, not on {', '.join(asked.columns or ())}"
            )
        return definition, definition.terms if terms is None else _ordered(definition, terms)
    if terms is None:
        raise BadRequest(f"Say in which index to look, or the columns that the keys have; record indexes are {there}")
    for definition in usable:
        if _identities(definition.terms) == _identities(terms):
            return definition, _ordered(definition, terms)
    raise BadRequest(f"No record index is on {', '.join(asked.columns or ())[:200]}; there are {there}")


def _identities(terms: Sequence[Term]) -> list[tuple[int, str]]:
    return sorted((term.column_id, term.transform) for term in terms)


def _ordered(definition: IndexDefinition, terms: Sequence[Term]) -> tuple[Term, ...]:
    """The definition's own terms in the order of others."""
    own = {(term.column_id, term.transform): term for term in definition.terms}
    return tuple(own[term.column_id, term.transform] for term in terms)


async def _keys(terms: Sequence[Term], given: Any) -> tuple[list[Keys], Mask | None]:
    if isinstance(given, pa.Table):
        return await asyncio.to_thread(keys_of_arrow, terms, given), None
    if len(given) <= _IN_THREAD:
        return keys_of_json(terms, given)
    return await asyncio.to_thread(keys_of_json, terms, given)


async def _sent(pieces: Sequence[bytes | memoryview]) -> AsyncIterator[bytes]:
    """A large answer, so that no piece of it is copied for long."""
    for piece in pieces:
        view = memoryview(piece)
        for start in range(0, len(view), _PIECE_BYTES):
            yield bytes(view[start : start + _PIECE_BYTES])


@dataclass(frozen=True)
class _Told:
    """An answer, to be written in a thread where it is large."""

    metadata: TableMetadata
    scan: Scan
    definition: IndexDefinition
    keys: int
    asked: _Asked
    located: LocatedRows

    def _about(self) -> dict[str, Any]:
        located = self.located
        uncovered = paths_at(self.scan.view, located.uncovered[:UNCOVERED_MAX])
        return {
            "snapshot-id": self.asked.snapshot_id,
            "index": self.definition.name,
            "columns": [term.text for term in self.definition.terms],
            "keys": self.keys,
            "complete": not len(located.uncovered),
            "uncovered-files": len(located.uncovered),
            "uncovered": uncovered,
            "undecided": int(np.count_nonzero(located.undecided)),
            "problems": [{"file-path": path, "problem": why} for path, why in located.problems.items()],
        }

    def _missing(self) -> Longs:
        absent = np.ones(self.keys, dtype=np.bool_)
        absent[self.located.query] = False
        return np.flatnonzero(absent)

    def _files(self) -> tuple[Longs, list[str], list[list[Any]]]:
        """(number of each file of the view among those that have a row, paths, [spec ids, partitions] where they were
        asked for)."""
        view = self.scan.view
        hit = np.zeros(view.rows, dtype=np.bool_)
        hit[self.located.place] = True
        places = np.flatnonzero(hit)
        numbers = np.cumsum(hit) - 1
        more: list[list[Any]] = []
        if self.asked.partitions:
            found = files_at(view, names_of(view, places))
            files = FileListing(self.metadata, found, files_at(view, places[:0]), None)
            more = files.lists(("spec-id", "partition"), 0, files.total)
        return numbers, paths_at(view, places), more

    def json(self) -> list[bytes]:
        """In pieces: encoding holds Python's lock, and so does joining them."""
        located = self.located
        numbers, paths, more = self._files()
        pieces = [encode_json(self._about())[:-1] + b',"rows":[']
        for start in range(0, len(located.query), _ROWS_A_PIECE):
            part = slice(start, start + _ROWS_A_PIECE)
            columns = (located.query[part], numbers[located.place[part]], located.position[part])
            values = zip(*(one.tolist() for one in columns), located.undecided[part].tolist(), strict=True)
            rows = [
                _Row(key, paths[file], position, undecided, *(one[file] for one in more))
                for key, file, position, undecided in values
            ]
            pieces += [b"," if start else b"", encode_json(rows)[1:-1]]
        missing = self._missing().tolist()
        pieces.append(b'],"missing":' + encode_json(missing) + b"}")
        return pieces

    def arrow(self) -> list[memoryview]:
        """Batch by batch; all have one dictionary of paths, and one of partitions."""
        located = self.located
        numbers, paths, more = self._files()
        about = {**self._about(), "missing": len(self._missing())}
        metadata = {name: one if isinstance(one, str) else encode_json(one).decode() for name, one in about.items()}
        known = pa.array(paths, pa.string())
        specs = pa.array(more[0] if more else [], pa.int32())
        texts = pa.array([encode_json(one).decode() for one in more[1]] if more else [], pa.string())
        sink = pa.BufferOutputStream()
        writer = None
        for start in range(0, max(1, len(located.query)), _ROWS_A_BATCH):
            part = slice(start, start + _ROWS_A_BATCH)
            files = pa.array(numbers[located.place[part]].astype(np.int32))
            columns = {
                "key": pa.array(located.query[part]),
                "file_path": pa.DictionaryArray.from_arrays(files, known),
                "position": pa.array(located.position[part]),
                "undecided": pa.array(located.undecided[part]),
            }
            if more:
                columns["spec_id"] = specs.take(files)
                columns["partition"] = pa.DictionaryArray.from_arrays(files, texts)
            batch = pa.record_batch(columns).replace_schema_metadata(metadata)
            writer = writer or pa.ipc.new_stream(sink, batch.schema)
            writer.write_batch(batch)
        assert writer is not None
        writer.close()
        return [memoryview(sink.getvalue())]


def paths_at(view: TableView, places: Any) -> list[str]:
    """Of data files by their places among all of the view, ascending."""
    texts = files_at(view, names_of(view, places)).texts("file_path").values() if len(places) else []
    return [(text or b"").decode("utf-8", "replace") for text in texts]


def add_routes(app: web.Application) -> None:
    if INDEXES in app:  # nothing in an application that is only to be described
        app[COVERS] = IndexResolver(app[INDEXES])
        app[DELETED] = RowDeletes(app[OBJECTS], app[SETTINGS].decoded_limit_bytes)
        app[LOCATOR] = Locator(app[COVERS], app[DELETED], app[USAGE], app[CLOCK])
    # aiohttp's own pattern for a variable leaves out braces, which names may hold.
    app.router.add_post("/api/v1/tables/{namespace:[^/]+}/{table:[^/]+}/lookup", lookup_keys)
