"""Tests of planning with several worker processes. They share decoded manifests and plan tasks, and may be killed.

The oracle of plans is the hand-made table, or PyIceberg's plan of the same snapshot.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.expressions import And, GreaterThanOrEqual, LessThanOrEqual
from pyiceberg.table import StaticTable

from tests.faults.rigs.http import HttpClient, OutcomeUnknown
from tests.planner.lakes.tables import Table, build_filter_of_files
from tests.server.test_processes import list_workers, wait_until
from tests.services.seamark import Seamark

TABLE_PATH = "/v1/namespaces/db/tables/t"
Start = Callable[..., Seamark]


def wait_for_workers(server: Seamark, count: int = 2) -> None:
    """Wait until `count` workers have begun to serve since the start of the server."""
    wait_until(lambda: server.log.read_text().count('"event":"serving"') == count)


def register_table(server: Seamark, name: str, manifests: int, per_manifest: int) -> Table:
    """Register a table `db.<name>`, and return it. Its files are numbered from 0."""
    table = Table(Path(server.warehouse.removeprefix("file://")) / "db" / name)
    listed_manifests = [
        table.write_manifest(f"m{index}", range(index * per_manifest, (index + 1) * per_manifest), day=index)
        for index in range(manifests)
    ]
    table.commit(1, listed_manifests)
    client = HttpClient(server.base_url)
    client.call("POST", "/v1/namespaces", {"namespace": ["db"]})
    body = {"name": name, "metadata-location": table.write_metadata()}
    status, answer = client.call("POST", "/v1/namespaces/db/register", body)
    assert status == 200, answer
    return table


def read_file_number(path: str) -> int:
    """Return the six digits before the suffix .parquet."""
    return int(path[-14:-8])


def list_file_numbers(answer: Any) -> list[int]:
    return [read_file_number(task["data-file"]["file-path"]) for task in answer["file-scan-tasks"]]


def plan_on_new_connection(server: Seamark, filter: Any = True, *, name: str = "t", **options: Any) -> tuple[int, Any]:
    """Plan on a new connection, which any of the workers may accept."""
    client = HttpClient(server.base_url)
    try:
        return client.call("POST", f"/v1/namespaces/db/tables/{name}/plan", {"filter": filter, **options})
    finally:
        client.close()


def count_decoded_manifests(server: Seamark) -> int:
    """Return the number of manifests that all live workers have decoded, as of the last second."""
    with urllib.request.urlopen(f"{server.base_url}/metrics", timeout=60) as answer:
        match = re.search(r"^seamark_plan_manifests_decoded (\S+)$", answer.read().decode(), re.MULTILINE)
    return int(float(match[1])) if match else 0


def list_workers_with(server: Seamark, operation: str) -> set[int]:
    lines = [line for line in server.log.read_text().splitlines() if line.startswith("{")]
    events = [event for event in map(json.loads, lines) if event["event"] == "request"]
    return {event["worker"] for event in events if event["operation"] == operation}


def test_manifest_decoded_by_one_worker_is_mapped_by_the_other(start_seamark: Start) -> None:
    server = start_seamark(flags=("--workers", "2"))
    wait_for_workers(server)
    register_table(server, "t", manifests=60, per_manifest=20)
    rng = random.Random(1)
    ranges = [(low, low + rng.randrange(400)) for low in (rng.randrange(700) for _ in range(60))]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda bounds: plan_on_new_connection(server, build_filter_of_files(*bounds)), ranges))
    for (low, high), (status, answer) in zip(ranges, answers, strict=True):
        assert status == 200, answer
        assert list_file_numbers(answer) == list(range(low, high + 1))
    assert list_workers_with(server, "planTableScan") == {0, 1}
    wait_until(lambda: count_decoded_manifests(server) >= 60)
    time.sleep(1.5)  # If a worker decodes a manifest again, it reports this within a second.
    assert count_decoded_manifests(server) == 60


def test_plan_task_of_one_worker_is_answered_by_the_other(start_seamark: Start) -> None:
    server = start_seamark(flags=("--workers", "2", "--plan-inline-limit", "2", "--plan-page-size", "7"))
    wait_for_workers(server)
    register_table(server, "t", manifests=5, per_manifest=20)
    planned_numbers = []
    for _ in range(8):
        status, answer = plan_on_new_connection(server, build_filter_of_files(5, 80))
        assert status == 200, answer
        tokens = answer["plan-tasks"]
        assert len(tokens) == 11  # There are 76 files, and a page has 7 files.
        planned_numbers.append([])
        for token in tokens:  # A new connection lets any worker answer.
            client = HttpClient(server.base_url)
            status, page = client.call("POST", f"{TABLE_PATH}/tasks", {"plan-task": token})
            client.close()
            assert status == 200, page
            planned_numbers[-1] += list_file_numbers(page)
    assert planned_numbers == [list(range(5, 81))] * 8
    assert list_workers_with(server, "fetchScanTasks") == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.02, 0.3, 0.8])
def test_worker_killed_during_a_cold_plan_does_not_affect_other_workers(start_seamark: Start, share: float) -> None:
    server = start_seamark(flags=("--workers", "2"))
    wait_for_workers(server)
    manifest_count, per_manifest = 250, 40
    register_table(server, "t", manifest_count, per_manifest)
    blocks = server.home / "cache" / "blocks"
    all_numbers = list(range(manifest_count * per_manifest))
    last_number = all_numbers[-1]

    def plan_from(offset: int) -> list[int] | None:
        try:
            status, answer = plan_on_new_connection(
                server, build_filter_of_files(last_number - 900 + offset, last_number)
            )
        except OutcomeUnknown:
            return None
        assert status == 200, answer
        return list_file_numbers(answer)

    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(plan_from, offset) for offset in range(8)]
        deadline = time.monotonic() + 60
        while len(list(blocks.rglob("*.block"))) < share * manifest_count and time.monotonic() < deadline:
            time.sleep(0.002)
        list_workers(server)[0].kill()
        planned_numbers = [future.result() for future in futures]
    for offset, numbers in enumerate(planned_numbers):
        assert numbers is None or numbers == all_numbers[last_number - 900 + offset :], (
            "an answer of another worker is right"
        )
    wait_for_workers(server, 3)  # The two first workers, and the one that replaces the killed worker.
    decoded_before = count_decoded_manifests(server)
    with ThreadPoolExecutor(8) as pool:
        answers_after_kill = list(pool.map(plan_from, range(10, 40)))
    assert answers_after_kill == [all_numbers[last_number - 900 + offset :] for offset in range(10, 40)]
    time.sleep(1.5)  # The workers report the manifests that they decode within a second.
    assert count_decoded_manifests(server) - decoded_before <= manifest_count, (
        "the manifests that the killed worker has stored are used"
    )


@pytest.mark.slow
def test_every_plan_during_commits_equals_that_of_its_own_snapshot(start_seamark: Start) -> None:
    """One thread commits. Four other threads plan the current snapshot or one of the last 20."""
    server = start_seamark(flags=("--workers", "2"))
    wait_for_workers(server)
    table = register_table(server, "t", manifests=8, per_manifest=5)
    stop = threading.Event()
    numbers_by_snapshot: dict[int, list[int]] = {1: list(range(40))}
    head = [1]

    def write() -> None:
        """Add a manifest of five files with each commit, and sometimes drop a manifest."""
        rng, client = random.Random(7), HttpClient(server.base_url)
        manifests = [
            table.write_manifest(
                f"w{manifest_number}", range(manifest_number * 5, manifest_number * 5 + 5), day=manifest_number
            )
            for manifest_number in range(8)
        ]
        numbers_by_manifest = {
            manifest_number: list(range(manifest_number * 5, manifest_number * 5 + 5)) for manifest_number in range(8)
        }
        live_manifests = list(range(8))
        manifests_by_number = dict(enumerate(manifests))
        snapshot_id = 1
        while not stop.is_set() and snapshot_id < 400:
            snapshot_id += 1
            manifest_number = 8 + snapshot_id
            numbers_by_manifest[manifest_number] = list(range(manifest_number * 5, manifest_number * 5 + 5))
            manifests_by_number[manifest_number] = table.write_manifest(
                f"w{manifest_number}",
                numbers_by_manifest[manifest_number],
                day=manifest_number,
                snapshot_id=snapshot_id,
            )
            live_manifests.append(manifest_number)
            if rng.random() < 0.3:
                live_manifests.remove(rng.choice(live_manifests))
            table.commit(snapshot_id, [manifests_by_number[manifest_number] for manifest_number in live_manifests])
            numbers_by_snapshot[snapshot_id] = [
                number for manifest_number in live_manifests for number in numbers_by_manifest[manifest_number]
            ]
            ref = {"action": "set-snapshot-ref", "ref-name": "main", "type": "branch", "snapshot-id": snapshot_id}
            updates = [{"action": "add-snapshot", "snapshot": table.snapshots[-1]}, ref]
            status, answer = client.call("POST", TABLE_PATH, {"requirements": [], "updates": updates})
            assert status == 200, answer
            head[0] = snapshot_id

    def read(seed: int) -> list[tuple[int, int, int, int, list[int]]]:
        """Return (oldest possible snapshot, newest possible snapshot, low and high of the filter, planned
        files) of each plan.
        """
        rng, answers = random.Random(seed), []
        while not stop.is_set():
            low = rng.randrange(500)
            high = low + rng.randrange(600)
            head_before = head[0]
            if rng.random() < 0.5:
                chosen_id = rng.randint(max(1, head_before - 20), head_before)
                status, answer = plan_on_new_connection(
                    server, build_filter_of_files(low, high), **{"snapshot-id": chosen_id}
                )
                oldest = newest = chosen_id
            else:
                status, answer = plan_on_new_connection(server, build_filter_of_files(low, high))
                oldest, newest = head_before, head[0] + 1  # A commit may have succeeded without being recorded yet.
            assert status == 200, answer
            answers.append((oldest, newest, low, high, list_file_numbers(answer)))
        return answers

    with ThreadPoolExecutor(5) as pool:
        writer, readers = pool.submit(write), [pool.submit(read, seed) for seed in range(4)]
        with contextlib.suppress(TimeoutError):
            writer.result(timeout=12)
        stop.set()
        writer.result(timeout=30)
        plans = [plan for reader in readers for plan in reader.result(timeout=30)]
    assert len(plans) > 100
    assert head[0] > 30
    for oldest, newest, low, high, planned_numbers in plans:
        possible_numbers = [
            [file_number for file_number in numbers_by_snapshot.get(number, []) if low <= file_number <= high]
            for number in range(oldest, newest + 1)
        ]
        assert planned_numbers in possible_numbers, f"snapshots {oldest} to {newest}, ids of {low} to {high}"
    _, loaded_table = HttpClient(server.base_url).call("GET", TABLE_PATH)
    static_table = StaticTable.from_metadata(loaded_table["metadata-location"])
    for oldest, newest, low, high, planned_numbers in random.Random(3).sample(plans, 60):
        if oldest == newest:
            where = And(GreaterThanOrEqual("id", 10 * low), LessThanOrEqual("id", 10 * high + 9))  # type: ignore[call-arg]
            tasks = static_table.scan(row_filter=where, snapshot_id=oldest).plan_files()
            assert sorted(planned_numbers) == sorted(read_file_number(task.file.file_path) for task in tasks)
