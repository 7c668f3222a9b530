"""Tests that a writer of one namespace may commit only files in locations that the table has after the commit."""

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

from tests.api.client import SCHEMA, Answer
from tests.api.plans.planned import build_data_file
from tests.api.plans.test_foreign_files import TwoNamespaces, lake, write_manifest, write_manifest_list
from tests.catalog.rig import build_creation_updates

__all__ = ["lake"]


def _build_snapshot_updates(snapshot_id: int, manifest_list: str, **fields: Any) -> list[dict[str, Any]]:
    snapshot = {
        "snapshot-id": snapshot_id,
        "sequence-number": 1,
        "timestamp-ms": int(time.time() * 1000),
        "manifest-list": manifest_list,
        "summary": {"operation": "append"},
        "schema-id": 0,
        **fields,
    }
    ref = {"action": "set-snapshot-ref", "ref-name": "main", "type": "branch", "snapshot-id": snapshot_id}
    return [{"action": "add-snapshot", "snapshot": snapshot}, ref]


async def create_table_with_rows(lake: TwoNamespaces, name: str, *updates: dict[str, Any]) -> Answer:
    """Create a table with further updates in one commit, as Spark does at the end of CREATE TABLE AS SELECT."""
    updates_of_creation = [*build_creation_updates(str(uuid4()), SCHEMA), *updates]
    body = {"requirements": [{"type": "assert-create"}], "updates": updates_of_creation}
    return await lake("wendy", "POST", f"/v1/namespaces/mine/tables/{name}", body)


async def test_new_table_may_have_files_in_locations_of_its_properties(lake: TwoNamespaces) -> None:
    home = (await lake.find_folder("mine")).parent
    table_folder, data_folder = home / "ctas", home / "data-of-ctas"
    data_manifest = write_manifest(
        table_folder / "metadata" / "m.avro", [build_data_file(f"file://{data_folder}/a.parquet", 1, 9)], 5
    )
    list_location = write_manifest_list(table_folder / "metadata" / "l.avro", [data_manifest])
    answer = await create_table_with_rows(
        lake,
        "ctas",
        {"action": "set-location", "location": f"file://{table_folder}"},
        {"action": "set-properties", "updates": {"write.data.path": f"file://{data_folder}"}},
        *_build_snapshot_updates(5, list_location),
    )
    assert answer.status == 200, answer.raw


async def test_replaced_table_may_have_files_in_its_new_locations(lake: TwoNamespaces) -> None:
    home = (await lake.find_folder("mine")).parent
    table_folder, data_folder = home / "rtas", home / "data-of-rtas"
    data_manifest = write_manifest(
        table_folder / "metadata" / "m.avro", [build_data_file(f"file://{data_folder}/a.parquet", 1, 9)], 5
    )
    list_location = write_manifest_list(table_folder / "metadata" / "l.avro", [data_manifest])
    updates = [
        {"action": "set-location", "location": f"file://{table_folder}"},
        {"action": "set-properties", "updates": {"write.data.path": f"file://{data_folder}"}},
        *_build_snapshot_updates(5, list_location),
    ]
    body = {"requirements": [], "updates": updates}
    answer = await lake("wendy", "POST", "/v1/namespaces/mine/tables/t", body)
    assert answer.status == 200, answer.raw


async def test_location_set_and_removed_by_one_commit_does_not_belong_to_the_table(lake: TwoNamespaces) -> None:
    home, foreign_folder = (await lake.find_folder("mine")).parent, await lake.find_folder("theirs")
    list_location = f"file://{foreign_folder}/metadata/snap.avro"
    set_location = {"action": "set-location", "location": f"file://{home}/x"}
    location_updates = [{"action": "set-location", "location": f"file://{foreign_folder}"}, set_location]
    set_path = {"action": "set-properties", "updates": {"write.data.path": f"file://{foreign_folder}"}}
    property_updates = [set_location, set_path, {"action": "remove-properties", "removals": ["write.data.path"]}]
    for updates in (location_updates, property_updates):
        answer = await create_table_with_rows(lake, "x", *updates, *_build_snapshot_updates(5, list_location))
        assert answer.status == 400, answer.raw
        assert "outside the table's folders" in answer.json["error"]["message"]


async def test_malformed_updates_are_a_bad_request(lake: TwoNamespaces) -> None:
    own_folder = await lake.find_folder("mine")
    list_location = write_manifest_list(own_folder / "metadata" / "l.avro", [])
    for updates in (
        [{"action": "set-location"}, *_build_snapshot_updates(snapshot_id=5, manifest_list=list_location)],
        [
            {"action": "set-location", "location": 5},
            *_build_snapshot_updates(snapshot_id=5, manifest_list=list_location),
        ],
        [
            {"action": "set-properties", "updates": []},
            *_build_snapshot_updates(snapshot_id=5, manifest_list=list_location),
        ],
        [
            {"action": "remove-properties", "removals": [[]]},
            *_build_snapshot_updates(snapshot_id=5, manifest_list=list_location),
        ],
        _build_snapshot_updates(snapshot_id=5, manifest_list=list_location, **{"parent-snapshot-id": [1]}),
        _build_snapshot_updates(snapshot_id=5, manifest_list=list_location, **{"parent-snapshot-id": 2**70}),
    ):
        answer = await create_table_with_rows(lake, "x", *updates)
        assert answer.status == 400, answer.raw
        # The server parses a body before it checks rights.
        for requirements in ([], [{"type": "assert-table-uuid", "uuid": str(uuid4())}]):
            body = {"requirements": requirements, "updates": updates}
            answer = await lake("wendy", "POST", "/v1/namespaces/mine/tables/t", body)
            assert answer.status == 400, answer.raw
