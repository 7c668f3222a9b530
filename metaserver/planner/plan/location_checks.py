"""Checks of the locations of the files that a snapshot lists, after its manifests are read.

Commits check paths (`metaserver/catalog/ownership/own_files.py`), but files can be overwritten afterwards. Also,
manifests and views in memory are keyed by path, for all tables. Before a view is planned for a table, this module
compares the folders of its manifest lists, manifests and files with the claims in the database. A file in a location
that another table claims is refused, unless the table may name files there. A file in an unclaimed location may be
read.

The check is cheap. A block stores the common prefix of its paths, so one comparison per view and table covers all
blocks with the same folder. The view of the next snapshot reuses the folders of unchanged blocks, and compares them
with the claims at that time. Paths are compared one by one only if a block has paths inside and outside a location.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.errors import BadRequest, Forbidden
from seamark.formats.storage.locations import parse_location, parse_stored_location
from seamark.metaserver.catalog.context import PATH_PROPERTIES
from seamark.metaserver.catalog.ownership.claims import list_keys_above
from seamark.metaserver.index.blocks.block import Block
from seamark.metaserver.objects.warehouse import Warehouse
from seamark.metaserver.planner.view.view import TableView
from seamark.metaserver.store.port import PointerStore

_SHOWN_CHARS_MAX = 300
_DOTS = "/.."
"""A text that a path may contain. Such a path may refer to a file outside the location that is its prefix."""
_ESCAPED_DOT_OR_SLASH = "%2"
"""The beginning of `%2E` and `%2F`, the escaped dot and slash."""
_COLUMNS = 4
_MANIFEST, _FILES, _DOTTED, _MAY_HAVE_DOTS = range(_COLUMNS)
"""The columns of the array `_Folders.blocks`."""
_FOLDERS_BYTES, _FOLDER_BYTES = 200, 60
"""The estimated memory of `_Folders` without its folders, and of one folder without its text."""


class LocationChecker:
    """Checks that a snapshot names no file in a location that another table claims."""

    def __init__(self, store: PointerStore, warehouse: Warehouse) -> None:
        self._store = store
        self._warehouse = warehouse

    async def check(self, uuid: str, metadata: TableMetadata, lists: Sequence[str], view: TableView) -> None:
        """Check that no other table claims a location that the snapshot names.

        Most files are in the table's own folders, so only paths outside of them are checked. Paths with `..` may lead
        to other folders, so they are always checked. For blocks, the common prefix of their paths is checked first.

        Raises:
            Forbidden: The snapshot names a file in a location that a table other than `uuid` claims.
        """
        deletes = [manifest.manifest_path for manifest in view.delete_manifests]
        own_locations, roots = await self.check_paths(uuid, metadata, (*lists, *deletes))
        prefixes = tuple(root.encode() for root in roots)
        # First check the folders of manifests.
        folders = _list_folders(view)
        for folder in folders.find_manifest_folders_to_check(prefixes):
            await self._check_folder(uuid, own_locations, folder)
        # Then collect the blocks with files outside of the table's folders, by the common folder of their files.
        blocks_by_folder = {
            folder: [view.blocks[number] for number in numbers]
            for folder, numbers in folders.find_blocks_by_unchecked_folder(prefixes).items()
        }
        blocks_with_dots = [
            view.blocks[number] for number in np.flatnonzero(folders.blocks[:, _MAY_HAVE_DOTS]).tolist()
        ]
        for block in view.delete_blocks:
            paths = block.get_packed_texts("file_path")
            if paths is None:
                continue
            if block.may_have_dots:
                blocks_with_dots.append(block)
            if not paths.common.startswith(prefixes):
                blocks_by_folder.setdefault(_get_folder(paths.common.decode(errors="replace")), []).append(block)
        for part in await asyncio.to_thread(_find_folders_with_dots, blocks_with_dots) if blocks_with_dots else ():
            await self._check_folder(uuid, own_locations, part)
        # If a common folder contains locations of other tables, check each folder with a file below it.
        for folder, blocks in blocks_by_folder.items():
            if not await self._check_folder(uuid, own_locations, folder, is_common_prefix=True):
                for part in await asyncio.to_thread(_collect_folders, blocks, roots):
                    await self._check_folder(uuid, own_locations, part)

    async def check_paths(
        self, uuid: str, metadata: TableMetadata, paths: Iterable[str]
    ) -> tuple[set[str], tuple[str, ...]]:
        """Check the locations of paths, without a `TableView`.

        Returns:
            The locations that the table may use, and the path prefixes of the locations that it claims itself.

        Raises:
            Forbidden: A path is in another table's location.
        """
        claims = await self._store.claims(uuid)
        own_locations = {claim.location for claim in claims}
        roots = _list_roots(self._warehouse, metadata, {claim.location for claim in claims if not claim.allowed})
        # A path with `..` may lead out of the root with which it begins.
        for folder in {_get_folder(path) for path in paths if not path.startswith(roots) or _DOTS in path}:
            await self._check_folder(uuid, own_locations, folder)
        return own_locations, roots

    async def _check_folder(
        self, uuid: str, own_locations: set[str], folder: str, *, is_common_prefix: bool = False
    ) -> bool:
        """Check one folder.

        Args:
            uuid: The UUID of the table.
            own_locations: The locations that the table may use.
            folder: The folder.
            is_common_prefix: Whether the folder is only a common prefix of paths, so that files may be in subfolders.

        Returns:
            False if the subfolders must be checked, because the folder contains locations of other tables or is not in
            the stores of this server. This happens only with `is_common_prefix`.

        Raises:
            Forbidden: The folder is in another table's location, or contains `..` or an escape, and its location is
                uncertain.
        """
        try:
            key = await asyncio.to_thread(lambda: self._warehouse.make_key(parse_stored_location(folder)))
        except BadRequest:
            if _DOTS in folder or _ESCAPED_DOT_OR_SLASH in folder:
                raise Forbidden(
                    f"The snapshot names files in {folder[:_SHOWN_CHARS_MAX]!r}; remove '..' and escapes from its paths"
                ) from None
            return (
                not is_common_prefix
            )  # The folder is not in this server's stores, or the files are in several stores.
        if not own_locations.isdisjoint(list_keys_above(key)):
            return True
        overlapping_claims = await self._store.find_overlapping_claims([key], uuid, 1 if is_common_prefix else 0)
        keys_above = set(list_keys_above(key))
        if any(claim.location in keys_above for claim in overlapping_claims):
            raise Forbidden(
                f"The snapshot names files in {folder[:_SHOWN_CHARS_MAX]!r}, a location of another table. A principal "
                "that may write the whole catalog can allow it in the table's property seamark.allowed-locations"
            )
        return not overlapping_claims


class _Folders:
    """The folders of a view's data manifests and of their files, in the spelling of the writers.

    The folders do not depend on claims.
    """

    __slots__ = ("blocks", "names")

    def __init__(self, view: TableView, base_folders: _Folders | None) -> None:
        """Read the folders of the blocks that are not in the view's base.

        Args:
            view: The view.
            base_folders: The folders of the view's base, which is a view that shares blocks. None if they are unknown.
        """
        number_by_folder: dict[bytes | None, int] = (
            {} if base_folders is None else {name: n for n, name in enumerate(base_folders.names)}
        )
        # The folders of the base keep their numbers, so that the rows of its blocks can be used unchanged.
        folder_rows = []
        for number in view.list_blocks_to_compute(base_folders):
            path, block = view.manifests[number].manifest_path, view.blocks[number]
            paths = block.get_packed_texts("file_path")
            manifest_folder = _get_folder(path).encode("utf-8", "surrogatepass")
            # The packed texts of a block are stored without their common prefix, which is known without reading them.
            data_folder = None if paths is None else paths.common.rpartition(b"/")[0]
            folder_rows.append(
                (
                    number_by_folder.setdefault(manifest_folder, len(number_by_folder)),
                    number_by_folder.setdefault(data_folder, len(number_by_folder)),
                    _DOTS in path,
                    paths is not None and block.may_have_dots,
                )
            )
        blocks = np.array(folder_rows, dtype=np.int32).reshape(len(folder_rows), _COLUMNS)
        # Add the rows of the blocks that the view shares with its base.
        self.blocks: npt.NDArray[np.int32] = view.join_base(
            blocks, None if base_folders is None else base_folders.blocks
        )
        """int32[blocks, 4]: for each block, the folder of its manifest, the common folder of its files, whether the
        manifest's path has dots, and whether the path of a file may have dots. Folders are positions in `names`.
        """
        # The columns before `_DOTTED` are folders. Drop the folders of the base that no block has.
        used_numbers, positions = np.unique(self.blocks[:, :_DOTTED], return_inverse=True)
        self.blocks[:, :_DOTTED] = positions.reshape(len(self.blocks), _DOTTED)
        all_folders = list(number_by_folder)
        self.names: list[bytes | None] = [all_folders[number] for number in used_numbers.tolist()]
        """The folders. None represents the files of blocks without paths."""

    @property
    def size_bytes(self) -> int:
        return _FOLDERS_BYTES + self.blocks.nbytes + sum(_FOLDER_BYTES + len(name or b"") for name in self.names)

    def _find_outside(self, prefixes: tuple[bytes, ...]) -> npt.NDArray[np.bool_]:
        """Return whether each folder is outside the table's own folders, bool[names].

        Args:
            prefixes: The path prefixes of the table's own folders. Each ends with a slash, so a path begins with a
                prefix if and only if its folder does.
        """
        return np.array([name is not None and not (name + b"/").startswith(prefixes) for name in self.names], np.bool_)

    def find_manifest_folders_to_check(self, prefixes: tuple[bytes, ...]) -> set[str]:
        """Return the folders of manifests whose path is outside the prefixes, or contains `..`."""
        numbers = self.blocks[:, _MANIFEST]
        is_checked = self._find_outside(prefixes)[numbers] | (self.blocks[:, _DOTTED] != 0)
        return {
            (self.names[number] or b"").decode("utf-8", "surrogatepass")
            for number in np.unique(numbers[is_checked]).tolist()
        }

    def find_blocks_by_unchecked_folder(self, prefixes: tuple[bytes, ...]) -> dict[str, list[int]]:
        """Return the folders outside the prefixes, each with the numbers of the blocks whose files it contains."""
        numbers = self.blocks[:, _FILES]
        blocks_by_folder: dict[str, list[int]] = {}
        for block in np.flatnonzero(self._find_outside(prefixes)[numbers]).tolist():
            blocks_by_folder.setdefault((self.names[numbers[block]] or b"").decode(errors="replace"), []).append(block)
        return blocks_by_folder


def _list_folders(view: TableView) -> _Folders:
    """Return the folders of the files of a view. They are cached with the view.

    The base is a view that shares blocks. Only the folders of other blocks are computed.
    """
    folders = view.derived.get(_Folders)
    if folders is None:
        base = view.base
        base_folders = None if base is None else base.derived.get(_Folders)
        folders = view.derived.keep(_Folders(view, base_folders))
    return folders


def _list_roots(warehouse: Warehouse, metadata: TableMetadata, locations: set[str]) -> tuple[str, ...]:
    """Return the path prefixes of the table's own locations, in the spelling of its writers.

    One location can have several spellings, such as `s3://` and `s3a://`. The spelling in the paths of files is that in
    the metadata.

    Args:
        warehouse: The warehouse, which converts a spelling to a key.
        metadata: The metadata of the table, with its locations.
        locations: The keys of the locations that the table has claimed.
    """
    table_locations = [
        metadata.location,
        *(metadata.properties[name] for name in PATH_PROPERTIES if name in metadata.properties),
    ]
    prefixes = []
    for location in table_locations:
        try:
            key = warehouse.make_key(parse_location(location))
        except BadRequest:
            continue
        if not locations.isdisjoint(list_keys_above(key)):
            prefixes.append(location.rstrip("/") + "/")
    return tuple(prefixes)


def _collect_folders(blocks: Iterable[Block], roots: tuple[str, ...]) -> set[str]:
    """Return the folders of the blocks' files that are outside the path prefixes `roots`."""
    folders: set[str] = set()
    for block in blocks:
        paths = (block.read_text("file_path", row) for row in range(block.rows))
        folders |= {_get_folder(path) for path in paths if path is not None and not path.startswith(roots)}
    return folders


def _find_folders_with_dots(blocks: Iterable[Block]) -> set[str]:
    """Return the folders of the blocks' files whose paths contain `..`."""
    paths = (block.read_text("file_path", row) for block in blocks for row in range(block.rows))
    return {_get_folder(path) for path in paths if path is not None and _DOTS in path}


def _get_folder(path: str) -> str:
    """Return the folder of a path, without a slash at the end."""
    return path.rpartition("/")[0]
