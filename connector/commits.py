"""The client's part for commits: a change sent, and asked about again where its answer was lost.

A change with a producer may be sent any number of times: the server commits each sequence once, and answers a repeat as
the first time. So with a producer a lost reply, a gateway's error and `CommitStateUnknownException` are asked again;
without one they are told to the caller, since nobody knows then whether the change is in the table.
"""

from __future__ import annotations

import json
import time
from typing import Any

from connector.client import Name, SeamarkClient, table_path
from connector.errors import ServerFailed, Unavailable, Unreachable

_TRIES = 6
_WAIT_S = 0.25
_WAIT_MAX_S = 8.0


class CommitClient:
    """Commits by way of a client, whose connections and login it uses. May be pickled."""

    def __init__(self, client: SeamarkClient) -> None:
        self.client = client

    def commit(self, table: Name, body: dict[str, Any]) -> dict[str, Any]:
        """What the change led to; both are JSON as docs/reference/openapi.json has it (commitChange).

        Refused with status 409 where it collides with what was committed meanwhile: nothing was changed. Unreachable
        and ServerFailed leave open whether it happened; keep its files then.
        """
        repeatable = body.get("producer") is not None
        sent = json.dumps(body).encode()
        for number in range(_TRIES):
            if number:
                time.sleep(min(_WAIT_MAX_S, _WAIT_S * 2 ** (number - 1)))
            try:
                raw = self.client._request("POST", f"{table_path(table)}/commit", {}, sent, repeatable=repeatable)
            except (Unreachable, ServerFailed, Unavailable) as error:
                if not repeatable or number == _TRIES - 1 or not _is_open(error):
                    raise
            else:
                found: dict[str, Any] = json.loads(raw)
                return found
        raise AssertionError("the loop returns or raises")


def _is_open(error: Unreachable | ServerFailed | Unavailable) -> bool:
    """Whether asking again may tell more: a bug of the server's says the same each time."""
    if isinstance(error, ServerFailed):
        return error.status in (502, 504) or error.kind == "CommitStateUnknownException"
    return True
