"""The routes that list the running and waiting jobs of table services."""

from __future__ import annotations

from typing import Annotated

import msgspec

from seamark.metaserver.api.http.describe import ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Check, Route
from seamark.metaserver.api.http.keys import CATALOG, CLOCK, STORE
from seamark.metaserver.services.running import RunningJob, WaitingJob, load_jobs
from seamark.metaserver.store.model import EntryKind


class JobList(msgspec.Struct, frozen=True):
    """Some seconds old."""

    jobs: Annotated[list[RunningJob], doc("The running jobs, with the data files that each has read so far.")]
    waiting: Annotated[list[WaitingJob], doc("The waiting jobs that start next.")]
    complete: Annotated[bool, doc("False if more jobs that the caller may see can wait than are listed.")]


_ANSWER = ResponseSpec(200, "The jobs, on all replicas", JobList)


@Route(
    "GET",
    "/api/v1/jobs",
    "listRunningJobs",
    "Lists the running jobs of table services, and those that start next",
    check=Check.CATALOG,
    tags=("metadata",),
    answers=(_ANSWER,),
)
async def list_running_jobs(call: Call) -> JobList:
    state = await load_jobs(call.app[STORE], call.app[CLOCK].now_ms())
    return JobList(
        [job for job in state.running if call.may(job.namespace)],
        [job for job in state.waiting if call.may(job.namespace)],
        complete=state.is_complete(call.may),
    )


@Route(
    "GET",
    "/api/v1/tables/{namespace}/{table}/jobs",
    "listRunningTableJobs",
    "Lists the running jobs of table services on a table, and those that start next",
    tags=("metadata",),
    answers=(_ANSWER, ResponseSpec(404, "No such table")),
)
async def list_running_table_jobs(call: Call) -> JobList:
    entry = await call.app[CATALOG].parts.require_entry(EntryKind.TABLE, call.namespace, call.name)
    state = await load_jobs(call.app[STORE], call.app[CLOCK].now_ms())
    return JobList(
        [job for job in state.running if job.uuid == entry.uuid],
        [job for job in state.waiting if job.uuid == entry.uuid],
        complete=state.is_complete(lambda namespace: namespace == entry.namespace),
    )
