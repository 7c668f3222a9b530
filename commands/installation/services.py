"""Check the table services: a server runs them, no job has failed, and worker processes reach the storage."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from seamark.commands.installation.engine_files import CheckResult
from seamark.commands.programs import JOB_WORKER
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import ClientError
from seamark.connector.client.policies import read_service_jobs
from seamark.connector.client.values import TimelineInstant
from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import ConfigError
from seamark.formats.storage.locations import parse_location
from seamark.metaserver.services.launching.access_probe import find_storage_problem
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.timeline.instants import MAINTENANCE

_SEARCHED_RUNS_MAX = 200
"""The number of latest runs, on all tables, that are searched for failed jobs."""
_SHOWN_RUNS_MAX = 5


def check_worker(settings: Settings) -> Iterator[CheckResult]:
    """Check that a worker process can use a remote warehouse with the keys that the settings give to jobs."""
    try:
        is_local = parse_location(settings.make_warehouse_uri()).is_local
    except ConfigError:  # The warehouse check reports this error.
        return
    if is_local or settings.services_workers == 0:
        return
    problem = asyncio.run(find_storage_problem(settings, SystemClock(), JOB_WORKER))
    if problem:
        fix = (
            "Set the server's S3 keys and SEAMARK_CA so that its worker processes reach the storage in the same way "
            "as the server"
        )
        yield CheckResult("worker processes", problem, fix, is_fault=True)
    else:
        yield CheckResult(
            "worker processes", f"the worker processes reach the storage of {settings.make_warehouse_uri()}"
        )


def check_services(client: SeamarkClient) -> Iterator[CheckResult]:
    """Check that a server runs table services, and that their latest jobs did not fail."""
    try:
        # A server whose answer lacks the state is reported as running.
        state = read_service_jobs(client).get("services") or {"running": True}
        runs = list(client.timeline(action=MAINTENANCE, newest_first=True, limit=_SEARCHED_RUNS_MAX))
    except ClientError as error:
        yield CheckResult("table services", error.message, "The server's log has details", is_fault=True)
        return
    if state["running"]:
        yield CheckResult("table services", "a server runs them")
    elif state.get("enabled", True):
        fix = "Repair the cause in the message; the server retries automatically"
        yield CheckResult("table services", f"the services do not run: {state['problem']}", fix, is_fault=True)
    else:
        fix = "Set services_workers to 1 or more, or run the commands seamark indexer and seamark run"
        yield CheckResult("table services", f"the services do not run: {state['problem']}", fix)
    failed_runs = [run for run in _find_failed_runs(runs) if _still_fails(client, run)]
    for run in failed_runs[:_SHOWN_RUNS_MAX]:
        name = ".".join((*run.namespace, run.name))
        text = f"the last run of {run.summary['service']} failed: {run.summary['error']}"
        yield CheckResult(
            f"table {name}",
            text,
            f"Repair the cause that the message names; seamark health {name} shows the table",
            is_fault=True,
        )
    if len(failed_runs) > _SHOWN_RUNS_MAX:
        yield CheckResult(
            "table services",
            f"{len(failed_runs) - _SHOWN_RUNS_MAX:,} more jobs failed",
            "seamark services lists them",
            is_fault=True,
        )


def _find_failed_runs(runs: list[TimelineInstant]) -> Iterator[TimelineInstant]:
    """Yield the latest run of each service on each table, if it failed.

    Args:
        runs: The runs, newest first.
    """
    seen_keys: set[tuple[str | None, str]] = set()
    for run in runs:
        key = run.uuid, str(run.summary.get("service"))
        if key not in seen_keys:
            seen_keys.add(key)
            if "error" in run.summary:
                yield run


def _still_fails(client: SeamarkClient, run: TimelineInstant) -> bool:
    """Return whether the server still reports the run as a problem.

    It does not if the table, index or policy no longer exists.
    """
    try:
        problems = client.health((*run.namespace, run.name))["problems"]
    except ClientError:
        return False
    return any(f"the last run of {run.summary['service']}," in problem["detail"] for problem in problems)
