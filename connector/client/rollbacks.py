"""Rolls tables back to the snapshots that were current at a time, with Iceberg's REST API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.names import Name, split_table
from seamark.formats.iceberg.metadata.snapshot import MAIN


class SnapshotAtTime(NamedTuple):
    """The snapshot of a table that was current at a time.

    Attributes:
        table: The levels of the table's name.
        uuid: The UUID of the table.
        current_id: The current snapshot, or None if the table has no snapshot.
        snapshot_id: The snapshot at the time, or None if `problem` is set.
        problem: The reason why the table cannot be rolled back, or "".
    """

    table: tuple[str, ...]
    uuid: str
    current_id: int | None
    snapshot_id: int | None
    problem: str = ""

    @property
    def is_change(self) -> bool:
        return not self.problem and self.snapshot_id != self.current_id


def find_snapshot_at(client: SeamarkClient, table: Name, time_ms: int) -> SnapshotAtTime:
    """Return the snapshot that was current at a time, according to the table's snapshot log.

    If the table had no snapshot at the time and has none now, the result has no problem, because a restore does not
    change such a table.

    Raises:
        NoSuchResource: The table does not exist.
    """
    metadata: dict[str, Any] = msgspec.json.decode(client.load_table(table, history=True).metadata)
    name, uuid = tuple(split_table(table)), metadata["table-uuid"]
    current_id = metadata.get("current-snapshot-id")
    current_id = None if current_id == -1 else current_id
    log = [entry for entry in metadata.get("snapshot-log", []) if entry["timestamp-ms"] <= time_ms]
    if not log:
        problem = "the table had no snapshot at that time, or its log does not reach so far back"
        return SnapshotAtTime(name, uuid, current_id, None, "" if current_id is None else problem)
    snapshot_id = log[-1]["snapshot-id"]
    if all(snapshot["snapshot-id"] != snapshot_id for snapshot in metadata.get("snapshots", [])):
        return SnapshotAtTime(name, uuid, current_id, None, f"the snapshot {snapshot_id} of that time has expired")
    return SnapshotAtTime(name, uuid, current_id, snapshot_id)


def list_tables_below(client: SeamarkClient, namespace: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the tables of a namespace and of all namespaces below it."""
    top = tuple(namespace)
    yield from client.tables(top)
    for path in client.namespaces():
        if path[: len(top)] == top and path != top:
            yield from client.tables(path)


def move_back(client: SeamarkClient, targets: Sequence[SnapshotAtTime]) -> None:
    """Roll the tables back to their snapshots at a time. One transaction changes all tables or none.

    The requirements ensure that each table and its current snapshot are the same as when the targets were determined.

    Raises:
        Conflict: Another commit has changed one of the tables.
    """
    changes = [
        {
            "identifier": {"namespace": list(target.table[:-1]), "name": target.table[-1]},
            "requirements": [
                {"type": "assert-table-uuid", "uuid": target.uuid},
                {"type": "assert-ref-snapshot-id", "ref": MAIN, "snapshot-id": target.current_id},
            ],
            "updates": [
                {
                    "action": "set-snapshot-ref",
                    "ref-name": MAIN,
                    "type": "branch",
                    "snapshot-id": target.snapshot_id,
                }
            ],
        }
        for target in targets
    ]
    body = msgspec.json.encode({"table-changes": changes})
    client._request("POST", f"{client._get_catalog()}/transactions/commit", {}, body, repeatable=False)
