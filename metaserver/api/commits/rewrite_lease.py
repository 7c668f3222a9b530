"""The route of the lease that a job holds while it rewrites files of a table.

The lease prevents two jobs from rewriting the same files. It only avoids wasted work: commits do not need it, and
without it, the second of two rewrites of the same files fails with a conflict.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import msgspec

from seamark.formats.runtime.decoding import convert_json
from seamark.formats.runtime.errors import CommitConflict
from seamark.metaserver.api.http.describe import ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.store.model import EntryKind
from seamark.metaserver.store.operations import REWRITE, TakeLease

LASTS_MS = 5000
"""The duration of the lease in milliseconds. A killed job delays the next job by at most this time.

Jobs renew the lease several times.
"""


class RewriteLeaseRequest(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """A request to take, renew or end the lease."""

    holder: Annotated[
        Annotated[str, msgspec.Meta(min_length=1, max_length=64)],
        doc("A random name of the job. It must be the same in each renewal."),
    ]
    release: Annotated[bool, doc("Whether to end the lease.")] = False
    job: Annotated[
        # In Python, `$` also matches before a line break at the end, so a lookahead refuses the line break.
        Annotated[str, msgspec.Meta(max_length=100, pattern=r"^[ -~]*(?!\n)$")],
        doc("A description of the job, which the refusals of other jobs of the table quote."),
    ] = ""


class RewriteLease(msgspec.Struct, frozen=True, rename="kebab"):
    """The lease of a job."""

    lasts_ms: int


class _Holder(msgspec.Struct, frozen=True):
    """The holder of a lease, as the lease stores it."""

    holder: str
    job: str
    since_ms: int

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since_ms / 1000, UTC).isoformat(sep=" ", timespec="seconds")
        return f"{self.job or 'a job without a description'}, since {since}"


@Route(
    "POST",
    "/api/v1/tables/{namespace}/{table}/rewrite-lease",
    "takeRewriteLease",
    "Take, renew or end the lease of a job that rewrites files of the table. Commits do not need it",
    tags=("commits",),
    answers=(
        ResponseSpec(200, "The time for which the job has the lease. It is 0 if the lease has ended", RewriteLease),
        ResponseSpec(404, "No such table"),
        ResponseSpec(409, "Another job has the lease"),
    ),
).takes(RewriteLeaseRequest)
async def take_rewrite_lease(call: Call, body: RewriteLeaseRequest) -> RewriteLease:
    """Take, renew or end the lease of a job that rewrites files of the table. Commits do not need it."""
    entry = await call.components.catalog.context.require_entry(EntryKind.TABLE, call.namespace, call.name)
    now_ms, lasts_ms = call.components.clock.now_ms(), 0 if body.release else LASTS_MS
    name = f"{REWRITE}{entry.uuid}"
    holder = await _read_holder(call, name, now_ms)
    since_ms = holder.since_ms if holder is not None and holder.holder == body.holder else now_ms
    state = msgspec.json.encode(_Holder(body.holder, body.job, since_ms)).decode()
    try:
        await call.components.store.transact([TakeLease(name, body.holder, now_ms, now_ms + lasts_ms, state)])
    except CommitConflict:
        holder = await _read_holder(call, name, now_ms)
        holder_suffix = f" ({holder})" if holder is not None else ""
        raise CommitConflict(
            f"Another job rewrites files of the table {call.name} now{holder_suffix}; "
            f"try again in {LASTS_MS // 1000} seconds"
        ) from None
    return RewriteLease(lasts_ms)


async def _read_holder(call: Call, name: str, now_ms: int) -> _Holder | None:
    """Return the holder of the lease.

    Returns:
        None if no job has the lease, or if a server of a different version wrote it.
    """
    try:
        return convert_json(await call.components.store.lease_state(name, now_ms), _Holder)
    except msgspec.DecodeError:
        return None
