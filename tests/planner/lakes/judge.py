"""Run our planner on random cases, and check it against rows, the specification's delete rules and Iceberg Java.

For each case, with any lake, snapshot, names and filter:

- The plan has every file with a matching row, whether zeros are equal or not, and only live files. Half of the plans
  are for clients for which NaN is above every number; they have the files with rows that match then.
- The plan has no file that Java's planner prunes, except files with a matching row.
- For a planned file, the plan names every delete file that removes a matching row, no delete file that the
  specification does not apply to the file, and none that Java omits when it plans without a filter.
- The residual and the filter give the same answer on every row of the file, for every client. A filter with an
  infinity, which JSON cannot express, is evaluated as in Spark.
- The JSON for a client says the same as the plan.

Java's answer is not used where Java has a known fault (`predicates.is_judged_otherwise_by_java`), where it refuses
the filter, and where clients differ about zeros or about NaN as a partition value (the greatest number in Spark).
Delete files are compared with those that Java names without a filter, because ours do not depend on the filter: one
plan of the deletes serves all cases.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from seamark.formats.iceberg.expressions.expression import FALSE
from seamark.formats.iceberg.expressions.expression_json import encode_expression, parse_expression
from seamark.formats.iceberg.expressions.residuals import make_bindable
from seamark.formats.iceberg.metadata.table_json import decode_table
from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import NotAcceptable
from seamark.metaserver.index.blocks.block import Block
from seamark.metaserver.objects.router import open_objects
from seamark.metaserver.planner.answer.answer import ScanTaskWriter
from seamark.metaserver.planner.plan.planner import Planner, open_planner
from seamark.metaserver.planner.scan.request import ScanRequest
from seamark.metaserver.planner.scan.scan_plan import ScanPlan
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import Entry
from tests.planner.lakes.cases import ScanCase, draw_cases
from tests.planner.lakes.kinds import FLOATS, LONG_MIN
from tests.planner.lakes.lake import ContentFile, DataFile, DeleteFile
from tests.planner.lakes.predicates import (
    IEEE_FLOAT_ORDER,
    JAVA_FLOAT_ORDER,
    SPARK_FLOAT_ORDER,
    find_transformed,
    is_judged_otherwise_by_java,
)
from tests.services.java_planner import JavaPlan, JavaPlanner, PlanRequest

LAKES_PER_BATCH = 20
CLIENTS = (IEEE_FLOAT_ORDER, JAVA_FLOAT_ORDER, SPARK_FLOAT_ORDER)


@dataclass(frozen=True)
class SeamarkTask:
    """One file of Seamark's plan: the names of its delete files, and the residual's JSON, or None if it is omitted."""

    deletes: list[str]
    residual: Any


async def plan_with_seamark(planner: Planner, case: ScanCase, entry: Entry | None = None) -> dict[str, SeamarkTask]:
    """Plan a case with Seamark, check that the JSON of the answer equals the plan, and return the tasks by file path.

    Args:
        entry: The table's entry in the catalog, from which the plan takes the indexes. None means no indexes.
    """
    location = case.lake.metadata_location
    metadata = decode_table(Path(location.removeprefix("file://")).read_bytes(), location)
    request = ScanRequest(
        filter=parse_expression(case.filter),
        snapshot_id=case.snapshot_id,
        case_sensitive=case.case_sensitive,
        use_snapshot_schema=case.uses_names_of_snapshot,
        nan_above=case.is_nan_greatest,
    )
    scan = await planner.bind_and_plan(metadata, request, entry)
    plan, expected_tasks = {}, {}
    for row in scan.entry_ids.tolist():
        block, row_in_block = scan.view.locate(row)
        path = block.read_text("file_path", row_in_block)
        assert path is not None
        assert path not in plan, f"the plan contains {path} twice\n{case}"
        deletes = [_format_delete_name(*scan.view.locate_delete(delete)) for delete in scan.deletes(row)]
        residual = scan.compute_residual(row)
        if residual == FALSE:
            continue  # A file with the residual FALSE is not in the answer.
        plan[path] = SeamarkTask(deletes, encode_expression(residual))
        # A residual that cannot be bound by name is omitted: the client uses the filter (REST spec, `FileScanTask`).
        is_named = make_bindable(residual, metadata.current_schema) == residual
        expected_tasks[path] = SeamarkTask(deletes, encode_expression(residual) if is_named else None)
    try:
        tasks_by_path = _parse_answer(scan)
    except NotAcceptable:
        assert any(_has_nan(file) for file in case.snapshot.data_files), f"{case}"
        return plan
    for path, task in tasks_by_path.items():
        if _is_tautology(task.residual) and path in expected_tasks and expected_tasks[path].residual is True:
            expected_tasks[path] = task  # PyIceberg must not count rows by TRUE, so the answer has a tautology.
    assert tasks_by_path == expected_tasks, f"the JSON differs from the plan\n{case}"
    return plan


def _is_tautology(residual: Any) -> bool:
    match residual:
        case {"type": "or", "left": {"type": "is-null", "term": column}, "right": {"type": "not-null", "term": other}}:
            return bool(column == other)
    return False


def _format_delete_name(block: Block, row: int) -> str:
    path, offset = block.read_text("file_path", row), block.read_long("content_offset", row)
    assert path is not None
    return path if offset is None else f"{path}#{offset}"


def _parse_answer(scan: ScanPlan) -> dict[str, SeamarkTask]:
    """Return the plan as parsed from its JSON.

    Raises:
        NotAcceptable: JSON cannot express the plan.
    """
    answer = ScanTaskWriter(scan)
    tasks = json.loads(b"[" + b"".join(answer.write_tasks(scan.entry_ids)) + b"]")
    deletes = []
    for delete in json.loads(b"[" + b"".join(answer.write_delete_files()) + b"]"):
        offset = delete.get("content-offset")
        deletes.append(delete["file-path"] if offset is None else f"{delete['file-path']}#{offset}")
    return {
        task["data-file"]["file-path"]: SeamarkTask(
            [deletes[index] for index in task.get("delete-file-references", ())], task.get("residual-filter")
        )
        for task in tasks
    }


def judge(
    case: ScanCase, tasks: dict[str, SeamarkTask], java_plan: JavaPlan, unfiltered_plan: JavaPlan
) -> Counter[str]:
    """Check a plan, and count the situations that occurred.

    `CLIENTS` are the three orders of floats: zeros are equal (IEEE 754), -0.0 is less than 0.0 (Java), and NaN is the
    greatest value (Spark). A plan must be correct for the first two. It must be correct for Spark only if the case has
    `is_nan_greatest`.

    Args:
        java_plan: Java's plan with the filter of the case.
        unfiltered_plan: Java's plan without a filter.
    Raises:
        AssertionError: The plan violates a rule; the message names the seed.
    """
    counts: Counter[str] = Counter(["case", "refused by java" if java_plan.error else "planned by java"])
    files_by_path = {file.path: file for file in case.snapshot.data_files}
    assert set(tasks) <= set(files_by_path), (
        f"the plan contains files that are not live: {set(tasks) - set(files_by_path)}\n{case}"
    )
    # Java's plan has no known fault for this filter.
    is_trusted = java_plan.error is None and not is_judged_otherwise_by_java(case.filter, case.names, case.lake)
    for path, file in files_by_path.items():
        equal_rows, ordered_rows, spark_rows = (
            case.match_rows(file, case.filter, float_order) for float_order in CLIENTS
        )
        expected = [is_match or other for is_match, other in zip(equal_rows, ordered_rows, strict=True)]
        if case.is_nan_greatest:
            expected = [is_match or other for is_match, other in zip(expected, spark_rows, strict=True)]
        if path not in tasks:
            assert not any(expected), f"{_describe_file(file)} has a matching row and is not planned\n{case}"
            counts["dropped"] += 1
            continue
        counts["kept"] += 1
        counts["kept with a match"] += any(expected)
        may_differ_from_java = (
            case.compares_zero
            or _has_nan(file)
            or _is_bounded_by_the_least_long(file)
            or _is_misrounding_possible(case, file)
            or (case.is_nan_greatest and _is_nan_possible(case, file))
        )
        if is_trusted and path not in java_plan.tasks and not may_differ_from_java and not any(expected):
            raise AssertionError(f"{_describe_file(file)} is planned, but Java prunes it\n{case}")
        _check_deletes(case, file, tasks[path], expected, unfiltered_plan, counts)
        for float_order, filter_matches in zip(CLIENTS, (equal_rows, ordered_rows, spark_rows), strict=True):
            residual_matches = case.match_rows(file, tasks[path].residual, float_order)
            if case.is_nan_greatest:  # Then the residual tests for NaN, however the client compares NaN.
                filter_matches = case.match_rows(file, case.filter, replace(float_order, nan_greatest=True))
            assert residual_matches == filter_matches or (case.names_infinity and residual_matches == spark_rows), (
                f"residual {tasks[path].residual} of {_describe_file(file)} for {float_order}\n{case}"
            )
    return counts


def _check_deletes(
    case: ScanCase, file: DataFile, task: SeamarkTask, expected: list[bool], java_plan: JavaPlan, counts: Counter[str]
) -> None:
    """Check that a planned file has all delete files that it needs, and no delete file that Java leaves out.

    Args:
        expected: For each row of the file, whether it matches the filter.
        java_plan: Java's plan of the snapshot without a filter.
    """
    lake = case.lake
    applicable = {delete.name: delete for delete in lake.find_applicable_deletes(case.snapshot, file)}
    deletes = set(task.deletes)
    assert len(deletes) == len(task.deletes), f"the plan names a delete file twice for {_describe_file(file)}\n{case}"
    assert deletes <= set(applicable), f"{deletes - set(applicable)} do not apply to {_describe_file(file)}\n{case}"
    needed_deletes = {name for name, delete in applicable.items() if _is_removing(case, delete, file, expected)}
    assert needed_deletes <= deletes, (
        f"the plan omits {needed_deletes - deletes}, which remove rows of {_describe_file(file)}\n{case}"
    )
    counts["deletes needed"] += len(needed_deletes)
    counts["deletes named"] += len(deletes)
    # The least long means "no bound" in Seamark, so Java may omit more deletes of this file. If Java fails, there
    # is no plan to compare with.
    if java_plan.error or _is_bounded_by_the_least_long(file):
        return
    if not any(_may_java_omit_needed_delete(case, delete) for delete in applicable.values()):
        java_deletes = java_plan.tasks[file.path].deletes
        assert deletes <= java_deletes, (
            f"the plan names {deletes - java_deletes}, which Java omits for {_describe_file(file)}\n{case}"
        )


def _is_removing(case: ScanCase, delete: DeleteFile, file: DataFile, are_matching: list[bool]) -> bool:
    """Return whether a delete file removes a row that matches the filter.

    Args:
        case: The scan.
        delete: The delete file.
        file: The data file.
        are_matching: For each row of the data file, whether it matches the filter.
    """
    return any(
        are_matching[position]
        for position in case.lake.find_removed_positions(delete, file)
        if position < len(are_matching)
    )


def _is_nan_possible(case: ScanCase, file: DataFile) -> bool:
    """Return whether a float column may have NaN in the file, by the file's metrics."""
    floats = [column.id for column in case.lake.all_columns.values() if column.kind in FLOATS]
    return any(file.metrics[item].nans != 0 if item in file.metrics else True for item in floats)


def _has_nan(file: DataFile) -> bool:
    return any(value != value for value in file.partition)


def _is_bounded_by_the_least_long(file: ContentFile) -> bool:
    """Return whether a bound of the file is the least long.

    Seamark represents "no bound" by this value, so it keeps a file with this bound as if the file had no bound.
    """
    minimum = LONG_MIN.to_bytes(8, "little", signed=True)
    return any(minimum in (column.lower, column.upper) for column in file.metrics.values())


def _is_misrounding_possible(case: ScanCase, file: DataFile) -> bool:
    """Return whether Java up to 0.10 may have rounded a time before 1970 up, which is wrong.

    Java's readers do not correct this for predicates on the transform.
    """
    ids = {case.names[name].id for name in find_transformed(case.filter)}
    parts = zip(case.lake.specs[file.spec_id], file.partition, strict=True)
    return any(
        part.source in ids and part.transform in ("year", "month", "day", "hour") and value is not None and value <= 0
        for part, value in parts
    )


def _may_java_omit_needed_delete(case: ScanCase, delete: DeleteFile) -> bool:
    """Return whether Java may omit an equality delete file that Seamark cannot or must not omit.

    Java compares bounds of UUIDs in its own order. It uses statistics of dropped columns, although the schema of a
    later manifest does not have the column. It assumes that a required column of an optional struct has no nulls. And
    it uses the least long as a bound, which means "no bound" in Seamark.
    """
    columns, current_columns = case.lake.all_columns, case.lake.schema.list_columns()
    return _is_bounded_by_the_least_long(delete) or any(
        columns[key].kind == "uuid"
        or key not in current_columns
        or (
            current_columns[key].required
            and any(not current_columns[parent].required for parent in current_columns[key].parents)
        )
        for key in delete.equality_ids or ()
    )


def _describe_file(file: DataFile) -> str:
    return f"{file.path} (spec {file.spec_id}, {file.partition}, sequence {file.sequence}, {file.metrics}, {file.rows})"


async def run_campaign(seeds: Sequence[int], per_lake: int, folder: Path, java_planner: JavaPlanner) -> Counter[str]:
    """Check random scans of random tables against the rows and against Java's planner.

    Args:
        seeds: The seeds of the tables.
        per_lake: The number of scans of each table.

    Returns:
        The number of times that each situation occurred.
    """
    counts: Counter[str] = Counter()
    settings = Settings(home=folder / "home", warehouse=folder.as_uri(), plan_disk_bytes=0)
    clock = SystemClock()
    async with open_objects(settings, clock) as objects, open_planner(settings, objects, clock) as planner:
        for start in range(0, len(seeds), LAKES_PER_BATCH):
            chunk = seeds[start : start + LAKES_PER_BATCH]
            random_cases = [case for seed in chunk for case in draw_cases(seed, folder, per_lake)]
            java_task = asyncio.create_task(asyncio.to_thread(plan_with_java, java_planner, random_cases))
            seamark_plans = [await plan_with_seamark(planner, case) for case in random_cases]
            for case, plan, (filtered_plan, unfiltered_plan) in zip(
                random_cases, seamark_plans, await java_task, strict=True
            ):
                counts += judge(case, plan, filtered_plan, unfiltered_plan)
            for seed in chunk:
                shutil.rmtree(folder / str(seed))
    return counts


def plan_with_java(java_planner: JavaPlanner, cases: Sequence[ScanCase]) -> list[tuple[JavaPlan, JavaPlan]]:
    """Return Java's plans of each case, with its filter and without a filter.

    Cases of one snapshot share the plan without a filter.
    """
    requests: dict[PlanRequest, None] = {}
    for case in cases:
        requests[case.build_java_request()] = None
        requests[case.build_unfiltered_request()] = None
    answers = dict(zip(requests, java_planner.plan(list(requests)), strict=True))
    return [(answers[case.build_java_request()], answers[case.build_unfiltered_request()]) for case in cases]
