"""Tests of blocks on the local disk, whose columns are verified at first use: damage in any column changes no answer.

The test damages each column of a block's file between two runs of a planner. The oracle is the table itself: file n
holds the ids from 10 n to 10 n + 9.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from seamark.cache.disk import MAP_BYTES_MIN
from seamark.cache.envelope import HEADER_BYTES
from seamark.formats.iceberg.expressions.expression_json import parse_expression
from seamark.formats.index.packing import Packed
from seamark.metaserver.index.blocks.block import Block
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.planner.scan.request import ScanRequest
from tests.api.client import Api
from tests.api.plans.planned import append_files, build_data_file
from tests.planner.lakes.tables import (
    RecordingObjects,
    Table,
    build_filter_of_files,
    list_file_numbers,
    open_test_planner,
    plan_file_numbers,
)
from tests.server.rig import run_server
from tests.waits import until

FOLDER_BYTES = 64 << 20
T = "/v1/namespaces/db/tables/t"
FILES_PAGE = "/api/v1/tables/db/t/files"
FILES = 4000
"""All files are in one manifest, so that its block is mapped."""


def find_block_file(folder: Path) -> Path:
    """Return the only file in the disk cache of decoded manifests."""
    (path,) = folder.rglob("*.block")
    return path


def read_columns(data: bytes) -> tuple[int, list[Packed]]:
    """Read the block in a file, which is a decoded manifest.

    Returns:
        The offset of the values in the file, and where each stored column is. Columns with equal values share them.
    """
    block = Block(data[HEADER_BYTES:])
    packed_columns = {item.start: item for item in block._iterate_packed_columns() if item.size}
    return len(data) - len(block._arrays), list(packed_columns.values())


@pytest.fixture(scope="module")
def table_in_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Table]:
    """Return a folder and a table in it.

    The tests share the table, because writing a manifest takes most of the time of a test.
    """
    folder = tmp_path_factory.mktemp("damaged")
    table = Table(folder / "t")
    table.commit(1, [table.write_manifest("m", range(FILES))])
    return folder, table


@pytest.fixture
async def table(table_in_folder: tuple[Path, Table]) -> Table:
    """Return the table after its block was stored intact on the disk."""
    folder, table = table_in_folder
    shutil.rmtree(folder / "home", ignore_errors=True)
    async with open_test_planner(folder, plan_disk_bytes=FOLDER_BYTES) as planner:
        assert len((await planner.bind_and_plan(table.metadata, ScanRequest())).entry_ids) == FILES
    return table


@pytest.fixture
def folder(table_in_folder: tuple[Path, Table]) -> Path:
    return table_in_folder[0]


async def test_damage_in_any_column_changes_no_answer_and_is_detected_by_readers_of_the_column(
    folder: Path, table: Table
) -> None:
    path = find_block_file(folder / "home")
    content = path.read_bytes()
    arrays_offset, packed_columns = read_columns(content)
    decoded_count = 0
    for number, packed_column in enumerate(packed_columns):
        data = bytearray(content)
        data[arrays_offset + packed_column.start + number % packed_column.size] ^= 1 << number % 8
        path.write_bytes(data)
        async with open_test_planner(folder, plan_disk_bytes=FOLDER_BYTES) as planner:
            assert await plan_file_numbers(planner, table.metadata, build_filter_of_files(700, 900)) == list(
                range(700, 901)
            ), packed_column
            assert await plan_file_numbers(planner, table.metadata) == list(range(FILES)), packed_column
            decoded_count += planner.read_stats().decoded
        path.write_bytes(content)
    assert decoded_count == len(packed_columns) > 3, "the manifest must be decoded again for each damaged column"


async def test_only_the_columns_that_plans_read_of_a_mapped_block_count_as_memory(folder: Path, table: Table) -> None:
    file_bytes = find_block_file(folder / "home").stat().st_size
    async with open_test_planner(folder, plan_disk_bytes=FOLDER_BYTES) as planner:
        scan = await planner.bind_and_plan(
            table.metadata, ScanRequest(filter=parse_expression(build_filter_of_files(700, 900)))
        )
        live_bytes = planner.read_stats().live_bytes
        assert live_bytes < file_bytes / 2
        assert len(list_file_numbers(scan)) == 201
        assert live_bytes < planner.read_stats().live_bytes < 1.2 * file_bytes, (
            "the Python objects of a block must be counted as well"
        )
        planner.check_invariants()


async def test_decoded_block_counts_in_full_as_memory_until_its_file_is_mapped(folder: Path, table: Table) -> None:
    """A block has the entries of a manifest. It is decoded in memory, and then written to the cache folder.

    When the planner has mapped the file into memory, only the columns that plans read count.
    """
    shutil.rmtree(folder / "home")
    async with open_test_planner(folder, plan_disk_bytes=FOLDER_BYTES) as planner:
        scan = await planner.bind_and_plan(
            table.metadata, ScanRequest(filter=parse_expression(build_filter_of_files(700, 900)))
        )
        await until(lambda: any((folder / "home").rglob("*.block")))
        path = find_block_file(folder / "home")
        await until(lambda: planner.read_stats().live_bytes < path.stat().st_size / 2)
        path.unlink()
        assert list_file_numbers(scan) == list(range(700, 901)), (
            "the mapped file must be readable after its path is deleted"
        )
        assert await plan_file_numbers(planner, table.metadata) == list(range(FILES))
        assert planner.read_stats().decoded == 1


async def test_damaged_directory_is_rejected_when_the_block_is_opened(folder: Path, table: Table) -> None:
    """The directory precedes the columns of a block in its file. If it is damaged, the manifest is decoded again."""
    path = find_block_file(folder / "home")
    content = path.read_bytes()
    arrays_offset, _ = read_columns(content)
    # Padding of up to 64 bytes precedes the arrays. Only every 97th byte is changed, because each check takes long.
    for offset in range(HEADER_BYTES, arrays_offset - 64, 97):
        data = bytearray(content)
        data[offset] ^= 4
        path.write_bytes(data)
        async with open_test_planner(folder, plan_disk_bytes=FOLDER_BYTES) as planner:
            assert await plan_file_numbers(planner, table.metadata, build_filter_of_files(3, 5)) == [3, 4, 5]
            assert planner.read_stats().decoded == 1, offset


async def test_damaged_file_is_replaced_when_no_plan_uses_the_block(folder: Path, table: Table) -> None:
    path = find_block_file(folder / "home")
    content = path.read_bytes()
    arrays_offset, packed_columns = read_columns(content)
    data = bytearray(content)
    for packed_column in packed_columns:
        data[arrays_offset + packed_column.start] ^= 1
    path.write_bytes(data)
    async with open_test_planner(folder, plan_disk_bytes=FOLDER_BYTES, plan_memory_bytes=0) as planner:
        for low in (0, 500):
            assert await plan_file_numbers(planner, table.metadata, build_filter_of_files(low, low + 9)) == list(
                range(low, low + 10)
            )
        assert not planner._blocks.has_damaged
    assert path.read_bytes() == content


async def test_plans_during_the_detection_of_damage_are_right(folder: Path, table: Table) -> None:
    path = find_block_file(folder / "home")
    arrays_offset, packed_columns = read_columns(path.read_bytes())
    data = bytearray(path.read_bytes())
    for packed_column in packed_columns:
        data[arrays_offset + packed_column.start] ^= 1
    path.write_bytes(data)
    async with open_test_planner(folder, plan_disk_bytes=FOLDER_BYTES) as planner:
        expected = [(low, low + 10) for low in range(0, 2000, 100)]
        plans = [
            planner.bind_and_plan(table.metadata, ScanRequest(filter=parse_expression(build_filter_of_files(*ends))))
            for ends in expected
        ]
        counts = [len(scan.entry_ids) for scan in await asyncio.gather(*plans)]
        assert counts == [11] * len(expected)
        assert planner.read_stats().decoded == 1
        planner.check_invariants()


@pytest.mark.slow
async def test_view_that_was_loading_when_damage_was_found_is_loaded_again(tmp_path: Path) -> None:
    """A plan waits for a manifest, and already refers to the damaged cache file of another manifest.

    Before the wait ends, a second plan finds the damage and replaces the cache file.
    """
    table = Table(tmp_path / "t")
    table.commit(1, [manifest := table.write_manifest("m", range(FILES))])
    async with open_test_planner(tmp_path, plan_disk_bytes=FOLDER_BYTES) as planner:
        await planner.bind_and_plan(table.metadata, ScanRequest())
    path = find_block_file(tmp_path / "home")
    arrays_offset, packed_columns = read_columns(path.read_bytes())
    data = bytearray(path.read_bytes())
    for packed_column in packed_columns:
        data[arrays_offset + packed_column.start] ^= 1
    path.write_bytes(data)
    table.commit(2, [manifest, table.write_manifest("n", range(FILES, FILES + 10), snapshot_id=2)])
    recorders: list[RecordingObjects] = []

    def watch_reads(inner: ObjectStore) -> ObjectStore:
        recorders.append(RecordingObjects(inner))
        recorders[0].hold = "n.avro"
        return recorders[0]

    async with open_test_planner(tmp_path, watch_reads, plan_disk_bytes=FOLDER_BYTES) as planner:
        old_request = ScanRequest(snapshot_id=1, filter=parse_expression(build_filter_of_files(10, 19)))
        await planner.view(table.metadata, ScanRequest(snapshot_id=1))
        view_task = asyncio.create_task(planner.view(table.metadata, ScanRequest()))
        await until(lambda: recorders[0].is_holding)
        assert len((await planner.bind_and_plan(table.metadata, old_request)).entry_ids) == 10
        recorders[0].resume()
        await view_task
        for snapshot_id in (2, 1):
            planned_files = await plan_file_numbers(
                planner, table.metadata, build_filter_of_files(20, 29), snapshot_id=snapshot_id
            )
            assert planned_files == list(range(20, 30))
        planner.check_invariants()


async def test_server_repeats_an_answer_that_finds_damage(tmp_path: Path) -> None:
    """The test plans and looks up over HTTP; each request finds a damaged file in its own run of the server."""
    options = {"plan_disk_bytes": FOLDER_BYTES, "plan_inline_limit": 10}
    files = [build_data_file(f"file:///t/data/{n:06d}.parquet", 10 * n, 10 * n + 9) for n in range(FILES)]
    async with run_server(tmp_path, **options) as server:
        api = Api(server)
        await api.create_table()
        await append_files(api, "t", files, snapshot_id=1)
        token = (await api("POST", f"{T}/plan", {})).json["plan-tasks"][0]
        files_page = (await api("GET", FILES_PAGE)).json
    (path,) = (path for path in tmp_path.rglob("*.block") if path.stat().st_size > MAP_BYTES_MIN)
    content = path.read_bytes()
    arrays_offset, packed_columns = read_columns(content)
    data = bytearray(content)
    for packed_column in packed_columns:
        data[arrays_offset + packed_column.start] ^= 1
    narrow_filter = {"type": "lt-eq", "term": "id", "value": 59}
    for method, url, body in (
        ("POST", f"{T}/plan", {"filter": narrow_filter}),
        ("POST", f"{T}/tasks", {"plan-task": token}),
        ("GET", FILES_PAGE, None),
    ):
        path.write_bytes(data)
        async with run_server(tmp_path, **options) as server:
            answer = await Api(server)(method, url, body)
            assert answer.status == 200, answer.raw
            if url == FILES_PAGE:
                assert answer.json == files_page
            else:
                paths = [task["data-file"]["file-path"] for task in answer.json["file-scan-tasks"]]
                assert paths == [file.path for file in files[: len(paths)]]
                assert len(paths) == 6 if "filter" in body else paths
        assert path.read_bytes() == content, "the block must be decoded and stored again"
