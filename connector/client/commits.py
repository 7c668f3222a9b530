"""The client's part for commits: a change sent, and asked about again where its answer was lost.

A change with a producer may be sent any number of times: the server commits each sequence once, and answers a repeat as
the first time. So with a producer a lost reply, a gateway's error and `CommitStateUnknownException` are asked again;
without one they are told to the caller, since nobody knows then whether the change is in the table.
"""

from __future__ import annotations

import json
import random
import time
from typing import Any

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import Refused, ServerFailed, Unavailable, Unreachable
from seamark.connector.client.names import Name, table_path

Producer = tuple[str, int]
"""A name, and the number of a change among those that it makes."""
_TRIES = 6
_WAIT_S = 0.25
_WAIT_MAX_S = 8.0
_DOUBLINGS_MAX = 10


def producer_json(producer: Producer | None) -> dict[str, Any] | None:
    """As a commit's body has it. ValueError for what is none: ask before there is work that would be in vain."""
    match producer:
        case None:
            return None
        case (str(name), int(number)) if not isinstance(number, bool) and number >= 0:
            return {"id": name, "sequence": number}
    raise ValueError(f"producer is {producer!r}; it must be a name and a whole number from 0, as in ('orders', 17)")


class CommitClient:
    """Commits by way of a client, whose connections and login it uses. May be pickled."""

    def __init__(self, client: SeamarkClient) -> None:
        self.client = client

    def commit(self, table: Name, body: dict[str, Any]) -> dict[str, Any]:
        """What the change led to; both are JSON as docs/reference/openapi.json has it (commitChange).

        Conflict where it collides with what was committed meanwhile: nothing was changed. Unreachable and ServerFailed
        leave open whether it happened; keep its files then.
        """
        tries = _TRIES if body.get("producer") is not None else 1
        sent, left_open = json.dumps(body).encode(), False
        for number in range(tries):
            if number:
                back_off(number - 1, first_s=_WAIT_S, most_s=_WAIT_MAX_S)
            try:
                # A connection that nobody answers, and a busy server, are waited for there.
                raw = self.client._request("POST", f"{table_path(table)}/commit", {}, sent, repeatable=False)
            except Refused as error:
                error.left_open = left_open  # what was sent before may be done yet
                raise
            except (Unreachable, ServerFailed, Unavailable) as error:
                if number == tries - 1 or not _is_open(error):
                    raise
                left_open = True
            else:
                found: dict[str, Any] = json.loads(raw)
                return found
        raise AssertionError("the loop returns or raises")


def back_off(number: int, *, first_s: float, most_s: float) -> None:
    """Sleeps before the next try: `first_s`, doubled `number` times, up to `most_s`; whoever has lost often waits
    longer, and, as chance takes up to half of it off, no two wait alike."""
    wait_s = min(most_s, first_s * 2 ** min(number, _DOUBLINGS_MAX))
    time.sleep(random.SystemRandom().uniform(wait_s / 2, wait_s))


def _is_open(error: Unreachable | ServerFailed | Unavailable) -> bool:
    """Whether asking again may tell more: a bug of the server's says the same each time."""
    if isinstance(error, ServerFailed):
        return error.status in (502, 504) or error.kind == "CommitStateUnknownException"
    return True
