"""Commits the same rows in other files: what clustering and compaction end with.

Invariant: no row is added, lost or changed. The commit has the operation `replace`: concurrent appends are preserved,
and a concurrent change of a replaced file is a conflict.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from seamark.connector.read.tables import OpenTable, ScanTask
from seamark.connector.write.table_writer import WrittenFiles


def replacement(
    opened: OpenTable,
    tasks: Sequence[ScanTask],
    written: WrittenFiles,
    *,
    branch: str,
    others: Iterable[ScanTask] = (),
) -> dict[str, Any]:
    """The body of the commit that replaces the files of `tasks`. `others`: the other tasks of the same plan.

    Also removes delete files that apply to no other data file; their rows are not written again. The server removes
    delete files of a single data file together with it.
    """
    kept = {delete["file-path"] for task in others for delete in task.deletes}
    deletes = {
        delete["file-path"]: delete
        for task in tasks
        for delete in task.deletes
        if not delete.get("referenced-data-file") and delete["file-path"] not in kept
    }
    return {
        "operation": "replace",
        "branch": branch,
        "table-uuid": opened.metadata.table_uuid,
        "schema-id": opened.metadata.current_schema_id,
        "format-version": opened.metadata.format_version,
        "read-snapshot-id": opened.snapshot_id,
        "add": list(written.files),
        "remove": [{"file-path": path} for path in (*(task.path for task in tasks), *deletes)],
        "index-files": list(written.index_files),
    }
