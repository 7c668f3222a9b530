"""The routes of the policy `auto`: a job takes a step for a table, makes its change, and reports the end.

The server decides, because it has the history, the clock, and the stored trials (`planner/advice/trials.py`). It also
sets and removes the properties, if no user has changed them in the meantime. The job clusters the table or builds the
index. Each decision is a conditional change of a stored row, so two replicas never begin the same trial.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec.structs import replace

from seamark.formats.iceberg.metadata.auto_advice import AutoAdvicePolicy
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.decoding import convert_json
from seamark.formats.runtime.errors import BadRequest, CommitConflict, NotFound
from seamark.formats.services.services import CLUSTERING
from seamark.metaserver.api.admin.advice import read_advised_table, run_simulation
from seamark.metaserver.api.http.describe import ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.catalog.policies import load_policies, with_policies
from seamark.metaserver.catalog.values import LoadedTable
from seamark.metaserver.planner.advice.proposals import Proposal, ProposedChange, make_proposals, measure_reads
from seamark.metaserver.planner.advice.trials import (
    APPLYING,
    FAILED,
    KEPT,
    MEASURING,
    REPLACED,
    UNDONE,
    WAITING,
    WITHDRAWN,
    AppliedProposal,
    Trial,
    find_changed_columns,
    find_changed_properties,
    judge_trial,
    list_trial_properties,
    refuse_proposal,
    select_shape_reads,
)
from seamark.metaserver.store.model import AppliedAdvice

_CLAIM_MS = 3_600_000
"""The time after which a trial in the state `applying` counts as failed, in milliseconds.

The job of the trial was killed, or takes too long.
"""
_HOUR_MS = 3_600_000
_RECHECK_S = 600.0
"""The minimum time in seconds until a job requests the next judgement of a measured change."""
_REASON_CHARACTERS_MAX = 300
_REFUSALS_MAX = 8
"""The maximum number of refused proposals that the reason for a step names."""
_ID_PREFIX = "auto-"
"""The prefix of the ids of trials among the applied proposals of a table."""


class AdviceStep(msgspec.Struct, frozen=True, rename="kebab"):
    """The next step of the policy `auto`, which applies proposals of the advice without an admin.

    The policy makes one trial per change: it applies the change, measures the reads, and keeps or undoes the change.
    """

    action: Annotated[str, doc("`apply`: make the change, and report its end. `none`: there is nothing to do now.")]
    reason: Annotated[str, doc("The reason for the step, in words.")]
    number: Annotated[int | None, doc("The number of the trial whose change the caller makes.")] = None
    since_ms: Annotated[int | None, doc("The time when the caller got the trial, in milliseconds since the epoch.")] = (
        None
    )
    change: Annotated[ProposedChange | None, doc("The change. The server has set its properties.")] = None
    recheck_after_s: Annotated[float, doc("The seconds after which the next step may be due.")] = 3600.0


class FinishedStep(msgspec.Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    """The result of a change that a job has made for a trial. The trial applies the change and measures its effect."""

    number: Annotated[int, doc("The number of the trial, as `takeAdviceStep` returned it.")]
    since_ms: Annotated[int, doc("The time in the answer of `takeAdviceStep`.")]
    outcome: Annotated[str, doc("The outcome: `applied`, `failed`, or `busy` if another job rewrites the table.")]
    reason: Annotated[str, doc("The reason why the change is not applied.")] = ""
    size_bytes: Annotated[int, doc("The bytes that the change has read and written, or 0 if they are unknown.")] = 0
    seconds: Annotated[float, doc("The duration of the change in seconds.")] = 0.0


@dataclass(frozen=True)
class _StoredTrial:
    """A trial, which is a change of a table whose effect is measured, with its stored text.

    A change of the trial requires that the stored text is still the same, so that concurrent requests do not overwrite
    each other.
    """

    applied: AppliedProposal
    trial: Trial
    text: str


class _Trials:
    """The trials of one table, for one request."""

    def __init__(self, call: Call, loaded_table: LoadedTable) -> None:
        assert loaded_table.entry is not None
        self._call = call
        self._history = call.components.history
        self.loaded = loaded_table
        self.uuid = loaded_table.entry.uuid
        self.now_ms = call.components.clock.now_ms()
        self.stored: list[_StoredTrial] = []

    async def load(self) -> None:
        """Load the trials of the table, newest first. A trial is an applied change whose effect is measured."""
        self.stored = []
        for row in await self._history.list_applied(self.uuid):
            if row.id.startswith(_ID_PREFIX):
                with suppress(msgspec.MsgspecError):  # A different version of the server may have written the text.
                    applied_proposal = convert_json(row.advice, AppliedProposal)
                    if applied_proposal.trial is not None:
                        self.stored.append(_StoredTrial(applied_proposal, applied_proposal.trial, row.advice))

    @property
    def applied(self) -> list[AppliedProposal]:
        return [stored_trial.applied for stored_trial in self.stored]

    def find(self, *states: str) -> list[_StoredTrial]:
        """Return the loaded trials in these states. A trial is an applied change whose effect is measured."""
        return [stored_trial for stored_trial in self.stored if stored_trial.trial.state in states]

    async def start(self, proposal: Proposal, trial: Trial) -> _StoredTrial:
        """Store a new trial.

        Raises:
            CommitConflict: Another request has started a trial with this number.
        """
        return await self._save_trial(AppliedProposal(proposal, self.now_ms, None, trial=trial), None)

    async def change(
        self, stored_trial: _StoredTrial, applied_proposal: AppliedProposal | None = None, **fields: object
    ) -> _StoredTrial:
        """Change fields of a trial, which is an applied change whose effect is measured. Also set its time to now.

        Args:
            stored_trial: The trial as it was loaded.
            applied_proposal: The new proposal of the trial. None keeps the proposal.
            **fields: The new values of the trial's fields.

        Returns:
            The changed trial, with the JSON text that is now stored for it.

        Raises:
            CommitConflict: Another request has changed the trial.
        """
        trial = replace(stored_trial.trial, since_ms=self.now_ms, **fields)
        return await self._save_trial(replace(applied_proposal or stored_trial.applied, trial=trial), stored_trial.text)

    async def end(
        self, stored_trial: _StoredTrial, state: str, applied_proposal: AppliedProposal | None = None, **fields: object
    ) -> _StoredTrial:
        """Remove the properties of a trial, and change its state.

        If the trial has replaced a clustering, and no user has changed the properties since, the properties of the
        replaced clustering are set again.

        Returns:
            The trial with its new text.

        Raises:
            CommitConflict: A user has changed one of the properties, or another request has changed the trial.
        """
        # This call fails if another request has changed the trial. So only one request ends the trial. A second
        # removal would remove the properties of the clustering that the first request has set again.
        stored_trial = await self.change(stored_trial)
        properties = stored_trial.trial.properties
        current_metadata = (
            await self._call.components.catalog.tables.load(self._call.namespace, self._call.name)
        ).metadata
        replaced_trials = [
            replaced_trial
            for replaced_trial in self.find(REPLACED)
            if replaced_trial.trial.number == stored_trial.trial.replaces
            # Continue only if no user has changed the properties.
            and all(
                current_metadata.properties.get(name) == properties.get(name)
                for name in properties.keys() | replaced_trial.trial.properties.keys()
            )
        ]
        updates = {
            name: value for replaced_trial in replaced_trials for name, value in replaced_trial.trial.properties.items()
        }
        removals = {name: value for name, value in properties.items() if name not in updates}
        await self.set_properties(updates, removals)
        stored_trial = await self.change(stored_trial, applied_proposal, state=state, **fields)
        for replaced_trial in replaced_trials:
            await self.change(
                replaced_trial, state=KEPT, reason=f"the replacement is {state}: {stored_trial.applied.proposal.title}"
            )
        return stored_trial

    async def _save_trial(self, applied_proposal: AppliedProposal, expected_text: str | None) -> _StoredTrial:
        """Store a trial, which is an applied change whose effect is measured, and update the list of loaded trials.

        Args:
            applied_proposal: The proposal with the trial. It is stored as JSON text.
            expected_text: The JSON text that must be stored now. None means that the trial must not be stored yet.
        """
        assert applied_proposal.trial is not None
        trial_json = msgspec.json.encode(applied_proposal).decode()
        row_id = f"{_ID_PREFIX}{applied_proposal.trial.number:06}"
        await self._history.change_applied(
            AppliedAdvice(self.uuid, row_id, applied_proposal.applied_ms, trial_json), expected_text
        )
        saved_trial = _StoredTrial(applied_proposal, applied_proposal.trial, trial_json)
        other_trials = [trial for trial in self.stored if trial.trial.number != saved_trial.trial.number]
        # Sort the trials as the database does: newest first, by time and then by number.
        self.stored = sorted(
            [*other_trials, saved_trial],
            key=lambda stored_trial: (stored_trial.applied.applied_ms, stored_trial.trial.number),
            reverse=True,
        )
        return saved_trial

    async def set_properties(self, updates: Mapping[str, str], removals: Mapping[str, str]) -> None:
        """Set properties that the table does not have, and remove properties that have these values.

        Properties that a trial has set are replaced. If the properties already have the new values, nothing changes.

        Raises:
            CommitConflict: A user has changed one of the properties.
        """
        call, tables = self._call, self._call.components.catalog.tables
        current_properties = (await tables.load(call.namespace, call.name)).metadata.properties
        own_properties = list_trial_properties(self.applied)
        changed_properties = {name: value for name, value in updates.items() if current_properties.get(name) != value}
        for name in changed_properties:
            if name in current_properties and own_properties.get(name) != current_properties[name]:
                raise CommitConflict(f"A user has defined the property {name}, so a trial cannot set it")
        removed_names = sorted(name for name, value in removals.items() if current_properties.get(name) == value)
        if not changed_properties and not removed_names:
            return
        expected_properties = {name: current_properties.get(name) for name in (*changed_properties, *removed_names)}
        requirements: list[dict[str, object]] = [
            {"type": "assert-table-uuid", "uuid": self.loaded.metadata.table_uuid},
            {"type": "seamark-assert-properties", "properties": expected_properties},
        ]
        changes: list[dict[str, object]] = []
        if changed_properties:
            changes.append({"action": "set-properties", "updates": changed_properties})
        if removed_names:
            changes.append({"action": "remove-properties", "removals": removed_names})
        await call.components.engine_commits.commit_table(call.caller, call.namespace, call.name, requirements, changes)


@Route(
    "POST",
    "/api/v1/tables/{namespace}/{table}/advice/steps",
    "takeAdviceStep",
    "Take the next step of the policy `auto`: judge and undo changes, or begin a change",
    tags=("metadata",),
    answers=(
        ResponseSpec(200, "The change that the caller has to make, or the reason why there is none", AdviceStep),
        ResponseSpec(404, "No such table"),
        ResponseSpec(409, "Another request takes a step for the table"),
    ),
)
async def take_advice_step(call: Call) -> AdviceStep:
    """Take the next step of the policy `auto`: judge and undo changes, or begin a change.

    A trial is a change whose effect is measured. First, a job that already applies a change may finish it within
    `_CLAIM_MS`. If it does not, this trial has failed. Then the first trial that waits begins. If none waits, the
    measured trials are judged, and a new trial starts if no trial is still measured.
    """
    trials = await _load_trials(call)
    effective_metadata, policy = await _load_policy(call, trials.loaded.metadata)
    if not call.components.history.is_on:
        return AdviceStep("none", "the setting query_history_days is 0, so no statements are recorded")
    for stored_trial in trials.find(APPLYING):
        remaining_ms = stored_trial.trial.since_ms + _CLAIM_MS - trials.now_ms
        if remaining_ms > 0:
            reason = f"another job applies the proposal {stored_trial.applied.proposal.title!r}"
            return AdviceStep("none", reason, recheck_after_s=remaining_ms / 1000)
        await trials.end(stored_trial, FAILED, reason="the job did not finish the change within an hour")
        # The end of the trial has changed the properties of the table.
        trials = await _load_trials(call)
        effective_metadata, policy = await _load_policy(call, trials.loaded.metadata)
    await _withdraw_trials(trials)
    for stored_trial in trials.find(WAITING):
        return await _begin_trial(trials, await trials.change(stored_trial, state=APPLYING))
    await _judge_trials(call, trials, policy)
    if measured_trials := trials.find(MEASURING):
        proposal, trial = measured_trials[0].applied.proposal, measured_trials[0].trial
        # A measuring period lasts until there are enough statements.
        wait_s = max(_RECHECK_S, (trial.since_ms + policy.measure_ms - trials.now_ms) / 1000)
        return AdviceStep("none", f"the change {proposal.title!r} is measured", recheck_after_s=wait_s)
    return await _start_trial(call, trials, effective_metadata, policy)


@Route(
    "POST",
    "/api/v1/tables/{namespace}/{table}/advice/steps/finished",
    "finishAdviceStep",
    "Report the end of a change of the policy `auto`, and measure the table",
    tags=("metadata",),
    answers=(
        ResponseSpec(200, "The proposal, with prediction and measurement", AppliedProposal),
        ResponseSpec(400, "The outcome or a number is invalid"),
        ResponseSpec(404, "The table or the trial does not exist"),
        ResponseSpec(409, "Another request has changed the trial"),
    ),
).takes(FinishedStep)
async def finish_advice_step(call: Call, body: FinishedStep) -> AppliedProposal:
    """Report the end of a change of the policy `auto`, and measure the table."""
    if body.outcome not in ("applied", "failed", "busy"):
        raise BadRequest(f"outcome is {body.outcome[:40]!r}; it must be applied, failed or busy")
    if not 0 <= body.size_bytes < 1 << 60:
        raise BadRequest(f"size-bytes is {body.size_bytes}; it must be at least 0 and below 2^60")
    if not 0 <= body.seconds < 1e9:
        raise BadRequest(f"seconds is {body.seconds:g}; it must be at least 0 and below 10^9")
    trials = await _load_trials(call)
    stored_trial = next(
        (stored_trial for stored_trial in trials.find(APPLYING) if stored_trial.trial.number == body.number), None
    )
    if stored_trial is None:
        raise NotFound(f"The table has no trial {body.number} in the state applying")
    if stored_trial.trial.since_ms != body.since_ms:
        raise CommitConflict(
            f"Another job has taken the trial {body.number} at {stored_trial.trial.since_ms}; this report is of "
            f"a job that took it at {body.since_ms}; take the next step instead"
        )
    reason = body.reason[:_REASON_CHARACTERS_MAX]
    spent_bytes = max(stored_trial.trial.spent_bytes, body.size_bytes)
    spent_seconds = max(stored_trial.trial.spent_seconds, body.seconds)
    if body.outcome == "busy":
        stored_trial = await trials.change(stored_trial, state=WAITING, reason="another job rewrites the table")
    elif body.outcome == "failed":
        stored_trial = await trials.end(
            stored_trial, FAILED, reason=reason, spent_bytes=spent_bytes, spent_seconds=spent_seconds
        )
    else:
        # Replay the statements of the prediction over the changed table.
        since_ms = stored_trial.trial.since_ms - (await _load_policy(call, trials.loaded.metadata))[1].measure_ms
        shapes = await call.components.history.list_shapes_since(trials.uuid, since_ms)
        async with call.components.worker_limits.advising.hold(call.principal.name):
            loaded_table = await call.components.catalog.tables.load(call.namespace, call.name)
            build_or_reason = await read_advised_table(call, loaded_table, shapes)
            measured_reads = (
                None
                if isinstance(build_or_reason, str)
                else await run_simulation(call, lambda: measure_reads(build_or_reason()))
            )
        applied_proposal = replace(stored_trial.applied, measured=measured_reads, applied_ms=trials.now_ms)
        reason = "the change is applied, and its statements are measured"
        stored_trial = await trials.change(
            stored_trial,
            applied_proposal,
            state=MEASURING,
            reason=reason,
            spent_bytes=spent_bytes,
            spent_seconds=spent_seconds,
        )
    return stored_trial.applied


async def _load_trials(call: Call) -> _Trials:
    trials = _Trials(call, await call.components.catalog.tables.load(call.namespace, call.name))
    await trials.load()
    return trials


async def _load_policy(call: Call, metadata: TableMetadata) -> tuple[TableMetadata, AutoAdvicePolicy]:
    """Return the metadata with the properties that the table inherits, and the policy from these properties."""
    policies = await load_policies(call.components.catalog.context.store, call.namespace)
    effective_metadata = with_policies(metadata, policies)
    return effective_metadata, AutoAdvicePolicy.from_properties(effective_metadata.properties)


async def _withdraw_trials(trials: _Trials) -> None:
    """End the trials whose properties a user has changed or removed, because the choice of the user has precedence."""
    current_properties = trials.loaded.metadata.properties
    for stored_trial in trials.find(WAITING, MEASURING, KEPT):
        changed_names = [
            name for name, value in stored_trial.trial.properties.items() if current_properties.get(name) != value
        ]
        if changed_names:
            await trials.change(stored_trial, state=WITHDRAWN, reason=f"a user has changed {', '.join(changed_names)}")


async def _judge_trials(call: Call, trials: _Trials, policy: AutoAdvicePolicy) -> None:
    """Judge the changes whose measuring period has ended, and undo those that save less than they must.

    A trial is one change whose effect is measured. A kept change is judged again after each further period, because the
    statements may change.
    """
    for stored_trial in trials.find(MEASURING, KEPT):
        if trials.now_ms - stored_trial.trial.since_ms < policy.measure_ms:
            continue
        # Leave out the hour in which the change was applied, because it has statements from before the change.
        shapes = await call.components.history.list_shapes_since(trials.uuid, stored_trial.trial.since_ms + _HOUR_MS)
        verdict = judge_trial(stored_trial.trial, shapes)
        if verdict.pays is None:  # There are too few statements so far.
            continue
        applied_proposal = replace(stored_trial.applied, recorded=verdict.reads)
        if verdict.pays:
            await trials.change(
                stored_trial, applied_proposal, state=KEPT, reason=verdict.reason, saved_fraction=verdict.saved_fraction
            )
        else:
            await trials.end(
                stored_trial, UNDONE, applied_proposal, reason=verdict.reason, saved_fraction=verdict.saved_fraction
            )


async def _start_trial(
    call: Call, trials: _Trials, effective_metadata: TableMetadata, policy: AutoAdvicePolicy
) -> AdviceStep:
    """Begin a trial of the first proposal that may be applied.

    A trial applies a change, compares the reads of later statements with the former reads, and keeps or undoes the
    change.
    """
    shapes = await call.components.history.list_shapes_since(trials.uuid, trials.now_ms - policy.measure_ms)
    if not shapes:
        return AdviceStep("none", "the history has no statements of the measuring period")
    async with call.components.worker_limits.advising.hold(call.principal.name):
        build_or_reason = await read_advised_table(call, trials.loaded, shapes)
        if isinstance(build_or_reason, str):
            return AdviceStep("none", build_or_reason)
        _, proposals = await run_simulation(call, lambda: make_proposals(build_or_reason()))
    settings = call.components.settings
    refusals = []
    for proposal in proposals:
        try:
            properties = find_changed_properties(proposal, effective_metadata)
        except BadRequest:
            properties = None
        refusal = refuse_proposal(
            proposal,
            properties,
            effective_metadata,
            trials.applied,
            policy,
            trials.now_ms,
            clusters_by_default=settings.runs_by_default(CLUSTERING),
            indexes_max=settings.indexes_limit,
        )
        if refusal is not None or properties is None:
            refusals.append(f"{proposal.title}: {refusal}")
            continue
        number = 1 + max((stored_trial.trial.number for stored_trial in trials.stored), default=0)
        replaced_trials = _find_replaced_trials(trials.find(MEASURING, KEPT), proposal.change)
        trial = Trial(
            number=number,
            state=APPLYING,
            reason=f"the change is the best proposal that may be applied, of {len(proposals)}",
            since_ms=trials.now_ms,
            properties=properties,
            columns=find_changed_columns(proposal, effective_metadata),
            spent_bytes=proposal.cost_bytes,
            spent_seconds=proposal.cost_seconds,
            shapes=select_shape_reads(shapes),
            replaces=replaced_trials[0].trial.number if replaced_trials else None,
        )
        stored_trial = await trials.start(proposal, trial)
        return await _begin_trial(trials, stored_trial)
    reason = "; ".join(refusals[:_REFUSALS_MAX]) or "no change would save more bytes in 30 days than it costs"
    return AdviceStep("none", reason)


async def _begin_trial(trials: _Trials, stored_trial: _StoredTrial) -> AdviceStep:
    """Set the properties of a trial, and end the trials that it replaces."""
    change, properties = stored_trial.applied.proposal.change, stored_trial.trial.properties
    replaced_trials = _find_replaced_trials(trials.find(MEASURING, KEPT), change)
    removals = {
        name: value
        for replaced_trial in replaced_trials
        for name, value in replaced_trial.trial.properties.items()
        if name not in properties
    }
    try:
        await trials.set_properties(properties, removals)
    except CommitConflict as error:  # A user has defined one of the properties.
        await trials.change(stored_trial, state=FAILED, reason=error.message, spent_bytes=0, spent_seconds=0.0)
        return AdviceStep("none", error.message)
    for replaced_trial in replaced_trials:
        await trials.change(
            replaced_trial, state=REPLACED, reason=f"replaced by: {stored_trial.applied.proposal.title}"
        )
    return AdviceStep(
        "apply", stored_trial.trial.reason, stored_trial.trial.number, stored_trial.trial.since_ms, change
    )


def _find_replaced_trials(stored_trials: Sequence[_StoredTrial], change: ProposedChange) -> list[_StoredTrial]:
    """Return the trials whose changes end when `change` is applied. A trial is an applied change that is measured.

    A table has only one clustering. So a new clustering replaces the trials of other clusterings. Other kinds of
    changes replace nothing.
    """
    if change.kind != "cluster":
        return []
    return [stored_trial for stored_trial in stored_trials if stored_trial.applied.proposal.change.kind == "cluster"]
