"""An HTTP client that does not change requests: paths stay as they are, and bodies are JSON or raw bytes."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import aiohttp
from yarl import URL

from seamark.formats.runtime.clock import SystemClock
from tests.server.rig import RunningServer

SCHEMA: dict[str, Any] = {
    "type": "struct",
    "schema-id": 0,
    "fields": [
        {"id": 1, "name": "id", "required": True, "type": "long"},
        {"id": 2, "name": "data", "required": False, "type": "string"},
    ],
}
VIEW_VERSION: dict[str, Any] = {
    "version-id": 1,
    "timestamp-ms": 1_700_000_000_000,
    "schema-id": 0,
    "summary": {"engine-name": "test"},
    "representations": [{"type": "sql", "sql": "SELECT 1", "dialect": "spark"}],
    "default-namespace": ["db"],
}


def create_key() -> str:
    return str(SystemClock().uuid7())


def build_function_document() -> dict[str, Any]:
    """Return the metadata of a valid function of one parameter, as a client sends it."""
    return {
        "function-uuid": str(uuid.uuid4()),
        "format-version": 1,
        "definitions": [
            {
                "definition-id": "(int)",
                "parameters": [{"name": "x", "type": "int"}],
                "return-type": "int",
                "versions": [
                    {"version-id": 1, "representations": [{"type": "sql", "dialect": "spark", "sql": "x + 1"}]}
                ],
                "current-version-id": 1,
                "function-type": "udf",
            }
        ],
        "definition-log": [],
    }


@dataclass
class Answer:
    """The answer of the server to one request."""

    status: int
    headers: Mapping[str, str]
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def error(self) -> tuple[int, str, str]:
        """Return (code, type, message) of an error in the format of the REST specification."""
        body = self.json
        assert set(body) == {"error"}
        assert body["error"]["code"] == self.status
        return self.status, body["error"]["type"], body["error"]["message"]


class Api:
    """A client that sends raw requests to one server and does not interpret the answers."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server

    async def __call__(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        key: str | None = None,
    ) -> Answer:
        """Send a request, and return the answer.

        Args:
            method: The HTTP method.
            path: The path and the query of the URL.
            body: Sent as JSON, or unchanged if it is bytes.
            headers: Further headers.
            key: The value of the header Idempotency-Key.
        """
        sent_headers = dict(headers or {})
        if key is not None:
            sent_headers["Idempotency-Key"] = key
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        if data is not None:
            sent_headers.setdefault("Content-Type", "application/json")
        sent_headers.setdefault("Accept-Encoding", "identity")
        url = URL(self.server.url + path, encoded=True)
        one_piece_bytes_max = 1 << 20  # aiohttp warns about a body of more than 1 MiB in one piece.
        pieces = data if data is None or len(data) < one_piece_bytes_max else BytesIO(data)
        async with self.server.http.request(
            method, url, data=pieces, headers=sent_headers, timeout=aiohttp.ClientTimeout(total=30)
        ) as answer:
            return Answer(answer.status, answer.headers, await answer.read())

    async def create_table(self, name: str = "t", **options: Any) -> Any:
        """Create `db.<name>`, and return its LoadTableResult."""
        answer = await self("POST", "/v1/namespaces/db/tables", {"name": name, "schema": SCHEMA, **options})
        assert answer.status == 200, answer.raw
        return answer.json

    async def view(self, name: str = "v", **options: Any) -> Any:
        body = {"name": name, "schema": SCHEMA, "view-version": VIEW_VERSION, "properties": {}, **options}
        answer = await self("POST", "/v1/namespaces/db/views", body)
        assert answer.status == 200, answer.raw
        return answer.json


def build_property_commit(**values: str) -> dict[str, Any]:
    """Return a commit that sets properties. It has no requirement, so no other commit conflicts with it."""
    return {"requirements": [], "updates": [{"action": "set-properties", "updates": values}]}


def build_append(snapshot_id: int, parent: int | None = None, sequence: int = 1) -> dict[str, Any]:
    """Return a commit that adds a snapshot without files to main, if `parent` is the current snapshot of main.

    The time of the snapshot increases with its sequence number.
    """
    snapshot = {
        "snapshot-id": snapshot_id,
        "sequence-number": sequence,
        "timestamp-ms": 1_700_000_000_000 + sequence,
        "manifest-list": f"file:///nowhere/snap-{snapshot_id}.avro",
        "summary": {"operation": "append"},
        "schema-id": 0,
    }
    if parent is not None:
        snapshot["parent-snapshot-id"] = parent
    return {
        "requirements": [{"type": "assert-ref-snapshot-id", "ref": "main", "snapshot-id": parent}],
        "updates": [
            {"action": "add-snapshot", "snapshot": snapshot},
            {"action": "set-snapshot-ref", "ref-name": "main", "type": "branch", "snapshot-id": snapshot_id},
        ],
    }
