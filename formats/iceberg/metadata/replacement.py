"""Snapshots of the operation `replace`, which have the same rows as their parent, in other files (spec: "Snapshots").

Any client can write the operation into a summary. Iceberg's libraries do not compare numbers of rows, and a program can
replace files by files with other rows through Java's `RewriteFiles` or Go's `ReplaceFiles`. Such a snapshot is not
refused, because a correct rewrite can look the same: some engines record -1 or no number as the rows of imported Avro
files. But if the counts of a snapshot state that it adds more rows than it removes, it is treated as a change of rows.
"""

from __future__ import annotations

from collections.abc import Mapping

from seamark.formats.iceberg.metadata.compaction import UNDONE
from seamark.formats.iceberg.metadata.properties import parse_count
from seamark.formats.iceberg.metadata.snapshot import Snapshot

REPLACE = "replace"
_UNKNOWN = -1


def is_replace(snapshot: Snapshot) -> bool:
    """Return whether the snapshot has the same rows as its parent, in other files or manifests.

    Its operation is `replace`, and its counts do not contradict this.
    """
    summary = snapshot.build_summary_map()
    return summary.get("operation") == REPLACE and not _adds_rows(summary)


def find_row_count_mismatch(snapshot: Snapshot, parent: Snapshot | None) -> str | None:
    """Return the reason why a `replace` snapshot cannot have the same rows as its parent, or None if it can.

    For a snapshot with another operation, the result is None. The function compares the counts of both snapshots. The
    new files of a correct snapshot do not have more rows than the removed files. They have fewer rows if delete files
    of the parent deleted some rows. The number of rows that equality deletes delete is unknown.
    """
    summary = snapshot.build_summary_map()
    if summary.get("operation") != REPLACE:
        return None
    added_rows, removed_rows = parse_count(summary, "added-records", 0), _count_removed_rows(summary)
    if _adds_rows(summary):
        return f"the commit adds {added_rows:,} rows and removes {removed_rows:,}"
    parent_summary = {} if parent is None else parent.build_summary_map()
    position_deletes = parse_count(parent_summary, "total-position-deletes", _UNKNOWN)
    if (
        position_deletes == _UNKNOWN
        or parent_summary.get("total-equality-deletes") != "0"
        or removed_rows - added_rows <= position_deletes
    ):
        return None
    return (
        f"the commit removes {removed_rows:,} rows and adds {added_rows:,}, "
        f"but only {position_deletes:,} rows were deleted before"
    )


def _adds_rows(summary: Mapping[str, str]) -> bool:
    """Return whether the summary of a snapshot shows that it adds more rows than it removes.

    Rows that the snapshot also deletes by position do not count. The result is False if the counts are uncertain: the
    number of removed rows is unknown, or equality deletes were added. It is also False for the undo of a rewrite, which
    adds rows again that had been deleted.
    """
    removed_rows = _count_removed_rows(summary)
    if removed_rows == _UNKNOWN or UNDONE in summary or parse_count(summary, "added-equality-deletes", 0):
        return False
    position_deletes = parse_count(summary, "added-position-deletes", 0)
    return parse_count(summary, "added-records", 0) - position_deletes > removed_rows


def _count_removed_rows(summary: Mapping[str, str]) -> int:
    """Return the number of removed rows, or `_UNKNOWN`.

    Writers omit a number that is 0, and some writers also omit a number that is unknown. So if the number is absent,
    it is 0 only if no data files were removed.
    """
    default_count = _UNKNOWN if parse_count(summary, "deleted-data-files", 0) else 0
    return parse_count(summary, "deleted-records", default_count)
