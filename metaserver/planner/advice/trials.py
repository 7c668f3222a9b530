"""Trials of the policy `auto`: changes that a job applies, measures, and then keeps or undoes.

A trial changes only properties that the table does not have, or that an earlier trial has set. So it never replaces or
removes anything that a user has defined. The functions are pure; `api/admin/auto_advice.py` stores the trials.

A trial begins in the state `applying`, and continues in the state `measuring`. While another job rewrites the table,
the state is `waiting`. A measurement sets the state `kept` or `undone`. Three further states end a trial: `replaced` if
another clustering replaces it, `withdrawn` if a user withdraws it, and `failed` if it cannot be applied.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from seamark.formats.iceberg.metadata.auto_advice import AutoAdvicePolicy
from seamark.formats.iceberg.metadata.clustering import COLUMNS, CURVE, HILBERT
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.properties import TARGET_FILE_BYTES, parse_bool
from seamark.formats.index.definitions import PREFIX, define_index, read_definitions
from seamark.formats.services.services import CLUSTERING
from seamark.metaserver.history.shapes import QueryShape
from seamark.metaserver.planner.advice.engine_times import EngineCosts
from seamark.metaserver.planner.advice.proposals import GAIN_MIN_FRACTION, HORIZON_DAYS, Proposal, Reads
from seamark.metaserver.store.model import QueryShapeSums, QuerySums

WAITING, APPLYING, MEASURING, KEPT = "waiting", "applying", "measuring", "kept"
UNDONE, REPLACED, WITHDRAWN, FAILED = "undone", "replaced", "withdrawn", "failed"
_IN_EFFECT = (WAITING, APPLYING, MEASURING, KEPT)
STATEMENTS_MIN = 20
"""The minimum number of statements since the change that are necessary to judge a trial."""
SHAPES_MAX = 40
"""The maximum number of shapes whose reads before the change are stored; the most frequent shapes are stored."""
_DAY_MS = 86_400_000
_CORRECTION_MIN = 0.01
"""The minimum factor of an earlier correction, because a factor that was rounded to 0 has no meaning."""
_CORRECTION_MAX = math.log(3)
"""The logarithm of the maximum factor by which measurements correct later predictions."""
_PAUSE_PERIODS = 7
"""A change that was undone or failed is not applied again for this number of measuring periods."""


class ShapeReads(msgspec.Struct, frozen=True, array_like=True):
    """The share of the table's bytes that statements of a shape read before a change."""

    fingerprint: str
    fraction: float


class Trial(msgspec.Struct, frozen=True, rename="kebab"):
    """The state of a change that the policy `auto` has made.

    Attributes:
        number: The number of the trial. The first trial of a table has the number 1.
        state: waiting, applying, measuring, kept, undone, replaced, withdrawn, or failed.
        reason: The reason for the state, in words.
        since_ms: The time of the last decision.
        properties: The table properties that the change sets.
        columns: The ids of the columns of the change.
        spent_bytes: The bytes of the budget that the change used.
        spent_seconds: The seconds of the budget that the change used.
        shapes: The reads before the change.
        saved_fraction: The share of the bytes that the change saved at the last measurement.
        replaces: The number of the trial whose clustering this trial replaces, or None.
    """

    number: int
    state: str
    reason: str
    since_ms: int
    properties: dict[str, str]
    columns: list[int]
    spent_bytes: int
    spent_seconds: float
    shapes: list[ShapeReads] = []
    saved_fraction: float | None = None
    replaces: int | None = None

    @property
    def is_in_effect(self) -> bool:
        """Whether the table has the properties of the trial, a proposal that the server applies and measures."""
        return self.state in _IN_EFFECT


class AppliedProposal(msgspec.Struct, frozen=True, rename="kebab"):
    """A proposal that was applied.

    Attributes:
        proposal: The proposal, with its prediction.
        applied_ms: The time when it was applied.
        measured: The files and bytes that an average statement of the same shapes reads now, by a replay over the
            changed table. Null if the table cannot be sampled.
        recorded: The files and bytes that an average statement has read since then, as the history records them.
            Null if there were no statements. The seconds are the mean of the reported times, or an estimate.
        timed: The number of statements since then for which the engine has reported a time.
        trial: The decisions of the policy `auto`. Null if a user has applied the proposal.
    """

    proposal: Proposal
    applied_ms: int
    measured: Reads | None
    recorded: Reads | None = None
    timed: int = 0
    trial: Trial | None = None

    @property
    def is_in_effect(self) -> bool:
        """Whether the policy `auto` has applied the proposal, and has not undone it."""
        return self.trial is not None and self.trial.is_in_effect


@dataclass(frozen=True)
class Verdict:
    """The result of a measurement.

    Attributes:
        pays: Whether the change saves enough, or None if there are too few statements to judge.
        saved_fraction: The share of the bytes that the change saves.
        reads: The files, bytes and seconds that an average statement has read, or None if there are too few statements.
        reason: The result in words.
    """

    pays: bool | None
    saved_fraction: float
    reads: Reads | None
    reason: str


def select_shape_reads(shapes: Sequence[QueryShapeSums]) -> list[ShapeReads]:
    """Return the reads of the first `SHAPES_MAX` shapes. Later measurements are compared with them.

    A shape is a statement without its literals. The argument has the most frequent shapes first.
    """
    return [ShapeReads(sums.fingerprint, round(_compute_read_fraction(sums.sums), 6)) for sums in shapes[:SHAPES_MAX]]


def judge_trial(trial: Trial, shapes: Sequence[QueryShapeSums]) -> Verdict:
    """Decide whether a change saves enough bytes, by comparing what statements read before and after the change.

    Statements that differ only in their literals have the same shape, and are compared as a group.
    The comparison uses shares of the table's bytes, so the growth of the table does not matter. If a shape is new and
    compares a column of the change, it is assumed to have read the whole table before. Other new shapes are assumed to
    be unaffected by the change. With fewer than `STATEMENTS_MIN` statements, the verdict is open: `pays` is None.

    Args:
        trial: The change, which the server has applied and measures.
        shapes: The sums of each shape since the change.
    """
    statements = sum(sums.sums.statements for sums in shapes)
    if statements < STATEMENTS_MIN:
        text = f"{statements} statements since the change; {STATEMENTS_MIN} are needed"
        return Verdict(None, 0.0, None, text)
    fractions_before = {reads.fingerprint: reads.fraction for reads in trial.shapes}
    before_bytes = after_bytes = files = 0.0
    for shape_sums in shapes:
        sums = shape_sums.sums
        # Only some statements have known bytes. Assume that all statements of a shape have the same mean, or use the
        # number of files as a measure of the size.
        table_bytes = sums.statements * sums.bytes_in / sums.sized if sums.sized else sums.files_in
        fraction_after = _compute_read_fraction(sums)
        fraction_before = fractions_before.get(shape_sums.fingerprint)
        if fraction_before is None:
            fraction_before = 1.0 if _compares_columns(shape_sums.shape, trial.columns) else fraction_after
        before_bytes += fraction_before * table_bytes
        after_bytes += fraction_after * table_bytes
        files += sums.files_left
    saved_fraction = 1 - after_bytes / before_bytes if before_bytes else 0.0
    mean_bytes, mean_files = int(after_bytes / statements), files / statements
    reads = make_reads(mean_files, mean_bytes, [shape_sums.sums for shape_sums in shapes])
    pays = saved_fraction >= GAIN_MIN_FRACTION
    reason = f"{statements:,} statements since the change read {saved_fraction:.0%} fewer bytes than before"
    if not pays:
        reason = (
            f"{statements:,} statements since the change saved {saved_fraction:.1%} of the bytes; the minimum is "
            f"{GAIN_MIN_FRACTION:.0%}"
        )
    return Verdict(pays, round(saved_fraction, 4), reads, reason)


def make_reads(files: float, size_bytes: int, sums: Sequence[QuerySums]) -> Reads:
    """Return the reads of an average statement.

    The seconds are the mean of the times that engines have reported. Without a reported time, they are an estimate.
    """
    timed_statements = sum(shape_sums.timed for shape_sums in sums)
    seconds = (
        sum(shape_sums.run_us for shape_sums in sums) / 1e6 / timed_statements
        if timed_statements
        else EngineCosts().estimate(files, size_bytes)
    )
    return Reads(round(files, 2), size_bytes, round(seconds, 4))


def _compute_read_fraction(sums: QuerySums) -> float:
    """Return the share of the table's bytes that the statements read, or of its files if the bytes are unknown.

    If both are unknown, the share is 1, so that no saving is assumed.
    """
    if sums.sized and sums.bytes_in:
        return min(1.0, sums.bytes_left / sums.bytes_in)
    return min(1.0, sums.files_left / sums.files_in) if sums.files_in else 1.0


def _compares_columns(shape_text: str, column_ids: Sequence[int]) -> bool:
    """Return whether statements of the shape compare one of the columns."""
    shape = QueryShape.parse(shape_text) if shape_text else None
    return shape is not None and not shape.compared_columns.isdisjoint(column_ids)


def find_changed_properties(proposal: Proposal, metadata: TableMetadata) -> dict[str, str] | None:
    """Return the table properties that a proposal sets, or None if a job cannot apply it.

    A job can only cluster a table and add an index.

    Raises:
        BadRequest: The index of the proposal is invalid.
    """
    change = proposal.change
    match change.kind:
        case "cluster":
            properties = {COLUMNS: ",".join(change.columns), CURVE: change.curve or HILBERT}
            if change.target_file_bytes is not None:
                properties[TARGET_FILE_BYTES] = str(change.target_file_bytes)
            return properties
        case "add-index":
            index = define_index(change.index_name, change.index_kind, change.columns, metadata.current_schema)
            return {PREFIX + change.index_name: index.property_text}
    return None


def find_changed_columns(proposal: Proposal, metadata: TableMetadata) -> list[int]:
    """Return the ids of the columns of a proposal. Columns that the table no longer has are left out."""
    by_name = metadata.current_schema.index.by_name
    return [by_name[name] for name in proposal.change.columns if name in by_name]


def refuse_proposal(
    proposal: Proposal,
    properties: Mapping[str, str] | None,
    effective: TableMetadata,
    applied_proposals: Sequence[AppliedProposal],
    policy: AutoAdvicePolicy,
    now_ms: int,
    *,
    clusters_by_default: bool,
    indexes_max: int,
) -> str | None:
    """Return the reason why a proposal is not applied automatically, or None if it may be applied.

    Args:
        proposal: The proposal.
        properties: The properties that the proposal sets, or None if a job cannot apply it; see
            `find_changed_properties`.
        effective: The metadata of the table, with the properties of its namespaces.
        applied_proposals: The earlier proposals that the server has applied and measured.
        policy: The policy of the table.
        now_ms: The time.
        clusters_by_default: Whether the server clusters tables that do not enable clustering themselves.
        indexes_max: The maximum number of indexes of a table.
    """
    if not proposal.pays:
        return f"the proposal would not save more bytes within {HORIZON_DAYS} days than it costs"
    if properties is None:
        return "a job cannot apply it"
    own_properties = list_trial_properties(applied_proposals)
    for name in properties:
        current = effective.properties.get(name)
        if current is not None and own_properties.get(name) != current:
            return f"a user has defined the property {name}"
    if proposal.change.kind == "cluster":
        switch = CLUSTERING.switch
        assert switch is not None
        if not parse_bool(effective.properties, switch, clusters_by_default):
            return "clustering is switched off for the table"
        if effective.default_sort_order_id:
            return "a user has defined a sort order"
    elif len(read_definitions(effective).by_name) >= indexes_max:
        return f"the table has {indexes_max} indexes, which is the limit"
    columns = find_changed_columns(proposal, effective)
    return _refuse_after_trial(proposal, columns, applied_proposals, policy, now_ms) or _refuse_cost(
        proposal, applied_proposals, policy, now_ms
    )


def _refuse_after_trial(
    proposal: Proposal,
    columns: Sequence[int],
    applied_proposals: Sequence[AppliedProposal],
    policy: AutoAdvicePolicy,
    now_ms: int,
) -> str | None:
    """Return the reason why an earlier trial prevents the proposal, or None.

    Only trials of the same kind of change on the same columns count. Columns are compared by id, because columns and
    indexes can be renamed.
    """
    for earlier in applied_proposals:
        trial = earlier.trial
        if trial is None or earlier.proposal.change.kind != proposal.change.kind or set(trial.columns) != set(columns):
            continue
        if trial.state == WITHDRAWN:
            return "a user has removed it"
        is_recent = now_ms - trial.since_ms < _PAUSE_PERIODS * policy.measure_ms
        if trial.state in (UNDONE, FAILED) and is_recent:
            return f"the proposal was applied before, and its state is {trial.state}"
    return None


def _refuse_cost(
    proposal: Proposal, applied_proposals: Sequence[AppliedProposal], policy: AutoAdvicePolicy, now_ms: int
) -> str | None:
    """Return the reason why the remaining budget is too small for the proposal, or None."""
    spent_bytes, spent_seconds = sum_spent_budget(applied_proposals, now_ms)
    if spent_bytes + proposal.cost_bytes > policy.bytes_per_day:
        return (
            f"the proposal costs {proposal.cost_bytes:,} bytes, and {spent_bytes:,} of the "
            f"{policy.bytes_per_day:,} bytes of a "
            "day are spent"
        )
    if spent_seconds + proposal.cost_seconds > policy.seconds_per_day:
        return (
            f"the proposal takes {proposal.cost_seconds:,.0f} s, and {spent_seconds:,.0f} of the "
            f"{policy.seconds_per_day:,} s of "
            "a day are spent"
        )
    return None


def list_trial_properties(applied_proposals: Iterable[AppliedProposal]) -> dict[str, str]:
    """Return the table properties that automatically applied proposals have set, and that are still in effect."""
    properties: dict[str, str] = {}
    for applied in applied_proposals:
        if applied.trial is not None and applied.trial.is_in_effect:
            properties |= applied.trial.properties
    return properties


def sum_spent_budget(applied_proposals: Iterable[AppliedProposal], now_ms: int) -> tuple[int, float]:
    """Return the bytes and seconds that automatically applied proposals have used in the last 24 hours.

    The policy of the table limits both by a daily budget.
    """
    trials = [
        applied.trial
        for applied in applied_proposals
        if applied.trial is not None and now_ms - applied.applied_ms < _DAY_MS
    ]
    return sum(trial.spent_bytes for trial in trials), sum(trial.spent_seconds for trial in trials)


def compute_corrections(applied_proposals: Iterable[AppliedProposal]) -> dict[str, float]:
    """Return the factor for the predicted bytes of each kind of proposal, from the measurements of earlier proposals.

    The factor is the median of measured bytes divided by predicted bytes, within limits. With few measurements it is
    close to 1.
    """
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    for applied in applied_proposals:
        measured_reads, prediction = applied.measured, applied.proposal.predicted
        if measured_reads is not None and measured_reads.bytes > 0 and prediction.bytes > 0:
            # The prediction is the raw prediction times the correction of that time. The new factor replaces that
            # correction, so it must be relative to the raw prediction.
            correction = max(_CORRECTION_MIN, applied.proposal.correction)
            ratios[applied.proposal.kind].append(measured_reads.bytes / prediction.bytes * correction)
    return _compute_damped_medians(ratios)


def compute_time_corrections(applied_proposals: Iterable[AppliedProposal]) -> dict[str, float]:
    """Return the factor for the predicted seconds of each kind of proposal, from the times that engines have reported.

    The factor is the median of reported seconds divided by predicted seconds, within limits. With few proposals it is
    close to 1. A proposal with few reported times does not count.
    """
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    for applied in applied_proposals:
        recorded_reads, prediction = applied.recorded, applied.proposal.predicted
        if (
            recorded_reads is not None
            and applied.timed >= STATEMENTS_MIN
            and recorded_reads.seconds > 0
            and prediction.seconds > 0
        ):
            # The prediction contains the correction of that time. The new factor replaces that correction, so it must
            # be relative to the prediction without it.
            correction = max(_CORRECTION_MIN, applied.proposal.time_correction)
            ratios[applied.proposal.kind].append(recorded_reads.seconds / prediction.seconds * correction)
    return _compute_damped_medians(ratios)


def _compute_damped_medians(ratios: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Compute the median of the ratios of each kind, from 1/3 to 3, and move it towards 1 if there are few ratios.

    With few ratios, the result is close to 1. The logarithm of the median is multiplied by n / (n + 1) for n ratios,
    so one ratio has half of its effect.
    """
    factors = {}
    for kind, values in ratios.items():
        logarithms = [min(_CORRECTION_MAX, max(-_CORRECTION_MAX, math.log(value))) for value in values]
        factors[kind] = round(math.exp(statistics.median(logarithms) * len(values) / (len(values) + 1)), 4)
    return factors
