"""The route that selects the rows that match a predicate in each file, from bitmap indexes.

No matching row is left out. If the rows of a file in the answer may include rows that do not match, the file is not
`exact`. Positions are the numbers of rows in the file. The positions include deleted rows unless the request sets
`deletes`. If it does, rows for which the deletes could not be evaluated are counted as `undecided`.

Answers have pages, with as many files as the limit, the byte limit and the time budget allow. The token of the next
page names the last file. If a page ends because its time budget is exhausted, another page follows, so that the listing
is complete.

Record counts come from writers and are not trusted, so no memory is allocated only because of them. A result with all
rows of a file needs no bits. If a file has more than ROWS_JUDGED_MAX rows, its deletes are not evaluated.
"""

from __future__ import annotations

import asyncio
import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
import pyarrow as pa
import pyroaring
from aiohttp import web

from seamark.formats.iceberg.expressions.expression import TRUE, Expression, collect_predicates
from seamark.formats.iceberg.expressions.expression_json import parse_expression
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.index.definitions import read_definitions
from seamark.formats.index.keys.keys import Bits
from seamark.formats.index.kinds.bits import count_set_bits, count_words, list_positions, make_full_bits, to_roaring
from seamark.formats.index.kinds.kinds import KINDS
from seamark.formats.index.packing import Longs
from seamark.formats.protocol.wire import decode_json, encode_json
from seamark.formats.runtime.errors import BadRequest, TooLarge
from seamark.formats.runtime.lazy_module import LazyModule
from seamark.metaserver.api.formats import arrow
from seamark.metaserver.api.http.describe import BodySize, ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.api.http.fresh_reads import load_to_read
from seamark.metaserver.api.http.parameters.fresh import FRESH
from seamark.metaserver.api.http.parameters.paging import decode_page_token, encode_page_token
from seamark.metaserver.api.http.parameters.snapshots import resolve_snapshot_id, select_schema
from seamark.metaserver.api.http.sql_texts import read_in_turn
from seamark.metaserver.api.lookups.lookups import COVERS, DELETED, FileProblem, list_paths
from seamark.metaserver.planner.indexes.resolver import BitmapIndex
from seamark.metaserver.planner.lookup.lookup import find_files_at
from seamark.metaserver.planner.pruning.semantics import ComparisonSemantics
from seamark.metaserver.planner.rows.row_deletes import DeleteEvaluator, RowDeletion
from seamark.metaserver.planner.rows.row_matches import PredicateMatcher, clear_rows
from seamark.metaserver.planner.scan.request import BoundScan, ScanRequest
from seamark.metaserver.planner.scan.scan_plan import ScanPlan
from seamark.metaserver.store.model import Entry

if TYPE_CHECKING:
    from seamark.formats.iceberg.expressions import sql
else:
    sql = LazyModule("seamark.formats.iceberg.expressions.sql")

FILES_MAX = 10_000
"""The maximum number of files of one page."""
PAGE_BYTES = 16 << 20
"""The size of a page's rows in bytes at which the page ends.

The positions of one file have the same limit.
"""
CANDIDATES_MAX = 4_000_000
"""The number of rows compared with deletes at which a page ends.

It is also the size of a batch.
"""
ROWS_JUDGED_MAX = 1 << 27
"""The maximum number of rows of a file that are compared with deletes. In a larger file, all rows are undecided."""
_POSITIONS_MAX = PAGE_BYTES // 8
"""The maximum number of positions in the list of one file. A position has 8 bytes."""
_WORD_BITS = 64
"""The number of rows in a word of `Bits`."""
_FILES_PER_CHECK = 16
"""The number of files between two checks of the time budget."""


class SelectRowsRequest(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """A request for the rows that match a predicate."""

    where: Annotated[str | None, doc("A predicate in SQL.", examples=["discount = 5 AND qty < 3"])] = None
    filter: Annotated[msgspec.Raw, doc("An expression of the Iceberg REST specification, instead of `where`.")] = (
        msgspec.field(default_factory=msgspec.Raw)
    )
    case_sensitive: Annotated[bool, doc("Whether names in `filter` are case-sensitive.")] = True
    meaning: Annotated[
        str | None,
        doc(
            "The rules for comparing zeros and NaN. The default is `iceberg` for `filter`, and `sql` for `where`.",
            enum=["sql", "iceberg", None],
        ),
    ] = None
    schema_id: Annotated[int | None, doc("The schema that resolves names. The default is the current schema.")] = None
    snapshot_id: int | None = None
    ref: str | None = None
    as_of: Annotated[int | None, doc("A time in milliseconds since the epoch.")] = None
    deletes: Annotated[bool, doc("Whether deleted rows are left out of the answer.")] = False
    rows: Annotated[str, doc("The format of the rows.", enum=["roaring", "positions"])] = "roaring"
    limit: Annotated[int | None, doc(f"The maximum number of files of a page, at most {FILES_MAX:,}.", minimum=1)] = (
        None
    )
    page_token: Annotated[str | None, doc("The next-page-token of the answer to the same request.")] = None


class SelectedFile(msgspec.Struct, rename="kebab", gc=False):
    """A file with its matching rows."""

    file_path: str
    record_count: int
    rows: Annotated[
        str | list[int] | None,
        doc(
            "The positions of the rows, as a 32-bit roaring bitmap in its portable format, in base64, or as a list. It "
            "is null if any row may match."
        ),
    ]
    count: Annotated[int | None, doc("The number of rows in `rows`.")]
    exact: Annotated[bool, doc("False if some of the rows in `rows` may not match.")]
    delete_files: Annotated[int, doc("The number of delete files of the file.")]
    undecided: Annotated[
        int, doc("If the request sets `deletes`, the number of rows of which it is unknown whether they are deleted.")
    ]


class SelectRowsResponse(msgspec.Struct, rename="kebab"):
    """The files with their matching rows. A file is exact if all rows that it lists match the predicate.

    The answer is encoded in parts, and `files` is the last part.
    """

    snapshot_id: int | None
    meaning: ComparisonSemantics
    deletes: Annotated[bool, doc("Whether deleted rows were left out.")]
    exact: Annotated[bool, doc("Whether each listed row of this page matches the predicate.")]
    not_used: Annotated[
        tuple[str, ...],
        doc("Parts of the SQL text that Iceberg expressions cannot represent. The planner takes them as true."),
    ]
    problems: Annotated[list[FileProblem], doc("The first files that could not be read, which makes rows undecided.")]
    next_page_token: str | None
    files: Annotated[
        list[SelectedFile] | msgspec.UnsetType,
        doc("The files that may contain a matching row. All other files contain none."),
    ] = msgspec.UNSET


@dataclass(frozen=True)
class _Predicate:
    """The predicate of a request.

    Attributes:
        exact: Whether the expression represents the predicate completely.
        unused: The parts of the SQL text that the expression does not represent.
        comparison_semantics: The rules for comparing zeros and NaN, those of SQL or of Iceberg.
    """

    expression: Expression
    exact: bool
    unused: tuple[str, ...]
    comparison_semantics: ComparisonSemantics


@dataclass(frozen=True)
class _Selection:
    """The parsed request.

    Attributes:
        bound_scan: The scan of the snapshot with the predicate as its filter.
        predicate: The predicate.
        snapshot_id: The snapshot, or None for a table without snapshots.
        last_entry_id: The number of the last file of the previous page in the snapshot, or -1 if there is none.
        checksum: The checksum in page tokens, which identifies the request.
    """

    bound_scan: BoundScan
    predicate: _Predicate
    snapshot_id: int | None
    last_entry_id: int
    checksum: int


@dataclass
class _CandidateFile:
    """A file that may have matching rows.

    Attributes:
        entry_id: The number of the file among the files of the snapshot.
        records: The number of rows of the file. It is negative if it is unknown.
        bits: A bit for each row of the file, which is set if the row may match. None means that all bits are set.
        exact: Whether every row whose bit is set matches. If it is False, some of these rows may not match.
        delete_files: The number of delete files of the file.
        undecided: The number of rows with set bits of which it is unknown whether they are deleted. It is 0 until the
            deletes are evaluated.
    """

    entry_id: int
    records: int
    bits: Bits | None
    exact: bool
    delete_files: int
    undecided: int = 0

    @property
    def candidates(self) -> int:
        return self.records if self.bits is None else count_set_bits(self.bits)


@dataclass(frozen=True)
class _AnswerFile:
    """A file of the answer, with its matching rows.

    Attributes:
        entry_id: The number of the file among the files of the snapshot.
        records: The number of rows of the file.
        rows: The matching rows in the requested format. None if any row may match.
        count: The number of rows in `rows`.
        exact: Whether all rows in `rows` match. If it is False, some of them may not match.
        delete_files: The number of delete files of the file.
        undecided: If deleted rows are left out, the number of rows of which it is unknown whether they are deleted.
    """

    entry_id: int
    records: int
    rows: bytes | Longs | None
    count: int | None
    exact: bool
    delete_files: int
    undecided: int

    @property
    def size_bytes(self) -> int:
        return 0 if self.rows is None else self.rows.nbytes if isinstance(self.rows, np.ndarray) else len(self.rows)


@Route(
    "POST",
    "/api/v1/tables/{namespace}/{table}/bitmap",
    "selectRows",
    "Find the rows that match a predicate in each file, by bitmap indexes",
    tags=("indexes",),
    parameters=(FRESH,),
    body_size=BodySize.MEDIUM,
    answers=(
        ResponseSpec(
            200,
            "A page of files. With `Accept: application/vnd.apache.arrow.stream`, the answer is an Arrow IPC stream. "
            "Its column names have `_` instead of `-`, `rows` is binary or a list, and the other fields are metadata "
            "of its schema",
            SelectRowsResponse,
        ),
        ResponseSpec(400, "The predicate is invalid; the message states the position"),
        ResponseSpec(404, "No such table"),
        ResponseSpec(406, "The client accepts neither JSON nor Arrow"),
        ResponseSpec(413, f"One file has more than {_POSITIONS_MAX:,} positions"),
    ),
).takes(SelectRowsRequest)
async def select_rows(call: Call, body: SelectRowsRequest) -> web.Response:
    """Find the rows that match a predicate in each file, by bitmap indexes."""
    wants_arrow = arrow.wants_arrow(call.headers)
    # All pages of an answer have the same snapshot. If it is a fresh snapshot, only the body can name it.
    loaded_table = await load_to_read(
        call, call.namespace, call.name, body.snapshot_id, is_named=body.snapshot_id is None
    )
    metadata, entry = loaded_table.metadata, loaded_table.entry
    assert entry is not None
    if body.rows not in ("roaring", "positions"):
        raise BadRequest(f"rows is {body.rows[:40]!r}; it must be roaring or positions")
    page_max = FILES_MAX if wants_arrow else min(FILES_MAX, call.components.settings.page_limit)
    if body.limit is not None and body.limit < 1:
        raise BadRequest(f"limit is {body.limit}; it must be at least 1")
    parse = partial(_parse_request, body, metadata)
    selection = await (call.run_in_turn(parse) if body.where is None else read_in_turn(call, len(body.where), parse))
    scan = await call.components.planner.plan(selection.bound_scan, entry)
    page = _Page(call, scan, selection.predicate, body, min(body.limit or page_max, page_max))
    await page.fill(selection.last_entry_id, metadata, entry)
    token = None if page.last is None else encode_page_token(selection.checksum, selection.snapshot_id, page.last)
    page_bytes = await asyncio.to_thread(
        page.encode_arrow if wants_arrow else page.encode_json, selection.snapshot_id, token
    )
    content_type = arrow.ARROW_STREAM if wants_arrow else "application/json"
    return web.Response(body=page_bytes, content_type=content_type, headers={"Vary": "Accept"})


def _parse_request(body: SelectRowsRequest, metadata: TableMetadata) -> _Selection:
    """Parse a request.

    The function runs in a thread, because a predicate may list hundreds of thousands of values.

    Raises:
        BadRequest: The request is invalid.
    """
    if body.schema_id is not None:
        metadata = select_schema(metadata, body.schema_id)
    checksum = _compute_checksum(body, metadata)
    snapshot_id, last_entry_id = _find_start(body, metadata, checksum)
    predicate = _read_predicate(body, metadata)
    request = ScanRequest(filter=predicate.expression, snapshot_id=snapshot_id, case_sensitive=body.case_sensitive)
    return _Selection(BoundScan.bind(metadata, request), predicate, snapshot_id, last_entry_id, checksum)


def _compute_checksum(body: SelectRowsRequest, metadata: TableMetadata) -> int:
    """Return the checksum of the parts of a request on which page tokens depend."""
    parts = (
        metadata.table_uuid,
        body.where,
        bytes(body.filter).decode("utf-8", "replace"),
        body.case_sensitive,
        body.schema_id,
        body.meaning,
        body.deletes,
        body.rows,
    )
    return zlib.crc32(encode_json(parts))


def _find_start(body: SelectRowsRequest, metadata: TableMetadata, checksum: int) -> tuple[int | None, int]:
    """Return the snapshot, and the number of the last file of the previous page, or -1 on the first page.

    Raises:
        BadRequest: The request is invalid.
    """
    if body.page_token is None:
        return resolve_snapshot_id(metadata, body.snapshot_id, body.ref, body.as_of), -1
    return decode_page_token(body.page_token, checksum, metadata)


def _read_predicate(body: SelectRowsRequest, metadata: TableMetadata) -> _Predicate:
    """Parse the predicate of a request.

    Raises:
        BadRequest: The predicate is invalid.
    """
    filter_json = bytes(body.filter)
    if body.meaning not in (None, "sql", "iceberg"):
        raise BadRequest(f"meaning is {body.meaning[:40]!r}; it must be sql or iceberg")
    if body.where is None:
        meaning = ComparisonSemantics(body.meaning or "iceberg")
        expression = parse_expression(decode_json(filter_json, "The filter")) if filter_json else TRUE
        return _Predicate(expression, True, (), meaning)
    if filter_json:
        raise BadRequest("The request has both where and filter; send the predicate as SQL or as an Iceberg expression")
    sql_filter = sql.parse_sql(body.where, metadata.current_schema, metadata.schemas)
    return _Predicate(
        sql_filter.expression, sql_filter.exact, sql_filter.unused, ComparisonSemantics(body.meaning or "sql")
    )


class _Page:
    """A page of the answer. If there are more files, `last` is the last file of the page."""

    def __init__(self, call: Call, scan: ScanPlan, predicate: _Predicate, body: SelectRowsRequest, limit: int) -> None:
        self._index_resolver = call.app[COVERS]
        self._evaluator: DeleteEvaluator = call.app[DELETED].make_evaluator(scan)
        self._clock = call.components.clock
        self._until_s = self._clock.monotonic() + call.components.settings.plan_time_budget_s
        self._scan, self._predicate, self._body, self._limit = scan, predicate, body, limit
        self._files: list[_AnswerFile] = []
        self.last: int | None = None

    async def fill(self, after_id: int, metadata: TableMetadata, entry: Entry) -> None:
        """Add the files after the file `after_id`, up to the limits of the page.

        The files are matched in batches. A batch has several files only if they have at most `CANDIDATES_MAX` rows. The
        first batch is always matched, so that each page makes progress, and further batches only within the time limit.
        """
        matcher = PredicateMatcher(
            await self._list_indexes(metadata, entry),
            self._predicate.comparison_semantics,
            self._body.where is not None,
        )
        entry_ids = self._scan.entry_ids[np.searchsorted(self._scan.entry_ids, after_id, side="right") :]
        records = find_files_at(self._scan.view, entry_ids).read_longs("record_count").clip(0, CANDIDATES_MAX + 1)
        page_bytes = candidate_count = start = 0
        while start < len(entry_ids) and len(self._files) < self._limit:
            if page_bytes > PAGE_BYTES or candidate_count > CANDIDATES_MAX:
                break
            if start and self._clock.monotonic() >= self._until_s:
                break
            batch_size = min(_FILES_PER_CHECK, self._limit - len(self._files))
            batch_size = max(1, int(np.searchsorted(np.cumsum(records[start : start + batch_size]), CANDIDATES_MAX)))
            batch_ids = entry_ids[start : start + batch_size]
            file_positions = self._scan.view.find_positions(batch_ids).tolist()
            await asyncio.gather(
                *(self._index_resolver.load(index, file_positions) for index in matcher.indexes.values())
            )
            matched_files = await asyncio.to_thread(self._match_files, matcher, batch_ids)
            if self._body.deletes:
                await self._remove_deleted(matched_files)
                candidate_count += int(records[start : start + batch_size].sum())
            answers = await asyncio.to_thread(self._select_answers, matched_files)
            self._files += answers
            page_bytes += sum(file.size_bytes for file in answers)
            start += len(batch_ids)
        self.last = int(entry_ids[start - 1]) if start < len(entry_ids) else None
        await self._index_resolver.schedule_verification(entry, matcher.damaged)

    async def _list_indexes(self, metadata: TableMetadata, entry: Entry) -> dict[tuple[int, str], BitmapIndex]:
        """Return the enabled indexes that answer predicates of the filter, by column and transform."""
        requested_terms = {
            (predicate.column_id, predicate.transform) for predicate in collect_predicates(self._scan.bound)
        }
        indexes = {}
        for definition in read_definitions(metadata).enabled:
            key = (definition.terms[0].column_id, definition.terms[0].transform)
            if KINDS[definition.kind].answers_rows and key in requested_terms:
                indexes[key] = await self._index_resolver.open_bitmaps(self._scan.view, definition, entry)
        return indexes

    def _match_files(self, matcher: PredicateMatcher, entry_ids: Longs) -> list[_CandidateFile]:
        """Find the rows of each file that may match the predicate."""
        file_positions = self._scan.view.find_positions(entry_ids).tolist()
        records = find_files_at(self._scan.view, entry_ids).read_longs("record_count").tolist()
        files = []
        for entry_id, position, row_count, deletes in zip(
            entry_ids.tolist(), file_positions, records, self._scan.find_deletes_by_file(entry_ids), strict=True
        ):
            if row_count < 0:  # The number of rows is unknown, so any row may match.
                files.append(_CandidateFile(entry_id, row_count, None, False, len(deletes)))
                continue
            bits, exact = matcher.match_rows(self._scan.compute_residual(entry_id), position, row_count)
            # If no row may match, the answer is exact, even if the expression is only a part of the predicate.
            is_complete = self._predicate.exact or (bits is not None and not bits.any())
            files.append(_CandidateFile(entry_id, row_count, bits, exact and is_complete, len(deletes)))
        return files

    async def _remove_deleted(self, files: list[_CandidateFile]) -> None:
        """Remove deleted rows from the files with deletes.

        A large file is the only file of its batch, and is processed in parts.
        """
        files_with_deletes = await asyncio.to_thread(_prepare_for_evaluation, files)
        words_per_part = CANDIDATES_MAX // _WORD_BITS
        for start in range(
            0, max((count_words(file.records) for file in files_with_deletes), default=0), words_per_part
        ):
            word_slice = slice(start, start + words_per_part)
            rows, file_positions = await asyncio.to_thread(self._select_candidates, files_with_deletes, word_slice)
            deletion = await self._evaluator.evaluate(file_positions, np.concatenate(rows))
            await asyncio.to_thread(_apply_deletion, files_with_deletes, word_slice, rows, deletion)

    def _select_candidates(
        self, files_with_deletes: list[_CandidateFile], word_slice: slice
    ) -> tuple[list[Longs], Longs]:
        """Return the candidate rows of each file in a part of its bitmap, and the file of each row.

        Args:
            files_with_deletes: The files.
            word_slice: The part of the bitmaps. A bitmap has a bit for each row of its file, in words of 64 bits.

        Returns:
            The rows of each file, and for each row the position of its file in the view.
        """
        rows = [
            list_positions(file.bits[word_slice]) + _WORD_BITS * word_slice.start
            for file in files_with_deletes
            if file.bits is not None
        ]
        entry_ids = np.array([file.entry_id for file in files_with_deletes], dtype=np.int64)
        return rows, np.repeat(self._scan.view.find_positions(entry_ids), [len(row) for row in rows])

    def _select_answers(self, files: list[_CandidateFile]) -> list[_AnswerFile]:
        """Return the files that may have a matching row.

        Raises:
            TooLarge: The list of positions of a file has more than `_POSITIONS_MAX` items.
        """
        answers = []
        for file in files:
            may_match_any = file.bits is None and not file.exact
            match_count = None if may_match_any else file.candidates
            if match_count == 0:
                continue
            rows: bytes | Longs | None = None
            if match_count is not None and self._body.rows == "positions":
                if match_count > _POSITIONS_MAX:
                    (path,) = self._list_paths([file])
                    reason = f"{match_count:,} rows of {path} match; a list of positions has at most {_POSITIONS_MAX:,}"
                    raise TooLarge(f"{reason}; request rows in the format roaring")
                rows = np.arange(match_count) if file.bits is None else list_positions(file.bits)
            elif match_count is not None:
                rows = _serialize_bitmap(
                    pyroaring.BitMap(range(match_count)) if file.bits is None else to_roaring(file.bits)
                )
            answers.append(
                _AnswerFile(
                    file.entry_id, file.records, rows, match_count, file.exact, file.delete_files, file.undecided
                )
            )
        return answers

    def _describe_page(self, snapshot_id: int | None, token: str | None) -> SelectRowsResponse:
        """Return the page in the form of the answer."""
        return SelectRowsResponse(
            snapshot_id=snapshot_id,
            meaning=self._predicate.comparison_semantics,
            deletes=self._body.deletes,
            exact=all(file.exact for file in self._files),
            not_used=self._predicate.unused,
            problems=[FileProblem(path, reason) for path, reason in self._evaluator.problems.items()],
            next_page_token=token,
        )

    def _list_paths(self, files: Sequence[_AnswerFile | _CandidateFile]) -> list[str]:
        entry_ids = np.array([file.entry_id for file in files], dtype=np.int64)
        return list_paths(self._scan.view, self._scan.view.find_positions(entry_ids)) if len(entry_ids) else []

    def encode_json(self, snapshot_id: int | None, token: str | None) -> bytes:
        """Encode the page as JSON."""
        pieces = []
        for path, file in zip(self._list_paths(self._files), self._files, strict=True):
            rows: str | list[int] | None = None
            if isinstance(file.rows, np.ndarray):
                rows = file.rows.tolist()
            elif file.rows is not None:
                rows = base64.b64encode(file.rows).decode()
            selected_file = SelectedFile(
                path, file.records, rows, file.count, file.exact, file.delete_files, file.undecided
            )
            pieces.append(encode_json(selected_file))
        head = encode_json(self._describe_page(snapshot_id, token))[:-1]  # The files follow before the closing brace.
        return b"".join((head, b',"files":[', b",".join(pieces), b"]}"))

    def encode_arrow(self, snapshot_id: int | None, token: str | None) -> bytes:
        """Encode the page as an Arrow IPC stream."""
        files = self._files
        rows: pa.Array
        if self._body.rows == "positions":
            no_rows = np.empty(0, np.int64)
            positions_by_file = [file.rows if isinstance(file.rows, np.ndarray) else no_rows for file in files]
            row_ends = np.cumsum([0, *map(len, positions_by_file)])
            values = pa.array(np.concatenate([no_rows, *positions_by_file]))
            mask = pa.array([file.rows is None for file in files], pa.bool_())
            rows = pa.LargeListArray.from_arrays(pa.array(row_ends, pa.int64()), values, mask=mask)
        else:
            rows = pa.array([file.rows for file in files], pa.large_binary())
        columns: dict[str, pa.Array] = {
            "file-path": pa.array(self._list_paths(files), pa.string()),
            "record-count": pa.array([file.records for file in files], pa.int64()),
            "rows": rows,
            "count": pa.array([file.count for file in files], pa.int64()),
            "exact": pa.array([file.exact for file in files], pa.bool_()),
            "delete-files": pa.array([file.delete_files for file in files], pa.int64()),
            "undecided": pa.array([file.undecided for file in files], pa.int64()),
        }
        metadata = {
            name: value
            for name, value in msgspec.to_builtins(self._describe_page(snapshot_id, token)).items()
            if value is not None
        }
        metadata_texts = {
            name: value if isinstance(value, str) else encode_json(value).decode() for name, value in metadata.items()
        }
        return arrow.encode_stream(columns, metadata_texts)


def _prepare_for_evaluation(files: list[_CandidateFile]) -> list[_CandidateFile]:
    """Return the files whose deletes are evaluated, and give each of them its own copy of its bits.

    A file with too many candidate rows is not evaluated: the function marks all of its rows as undecided, and the file
    as not exact. Files with an unknown number of rows stay unchanged.
    """
    files_with_deletes = []
    for file in files:
        if not file.delete_files or file.records < 0:
            continue
        candidates = file.candidates
        if candidates > ROWS_JUDGED_MAX:
            file.undecided, file.exact = candidates, False
            continue
        file.bits = make_full_bits(file.records) if file.bits is None else file.bits.copy()
        files_with_deletes.append(file)
    return files_with_deletes


def _apply_deletion(files: list[_CandidateFile], word_slice: slice, rows: list[Longs], deletion: RowDeletion) -> None:
    """Clear the bits of deleted rows, and count the undecided rows.

    Args:
        files: The files.
        word_slice: The part of the files' bitmaps that `rows` belong to, in words.
        rows: The candidate rows of each file in this part.
        deletion: The deletions of all rows, in the order of the files.
    """
    start = 0
    for file, file_rows in zip(files, rows, strict=True):
        file_slice = slice(start, start + len(file_rows))
        start = file_slice.stop
        undecided_count = int(np.count_nonzero(deletion.undecided[file_slice] & ~deletion.deleted[file_slice]))
        if file.bits is not None:
            file.bits[word_slice] = clear_rows(
                file.bits[word_slice], file_rows[deletion.deleted[file_slice]] - _WORD_BITS * word_slice.start
            )
        file.undecided += undecided_count
        file.exact &= not undecided_count


def _serialize_bitmap(bitmap: pyroaring.BitMap) -> bytes:
    bitmap.run_optimize()
    serialized: bytes = bitmap.serialize()
    return serialized
