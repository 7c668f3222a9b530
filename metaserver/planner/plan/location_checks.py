"""Whether what a snapshot names is the table's to name, looked at when its manifests have been read.

Commits are checked (`metaserver/catalog/own_files.py`), but files may be written over afterwards, and the manifests and
views in memory go by paths, whichever table asks. So before anything is planned of a view for a table, the folders of
its manifest lists, manifests and files are compared with the places that are claimed in the database: what lies in
another's place is refused, unless the table may name files there. What lies where nobody claims anything may be read.

Cheap: a block knows what the paths of its files begin with, so that one comparison does for all of them, once for each
view and table. Paths are looked at one by one only where those of a block lie in and out of a place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from metaserver.catalog.claims import with_folders
from metaserver.catalog.parts import PATH_PROPERTIES
from metaserver.errors import BadRequest, Forbidden
from metaserver.iceberg.metadata.metadata import TableMetadata
from metaserver.index.blocks.block import Block
from metaserver.objects.locations import location_key, parse_location
from metaserver.planner.view.view import TableView
from metaserver.store.port import PointerStore

_SHOWN = 300


class Borders:
    def __init__(self, store: PointerStore) -> None:
        self._store = store

    async def check(self, uuid: str, metadata: TableMetadata, lists: Sequence[str], view: TableView) -> None:
        """Forbidden where something that the snapshot names lies in a place that is another's than `uuid`'s."""
        manifests = [one.manifest_path for one in (*view.manifests, *view.delete_manifests)]
        own, roots = await self.check_paths(uuid, metadata, (*lists, *manifests))
        beginnings = tuple(root.encode() for root in roots)
        mixed: dict[str, list[Block]] = {}
        for block in (*view.blocks, *view.delete_blocks):
            column = block.text_column("file_path")
            if column is not None and not (column.packed.common.startswith(beginnings) and beginnings):
                mixed.setdefault(_folder(column.packed.common.decode(errors="replace")), []).append(block)
        for folder, blocks in mixed.items():
            if not await self._check(uuid, own, folder, blocks=True):
                for one in await asyncio.to_thread(_folders_of, blocks, roots):
                    await self._check(uuid, own, one)

    async def check_paths(
        self, uuid: str, metadata: TableMetadata, paths: Iterable[str]
    ) -> tuple[set[str], tuple[str, ...]]:
        """As `check`, of paths alone. Returns the table's places and beginnings of paths in them."""
        claims = await self._store.claims(uuid)
        own = {claim.location for claim in claims}
        roots = await asyncio.to_thread(_roots, metadata, {claim.location for claim in claims if not claim.allowed})
        for folder in {_folder(path) for path in paths if not path.startswith(roots)}:
            await self._check(uuid, own, folder)
        return own, roots

    async def _check(self, uuid: str, own: set[str], folder: str, *, blocks: bool = False) -> bool:
        """Forbidden where the folder lies in another's place. False where it holds such places; with `blocks` alone."""
        try:
            key = await asyncio.to_thread(lambda: location_key(parse_location(folder)))
        except BadRequest:
            if "/.." in folder or "%2" in folder:
                raise Forbidden(f"The snapshot names files in {folder[:_SHOWN]!r}, which leads elsewhere") from None
            return not blocks  # where nothing of this server's lies; or the files lie in several stores
        if not own.isdisjoint(with_folders(key)):
            return True
        found = await self._store.claims_overlapping([key], uuid, 1 if blocks else 0)
        above = set(with_folders(key))
        if any(claim.location in above for claim in found):
            raise Forbidden(
                f"The snapshot names files in {folder[:_SHOWN]!r}, which is a place of another table; who may write "
                "the whole catalog allows it by the table's property seamark.allowed-locations"
            )
        return not found


def _roots(metadata: TableMetadata, places: set[str]) -> tuple[str, ...]:
    """Beginnings of paths that lie in `places`, as this table's writers write them."""
    named = [metadata.location, *(metadata.properties[name] for name in PATH_PROPERTIES if name in metadata.properties)]
    found = []
    for place in named:
        try:
            key = location_key(parse_location(place))
        except BadRequest:
            continue
        if not places.isdisjoint(with_folders(key)):
            found.append(place.rstrip("/") + "/")
    return tuple(found)


def _folders_of(blocks: Iterable[Block], roots: tuple[str, ...]) -> set[str]:
    found: set[str] = set()
    for block in blocks:
        paths = (block.text("file_path", row) for row in range(block.rows))
        found |= {_folder(path) for path in paths if path is not None and not path.startswith(roots)}
    return found


def _folder(path: str) -> str:
    return path.rpartition("/")[0]
