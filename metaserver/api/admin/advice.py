"""The routes of the advisor: ranked proposals for a table, and the proposals that were applied.

The statements come from the query history, and predictions from a replay over a sample of rows
(`planner/advice/proposals.py`). A client applies a proposal, because table services run as clients. It then reports
the proposal here, and the server measures the table again with statements of the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, TypeVar

import msgspec
import numpy as np

from seamark.formats.iceberg.expressions.binding import bind
from seamark.formats.iceberg.expressions.expression import Expression
from seamark.formats.iceberg.expressions.expression_json import parse_expression
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.index.definitions import read_definitions
from seamark.formats.runtime.decoding import convert_json
from seamark.formats.runtime.errors import BadRequest, NotFound
from seamark.metaserver.api.admin.query_history import DAYS, DAYS_MAX, read_number
from seamark.metaserver.api.http.describe import ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.catalog.values import LoadedTable
from seamark.metaserver.history.history import QueryHistory
from seamark.metaserver.history.samples import FilterSample
from seamark.metaserver.history.shapes import QueryShape
from seamark.metaserver.planner.advice.current_layout import add_bounds
from seamark.metaserver.planner.advice.engine_times import EngineTimes
from seamark.metaserver.planner.advice.proposals import (
    AdvisedTable,
    Proposal,
    Reads,
    make_proposals,
    measure_reads,
)
from seamark.metaserver.planner.advice.replay import RecordedShape, draw_statements
from seamark.metaserver.planner.advice.row_samples import is_type_sampled, sample_rows
from seamark.metaserver.planner.advice.trials import (
    AppliedProposal,
    compute_corrections,
    compute_time_corrections,
    make_reads,
)
from seamark.metaserver.planner.joins.dimensions import list_files_at
from seamark.metaserver.planner.lookup.lookup import find_files_by_prefix
from seamark.metaserver.planner.scan.request import BoundScan, ScanRequest
from seamark.metaserver.store.model import AppliedAdvice, QueryShapeSums, QuerySums

T = TypeVar("T")
SHAPES_MAX = 40
"""The maximum number of shapes that are replayed; the most frequent shapes are replayed."""
COLUMNS_MAX = 8
"""The maximum number of columns that are sampled."""
_SEED = 17
"""The seed of the drawn statements. It is constant, so that the same history always gives the same advice."""
_APPLIED_MAX, _APPLIED_CHARACTERS_MAX = 10, 20_000
"""The maximum number of applied proposals in an answer, and the maximum length of a stored proposal."""
_UNUSED_PLANS_MIN = 20
"""An index counts as unused if at least this many plans have probed it, and it has left out no file."""


class Advice(msgspec.Struct, frozen=True, rename="kebab"):
    """The advice for a table.

    Attributes:
        statements: The number of recorded statements.
        days: The number of past days in which the statements were recorded.
        before: The files and bytes that an average statement reads now, by a simulation of the recorded statements.
        proposals: The proposals. The best proposal is first. Proposals that cost more than they save are last.
        applied: The proposals that were applied, newest first.
        reason: The reason why there is no proposal. It is empty if there are proposals.
    """

    statements: int
    days: int
    before: Reads | None
    proposals: list[Proposal]
    applied: list[AppliedProposal]
    reason: str = ""


class ReportedProposal(msgspec.Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    """A proposal that a client has applied."""

    proposal: Annotated[Proposal, doc("The proposal as `adviseTable` returned it.")]


@Route(
    "GET",
    "/api/v1/tables/{namespace}/{table}/advice",
    "adviseTable",
    "Propose layouts and indexes for the statements that read the table, with their predicted gain and cost",
    tags=("metadata",),
    answers=(
        ResponseSpec(200, "The proposals, with the best proposal first", Advice),
        ResponseSpec(400, "days is not a number, or is out of range"),
        ResponseSpec(404, "No such table"),
    ),
)
async def advise_table(call: Call) -> Advice:
    """Propose layouts and indexes for the statements that read the table, with their predicted gain and cost.

    `read_advised_table` returns a text instead of a function if there can be no proposals. The text is the reason.
    """
    days = read_number(call, "days", DAYS, DAYS_MAX)
    loaded_table = await call.components.catalog.tables.load(call.namespace, call.name)
    assert loaded_table.entry is not None
    history = call.components.history
    shapes = await history.flush_and_list_shapes(loaded_table.entry.uuid, days) if history.is_on else []
    applied_proposals = await _list_applied(history, loaded_table.entry.uuid)
    statements = sum(shape.sums.statements for shape in shapes)
    async with call.components.worker_limits.advising.hold(call.principal.name):
        build_or_reason = await read_advised_table(call, loaded_table, shapes)
        if isinstance(build_or_reason, str):
            return Advice(statements, days, None, [], applied_proposals, build_or_reason)
        reads_before, proposals = await run_simulation(call, lambda: make_proposals(build_or_reason()))
    reason = "" if proposals else "no change would save more bytes in 30 days than it costs"
    return Advice(statements, days, reads_before, proposals, applied_proposals, reason)


@Route(
    "POST",
    "/api/v1/tables/{namespace}/{table}/advice/applied",
    "recordAppliedAdvice",
    "Record that a proposal was applied, and measure the table again",
    tags=("metadata",),
    answers=(
        ResponseSpec(200, "The proposal, with its prediction and measurement", AppliedProposal),
        ResponseSpec(400, "The body is not a proposal"),
        ResponseSpec(404, "No such table"),
    ),
).takes(ReportedProposal)
async def record_applied_advice(call: Call, body: ReportedProposal) -> AppliedProposal:
    """Record that a proposal was applied, and measure the table again.

    If the table cannot be measured, the proposal is recorded without a measurement.
    """
    loaded_table = await call.components.catalog.tables.load(call.namespace, call.name)
    assert loaded_table.entry is not None
    uuid, history = loaded_table.entry.uuid, call.components.history
    shapes = await history.flush_and_list_shapes(uuid, DAYS) if history.is_on else []
    async with call.components.worker_limits.advising.hold(call.principal.name):
        build_or_reason = await read_advised_table(call, loaded_table, shapes)
        measured_reads = (
            None
            if isinstance(build_or_reason, str)
            else await run_simulation(call, lambda: measure_reads(build_or_reason()))
        )
    now_ms = call.components.clock.now_ms()
    applied_proposal = AppliedProposal(body.proposal, now_ms, measured_reads)
    proposal_json = msgspec.json.encode(applied_proposal).decode()
    if len(proposal_json) > _APPLIED_CHARACTERS_MAX:
        raise BadRequest(
            f"The proposal has {len(proposal_json):,} characters; the limit is {_APPLIED_CHARACTERS_MAX:,}"
        )
    await history.save_applied(AppliedAdvice(uuid, f"{now_ms}-{body.proposal.id[:64]}", now_ms, proposal_json))
    return applied_proposal


async def run_simulation(call: Call, work: Callable[[], T]) -> T:
    """Run `work`, a simulation, in a thread, and return its result. One simulation runs at a time."""
    return await call.components.worker_limits.simulating.run(call.principal.name, work)


async def read_advised_table(
    call: Call, loaded_table: LoadedTable, shapes: Sequence[QueryShapeSums]
) -> Callable[[], AdvisedTable] | str:
    """Read the state of a table that the advisor needs.

    Returns:
        A function that builds the table for the advisor, or the reason why there is no advice, as a text. The function
        takes seconds for a large table, so it must be called in a thread.
    """
    metadata = loaded_table.metadata
    assert loaded_table.entry is not None
    if not call.components.history.is_on:
        return "the setting query_history_days is 0, so no statements are recorded"
    recorded_shapes = await run_simulation(call, lambda: _read_shapes(shapes, metadata))
    if not recorded_shapes:
        return "the server has not seen a statement with a condition on this table yet"
    if metadata.current_snapshot_id is None:
        return "the table has no snapshot"
    columns = _find_compared_columns(recorded_shapes, metadata)
    if not columns:
        return "the statements compare no column whose values can be sampled"
    scan = await call.components.planner.plan(BoundScan.bind(metadata, ScanRequest()), loaded_table.entry)
    files = find_files_by_prefix(scan.view)
    if files.file_count < 1:
        return "the table has no data files"
    data_files = await run_simulation(call, lambda: list_files_at(scan, scan.entry_ids))
    sample = await sample_rows(call.components.objects, metadata, data_files, columns)
    if isinstance(sample, str):
        return sample
    if not sample.columns:
        return "the sampled files do not have the compared columns"
    unused_indexes = _find_unused_indexes(call, loaded_table)
    applied_proposals = await _load_applied(call.components.history, loaded_table.entry.uuid)
    corrections = compute_corrections(applied_proposals)
    time_corrections = compute_time_corrections(
        await _add_recorded_reads(call.components.history, loaded_table.entry.uuid, applied_proposals[:_APPLIED_MAX])
    )
    times = await run_simulation(call, lambda: EngineTimes.from_shapes(shapes))

    def build_table() -> AdvisedTable:
        whole_sample = add_bounds(sample, files)
        return AdvisedTable(
            name=".".join((*call.namespace, call.name)),
            metadata=metadata,
            files=files,
            total_bytes=max(1, int(files.read_longs("file_size_in_bytes").sum())),
            rows=int(np.maximum(files.read_longs("record_count"), 0).sum()),
            sample=whole_sample,
            statements=draw_statements(recorded_shapes, whole_sample, seed=_SEED),
            statements_per_day=_count_statements_per_day(shapes),
            unused_indexes=unused_indexes,
            corrections=corrections,
            time_corrections=time_corrections,
            times=times,
            shapes={record.fingerprint: record for record in recorded_shapes},
            pinnable_bytes=_find_pinnable_bytes(call),
        )

    return build_table


def _read_shapes(shapes: Sequence[QueryShapeSums], metadata: TableMetadata) -> list[RecordedShape]:
    """Return the first shapes whose statements can be simulated. `shapes` begins with the most frequent shape."""
    return [shape for sums in shapes[:SHAPES_MAX] if (shape := _make_recorded_shape(sums, metadata)) is not None]


def _make_recorded_shape(shape_sums: QueryShapeSums, metadata: TableMetadata) -> RecordedShape | None:
    """Return a shape of statements with its sampled filters.

    Returns:
        None if the stored shape cannot be read, or if its statements neither compare nor aggregate columns. No layout
        and no index makes such statements faster.
    """
    shape = QueryShape.parse(shape_sums.shape) if shape_sums.shape else None
    if shape is None or not (shape.conjuncts or shape.aggregates):
        return None
    try:
        samples = convert_json(shape_sums.samples, list[FilterSample]) if shape_sums.samples else []
    except msgspec.MsgspecError:  # A different version of the server may have written the samples.
        samples = []
    filters = [
        bound_filter
        for sample in samples
        if sample.filter and (bound_filter := _bind_filter(sample.filter, metadata)) is not None
    ]
    return RecordedShape(shape_sums.fingerprint, shape, shape_sums.sums.statements, samples, filters)


def _bind_filter(filter_json: str, metadata: TableMetadata) -> Expression | None:
    """Return the bound filter, or None if a column no longer exists under its name."""
    try:
        expression = parse_expression(convert_json(filter_json, object))
        return bind(expression, metadata.current_schema, metadata.schemas, case_sensitive=True)
    except (BadRequest, NotFound, msgspec.MsgspecError):
        return None  # A column was renamed or dropped after the statement.


def _find_compared_columns(recorded_shapes: Sequence[RecordedShape], metadata: TableMetadata) -> dict[int, str]:
    """Return the types, by column id, of the columns that the most statements compare or group by.

    There are at most `COLUMNS_MAX` columns. Columns of types that cannot be sampled are left out.
    """
    statement_counts: dict[int, int] = {}
    for record in recorded_shapes:
        for column_id in record.shape.compared_columns | frozenset(record.shape.grouping):
            statement_counts[column_id] = statement_counts.get(column_id, 0) + record.statements
    by_id = metadata.current_schema.index.by_id
    columns: dict[int, str] = {}
    for column_id in sorted(statement_counts, key=lambda column_id: (-statement_counts[column_id], column_id)):
        column = by_id.get(column_id)
        if column is not None and isinstance(column.type, str) and is_type_sampled(column.type):
            columns[column_id] = column.type
        if len(columns) == COLUMNS_MAX:
            break
    return columns


def _count_statements_per_day(shapes: Sequence[QueryShapeSums]) -> float:
    statements = sum(shape.sums.statements for shape in shapes)
    hours = max(shape.last_hour for shape in shapes) - min(shape.first_hour for shape in shapes) + 1
    return statements / max(1.0, hours / 24)


async def _list_applied(history: QueryHistory, uuid: str) -> list[AppliedProposal]:
    """Return the newest applied proposals, newest first, with the reads of the statements after each proposal."""
    return await _add_recorded_reads(history, uuid, (await _load_applied(history, uuid))[:_APPLIED_MAX])


async def _add_recorded_reads(
    history: QueryHistory, uuid: str, applied_proposals: Sequence[AppliedProposal]
) -> list[AppliedProposal]:
    """Add to each proposal the files and bytes that an average statement has read since it was applied."""
    proposals_with_reads = []
    for applied_proposal in applied_proposals:
        sums = await history.compute_sums_since(uuid, applied_proposal.applied_ms)
        proposals_with_reads.append(
            msgspec.structs.replace(applied_proposal, recorded=_compute_average_reads(sums), timed=sums.timed)
        )
    return proposals_with_reads


async def _load_applied(history: QueryHistory, uuid: str) -> list[AppliedProposal]:
    """Return the stored proposals that were applied, newest first."""
    proposals = []
    for stored_advice in await history.list_applied(uuid):
        with suppress(msgspec.MsgspecError):  # A different version of the server may have written the text.
            proposals.append(convert_json(stored_advice.advice, AppliedProposal))
    return proposals


def _compute_average_reads(sums: QuerySums) -> Reads | None:
    """Return the reads of an average statement, or None if there are no statements."""
    if not sums.statements:
        return None
    average_files = sums.files_left / sums.statements
    # The bytes of some statements are unknown. `sized` is the number of statements with known bytes.
    average_bytes = sums.bytes_left // sums.sized if sums.sized else 0
    return make_reads(average_files, average_bytes, [sums])


def _find_pinnable_bytes(call: Call) -> int:
    """Return the bytes that the gateway can pin in its cache, or 0 if it has no cache on a disk."""
    settings = call.components.settings
    if not settings.gateway_port:
        return 0
    return settings.gateway_cache_disk_bytes * settings.gateway_cache_pinned_percent // 100


def _find_unused_indexes(call: Call, loaded_table: LoadedTable) -> list[str]:
    """Return the names of the indexes that many plans have probed and that have left out no file."""
    assert loaded_table.entry is not None
    unused_names = []
    for definition in read_definitions(loaded_table.metadata).enabled:
        usage = call.components.usage.find_usage(loaded_table.entry.uuid, definition.id)
        if usage is not None and usage.plans >= _UNUSED_PLANS_MIN and usage.files_removed == 0:
            unused_names.append(definition.name)
    return unused_names
