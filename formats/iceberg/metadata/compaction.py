"""The limits that decide whether a compaction is worth its costs.

The server proposes a compaction, and the client runs it. Both use these limits.
"""

from __future__ import annotations

from collections.abc import Iterable

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.snapshot import Snapshot

COMPACTED_BY = "compacted-by"
"""The key in the summary of a compaction's snapshot."""
MIN_FILES, MIN_FILES_DEFAULT = "seamark.compaction.min-files", 5
"""The minimum number of small files of a partition that are merged."""
SMALL_FILE_MAX_FRACTION, SMALL_SORTED_FILE_MAX_FRACTION = 0.75, 0.1
"""The fraction of the target size below which a file is small, without and with a sort order.

With a sort order, the writer ends a file when the sorted rows fill a buffer in memory, and the Parquet file is several
times smaller than the buffer.
"""
REPLACEMENTS_UNDONE = "seamark.replacements-undone"
"""The key in the summary of an engine's snapshot that lists the replacements that the snapshot undoes, newest first.

These replacements were committed after the engine had read the table.
"""
UNDONE = "undone-snapshot-id"
"""The key in the summary of an undo's snapshot. Its value is the id of the undone snapshot."""
_UNDONE_KEYS = {name: name.encode() for name in (UNDONE, REPLACEMENTS_UNDONE)}
UNDONE_KEPT_MS = 3_600_000
"""The time for which an undone snapshot stays in the table."""
_ID_DIGITS_MAX = 19
DELETED_ROWS_MIN_FRACTION = 0.1
"""The minimum fraction of deleted rows in a file, or in a table, that makes a rewrite worthwhile."""


def find_recently_undone(snapshots: Iterable[Snapshot], now_ms: int) -> frozenset[int]:
    """Return the snapshots that were undone in the last hour.

    A snapshot is undone by an undo, or by the commit of an engine that had read the table before this snapshot. Undone
    snapshots stay in the table for an hour because of the following case. An engine reads the table before the undo,
    expires snapshots, and commits the expiration after the undo. It then finds the undone snapshot among the remaining
    snapshots. Therefore it keeps the files that this snapshot had removed and that are back now.
    """
    snapshot_ids: set[int] = set()
    for snapshot in snapshots:
        if snapshot.timestamp_ms <= now_ms - UNDONE_KEPT_MS:
            continue
        # Search the encoded summary first, because decoding all summaries of a long history takes time.
        encoded_summary = bytes(snapshot.summary)
        for name in [name for name, encoded_key in _UNDONE_KEYS.items() if encoded_key in encoded_summary]:
            id_texts = snapshot.build_summary_map().get(name, "").split(",")
            snapshot_ids.update(
                int(text) for text in id_texts if text.isascii() and text.isdecimal() and len(text) <= _ID_DIGITS_MAX
            )
    return frozenset(snapshot_ids)


def get_small_file_fraction(metadata: TableMetadata) -> float:
    """Return the fraction of the target size below which a file of the table is small enough to be compacted.

    It is lower for sorted tables, because writers of sorted rows end files early: the rows fill a buffer in memory,
    and the Parquet file is several times smaller than the buffer.
    """
    return SMALL_SORTED_FILE_MAX_FRACTION if metadata.default_sort_order_id else SMALL_FILE_MAX_FRACTION
