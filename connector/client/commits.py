"""Commits changes, and repeats a commit if its response is lost.

A change with a producer can be sent any number of times, because the server commits each sequence number once, and
answers a retry with the first response. Therefore the client repeats the change after a lost response, an error of a
gateway, and `CommitStateUnknownException`. Without a producer, the client raises these errors, because the change may
or may not be in the table.
"""

from __future__ import annotations

import json
import logging
import random
import time
from typing import Any

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import Refused, ServerFailed, Unavailable, Unreachable
from seamark.connector.client.names import Name, make_table_path

Producer = tuple[str, int]
"""The name of a writer, and the sequence number of its change."""
_COMMIT_TRIES_MAX = 6
_WAIT_S = 0.25
_WAIT_MAX_S = 8.0
_DOUBLINGS_MAX = 10
_log = logging.getLogger(__name__)


def encode_producer(producer: Producer | None) -> dict[str, Any] | None:
    """Check the producer, and return it in the JSON form of a commit request, or None if there is no producer.

    Call this before any other work.

    Raises:
        ValueError: The producer is invalid.
    """
    match producer:
        case None:
            return None
        case (str(name), int(number)) if not isinstance(number, bool) and number >= 0:
            return {"id": name, "sequence": number}
    raise ValueError(f"producer is {producer!r}; it must be a name and a whole number from 0, such as ('orders', 17)")


class CommitClient:
    """Commits changes with the connections and the token of a client. Instances can be pickled."""

    def __init__(self, client: SeamarkClient) -> None:
        self.client = client

    def commit(self, table: Name, body: dict[str, Any]) -> dict[str, Any]:
        """Commit a change, and return the server's response.

        docs/reference/openapi.json defines the body and the response (commitChange). After Unreachable and
        ServerFailed, the outcome is unknown, so the files of the change must not be deleted. A commit with a producer
        is sent again after such an error, because the server recognizes the repeat by the producer's number.

        Raises:
            Conflict: The change conflicts with a concurrent commit. Nothing was changed.
        """
        if self.client.fence is not None:
            body = {**body, "fence": self.client.fence}
        tries = _COMMIT_TRIES_MAX if body.get("producer") is not None else 1
        payload, is_outcome_open = json.dumps(body).encode(), False
        for number in range(tries):
            if number:
                sleep_before_attempt(number - 1, first_s=_WAIT_S, max_s=_WAIT_MAX_S)
            try:
                # `_request` itself repeats requests after a refused connection, and if the server is busy.
                raw = self.client._request("POST", f"{make_table_path(table)}/commit", {}, payload, repeatable=False)
            except Refused as error:
                error.has_unknown_earlier_outcome = (
                    is_outcome_open  # An earlier attempt may have been committed, or may still be committed.
                )
                raise
            except (Unreachable, ServerFailed, Unavailable) as error:
                if number == tries - 1 or not _may_succeed_on_repeat(error):
                    raise
                is_outcome_open = True
                _log.warning("The commit to %s is sent again, attempt %d of %d: %s", table, number + 2, tries, error)
            else:
                result: dict[str, Any] = json.loads(raw)
                return result
        raise AssertionError("the loop returns or raises")

    def flush(self, table: Name) -> int:
        """Flush the waiting rows of a stream table to its files, and return their number.

        Raises:
            NoSuchResource: The table does not exist.
            Conflict: The flush conflicts with another commit.
        """
        rows: int = self.client._request_json("POST", f"{make_table_path(table)}/flush")["rows"]
        return rows


def sleep_before_attempt(number: int, *, first_s: float, max_s: float) -> None:
    """Sleep before the next attempt.

    The time is `first_s`, doubled `number` times, but at most `max_s`. Up to half of it is subtracted at random, so
    that several writers do not repeat at the same time.
    """
    wait_s = min(max_s, first_s * 2 ** min(number, _DOUBLINGS_MAX))
    time.sleep(random.SystemRandom().uniform(wait_s / 2, wait_s))


def _may_succeed_on_repeat(error: Unreachable | ServerFailed | Unavailable) -> bool:
    """Return whether a retry of a commit may succeed.

    A bug of the server causes the same error each time. After a 503 of the server itself, nothing was committed, and
    the client has already repeated the request.
    """
    if isinstance(error, ServerFailed):
        return error.status in (502, 504) or error.kind == "CommitStateUnknownException"
    return not (isinstance(error, Unavailable) and error.kind)
