"""Our own route that tells which rows of which files match a predicate, as bitmap indexes have it.

The rule it keeps: no row that matches is left out, and where other rows may be in, the file's answer is not `exact`.
Positions are those of rows in the file; rows that deletes took are among them unless `deletes` is asked for, and then
those of which that is not known are counted as `undecided`.

Answers come in pages, as many files as fit the limit, the bytes and the time budget; the token of the next page names
the last file. A page that time cuts short is followed by another: nothing is cut off.

Record counts are what writers claim: nothing is allocated by them alone. That all rows of a file match takes no bits to
say, and beyond ROWS_JUDGED_MAX rows none are held against deletes.
"""

from __future__ import annotations

import asyncio
import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyroaring
from aiohttp import web

from metaserver.api.formats import arrow
from metaserver.api.http.describe import NAMESPACE, TABLE, ResponseSpec, describe
from metaserver.api.http.keys import CATALOG, CLOCK, PLANNER, SETTINGS
from metaserver.api.http.paging import read_token, write_token
from metaserver.api.http.requests import allow, path_name, path_namespace, read_json
from metaserver.api.http.snapshots import by_schema, snapshot_of
from metaserver.api.lookups.lookups import COVERS, DELETED, paths_at
from metaserver.deferred import Deferred
from metaserver.errors import BadRequest, TooLarge
from metaserver.iceberg.expressions.expression import TRUE, Expression, predicates_of
from metaserver.iceberg.expressions.expression_json import parse_expression
from metaserver.iceberg.metadata.metadata import TableMetadata
from metaserver.index.blocks.packing import Longs
from metaserver.index.files.definitions import BITMAP, read_definitions
from metaserver.index.keys.keys import Bits
from metaserver.index.kinds.bits import all_of, count, positions, roaring, words_of
from metaserver.planner.indexes.resolver import BitmapIndex
from metaserver.planner.lookup.lookup import files_at
from metaserver.planner.pruning.semantics import ComparisonSemantics
from metaserver.planner.rows.row_deletes import DeleteEvaluator, RowDeletion, places_at
from metaserver.planner.rows.row_matches import PredicateMatcher, without
from metaserver.planner.scan.request import BoundScan, ScanRequest
from metaserver.planner.scan.scan import Scan
from metaserver.store.port import Entry
from metaserver.wire import decode_json, encode_json

if TYPE_CHECKING:
    from metaserver.iceberg.expressions import sql
else:
    sql = Deferred("metaserver.iceberg.expressions.sql")

FILES_MAX = 10_000
"""Of one page."""
PAGE_BYTES = 16 << 20
"""Of rows in one page, after which no further file is begun. A list of positions of one file has no more."""
CANDIDATES_MAX = 4_000_000
"""Rows of one page that are held against deletes, after which no further file is begun; and so many at once."""
ROWS_JUDGED_MAX = 1 << 27
"""Rows of one file that are held against deletes; where there are more, all of them are undecided."""
_FILES_AT_ONCE = 16
"""Between looks at the clock."""
_COUNT = {"type": "integer"}

BITMAP_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["snapshot-id", "meaning", "deletes", "exact", "not-used", "files", "problems", "next-page-token"],
    "properties": {
        "snapshot-id": {"type": ["integer", "null"]},
        "meaning": {"enum": ["sql", "iceberg"]},
        "deletes": {"type": "boolean", "description": "Whether deleted rows were taken out."},
        "exact": {"type": "boolean", "description": "Whether the answer of every file of this page is."},
        "not-used": {
            "type": "array",
            "items": {"type": "string"},
            "description": "Parts of the SQL that no expression can say; taken as true.",
        },
        "files": {
            "type": "array",
            "description": "Files that may hold a matching row; no other does.",
            "items": {
                "type": "object",
                "required": ["file-path", "record-count", "rows", "count", "exact", "delete-files", "undecided"],
                "properties": {
                    "file-path": {"type": "string"},
                    "record-count": _COUNT,
                    "rows": {
                        "description": "Positions of the rows: a roaring bitmap of 32 bits in its portable form, in "
                        "base64, or a list; null where any row may match.",
                    },
                    "count": {"type": ["integer", "null"], "description": "How many rows these are."},
                    "exact": {"type": "boolean", "description": "False where some of these rows may not match."},
                    "delete-files": {"type": "integer", "description": "How many delete files apply to the file."},
                    "undecided": {
                        "type": "integer",
                        "description": "With deletes: rows among these that may be deleted.",
                    },
                },
            },
        },
        "problems": {
            "type": "array",
            "description": "Files that could not be read, so that rows are undecided; the first of them.",
            "items": {
                "type": "object",
                "required": ["file-path", "problem"],
                "properties": {"file-path": {"type": "string"}, "problem": {"type": "string"}},
            },
        },
        "next-page-token": {"type": ["string", "null"]},
    },
}
_BODY: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "where": {"type": "string", "description": "A predicate in SQL.", "examples": ["discount = 5 AND qty < 3"]},
        "filter": {"description": "An expression of the Iceberg REST standard, instead of `where`."},
        "case-sensitive": {"type": "boolean", "description": "Names in `filter`; default true."},
        "meaning": {
            "enum": ["sql", "iceberg"],
            "description": "Of zeros and NaN; default: that of where the predicate comes from.",
        },
        "snapshot-id": _COUNT,
        "schema-id": {"type": "integer", "description": "By whose names the predicate is; default: the current one's."},
        "ref": {"type": "string"},
        "as-of": {"type": "integer", "description": "Milliseconds since the epoch."},
        "deletes": {"type": "boolean", "description": "Whether deleted rows are to be taken out; default false."},
        "rows": {"enum": ["roaring", "positions"], "description": "The form of rows; default roaring."},
        "limit": {"type": "integer", "minimum": 1, "description": f"Most files of a page; at most {FILES_MAX:,}."},
        "page-token": {"type": "string", "description": "As in the last answer, with the same question."},
    },
}


class _Bitmap(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    where: str | None = None
    filter: msgspec.Raw = msgspec.Raw()
    case_sensitive: bool = True
    meaning: str | None = None
    schema_id: int | None = None
    snapshot_id: int | None = None
    ref: str | None = None
    as_of: int | None = None
    deletes: bool = False
    rows: str = "roaring"
    limit: int | None = None
    page_token: str | None = None


class _File(msgspec.Struct, rename="kebab", gc=False):
    file_path: str
    record_count: int
    rows: str | list[int] | None
    count: int | None
    exact: bool
    delete_files: int
    undecided: int


@dataclass(frozen=True)
class _Predicate:
    expression: Expression
    exact: bool
    unused: tuple[str, ...]
    meaning: ComparisonSemantics


@dataclass(frozen=True)
class _Asked:
    """`after` is the last file of the page before, as a row of the view; `checksum` is of what a token is good for."""

    bound_scan: BoundScan
    predicate: _Predicate
    snapshot_id: int | None
    after: int
    checksum: int


@dataclass
class _Marked:
    """A file that may be in the answer: `bits` None for any row, or where that is exact for all."""

    name: int
    records: int
    bits: Bits | None
    exact: bool
    delete_files: int
    undecided: int = 0

    @property
    def candidates(self) -> int:
        return self.records if self.bits is None else count(self.bits)


@dataclass(frozen=True)
class _Told:
    """A file of the answer. `rows` in the form that was asked for, None for any row."""

    name: int
    records: int
    rows: bytes | Longs | None
    count: int | None
    exact: bool
    delete_files: int
    undecided: int

    @property
    def size_bytes(self) -> int:
        return 0 if self.rows is None else self.rows.nbytes if isinstance(self.rows, np.ndarray) else len(self.rows)


@describe(
    "selectRows",
    "Finds the rows that match a predicate in each file, by bitmap indexes",
    tags=("indexes",),
    parameters=(NAMESPACE, TABLE),
    body=_BODY,
    answers=(
        ResponseSpec(
            200,
            "A page of files. With `Accept: application/vnd.apache.arrow.stream` an Arrow IPC stream, names with _ for "
            "-, rows as binary or as a list, the rest as metadata of its schema",
            {"$ref": "#/components/schemas/Bitmap"},
        ),
        ResponseSpec(400, "The predicate is invalid; the message states the position"),
        ResponseSpec(404, "No such table"),
        ResponseSpec(406, "Neither JSON nor Arrow is accepted"),
        ResponseSpec(413, f"More than {PAGE_BYTES >> 3:,} positions in one file"),
    ),
)
async def select_rows(request: web.Request) -> web.Response:
    namespace = path_namespace(request)
    allow(request, namespace)
    as_arrow = arrow.wants_arrow(request)
    loaded = await request.app[CATALOG].tables.load(namespace, path_name(request, "table"))
    metadata, entry = loaded.metadata, loaded.entry
    assert entry is not None
    wanted = await read_json(request, _Bitmap)
    if wanted.rows not in ("roaring", "positions"):
        raise BadRequest(f"rows is {wanted.rows[:40]!r}; it must be roaring or positions")
    most = FILES_MAX if as_arrow else min(FILES_MAX, request.app[SETTINGS].page_limit)
    if wanted.limit is not None and wanted.limit < 1:
        raise BadRequest(f"limit is {wanted.limit}; it must be at least 1")
    asked = await asyncio.to_thread(_asked, wanted, metadata)
    scan = await request.app[PLANNER].plan(asked.bound_scan, entry)
    page = _Page(request, scan, asked.predicate, wanted, min(wanted.limit or most, most))
    await page.fill(asked.after, metadata, entry)
    token = None if page.last is None else write_token(asked.checksum, asked.snapshot_id, page.last)
    body = await asyncio.to_thread(page.arrow if as_arrow else page.json, asked.snapshot_id, token)
    content_type = arrow.ARROW_STREAM if as_arrow else "application/json"
    return web.Response(body=body, content_type=content_type, headers={"Vary": "Accept"})


def _asked(wanted: _Bitmap, metadata: TableMetadata) -> _Asked:
    """BadRequest. For a thread: a predicate may list hundreds of thousands of values."""
    if wanted.schema_id is not None:
        metadata = by_schema(metadata, wanted.schema_id)
    checksum = _checksum(wanted, metadata)
    snapshot_id, after = _start(wanted, metadata, checksum)
    predicate = _predicate(wanted, metadata)
    request = ScanRequest(predicate.expression, snapshot_id, case_sensitive=wanted.case_sensitive)
    return _Asked(BoundScan.bind(metadata, request), predicate, snapshot_id, after, checksum)


def _checksum(wanted: _Bitmap, metadata: TableMetadata) -> int:
    said = (
        metadata.table_uuid,
        wanted.where,
        bytes(wanted.filter).decode("utf-8", "replace"),
        wanted.case_sensitive,
        wanted.schema_id,
        wanted.meaning,
        wanted.deletes,
        wanted.rows,
    )
    return zlib.crc32(encode_json(said))


def _start(wanted: _Bitmap, metadata: TableMetadata, checksum: int) -> tuple[int | None, int]:
    """(snapshot, the last file of the page before, as a row of the view; -1 for none). BadRequest."""
    if wanted.page_token is None:
        return snapshot_of(metadata, wanted.snapshot_id, wanted.ref, wanted.as_of), -1
    return read_token(wanted.page_token, checksum, metadata)


def _predicate(wanted: _Bitmap, metadata: TableMetadata) -> _Predicate:
    given = bytes(wanted.filter)
    if wanted.meaning not in (None, "sql", "iceberg"):
        raise BadRequest(f"meaning is {wanted.meaning[:40]!r}; it must be sql or iceberg")
    if wanted.where is None:
        meaning = ComparisonSemantics(wanted.meaning or "iceberg")
        expression = parse_expression(decode_json(given, "The filter")) if given else TRUE
        return _Predicate(expression, True, (), meaning)
    if given:
        raise BadRequest("Give the predicate as where, in SQL, or as filter, an Iceberg expression, not as both")
    read = sql.parse_sql(wanted.where, metadata.current_schema, metadata.schemas)
    return _Predicate(read.expression, read.exact, read.unused, ComparisonSemantics(wanted.meaning or "sql"))


class _Page:
    """`last` is the last file that was looked at, where there are more."""

    def __init__(self, request: web.Request, scan: Scan, predicate: _Predicate, wanted: _Bitmap, limit: int) -> None:
        self._covers = request.app[COVERS]
        self._evaluator: DeleteEvaluator = request.app[DELETED].evaluator_of(scan)
        self._clock = request.app[CLOCK]
        self._until_s = self._clock.monotonic() + request.app[SETTINGS].plan_time_budget_s
        self._scan, self._predicate, self._wanted, self._limit = scan, predicate, wanted, limit
        self._found: list[_Told] = []
        self.last: int | None = None

    async def fill(self, after: int, metadata: TableMetadata, entry: Entry) -> None:
        """With the files behind `after`."""
        marks = PredicateMatcher(
            await self._indexes(metadata, entry), self._predicate.meaning, self._wanted.where is not None
        )
        names = self._scan.rows[np.searchsorted(self._scan.rows, after, side="right") :]
        records = files_at(self._scan.view, names).longs("record_count").clip(0, CANDIDATES_MAX + 1)
        size = candidates = start = 0
        while start < len(names) and len(self._found) < self._limit:
            if size > PAGE_BYTES or candidates > CANDIDATES_MAX:
                break
            if start and self._clock.monotonic() >= self._until_s:
                break
            few = min(_FILES_AT_ONCE, self._limit - len(self._found))
            few = max(1, int(np.searchsorted(np.cumsum(records[start : start + few]), CANDIDATES_MAX)))
            chosen = names[start : start + few]
            places = places_at(self._scan.view, chosen).tolist()
            await asyncio.gather(*(self._covers.load(index, places) for index in marks.indexes.values()))
            found = await asyncio.to_thread(self._mark, marks, chosen)
            if self._wanted.deletes:
                await self._take_out(found)
                candidates += int(records[start : start + few].sum())
            told = await asyncio.to_thread(self._tell, found)
            self._found += told
            size += sum(one.size_bytes for one in told)
            start += len(chosen)
        self.last = int(names[start - 1]) if start < len(names) else None
        await self._covers.suspect(entry, marks.damaged)

    async def _indexes(self, metadata: TableMetadata, entry: Entry) -> dict[tuple[int, str], BitmapIndex]:
        asked = {(one.column_id, one.transform) for one in predicates_of(self._scan.bound)}
        made = {}
        for definition in read_definitions(metadata).enabled:
            key = (definition.terms[0].column_id, definition.terms[0].transform)
            if definition.kind == BITMAP and key in asked:
                made[key] = await self._covers.bitmaps(self._scan.view, definition, entry)
        return made

    def _mark(self, marks: PredicateMatcher, names: Longs) -> list[_Marked]:
        places = places_at(self._scan.view, names).tolist()
        records = files_at(self._scan.view, names).longs("record_count").tolist()
        found = []
        for name, place, count_of, deletes in zip(
            names.tolist(), places, records, self._scan.deletes_of(names), strict=True
        ):
            if count_of < 0:
                found.append(_Marked(name, count_of, None, False, len(deletes)))
                continue
            bits, exact = marks.of(self._scan.residual(name), place, count_of)
            sound = self._predicate.exact or (bits is not None and not bits.any())
            found.append(_Marked(name, count_of, bits, exact and sound, len(deletes)))
        return found

    async def _take_out(self, found: list[_Marked]) -> None:
        """Deleted rows, of files that have any. Those of a large file, which comes alone, some after others."""
        deleted = await asyncio.to_thread(_evaluable, found)
        step = CANDIDATES_MAX // 64
        for start in range(0, max((words_of(one.records) for one in deleted), default=0), step):
            part = slice(start, start + step)
            rows, places = await asyncio.to_thread(self._candidates, deleted, part)
            deletion = await self._evaluator.evaluate(places, np.concatenate(rows))
            await asyncio.to_thread(_apply, deleted, part, rows, deletion)

    def _candidates(self, deleted: list[_Marked], part: slice) -> tuple[list[Longs], Longs]:
        """The rows in these words of each file's bits, and the place of each one's file."""
        rows = [positions(one.bits[part]) + 64 * part.start for one in deleted if one.bits is not None]
        names = np.array([one.name for one in deleted], dtype=np.int64)
        return rows, np.repeat(places_at(self._scan.view, names), [len(one) for one in rows])

    def _tell(self, found: list[_Marked]) -> list[_Told]:
        """Those that may have a row. What is not told of bits is not kept. TooLarge for a list beyond PAGE_BYTES."""
        told = []
        for one in found:
            open_to_any = one.bits is None and not one.exact
            number = None if open_to_any else one.candidates
            if number == 0:
                continue
            rows: bytes | Longs | None = None
            if number is not None and self._wanted.rows == "positions":
                if number > PAGE_BYTES >> 3:
                    (path,) = self._paths([one])
                    most = f"{number:,} rows of {path} match; a list has at most {PAGE_BYTES >> 3:,}"
                    raise TooLarge(f"{most}: ask for rows in the form roaring")
                rows = np.arange(number) if one.bits is None else positions(one.bits)
            elif number is not None:
                rows = _serialized(pyroaring.BitMap(range(number)) if one.bits is None else roaring(one.bits))
            told.append(_Told(one.name, one.records, rows, number, one.exact, one.delete_files, one.undecided))
        return told

    def _about(self, snapshot_id: int | None, token: str | None) -> dict[str, Any]:
        return {
            "snapshot-id": snapshot_id,
            "meaning": self._predicate.meaning.value,
            "deletes": self._wanted.deletes,
            "exact": all(one.exact for one in self._found),
            "not-used": list(self._predicate.unused),
            "problems": [{"file-path": path, "problem": why} for path, why in self._evaluator.problems.items()],
            "next-page-token": token,
        }

    def _paths(self, files: Sequence[_Told | _Marked]) -> list[str]:
        names = np.array([one.name for one in files], dtype=np.int64)
        return paths_at(self._scan.view, places_at(self._scan.view, names)) if len(names) else []

    def json(self, snapshot_id: int | None, token: str | None) -> bytes:
        pieces = []
        for path, one in zip(self._paths(self._found), self._found, strict=True):
            rows: str | list[int] | None = None
            if isinstance(one.rows, np.ndarray):
                rows = one.rows.tolist()
            elif one.rows is not None:
                rows = base64.b64encode(one.rows).decode()
            shown = _File(path, one.records, rows, one.count, one.exact, one.delete_files, one.undecided)
            pieces.append(encode_json(shown))
        head = encode_json(self._about(snapshot_id, token))[:-1]
        return b"".join((head, b',"files":[', b",".join(pieces), b"]}"))

    def arrow(self, snapshot_id: int | None, token: str | None) -> bytes:
        found = self._found
        rows: pa.Array
        if self._wanted.rows == "positions":
            none = np.empty(0, np.int64)
            spots = [one.rows if isinstance(one.rows, np.ndarray) else none for one in found]
            ends = np.cumsum([0, *map(len, spots)])
            values = pa.array(np.concatenate([none, *spots]))
            mask = pa.array([one.rows is None for one in found], pa.bool_())
            rows = pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), values, mask=mask)
        else:
            rows = pa.array([one.rows for one in found], pa.large_binary())
        columns: dict[str, pa.Array] = {
            "file-path": pa.array(self._paths(found), pa.string()),
            "record-count": pa.array([one.records for one in found], pa.int64()),
            "rows": rows,
            "count": pa.array([one.count for one in found], pa.int64()),
            "exact": pa.array([one.exact for one in found], pa.bool_()),
            "delete-files": pa.array([one.delete_files for one in found], pa.int64()),
            "undecided": pa.array([one.undecided for one in found], pa.int64()),
        }
        about = {name: value for name, value in self._about(snapshot_id, token).items() if value is not None}
        texts = {name: one if isinstance(one, str) else encode_json(one).decode() for name, one in about.items()}
        return arrow.stream(columns, texts)


def _evaluable(found: list[_Marked]) -> list[_Marked]:
    """Files with deletes, with bits of their own to take rows out of. Of the rest of them all rows are undecided."""
    deleted = []
    for one in found:
        if not one.delete_files or one.records < 0:
            continue
        candidates = one.candidates
        if candidates > ROWS_JUDGED_MAX:
            one.undecided, one.exact = candidates, False
            continue
        one.bits = all_of(one.records) if one.bits is None else one.bits.copy()
        deleted.append(one)
    return deleted


def _apply(found: list[_Marked], part: slice, rows: list[Longs], deletion: RowDeletion) -> None:
    """`rows` are those of each file in this part of its words."""
    start = 0
    for one, mine in zip(found, rows, strict=True):
        own = slice(start, start + len(mine))
        start = own.stop
        undecided = int(np.count_nonzero(deletion.undecided[own] & ~deletion.deleted[own]))
        if one.bits is not None:
            one.bits[part] = without(one.bits[part], mine[deletion.deleted[own]] - 64 * part.start)
        one.undecided += undecided
        one.exact &= not undecided


def _serialized(made: pyroaring.BitMap) -> bytes:
    made.run_optimize()
    written: bytes = made.serialize()
    return written


def add_routes(app: web.Application) -> None:
    # aiohttp's own pattern for a variable leaves out braces, which names may hold.
    app.router.add_post("/api/v1/tables/{namespace:[^/]+}/{table:[^/]+}/bitmap", select_rows)
