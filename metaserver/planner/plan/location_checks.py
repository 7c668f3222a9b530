"""Checks, after a snapshot's manifests are read, that the table may name the files that the snapshot lists.

Commits check paths (`metaserver/catalog/ownership/own_files.py`), but files can be overwritten afterwards, and
manifests and views in memory are keyed by path, for all tables. Before a view is planned for a table, this module
compares the folders of its manifest lists, manifests and files with the locations that the database records as claimed.
A file in a location that another table claims is refused, unless the table may name files there. A file in an unclaimed
location may be read.

The check is cheap: a block stores the common prefix of its paths, so one comparison covers all of them, once for each
view and table. Paths are compared one by one only where those of a block are both inside and outside a location.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from seamark.metaserver.catalog.ownership.claims import with_folders
from seamark.metaserver.catalog.parts import PATH_PROPERTIES
from seamark.metaserver.errors import BadRequest, Forbidden
from seamark.metaserver.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.index.blocks.block import Block
from seamark.metaserver.objects.locations import location_key, parse_location
from seamark.metaserver.planner.view.view import TableView
from seamark.metaserver.store.port import PointerStore

_SHOWN = 300
_DOTS = "/.."
"""A path with this may lead out of the location that it begins with."""


class LocationChecker:
    def __init__(self, store: PointerStore) -> None:
        self._store = store

    async def check(self, uuid: str, metadata: TableMetadata, lists: Sequence[str], view: TableView) -> None:
        """Forbidden if the snapshot names anything in a location that a table other than `uuid` claims."""
        manifests = [manifest.manifest_path for manifest in (*view.manifests, *view.delete_manifests)]
        own, roots = await self.check_paths(uuid, metadata, (*lists, *manifests))
        prefixes = tuple(root.encode() for root in roots)
        mixed: dict[str, list[Block]] = {}
        dotted: list[Block] = []
        for block in (*view.blocks, *view.delete_blocks):
            paths = block.packed_texts("file_path")
            if paths is None:
                continue
            if block.may_have_dots:
                dotted.append(block)
            if not (paths.common.startswith(prefixes) and prefixes):
                mixed.setdefault(_folder(paths.common.decode(errors="replace")), []).append(block)
        for part in await asyncio.to_thread(_dotted_folders, dotted) if dotted else ():
            await self._check(uuid, own, part)
        for folder, blocks in mixed.items():
            if not await self._check(uuid, own, folder, blocks=True):
                for part in await asyncio.to_thread(_folders_of, blocks, roots):
                    await self._check(uuid, own, part)

    async def check_paths(
        self, uuid: str, metadata: TableMetadata, paths: Iterable[str]
    ) -> tuple[set[str], tuple[str, ...]]:
        """Checks paths alone, as `check` does. Returns the table's own locations and the path prefixes within them."""
        claims = await self._store.claims(uuid)
        own = {claim.location for claim in claims}
        roots = await asyncio.to_thread(_roots, metadata, {claim.location for claim in claims if not claim.allowed})
        for folder in {_folder(path) for path in paths if not path.startswith(roots) or _DOTS in path}:
            await self._check(uuid, own, folder)
        return own, roots

    async def _check(self, uuid: str, own: set[str], folder: str, *, blocks: bool = False) -> bool:
        """Forbidden if the folder is in another table's location.

        Returns False if the folder contains locations of other tables, which only happens with `blocks`.
        """
        try:
            key = await asyncio.to_thread(lambda: location_key(parse_location(folder)))
        except BadRequest:
            if _DOTS in folder or "%2" in folder:
                raise Forbidden(
                    f"The snapshot names files in {folder[:_SHOWN]!r}; remove '..' and escapes from its paths"
                ) from None
            return not blocks  # not one of this server's stores; or the files are in several stores
        if not own.isdisjoint(with_folders(key)):
            return True
        overlapping = await self._store.claims_overlapping([key], uuid, 1 if blocks else 0)
        above = set(with_folders(key))
        if any(claim.location in above for claim in overlapping):
            raise Forbidden(
                f"The snapshot names files in {folder[:_SHOWN]!r}, a location of another table. A principal that may "
                "write the whole catalog can allow it in the table's property seamark.allowed-locations"
            )
        return not overlapping


def _roots(metadata: TableMetadata, places: set[str]) -> tuple[str, ...]:
    """Path prefixes within `places`, spelled as this table's writers spell them."""
    named = [metadata.location, *(metadata.properties[name] for name in PATH_PROPERTIES if name in metadata.properties)]
    prefixes = []
    for place in named:
        try:
            key = location_key(parse_location(place))
        except BadRequest:
            continue
        if not places.isdisjoint(with_folders(key)):
            prefixes.append(place.rstrip("/") + "/")
    return tuple(prefixes)


def _folders_of(blocks: Iterable[Block], roots: tuple[str, ...]) -> set[str]:
    folders: set[str] = set()
    for block in blocks:
        paths = (block.text("file_path", row) for row in range(block.rows))
        folders |= {_folder(path) for path in paths if path is not None and not path.startswith(roots)}
    return folders


def _dotted_folders(blocks: Iterable[Block]) -> set[str]:
    paths = (block.text("file_path", row) for block in blocks for row in range(block.rows))
    return {_folder(path) for path in paths if path is not None and _DOTS in path}


def _folder(path: str) -> str:
    return path.rpartition("/")[0]
