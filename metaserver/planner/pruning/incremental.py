"""Incremental scans: files that appends added."""

from __future__ import annotations

import numpy as np

from seamark.formats.iceberg.manifests.writer import ADDED
from seamark.formats.index.packing import MISSING
from seamark.metaserver.planner.view.selection import Selection


def keep_appended(selection: Selection, snapshot_ids: set[int]) -> None:
    """Keeps the entries that one of the snapshots added; an entry without a snapshot id inherits its manifest's."""
    view = selection.view
    appended_ids = np.array(sorted(snapshot_ids), dtype=np.int64)
    for number in np.flatnonzero(selection.state).tolist():
        block = view.blocks[number]
        ids = block.longs("snapshot_id")
        ids = np.where(ids == MISSING, view.manifests[number].added_snapshot_id or MISSING, ids)
        selection.keep(number, (block.longs("status") == ADDED) & np.isin(ids, appended_ids))
