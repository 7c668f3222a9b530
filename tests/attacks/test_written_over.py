"""Tests of metadata files that a table's writers have overwritten.

The server does not read an overwritten file that it wrote itself. If another catalog wrote the file and it names a
location of another table, the server writes and lists nothing there.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.api.client import VIEW_VERSION, Answer, build_property_commit
from tests.attacks.crafted import ATTACKER_TABLES
from tests.attacks.world import EVIL, NAMES, SCHEMA, AttackWorld, open_world

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
# Requests on tables and views whose metadata file was overwritten. "OWN" stands for the location of the table.
REQUESTS: dict[str, tuple[str, str, Any]] = {
    "a commit": ("POST", f"{NAMES}/tables/t", build_property_commit(x="1")),
    "a transaction": (
        "POST",
        "/v1/transactions/commit",
        {"table-changes": [{"identifier": {"namespace": [EVIL], "name": "t"}, **build_property_commit(x="1")}]},
    ),
    "a native commit": ("POST", f"{ATTACKER_TABLES}/t/commit", {"add": [_FILE]}),
    "an index": ("PUT", f"{ATTACKER_TABLES}/t/indexes/j", {"kind": "bloom", "columns": ["data"]}),
    "a build": ("POST", f"{ATTACKER_TABLES}/t/indexes/i/builds", None),
    "a list of index files": ("POST", f"{ATTACKER_TABLES}/t/indexes/rebuild-registry", None),
    "a plan table": ("POST", f"{ATTACKER_TABLES}/t/plan-tables", {"predicate": "id > 0"}),
    "a view's commit": (
        "POST",
        f"{NAMES}/views/v",
        {"updates": [{"action": "set-properties", "updates": {"x": "1"}}], "requirements": []},
    ),
}


async def _create_attackers_table(world: AttackWorld) -> str:
    """Create a table `t` with an index and a view `v`. Return the table's location."""
    answer = await world.ask_successfully("mallory", "POST", f"{NAMES}/tables", {"name": "t", "schema": SCHEMA})
    await world.ask_successfully("mallory", "PUT", f"{ATTACKER_TABLES}/t/indexes/i", _BLOOM)
    view = {"name": "v", "schema": SCHEMA, "view-version": VIEW_VERSION, "properties": {}}
    await world.ask_successfully("mallory", "POST", f"{NAMES}/views", view)
    return str(answer["metadata"]["location"])


async def _send_request(world: AttackWorld, request_name: str, own_location: str) -> Answer:
    method, path, body = REQUESTS[request_name]
    return await world.ask("mallory", method, path, json.loads(json.dumps(body).replace("OWN", own_location)))


async def _overwrite_metadata_file(world: AttackWorld, path: str, **changes: Any) -> None:
    """Overwrite the metadata file, as a principal with access to the table's folder can."""
    answer = await world.ask_successfully("mallory", "GET", path)
    metadata = {**json.loads(world.read(answer["metadata-location"])), **changes}
    world.write(answer["metadata-location"], json.dumps(metadata).encode())
    world.server.components.catalog.documents.cache.clear()


async def _register_without_digest(world: AttackWorld, kind: str, name: str) -> None:
    """Let an admin register the metadata file under a name without a digest, as another catalog would write it."""
    answer = await world.ask_successfully("mallory", "GET", f"{NAMES}/{kind}s/{name}")
    location = answer["metadata-location"].rpartition("/")[0] + "/v1.metadata.json"
    world.write(location, world.read(answer["metadata-location"]))
    if kind == "view":
        await world.ask_successfully("root", "DELETE", f"{NAMES}/views/{name}")
    body = {"name": name, "metadata-location": location, "overwrite": True}
    route = "register" if kind == "table" else "register-view"
    await world.ask_successfully(
        "root", "POST", f"{NAMES}/{route}", body if kind == "table" else {**body, "overwrite": False}
    )


@pytest.mark.each_value
@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize(
    ("kind", "file_name"),  # A metadata file is named by its content, or freely by another catalog.
    [
        ("location", "by content"),
        ("moved location", "freely"),
        pytest.param("moved location", "by content", marks=pytest.mark.slow),
        pytest.param("location", "freely", marks=pytest.mark.slow),
    ],
)
async def test_forged_metadata_causes_no_write_or_listing_elsewhere(
    tmp_path: Path, request_name: str, kind: str, file_name: str
) -> None:
    async with open_world(tmp_path, random.Random(7)) as world:
        own_location = await _create_attackers_table(world)
        if file_name == "freely":
            await _register_without_digest(world, "table", "t")
            await _register_without_digest(world, "view", "v")
        fingerprint_before = await world.compute_fingerprint()
        for path in (f"{NAMES}/tables/t", f"{NAMES}/views/v"):
            await _overwrite_metadata_file(world, path, location=world.hints[kind][0])
        world.touched_locations.clear()
        answer = await _send_request(world, request_name, own_location)
        assert answer.error[:2] == (403, "ForbiddenException"), answer.raw
        assert not world.list_touched_of_victim()
        assert await world.compute_fingerprint() == fingerprint_before


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("request_name", REQUESTS)
async def test_each_request_succeeds_with_unchanged_metadata(tmp_path: Path, request_name: str) -> None:
    async with open_world(tmp_path, random.Random(8)) as world:
        own_location = await _create_attackers_table(world)
        world.server.components.catalog.documents.cache.clear()
        answer = await _send_request(world, request_name, own_location)
        assert answer.status < 300, answer.raw


@pytest.mark.parametrize("codec", ["none", "gzip"])
async def test_overwritten_metadata_is_not_served(tmp_path: Path, codec: str) -> None:
    async with open_world(tmp_path, random.Random(12)) as world:
        await _create_attackers_table(world)
        properties = build_property_commit(**{"write.metadata.compression-codec": codec})
        loaded_table = await world.ask_successfully("mallory", "POST", f"{NAMES}/tables/t", properties)
        location = loaded_table["metadata-location"]
        whole_file, offset = world.read(location), 40
        documents = world.server.components.catalog.documents
        for changed_file in (
            whole_file + b" ",
            whole_file[:-1],
            whole_file[:offset] + bytes([whole_file[offset] ^ 1]) + whole_file[offset + 1 :],
        ):
            world.write(location, changed_file)
            documents.cache.clear()
            answer = await world.ask("mallory", "GET", f"{NAMES}/tables/t")
            assert answer.error[:2] == (403, "ForbiddenException"), answer.raw
            assert "overwritten" in answer.error[2]
            assert (await world.ask("root", "DELETE", f"{NAMES}/tables/t?purgeRequested=true")).status == 204
            dropped_tables = (await world.ask_successfully("root", "GET", "/api/v1/dropped"))["dropped"]
            (row,) = [dropped_table for dropped_table in dropped_tables if dropped_table["name"] == "t"]
            world.write(location, whole_file)
            documents.cache.clear()
            await world.ask_successfully("root", "POST", f"/api/v1/dropped/{row['id']}/undrop")
            assert (await world.ask_successfully("mallory", "GET", f"{NAMES}/tables/t"))[
                "metadata-location"
            ] == location


PATHS = (
    "write.metadata.path",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("write.data.path", "write.object-storage.path")),
)
REQUESTS_WITH_PATHS: dict[str, Callable[[dict[str, str]], tuple[str, str, Any]]] = {
    "a table": lambda paths: ("POST", f"{NAMES}/tables", {"name": "n", "schema": SCHEMA, "properties": paths}),
    "a staged table": lambda paths: (
        "POST",
        f"{NAMES}/tables/s",
        {"requirements": [{"type": "assert-create"}], "updates": [*_CREATION, _build_set_properties(paths)]},
    ),
    "a view": lambda paths: (
        "POST",
        f"{NAMES}/views",
        {"name": "n", "schema": SCHEMA, "view-version": VIEW_VERSION, "properties": paths},
    ),
    "a commit": lambda paths: (
        "POST",
        f"{NAMES}/tables/t",
        {"requirements": [], "updates": [_build_set_properties(paths)]},
    ),
    "a view's commit": lambda paths: (
        "POST",
        f"{NAMES}/views/v",
        {"requirements": [], "updates": [_build_set_properties(paths)]},
    ),
}
_CREATION: list[dict[str, Any]] = [
    {"action": "assign-uuid", "uuid": "7d1ba4c5-3f0a-4a61-9a0a-5b6f0f6f2f10"},
    {"action": "upgrade-format-version", "format-version": 2},
    {"action": "add-schema", "schema": SCHEMA, "last-column-id": 4},
    {"action": "set-current-schema", "schema-id": -1},
    {"action": "add-spec", "spec": {"spec-id": 0, "fields": []}},
    {"action": "set-default-spec", "spec-id": -1},
    {"action": "add-sort-order", "sort-order": {"order-id": 0, "fields": []}},
    {"action": "set-default-sort-order", "sort-order-id": -1},
    {"action": "set-location", "location": "OWN-staged"},
]


def _build_set_properties(properties: dict[str, str]) -> dict[str, Any]:
    return {"action": "set-properties", "updates": properties}


@pytest.mark.parametrize("request_name", REQUESTS_WITH_PATHS)
@pytest.mark.parametrize("name", PATHS)
async def test_no_file_is_written_to_a_path_that_another_table_has_claimed(
    tmp_path: Path, request_name: str, name: str
) -> None:
    """The attacker names a path that belongs to a table of the victim.

    This table was moved out of the attacker's namespace, so its location is still below the folder of this namespace.
    """
    async with open_world(tmp_path, random.Random(9)) as world:
        own_location = await _create_attackers_table(world)
        fingerprint_before = await world.compute_fingerprint()
        for location, status in ((world.hints["moved location"][0], 400), (f"{own_location}-more", 200)):
            world.touched_locations.clear()
            method, path, body = REQUESTS_WITH_PATHS[request_name]({name: location})
            text = json.dumps(body).replace("OWN", own_location)
            answer = await world.ask("mallory", method, path, json.loads(text))
            assert answer.status == status, answer.raw
            assert not world.list_touched_of_victim()
        assert await world.compute_fingerprint() == fingerprint_before


async def test_no_file_is_written_if_metadata_has_the_uuid_of_another_table(tmp_path: Path) -> None:
    async with open_world(tmp_path, random.Random(10)) as world:
        own_location = await _create_attackers_table(world)
        for uuid, location in (
            (world.hints["uuid"][0], world.hints["location"][0]),
            (world.hints["moved uuid"][0], world.hints["moved location"][0]),
            (world.hints["moved uuid"][0], f"{own_location}-staged"),
        ):
            world.touched_locations.clear()
            method, path, body = REQUESTS_WITH_PATHS["a staged table"]({})
            body["updates"] = [
                {**_CREATION[0], "uuid": uuid},
                *_CREATION[1:-1],
                {**_CREATION[-1], "location": location},
            ]
            answer = await world.ask("mallory", method, path, body)
            assert answer.status in (400, 403), answer.raw
            assert not world.touched_locations
