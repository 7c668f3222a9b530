"""Sends requests about table services: their policies (properties of tables and namespaces), jobs and advice."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from seamark.connector.client.catalog import make_namespace_route
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.names import Name, make_table_path
from seamark.connector.client.updates import update_table

_REPORT_S = 2.0
"""The timeout in seconds of a report. At its end, a statement waits for the report."""
_RUN_TABLES_MAX = 100
"""The maximum number of tables that the server accepts in the report of a run."""


def load_policy(client: SeamarkClient, table: Name) -> dict[str, Any]:
    """Return the policy of a table: its `runs`, and its effective `properties`, each with the place where it is set.

    docs/reference/openapi.json defines the form of the result (loadTablePolicy).

    Raises:
        NoSuchResource: The table does not exist.
    """
    return client._request_json("GET", f"{make_table_path(table)}/policy")


def advise_ttl(client: SeamarkClient, table: Name, unread_days: int | None = None) -> dict[str, Any]:
    """Return the columns that no query reads in old partitions. With `unread_days`, set how long they must be unread.

    docs/reference/openapi.json defines the form of the result (adviseTtl).

    Raises:
        NoSuchResource: The table does not exist.
        InvalidRequest: The request is invalid.
    """
    query = {} if unread_days is None else {"unread-days": str(unread_days)}
    return client._request_json("GET", f"{make_table_path(table)}/ttl-advice", query)


def load_history(client: SeamarkClient, table: Name, *, days: int | None = None, limit: int | None = None) -> Any:
    """Return the shapes of the statements that read a table. Shapes with the most statements are first.

    Statements that differ only in their literals have the same shape.

    docs/reference/openapi.json defines the form of the result (loadQueryHistory).

    Raises:
        NoSuchResource: The table does not exist.
        InvalidRequest: The request is invalid.
    """
    numbers = {"days": days, "limit": limit}
    query = {name: str(value) for name, value in numbers.items() if value is not None}
    return client._request_json("GET", f"{make_table_path(table)}/history", query)


def load_advice(client: SeamarkClient, table: Name, *, days: int | None = None) -> Any:
    """Return ranked proposals for a table, with predicted gain and cost.

    docs/reference/openapi.json defines the form of the result (adviseTable).

    Raises:
        NoSuchResource: The table does not exist.
        InvalidRequest: The request is invalid.
    """
    return client._request_json("GET", f"{make_table_path(table)}/advice", {} if days is None else {"days": str(days)})


def record_applied_advice(client: SeamarkClient, table: Name, proposal: Mapping[str, Any]) -> Any:
    """Record that a proposal was applied, and return it with its measurement.

    docs/reference/openapi.json defines the form of the result (recordAppliedAdvice).
    """
    return client._request_json("POST", f"{make_table_path(table)}/advice/applied", {}, {"proposal": proposal})


def take_advice_step(client: SeamarkClient, table: Name) -> dict[str, Any]:
    """Take the next step of the policy `auto`: judge or undo earlier changes of a table, or begin an advised change.

    docs/reference/openapi.json defines the form of the result (takeAdviceStep).

    Raises:
        NoSuchResource: The table does not exist.
        Conflict: A different client is taking a step for the table.
    """
    return client._request_json("POST", f"{make_table_path(table)}/advice/steps")


def finish_advice_step(
    client: SeamarkClient,
    table: Name,
    step: Mapping[str, Any],
    outcome: str,
    *,
    reason: str = "",
    size_bytes: int = 0,
    seconds: float = 0.0,
) -> dict[str, Any]:
    """Report the end of a change to a table, and return the proposal of the change with its measured effect.

    The policy `auto` of a table makes such changes on trial: the server measures each change and may undo it.
    docs/reference/openapi.json defines the arguments and the form of the result (finishAdviceStep).

    Args:
        client: The client.
        table: The table.
        step: The change, as `take_advice_step` has returned it.
        outcome: `applied`, `failed` or `busy`.
        reason: The reason why the change was not applied, or "".
        size_bytes: The number of bytes that the change has read and written.
        seconds: The duration of the change in seconds.

    Raises:
        NoSuchResource: The table has no change with this number.
        Conflict: A different client has updated the state of the change, or is making the change.
    """
    body = {
        "number": step["number"],
        "since-ms": step["since-ms"],
        "outcome": outcome,
        "reason": reason,
        "size-bytes": size_bytes,
        "seconds": seconds,
    }
    return client._request_json("POST", f"{make_table_path(table)}/advice/steps/finished", {}, body)


def make_time_report(
    statement: str, seconds: float, files: int, size_bytes: int, run_tables: Sequence[Sequence[str]] = ()
) -> dict[str, Any]:
    """Return the body of `recordStatementTime`.

    Args:
        statement: The fingerprint of the statement, from the plan of the table.
        seconds: The time that the engine took, in seconds.
        files: The number of files of the table that the engine read.
        size_bytes: The total size of these files.
        run_tables: All tables that the statement read, for OpenLineage events. Only the first `_RUN_TABLES_MAX` tables
            are reported. If it is empty, the report causes no such events.
    """
    body: dict[str, Any] = {"statement": statement, "seconds": seconds, "files": files, "bytes": size_bytes}
    if run_tables:
        tables = list(dict.fromkeys(tuple(table) for table in run_tables))[:_RUN_TABLES_MAX]
        body["run"] = {"id": str(uuid.uuid4()), "tables": tables}
    return body


def report_statement_time(
    client: SeamarkClient,
    table: Name,
    statement: str,
    *,
    seconds: float,
    files: int,
    size_bytes: int,
    run_tables: Sequence[Sequence[str]] = (),
) -> None:
    """Report the time that an engine took for a statement.

    Args:
        client: The client.
        table: A table that the statement read.
        statement: The fingerprint of the statement, from the plan of the table.
        seconds: The time that the engine took, in seconds.
        files: The number of files of the table that the engine read.
        size_bytes: The total size of these files.
        run_tables: All tables that the statement read, for the OpenLineage events of the statement. Pass them in the
            report of only one of these tables.
    """
    body = make_time_report(statement, seconds, files, size_bytes, run_tables)
    path = f"{make_table_path(table)}/history/times"
    client._request("POST", path, {}, json.dumps(body).encode(), repeatable=False, timeout_s=_REPORT_S)


def list_read_tables(client: SeamarkClient, *, days: int | None = None) -> Any:
    """Return the tables that are read most often.

    docs/reference/openapi.json defines the form of the result (listQueryHistory).
    """
    return client._request_json("GET", "/api/v1/history", {} if days is None else {"days": str(days)})


def read_effective_properties(client: SeamarkClient, table: Name) -> dict[str, str]:
    """Return the effective properties of a table's policy that are set on the table or on one of its namespaces.

    Defaults of the server are left out, because the callers have their own defaults.
    """
    entries = load_policy(client, table)["properties"]
    return {entry["name"]: entry["value"] for entry in entries if entry["source"] in ("table", "namespace")}


def read_service_jobs(client: SeamarkClient, table: Name | None = None) -> dict[str, Any]:
    """Return the running `jobs` of table services on a table or on all tables, and the `waiting` jobs.

    docs/reference/openapi.json defines the form of the result (listRunningJobs).

    Raises:
        NoSuchResource: The table does not exist.
    """
    path = "/api/v1/jobs" if table is None else f"{make_table_path(table)}/jobs"
    return client._request_json("GET", path)


def change_table_properties(
    client: SeamarkClient, table: Name, updates: Mapping[str, str], removals: Sequence[str]
) -> None:
    """Change the properties of a table with the REST operation `updateTable`.

    Raises:
        NoSuchResource: The table does not exist.
        InvalidRequest: The request is invalid.
        Conflict: A concurrent commit conflicts.
    """
    changes: list[dict[str, Any]] = []
    if updates:
        changes.append({"action": "set-properties", "updates": dict(updates)})
    if removals:
        changes.append({"action": "remove-properties", "removals": list(removals)})
    update_table(client, table, (), changes)


def change_namespace_properties(
    client: SeamarkClient, namespace: Name, updates: Mapping[str, str], removals: Sequence[str]
) -> None:
    """Change the properties of a namespace with the route of Iceberg's REST specification.

    Raises:
        NoSuchResource: The namespace does not exist.
        InvalidRequest: The request is invalid.
    """
    changes = {"updates": dict(updates), "removals": list(removals)}
    client._request_json("POST", f"{make_namespace_route(client, namespace)}/properties", {}, changes)
