"""Takes and renews the lease of a job that rewrites files of a table.

The lease prevents two jobs from rewriting the same table at the same time, because the work of one job would be lost.
No commit requires the lease. A job that loses the lease continues, and its commit replaces only the files that still
exist.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import ClientError, Conflict
from seamark.connector.client.names import Name, make_table_path

REWRITE_WAIT_S = 60.0
"""The default time in seconds for which commands and statements wait while a different job rewrites the table."""
_PAUSE_S = 0.25
_RENEWALS_PER_LEASE = 3
"""The number of renewals of a lease within its duration."""


class RewriteRunning(Conflict):
    """Raised if a different job is rewriting files of the table."""


@contextmanager
def rewrite_lease(client: SeamarkClient, table: Name, *, job: str, wait_s: float = 0.0) -> Iterator[None]:
    """Take the lease, renew it in a thread during the block, and release it.

    The lease lets only one job at a time rewrite the files of a table. An error of a renewal is ignored, because a
    later renewal may succeed before the lease ends.

    Args:
        job: The description of the job that other clients see, of at most 100 ASCII characters.
        wait_s: The time in seconds for which to wait for the lease.

    Raises:
        RewriteRunning: A different job still has the lease after `wait_s`.
    """
    holder = str(uuid.uuid4())
    duration_s = _take(client, table, holder, job, wait_s)
    end_event = threading.Event()

    def renew() -> None:
        while not end_event.wait(duration_s / _RENEWALS_PER_LEASE):
            with contextlib.suppress(ClientError):
                _request(client, table, holder, job)

    thread = threading.Thread(target=renew, name="rewrite-lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end_event.set()
        thread.join()
        with contextlib.suppress(ClientError):
            _request(client, table, holder, job, release=True)


def _take(client: SeamarkClient, table: Name, holder: str, job: str, wait_s: float) -> float:
    """Take the lease, and return its duration in seconds.

    If another job has the lease, the function tries again until `wait_s` seconds have passed.

    Raises:
        RewriteRunning: Another job still has the lease.
    """
    until_s = time.monotonic() + wait_s
    while True:
        try:
            return float(_request(client, table, holder, job)["lasts-ms"]) / 1000
        except Conflict as error:
            if time.monotonic() >= until_s:
                waiting_text = f"; waited {wait_s:g} s for it" if wait_s else ""
                raise RewriteRunning(error.message + waiting_text, status=error.status, kind=error.kind) from None
        time.sleep(_PAUSE_S)


def _request(client: SeamarkClient, table: Name, holder: str, job: str, *, release: bool = False) -> dict[str, Any]:
    body = {"holder": holder, "job": job, "release": release}
    return client._request_json("POST", f"{make_table_path(table)}/rewrite-lease", {}, body)
