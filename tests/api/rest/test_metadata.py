"""Tests of the metadata routes on random tables with known files, in JSON and in Arrow, page by page."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pytest
from pyiceberg.table import StaticTable

from seamark.metaserver.api.lookups import metadata as routes
from tests.api.client import Answer, Api
from tests.api.plans.planned import append_files, build_data_file
from tests.planner.lakes.history import write_random_lake
from tests.planner.lakes.lake import ContentFile, DataFile, Lake
from tests.seeds import examples
from tests.server.rig import run_server

T = "/api/v1/tables/db/t"
ARROW = {"Accept": "application/vnd.apache.arrow.stream"}
CONTENTS = ["data", "position-deletes", "equality-deletes"]


@pytest.fixture
async def lake_api(tmp_path: Path) -> AsyncIterator[Api]:
    """Open a server whose pages have 500 items by default. The tables of the tests are below its warehouse."""
    async with run_server(tmp_path / "home", warehouse=tmp_path.as_uri(), page_limit=500) as server:
        yield Api(server)


async def register_table(api: Api, lake: Lake, name: str) -> str:
    body = {"name": name, "metadata-location": lake.metadata_location}
    answer = await api("POST", "/v1/namespaces/db/register", body)
    assert answer.status == 200, answer.raw
    return f"/api/v1/tables/db/{name}"


async def list_all_items(
    api: Api, path: str, list_name: str, query: str = "", limit: int | None = None
) -> list[dict[str, Any]]:
    """Read all pages of a listing, and return their items, which each answer has under the key `list_name`.

    Check that no page has more than `limit` items.
    """
    items: list[dict[str, Any]] = []
    limit_query = f"&limit={limit}" if limit else ""
    token = ""
    while True:
        answer = await api("GET", f"{path}?{query}{limit_query}{token}")
        assert answer.status == 200, answer.raw
        assert limit is None or len(answer.json[list_name]) <= limit
        items += answer.json[list_name]
        if answer.json["next-page-token"] is None:
            return items
        token = f"&page-token={answer.json['next-page-token']}"


def decode_table_answer(answer: Answer) -> pa.Table:
    assert answer.status == 200, answer.raw
    assert answer.headers["Content-Type"] == ARROW["Accept"]
    return pa.ipc.open_stream(answer.raw).read_all()


def build_expected_entry(file: ContentFile) -> dict[str, Any]:
    """Return the expected listing entry of a file, without its partition."""
    return {
        "content": CONTENTS[file.content],
        "file-path": file.path,
        "file-format": file.format.lower(),
        "spec-id": file.spec_id,
        "record-count": file.record_count,
        "file-size-in-bytes": file.size,
        "sequence-number": file.sequence,
        "snapshot-id": file.snapshot_id,
    }


def omit_keys(item: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in names}


async def test_listing_has_the_files_of_every_snapshot(lake_api: Api, tmp_path: Path) -> None:
    for seed in range(examples(25, 5)):
        lake = write_random_lake(seed, tmp_path / str(seed))
        path = await register_table(lake_api, lake, f"t{seed}")
        for snapshot in lake.snapshots.values():
            listed_files = await list_all_items(
                lake_api, f"{path}/files", "files", f"snapshot-id={snapshot.id}", limit=3
            )
            files = [*snapshot.data_files, *snapshot.delete_files]
            message = f"seed {seed}, snapshot {snapshot.id}"
            assert [omit_keys(item, "partition", "delete-files") for item in listed_files] == [
                build_expected_entry(file) for file in files
            ], message
            for item, file in zip(listed_files, files, strict=True):
                assert list(item["partition"]) == [part.name for part in lake.specs[file.spec_id]], message
                if isinstance(file, DataFile):
                    # Statistics may show that an equality delete matches no row.
                    assert item["delete-files"] <= len(lake.find_applicable_deletes(snapshot, file)), message
                else:
                    assert item["delete-files"] is None


@pytest.mark.slow
async def test_partition_of_a_listing_can_be_used_to_find_its_files(lake_api: Api, tmp_path: Path) -> None:
    narrowed_count = 0
    for seed in range(40, 40 + examples(20, 5)):
        lake = write_random_lake(seed, tmp_path / str(seed))
        path = await register_table(lake_api, lake, f"t{seed}")
        files = await list_all_items(lake_api, f"{path}/files", "files")
        for file in random.Random(seed).sample(files, min(len(files), 4)):
            quoted_partition = quote(json.dumps(file["partition"]))
            listed_files = await list_all_items(
                lake_api, f"{path}/files", "files", f"partition={quoted_partition}", limit=2
            )
            expected_files = [item for item in files if file["partition"].items() <= item["partition"].items()]
            assert listed_files == expected_files, f"seed {seed}: {file['partition']}"
            narrowed_count += len(expected_files) < len(files)
    assert narrowed_count > 5


async def test_arrow_and_json_listings_are_equal(lake_api: Api, tmp_path: Path) -> None:
    for seed in range(60, 60 + examples(10, 3)):
        lake = write_random_lake(seed, tmp_path / str(seed))
        path = await register_table(lake_api, lake, f"t{seed}")
        lists = [("files", "files"), ("partitions", "partitions")]
        lists += [(f"stats/{quote(column.name, safe='')}", "stats") for column in lake.schema.leaves().values()]
        for route, list_name in lists:
            items = await list_all_items(lake_api, f"{path}/{route}", list_name)
            table = decode_table_answer(await lake_api("GET", f"{path}/{route}", headers=ARROW))
            assert table.schema.metadata == {b"snapshot-id": str(lake.current_snapshot.id).encode()}
            assert table.num_rows == len(items)
            for name in items[0] if items else ():
                if name in ("lower-bound", "upper-bound"):
                    # Bounds are typed in Arrow and texts in JSON. tests/planner/test_lookup.py tests them.
                    continue
                values = table.column(name.replace("-", "_")).to_pylist()
                if name == "partition":
                    values = [json.loads(value) for value in values]
                assert values == [item[name] for item in items], f"seed {seed}: {route} {name}"


async def test_partitions_equal_the_partitions_of_pyiceberg(lake_api: Api, tmp_path: Path) -> None:
    compared_lakes = 0  # The number of random tables whose partitions PyIceberg can read
    for seed in range(100, 100 + examples(60, 15)):
        lake = write_random_lake(seed, tmp_path / str(seed))
        if len(lake.specs) > 1 or lake.version > 2:
            continue  # PyIceberg merges partitions of all specs into one form, and reads no deletion vectors.
        if any(file.record_count == 0 for file in lake.current_snapshot.data_files):
            continue  # PyIceberg does not count files without rows either.
        path = await register_table(lake_api, lake, f"t{seed}")
        partitions = await list_all_items(lake_api, f"{path}/partitions", "partitions", limit=2)
        files = lake.current_snapshot.data_files + lake.current_snapshot.delete_files
        assert sum(item["file-count"] for item in partitions) == len(lake.current_snapshot.data_files)
        assert len(partitions) == len({file.partition_key for file in files}), f"seed {seed}"
        try:
            inspected_partitions = StaticTable.from_metadata(lake.metadata_location).inspect.partitions()
        except Exception:  # noqa: BLE001  PyIceberg does not read all types of partition values
            continue
        inspected_names = {
            "record-count": "record_count",
            "file-count": "file_count",
            "file-size-in-bytes": "total_data_file_size_in_bytes",
            "position-delete-records": "position_delete_record_count",
            "position-delete-files": "position_delete_file_count",
            "equality-delete-records": "equality_delete_record_count",
            "equality-delete-files": "equality_delete_file_count",
            "last-updated-snapshot-id": "last_updated_snapshot_id",
        }
        partition_rows = sorted([[item[name] for name in inspected_names] for item in partitions], key=repr)
        inspected_rows = inspected_partitions.select(list(inspected_names.values())).to_pylist()
        assert partition_rows == sorted([list(row.values()) for row in inspected_rows], key=repr), f"seed {seed}"
        compared_lakes += 1
    assert compared_lakes > 5  # With fewer tables, the test would have compared little.


# Snapshots and pages


@pytest.fixture
async def api_with_table(api: Api) -> Api:
    """Return the API with `db.t`. Its first snapshot has a tag and 5 files, its second snapshot has 2 more."""
    await api.create_table()
    files = [build_data_file(f"file:///t/{n}.parquet", low=10 * n, high=10 * n + 9) for n in range(7)]
    await append_files(api, "t", files[:5], snapshot_id=1, manifests=2)
    tag = {"action": "set-snapshot-ref", "ref-name": "first", "type": "tag", "snapshot-id": 1}
    assert (await api("POST", "/v1/namespaces/db/tables/t", {"requirements": [], "updates": [tag]})).status == 200
    await append_files(api, "t", files[5:], snapshot_id=2, parent=1)
    return api


async def list_paths(api: Api, query: str = "") -> list[str]:
    return [item["file-path"] for item in await list_all_items(api, f"{T}/files", "files", query)]


async def test_snapshot_can_be_given_by_id_ref_or_time(api_with_table: Api) -> None:
    log = (await api_with_table("GET", "/v1/namespaces/db/tables/t")).json["metadata"]["snapshot-log"]
    assert len(await list_paths(api_with_table)) == 7
    for query in (
        "snapshot-id=1",
        "ref=first",
        f"as-of={log[0]['timestamp-ms']}",
        f"as-of={log[1]['timestamp-ms'] - 1}",
    ):
        assert await list_paths(api_with_table, query) == [f"file:///t/{n}.parquet" for n in range(5)]
    for query in ("snapshot-id=2", "ref=main", f"as-of={log[1]['timestamp-ms']}", "as-of=99999999999999"):
        assert len(await list_paths(api_with_table, query)) == 7


async def test_invalid_parameters_are_rejected_with_the_reason(api_with_table: Api) -> None:
    cases: list[tuple[str, str]] = [
        ("snapshot-id=9", "9"),
        ("snapshot-id=x", "whole number"),
        ("ref=nope", "first, main"),
        ("as-of=5", "as-of=5"),
        ("ref=main&as-of=5", "set one of them"),
        ("limit=0", "limit"),
        ("limit=many", "limit"),
        ("page-token=abc", "page-token"),
        ("page-token=%C3%A9", "page-token"),
        ("partition=day", "name=value"),
        ("content=some", "content"),
    ]
    for query, reason in cases:
        answer = await api_with_table("GET", f"{T}/files?{query}")
        assert answer.error[:2] == (400, "BadRequestException"), query
        assert reason in answer.error[2], query


async def test_commit_between_two_pages_shifts_no_file(api_with_table: Api) -> None:
    first_page = (await api_with_table("GET", f"{T}/files?limit=3")).json
    await append_files(api_with_table, "t", [build_data_file("file:///t/new.parquet", 0, 1)], snapshot_id=3, parent=2)
    second_page = (await api_with_table("GET", f"{T}/files?limit=9&page-token={first_page['next-page-token']}")).json
    assert second_page["snapshot-id"] == first_page["snapshot-id"] == 2
    assert len(first_page["files"]) + len(second_page["files"]) == 7
    assert second_page["next-page-token"] is None


async def test_page_token_is_valid_for_its_own_request_only(api_with_table: Api) -> None:
    token = (await api_with_table("GET", f"{T}/files?limit=3")).json["next-page-token"]
    for route in ("files?content=data", "files?partition={}", "partitions?", "stats/id?"):
        answer = await api_with_table("GET", f"{T}/{route}&page-token={token}")
        assert answer.error[0] == 400, route


async def test_page_of_an_expired_snapshot_is_rejected(api_with_table: Api) -> None:
    token = (await api_with_table("GET", f"{T}/files?limit=3&snapshot-id=1")).json["next-page-token"]
    updates = [
        {"action": "remove-snapshot-ref", "ref-name": "first"},
        {"action": "remove-snapshots", "snapshot-ids": [1]},
    ]
    body = {"requirements": [], "updates": updates}
    assert (await api_with_table("POST", "/v1/namespaces/db/tables/t", body)).status == 200
    answer = await api_with_table("GET", f"{T}/files?limit=3&page-token={token}")
    assert answer.error[0] == 400
    assert "expired" in answer.error[2]


async def test_arrow_pages_have_their_token(api_with_table: Api) -> None:
    first_page = decode_table_answer(
        await api_with_table("GET", f"{T}/stats/id?limit=4&fields=file,lower-bound", headers=ARROW)
    )
    token = first_page.schema.metadata[b"next-page-token"].decode()
    second_page = decode_table_answer(
        await api_with_table("GET", f"{T}/stats/id?limit=4&fields=file,lower-bound&page-token={token}", headers=ARROW)
    )
    assert first_page.column_names == ["file", "lower_bound"]
    all_stats = await list_all_items(api_with_table, f"{T}/stats/id", "stats")
    assert pa.concat_tables([first_page, second_page]).column("lower_bound").to_pylist() == [
        row["lower-bound"] for row in all_stats
    ]
    assert (first_page.num_rows, second_page.num_rows) == (4, 3)
    assert b"next-page-token" not in second_page.schema.metadata


async def test_statistics_are_requested_by_column_name(api_with_table: Api) -> None:
    stats = (await api_with_table("GET", f"{T}/stats/data?snapshot-id=1&limit=1")).json["stats"]
    assert [omit_keys(item, "column-size") for item in stats] == [
        {
            "file-path": "file:///t/0.parquet",
            "lower-bound": "a",
            "upper-bound": "z",
            "value-count": 100,
            "null-value-count": 0,
            "nan-value-count": None,
        }
    ]
    for column, reason in (("dat", "did you mean data"), ("data.x", "data.x"), ("%FF", "UTF-8")):
        answer = await api_with_table("GET", f"{T}/stats/{column}")
        assert answer.error[0] == 400
        assert reason in answer.error[2]
    answer = await api_with_table("GET", f"{T}/stats/id?fields=lower-bound,upper")
    assert "'upper'" in answer.error[2]


async def test_listings_of_a_table_without_a_snapshot_are_empty(api: Api) -> None:
    await api.create_table()
    for route, list_name in (("files", "files"), ("partitions", "partitions"), ("stats/id", "stats")):
        assert (await api("GET", f"{T}/{route}")).json == {"snapshot-id": None, list_name: [], "next-page-token": None}
        assert decode_table_answer(await api("GET", f"{T}/{route}", headers=ARROW)).num_rows == 0


async def test_accept_header_selects_the_form(api_with_table: Api) -> None:
    cases: list[tuple[str, str | None]] = [
        ("*/*", "application/json"),
        ("application/json, */*;q=0.1", "application/json"),
        (f"{ARROW['Accept']}, application/json;q=0.9", ARROW["Accept"]),
        (f"{ARROW['Accept']};q=0.1, application/json", "application/json"),
        ("text/html", None),
        ("application/json;q=0", None),
    ]
    for accept, content_type in cases:
        answer = await api_with_table("GET", f"{T}/files", headers={"Accept": accept})
        if content_type is None:
            assert answer.error[0] == 406, accept
            assert ARROW["Accept"] in answer.error[2], accept
        else:
            assert answer.headers["Content-Type"].partition(";")[0] == content_type, accept
            assert answer.headers["Vary"] == "Accept", accept


async def test_missing_tables_and_snapshots_are_not_found(api: Api) -> None:
    for route in ("files", "partitions", "stats/id"):
        assert (await api("GET", f"/api/v1/tables/db/none/{route}")).error[:2] == (404, "NoSuchTableException")
        assert (await api("GET", f"/api/v1/tables/none/t/{route}")).error[0] == 404


async def test_large_listings_are_read_off_the_event_loop(api_with_table: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    answers_before = await asyncio.gather(
        *(api_with_table("GET", f"{T}/{route}") for route in ("files", "partitions", "stats/id"))
    )
    for name in ("IN_LOOP_ITEMS_MAX", "IN_LOOP_FILES_MAX"):
        monkeypatch.setattr(routes, name, 0)
    answers_after = await asyncio.gather(
        *(api_with_table("GET", f"{T}/{route}") for route in ("files", "partitions", "stats/id"))
    )
    assert [answer.json for answer in answers_after] == [answer.json for answer in answers_before]
