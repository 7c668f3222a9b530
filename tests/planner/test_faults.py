"""Tests of broken tables, storage and cache folders: the plan is right, or the error names the file.

Manifests are read as stored. Avro has no checksum, so a flipped bit that still decodes is valid content; the oracle is
fastavro, which reads the same damaged bytes. Files of the cache folder have checksums: with any damage the plan is
right.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections import Counter
from io import BytesIO
from pathlib import Path

import fastavro
import pytest

from seamark.formats.runtime.errors import BadRequest, Corrupt, Forbidden, RetryLater, StorageError
from seamark.metaserver.planner.plan.planner import Planner
from seamark.metaserver.planner.scan.request import ScanRequest
from tests.api.client import Answer, Api
from tests.api.plans.planned import append_files, build_data_file
from tests.faults.rigs.disk import mount_small_disk
from tests.objects.faults import Fault, FaultyObjects
from tests.planner.lakes.manifests import Manifest
from tests.planner.lakes.tables import (
    UNCOMPRESSED_STYLE,
    Table,
    build_day_filter,
    build_filter_of_files,
    list_file_numbers,
    open_test_planner,
    plan_file_numbers,
    to_path,
)
from tests.seeds import mark_fast
from tests.server.rig import run_server
from tests.support.damage import Damage, append_bytes, flip_bit, truncate_at_random, write_zeros
from tests.support.wrapper_capture import WrapperCapture

T = "/v1/namespaces/db/tables/t"


def create_filled_table(folder: Path, *, days: int = 4, per_day: int = 10) -> tuple[Table, list[Manifest]]:
    """Return a table with a manifest of `per_day` files and one delete file for each day."""
    table = Table(folder)
    data = [table.write_manifest(f"m{day}", range(day * per_day, (day + 1) * per_day), day=day) for day in range(days)]
    deletes = [table.write_delete_manifest(f"d{day}", [day * per_day], day=day) for day in range(days)]
    manifests = [*data, *deletes]
    table.commit(1, manifests)
    return table, manifests


# Manifests and manifest lists


async def test_truncated_manifest_is_reported_as_corrupt_by_name(tmp_path: Path) -> None:
    table, manifests = create_filled_table(tmp_path / "t", per_day=40)
    for damaged_manifest in (manifests[1], manifests[5]):
        path = to_path(damaged_manifest)
        content = path.read_bytes()
        sync_marker = content[-16:]
        ends = [end for end in range(len(content)) if content[:end].endswith(sync_marker)]
        assert len(ends) > 2 or damaged_manifest.content == 1, (
            "the manifest must have several blocks, because a cut between two blocks looks like a complete file"
        )
        rng = random.Random(len(content))
        async with open_test_planner(tmp_path) as planner:
            for end in {0, 1, 3, 4, 16, len(content) - 1, *ends, *(rng.randrange(len(content)) for _ in range(40))}:
                path.write_bytes(content[:end])
                with pytest.raises(Corrupt, match=path.name):
                    await plan_file_numbers(planner, table.metadata)
            path.write_bytes(content)
            assert await plan_file_numbers(planner, table.metadata) == list(range(160)), (
                "a damaged manifest must not be cached"
            )


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("missing_file", ["m2.avro", "d1.avro", "snap-1.avro"])
async def test_missing_file_is_named_in_the_error_until_it_is_restored(tmp_path: Path, missing_file: str) -> None:
    table, _ = create_filled_table(tmp_path / "t")
    path = tmp_path / "t" / "metadata" / missing_file
    content = path.read_bytes()
    path.unlink()
    async with open_test_planner(tmp_path) as planner:
        for _ in range(2):
            with pytest.raises(Corrupt, match=f"{missing_file} is not in the storage; .* on the server's machine"):
                await plan_file_numbers(planner, table.metadata)
        if missing_file == "m2.avro":
            assert await plan_file_numbers(planner, table.metadata, build_day_filter(1)) == list(range(10, 20)), (
                "this plan does not need the missing file"
            )
        path.write_bytes(content)
        assert await plan_file_numbers(planner, table.metadata) == list(range(40))


async def _wait_for_released_blocks(planner: Planner) -> None:
    """Wait until no block is in memory, because a thread that has just read a block may still refer to it."""
    async with asyncio.timeout(60):
        while planner.read_stats().live_bytes:
            await asyncio.sleep(0.001)


def plan_by_fastavro(manifests: list[Manifest]) -> list[str] | None:
    """Return the paths of live data files in order, or None if fastavro cannot read the manifests."""
    paths = []
    try:
        for manifest in manifests:
            for entry in fastavro.reader(BytesIO(to_path(manifest).read_bytes())):
                assert isinstance(entry, dict)
                if entry["status"] != 2:  # The status 2 means that the file is deleted.
                    paths.append(entry["data_file"]["file_path"])
    except Exception:  # noqa: BLE001  fastavro raises errors of many types for damaged files
        return None
    return paths


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 60))])
async def test_manifest_with_flipped_bytes_is_corrupt_or_planned_as_stored(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    table = Table(tmp_path / "t", style=UNCOMPRESSED_STYLE) if seed % 2 else Table(tmp_path / "t")
    manifests = [table.write_manifest(f"m{day}", range(day * 10, day * 10 + 10), day=day) for day in range(3)]
    table.commit(1, manifests)
    metadata, outcomes = table.metadata, Counter[str]()
    path = to_path(manifests[1])
    content = path.read_bytes()
    async with open_test_planner(tmp_path, plan_memory_bytes=0) as planner:
        for round_number in range(150):
            damaged_bytes = bytearray(content)
            # The first block begins after the first sync marker; every third round may damage the header before it.
            start = 0 if round_number % 3 == 0 else content.index(content[-16:])
            for _ in range(rng.choice([1, 1, 2, 4])):  # A single flipped bit is the hardest to detect.
                damaged_bytes[rng.randrange(start, len(content))] ^= 1 << rng.randrange(8)
            path.write_bytes(damaged_bytes)
            context = f"seed {seed}, turn {round_number}"
            try:
                scan = await planner.bind_and_plan(metadata, ScanRequest())
            except Corrupt as error:
                outcomes["corrupt" if "m1.avro" in error.message else f"{context}: {error.message}"] += 1
                continue
            expected = plan_by_fastavro(manifests)
            entry_positions = (scan.view.locate(row) for row in scan.entry_ids.tolist())
            paths = [block.read_text("file_path", row) for block, row in entry_positions]
            if expected is not None:
                assert paths == expected, context
            outcomes["as stored"] += 1
            del scan
            await _wait_for_released_blocks(planner)
        path.write_bytes(content)
        assert await plan_file_numbers(planner, metadata) == list(range(30)), f"seed {seed}"
    assert outcomes["corrupt"] > 0
    assert set(outcomes) <= {"corrupt", "as stored"}, outcomes


async def test_manifest_that_disagrees_with_its_list_is_read_again(tmp_path: Path) -> None:
    table = Table(tmp_path / "t")
    manifest = table.write_manifest("m", range(10), day=1)
    table.commit(1, [manifest])
    path = to_path(manifest)
    content = path.read_bytes()
    # One byte with the length of the value precedes the value.
    spec_id_offset = content.index(b"partition-spec-id") + len(b"partition-spec-id") + 1
    async with open_test_planner(tmp_path) as planner:
        path.write_bytes(content[:spec_id_offset] + b"4" + content[spec_id_offset + 1 :])
        with pytest.raises(Corrupt, match="has partition spec 4; its manifest list states 0"):
            await plan_file_numbers(planner, table.metadata)
        path.write_bytes(content)
        assert await plan_file_numbers(planner, table.metadata) == list(range(10))


@pytest.mark.slow  # The place of the flipped byte depends on the length of the folder's name.
@pytest.mark.parametrize("seed", range(40))
async def test_damaged_manifest_list_is_an_error_or_planned_as_stored(tmp_path: Path, seed: int) -> None:
    """The plan has every manifest that fastavro reads from the damaged bytes."""
    rng = random.Random(seed)
    table, _ = create_filled_table(tmp_path / "t")
    metadata = table.metadata
    path = tmp_path / "t" / "metadata" / "snap-1.avro"
    content = path.read_bytes()
    paths = {item["manifest_path"] for item in fastavro.reader(BytesIO(content)) if isinstance(item, dict)}
    counts = Counter[str]()
    for round_number in range(60):
        damaged_bytes = bytearray(content)
        # Every fourth list is truncated. The flipped bits spare the first quarter, most of which is the header.
        if round_number % 4 == 0:
            del damaged_bytes[rng.randrange(len(damaged_bytes)) :]
        else:
            damaged_bytes[rng.randrange(len(content) // 4, len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged_bytes)
        context = f"seed {seed}, turn {round_number}"
        async with open_test_planner(tmp_path) as planner:
            try:
                scan = await planner.bind_and_plan(metadata, ScanRequest())
            except (Corrupt, BadRequest, Forbidden, StorageError) as error:
                counts[
                    "error"
                    if "anifest" in error.message or ".avro" in error.message or "metadata" in error.message
                    else f"{context}: {error.message}"
                ] += 1
                continue
            items = [item for item in fastavro.reader(BytesIO(bytes(damaged_bytes))) if isinstance(item, dict)]
            assert len(scan.view.manifests) + len(scan.view.delete_manifests) == len(items), context
            assert len(items) in (0, 8), context  # The list has one block with all 8 manifests.
            # A flipped bit may change a path into the path of another file, which is then planned twice, as stored.
            if {item["manifest_path"] for item in items} == paths:
                assert list_file_numbers(scan) == list(range(40)), context
            counts["as stored"] += 1
    assert counts["error"] > 20, "at least a third of the 60 damaged lists must be errors"
    assert set(counts) <= {"error", "as stored"}, counts


async def test_manifest_whose_spec_or_content_differs_from_its_list_is_corrupt(tmp_path: Path) -> None:
    table, manifests = create_filled_table(tmp_path / "t")
    contradictions: list[tuple[str, int, int, str]] = [
        ("m0.avro", 0, 7, "m0.avro has partition spec 0; its manifest list states 7"),
        ("d0.avro", 0, 0, "d0.avro lists delete files; its manifest list states data files"),
        ("m0.avro", 1, 0, "Delete manifest .*m0.avro lists .*which is not a delete file"),
    ]
    for snapshot_id, (name, content, spec_id, message) in enumerate(contradictions, start=2):
        original_fields = {
            "content": [manifest.content for manifest in manifests],
            "spec": [manifest.spec_id for manifest in manifests],
        }
        for manifest in manifests:
            if to_path(manifest).name == name:
                manifest.content, manifest.spec_id = content, spec_id
        table.commit(snapshot_id, manifests)
        for manifest, old_content, old_spec in zip(
            manifests, original_fields["content"], original_fields["spec"], strict=True
        ):
            manifest.content, manifest.spec_id = old_content, old_spec
        async with open_test_planner(tmp_path) as planner:
            for _ in range(2):
                with pytest.raises(Corrupt, match=message):
                    await plan_file_numbers(planner, table.metadata)
            assert await plan_file_numbers(planner, table.metadata, snapshot_id=1) == list(range(40)), (
                "the earlier snapshot, which has the same blocks, must be planned"
            )
            with pytest.raises(Corrupt, match=message):
                await plan_file_numbers(planner, table.metadata)


async def test_partition_of_an_unknown_type_is_planned(tmp_path: Path) -> None:
    """The type may come from a later format version or from a flipped bit in the schema of the header."""
    table, manifests = create_filled_table(tmp_path / "t")
    path = to_path(manifests[1])
    known_type, unknown_type = (b'"name": "day", "required": false, "type": "%s"' % kind for kind in (b"int", b"inv"))
    assert path.read_bytes().count(known_type) == 1
    path.write_bytes(path.read_bytes().replace(known_type, unknown_type))
    async with open_test_planner(tmp_path) as planner:
        assert await plan_file_numbers(planner, table.metadata) == list(range(40))
        assert await plan_file_numbers(planner, table.metadata, build_day_filter(1)) == list(range(10, 20))


async def test_broken_table_over_http_is_a_server_error_that_names_the_file(tmp_path: Path) -> None:
    # The plan has pages of 4 files, and no decoded manifest is stored, so each request reads the table.
    async with run_server(
        tmp_path, plan_inline_limit=2, plan_page_size=4, plan_memory_bytes=0, plan_disk_bytes=0
    ) as server:
        api = Api(server)
        location = (await api.create_table())["metadata"]["location"]
        files = [build_data_file(f"file:///t/data/{n:06d}.parquet", 10 * n, 10 * n + 9) for n in range(12)]
        await append_files(api, "t", files, snapshot_id=1, manifests=2)
        folder = Path(location.removeprefix("file://")) / "metadata"
        whole_plan = await api("POST", f"{T}/plan", {})
        token = whole_plan.json["plan-tasks"][0]
        path = folder / "1-1.avro"
        content = path.read_bytes()
        # The manifest is missing, empty, truncated, or a file of another format.
        for broken_content in (None, b"", content[:50], b"PAR1" + content):
            path.unlink() if broken_content is None else path.write_bytes(broken_content)
            for answer in (
                await api("POST", f"{T}/plan", {"filter": {"type": "gt", "term": "id", "value": 1}}),
                await api("POST", f"{T}/tasks", {"plan-task": token}),
                await api("GET", "/api/v1/tables/db/t/files"),
            ):
                _check_corrupt_metadata_error(answer, path.name)
        path.write_bytes(content)
        path = folder / "snap-1.avro"
        content = path.read_bytes()
        for broken_content in (None, b"", content[:50]):
            path.unlink() if broken_content is None else path.write_bytes(broken_content)
            # The first planner still has the manifest list in memory.
            async with run_server(tmp_path, plan_disk_bytes=0) as other_planner:
                _check_corrupt_metadata_error(await Api(other_planner)("POST", f"{T}/plan", {}), path.name)
        path.write_bytes(content)
        page = await api("POST", f"{T}/tasks", {"plan-task": token})
        assert len(page.json["file-scan-tasks"]) == 4


def _check_corrupt_metadata_error(answer: Answer, name: str) -> None:
    code, kind, message = answer.error
    assert (code, kind) == (500, "CorruptMetadataException"), answer.raw
    assert name in message
    assert "Traceback" not in message


# Storage that fails for a time


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 60))])
async def test_plans_are_right_after_the_storage_recovers(tmp_path: Path, seed: int) -> None:
    table, _ = create_filled_table(tmp_path / "t", days=8)
    rng = random.Random(seed)
    # The rates are so low that most plans succeed, and so high that some plans of each seed fail.
    rates = {Fault.BEFORE: 0.1, Fault.BROKEN: 0.03, Fault.LOST_REPLY: 0.05, Fault.SLOW: 0.2}
    capture = WrapperCapture(lambda inner: FaultyObjects(inner, seed=seed, rates=rates, slow_s=0.002))
    # Half of the seeds use a disk cache.
    async with open_test_planner(
        tmp_path, capture, plan_disk_bytes=(seed % 2) * (16 << 20), plan_memory_bytes=0
    ) as planner:
        counts = Counter[str]()
        for _ in range(12):
            ranges = [(low, low + rng.randrange(20)) for low in (rng.randrange(60) for _ in range(4))]
            plans = [
                plan_file_numbers(planner, table.metadata, build_filter_of_files(low, high)) for low, high in ranges
            ]
            for (low, high), result in zip(ranges, await asyncio.gather(*plans, return_exceptions=True), strict=True):
                if isinstance(result, BaseException):
                    assert isinstance(result, RetryLater | StorageError), result
                    assert "injected" in str(result)
                    counts["failed"] += 1
                else:
                    assert result == list(range(low, high + 1)), f"seed {seed}"
                    counts["planned"] += 1
        # A manifest in the disk cache is read from storage only once, and none of these reads may have failed.
        assert counts["failed"] or seed % 2, f"seed {seed}: no plan failed"
        capture.wrapper.rates = {}
        assert await plan_file_numbers(planner, table.metadata) == list(range(80)), f"seed {seed}"
        planner.check_invariants()


# The cache folder


DAMAGES: list[Damage] = [flip_bit, write_zeros, truncate_at_random, append_bytes]
FOLDER_BYTES = 64 << 20  # This is more than the blocks of any table here need.


def list_block_files(tmp_path: Path) -> list[Path]:
    """Return the block files, without SQLite's files."""
    folder = tmp_path / "home" / "cache" / "blocks"
    return sorted(folder.rglob("*.block"))


def damage_file(path: Path, damage_kind: Damage, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    (damage_kind if data else append_bytes)(data, rng)  # The other damages need bytes to change.
    path.write_bytes(data)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("damage_kind", mark_fast(DAMAGES, 2))
async def test_cache_files_damaged_between_two_runs_are_replaced(tmp_path: Path, damage_kind: Damage) -> None:
    table, manifests = create_filled_table(tmp_path / "t", days=2, per_day=3200)
    all_numbers = list(range(6_400))
    async with open_test_planner(tmp_path, plan_disk_bytes=FOLDER_BYTES) as planner:
        assert await plan_file_numbers(planner, table.metadata) == all_numbers
        assert planner.read_stats().decoded == len(manifests)
    files = list_block_files(tmp_path)
    assert len(files) == len(manifests)
    assert max(path.stat().st_size for path in files) > 64 * 1024, "one file must be large enough to be mapped"
    async with open_test_planner(tmp_path, plan_disk_bytes=FOLDER_BYTES) as planner:
        assert await plan_file_numbers(planner, table.metadata) == all_numbers
        assert planner.read_stats().decoded == 0
    rng = random.Random(damage_kind.__name__)
    for path in files:
        damage_file(path, damage_kind, rng)
    for filter, expected in ((build_filter_of_files(100, 3500), all_numbers[100:3501]), (True, all_numbers)):
        async with open_test_planner(tmp_path, plan_disk_bytes=FOLDER_BYTES) as planner:
            assert await plan_file_numbers(planner, table.metadata, filter) == expected
            # Damage in a column that no plan reads is not detected, and is harmless.
            decoded_count = planner.read_stats().decoded
            assert decoded_count == len(manifests) or damage_kind in (flip_bit, write_zeros) or filter is True


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 40))])
async def test_cache_files_damaged_during_a_run_change_no_answer(tmp_path: Path, seed: int) -> None:
    """Each plan reads the cache folder again.

    The planner keeps no decoded manifests in memory after a plan, because its budget is 0. So no file is in use when it
    is damaged.
    """
    rng = random.Random(seed)
    table, manifests = create_filled_table(tmp_path / "t", per_day=60)
    async with open_test_planner(tmp_path, plan_disk_bytes=FOLDER_BYTES, plan_memory_bytes=1 << 20) as planner:
        planner._views.budget_bytes = 0
        for round_number in range(40):
            low = rng.randrange(200)
            context = f"seed {seed}, turn {round_number}"
            assert await plan_file_numbers(planner, table.metadata, build_filter_of_files(low, low + 9)) == list(
                range(low, low + 10)
            ), context
            await _wait_for_released_blocks(planner)
            files = list_block_files(tmp_path)
            for path in rng.sample(files, min(len(files), rng.randrange(4))):
                if rng.random() < 0.3:
                    path.unlink()
                else:
                    damage_file(path, rng.choice(DAMAGES), rng)
        if rng.random() < 0.5:
            # Files may still be written after the answers.
            shutil.rmtree(tmp_path / "home" / "cache", ignore_errors=True)
        assert await plan_file_numbers(planner, table.metadata) == list(range(240)), f"seed {seed}"
        assert planner.read_stats().decoded > len(manifests)


async def test_planner_works_without_a_cache_folder_that_cannot_be_created(tmp_path: Path) -> None:
    table, _ = create_filled_table(tmp_path / "t")
    (tmp_path / "file").write_text("not a folder")
    for folder in (tmp_path / "file" / "blocks", Path("/proc/none/blocks")):
        async with open_test_planner(tmp_path, plan_disk_bytes=FOLDER_BYTES, plan_disk_folder=str(folder)) as planner:
            assert await plan_file_numbers(planner, table.metadata) == list(range(40))
            assert await plan_file_numbers(planner, table.metadata, build_day_filter(2)) == list(range(20, 30))


async def test_planner_skips_the_cache_folder_while_its_disk_is_full_or_read_only(tmp_path: Path) -> None:
    table, manifests = create_filled_table(tmp_path / "t")
    options = {
        "plan_disk_bytes": 8 << 20,
        "plan_memory_bytes": 1 << 20,
        "plan_disk_folder": str(tmp_path / "disk" / "b"),
    }
    with mount_small_disk(tmp_path / "disk") as disk:
        disk.fill()
        async with open_test_planner(tmp_path, **options) as planner:
            planner._views.budget_bytes = 0
            for _ in range(2):
                assert await plan_file_numbers(planner, table.metadata) == list(range(40))
                await _wait_for_released_blocks(planner)  # A block that waits for its write would serve the next plan.
            disk.free_space()
            assert await plan_file_numbers(planner, table.metadata, build_day_filter(1)) == list(range(10, 20))
            decoded_count = planner.read_stats().decoded
            assert decoded_count > len(manifests), "no block could be stored while the disk was full"
        async with open_test_planner(tmp_path, **options) as planner:
            assert await plan_file_numbers(planner, table.metadata) == list(range(40))
        decoded_count = len(manifests)
        async with asyncio.timeout(60):
            # On a busy machine, a plan does not wait for the lock of the folder, and stores nothing.
            while decoded_count:
                async with open_test_planner(tmp_path, **options) as planner:
                    assert await plan_file_numbers(planner, table.metadata) == list(range(40))
                    decoded_count = planner.read_stats().decoded
        await disk.make_read_only()
        for _ in range(2):
            async with open_test_planner(tmp_path, **options) as planner:
                assert await plan_file_numbers(planner, table.metadata) == list(range(40))
