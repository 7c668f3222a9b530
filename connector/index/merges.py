"""Index files merged upward: many small ones of one definition become a larger one, which alone is asked.

As in a log-structured merge tree with tiers: what builds write is level 0; as soon as a level has `FANOUT` files, they
become one of the next. So a table has few index files however often it is written to, and each entry is copied once a
level. Entries are copied as bytes wherever their kind allows; no data file is read. A data file that is described twice
keeps the newer entry, and what no snapshot holds any more is left out.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from seamark.connector.client.storage import Storage
from seamark.connector.index.files import WrittenIndex
from seamark.metaserver.index.files.index_file import FilesTable, IndexFile, assemble, open_index_file
from seamark.metaserver.index.kinds.kinds import KINDS

FANOUT = 8
SIZE_MAX_BYTES = 512 << 20
"""What a merge makes at most, about; a file of half of that or more is merged no further."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Registered:
    """A live index file, as the catalog lists it."""

    location: str
    level: int
    size_bytes: int
    created_ms: int


def due(files: Iterable[Registered], *, fanout: int = FANOUT, size_max_bytes: int = SIZE_MAX_BYTES) -> list[Registered]:
    """The files that are to become one, oldest first; none when all is as it should be. The lowest level first."""
    levels: dict[int, list[Registered]] = {}
    for one in sorted(files, key=lambda one: (one.created_ms, one.location)):
        if one.size_bytes < size_max_bytes // 2:
            levels.setdefault(one.level, []).append(one)
    for _, listed in sorted(levels.items()):
        if len(listed) < fanout:
            continue
        chosen: list[Registered] = []
        size_bytes = 0
        for one in listed:
            if chosen and size_bytes + one.size_bytes > size_max_bytes:
                break
            chosen.append(one)
            size_bytes += one.size_bytes
        if len(chosen) > 1:
            return chosen
    return []


def merge_index_files(
    locations: Sequence[str], folder: str, storage: Storage, *, dropped: Mapping[str, Iterable[int]] | None = None
) -> WrittenIndex:
    """One index file of several of one table and definition, oldest first, written and durable.

    `dropped` tells, by location, the numbers of data files to leave out. `location` is None where nothing is left.
    Raises Corrupt or ValueError where one is damaged, naming it.
    """
    opened = [open_index_file(storage.read(location), location) for location in locations]
    said = {(one.header.table_uuid, one.header.definition, one.header.kind) for one in opened}
    if len(said) != 1:
        raise ValueError(f"index files of different tables or definitions cannot be merged: {', '.join(locations)}")
    kept = _kept(opened, dropped or {})
    if not any(mask.any() for mask in kept):
        return WrittenIndex(None, 0, 0, 0, ())
    header = opened[0].header
    kind = KINDS[header.kind]
    files = FilesTable.merged(zip((one.files for one in opened), kept, strict=True))
    parts = assemble(
        header.definition,
        header.kind,
        files,
        map(memoryview, kind.merge([(kind.open(one.blob), mask) for one, mask in zip(opened, kept, strict=True)])),
        table_uuid=header.table_uuid,
        field_ids=header.field_ids,
        level=max(one.header.level for one in opened) + 1,
    )
    location = f"{folder}/{uuid.uuid4()}.puffin"
    return WrittenIndex(location, len(files), files.rows, storage.write(location, parts), ())


def _kept(opened: Sequence[IndexFile], dropped: Mapping[str, Iterable[int]]) -> list[Mask]:
    """Of each file bool[data files]: not dropped, and in no newer file."""
    seen: set[tuple[int, int]] = set()
    kept: list[Mask] = []
    for one in reversed(opened):
        mask = np.ones(len(one.files), dtype=np.bool_)
        mask[list(dropped.get(one.header.location, ()))] = False
        for number, (high, low) in enumerate(one.files.ids.tolist()):
            if mask[number]:
                mask[number] = (high, low) not in seen
                seen.add((high, low))
        kept.append(mask)
    return kept[::-1]
