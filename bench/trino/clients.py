"""Clients of Trino that use little CPU: a client posts a statement and follows its pages to the end."""

from __future__ import annotations

import time
from dataclasses import dataclass

from bench.wire import Connection, LoadError, Request, build_request

SESSION = {"X-Trino-User": "bench", "X-Trino-Catalog": "seamark", "X-Trino-Schema": "bench", "X-Trino-Source": "bench"}
_NEXT_URI_MARK = b'"nextUri":"'
_ERROR = b'"error":{'
_PATH = b"/v1/statement/"
_ERROR_BYTES, _DATA_BYTES, _NEXT_URI_BYTES = 1_000_000, 100_000, 10_000
"""The parts of a page that are searched: an error is near its end, `data` and `nextUri` are near its start."""


@dataclass(frozen=True, slots=True)
class StatementMeasurement:
    """The measurements of one statement.

    Attributes:
        plan_outcome: The outcome that the Trino proxy reports, or empty without a proxy.
    """

    ms: float
    requests: int
    body_bytes: int
    plan_outcome: str
    last_page: bytes
    """The last page with rows, as JSON, or empty if no page had rows."""


def build_statement(sql: str, **headers: str) -> Request:
    return build_request("POST", "/v1/statement", sql.encode(), headers={**SESSION, **headers}, label=sql[:60])


async def run_statement_to_end(connection: Connection, statement_request: Request) -> StatementMeasurement:
    """Post a statement, and follow its pages to the end.

    Raises:
        LoadError: The statement failed. The message contains Trino's message.
    """
    started_s = time.perf_counter()
    answer = await connection.ask(statement_request)
    plan_outcome, requests, size, last_page = answer.get_field("X-Seamark-Plan"), 1, len(answer.body), b""
    while True:
        if answer.status != 200 or _ERROR in answer.body[-_ERROR_BYTES:]:
            raise LoadError(f"{statement_request.label}: {answer.status} {answer.body[-2000:]!r}")
        if b'"data":' in answer.body[:_DATA_BYTES]:
            last_page = answer.body
        offset = answer.body.find(_NEXT_URI_MARK, 0, _NEXT_URI_BYTES)
        if offset < 0:
            return StatementMeasurement(
                (time.perf_counter() - started_s) * 1000, requests, size, plan_outcome, last_page
            )
        path = answer.body[answer.body.index(_PATH, offset) : answer.body.index(b'"', offset + len(_NEXT_URI_MARK))]
        answer = await connection.ask(Request(b"GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" % path))
        requests, size = requests + 1, size + len(answer.body)
