"""The route that lists, for a merge, entries of index files whose data files are in no snapshot of the table.

An entry serves every snapshot with its data file, so it can be removed only after the last of these snapshots has
expired. For a table with very many snapshots, the answer is empty, because keeping every entry is always correct.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from seamark.formats.index.packing import Longs
from seamark.formats.runtime.errors import BadRequest, CommitConflict
from seamark.metaserver.api.http.describe import BodySize, ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.api.indexes.index_state import (
    TableIndexes,
    load_requested_table,
    load_view,
    read_ids_or_quarantine,
)
from seamark.metaserver.api.indexes.indexes import NO_INDEX, find_defined_index
from seamark.metaserver.planner.indexes.coverage import compute_view_file_ids
from seamark.metaserver.planner.view.view import TableView

FILES_MAX = 1000
"""The maximum number of index files in one request."""
SNAPSHOTS_MAX = 1000
"""If the table has more snapshots than this, they are not searched."""
SECONDS_MAX = 20.0
"""The time limit for searching snapshots, in seconds. Entries that the search does not reach count as referenced."""


class UnreferencedFilesRequest(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """A request for the unreferenced entries of index files."""

    index_files: Annotated[list[str], doc("The locations of live index files.")]


class UnreferencedFilesResponse(msgspec.Struct):
    """The unreferenced entries of index files."""

    unreferenced: dict[str, list[int]] = msgspec.field(name="unheld")
    complete: bool


@Route(
    "POST",
    "/api/v1/tables/{namespace}/{table}/indexes/{index}/unheld",
    "listUnheldFiles",
    "List the data files that live index files still describe, but that no snapshot of the table contains",
    tags=("indexes",),
    body_size=BodySize.MEDIUM,
    answers=(
        ResponseSpec(
            200,
            "For the location of each index file, the numbers of its unreferenced data files, from 0. If complete is "
            "false, not all snapshots were read, and no file is listed",
            UnreferencedFilesResponse,
        ),
        NO_INDEX,
        ResponseSpec(409, "One of the files is not a live index file of this index"),
    ),
).takes(UnreferencedFilesRequest)
async def list_unreferenced_files(call: Call, body: UnreferencedFilesRequest) -> UnreferencedFilesResponse:
    """List the data files that live index files still describe, but that no snapshot of the table contains."""
    if len(body.index_files) > FILES_MAX:
        raise BadRequest(f"The request has more than {FILES_MAX} index files; send them in several requests")
    table = await load_requested_table(call)
    definition = find_defined_index(table.metadata, call.names[1])
    live_files = {file.location: file for file in table.registered.list_live_files(definition.id)}
    absent_locations = [location for location in body.index_files if location not in live_files]
    if absent_locations:
        raise CommitConflict(f"{absent_locations[0][:200]!r} is not a live index file of this index")
    chosen_files = [live_files[location] for location in dict.fromkeys(body.index_files)]
    ids_by_file = [await read_ids_or_quarantine(call, file) for file in chosen_files]
    ids = np.concatenate([np.empty((0, 2), dtype=np.uint64), *ids_by_file])
    is_unreferenced = await _are_unreferenced(call, table, ids)
    numbers_by_location: dict[str, list[int]] = {}
    if is_unreferenced is not None:
        starts = np.cumsum([0, *map(len, ids_by_file)]).tolist()
        for file, start, end in zip(chosen_files, starts, starts[1:], strict=False):
            if numbers := np.flatnonzero(is_unreferenced[start:end]).tolist():
                numbers_by_location[file.location] = numbers
    return UnreferencedFilesResponse(numbers_by_location, is_unreferenced is not None)


async def _are_unreferenced(
    call: Call, table: TableIndexes, ids: npt.NDArray[np.uint64]
) -> npt.NDArray[np.bool_] | None:
    """Return whether each file is in no snapshot, bool[n], or None if the search would take too long.

    Snapshots are read newest first, because the newest snapshot has most of the files.
    """
    metadata = table.metadata
    if len(metadata.snapshots) > SNAPSHOTS_MAX:
        return None
    newest_first = sorted(metadata.snapshots, key=lambda snapshot: -snapshot.timestamp_ms)
    clock = call.components.clock
    until_s = clock.monotonic() + SECONDS_MAX
    is_unreferenced = np.ones(len(ids), dtype=np.bool_)
    for snapshot in newest_first:
        if not is_unreferenced.any():
            break
        if clock.monotonic() > until_s:
            return None
        view = await load_view(call, metadata, snapshot.snapshot_id)
        remaining_positions = np.flatnonzero(is_unreferenced)
        view_positions = await asyncio.to_thread(_find_positions, view, ids[remaining_positions])
        is_unreferenced[remaining_positions[view_positions >= 0]] = False
    return is_unreferenced


def _find_positions(view: TableView, ids: npt.NDArray[np.uint64]) -> Longs:
    """Return the position of each file among the files of a snapshot, int64[n], or a negative number if it is absent.

    Args:
        view: The files of the snapshot.
        ids: The identities of the files to find, uint64[n, 2].
    """
    return compute_view_file_ids(view).find(ids)
