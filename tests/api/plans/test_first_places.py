"""What a confined writer's commit may name is what its table comes to have by that very commit."""

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

from tests.api.client import SCHEMA, Answer
from tests.api.plans.planned import file_of
from tests.api.plans.test_foreign_files import Lake, lake, manifest, manifest_list
from tests.catalog.rig import first_updates

__all__ = ["lake"]


def _snapshot(snapshot_id: int, made: str, **more: Any) -> list[dict[str, Any]]:
    snapshot = {
        "snapshot-id": snapshot_id,
        "sequence-number": 1,
        "timestamp-ms": int(time.time() * 1000),
        "manifest-list": made,
        "summary": {"operation": "append"},
        "schema-id": 0,
        **more,
    }
    ref = {"action": "set-snapshot-ref", "ref-name": "main", "type": "branch", "snapshot-id": snapshot_id}
    return [{"action": "add-snapshot", "snapshot": snapshot}, ref]


async def _create(lake: Lake, name: str, *updates: dict[str, Any]) -> Answer:
    """As Spark's CREATE TABLE AS SELECT ends."""
    created = [*first_updates(str(uuid4()), SCHEMA), *updates]
    body = {"requirements": [{"type": "assert-create"}], "updates": created}
    return await lake("wendy", "POST", f"/v1/namespaces/mine/tables/{name}", body)


async def test_a_new_table_has_its_files_where_its_properties_say(lake: Lake) -> None:
    home = (await lake.folder("mine")).parent
    place, data = home / "ctas", home / "data-of-ctas"
    held = manifest(place / "metadata" / "m.avro", [file_of(f"file://{data}/a.parquet", 1, 9)], 5)
    made = manifest_list(place / "metadata" / "l.avro", [held])
    answer = await _create(
        lake,
        "ctas",
        {"action": "set-location", "location": f"file://{place}"},
        {"action": "set-properties", "updates": {"write.data.path": f"file://{data}"}},
        *_snapshot(5, made),
    )
    assert answer.status == 200, answer.raw


async def test_a_table_that_is_replaced_has_files_in_its_new_places(lake: Lake) -> None:
    home = (await lake.folder("mine")).parent
    place, data = home / "rtas", home / "data-of-rtas"
    held = manifest(place / "metadata" / "m.avro", [file_of(f"file://{data}/a.parquet", 1, 9)], 5)
    made = manifest_list(place / "metadata" / "l.avro", [held])
    updates = [
        {"action": "set-location", "location": f"file://{place}"},
        {"action": "set-properties", "updates": {"write.data.path": f"file://{data}"}},
        *_snapshot(5, made),
    ]
    body = {"requirements": [], "updates": updates}
    answer = await lake("wendy", "POST", "/v1/namespaces/mine/tables/t", body)
    assert answer.status == 200, answer.raw


async def test_a_place_that_a_commit_names_and_gives_up_is_not_the_tables(lake: Lake) -> None:
    home, theirs = (await lake.folder("mine")).parent, await lake.folder("theirs")
    there = f"file://{theirs}/metadata/snap.avro"
    place = {"action": "set-location", "location": f"file://{home}/x"}
    by_location = [{"action": "set-location", "location": f"file://{theirs}"}, place]
    set_path = {"action": "set-properties", "updates": {"write.data.path": f"file://{theirs}"}}
    by_property = [place, set_path, {"action": "remove-properties", "removals": ["write.data.path"]}]
    for updates in (by_location, by_property):
        answer = await _create(lake, "x", *updates, *_snapshot(5, there))
        assert answer.status == 400, answer.raw
        assert "outside the table's folders" in answer.json["error"]["message"]


async def test_malformed_updates_are_the_clients_mistake(lake: Lake) -> None:
    mine = await lake.folder("mine")
    made = manifest_list(mine / "metadata" / "l.avro", [])
    for updates in (
        [{"action": "set-location"}, *_snapshot(5, made)],
        [{"action": "set-location", "location": 5}, *_snapshot(5, made)],
        [{"action": "set-properties", "updates": []}, *_snapshot(5, made)],
        [{"action": "remove-properties", "removals": [[]]}, *_snapshot(5, made)],
        _snapshot(5, made, **{"parent-snapshot-id": [1]}),
        _snapshot(5, made, **{"parent-snapshot-id": 2**70}),
    ):
        answer = await _create(lake, "x", *updates)
        assert answer.status == 400, answer.raw
        for wanted in (
            [],
            [{"type": "assert-table-uuid", "uuid": str(uuid4())}],
        ):  # a body is read before it is checked
            body = {"requirements": wanted, "updates": updates}
            answer = await lake("wendy", "POST", "/v1/namespaces/mine/tables/t", body)
            assert answer.status == 400, answer.raw
