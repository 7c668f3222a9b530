"""The route that lists unreferenced entries for a merge: data files of index files that are in no snapshot of the
table.

An entry serves every snapshot, so it can be removed only when the last snapshot with its data file has expired. For a
table with very many snapshots the answer is empty; keeping every entry is always correct.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from aiohttp import web

from seamark.metaserver.api.http.describe import NAMESPACE, TABLE, ResponseSpec, describe
from seamark.metaserver.api.http.keys import CLOCK
from seamark.metaserver.api.http.render import json_answer
from seamark.metaserver.api.http.requests import allow, path_name, path_namespace, read_json
from seamark.metaserver.api.indexes.index_state import READER, TableIndexes, load, view_of
from seamark.metaserver.api.indexes.indexes import INDEX, NO_INDEX, defined_index
from seamark.metaserver.errors import BadRequest, CommitConflict
from seamark.metaserver.index.blocks.packing import Longs
from seamark.metaserver.planner.indexes.coverage import file_ids_of
from seamark.metaserver.planner.view.view import TableView

FILES_MAX = 1000
"""The limit of index files in one request."""
SNAPSHOTS_MAX = 1000
SECONDS_MAX = 20.0
"""The time limit for searching snapshots; entries that were not reached count as referenced."""


class UnheldBody(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    index_files: list[str]


@describe(
    "listUnheldFiles",
    "Lists data files in live index files that no snapshot of the table contains",
    tags=("indexes",),
    parameters=(NAMESPACE, TABLE, INDEX),
    body={
        "type": "object",
        "required": ["index-files"],
        "additionalProperties": False,
        "properties": {"index-files": {"type": "array", "items": {"type": "string"}, "description": "Locations."}},
    },
    answers=(
        ResponseSpec(
            200,
            "By location the numbers, from 0, of data files in the index file. If complete is false, not all "
            "snapshots were read, and no file is listed",
            {
                "type": "object",
                "required": ["unheld", "complete"],
                "properties": {
                    "unheld": {
                        "type": "object",
                        "additionalProperties": {"type": "array", "items": {"type": "integer"}},
                    },
                    "complete": {"type": "boolean"},
                },
            },
        ),
        NO_INDEX,
        ResponseSpec(409, "One of them is not a live index file of this index"),
    ),
)
async def list_unheld_files(request: web.Request) -> web.Response:
    allow(request, path_namespace(request))
    body = await read_json(request, UnheldBody)
    if len(body.index_files) > FILES_MAX:
        raise BadRequest(f"The request has more than {FILES_MAX} index files; send them in several requests")
    table = await load(request, path_namespace(request), path_name(request, "table"))
    definition = defined_index(table.metadata, path_name(request, "index"))
    live = {file.location: file for file in table.registered.live(definition.id)}
    absent = [location for location in body.index_files if location not in live]
    if absent:
        raise CommitConflict(f"{absent[0][:200]!r} is not a live index file of this index")
    chosen = [live[location] for location in dict.fromkeys(body.index_files)]
    described = [await request.app[READER].describe(file.location, file.size_bytes) for file in chosen]
    ids = np.concatenate([np.empty((0, 2), dtype=np.uint64), *(summary.ids for summary in described)])
    unheld = await _unheld(request, table, ids)
    numbers_by_location: dict[str, list[int]] = {}
    if unheld is not None:
        starts = np.cumsum([0, *(len(summary.ids) for summary in described)]).tolist()
        for file, first, end in zip(chosen, starts, starts[1:], strict=False):
            if numbers := np.flatnonzero(unheld[first:end]).tolist():
                numbers_by_location[file.location] = numbers
    answer: dict[str, Any] = {"unheld": numbers_by_location, "complete": unheld is not None}
    return json_answer(answer)


async def _unheld(
    request: web.Request, table: TableIndexes, ids: npt.NDArray[np.uint64]
) -> npt.NDArray[np.bool_] | None:
    """bool[n]: in no snapshot; None when the search would take too long. Newest first: it has most of the files."""
    metadata = table.metadata
    if len(metadata.snapshots) > SNAPSHOTS_MAX:
        return None
    newest_first = sorted(metadata.snapshots, key=lambda snapshot: -snapshot.timestamp_ms)
    clock = request.app[CLOCK]
    until_s = clock.monotonic() + SECONDS_MAX
    unheld = np.ones(len(ids), dtype=np.bool_)
    for snapshot in newest_first:
        if not unheld.any():
            break
        if clock.monotonic() > until_s:
            return None
        view = await view_of(request, metadata, snapshot.snapshot_id)
        left = np.flatnonzero(unheld)
        rows = await asyncio.to_thread(_find, view, ids[left])
        unheld[left[rows >= 0]] = False
    return unheld


def _find(view: TableView, ids: npt.NDArray[np.uint64]) -> Longs:
    return file_ids_of(view).find(ids)


def add_routes(app: web.Application) -> None:
    app.router.add_post(
        "/api/v1/tables/{namespace:[^/]+}/{table:[^/]+}/indexes/{index:[^/]+}/unheld", list_unheld_files
    )
