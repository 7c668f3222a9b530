"""Appends of engines to the table `t` of a catalog, and the state of the table afterwards."""

from __future__ import annotations

import json
from typing import Any

from seamark.metaserver.catalog.values import LoadedTable
from tests.catalog.appender import Appender, Commit, Row
from tests.catalog.rig import CALLER, Rig

DB = ("db",)
REBASE = {"seamark.commit.rebase": "append"}


async def create(it: Rig, version: int = 2, **properties: str) -> None:
    await it.table(properties={"format-version": str(version), **REBASE, **properties})


async def load(it: Rig) -> Row:
    entry = await it.catalog.tables.entry(DB, "t")
    found: Row = json.loads(await it.objects.read(entry.metadata_location))
    return found


async def commit(it: Rig, made: Commit) -> LoadedTable:
    return await it.commits.commit_table(CALLER, DB, "t", *made)


async def append(it: Rig, files: dict[str, int], **knobs: Any) -> Appender:
    """Return an append to the current table."""
    client = Appender(await load(it), **knobs)
    await commit(it, client.commit(files))
    return client


def head(metadata: Row, branch: str = "main") -> Row:
    snapshot_id = metadata["refs"][branch]["snapshot-id"]
    return next(one for one in metadata["snapshots"] if one["snapshot-id"] == snapshot_id)
