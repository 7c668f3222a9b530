"""Registration of the index files in the folder of a table that the registry does not contain.

Each index file contains everything that the registry records. The files in the folder are checked like the files of a
builder. If several files describe the same data files, merged and newer files are preferred. Files that the registry
lists as quarantined stay quarantined.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.index.definitions import IndexDefinition, read_definitions
from seamark.formats.index.kinds.kind import UnknownVersion
from seamark.formats.protocol.wire import FORMER_INDEX_FOLDER, INDEX_FOLDER
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import Corrupt, ObjectMissing, TooLarge
from seamark.metaserver.index.files.headers import IndexFileSummary, IndexReader
from seamark.metaserver.index.files.registry import IndexFiles, Registry
from seamark.metaserver.objects.port import ObjectInfo, ObjectStore
from seamark.metaserver.store.model import RegisteredIndexFile

FOLDER_FILES_MAX = 100_000
"""The maximum number of files in a folder of index files."""
_CONCURRENT_FILES_MAX = 32
_FILES_PER_REGISTRATION_MAX = 1000
_SHOWN_MAX = 500


class FolderIndexFile(NamedTuple):
    """An index file in the folder of a table, with its header and the ids of its data files."""

    info: ObjectInfo
    described: IndexFileSummary

    @property
    def rank(self) -> tuple[int, int, int, str]:
        """The sort key of the file.

        Merged files come before the files from which they were merged, and newer files come before older files.
        """
        return -self.described.header.level, -self.info.modified_ms, -self.described.header.files, self.info.location


class RebuiltRegistry(NamedTuple):
    """The result of a search in the folder of a table.

    Attributes:
        folder: The folder.
        registered_before: The number of files in the folder that were already in the registry.
        registered: The newly registered files of each index.
        redundant: The number of files whose data files are all described by other index files.
        left_out: The reasons why other files were not registered, by location.
    """

    folder: str
    registered_before: int
    registered: list[tuple[IndexDefinition, list[FolderIndexFile]]]
    redundant: int
    left_out: dict[str, str]


@dataclass(frozen=True)
class RegistryRebuild:
    """Registers the index files that it finds in the folders of tables."""

    objects: ObjectStore
    reader: IndexReader
    registry: Registry
    clock: Clock

    async def run(
        self, uuid: str, metadata: TableMetadata, registered_files: IndexFiles, folder: str = ""
    ) -> RebuiltRegistry:
        """Register the index files of one table that the registry lacks.

        Args:
            uuid: The UUID of the table.
            metadata: The metadata of the table, whose location the table has claimed.
            registered_files: The index files in the registry.
            folder: The folder of Seamark's files of the table, which the table has claimed. If empty, the location
                of the table is used.

        Raises:
            TooLarge: The folder has too many files.
        """
        location = folder or metadata.location.rstrip("/")
        registered_locations = {file.location for file in registered_files.files}
        folder_objects = [
            info for name in (INDEX_FOLDER, FORMER_INDEX_FOLDER) for info in await self._list(f"{location}/{name}")
        ]
        definitions = {definition.id: definition for definition in read_definitions(metadata).by_name.values()}
        unregistered = [info for info in folder_objects if info.location not in registered_locations]
        files, left_out = await self._describe_files(uuid, definitions, unregistered)
        files_by_definition: list[tuple[IndexDefinition, list[FolderIndexFile]]] = []
        redundant = 0
        for definition in definitions.values():
            candidates = sorted(
                (file for file in files if file.described.header.definition == definition.id),
                key=lambda file: file.rank,
            )
            needed_files = await self._select_needed(registered_files, definition, candidates)
            redundant += len(candidates) - len(needed_files)
            if needed_files:
                await self._register_files(uuid, definition, needed_files)
                files_by_definition.append((definition, needed_files))
        registered_before = sum(info.location in registered_locations for info in folder_objects)
        return RebuiltRegistry(
            f"{location}/{INDEX_FOLDER}", registered_before, files_by_definition, redundant, left_out
        )

    async def _list(self, folder: str) -> list[ObjectInfo]:
        """List the files of a folder, except unfinished files, whose names begin with a dot.

        Raises:
            TooLarge: The folder has more than FOLDER_FILES_MAX files.
        """
        folder_objects: list[ObjectInfo] = []
        async for info in self.objects.list(folder):
            _, _, name = info.location.rpartition("/")
            if not name.startswith("."):
                folder_objects.append(info)
            if len(folder_objects) > FOLDER_FILES_MAX:
                raise TooLarge(
                    f"{folder} has more than {FOLDER_FILES_MAX:,} files; delete the folder and build the indexes again"
                )
        return folder_objects

    async def _describe_files(
        self, uuid: str, definitions: Mapping[str, IndexDefinition], files: Sequence[ObjectInfo]
    ) -> tuple[list[FolderIndexFile], dict[str, str]]:
        """Read the summaries of files.

        Returns:
            The index files of the table's indexes, and the reasons why the other files were left out, by location.
        """
        slots = asyncio.Semaphore(_CONCURRENT_FILES_MAX)

        async def describe(info: ObjectInfo) -> IndexFileSummary | str:
            async with slots:
                try:
                    summary = await self.reader.describe(info.location, info.size_bytes)
                except (Corrupt, ObjectMissing) as error:
                    return error.message
                except UnknownVersion as error:
                    return str(error)
            header = summary.header
            if header.table_uuid != uuid:
                return f"the file belongs to table {header.table_uuid}"
            definition = definitions.get(header.definition)
            if definition is None or definition.kind != header.kind:
                return f"the table has no index {header.kind} {header.definition[:_SHOWN_MAX]}"
            return summary

        folder_files: list[FolderIndexFile] = []
        left_out: dict[str, str] = {}
        for info, result in zip(files, await asyncio.gather(*map(describe, files)), strict=True):
            if isinstance(result, str):
                left_out[info.location] = result
            else:
                folder_files.append(FolderIndexFile(info, result))
        return folder_files, left_out

    async def _select_needed(
        self, index_files: IndexFiles, definition: IndexDefinition, candidates: Sequence[FolderIndexFile]
    ) -> list[FolderIndexFile]:
        """Return the candidates with a data file that neither a live file nor an earlier candidate describes.

        The candidates stay in their order. Data files are compared by only one of the two numbers of their id, which
        is faster. If two data files have the same number, a candidate may be left out, and a data file without an
        index is indexed again.
        """
        if not candidates:
            return []
        live_summaries = []
        for file in index_files.list_live_files(definition.id):
            # Ignore a file that cannot be read. The next plan that uses the file quarantines it, so that later plans do
            # not use it.
            with suppress(Corrupt, ObjectMissing, UnknownVersion):
                live_summaries.append(await self.reader.describe(file.location, file.size_bytes))
        summaries = [*live_summaries, *(candidate.described for candidate in candidates)]
        half_ids = [summary.ids[:, 0] for summary in summaries]

        def choose_candidates() -> list[FolderIndexFile]:
            """Return the candidates that contain the first occurrence of a data file among all summaries.

            `owners` has, for each data file of the joined summaries, the number of its summary. The live files are
            first, so smaller numbers are not candidates.
            """
            owners = np.repeat(np.arange(len(half_ids)), [len(ids) for ids in half_ids])
            _, first_occurrences = np.unique(np.concatenate(half_ids), return_index=True)
            return [
                candidates[owner - len(live_summaries)]
                for owner in np.unique(owners[first_occurrences]).tolist()
                if owner >= len(live_summaries)
            ]

        return await asyncio.to_thread(choose_candidates)

    async def _register_files(self, uuid: str, definition: IndexDefinition, files: Sequence[FolderIndexFile]) -> None:
        """Add index files to the registry, in batches."""
        now_ms = self.clock.now_ms()
        new_files = [
            RegisteredIndexFile(
                uuid=uuid,
                location=file.info.location,
                definition=definition.id,
                kind=definition.kind,
                level=file.described.header.level,
                files=file.described.header.files,
                rows=file.described.header.rows,
                size_bytes=file.info.size_bytes,
                snapshot_id=None,
                created_ms=file.info.modified_ms,
                changed_ms=now_ms,
            )
            for file in files
        ]
        for start in range(0, len(new_files), _FILES_PER_REGISTRATION_MAX):
            batch = new_files[start : start + _FILES_PER_REGISTRATION_MAX]
            await self.registry.replace(uuid, definition.id, add=batch)
