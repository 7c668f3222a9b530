"""Tests of the route that returns, for each index file, the data files that no snapshot contains any more."""

from __future__ import annotations

from typing import Any

import pytest

from seamark.metaserver.api.indexes import index_unregistered as index_unheld
from tests.api.client import Answer, Api
from tests.api.indexes.indexed import (
    INDEXES,
    begin_build,
    build_index_file,
    define_index,
    register_files,
    write_index_file,
)
from tests.api.plans.planned import append_files, build_data_file
from tests.support.index_versions import replace_by_later_version

FILES = [build_data_file(f"file:///t/{n}.parquet", 1, 999, rows=3) for n in range(1, 7)]


@pytest.fixture
async def built_index(api: Api) -> tuple[Api, list[str]]:
    """Return the API with `db.t` of six data files, and the locations of two registered index files.

    The first index file covers four data files, and the second covers the other two.
    """
    await api.create_table()
    await append_files(api, "t", FILES, snapshot_id=1, manifests=2)
    await define_index(api)
    build = await begin_build(api)
    registrations = [
        write_index_file(build, name, build_index_file(build, part))
        for name, part in (("a", FILES[:4]), ("b", FILES[4:]))
    ]
    assert (await register_files(api, build, *registrations)).status == 200
    return api, [registration["location"] for registration in registrations]


async def find_unheld(api: Api, locations: list[str], name: str = "i") -> Answer:
    return await api("POST", f"{INDEXES}/{name}/unheld", {"index-files": locations})


async def expire_snapshots(api: Api, *snapshot_ids: int) -> None:
    updates: list[dict[str, Any]] = [{"action": "remove-snapshots", "snapshot-ids": list(snapshot_ids)}]
    answer = await api("POST", "/v1/namespaces/db/tables/t", {"requirements": [], "updates": updates})
    assert answer.status == 200, answer.raw


async def test_data_file_counts_as_held_while_any_snapshot_has_it(built_index: tuple[Api, list[str]]) -> None:
    api, locations = built_index
    assert (await find_unheld(api, locations)).json == {"unheld": {}, "complete": True}
    await append_files(api, "t", [FILES[0], FILES[5]], snapshot_id=2)
    await append_files(api, "t", FILES[1:2], snapshot_id=3, branch="kept")
    assert (await find_unheld(api, locations)).json == {"unheld": {}, "complete": True}
    await expire_snapshots(api, 1)
    assert (await find_unheld(api, locations)).json == {
        "unheld": {locations[0]: [2, 3], locations[1]: [0]},
        "complete": True,
    }
    assert (await find_unheld(api, locations[1:])).json == {"unheld": {locations[1]: [0]}, "complete": True}


async def test_index_file_of_an_unknown_version_has_no_unheld_files(built_index: tuple[Api, list[str]]) -> None:
    api, locations = built_index
    later_location = await replace_by_later_version(api.server.components, "db", "t", locations[0])
    await append_files(api, "t", [FILES[0]], snapshot_id=2)
    await expire_snapshots(api, 1)
    assert (await find_unheld(api, [later_location, locations[1]])).json == {
        "unheld": {locations[1]: [0, 1]},
        "complete": True,
    }


@pytest.mark.parametrize(("limit", "value"), [("SNAPSHOTS_MAX", 0), ("SECONDS_MAX", -1.0)])
async def test_unheld_files_are_empty_and_incomplete_when_a_limit_is_reached(
    built_index: tuple[Api, list[str]], monkeypatch: pytest.MonkeyPatch, limit: str, value: float
) -> None:
    api, locations = built_index
    await append_files(api, "t", FILES[:1], snapshot_id=2)
    await expire_snapshots(api, 1)
    monkeypatch.setattr(index_unheld, limit, value)
    assert (await find_unheld(api, locations)).json == {"unheld": {}, "complete": False}


async def test_files_that_are_not_live_index_files_are_rejected_by_name(built_index: tuple[Api, list[str]]) -> None:
    api, locations = built_index
    answer = await find_unheld(api, [*locations, "file:///elsewhere"])
    assert (answer.status, "file:///elsewhere" in answer.json["error"]["message"]) == (409, True)
    assert (await find_unheld(api, locations, "unknown")).status == 404
    assert (await api("POST", f"{INDEXES}/i/unheld", {"index-files": ["x"] * 1001})).status == 400
