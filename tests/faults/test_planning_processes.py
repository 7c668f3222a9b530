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
from tests.planner.lakes.tables import Table, make_between
from tests.server.test_processes import list_workers, wait_until
from tests.services.seamark import Seamark

T = "/v1/namespaces/db/tables/t"
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


def list_file_numbers(answer: Any) -> list[int]:
    return [int(task["data-file"]["file-path"][-14:-8]) for task in answer["file-scan-tasks"]]


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
    source = random.Random(1)
    expected = [(low, low + source.randrange(400)) for low in (source.randrange(700) for _ in range(60))]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda want: plan_on_new_connection(server, make_between(*want)), expected))
    for (low, high), (status, answer) in zip(expected, answers, strict=True):
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
    results = []
    for _ in range(8):
        status, answer = plan_on_new_connection(server, make_between(5, 80))
        assert status == 200, answer
        tokens = answer["plan-tasks"]
        assert len(tokens) == 11
        results.append([])
        for token in tokens:
            client = HttpClient(server.base_url)
            status, page = client.call("POST", f"{T}/tasks", {"plan-task": token})
            client.close()
            assert status == 200, page
            results[-1] += list_file_numbers(page)
    assert results == [list(range(5, 81))] * 8
    assert list_workers_with(server, "fetchScanTasks") == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.02, 0.3, 0.8])
def test_worker_killed_during_a_cold_plan_does_not_affect_other_workers(start_seamark: Start, share: float) -> None:
    server = start_seamark(flags=("--workers", "2"))
    wait_for_workers(server)
    count, per_manifest = 250, 40
    register_table(server, "t", count, per_manifest)
    blocks = server.home / "cache" / "blocks"
    all_numbers = list(range(count * per_manifest))
    last_number = all_numbers[-1]

    def plan_from(snapshot_id: int) -> list[int] | None:
        try:
            status, answer = plan_on_new_connection(server, make_between(last_number - 900 + snapshot_id, last_number))
        except OutcomeUnknown:
            return None
        assert status == 200, answer
        return list_file_numbers(answer)

    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(plan_from, result_number) for result_number in range(8)]
        deadline = time.monotonic() + 60
        while len(list(blocks.rglob("*.block"))) < share * count and time.monotonic() < deadline:
            time.sleep(0.002)
        list_workers(server)[0].kill()
        results = [future.result() for future in futures]
    for result_number, result in enumerate(results):
        assert result is None or result == all_numbers[last_number - 900 + result_number :], (
            "an answer of another worker is right"
        )
    wait_for_workers(server, 3)
    decoded_before = count_decoded_manifests(server)
    with ThreadPoolExecutor(8) as pool:
        answers_after_kill = list(pool.map(plan_from, range(10, 40)))
    assert answers_after_kill == [all_numbers[last_number - 900 + result_number :] for result_number in range(10, 40)]
    time.sleep(1.5)
    assert count_decoded_manifests(server) - decoded_before <= count, (
        "the manifests that the killed worker has stored are used"
    )


@pytest.mark.slow
def test_every_plan_during_commits_equals_that_of_its_own_snapshot(start_seamark: Start) -> None:
    server = start_seamark(flags=("--workers", "2"))
    wait_for_workers(server)
    table = register_table(server, "t", manifests=8, per_manifest=5)
    stop = threading.Event()
    expected: dict[int, list[int]] = {1: list(range(40))}
    head = [1]

    def write() -> None:
        """Add a manifest with each commit, and sometimes drop one."""
        source, client = random.Random(7), HttpClient(server.base_url)
        manifests = [
            table.write_manifest(f"w{position}", range(position * 5, position * 5 + 5), day=position)
            for position in range(8)
        ]
        held_rows = {position: list(range(position * 5, position * 5 + 5)) for position in range(8)}
        order = list(range(8))
        new_manifests = dict(enumerate(manifests))
        snapshot_id = 1
        while not stop.is_set() and snapshot_id < 400:
            snapshot_id += 1
            position = 8 + snapshot_id
            held_rows[position] = list(range(position * 5, position * 5 + 5))
            new_manifests[position] = table.write_manifest(
                f"w{position}", held_rows[position], day=position, snapshot_id=snapshot_id
            )
            order.append(position)
            if source.random() < 0.3:
                order.remove(source.choice(order))
            table.commit(snapshot_id, [new_manifests[item] for item in order])
            expected[snapshot_id] = [number for item in order for number in held_rows[item]]
            ref = {"action": "set-snapshot-ref", "ref-name": "main", "type": "branch", "snapshot-id": snapshot_id}
            updates = [{"action": "add-snapshot", "snapshot": table.snapshots[-1]}, ref]
            status, answer = client.call("POST", T, {"requirements": [], "updates": updates})
            assert status == 200, answer
            head[0] = snapshot_id

    def read(seed: int) -> list[tuple[int, int, int, int, list[int]]]:
        """Return (oldest possible snapshot, newest possible snapshot, low and high of the filter, planned
        files) of each plan.
        """
        source, answers = random.Random(seed), []
        while not stop.is_set():
            low = source.randrange(500)
            high = low + source.randrange(600)
            head_before = head[0]
            if source.random() < 0.5:
                named_number = source.randint(max(1, head_before - 20), head_before)
                status, answer = plan_on_new_connection(
                    server, make_between(low, high), **{"snapshot-id": named_number}
                )
                oldest = newest = named_number
            else:
                status, answer = plan_on_new_connection(server, make_between(low, high))
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
    for oldest, newest, low, high, expected_count in plans:
        ids_by_snapshot = [
            [n for n in expected.get(number, []) if low <= n <= high] for number in range(oldest, newest + 1)
        ]
        assert expected_count in ids_by_snapshot, f"snapshots {oldest} to {newest}, ids of {low} to {high}"
    _, loaded_table = HttpClient(server.base_url).call("GET", T)
    mirror = StaticTable.from_metadata(loaded_table["metadata-location"])
    for oldest, newest, low, high, expected_count in random.Random(3).sample(plans, 60):
        if oldest == newest:
            where = And(GreaterThanOrEqual("id", 10 * low), LessThanOrEqual("id", 10 * high + 9))  # type: ignore[call-arg]
            tasks = mirror.scan(row_filter=where, snapshot_id=oldest).plan_files()
            assert sorted(expected_count) == sorted(int(task.file.file_path[-14:-8]) for task in tasks)
