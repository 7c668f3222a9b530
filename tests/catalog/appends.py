"""Appends of engines to the table `t` of a catalog, and the state of the table afterwards."""

from __future__ import annotations

import json
from typing import Any

from seamark.metaserver.catalog.values import LoadedTable
from tests.catalog.appender import Commit, EngineAppender, Row
from tests.catalog.rig import CALLER, CatalogRig

DB = ("db",)
REBASE = {"seamark.commit.rebase": "append"}


async def create_rebasing_table(rig: CatalogRig, version: int = 2, **properties: str) -> None:
    await rig.create_table(properties={"format-version": str(version), **REBASE, **properties})


async def load_metadata(rig: CatalogRig) -> Row:
    entry = await rig.catalog.tables.load_entry(DB, "t")
    row: Row = json.loads(await rig.objects.read(entry.metadata_location))
    return row


async def commit_table(rig: CatalogRig, commit: Commit) -> LoadedTable:
    return await rig.commits.commit_table(CALLER, DB, "t", *commit)


async def append_files(rig: CatalogRig, files: dict[str, int], **options: Any) -> EngineAppender:
    """Commit an append of these files to the current table, and return the appender. It has these options."""
    client = EngineAppender(await load_metadata(rig), **options)
    await commit_table(rig, client.commit(files))
    return client


def get_added_snapshot(commit: Commit) -> Row:
    """Return the snapshot that a commit adds with its first update."""
    _, updates = commit
    snapshot: Row = updates[0]["snapshot"]
    return snapshot


def find_head_snapshot(metadata: Row, branch: str = "main") -> Row:
    snapshot_id = metadata["refs"][branch]["snapshot-id"]
    return next(snapshot for snapshot in metadata["snapshots"] if snapshot["snapshot-id"] == snapshot_id)
