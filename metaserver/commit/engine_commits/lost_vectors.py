"""Finds deletion vectors that a commit removes by mistake, so that deleted rows would come back.

A Puffin file may contain the vectors of several data files. DuckDB 1.5.5 removes delete files by path. If it replaces
one vector of such a file, it marks all vectors of the file as DELETED, but it writes a new vector only for the data
files whose rows it deletes. The rows of the other data files would come back.

A vector is lost if all of these hold:

- The snapshot removes it, and replaces another vector of the same Puffin file.
- The snapshot has no new vector for its data file.
- Its data file is still live.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import structs

from seamark.formats.iceberg.manifests.content_file import DATA
from seamark.formats.iceberg.manifests.manifest import ManifestFile
from seamark.formats.iceberg.manifests.writer import EXISTING, ManifestEntry
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.commit.snapshots.manifest_filter import drop_dead_manifests, make_file_key
from seamark.metaserver.commit.snapshots.manifests import Manifests


def select_candidates(removed_vectors: Iterable[ManifestEntry], replaced_data_files: set[str]) -> list[ManifestEntry]:
    """Return the removed deletion vectors that an engine may have removed by mistake.

    A Puffin file may contain the vectors of several data files. Some engines replace one vector of such a file, and
    then mark all of its vectors as removed. So the result has the vectors without a successor whose Puffin file has
    another vector with a successor.

    Args:
        removed_vectors: The entries of vectors that the snapshot marks as DELETED.
        replaced_data_files: The paths of the data files for which the snapshot adds a vector.
    """
    vectors = list(removed_vectors)
    touched_puffins = {
        entry.file.file_path for entry in vectors if entry.file.referenced_data_file in replaced_data_files
    }
    return [
        entry
        for entry in vectors
        if entry.file.file_path in touched_puffins and entry.file.referenced_data_file not in replaced_data_files
    ]


async def read_lost_vectors(
    manifests: Manifests,
    parent_manifests: Sequence[ManifestFile],
    candidates: Sequence[ManifestEntry],
    live_paths: set[str],
    metadata: TableMetadata,
) -> list[ManifestEntry]:
    """Return the entries of lost vectors as in the parent snapshot, with the status EXISTING.

    A lost vector is a candidate whose data file is still live.

    Args:
        manifests: Reads the manifests of the parent.
        parent_manifests: The manifests of the parent.
        candidates: The result of `select_candidates`.
        live_paths: The data files of the candidates that are live in the new snapshot.
        metadata: The metadata of the table.

    Raises:
        Corrupt: A manifest cannot be decoded.
    """
    lost_keys = {make_file_key(entry.file) for entry in candidates if entry.file.referenced_data_file in live_paths}
    delete_manifests = [manifest for manifest in drop_dead_manifests(parent_manifests) if manifest.content != DATA]
    puffin_paths = {key.file_path for key in lost_keys}
    lost_entries: list[ManifestEntry] = []
    for manifest in await manifests.find_listing_manifests(delete_manifests, puffin_paths):
        entries = await manifests.read_entries(manifest, metadata)
        lost_entries += [entry for entry in entries if make_file_key(entry.file) in lost_keys]
    return [structs.replace(entry, status=EXISTING) for entry in lost_entries]
