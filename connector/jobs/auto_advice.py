"""Carries out the steps of the policy `auto`. The server chooses each step, and sets the properties of the table."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from seamark.connector.client.errors import Conflict
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.names import Name
from seamark.connector.client.policies import finish_advice_step, take_advice_step
from seamark.connector.client.rewrite_lease import RewriteRunning, rewrite_lease
from seamark.connector.jobs.clustering import cluster_incrementally
from seamark.connector.jobs.failures import FilesNotIndexed, JobIncomplete
from seamark.formats.protocol.wire import RECHECK_AFTER
from seamark.formats.services.services import AUTO_ADVICE

_BUSY_S = 60.0
"""The time in seconds after which a change is tried again if a different job was rewriting the table."""


def take_next_step(client: IndexClient, table: Name, *, build_indexes: Callable[[], object]) -> dict[str, Any]:
    """Request the next step for a table from the server, and carry it out.

    Args:
        client: The client.
        table: The table.
        build_indexes: A function that builds the indexes of the table.

    Returns:
        The number of applied changes. If no change was applied, the seconds after which the next step may be due.

    Raises:
        JobIncomplete: Some files were not rewritten.
    """
    try:
        step = take_advice_step(client, table)
    except Conflict:  # A different replica has taken the step.
        return {RECHECK_AFTER: _BUSY_S}
    if step["action"] != "apply":
        return {RECHECK_AFTER: step["recheck-after-s"]}
    started_s = time.monotonic()
    size_bytes = 0
    try:
        if step["change"]["kind"] == "cluster":
            with rewrite_lease(client, table, job=AUTO_ADVICE.name):
                report = cluster_incrementally(client, table, full=True)
            size_bytes = report.bytes_read + report.bytes_after
            if report.errors:
                raise JobIncomplete(report.errors[0])
        else:
            with suppress(FilesNotIndexed):  # Statements use the index for the other files.
                build_indexes()
    except RewriteRunning:
        finish_advice_step(client, table, step, "busy")
        return {RECHECK_AFTER: _BUSY_S}
    except Exception as error:
        # The failure is reported, because otherwise the server waits an hour for the end of this job.
        seconds = time.monotonic() - started_s
        finish_advice_step(
            client, table, step, "failed", reason=str(error) or repr(error), size_bytes=size_bytes, seconds=seconds
        )
        raise
    finish_advice_step(client, table, step, "applied", size_bytes=size_bytes, seconds=time.monotonic() - started_s)
    return {"applied": 1}
