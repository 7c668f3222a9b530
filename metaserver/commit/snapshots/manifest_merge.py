"""Merges small manifests, like Java's merge append (`ManifestMergeManager`, `MergingSnapshotProducer`).

Manifests of the same spec and content are packed into bins of the target size, beginning with the oldest. The newest
manifests stay unmerged until there are `commit.manifest.min-count-to-merge` of them, so only one in a hundred appends
takes the time for a merge. A merge does not copy DELETED entries. Therefore a manifest with files that this snapshot
removes is not merged by this commit, but by a later commit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from seamark.formats.iceberg.manifests.content_file import UNKNOWN, list_partition_types
from seamark.formats.iceberg.manifests.manifest import ManifestFile
from seamark.formats.iceberg.manifests.writer import ADDED, EXISTING, ManifestEntry
from seamark.formats.iceberg.metadata import properties as props
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.types.values import LONG_MAX
from seamark.metaserver.commit.snapshots.manifests import Manifests
from seamark.metaserver.commit.snapshots.snapshot_writer import SnapshotWriter, StoredManifest, get_target_bytes

ENABLED = "commit.manifest-merge.enabled"
MIN_COUNT = "commit.manifest.min-count-to-merge"
MERGED_MANIFESTS_MIN_DEFAULT = 100


class ManifestMerge:
    """Merges manifests for one commit. Later attempts reuse the merged manifests of earlier attempts."""

    def __init__(self, writer: SnapshotWriter, manifests: Manifests) -> None:
        self._writer = writer
        self._manifests = manifests
        self._merged_manifests: dict[tuple[object, ...], StoredManifest] = {}

    async def merge(
        self, manifest_files: Sequence[ManifestFile], metadata: TableMetadata, sequence_number: int
    ) -> list[ManifestFile]:
        """Return the manifests of the snapshot, the newest first. Manifests that it adds get `sequence_number`.

        Manifests of one content and spec are merged up to the target size. A new manifest with DELETED entries remains,
        because a merge keeps only live entries. If the property ENABLED is false, all manifests remain.
        """
        if not props.parse_bool(metadata.properties, ENABLED, True):
            return list(manifest_files)
        # A merge needs at least two manifests.
        min_count = max(2, props.parse_int(metadata.properties, MIN_COUNT, MERGED_MANIFESTS_MIN_DEFAULT))
        merged_manifests: list[ManifestFile] = []
        groups: dict[tuple[int, int], list[ManifestFile]] = {}
        for manifest in manifest_files:
            is_new = manifest.added_snapshot_id == self._writer.snapshot_id
            # A manifest of a snapshot without a manifest list has no known length. It cannot be packed by size.
            if (is_new and manifest.deleted_files_count != 0) or manifest.manifest_length == 0:
                merged_manifests.append(manifest)
            else:
                groups.setdefault((manifest.content, manifest.partition_spec_id), []).append(manifest)
        for (content, spec_id), group in groups.items():
            if not can_encode_partitions(metadata, spec_id):
                merged_manifests += group
                continue
            for bin_manifests in _pack_bins(group, get_target_bytes(metadata)):
                # Only the bin of the newest manifests, which are first in the group, waits for more manifests.
                is_too_small = len(bin_manifests) == 1 or (
                    bin_manifests[0] is group[0] and len(bin_manifests) < min_count
                )
                # A manifest list states the number of rows of a manifest as a long.
                if is_too_small or _count_rows(bin_manifests) > LONG_MAX:
                    merged_manifests += bin_manifests
                else:
                    stored = await self._merge_manifests(bin_manifests, metadata, spec_id, content)
                    merged_manifests.append(stored.describe(self._writer.snapshot_id, sequence_number))
        return merged_manifests

    async def _merge_manifests(
        self, bin_manifests: Sequence[ManifestFile], metadata: TableMetadata, spec_id: int, content: int
    ) -> StoredManifest:
        """Write one manifest with the live entries of several manifests, or return that of an earlier attempt."""
        # In the merged manifest, inherited values are explicit, except for files that this snapshot adds. So a later
        # attempt can reuse it only for the same values.
        key = tuple(
            manifest.manifest_path
            if manifest.added_snapshot_id == self._writer.snapshot_id
            else (manifest.manifest_path, manifest.sequence_number, manifest.first_row_id)
            for manifest in bin_manifests
        )
        stored_manifest = self._merged_manifests.get(key)
        if stored_manifest is None:
            entries: list[ManifestEntry] = []
            for manifest in bin_manifests:
                entries += [self._copy_entry(entry) for entry in await self._manifests.read_entries(manifest, metadata)]
            stored_manifest = self._merged_manifests[key] = await self._writer.write_manifest(
                entries, metadata, spec_id, content
            )
        return stored_manifest

    def _copy_entry(self, entry: ManifestEntry) -> ManifestEntry:
        """Return the entry for the merged manifest.

        A file that this snapshot adds inherits its sequence number, so a later attempt can reuse the manifest.
        """
        if entry.status == ADDED and entry.snapshot_id == self._writer.snapshot_id:
            return ManifestEntry(ADDED, entry.snapshot_id, None, None, entry.file)
        return ManifestEntry(EXISTING, entry.snapshot_id, entry.sequence_number, entry.file_sequence_number, entry.file)


def can_encode_partitions(metadata: TableMetadata, spec_id: int) -> bool:
    """Return whether partition values of the spec can be encoded.

    This is impossible if no schema has the source column of a field, because the type of the values is unknown.
    """
    spec = metadata.spec(spec_id)
    if spec is None:
        return True  # Reading a manifest of an unknown spec raises the error.
    kinds = list_partition_types(metadata, spec)
    return all(kind != UNKNOWN or field.is_void for field, kind in zip(spec.fields, kinds, strict=True))


def _count_rows(manifests: Sequence[ManifestFile]) -> int:
    """Return the total row count of the manifests. The caller merges only manifests whose total fits into 64 bits."""
    return sum((manifest.added_rows_count or 0) + (manifest.existing_rows_count or 0) for manifest in manifests)


def _pack_bins(manifests: Sequence[ManifestFile], target_bytes: int) -> Iterator[Sequence[ManifestFile]]:
    """Yield groups of neighbouring manifests with up to the target size.

    The groups are filled from the end of the list, where the oldest manifests are. So only the group of the newest
    manifests may be small.
    """
    bins: list[list[ManifestFile]] = []
    size = 0
    for manifest in reversed(manifests):
        if not bins or size + manifest.manifest_length > target_bytes:
            bins.append([])
            size = 0
        bins[-1].insert(0, manifest)
        size += manifest.manifest_length
    return reversed(bins)
