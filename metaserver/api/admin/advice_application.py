"""The route that applies a proposal of the advisor without a client. The button of the console uses it.

The server sets the properties of the proposal. The table services then cluster the table or build the index.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.index.definitions import PREFIX
from seamark.formats.runtime.errors import BadRequest, CommitConflict, NotFound
from seamark.metaserver.api.admin.advice import read_advised_table, run_simulation
from seamark.metaserver.api.admin.query_history import DAYS, DAYS_MAX
from seamark.metaserver.api.http.describe import ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.api.http.table_updates import commit_updates
from seamark.metaserver.planner.advice.proposals import Proposal, make_proposals
from seamark.metaserver.planner.advice.trials import AppliedProposal, find_changed_properties
from seamark.metaserver.services.running import compute_services_state, load_jobs
from seamark.metaserver.store.model import AppliedAdvice

_ID_CHARACTERS_MAX = 64


class ChosenProposal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A proposal that the server is to apply."""

    id: Annotated[str, doc("The id of the proposal, from the answer of `adviseTable`.")]
    days: Annotated[int, doc("The days of the history, as in `adviseTable`.")] = DAYS


@Route(
    "POST",
    "/api/v1/tables/{namespace}/{table}/advice/apply",
    "applyAdvice",
    "Set the properties of a proposal, so that the table services make its change",
    tags=("metadata",),
    answers=(
        ResponseSpec(200, "The proposal, which has no measurement yet", AppliedProposal),
        ResponseSpec(400, "An engine or a client has to make the change; the message contains the commands"),
        ResponseSpec(404, "The table does not exist, or the advisor no longer makes this proposal"),
        ResponseSpec(409, "Concurrent commits conflicted in every attempt"),
    ),
).takes(ChosenProposal)
async def apply_advice(call: Call, body: ChosenProposal) -> AppliedProposal:
    """Set the properties of a proposal, so that the table services make its change."""
    if not 1 <= body.days <= DAYS_MAX:
        raise BadRequest(f"days is {body.days}; it must be 1 to {DAYS_MAX}")
    proposal = await _find_proposal(call, body)
    commands = "; ".join(proposal.commands)
    if proposal.change.kind not in ("cluster", "add-index", "drop-index"):
        raise BadRequest(f"Table services do not make the change {proposal.title!r}. Run: {commands}")
    components = call.components
    now_ms = components.clock.now_ms()
    services = compute_services_state(await load_jobs(components.store, now_ms), components.services_status)
    if not services.running and proposal.change.kind != "drop-index":
        raise BadRequest(
            f"No table services run ({services.problem}), so nothing would make the change. Run: {commands}"
        )

    def compute_updates(metadata: TableMetadata) -> list[dict[str, Any]]:
        if proposal.change.kind == "drop-index":
            return [{"action": "remove-properties", "removals": [PREFIX + proposal.change.index_name]}]
        updates = find_changed_properties(proposal, metadata) or {}
        if proposal.change.kind == "add-index":
            for name in updates.keys() & metadata.properties.keys():
                raise CommitConflict(f"Another request has set the property {name}; load the proposals again")
        return [{"action": "set-properties", "updates": updates}]

    await commit_updates(call, compute_updates)
    applied_proposal = AppliedProposal(proposal, now_ms, None)
    loaded_table = await components.catalog.tables.load(call.namespace, call.name)
    assert loaded_table.entry is not None
    proposal_json = msgspec.json.encode(applied_proposal).decode()
    await components.history.save_applied(
        AppliedAdvice(loaded_table.entry.uuid, f"{now_ms}-{proposal.id}", now_ms, proposal_json)
    )
    return applied_proposal


async def _find_proposal(call: Call, choice: ChosenProposal) -> Proposal:
    """Return the chosen proposal, if the advisor still makes it.

    Raises:
        NotFound: The advisor no longer makes this proposal.
    """
    loaded_table = await call.components.catalog.tables.load(call.namespace, call.name)
    assert loaded_table.entry is not None
    history = call.components.history
    shapes = await history.flush_and_list_shapes(loaded_table.entry.uuid, choice.days) if history.is_on else []
    async with call.components.worker_limits.advising.hold(call.principal.name):
        build_or_reason = await read_advised_table(call, loaded_table, shapes)
        proposals = (
            []
            if isinstance(build_or_reason, str)
            else (await run_simulation(call, lambda: make_proposals(build_or_reason())))[1]
        )
    for proposal in proposals:
        if proposal.id == choice.id:
            return proposal
    raise NotFound(f"The advisor does not make the proposal {choice.id[:_ID_CHARACTERS_MAX]!r} now; load the proposals")
