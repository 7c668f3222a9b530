"""Routes of table services: running and waiting jobs, the problems of a table, and its policy."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated

import msgspec

from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.api.http.describe import ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Check, Route
from seamark.metaserver.api.indexes.index_state import load_view
from seamark.metaserver.catalog.policies import load_policies, with_policies
from seamark.metaserver.services.health import find_service_problems, measure_health
from seamark.metaserver.services.policy import TablePolicy, build_policy
from seamark.metaserver.services.proposer import Problem, TableHealth
from seamark.metaserver.services.running import (
    RunningJob,
    ServicesState,
    WaitingJob,
    compute_services_state,
    load_jobs,
)
from seamark.metaserver.services.runs import FAILED_MS, find_failed_runs
from seamark.metaserver.services.stream_health import find_stream_problems
from seamark.metaserver.store.model import TABLE, EntryKind


class JobList(msgspec.Struct, frozen=True):
    """The jobs of table services, as they were some seconds ago."""

    jobs: Annotated[list[RunningJob], doc("The running jobs, with the data files that each has read so far.")]
    waiting: Annotated[list[WaitingJob], doc("The waiting jobs that start next.")]
    complete: Annotated[bool, doc("Whether `waiting` certainly contains all waiting jobs that the caller may see.")]
    services: Annotated[ServicesState, doc("Whether a server runs table services, and the reason if none does.")]


_ANSWER = ResponseSpec(200, "The jobs, on all replicas", JobList)


@Route(
    "GET",
    "/api/v1/jobs",
    "listRunningJobs",
    "List the running jobs of table services, and the jobs that start next",
    check=Check.CATALOG,
    tags=("metadata",),
    answers=(_ANSWER,),
)
async def list_running_jobs(call: Call) -> JobList:
    """List the running jobs of table services, and the jobs that start next."""
    state = await load_jobs(call.components.store, call.components.clock.now_ms())
    # The state does not list all waiting jobs of the namespaces in `state.unlisted`. So the answer is complete only if
    # the caller may see none of these namespaces.
    visible_namespaces = await call.select(state.unlisted, Securable)
    return JobList(
        await call.select(state.running, lambda job: Securable(job.namespace, TABLE, job.table)),
        await call.select(state.waiting, lambda job: Securable(job.namespace, TABLE, job.table)),
        complete=state.is_complete(visible_namespaces.__contains__),
        services=compute_services_state(state, call.components.services_status),
    )


@Route(
    "GET",
    "/api/v1/tables/{namespace}/{table}/jobs",
    "listRunningTableJobs",
    "List the running jobs of table services on a table, and the jobs that start next",
    tags=("metadata",),
    answers=(_ANSWER, ResponseSpec(404, "No such table")),
)
async def list_running_table_jobs(call: Call) -> JobList:
    """List the running jobs of table services on a table, and the jobs that start next."""
    entry = await call.components.catalog.context.require_entry(EntryKind.TABLE, call.namespace, call.name)
    state = await load_jobs(call.components.store, call.components.clock.now_ms())
    return JobList(
        [job for job in state.running if job.uuid == entry.uuid],
        [job for job in state.waiting if job.uuid == entry.uuid],
        complete=state.is_complete(lambda namespace: namespace == entry.namespace),
        services=compute_services_state(state, call.components.services_status),
    )


@Route(
    "GET",
    "/api/v1/tables/{namespace}/{table}/health",
    "loadTableHealth",
    "Return counts and sizes of the current snapshot, and the problems of the table",
    tags=("metadata",),
    answers=(
        ResponseSpec(200, "The problems, their costs for queries, and the services that correct them", TableHealth),
        ResponseSpec(404, "No such table"),
    ),
)
async def load_table_health(call: Call) -> TableHealth:
    """Return counts and sizes of the current snapshot, and the problems of the table."""
    loaded_table = await call.components.catalog.tables.load(call.namespace, call.name)
    metadata = loaded_table.metadata
    view = await load_view(call, metadata, metadata.current_snapshot_id)
    policies = await load_policies(call.components.catalog.context.store, call.namespace)
    metadata = with_policies(metadata, policies)
    settings, clock = call.components.settings, call.components.clock
    now_ms = clock.now_ms()
    health = await asyncio.to_thread(partial(measure_health, metadata, view, settings, clock, now_ms))
    state = compute_services_state(await load_jobs(call.components.store, now_ms), call.components.services_status)
    failed_runs = await find_failed_runs(call.components.timeline, metadata.table_uuid, now_ms - FAILED_MS)
    problems = find_service_problems(metadata, health, state, failed_runs)
    stream_problems: tuple[Problem, ...] = ()
    if loaded_table.entry is not None and loaded_table.entry.flushed:
        may_list_files = await call.may(call.securable, "listFiles")  # Errors of flushes may name files.
        streams, uuid = call.components.streams, loaded_table.entry.uuid
        stream_problems = tuple(
            find_stream_problems(uuid, metadata, streams, settings, now_ms, shows_errors=may_list_files)
        )
    return msgspec.structs.replace(health, problems=(*stream_problems, *problems, *health.problems))


@Route(
    "GET",
    "/api/v1/tables/{namespace}/{table}/policy",
    "loadTablePolicy",
    "Return the properties that control the table services, and where each property is set",
    tags=("metadata",),
    answers=(
        ResponseSpec(200, "The properties of the table, its namespaces, and the server", TablePolicy),
        ResponseSpec(404, "No such table"),
    ),
)
async def load_table_policy(call: Call) -> TablePolicy:
    """Return the properties that control the table services, and where each property is set."""
    return await load_requested_policy(call)


async def load_requested_policy(call: Call) -> TablePolicy:
    """Return the policy of the table of a request."""
    catalog = call.components.catalog
    metadata = (await catalog.tables.load(call.namespace, call.name)).metadata
    return build_policy(metadata, await load_policies(catalog.context.store, call.namespace), call.components.settings)
