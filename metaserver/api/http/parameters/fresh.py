"""`X-Seamark-Fresh`: the header with which an engine's catalog reads fresh snapshots of stream tables.

With `true`, loadTable answers with a current snapshot that includes the rows of the stream that no commit has added
yet. The header is for engines that plan on the client. An engine's catalog with the header cannot commit snapshots to
stream tables, because their parent would be a snapshot that the table does not have.
"""

from __future__ import annotations

from collections.abc import Mapping

from seamark.formats.runtime.errors import BadRequest

HEADER = "X-Seamark-Fresh"


def reads_fresh(headers: Mapping[str, str]) -> bool:
    """Return whether the request reads fresh snapshots.

    Raises:
        BadRequest: The header has a value other than true and false.
    """
    value = headers.get(HEADER, "false").lower()
    if value not in ("true", "false"):
        raise BadRequest(f"The header {HEADER} is {value[:40]!r}; it must be true or false")
    return value == "true"
