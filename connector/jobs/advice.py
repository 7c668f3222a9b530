"""Applies a proposal of the advisor to a table, with the same effect as the commands of the proposal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.names import Name, split_table
from seamark.connector.client.policies import change_table_properties, record_applied_advice
from seamark.connector.client.rewrite_lease import rewrite_lease
from seamark.connector.jobs.clustering import cluster_incrementally
from seamark.connector.jobs.failures import FilesNotIndexed
from seamark.connector.jobs.jobs import build_all_indexes
from seamark.connector.write.compaction import compact
from seamark.formats.iceberg.metadata.clustering import COLUMNS, CURVE
from seamark.formats.iceberg.metadata.properties import TARGET_FILE_BYTES

NOT_INDEXED = "not-indexed"
"""The key of the reason why the new index has no entries of some data files."""
_JOB = "seamark advise apply"


def apply_proposal(client: IndexClient, table: Name, proposal: Mapping[str, Any], *, wait_s: float) -> dict[str, Any]:
    """Apply a proposal, and return it with its prediction and the measurement.

    The server stores the prediction and the measurement of the changed table.

    Args:
        client: The client.
        table: The table.
        proposal: A proposal of `load_advice`.
        wait_s: The maximum time in seconds to wait while a different job has the table or one of its indexes.

    Returns:
        The answer of the server. `NOT_INDEXED` is the reason why the new index lacks some data files, or empty.

    Raises:
        InvalidRequest: The proposal, for example a new partition spec, has to be applied by hand.
        Refused: The server refuses a change.
        JobIncomplete: A part of the index could not be built.
    """
    change = proposal["change"]
    not_indexed = ""
    match change["kind"]:
        case "cluster":
            properties = {COLUMNS: ",".join(change["columns"]), CURVE: change["curve"]}
            if change.get("target-file-bytes") is not None:
                properties[TARGET_FILE_BYTES] = str(change["target-file-bytes"])
            change_table_properties(client, table, properties, ())
            with rewrite_lease(client, table, job=_JOB, wait_s=wait_s):
                cluster_incrementally(client, table, full=True)
        case "compact":
            with rewrite_lease(client, table, job=_JOB, wait_s=wait_s):
                compact(client, table)
        case "add-index":
            client.put_index(table, change["index-name"], kind=change["index-kind"], columns=change["columns"])
            not_indexed = _build_indexes(client, table, wait_s)
        case "add-cube":
            columns, measures = change["columns"], change["measures"]
            client.put_index(table, change["index-name"], kind=change["index-kind"], columns=columns, measures=measures)
            not_indexed = _build_indexes(client, table, wait_s)
        case "drop-index":
            client.drop_index(table, change["index-name"])
        case _:
            statements = "; ".join(proposal["commands"])
            raise InvalidRequest(f"The change {proposal['title']!r} must be made in an engine; run there: {statements}")
    return {**record_applied_advice(client, table, proposal), NOT_INDEXED: not_indexed}


def _build_indexes(client: IndexClient, table: Name, wait_s: float) -> str:
    """Build the indexes of a table, and return the reason why data files were left out, or an empty text."""
    try:
        build_all_indexes(client, split_table(table), wait_s=wait_s)
    except FilesNotIndexed as error:
        return str(error)
    return ""
