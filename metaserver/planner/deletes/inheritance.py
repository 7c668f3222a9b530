"""What entries of a manifest have from the manifest list, as they do not say it themselves: sequence numbers, row ids.

Of manifests as they are listed in one snapshot: a manifest that was written before its table had row ids has first row
ids only in snapshots since (Iceberg spec, "Sequence Number Inheritance" and "First Row ID Inheritance").
"""

from __future__ import annotations

import numpy as np

from metaserver.errors import Corrupt
from metaserver.iceberg.manifests.manifest import ManifestFile
from metaserver.iceberg.manifests.writer import ADDED
from metaserver.index.blocks.block import Block
from metaserver.index.blocks.packing import MISSING, Longs


def sequence_numbers(manifest: ManifestFile, block: Block, rows: Longs) -> Longs:
    """int64[rows], data sequence numbers of these rows of the block: an added file without one has its manifest's.

    Corrupt, naming the manifest, for a file that neither has one nor inherits it.
    """
    sequences = block.longs("sequence_number")[rows]
    missing = sequences == MISSING
    if not missing.any():
        return sequences
    if manifest.sequence_number:
        # In manifests of version 1, whose number is 0, there is nothing else to have.
        lost = np.flatnonzero(missing & (block.longs("status")[rows] != ADDED))
        if len(lost):
            name = block.text("file_path", int(rows[lost[0]]))
            raise Corrupt(
                f"Manifest {block.location}: the entry of {name} was not added there and has no sequence number"
            )
    return np.where(missing, manifest.sequence_number, sequences)


def first_row_ids(manifest: ManifestFile, block: Block, rows: Longs) -> Longs | None:
    """int64[rows] of data files: those that have none get theirs one after the other, from the manifest's on. None
    where the manifest has none; what is told of its files is of no use then."""
    if manifest.first_row_id is None or not len(rows):
        return None
    end = int(rows.max()) + 1
    own = block.longs("first_row_id")[:end]
    missing = own == MISSING
    counts = np.where(missing, block.longs("record_count")[:end], 0)
    found = np.where(missing, manifest.first_row_id + np.cumsum(counts) - counts, own)
    return found[rows]
