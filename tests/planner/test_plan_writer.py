"""Plan tables of random lakes, compared with their manifests as fastavro reads them and with Iceberg Java's planner.

The entries of a plan table are those of the files that the plan keeps. Each entry equals the entry of the table's own
manifests with all inherited values (spec, "Sequence Number Inheritance", "First Row ID Inheritance"). Delete manifests
are listed unchanged. And Java plans the same files on the plan table as on the table, among those that are kept.

A failure names its seed and case; `PLANNER_SEEDS=17` replays seed 17, as in `test_oracle.py`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from seamark.formats.iceberg.expressions.expression_json import parse_expression
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.table_json import decode_table
from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import Corrupt
from seamark.metaserver.objects.router import open_objects
from seamark.metaserver.planner.plan.plan_writer import KeptManifests, PlanFiles, PlanWriter, find_kept_manifests
from seamark.metaserver.planner.plan.planner import Planner, open_planner
from seamark.metaserver.planner.scan.request import ScanRequest
from seamark.metaserver.settings.settings import Settings
from tests.planner.lakes.cases import ScanCase, draw_cases
from tests.planner.lakes.entries import Record, assert_same, read_data_files, read_entries, read_manifest_list
from tests.planner.lakes.history import write_random_lake
from tests.planner.lakes.lake import DataFile
from tests.planner.lakes.lake import LakeSnapshot as KnownSnapshot
from tests.planner.test_oracle import read_seeds
from tests.seeds import examples
from tests.services.java_planner import JavaPlan, JavaPlanner, PlanRequest


class PlanTableFolder:
    """A planner, and a writer of plan tables in the folders of the planned tables.

    A plan table is a copy of a table's metadata with only the files that a plan keeps.
    """

    def __init__(self, planner: Planner, writer: PlanWriter) -> None:
        self.planner, self.writer = planner, writer
        self.count = 0

    async def plan(
        self, case: ScanCase, metadata: TableMetadata | None = None
    ) -> tuple[KeptManifests, PlanFiles, set[str]]:
        """Plan a case, and write its plan table.

        Args:
            case: The table and its filter.
            metadata: The metadata of the table. By default, it is read from the file of the case.

        Returns:
            The kept manifests, the files that were written, and the paths that the planner keeps.
        """
        if metadata is None:
            location = case.lake.metadata_location
            metadata = decode_table(Path(location.removeprefix("file://")).read_bytes(), location)
        request = ScanRequest(
            filter=parse_expression(case.filter), snapshot_id=case.snapshot.id, case_sensitive=case.case_sensitive
        )
        scan = await self.planner.bind_and_plan(metadata, request)
        entry_positions = [scan.view.locate(row) for row in scan.entry_ids.tolist()]
        kept_manifests = find_kept_manifests(scan, metadata.format_version)
        snapshot = metadata.snapshot(case.snapshot.id)
        assert snapshot is not None
        self.count += 1
        folder = case.lake.folder / "_seamark" / "plans" / str(self.count)
        folder.parent.mkdir(parents=True, exist_ok=True)
        plan_table = await self.writer.encode(kept_manifests, metadata, snapshot, folder.as_uri(), "p")
        for path, data in plan_table.files:
            Path(path.removeprefix("file://")).write_bytes(data)
        return kept_manifests, plan_table, {block.read_text("file_path", row) or "" for block, row in entry_positions}


async def check_case(tables: PlanTableFolder, case: ScanCase) -> tuple[str, set[str], Counter[str]]:
    """Check the plan table of a case.

    Returns:
        The location of the metadata of the plan table, the kept files, and counts: "unchanged manifests" are used as
        they are, "rewritten entries" are in new manifests, and "deletes" are manifests of delete files.
    """
    context = str(case)
    kept_manifests, plan_table, paths = await tables.plan(case)
    location = plan_table.files[-1][0]
    metadata = json.loads(Path(location.removeprefix("file://")).read_bytes())
    assert decode_table(plan_table.files[-1][1], location) == plan_table.metadata, context
    (snapshot,) = metadata["snapshots"]
    original_snapshot = case.snapshot.json
    assert {**snapshot, "manifest-list": None} == {**original_snapshot, "manifest-list": None}, context
    assert metadata["current-snapshot-id"] == snapshot["snapshot-id"] == metadata["refs"]["main"]["snapshot-id"], (
        context
    )
    assert metadata.get("next-row-id") == case.lake.metadata.get("next-row-id"), context
    old_manifests, listed_manifests = (
        read_manifest_list(original_snapshot["manifest-list"]),
        read_manifest_list(snapshot["manifest-list"]),
    )
    deletes = [manifest for manifest in old_manifests if manifest["content"]]
    assert [manifest for manifest in listed_manifests if manifest["content"]] == deletes, context
    old_manifests_by_path = {manifest["path"]: manifest for manifest in old_manifests}
    new_manifests = [manifest for manifest in listed_manifests if manifest["path"] not in old_manifests_by_path]
    for manifest in listed_manifests:
        assert manifest["path"] not in old_manifests_by_path or manifest == old_manifests_by_path[manifest["path"]], (
            context
        )
    assert len(new_manifests) == len({manifest["spec_id"] for manifest in new_manifests}), context
    original_entries, data_files = (
        read_data_files(old_manifests, case.lake.version),
        read_data_files(listed_manifests, case.lake.version),
    )
    assert data_files.keys() == paths, context
    for path, entry in data_files.items():
        assert_same(entry, original_entries[path], f"{path}\n{context}")
    for manifest in new_manifests:
        entries = list(read_entries(manifest["path"]))
        assert {entry["status"] for entry in entries} == {0}, context
        assert (manifest["added"], manifest["existing"], manifest["deleted"]) == (0, len(entries), 0), context
        assert manifest["existing_rows"] == sum(entry["record_count"] for entry in entries), context
    check_inherited_values(case.snapshot, data_files, context)
    counts = Counter(["case", f"version {case.lake.version}"])
    counts["unchanged manifests"] = len(kept_manifests.whole)
    counts["rewritten entries"] = kept_manifests.entries
    counts["deletes"] = len(deletes)
    counts["empty"] = int(not paths)
    counts["of several specs"] = int(len(new_manifests) > 1)
    return location, paths, counts


def check_inherited_values(snapshot: KnownSnapshot, entries: dict[str, Record], context: str) -> None:
    """Check that the entries of a plan table have the sequence numbers, snapshot ids and row counts of their files."""
    data_files: dict[str, DataFile] = {file.path: file for file in snapshot.data_files}
    for path, entry in entries.items():
        file = data_files[path]
        assert (entry["sequence_number"], entry["snapshot_id"]) == (file.sequence, file.snapshot_id), (
            f"{path}\n{context}"
        )
        assert entry["record_count"] == file.record_count, f"{path}\n{context}"


def judge_java(case: ScanCase, paths: set[str], table_plan: JavaPlan, plan: JavaPlan) -> bool:
    """Check that Java plans the same tasks on the plan table as on the table.

    Args:
        paths: The files that Seamark's planner keeps. A plan table has only these files.
        table_plan: Java's plan of the table.
        plan: Java's plan of the plan table.

    Returns:
        False if Java refuses to plan the table.
    """
    if table_plan.error is not None:
        return False
    assert plan.error is None, f"{plan.error}\n{case}"
    expected = {path: task for path, task in table_plan.tasks.items() if path in paths}
    # Java orders bounds of UUIDs differently, and skips manifests that it should read.
    has_uuids = any(column.kind == "uuid" for column in case.lake.all_columns.values())
    planned_tasks = {path: task for path, task in plan.tasks.items() if not has_uuids or path in expected}
    assert planned_tasks == expected, f"{case}"
    return True


async def run_campaign(seeds: Sequence[int], per_lake: int, folder: Path, java_planner: JavaPlanner) -> Counter[str]:
    counts: Counter[str] = Counter()
    settings = Settings(home=folder / "home", warehouse=folder.as_uri(), plan_disk_bytes=0)
    clock = SystemClock()
    async with open_objects(settings, clock) as objects, open_planner(settings, objects, clock) as planner:
        tables = PlanTableFolder(planner, PlanWriter(objects, budget_bytes=1 << 20, limit_bytes=1 << 30))
        for seed in seeds:
            random_cases = [case for case in draw_cases(seed, folder, per_lake) if not case.uses_names_of_snapshot]
            results = [await check_case(tables, case) for case in random_cases]
            queries = []
            for case, (location, _, case_counts) in zip(random_cases, results, strict=True):
                counts += case_counts
                request = change_plan_options(case.build_java_request(), snapshot_id=case.snapshot.id)
                queries += [request, change_plan_options(request, metadata=location)]
            answers = java_planner.plan(queries)
            for case, (_, paths, _), table, plan in zip(
                random_cases, results, answers[::2], answers[1::2], strict=True
            ):
                counts["planned by java"] += judge_java(case, paths, table, plan)
    return counts


def change_plan_options(request: PlanRequest, **options: Any) -> PlanRequest:
    return PlanRequest(**{**request.__dict__, **options})


async def test_plan_tables_have_the_unchanged_entries_of_their_plan(tmp_path: Path, java: JavaPlanner) -> None:
    """A plan table is a snapshot that has only the files of a plan, so that any reader can read the plan."""
    count = examples(35, 14)
    counts = await run_campaign(read_seeds(range(20, 20 + count)), 8, tmp_path, java)  # The seeds have all versions.
    print(dict(counts))
    # Java refuses some tables. Each version and each outcome must occur often enough that the test proves something.
    assert counts["planned by java"] > 0.8 * counts["case"]
    assert min(counts[f"version {version}"] for version in (1, 2, 3)) > count / 2
    assert (
        min(counts[outcome] for outcome in ("unchanged manifests", "rewritten entries", "deletes", "empty")) > count / 2
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_plan_tables_have_the_unchanged_entries_in_thousands_of_cases(tmp_path: Path, java: JavaPlanner) -> None:
    counts = await run_campaign(read_seeds(range(20_000, 20_400)), 8, tmp_path, java)
    print(dict(counts))


@pytest.fixture
async def tables(tmp_path: Path) -> AsyncIterator[PlanTableFolder]:
    settings = Settings(home=tmp_path / "home", warehouse=tmp_path.as_uri(), plan_disk_bytes=0)
    clock = SystemClock()
    async with open_objects(settings, clock) as objects, open_planner(settings, objects, clock) as planner:
        yield PlanTableFolder(planner, PlanWriter(objects, budget_bytes=0, limit_bytes=1 << 30))


def draw_lake_cases(folder: Path, version: int, count: int = 30) -> list[ScanCase]:
    """Return cases of the first random table with this format version."""
    for seed in range(500, 600):  # A hundred random tables include every version.
        if write_random_lake(seed, folder / "look" / str(seed)).version == version:
            # The filter of a plan table always has the names of the current schema.
            return [case for case in draw_cases(seed, folder, count) if not case.uses_names_of_snapshot]
    raise AssertionError(f"no lake has format version {version}")


def read_metadata(case: ScanCase) -> TableMetadata:
    location = case.lake.metadata_location
    return decode_table(Path(location.removeprefix("file://")).read_bytes(), location)


async def test_version_1_snapshot_without_a_manifest_list_gets_one_in_the_plan_table(
    tables: PlanTableFolder, tmp_path: Path
) -> None:
    planned_count = 0
    for case in draw_lake_cases(tmp_path, 1):
        metadata = read_metadata(case)
        paths = tuple(row["path"] for row in read_manifest_list(case.snapshot.json["manifest-list"]))
        snapshots = tuple(
            msgspec.structs.replace(snapshot, manifest_list=None, manifests=paths)
            if snapshot.snapshot_id == case.snapshot.id
            else snapshot
            for snapshot in metadata.snapshots
        )
        kept_manifests, plan_table, expected = await tables.plan(
            case, msgspec.structs.replace(metadata, snapshots=snapshots)
        )
        assert kept_manifests.whole == (), "the lengths of the manifests are unknown"
        (snapshot,) = plan_table.metadata.snapshots
        assert snapshot.manifests is None
        assert snapshot.manifest_list is not None
        data_files = read_data_files(read_manifest_list(snapshot.manifest_list), 1)
        assert data_files.keys() == expected
        original_entries = read_data_files(read_manifest_list(case.snapshot.json["manifest-list"]), 1)
        for path, entry in data_files.items():
            assert_same(entry, original_entries[path], f"{path}\n{case}")
        planned_count += len(expected)
    assert planned_count > 10


async def test_files_older_than_an_upgrade_to_version_3_get_no_row_ids(tables: PlanTableFolder, tmp_path: Path) -> None:
    planned_count = 0
    for case in draw_lake_cases(tmp_path, 2):
        upgraded_metadata = msgspec.structs.replace(read_metadata(case), format_version=3, next_row_id=0)
        kept_manifests, plan_table, expected = await tables.plan(case, upgraded_metadata)
        assert plan_table.metadata.format_version == 3
        (snapshot,) = plan_table.metadata.snapshots
        assert snapshot.first_row_id is None
        assert snapshot.manifest_list is not None
        data_files = read_data_files(read_manifest_list(snapshot.manifest_list), 2)
        assert data_files.keys() == expected
        assert all(entry["first_row_id"] is None for entry in data_files.values())
        assert all(row["first_row_id"] is None for row in read_manifest_list(snapshot.manifest_list))
        planned_count += kept_manifests.entries
    assert planned_count > 5


async def test_error_names_the_manifest_that_is_truncated_or_missing(tables: PlanTableFolder, tmp_path: Path) -> None:
    for case in draw_lake_cases(tmp_path, 2):
        kept_manifests, _, _ = await tables.plan(case)
        if kept_manifests.parts:
            break
    metadata = read_metadata(case)
    snapshot = metadata.snapshot(case.snapshot.id)
    assert snapshot is not None
    file = Path(kept_manifests.parts[0].manifest.manifest_path.removeprefix("file://"))
    data = file.read_bytes()
    for damaged_data in (data[:-1], data[: len(data) // 2], b"", None):
        file.unlink(missing_ok=True)
        if damaged_data is not None:
            file.write_bytes(damaged_data)
        with pytest.raises(Corrupt, match=file.name):
            await tables.writer.encode(kept_manifests, metadata, snapshot, "file:///nowhere", "p")


async def test_plan_table_has_an_empty_location_that_is_never_cleaned_or_written(
    tables: PlanTableFolder, tmp_path: Path
) -> None:
    case = draw_lake_cases(tmp_path, 2)[0]
    _, plan_table, _ = await tables.plan(case)
    planned_metadata, metadata = plan_table.metadata, read_metadata(case)
    assert planned_metadata.properties == {**metadata.properties, "gc.enabled": "false"}
    # The location of the plan table is empty, so engines find no unreferenced files to remove.
    assert planned_metadata.location.startswith(f"{metadata.location}/_seamark/plans/")
    assert not Path(planned_metadata.location.removeprefix("file://")).exists()
    assert all(path.startswith(f"{planned_metadata.location}-p") for path, _ in plan_table.files)
    assert planned_metadata.snapshot_log == planned_metadata.metadata_log == ()
    assert planned_metadata.table_uuid == metadata.table_uuid
