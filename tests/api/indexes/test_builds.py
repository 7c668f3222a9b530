"""Tests of index builds over HTTP: missing files, checks at registration, and the timeline."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from seamark.formats.index.kinds.kinds import KINDS
from seamark.metaserver.api.indexes import build_state, index_state
from tests.api.client import Api
from tests.api.indexes.indexed import (
    INDEXES,
    begin_build,
    build_index_file,
    define_index,
    list_missing_files,
    load_index,
    register_files,
    write_index_file,
)
from tests.api.plans.planned import append_files, build_data_file
from tests.server.rig import run_server

FILES = [build_data_file(f"file:///t/{n}.parquet", n, n, rows=10 * n) for n in range(1, 7)]
PATHS = [file.path for file in FILES]


@pytest.fixture
async def api_with_table(api: Api) -> Api:
    """Return the API with `db.t` of 6 files in 2 manifests, and a bloom index `i` without index files."""
    await api.create_table()
    await append_files(api, "t", FILES, snapshot_id=1, manifests=2)
    await define_index(api)
    return api


def build_url(build: dict[str, Any], suffix: str = "") -> str:
    return f"{INDEXES}/{build['index']}/builds/{build['build-id']}{suffix}"


async def list_instants(api: Api, **query: str) -> list[dict[str, Any]]:
    query_text = "&".join(f"{name}={value}" for name, value in {"action": "indexing", **query}.items())
    instants: list[dict[str, Any]] = (await api("GET", f"/api/v1/tables/db/t/timeline?{query_text}")).json["instants"]
    return instants


async def test_build_returns_the_files_to_index_and_its_folder(api_with_table: Api) -> None:
    build = await begin_build(api_with_table)
    location = (await api_with_table("GET", "/v1/namespaces/db/tables/t")).json["metadata"]["location"]
    assert build.pop("earlier-index-files") == []
    assert build == {
        "build-id": build["build-id"],
        "index": "i",
        "state": "inflight",
        "reason": None,
        "snapshot-id": 1,
        "table-uuid": build["table-uuid"],
        "folder": f"{location}/_seamark/index/{build['build-id']}",
        "definition-id": (await load_index(api_with_table))["definition-id"],
        "kind": "bloom",
        "terms": [{"field-id": 1, "name": "id", "transform": "identity", "source-type": "long", "type": "long"}],
        "measures": [],
        "fpp": 0.01,
        "progress": {
            "files-done": 0,
            "files-total": 6,
            "rows-done": 0,
            "rows-total": 210,
            "index-files": 0,
            "size-in-bytes": 0,
            "eta-ms": None,
        },
    }
    assert (await api_with_table("GET", build_url(build))).json == build
    (instant,) = await list_instants(api_with_table)
    assert (instant["id"], instant["state"], instant["snapshot-id"]) == (build["build-id"], "inflight", 1)


async def test_missing_files_are_listed_page_by_page_with_what_a_reader_needs(api_with_table: Api) -> None:
    build = await begin_build(api_with_table)
    answer = (await api_with_table("GET", build_url(build, "/files?limit=1"))).json
    assert answer["snapshot-id"] == 1
    assert answer["files"] == [
        {
            "file-path": PATHS[0],
            "file-size-in-bytes": 10_000,
            "record-count": 10,
            "file-format": "parquet",
            "spec-id": 0,
            "partition": {},
        }
    ]
    assert await list_missing_files(api_with_table, build) == PATHS
    assert await list_missing_files(api_with_table, build, limit=4) == PATHS


async def test_listing_skips_no_file_while_files_become_covered(api_with_table: Api) -> None:
    build = await begin_build(api_with_table)
    first_page = (await api_with_table("GET", build_url(build, "/files?limit=2"))).json
    await register_files(api_with_table, build, write_index_file(build, "a", build_index_file(build, FILES[:2])))
    await append_files(
        api_with_table, "t", [build_data_file("file:///t/new.parquet", low=9, high=9)], snapshot_id=2, parent=1
    )
    next_page = (
        await api_with_table("GET", build_url(build, f"/files?page-token={first_page['next-page-token']}"))
    ).json
    assert (next_page["snapshot-id"], [file["file-path"] for file in next_page["files"]]) == (1, PATHS[2:])
    # A restarted build lists the current files.
    assert sorted(await list_missing_files(api_with_table, build, limit=2)) == sorted(
        [*PATHS[2:], "file:///t/new.parquet"]
    )


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("limit", [1, 2, 100])
async def test_files_of_branches_and_tags_are_listed_once_after_the_current_files(
    api_with_table: Api, limit: int
) -> None:
    branch_files = [build_data_file(f"file:///t/b{n}.parquet", n, n) for n in range(3)]
    await append_files(api_with_table, "t", branch_files[:2], snapshot_id=2, parent=1, branch="work")
    await append_files(api_with_table, "t", branch_files[2:], snapshot_id=3, parent=2, branch="more")
    build = await begin_build(api_with_table)
    assert build["progress"]["files-total"] == 9
    index = await load_index(api_with_table)
    assert (index["lag-files"], index["lag-files-of-refs"], index["files-total"]) == (6, 3, 6)
    locations = await list_missing_files(api_with_table, build, limit=limit)
    assert locations[:6] == PATHS
    assert sorted(locations[6:]) == [file.path for file in branch_files]
    await register_files(
        api_with_table, build, write_index_file(build, "a", build_index_file(build, [*FILES, branch_files[0]]))
    )
    index = await load_index(api_with_table)
    assert (index["health"], index["lag-files"], index["lag-files-of-refs"]) == ("ok", 0, 2)
    assert sorted(await list_missing_files(api_with_table, build, limit=limit)) == [
        file.path for file in branch_files[1:]
    ]


@pytest.mark.slow
async def test_only_the_newest_snapshots_of_very_many_tags_are_searched(
    api_with_table: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_state, "SNAPSHOTS_MAX", 2)
    for n in (2, 3, 4):
        await append_files(
            api_with_table,
            "t",
            [build_data_file(f"file:///t/b{n}.parquet", n, n)],
            snapshot_id=n,
            parent=1,
            branch=f"b{n}",
        )
    assert await list_missing_files(api_with_table, await begin_build(api_with_table)) == [
        *PATHS,
        "file:///t/b4.parquet",
    ]


async def test_build_finishes_when_no_file_is_missing(api_with_table: Api) -> None:
    build = await begin_build(api_with_table)
    answer = await register_files(
        api_with_table, build, write_index_file(build, "a", build_index_file(build, FILES[:3]))
    )
    assert answer.json["progress"]["files-done"] == 3
    assert answer.json["progress"]["rows-done"] == 60
    assert answer.json["progress"]["eta-ms"] > 0
    (instant,) = await list_instants(api_with_table)
    assert (instant["state"], instant["summary"]["rows-done"]) == ("inflight", 60)
    new_file = build_data_file("file:///t/new.parquet", 9, 9)
    await append_files(api_with_table, "t", [new_file], snapshot_id=2, parent=1)
    await register_files(
        api_with_table, build, write_index_file(build, "b", build_index_file(build, [*FILES[3:], new_file]))
    )
    assert await list_missing_files(api_with_table, build) == []
    answer = await api_with_table("POST", build_url(build, "/finish"))
    assert (answer.status, answer.json["state"]) == (200, "completed")
    (instant,) = await list_instants(api_with_table)
    assert (instant["state"], instant["summary"]["files-done"]) == ("completed", 7)
    assert (await load_index(api_with_table))["health"] == "ok"


async def test_finishing_a_build_is_idempotent_and_a_finished_build_accepts_no_files(api_with_table: Api) -> None:
    build = await begin_build(api_with_table)
    body = {"outcome": "rolled-back", "reason": "no memory"}
    for _ in range(2):
        answer = await api_with_table("POST", build_url(build, "/finish"), body)
        assert (answer.status, answer.json["state"], answer.json["reason"]) == (200, "rolled_back", "no memory")
    assert (await api_with_table("POST", build_url(build, "/finish"), {"outcome": "completed"})).error[0] == 409
    assert (await api_with_table("GET", build_url(build, "/files"))).error[0] == 409
    assert (
        await register_files(api_with_table, build, write_index_file(build, "a", build_index_file(build, FILES)))
    ).error[0] == 409
    assert (await api_with_table("POST", build_url(build, "/finish"), {"outcome": "maybe"})).error[0] == 400


async def test_exclusive_build_yields_to_a_live_build_of_its_index(
    api_with_table: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start_exclusive_build(name: str = "i") -> Any:
        return await api_with_table("POST", f"{INDEXES}/{name}/builds", {"exclusive": True})

    first_build = (await start_exclusive_build()).json
    assert (await start_exclusive_build()).error[:2] == (409, "CommitFailedException")
    assert (await api_with_table("POST", f"{INDEXES}/i/builds", {"exclusive": 1})).error[0] == 400
    await define_index(api_with_table, "other", kind="bitmap", columns=["data"])
    assert (await start_exclusive_build("other")).status == 200
    await api_with_table("POST", build_url(first_build, "/finish"))
    assert (await start_exclusive_build()).status == 200
    monkeypatch.setattr(build_state, "EXCLUSIVE_MS", -1)
    assert (await start_exclusive_build()).status == 200


async def test_only_one_of_concurrent_exclusive_builds_continues(api_with_table: Api) -> None:
    for _ in range(5):
        answers = await asyncio.gather(
            *(api_with_table("POST", f"{INDEXES}/i/builds", {"exclusive": True}) for _ in range(8)),
        )
        assert {answer.status for answer in answers} <= {200, 409}
        running_builds = [
            instant["id"] for instant in await list_instants(api_with_table) if instant["state"] == "inflight"
        ]
        winning_answers = [answer.json for answer in answers if answer.status == 200]
        assert [build_answer["build-id"] for build_answer in winning_answers] == running_builds
        assert len(winning_answers) <= 1
        for build_answer in winning_answers:
            await api_with_table("POST", build_url(build_answer, "/finish"))


async def test_registering_a_file_twice_changes_nothing(api_with_table: Api) -> None:
    build = await begin_build(api_with_table)
    registration = write_index_file(build, "a", build_index_file(build, FILES[:3]))
    answers = [await register_files(api_with_table, build, registration) for _ in range(3)]
    assert [answer.json["progress"]["files-done"] for answer in answers] == [3, 3, 3]
    assert len((await load_index(api_with_table))["index-files"]) == 1


async def test_concurrent_registrations_all_succeed(api_with_table: Api) -> None:
    build = await begin_build(api_with_table)
    files = [write_index_file(build, f"{n}", build_index_file(build, [data])) for n, data in enumerate(FILES)]
    answers = await asyncio.gather(*(register_files(api_with_table, build, file) for file in files))
    assert [answer.status for answer in answers] == [200] * 6
    assert (await api_with_table("GET", build_url(build))).json["progress"]["files-done"] == 6
    assert (await load_index(api_with_table))["files"] == 6


async def test_only_one_of_two_merges_of_the_same_files_is_registered(api_with_table: Api) -> None:
    build = await begin_build(api_with_table)
    old_files = [write_index_file(build, name, build_index_file(build, FILES[:3])) for name in "ab"]
    await register_files(api_with_table, build, *old_files)
    replaced_locations = [index_file["location"] for index_file in old_files]
    merged_index_files = [write_index_file(build, name, build_index_file(build, FILES[:3], level=1)) for name in "xy"]
    answers = await asyncio.gather(
        *(
            register_files(api_with_table, build, index_file, replaces=replaced_locations)
            for index_file in merged_index_files
        )
    )
    assert sorted(answer.status for answer in answers) == [200, 409]
    assert (await load_index(api_with_table))["levels"] == {"1": 1}


@pytest.mark.slow
async def test_builds_and_commits_do_not_block_each_other(api_with_table: Api) -> None:
    build = await begin_build(api_with_table)
    files = [write_index_file(build, f"{n}", build_index_file(build, [data_file])) for n, data_file in enumerate(FILES)]

    async def commit_files() -> None:
        for number in range(2, 8):
            new_file = build_data_file(f"file:///t/new{number}.parquet", 9, 9)
            await append_files(api_with_table, "t", [new_file], snapshot_id=number, parent=number - 1)

    results = await asyncio.gather(commit_files(), *(register_files(api_with_table, build, file) for file in files))
    assert [answer.status for answer in results[1:] if answer is not None] == [200] * 6
    assert len(await list_missing_files(api_with_table, build)) == 6


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"table_uuid": "00000000-0000-0000-0000-000000000000"}, "it belongs to the table 00000000"),
        ({"definition": '{"kind":"bloom","terms":[]}'}, "it belongs to the index bloom"),
        ({"kind": "bitmap"}, "it belongs to the index bitmap"),
    ],
)
async def test_error_for_an_index_file_names_the_table_or_index_to_which_it_belongs(
    api_with_table: Api, overrides: dict[str, Any], expected: str
) -> None:
    build = await begin_build(api_with_table)
    valid_file = write_index_file(build, "good", build_index_file(build, FILES[:1]))
    other_file = write_index_file(build, "bad", build_index_file(build, FILES, **overrides))
    answer = await register_files(api_with_table, build, valid_file, other_file)
    assert answer.error[:2] == (400, "BadRequestException")
    assert expected in answer.error[2]
    assert f"{build['folder']}/bad" in answer.error[2]
    assert (await load_index(api_with_table))["index-files"] == []


async def test_index_file_that_is_damaged_missing_or_of_another_size_is_rejected(api_with_table: Api) -> None:
    build = await begin_build(api_with_table)
    data, offset = build_index_file(build, FILES), 70
    for name, content, size in (
        ("short", data[:-1], len(data) - 1),
        ("longer", data + b"x", len(data)),
        ("shorter", data[:-1], len(data)),
        ("flipped", data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :], len(data)),
        ("text", b"no index file at all", 20),
        ("empty", b"", 0),
    ):
        registration = {**write_index_file(build, name, content), "size-in-bytes": size}
        answer = await register_files(api_with_table, build, registration)
        assert answer.error[0] == 400, name
        assert registration["location"] in answer.error[2], name
    answer = await register_files(api_with_table, build, {"location": f"{build['folder']}/nope", "size-in-bytes": 9})
    assert answer.error[0] == 400


async def test_index_file_of_a_newer_version_is_rejected(api_with_table: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    build = await begin_build(api_with_table)
    with monkeypatch.context() as newer_version:
        newer_version.setattr(KINDS["bloom"], "version", 99)
        data = build_index_file(build, FILES)
    answer = await register_files(api_with_table, build, write_index_file(build, "a", data))
    assert "version 99" in answer.error[2]


async def test_only_files_in_the_builds_folder_are_registered(api_with_table: Api) -> None:
    build, other_build = await begin_build(api_with_table), await begin_build(api_with_table)
    data = build_index_file(build, FILES)
    registration_of_other_build = write_index_file(other_build, "a", data)
    folder = build["folder"]
    for location in (
        registration_of_other_build["location"],
        folder,
        f"{folder}/",
        f"{folder}/../{other_build['build-id']}/a",
        f"{folder}x/a",
        "a",
        "",
        "file:///etc/passwd",
        "http://127.0.0.1/a",
    ):
        answer = await register_files(api_with_table, build, {"location": location, "size-in-bytes": len(data)})
        assert answer.error[0] == 400, location


async def test_invalid_registration_is_rejected(api_with_table: Api) -> None:
    build = await begin_build(api_with_table)
    cases: list[Any] = [
        {"index-files": []},
        {},
        {"index-files": [{"location": "a"}]},
        {"index-files": [{"location": "a", "size-in-bytes": "1"}]},
        {"index-files": [{"location": "a", "size-in-bytes": -5}]},
        {"index-files": [{"location": "a", "size-in-bytes": 2**62}]},
        {"index-files": [{"location": "a", "size-in-bytes": 1}] * 1001},
        {"index-files": [], "replaces": ["x"]},
    ]
    for body in cases:
        assert (await api_with_table("POST", build_url(build, "/index-files"), body)).error[0] == 400, body


async def test_build_is_found_only_under_its_own_index_and_table(api_with_table: Api) -> None:
    await define_index(api_with_table, "other", kind="bitmap", columns=["data"])
    await api_with_table.create_table("u")
    build = await begin_build(api_with_table)
    ids = [build["build-id"], (await api_with_table.server.record()).id, "nope"]
    for path in (
        f"{INDEXES}/other/builds/{ids[0]}",
        f"{INDEXES}/i/builds/{ids[1]}",
        f"{INDEXES}/i/builds/{ids[2]}",
        f"/api/v1/tables/db/u/indexes/i/builds/{ids[0]}",
    ):
        assert (await api_with_table("GET", path)).error[0] == 404, path
    assert (await api_with_table("POST", f"{INDEXES}/nope/builds")).error[0] == 404


async def test_paused_index_is_not_built(api_with_table: Api) -> None:
    await define_index(api_with_table, state="paused")
    assert "paused" in (await api_with_table("POST", f"{INDEXES}/i/builds")).error[2]
    assert await list_instants(api_with_table) == []


async def test_build_of_a_redefined_index_cannot_continue(api_with_table: Api) -> None:
    build = await begin_build(api_with_table)
    await define_index(api_with_table, fpp=0.5)
    assert "redefined" in (await api_with_table("GET", build_url(build, "/files"))).error[2]
    assert (
        await register_files(api_with_table, build, write_index_file(build, "a", build_index_file(build, FILES)))
    ).error[0] == 409
    assert (await api_with_table("POST", build_url(build, "/finish"), {"outcome": "rolled-back"})).status == 200


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("token", ["x", "", "!!", "W10"])
async def test_invented_page_token_is_rejected(api_with_table: Api, token: str) -> None:
    build, other_build = await begin_build(api_with_table), await begin_build(api_with_table)
    assert (await api_with_table("GET", build_url(build, f"/files?page-token={token}"))).error[0] == 400
    token_of_other_build = (await api_with_table("GET", build_url(other_build, "/files?limit=1"))).json[
        "next-page-token"
    ]
    assert (await api_with_table("GET", build_url(build, f"/files?page-token={token_of_other_build}"))).error[0] == 400
    assert (await api_with_table("GET", build_url(build, "/files?limit=0"))).error[0] == 400


async def test_next_build_rolls_back_an_abandoned_build(api_with_table: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    silent_build = await begin_build(api_with_table)
    await register_files(
        api_with_table, silent_build, write_index_file(silent_build, "a", build_index_file(silent_build, FILES[:2]))
    )
    await begin_build(api_with_table)
    assert [instant["state"] for instant in await list_instants(api_with_table)] == ["inflight", "inflight"]
    monkeypatch.setattr(build_state, "ABANDONED_MS", -1)
    await begin_build(api_with_table)
    states = [instant["state"] for instant in await list_instants(api_with_table)]
    assert sorted(states) == ["inflight", "rolled_back", "rolled_back"]
    assert "abandoned" in (await api_with_table("GET", build_url(silent_build))).json["reason"]
    assert (await load_index(api_with_table))["files"] == 2


async def test_build_continues_on_another_server(api_with_table: Api, tmp_path: Path) -> None:
    build = await begin_build(api_with_table)
    await register_files(api_with_table, build, write_index_file(build, "a", build_index_file(build, FILES[:2])))
    async with run_server(tmp_path) as server:
        other_api = Api(server)
        assert await list_missing_files(other_api, build) == PATHS[2:]
        await register_files(other_api, build, write_index_file(build, "b", build_index_file(build, FILES[2:])))
        assert (await other_api("POST", build_url(build, "/finish"))).json["progress"]["files-done"] == 6
    assert (await api_with_table("GET", build_url(build))).json["state"] == "completed"


@pytest.mark.slow
async def test_files_of_large_tables_are_counted_off_the_event_loop(
    api_with_table: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("seamark.metaserver.api.indexes.index_state._IN_LOOP_FILES_MAX", 0)
    build = await begin_build(api_with_table)
    await register_files(api_with_table, build, write_index_file(build, "a", build_index_file(build, FILES[:2])))
    assert await list_missing_files(api_with_table, build) == PATHS[2:]
