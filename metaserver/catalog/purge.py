"""Every file a table's metadata leads to, in an order to delete them in: what names a file comes after it."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from typing import Any

import fastavro

from metaserver.catalog.parts import PATH_PROPERTIES, Parts
from metaserver.errors import NotFound, ObjectMissing
from metaserver.objects.locations import parse_location

_MANIFEST_LIMIT_BYTES = 1 << 30


async def reachable_files(parts: Parts, metadata_location: str) -> AsyncIterator[str]:
    """Locations of data and delete files, manifests, manifest lists, statistics, older metadata files, and last the
    metadata file itself. Only those below the table's own location and its `write.*.path` properties, and inside the
    warehouse: metadata can name any file, and a table that names another's must not take them along. Missing
    manifests lead nowhere and are passed over."""
    try:
        metadata = await parts.documents.table(metadata_location)
    except NotFound:
        return
    folders = [metadata.location, *(metadata.properties[key] for key in PATH_PROPERTIES if key in metadata.properties)]
    own = [parse_location(folder) for folder in folders if parts.warehouse.contains(folder)]

    def allowed(location: str) -> bool:
        return parts.warehouse.contains(location) and any(root.holds(parse_location(location)) for root in own)

    seen: set[str] = set()
    manifests: list[str] = []
    lists = [snapshot.manifest_list for snapshot in metadata.snapshots if snapshot.manifest_list]
    for location in lists:
        if allowed(location):
            manifests += [row["manifest_path"] for row in await _rows(parts, location)]
    for snapshot in metadata.snapshots:
        manifests += snapshot.manifests or ()
    for manifest in dict.fromkeys(manifests):
        if not allowed(manifest):
            continue
        for row in await _rows(parts, manifest):
            path = row["data_file"]["file_path"]
            if allowed(path) and path not in seen:
                seen.add(path)
                yield path
    for manifest in dict.fromkeys(manifests):
        if allowed(manifest):
            yield manifest
    statistics = [entry.statistics_path for entry in metadata.statistics]
    statistics += [entry.statistics_path for entry in metadata.partition_statistics]
    older = [entry.metadata_file for entry in metadata.metadata_log]
    for location in dict.fromkeys([*lists, *statistics, *older]):
        if allowed(location):
            yield location
    if allowed(metadata_location):
        yield metadata_location


async def _rows(parts: Parts, location: str) -> list[dict[str, Any]]:
    try:
        data = await parts.objects.read(location, limit_bytes=_MANIFEST_LIMIT_BYTES)
    except ObjectMissing:
        return []
    return await asyncio.to_thread(_decode, data)


def _decode(data: bytes) -> list[dict[str, Any]]:
    try:
        return [row for row in fastavro.reader(io.BytesIO(data)) if isinstance(row, dict)]
    except (ValueError, EOFError, IndexError, KeyError, StopIteration):
        return []  # a broken manifest leads nowhere; its own file is still removed
