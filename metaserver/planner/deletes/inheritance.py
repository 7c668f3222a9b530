"""Values that manifest entries inherit from the manifest list: sequence numbers and first row ids.

They depend on the snapshot's manifest list: a manifest older than its table's row ids has a first row id only in later
snapshots (Iceberg spec, "Sequence Number Inheritance" and "First Row ID Inheritance").
"""

from __future__ import annotations

import numpy as np

from seamark.formats.iceberg.manifests.manifest import ManifestFile
from seamark.formats.iceberg.manifests.writer import ADDED
from seamark.formats.index.packing import MISSING, Longs
from seamark.formats.runtime.errors import Corrupt
from seamark.metaserver.index.blocks.block import Block


def sequence_numbers(manifest: ManifestFile, block: Block, rows: Longs) -> Longs:
    """int64[rows], data sequence numbers of these rows of the block: an added file without one inherits the manifest's.

    Corrupt, with the manifest's path, for a file without a sequence number that cannot inherit one.
    """
    sequences = block.longs("sequence_number")[rows]
    missing = sequences == MISSING
    if not missing.any():
        return sequences
    if manifest.sequence_number:
        # Version 1 manifests have the sequence number 0, and so do their entries.
        invalid = np.flatnonzero(missing & (block.longs("status")[rows] != ADDED))
        if len(invalid):
            name = block.text("file_path", int(rows[invalid[0]]))
            raise Corrupt(
                f"Manifest {block.location}: the entry of {name} has no sequence number, and its "
                "status is not ADDED, so it cannot inherit one"
            )
    return np.where(missing, manifest.sequence_number, sequences)


def first_row_ids(manifest: ManifestFile, block: Block, rows: Longs) -> Longs | None:
    """int64[rows], first row ids of data files: files without one are assigned ids in order, from the manifest's on.

    None if the manifest has no first row id; the files' own ids are then ignored.
    """
    if manifest.first_row_id is None or not len(rows):
        return None
    end = int(rows.max()) + 1
    own = block.longs("first_row_id")[:end]
    missing = own == MISSING
    counts = np.where(missing, block.longs("record_count")[:end], 0)
    assigned = np.where(missing, manifest.first_row_id + np.cumsum(counts) - counts, own)
    return assigned[rows]
