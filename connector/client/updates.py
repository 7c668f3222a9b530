"""Updates of a table's metadata by the standard's commit (REST specification: `updateTable`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.names import Name


def update_table(
    client: SeamarkClient, table: Name, requirements: Sequence[Mapping[str, Any]], updates: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Commit the updates, and return the table as after the commit (`CommitTableResponse`).

    Unreachable and ServerFailed leave open whether it happened.

    Raises:
        Conflict: If a requirement is not met.
        NotFound: If it does not exist.
        BadRequest: If the request is invalid.
    """
    body = {"requirements": list(requirements), "updates": list(updates)}
    return client._json("POST", client._standard_path(table), {}, body)
