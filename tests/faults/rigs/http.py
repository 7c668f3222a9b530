"""A minimal HTTP client with one persistent connection, JSON bodies, and no retries."""

from __future__ import annotations

import http.client
import json
import uuid
from typing import Any
from urllib.parse import urlsplit

from tests.catalog.rig import SCHEMA, build_append


def create_key() -> str:
    """Return an idempotency key: a UUID of version 7, whose version is in the bits from 76 to 79."""
    return str(uuid.UUID(int=(uuid.uuid4().int & ~(0xF << 76)) | 0x7 << 76))


class OutcomeUnknown(Exception):
    """The connection broke before an answer arrived, so the outcome is unknown."""


class HttpClient:
    """A blocking client with one connection. A lost answer raises an error, unlike a rejection by the server."""

    def __init__(self, base_url: str, timeout_s: float = 60) -> None:
        self._host = urlsplit(base_url).netloc
        self._timeout_s = timeout_s
        self._connection: http.client.HTTPConnection | None = None
        self.headers: dict[str, str] = {}

    def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Send a request, and return status and decoded body. The attribute `headers` has the answer's headers.

        Raises:
            OutcomeUnknown: No answer arrived.
        """
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self._host, timeout=self._timeout_s)
        try:
            data = None if body is None else json.dumps(body)
            self._connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            answer = self._connection.getresponse()
            text = answer.read()
            self.headers = dict(answer.getheaders())
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise OutcomeUnknown(str(error)) from error
        return answer.status, json.loads(text) if text else None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __del__(self) -> None:
        self.close()

    def create_table(self, name: str = "t", namespace: str = "db") -> tuple[int, Any]:
        self.call("POST", "/v1/namespaces", {"namespace": [namespace]})
        return self.call("POST", f"/v1/namespaces/{namespace}/tables", {"name": name, "schema": SCHEMA})

    def read_head(self, name: str = "t") -> tuple[int | None, int]:
        """Return the id of the current snapshot, and the last sequence number."""
        status, body = self.call("GET", f"/v1/namespaces/db/tables/{name}?snapshots=refs")
        assert status == 200, body
        metadata = body["metadata"]
        head = metadata.get("current-snapshot-id")
        return (None if head in (None, -1) else head), metadata["last-sequence-number"]

    def read_chain(self, name: str = "t") -> list[int]:
        """Return the snapshots in the order of their sequence numbers.

        The parent of each snapshot must be the previous snapshot.
        """
        status, body = self.call("GET", f"/v1/namespaces/db/tables/{name}?snapshots=all")
        assert status == 200, body
        snapshots = sorted(body["metadata"].get("snapshots", []), key=lambda snapshot: snapshot["sequence-number"])
        parents = [snapshot.get("parent-snapshot-id") for snapshot in snapshots]
        ids = [snapshot["snapshot-id"] for snapshot in snapshots]
        assert parents == [None, *ids][: len(ids)], "the snapshots are not one chain"
        return ids

    def list_metadata_files(self, name: str = "t") -> list[str]:
        """Return the metadata files that must exist: the current one, and those of its log."""
        status, body = self.call("GET", f"/v1/namespaces/db/tables/{name}?snapshots=refs")
        assert status == 200, body
        log = [entry["metadata-file"] for entry in body["metadata"].get("metadata-log", [])]
        return [body["metadata-location"], *log]

    def list_tables(self) -> list[str]:
        status, body = self.call("GET", "/v1/namespaces/db/tables")
        assert status == 200, body
        return [identifier["name"] for identifier in body["identifiers"]]

    def append(
        self, snapshot_id: int, parent: int | None, sequence: int, name: str = "t", key: str | None = None
    ) -> tuple[int, Any]:
        requirements, updates = build_append(snapshot_id, parent, sequence)
        headers = {"Idempotency-Key": key} if key else None
        body = {"requirements": requirements, "updates": updates}
        return self.call("POST", f"/v1/namespaces/db/tables/{name}", body, headers)
