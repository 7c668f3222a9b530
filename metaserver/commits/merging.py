"""Small manifests made one, as Java's merge append does it (`ManifestMergeManager`, `MergingSnapshotProducer`).

Manifests of one spec and kind are put together from the oldest on, as many as fit the target size. The newest ones are
left alone until there are `commit.manifest.min-count-to-merge` of them, so that of a hundred appends one pays. Entries
of files that are there no more are not carried on; a manifest that tells what this very snapshot removes is therefore
left as it is, for a later commit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from metaserver.commits.manifests import Manifests
from metaserver.commits.writing import StoredManifest, Writer, target_size
from metaserver.iceberg.manifests.content_file import UNKNOWN, partition_types
from metaserver.iceberg.manifests.manifest import ManifestFile
from metaserver.iceberg.manifests.writer import ADDED, EXISTING, ManifestEntry
from metaserver.iceberg.metadata import properties as props
from metaserver.iceberg.metadata.metadata import TableMetadata
from metaserver.iceberg.types.values import LONG_MAX

ENABLED = "commit.manifest-merge.enabled"
MIN_COUNT = "commit.manifest.min-count-to-merge"
MIN_COUNT_DEFAULT = 100


class Merging:
    """Of one commit: what an attempt has merged, the next need not merge again."""

    def __init__(self, writer: Writer, manifests: Manifests) -> None:
        self._writer = writer
        self._manifests = manifests
        self._made: dict[tuple[object, ...], StoredManifest] = {}

    async def merge(
        self, listed: Sequence[ManifestFile], metadata: TableMetadata, sequence_number: int
    ) -> list[ManifestFile]:
        """The manifests of a snapshot, newest first, of which those of this snapshot say `sequence_number`."""
        if not props.as_bool(metadata.properties, ENABLED, True):
            return list(listed)
        least = max(2, props.as_int(metadata.properties, MIN_COUNT, MIN_COUNT_DEFAULT))
        found: list[ManifestFile] = []
        groups: dict[tuple[int, int], list[ManifestFile]] = {}
        for manifest in listed:
            mine = manifest.added_snapshot_id == self._writer.snapshot_id
            if (mine and manifest.deleted_files_count != 0) or manifest.manifest_length == 0:
                found.append(manifest)
            else:
                groups.setdefault((manifest.content, manifest.partition_spec_id), []).append(manifest)
        for (content, spec_id), group in groups.items():
            if not _can_be_written(metadata, spec_id):
                found += group
                continue
            for bin_ in _bins(group, target_size(metadata)):
                few = len(bin_) == 1 or (bin_[0] is group[0] and len(bin_) < least)
                if few or _rows(bin_) > LONG_MAX:
                    found += bin_
                else:
                    made = await self._merged(bin_, metadata, spec_id, content)
                    found.append(made.described(self._writer.snapshot_id, sequence_number))
        return found

    async def _merged(
        self, bin_: Sequence[ManifestFile], metadata: TableMetadata, spec_id: int, content: int
    ) -> StoredManifest:
        # What files inherit goes into the merged manifest, but for those of this snapshot.
        key = tuple(
            one.manifest_path
            if one.added_snapshot_id == self._writer.snapshot_id
            else (one.manifest_path, one.sequence_number, one.first_row_id)
            for one in bin_
        )
        made = self._made.get(key)
        if made is None:
            entries: list[ManifestEntry] = []
            for one in bin_:
                entries += [self._carried(entry) for entry in await self._manifests.entries(one, metadata)]
            made = self._made[key] = await self._writer.manifest(entries, metadata, spec_id, content)
        return made

    def _carried(self, entry: ManifestEntry) -> ManifestEntry:
        """What this snapshot added inherits its number still, so that the manifest serves another attempt, too."""
        if entry.status == ADDED and entry.snapshot_id == self._writer.snapshot_id:
            return ManifestEntry(ADDED, entry.snapshot_id, None, None, entry.file)
        return ManifestEntry(EXISTING, entry.snapshot_id, entry.sequence_number, entry.file_sequence_number, entry.file)


def _can_be_written(metadata: TableMetadata, spec_id: int) -> bool:
    """Whether partitions of the spec can be written again: the type of a value is not known any more once no schema
    has the column that it was made of."""
    spec = metadata.spec(spec_id)
    if spec is None:
        return True  # the first manifest that is read will say so
    kinds = partition_types(metadata, spec)
    return all(kind != UNKNOWN or field.is_void for field, kind in zip(spec.fields, kinds, strict=True))


def _rows(manifests: Sequence[ManifestFile]) -> int:
    """Which one manifest is to count in a long."""
    return sum((manifest.added_rows_count or 0) + (manifest.existing_rows_count or 0) for manifest in manifests)


def _bins(manifests: Sequence[ManifestFile], target_bytes: int) -> Iterator[Sequence[ManifestFile]]:
    """Neighbours that fit the target together, put up from the end: what does not fill one is the newest."""
    bins: list[list[ManifestFile]] = []
    size = 0
    for manifest in reversed(manifests):
        if not bins or size + manifest.manifest_length > target_bytes:
            bins.append([])
            size = 0
        bins[-1].insert(0, manifest)
        size += manifest.manifest_length
    return reversed(bins)
