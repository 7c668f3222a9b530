"""Finds delete files whose partition is not that of the data file to which they apply.

A reader matches deletes to data files by spec and partition. After a change of the partition spec, DuckDB 1.5.5 writes
the deletes for older data files into a manifest of the current spec (duckdb/duckdb-iceberg#1274). No reader applies
these position deletes, so deleted rows come back, and updated rows are doubled. A deletion vector is matched by its
data file, but Iceberg's planner omits it if the query has a filter that its partition does not match. DuckDB also
copies older deletes into manifests that state the current spec, while the manifest list states the right one.

Each such entry names a single data file, so the server looks up the partition of this file. Only manifests that have a
sign of the fault are looked up, because other engines write the right partitions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import structs

from seamark.formats.iceberg.manifests.content_file import DATA, POSITION_DELETES, ContentFile
from seamark.formats.iceberg.manifests.manifest import DecodedManifest, ManifestFile
from seamark.formats.iceberg.manifests.writer import ADDED, ManifestEntry
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.types.reserved import DELETED_PATH, FILE_PATH
from seamark.metaserver.commit.snapshots.manifest_filter import drop_dead_manifests
from seamark.metaserver.commit.snapshots.manifests import Manifests


def has_suspicious_partitions(manifest_rows: DecodedManifest, manifest: ManifestFile, metadata: TableMetadata) -> bool:
    """Return whether a manifest of deletes has a sign of partitions that are not those of the data files.

    The signs are a spec other than in the manifest list, partition fields of another spec, a partition value that is
    null, and the column in which DuckDB writes paths. A table with only one spec is not checked.

    Args:
        manifest_rows: The decoded manifest.
        manifest: The entry of the manifest in the manifest list.
        metadata: The table's metadata.
    """
    spec = metadata.spec(manifest.partition_spec_id)
    if spec is None or len(metadata.partition_specs) == 1 or manifest.content == DATA:
        return False
    if has_other_spec(manifest_rows, manifest):
        return True
    if {values.field_id for values in manifest_rows.partition} != {field.field_id for field in spec.fields}:
        return True
    if any(FILE_PATH in columns for columns in manifest_rows.bounds.values()):
        return True
    for values in manifest_rows.partition:
        if values.spans is not None and (values.spans.lengths < 0).any():
            return True
        if values.valid is not None and not np.all(values.valid):
            return True
    return False


def has_other_spec(manifest_rows: DecodedManifest, manifest: ManifestFile) -> bool:
    """Return whether a manifest states another partition spec than its manifest list. A missing spec counts as 0."""
    return manifest_rows.metadata.get("partition-spec-id", "0") != str(manifest.partition_spec_id)


def get_referenced_path(file: ContentFile) -> str | None:
    """Return the only data file to which a delete file applies, or None if there may be several.

    If the file does not name the data file, equal lower and upper bounds of the paths in it show that it has only one
    path.
    """
    if file.content != POSITION_DELETES:
        return None
    if file.referenced_data_file is not None:
        return file.referenced_data_file
    lower, upper = file.lower_bounds or {}, file.upper_bounds or {}
    for column in (DELETED_PATH, FILE_PATH):
        path = lower.get(column)
        if path and path == upper.get(column):
            try:
                return path.decode()
            except UnicodeDecodeError:
                return None
    return None


def assign_partitions_to_deletes(
    entries: Sequence[ManifestEntry], data_files: Mapping[str, ContentFile]
) -> list[ManifestEntry]:
    """Give added deletes the partition of their data file.

    Readers apply deletes only to data files of the same partition.

    Args:
        entries: The entries of a manifest.
        data_files: The live data files by path. Deletes of other files stay unchanged.

    Returns:
        The entries in the same order. Their files may have different specs.
    """
    assigned_entries: list[ManifestEntry] = []
    for entry in entries:
        path = get_referenced_path(entry.file) if entry.status == ADDED else None
        data_file = None if path is None else data_files.get(path)
        spec_and_partition = (entry.file.spec_id, entry.file.partition)
        if data_file is not None and spec_and_partition != (data_file.spec_id, data_file.partition):
            file = structs.replace(
                entry.file, spec_id=data_file.spec_id, partition=data_file.partition, referenced_data_file=path
            )
            entry = structs.replace(entry, file=file)
        assigned_entries.append(entry)
    return assigned_entries


async def find_data_files(
    manifests: Manifests, manifest_files: Sequence[ManifestFile], paths: set[str], metadata: TableMetadata
) -> dict[str, ContentFile]:
    """Return the live data files with these paths, by path."""
    data_manifests = [manifest for manifest in drop_dead_manifests(manifest_files) if manifest.content == DATA]
    data_files: dict[str, ContentFile] = {}
    for manifest in await manifests.find_listing_manifests(data_manifests, paths):
        for entry in await manifests.read_entries(manifest, metadata):
            if entry.is_live and entry.file.file_path in paths:
                data_files[entry.file.file_path] = entry.file
    return data_files
