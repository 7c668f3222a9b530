"""Tests of plan pages while indexes change.

Each page is planned separately, and together they lose no matching file.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from seamark.connector.index.files import DataFile as ListedFile
from seamark.connector.index.files import encode_index_file
from seamark.formats.index.definitions import IndexDefinition
from seamark.formats.index.keys.arrow_keys import convert_to_keys
from seamark.formats.index.keys.terms import Term
from seamark.formats.index.kinds import bitmap
from tests.api.client import Api
from tests.api.indexes.indexed import begin_build, define_index, load_index, register_files, write_index_file
from tests.api.plans.planned import T, append_files, build_ten_id_files, list_planned_numbers
from tests.server.rig import run_server

PLAN_TABLES = "/api/v1/tables/db/t/plan-tables"
FILE_COUNT = 30
MATCHING_FILE_NUMBERS = range(0, FILE_COUNT, 3)
"""The files with a row that `FILTER` matches, because all rows have even ids."""
FILTER = {
    "type": "in",
    "term": "id",
    "values": [10 * number + (4 if number in MATCHING_FILE_NUMBERS else 5) for number in range(FILE_COUNT)],
}


@pytest.fixture
async def paging_api(tmp_path: Path) -> AsyncIterator[Api]:
    """Yield the API with `db.t` and an index without files.

    The server splits answers of more than 2 files into pages of 4.
    """
    async with run_server(tmp_path, plan_inline_limit=2, plan_page_size=4, index_wait_s=20.0) as server:
        api = Api(server)
        await api.create_table()
        await append_files(api, "t", build_ten_id_files(FILE_COUNT), snapshot_id=1, manifests=3)
        await define_index(api, kind="bitmap", columns=["id"])
        yield api


async def build_index_file(api: Api, file_numbers: range) -> Path:
    """Build and register an index file of the data files with these numbers, and return its path.

    The index states that their rows have only even ids.
    """
    build = await begin_build(api)
    term = Term(1, "id", "identity", "long", "long")
    files = [build_ten_id_files(FILE_COUNT)[number] for number in file_numbers]
    listed_files = [ListedFile(file.path, file.size, file.record_count) for file in files]
    blobs = [
        bitmap.build_bitmap(convert_to_keys(pa.array(range(10 * number, 10 * number + 10, 2)), "long"))
        for number in file_numbers
    ]
    data = b"".join(
        encode_index_file(build["table-uuid"], IndexDefinition("i", "bitmap", (term,)), listed_files, blobs)
    )
    registration = write_index_file(build, f"{file_numbers.start}-{file_numbers.stop}.puffin", data)
    answer = await register_files(api, build, registration)
    assert answer.status == 200, answer.raw
    return Path(registration["location"].removeprefix("file://"))


async def plan_page(api: Api, token: str) -> list[int]:
    return list_planned_numbers(await api("POST", f"{T}/tasks", {"plan-task": token}))


async def test_index_added_between_a_plan_and_its_pages_loses_no_matching_file(paging_api: Api) -> None:
    answer = await paging_api("POST", f"{T}/plan", {"filter": FILTER})
    tokens = answer.json["plan-tasks"]
    planned_numbers = []
    for page_number, token in enumerate(tokens):
        if page_number == 2:
            await build_index_file(paging_api, range(FILE_COUNT))
        planned_numbers += await plan_page(paging_api, token)
    assert len(set(planned_numbers)) == len(planned_numbers) < FILE_COUNT
    assert set(MATCHING_FILE_NUMBERS) <= set(planned_numbers)
    later_answer = await paging_api("POST", f"{T}/plan", {"filter": FILTER})
    assert [
        number for token in later_answer.json["plan-tasks"] for number in await plan_page(paging_api, token)
    ] == list(MATCHING_FILE_NUMBERS)


async def test_index_removed_between_a_plan_and_its_pages_repeats_no_file(paging_api: Api) -> None:
    paths = [await build_index_file(paging_api, range(20)), await build_index_file(paging_api, range(20, FILE_COUNT))]
    answer = await paging_api("POST", f"{T}/plan", {"filter": FILTER})
    tokens = answer.json["plan-tasks"]
    assert len(tokens) == 3
    planned_numbers = await plan_page(paging_api, tokens[0])
    assert planned_numbers == [0, 3, 6, 9]
    registry, uuid = paging_api.server.components.indexes.registry, (await begin_build(paging_api))["table-uuid"]
    await registry.quarantine_file(uuid, paths[0].as_uri(), "said so")
    for token in tokens[1:]:
        planned_numbers += await plan_page(paging_api, token)
    assert len(set(planned_numbers)) == len(planned_numbers) > len(MATCHING_FILE_NUMBERS)
    assert set(MATCHING_FILE_NUMBERS) <= set(planned_numbers)
    assert (await load_index(paging_api))["quarantined"] == 1
    later_pages = await asyncio.gather(*(plan_page(paging_api, token) for token in tokens))
    assert sorted(file_number for page in later_pages for file_number in page) == [
        *range(20),
        *(number for number in MATCHING_FILE_NUMBERS if number >= 20),
    ]


async def test_cached_answer_is_not_used_after_indexes_changed(paging_api: Api) -> None:
    request_of_odd_id: dict[str, Any] = {"filter": {"type": "eq", "term": "id", "value": 15}}
    assert list_planned_numbers(await paging_api("POST", f"{T}/plan", request_of_odd_id)) == [1]
    assert list_planned_numbers(await paging_api("POST", f"{T}/plan", request_of_odd_id)) == [1]
    await build_index_file(paging_api, range(FILE_COUNT))
    assert list_planned_numbers(await paging_api("POST", f"{T}/plan", request_of_odd_id)) == []


async def test_declined_plan_table_is_made_once_an_index_prunes_files(paging_api: Api) -> None:
    request_of_odd_id = {"filter": {"type": "eq", "term": "id", "value": 15}, "kept-max": 0.02}
    for _ in range(2):
        assert (await paging_api("POST", PLAN_TABLES, request_of_odd_id)).json["name"] is None
    await build_index_file(paging_api, range(FILE_COUNT))
    body = (await paging_api("POST", PLAN_TABLES, request_of_odd_id)).json
    assert (body["files"], body["name"] is not None) == (0, True)
