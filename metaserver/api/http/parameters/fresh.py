"""`X-Seamark-Fresh`: the header by which a catalog reads fresh snapshots of stream tables.

With `true`, loadTable answers with a current snapshot that has the rows of the stream which no commit has added. It is
for engines that plan by themselves. Such a catalog cannot commit snapshots to stream tables: the parent would be a
snapshot that the table does not have.
"""

from __future__ import annotations

from collections.abc import Mapping

from seamark.formats.runtime.errors import BadRequest

HEADER = "X-Seamark-Fresh"


def reads_fresh(headers: Mapping[str, str]) -> bool:
    """Return whether the request reads fresh snapshots.

    Raises:
        BadRequest: If the header has another value.
    """
    value = headers.get(HEADER, "false").lower()
    if value not in ("true", "false"):
        raise BadRequest(f"The header {HEADER} is {value[:40]!r}; it must be true or false")
    return value == "true"
