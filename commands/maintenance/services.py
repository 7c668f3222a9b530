"""`seamark services`: lists the waiting and running jobs of table services, and their latest runs.

Exit codes: 0 on success, 1 if the server refuses or cannot be reached, 2 for invalid arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from seamark.commands.connecting import server_command
from seamark.commands.terminal import format_local_time, print_json, print_rows, say, show_count, show_size
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.policies import read_service_jobs
from seamark.connector.client.values import TimelineInstant
from seamark.metaserver.timeline.instants import MAINTENANCE

_SHOWN_RUNS_DEFAULT = 20


@click.command()
@click.argument("table", required=False)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=_SHOWN_RUNS_DEFAULT,
    show_default=True,
    help="Maximum number of runs to show.",
)
@server_command
def services(client: IndexClient, table: str | None, limit: int, as_json: bool) -> None:
    """List the waiting jobs, the running jobs and the latest runs of table services on TABLE, or on all tables.

    If no server runs table services, the first line states the reason. The first 50 waiting jobs are listed, and the
    next job is last. A run that found nothing to do is listed only if the run before it failed. The list of waiting
    jobs and the progress of a running job may be some seconds old.
    """
    listing = read_service_jobs(client, table)
    jobs, waiting_jobs = listing["jobs"], listing.get("waiting", [])
    runs = list(client.timeline(table, action=MAINTENANCE, newest_first=True, limit=limit))
    if as_json:
        json_rows = [
            {"namespace": job["namespace"], "table": job["table"], "requested-ms": job["asked-ms"]}
            | {"state": "requested", "service": job["service"], "due-ms": job["due-ms"], "failures": job["failures"]}
            for job in waiting_jobs
        ]
        json_rows += [
            {"namespace": job["namespace"], "table": job["table"], "requested-ms": job["started-ms"]}
            | {"state": "inflight", "service": job["service"], "launcher": job["launcher"]}
            | {"progress": job["progress"]}
            for job in jobs
        ]
        json_rows += [
            {"namespace": run.namespace, "table": run.name, "requested-ms": run.requested_ms, "state": run.state}
            | run.summary
            for run in runs
        ]
        print_json(json_rows)
        return
    state = listing.get("services", {})
    if state.get("problem"):
        say(f"Table services do not run: {state['problem']}.")
    if not runs and not jobs and not waiting_jobs:
        say("Table services have done nothing yet." if table is None else f"Table services did nothing to {table} yet.")
    else:
        headers = ("started", "table", "service", "on", "seconds", "result")
        running_jobs = sorted(jobs, key=lambda job: -job["started-ms"])
        rows = [
            *map(_make_waiting_row, reversed(waiting_jobs)),
            *map(_make_running_row, running_jobs),
            *map(_make_run_row, runs),
        ]
        print_rows(headers, rows, right_aligned_headers=("seconds",))


def _make_waiting_row(job: dict[str, Any]) -> tuple[str, ...]:
    failures = job["failures"]
    failures_text = f", after {failures:,} failed {'run' if failures == 1 else 'runs'}" if failures else ""
    due = f"not before {format_local_time(job['due-ms'])}{failures_text}"
    return "", ".".join((*job["namespace"], job["table"])), job["service"], "", "", f"waiting, {due}"


def _make_running_row(job: dict[str, Any]) -> tuple[str, ...]:
    name = ".".join((*job["namespace"], job["table"]))
    return (
        format_local_time(job["started-ms"]),
        name,
        job["service"],
        job["launcher"],
        "",
        _describe_progress(job["progress"]),
    )


def _make_run_row(run: TimelineInstant) -> tuple[str, ...]:
    summary = run.summary
    return (
        format_local_time(run.requested_ms),
        ".".join((*run.namespace, run.name)),
        str(summary.get("service")),
        str(summary.get("launcher", "")),
        f"{summary.get('seconds', 0):,.1f}",
        f"failed: {summary['error']}"
        if "error" in summary
        else _format_result(summary.get("totals") or {}) or "nothing to do",
    )


def _describe_progress(progress: Mapping[str, int]) -> str:
    if not progress["files-total"]:
        return "running"
    percent = 100 * progress["bytes-done"] // max(1, progress["bytes-total"])
    files, size = f"{progress['files-done']:,} of {progress['files-total']:,}", show_size(progress["bytes-done"])
    return f"running: {files} files, {size} of {show_size(progress['bytes-total'])} ({percent} %)"


def _format_result(totals: Mapping[str, Any]) -> str:
    """Return the result of a job as text: files and bytes before and after a rewrite, or the totals of other jobs.

    The values that the sentence about files contains are left out of the list of totals.
    """
    remaining = dict(totals)
    text = ""
    if "files_before" in remaining:
        files_before, files_after = remaining.pop("files_before"), remaining.pop("files_after", 0)
        size_before = show_size(remaining.pop("bytes_before", 0))
        text = f"{show_count(files_before, 'file')} ({size_before}) became {files_after:,} "
        text += f"({show_size(remaining.pop('bytes_after', 0))}): a scan opens {files_before - files_after:,} fewer; "
    return text + ", ".join(f"{str(name).replace('_', ' ')} {count:,}" for name, count in remaining.items())
