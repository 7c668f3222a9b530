"""Updates a table's metadata with the REST operation `updateTable`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.names import Name


def update_table(
    client: SeamarkClient, table: Name, requirements: Sequence[Mapping[str, Any]], updates: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Commit the updates, and return the table after the commit (`CommitTableResponse`).

    After Unreachable and ServerFailed, the outcome of the commit is unknown.

    Raises:
        Conflict: A requirement is not met.
        NoSuchResource: The table does not exist.
        InvalidRequest: The request is invalid.
    """
    body = {"requirements": list(requirements), "updates": list(updates)}
    return client._request_json("POST", client._make_standard_path(table), {}, body)
