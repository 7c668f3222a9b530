"""Tests of index audits: quarantined index files, and a registry that is rebuilt from a table's index files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from seamark.formats.index.index_file import FilesTable, assemble_index_file, read_header
from seamark.formats.index.keys.arrow_keys import convert_to_keys
from seamark.formats.index.keys.hashing import compute_file_ids
from seamark.formats.index.kinds import bloom
from seamark.formats.index.kinds.kinds import KINDS
from seamark.metaserver.index.files import registry_rebuild
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
from tests.planner.lakes.lake import DataFile
from tests.server.rig import run_server

IDS = {f"file:///t/{n}.parquet": [n, n + 100, n + 200] for n in range(1, 7)}
"""The ids in each file, by path. By its statistics, each file may have any id."""
FILES = [build_data_file(path, 1, 999, rows=3) for path in IDS]
REBUILD = f"{INDEXES}/rebuild-registry"


@pytest.fixture
async def api_with_table(api: Api) -> Api:
    """Return the API with `db.t` of 6 files, and a bloom index `i` without index files."""
    return await create_index(api)


async def create_index(api: Api) -> Api:
    await api.create_table()
    await append_files(api, "t", FILES, snapshot_id=1, manifests=2)
    await define_index(api, kind="bloom", columns=["id"], fpp=1e-6)
    return api


def build_valid_index_file(build: Mapping[str, Any], files: Sequence[DataFile], **other: Any) -> bytes:
    """Return a valid bloom index file of these data files. `other` replaces fields."""
    paths, sizes, records = zip(*((file.path, file.size, file.record_count) for file in files), strict=True)
    listed_table = FilesTable.from_columns(compute_file_ids(paths, sizes, records), records, sizes, paths)  # type: ignore[arg-type]
    false_positive_rate = 1e-6  # So low that no value of a test matches a filter by chance
    entries = [
        bloom.build_filter(convert_to_keys(pa.array(IDS[path], pa.int64()), "long"), false_positive_rate)
        for path in paths
    ]
    fields = {"table_uuid": build["table-uuid"], "field_ids": [1]} | other
    blob = map(memoryview, bloom.encode_filters(entries))
    return b"".join(assemble_index_file(build["definition-id"], "bloom", listed_table, blob, **fields))


async def create_build(api: Api, *groups: Sequence[DataFile]) -> tuple[dict[str, Any], list[str]]:
    """Begin a build, and register an index file for each group of data files.

    Return the build and the locations of the index files.
    """
    build = await begin_build(api)
    registrations = [
        write_index_file(build, str(number), build_valid_index_file(build, group))
        for number, group in enumerate(groups)
    ]
    assert (await register_files(api, build, *registrations)).status == 200
    return build, [registration["location"] for registration in registrations]


async def find_kept_paths(api: Api, where: str) -> list[str]:
    """Return the paths of the files that a plan with this predicate keeps, as `explain` reports them."""
    answer = await api("POST", "/api/v1/tables/db/t/explain", {"where": where, "files": True})
    assert answer.status == 200, answer.raw
    return [file["file-path"] for file in answer.json["kept"]]


async def quarantine_file(api: Api, location: str, reason: str = "it lies", name: str = "i", **options: Any) -> Any:
    return await api("POST", f"{INDEXES}/{name}/quarantine", {"location": location, "reason": reason, **options})


def find_blob_position(location: str) -> int:
    """Return the position of a byte of the first filter in an index file. A damage there changes answers."""
    data = Path(location.removeprefix("file://")).read_bytes()
    header = read_header(data, len(data), location)
    return header.offset + 8  # Any offset within the first filter


def flip_bit(location: str, position: int) -> None:
    path = Path(location.removeprefix("file://"))
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


async def test_quarantined_index_file_is_unused_and_built_again(api_with_table: Api) -> None:
    build, (first_file, second_file) = await create_build(api_with_table, FILES[:3], FILES[3:])
    assert await find_kept_paths(api_with_table, "id = 102") == [FILES[1].path]
    answer = await quarantine_file(api_with_table, first_file)
    assert (answer.status, answer.json) == (200, {"location": first_file, "state": "quarantined", "reason": "it lies"})
    assert await find_kept_paths(api_with_table, "id = 102") == [file.path for file in FILES[:3]]
    index = await load_index(api_with_table)
    assert (index["health"], index["files"], index["quarantined"]) == ("damaged", 3, 1)
    assert {index_file["location"]: index_file["state"] for index_file in index["index-files"]} == {
        first_file: "quarantined",
        second_file: "live",
    }
    assert await list_missing_files(api_with_table, build) == [file.path for file in FILES[:3]]
    await register_files(
        api_with_table, build, write_index_file(build, "again", build_valid_index_file(build, FILES[:3]))
    )
    assert (await load_index(api_with_table))["health"] == "ok"
    assert await find_kept_paths(api_with_table, "id = 102") == [FILES[1].path]


async def test_quarantine_is_idempotent_and_a_superseded_file_stays_superseded(api_with_table: Api) -> None:
    build, (first_file, second_file) = await create_build(api_with_table, FILES[:3], FILES[3:])
    merged_index_file = write_index_file(build, "merged", build_valid_index_file(build, FILES[3:], level=1))
    await register_files(api_with_table, build, merged_index_file, replaces=[second_file])
    await quarantine_file(api_with_table, first_file)
    assert (await quarantine_file(api_with_table, first_file, "another reason")).json["reason"] == "it lies"
    assert (await quarantine_file(api_with_table, second_file)).json["state"] == "superseded"
    assert (await quarantine_file(api_with_table, second_file, check=True)).json["state"] == "superseded"


async def test_checked_index_file_is_quarantined_only_if_it_is_damaged(api_with_table: Api) -> None:
    _, (first_file, second_file) = await create_build(api_with_table, FILES[:3], FILES[3:])
    assert (await quarantine_file(api_with_table, first_file, check=True)).json == {
        "location": first_file,
        "state": "live",
        "reason": None,
    }
    flip_bit(first_file, find_blob_position(first_file))
    answer = (await quarantine_file(api_with_table, first_file, "found by night", check=True)).json
    assert answer["state"] == "quarantined"
    assert answer["reason"].startswith("found by night; ")
    Path(second_file.removeprefix("file://")).unlink()
    assert (await quarantine_file(api_with_table, second_file, check=True)).json["state"] == "quarantined"
    assert (await load_index(api_with_table))["files"] == 0


async def test_only_registered_index_files_of_the_index_are_quarantined(api_with_table: Api) -> None:
    build, (first_file,) = await create_build(api_with_table, FILES)
    await define_index(api_with_table, "other", kind="bitmap", columns=["data"])
    unlisted_file = write_index_file(build, "unlisted", build_valid_index_file(build, FILES))["location"]
    for name, location in (("i", unlisted_file), ("i", "nope"), ("i", ""), ("other", first_file), ("nope", first_file)):
        assert (await quarantine_file(api_with_table, location, name=name)).error[0] == 404, (name, location)
    for body in ({"location": first_file}, {"location": first_file, "reason": " "}, {"location": 1, "reason": "x"}, {}):
        assert (await api_with_table("POST", f"{INDEXES}/i/quarantine", body)).error[0] == 400, body
    assert (await quarantine_file(api_with_table, first_file, name="bucket:x")).error[0] == 400
    assert (await load_index(api_with_table))["quarantined"] == 0


async def test_long_quarantine_reason_is_truncated(api_with_table: Api) -> None:
    _, (first_file,) = await create_build(api_with_table, FILES)
    assert (await quarantine_file(api_with_table, first_file, "x" * 5000)).json["reason"] == "x" * 1000


async def test_rebuilt_registry_gives_the_same_plans_as_the_lost_registry(tmp_path: Path) -> None:
    warehouse = (tmp_path / "warehouse").as_uri()
    async with run_server(tmp_path / "first", warehouse=warehouse) as server:
        api = await create_index(Api(server))
        _, locations = await create_build(api, FILES[:2], FILES[2:5])
        paths_before = [await find_kept_paths(api, f"id = {100 + n}") for n in range(9)]
        location = (await api("GET", "/v1/namespaces/db/tables/t")).json["metadata-location"]
    assert [len(paths) for paths in paths_before] == [1, 2, 2, 2, 2, 2, 1, 1, 1]
    async with run_server(tmp_path / "second", warehouse=warehouse) as server:
        api = Api(server)
        answer = await api("POST", "/v1/namespaces/db/register", {"name": "t", "metadata-location": location})
        assert answer.status == 200
        assert (await load_index(api))["files"] == 0
        assert [len(await find_kept_paths(api, f"id = {100 + n}")) for n in range(9)] == [6] * 9
        rebuild_report = (await api("POST", REBUILD)).json
        assert rebuild_report["registered"] == [
            {
                "index": "i",
                "index-files": 2,
                "files": 5,
                "rows": 15,
                "size-in-bytes": sum(map(get_size_bytes, locations)),
            }
        ]
        assert (rebuild_report["known"], rebuild_report["redundant"], rebuild_report["left-out"]) == (0, 0, [])
        assert [await find_kept_paths(api, f"id = {100 + n}") for n in range(9)] == paths_before
        index = await load_index(api)
        assert {index_file["location"]: index_file["state"] for index_file in index["index-files"]} == dict.fromkeys(
            locations, "live"
        )
        assert (index["files"], index["health"]) == (5, "behind")
        second_report = (await api("POST", REBUILD)).json
        assert (second_report["known"], second_report["registered"], second_report["redundant"]) == (2, [], 0)


def get_size_bytes(location: str) -> int:
    return Path(location.removeprefix("file://")).stat().st_size


@pytest.mark.slow
async def test_rebuild_prefers_merged_and_newer_files_if_the_coverage_is_equal(api_with_table: Api) -> None:
    build = await begin_build(api_with_table)
    for name, files, level, age_s in (
        ("old", FILES[:3], 0, 30),
        ("new", FILES[:3], 0, 20),
        ("merged", FILES[2:5], 1, 40),
        ("part of merged", FILES[3:5], 0, 10),
        ("alone", FILES[5:], 0, 50),
    ):
        registration = write_index_file(build, name, build_valid_index_file(build, files, level=level))
        path = Path(registration["location"].removeprefix("file://"))
        os.utime(path, (1_700_000_000 - age_s, 1_700_000_000 - age_s))
    rebuild_report = (await api_with_table("POST", REBUILD)).json
    assert (rebuild_report["registered"][0]["index-files"], rebuild_report["redundant"]) == (3, 2)
    names = {Path(index_file["location"]).name for index_file in (await load_index(api_with_table))["index-files"]}
    assert names == {"new", "merged", "alone"}
    assert (await load_index(api_with_table))["files"] == 6


async def test_quarantined_file_stays_quarantined_and_its_copy_is_registered(api_with_table: Api) -> None:
    build, (first_file,) = await create_build(api_with_table, FILES[:3])
    await quarantine_file(api_with_table, first_file)
    copy = write_index_file(build, "twin", build_valid_index_file(build, FILES[:3]))["location"]
    rebuild_report = (await api_with_table("POST", REBUILD)).json
    assert (rebuild_report["known"], rebuild_report["registered"][0]["index-files"]) == (1, 1)
    states = {
        index_file["location"]: index_file["state"] for index_file in (await load_index(api_with_table))["index-files"]
    }
    assert states == {first_file: "quarantined", copy: "live"}


@pytest.mark.slow
async def test_redundant_index_file_is_registered_only_if_the_registered_file_is_unreadable(
    api_with_table: Api,
) -> None:
    build, (first_file,) = await create_build(api_with_table, FILES[:3])
    write_index_file(build, "twin", build_valid_index_file(build, FILES[:3]))
    rebuild_report = (await api_with_table("POST", REBUILD)).json
    assert (rebuild_report["registered"], rebuild_report["redundant"]) == ([], 1)
    path = Path(first_file.removeprefix("file://"))
    path.write_bytes(path.read_bytes()[:-1])
    # A new server has not read the file yet.
    async with run_server(api_with_table.server.components.settings.home) as restarted_server:
        rebuild_report = (await Api(restarted_server)("POST", REBUILD)).json
    assert rebuild_report["registered"][0]["files"] == 3


async def test_only_index_files_of_the_table_are_registered(
    api_with_table: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = await begin_build(api_with_table)
    with monkeypatch.context() as newer_version:
        newer_version.setattr(KINDS["bloom"], "version", 99)
        file_of_newer_version = build_valid_index_file(build, FILES)
    wrong_files = {
        "another table": build_index_file(build, FILES, table_uuid="00000000-0000-0000-0000-000000000000"),
        "another index": build_index_file(build, FILES, definition='{"kind":"bloom","terms":[]}'),
        "another kind": build_index_file(build, FILES, kind="bitmap"),
        "short": build_valid_index_file(build, FILES)[:-1],
        "flipped": build_valid_index_file(build, FILES)[:20] + b"\xff" + build_valid_index_file(build, FILES)[21:],
        "text": b"hello",
        "empty": b"",
        "newer version": file_of_newer_version,
    }
    for name, data in wrong_files.items():
        write_index_file(build, name, data)
    write_index_file(build, ".half-written", build_valid_index_file(build, FILES)[:100])
    rebuild_report = (await api_with_table("POST", REBUILD)).json
    assert (rebuild_report["registered"], rebuild_report["left-out-files"]) == ([], len(wrong_files))
    reasons = {
        Path(omitted_file["location"]).name: omitted_file["reason"] for omitted_file in rebuild_report["left-out"]
    }
    assert set(reasons) == set(wrong_files)
    assert "00000000" in reasons["another table"]
    assert "version 99" in reasons["newer version"]
    assert (await load_index(api_with_table))["index-files"] == []


async def test_dropped_index_gets_its_files_back_when_it_is_defined_again(api_with_table: Api, tmp_path: Path) -> None:
    build = await begin_build(api_with_table)
    write_index_file(build, "a", build_valid_index_file(build, FILES))
    await api_with_table("DELETE", f"{INDEXES}/i")
    assert (await api_with_table("POST", REBUILD)).json["left-out-files"] == 1
    await define_index(api_with_table, "j", kind="bloom", columns=["id"], fpp=1e-6, state="paused")
    assert (await api_with_table("POST", REBUILD)).json["registered"][0]["index"] == "j"


async def test_table_without_indexes_has_no_files_to_register(api: Api) -> None:
    assert (await api("POST", REBUILD)).error[0] == 404
    await api.create_table()
    rebuild_report = (await api("POST", REBUILD)).json
    assert (rebuild_report["known"], rebuild_report["registered"], rebuild_report["left-out-files"]) == (0, [], 0)


@pytest.mark.slow
async def test_folder_with_too_many_files_is_rejected(api_with_table: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    build = await begin_build(api_with_table)
    for name in "abc":
        write_index_file(build, name, build_valid_index_file(build, FILES))
    monkeypatch.setattr(registry_rebuild, "FOLDER_FILES_MAX", 2)
    assert (await api_with_table("POST", REBUILD)).error[0] == 413
