"""Metadata files lie where the writers of a table may write. One that says another place than the table's own does not
have the server write there, or tell what lies there."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.api.client import VIEW_VERSION, Answer, set_properties
from tests.attacks.crafted import OURS
from tests.attacks.world import EVIL, NAMES, SCHEMA, World, open_world

_BLOOM = {"kind": "bloom", "columns": ["id"]}
_FILE = {
    "spec-id": 0,
    "content": "data",
    "file-path": "OWN/data/0.parquet",
    "file-format": "parquet",
    "partition": [],
    "file-size-in-bytes": 1000,
    "record-count": 3,
}
WAYS: dict[str, tuple[str, str, Any]] = {
    "a commit": ("POST", f"{NAMES}/tables/t", set_properties(x="1")),
    "a transaction": (
        "POST",
        "/v1/transactions/commit",
        {"table-changes": [{"identifier": {"namespace": [EVIL], "name": "t"}, **set_properties(x="1")}]},
    ),
    "a native commit": ("POST", f"{OURS}/t/commit", {"add": [_FILE]}),
    "an index": ("PUT", f"{OURS}/t/indexes/j", {"kind": "bloom", "columns": ["data"]}),
    "a build": ("POST", f"{OURS}/t/indexes/i/builds", None),
    "a list of index files": ("POST", f"{OURS}/t/indexes/rebuild-registry", None),
    "a plan table": ("POST", f"{OURS}/t/plan-tables", {"predicate": "id > 0"}),
    "a view's commit": (
        "POST",
        f"{NAMES}/views/v",
        {"updates": [{"action": "set-properties", "updates": {"x": "1"}}], "requirements": []},
    ),
}


async def _attackers_own(world: World) -> str:
    """A table `t` with an index, and a view `v`; the table's location."""
    made = await world.good("mallory", "POST", f"{NAMES}/tables", {"name": "t", "schema": SCHEMA})
    await world.good("mallory", "PUT", f"{OURS}/t/indexes/i", _BLOOM)
    view = {"name": "v", "schema": SCHEMA, "view-version": VIEW_VERSION, "properties": {}}
    await world.good("mallory", "POST", f"{NAMES}/views", view)
    return str(made["metadata"]["location"])


async def _try(world: World, way: str, own: str) -> Answer:
    method, path, body = WAYS[way]
    return await world.ask("mallory", method, path, json.loads(json.dumps(body).replace("OWN", own)))


async def _forged(world: World, path: str, **changes: Any) -> None:
    """Writes over the metadata file, as who may write the table's folder can."""
    loaded = await world.good("mallory", "GET", path)
    metadata = {**loaded["metadata"], **changes}
    world.write(loaded["metadata-location"], json.dumps(metadata).encode())
    world.server.parts.catalog.documents.cache.clear()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["location", "moved location"])
async def test_forged_metadata_has_nothing_written_or_listed_elsewhere(tmp_path: Path, way: str, kind: str) -> None:
    async with open_world(tmp_path, random.Random(7)) as world:
        own = await _attackers_own(world)
        before = await world.fingerprint()
        for path in (f"{NAMES}/tables/t", f"{NAMES}/views/v"):
            await _forged(world, path, location=world.hints[kind][0])
        world.touched.clear()
        answer = await _try(world, way, own)
        assert answer.error[:2] == (403, "ForbiddenException"), answer.raw
        assert not world.touched_of_victim()
        assert await world.fingerprint() == before


@pytest.mark.parametrize("way", WAYS)
async def test_the_same_requests_work_while_metadata_are_as_they_were_written(tmp_path: Path, way: str) -> None:
    async with open_world(tmp_path, random.Random(8)) as world:
        own = await _attackers_own(world)
        for path in (f"{NAMES}/tables/t", f"{NAMES}/views/v"):
            await _forged(world, path)
        answer = await _try(world, way, own)
        assert answer.status < 300, answer.raw
