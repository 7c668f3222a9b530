"""Tests that double the number of buckets while writers commit.

No commit fails or is repeated because of a doubling. Seamark's reader and PyIceberg read every snapshot, and its rows
equal those of a plain dict, which knows no buckets.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event, Lock
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.values import At
from seamark.connector.write.appends import append
from seamark.connector.write.buckets import compute_bucket_sizes, resize
from seamark.connector.write.row_changes import Report
from seamark.connector.write.upserts import upsert
from tests.connector.lake import open_catalog
from tests.connector.server_thread import ServerThread
from tests.connector.write.test_buckets import compute_bucket
from tests.connector.write.test_upserts import ARROW, BY_ID, COLUMNS, MODES, build_rows, create_upsert_table, read_rows
from tests.connector.write.test_upserts_at_once import run_before_commits
from tests.connector.write.test_upserts_history import Step, list_model_rows
from tests.waits import block_until

DOUBLINGS = (16, 32, 64)


@dataclass
class CommittedStep:
    """A committed step. `specs` are the ids of the default spec before and after it."""

    step: Step
    attempts: int
    seconds: float
    specs: tuple[int, int]


@dataclass
class Writers:
    """The shared state of the writers: step numbers, committed steps, and the signal to stop."""

    url: str
    spec_id: int = 0
    committed_steps: dict[int, CommittedStep] = field(default_factory=dict)
    stop: Event = field(default_factory=Event)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _lock: Lock = field(default_factory=Lock)

    def run(self, make_step: Callable[[int], Step], write: Callable[[IndexClient, Step], Report | None]) -> int:
        """Run one writer until it must stop, and return its number of steps."""
        client, step_count = IndexClient(self.url), 0
        try:
            while not self.stop.is_set():
                with self._lock:
                    number = next(self._numbers)
                step, spec_id_before, start_s = make_step(number), self.spec_id, time.monotonic()
                report = write(client, step)
                attempts = 1 if report is None else report.attempts
                self.committed_steps[number] = CommittedStep(
                    step, attempts, time.monotonic() - start_s, (spec_id_before, self.spec_id)
                )
                step_count += 1
        finally:
            client.close()
            self.stop.set()  # A failed writer stops the other writer.
        return step_count

    def wait_for(self, count: int) -> None:
        """Wait until `count` further steps are committed, or until the writers stop.

        Raises:
            AssertionError: The steps take more than about a minute.
        """
        wanted_count = len(self.committed_steps) + count
        for _ in range(6000):  # With pauses of 0.01 s, the wait takes at most about a minute.
            if len(self.committed_steps) >= wanted_count or self.stop.is_set():
                return
            time.sleep(0.01)
        raise AssertionError("the writers make no progress")

    def wait_for_both(self, steps: int) -> None:
        """Wait until each of the two writers has committed `steps` steps, or until the writers stop.

        Only one of the writers appends.
        """

        def have_both_committed() -> bool:
            appends = sum(committed.step.kind == "append" for committed in list(self.committed_steps.values()))
            return min(appends, len(self.committed_steps) - appends) >= steps

        block_until(lambda: have_both_committed() or self.stop.is_set())


def build_row(rng: random.Random, key: int, number: int) -> dict[str, Any]:
    return {"id": key, "land": rng.choice(("de", "fr", None)), "ts": rng.randrange(100), "note": f"of {number}"}


def make_upserting_writer(seed: int, mode: str) -> tuple[Callable[[int], Step], Callable[[IndexClient, Step], Report]]:
    """Return two functions: the first draws an upsert of some of 300 keys, and the second commits it."""
    rng = random.Random(seed)

    def make_step(number: int) -> Step:
        input_rows = [build_row(rng, key, number) for key in rng.sample(range(300), 6)]
        return Step(number, kind=rng.choice(("upsert", "partial-upsert")), rows=input_rows, mode=mode)

    def write(client: IndexClient, step: Step) -> Report:
        columns = ["note"] if step.kind == "partial-upsert" else None
        input_table = pa.Table.from_pylist(step.rows, ARROW)
        summary = {"step": str(step.number)}
        return upsert(client, "db.t", input_table, keys=["id"], columns=columns, mode=mode, summary=summary)

    return make_step, write


def make_appending_writer(seed: int) -> tuple[Callable[[int], Step], Callable[[IndexClient, Step], None]]:
    """Return two functions: the first draws rows with keys of no other writer, and the second appends them."""
    rng, new_keys = random.Random(seed), itertools.count(10_000)

    def make_step(number: int) -> Step:
        return Step(number, "append", [build_row(rng, next(new_keys), number) for _ in range(4)])

    def write(client: IndexClient, step: Step) -> None:
        append(client, "db.t", pa.Table.from_pylist(step.rows, ARROW), summary={"step": str(step.number)})

    return make_step, write


def double_buckets(client: IndexClient, writers: Writers) -> None:
    """Change the number of buckets to each number of DOUBLINGS while writers commit.

    Before the first change and after each change, the function waits for several steps of the writers. In this time,
    they add files with the current spec, because `check_files` requires files of every spec.
    """
    writers.wait_for(4)
    for bucket_count in DOUBLINGS:
        writers.spec_id = resize(client, "db.t", buckets=bucket_count).spec_id
        writers.wait_for(6)


def list_snapshots(client: IndexClient) -> list[dict[str, Any]]:
    metadata = json.loads(client.load_table("db.t", history=True).metadata)
    return sorted(metadata["snapshots"], key=lambda snapshot: snapshot["sequence-number"])


def check_snapshots(client: IndexClient, committed_steps: Mapping[int, CommittedStep], version: int, note: str) -> None:
    """Check that every snapshot is the previous snapshot plus one step, and that each step occurs exactly once."""
    model: dict[int, dict[str, Any]] = {}
    remaining_steps = dict(committed_steps)
    with open_catalog(client.url) as catalog:
        pyiceberg_table = catalog.load_table("db.t")
        for snapshot in list_snapshots(client):
            number = int(snapshot["summary"]["step"])
            model = remaining_steps.pop(number).step.apply_to(model)
            expected, message = list_model_rows(model), f"{note}, after step {number}"
            assert read_rows(client, "db.t", At(snapshot_id=snapshot["snapshot-id"])) == expected, message
            if version == 2:  # PyIceberg reads the deletes of version 2.
                actual = (
                    pyiceberg_table.scan(snapshot_id=snapshot["snapshot-id"]).to_arrow().select(COLUMNS).sort_by("id")
                )
                assert [tuple(values.values()) for values in actual.to_pylist()] == expected, message
    assert remaining_steps == {}, f"{note}: these steps are lost"


def check_files(client: IndexClient, committed_steps: Mapping[int, CommittedStep], note: str) -> None:
    """Check that each data file has the spec that was the default at its commit, and only rows of its bucket."""
    counts_by_spec = dict(enumerate((8, *DOUBLINGS)))  # By spec id.
    file_counts = dict.fromkeys(counts_by_spec, 0)
    for snapshot in list_snapshots(client):
        added_files = client.files("db.t", content="data", at=At(snapshot_id=snapshot["snapshot-id"])).to_pylist()
        step = committed_steps[int(snapshot["summary"]["step"])]
        for file in (file for file in added_files if file["snapshot_id"] == snapshot["snapshot-id"]):
            assert step.specs[0] <= file["spec_id"] <= step.specs[1], f"{note}, step {step}: {file}"
            (bucket,) = json.loads(file["partition"]).values()
            keys = pq.read_table(file["file_path"].removeprefix("file://"), columns=["id"], partitioning=None)
            assert {compute_bucket(counts_by_spec[file["spec_id"]], key) for key in keys["id"].to_pylist()} == {
                bucket
            }, note
            file_counts[file["spec_id"]] += 1
    assert all(file_counts.values()), f"{note}: not every spec has files"


def check_plans(client: IndexClient, note: str) -> None:
    """Check that a plan of an equality reads one bucket of each bucket count, and finds the key."""
    bucket_counts = {"p0": 8, **{f"id_bucket_{bucket_count}": bucket_count for bucket_count in DOUBLINGS}}
    for key in (1, 77, 299, 10_003):  # Three upserted keys and an appended key.
        planned_files = client.explain("db.t", f"id = {key}", files=True).kept_files
        assert planned_files is not None
        pairs = {pair for file in planned_files for pair in file["partition"].items()}
        assert pairs <= {(name, compute_bucket(bucket_count, key)) for name, bucket_count in bucket_counts.items()}, (
            f"{note}: {key}"
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "version", "properties"),
    [
        pytest.param(MODES[0], 2, {}, id="merge-on-read"),
        pytest.param(MODES[1], 3, BY_ID, id="copy-on-write and a record index", marks=pytest.mark.slow),
        pytest.param(MODES[1], 2, {}, id="copy-on-write", marks=pytest.mark.slow),
        pytest.param(MODES[0], 3, BY_ID, id="vectors and a record index", marks=pytest.mark.slow),
    ],
)
def test_doubling_from_8_to_64_buckets_delays_no_writer_and_keeps_all_rows(
    client: IndexClient, mode: str, version: int, properties: dict[str, str]
) -> None:
    seed = 7
    note = f"seed {seed}, {mode}, version {version}"
    create_upsert_table(client, version=version, spec=[("bucket[8]", 1)], properties=properties)
    writers = Writers(client.url)
    with ThreadPoolExecutor(2) as pool:
        running_writers = [
            pool.submit(writers.run, *make_upserting_writer(seed, mode)),
            pool.submit(writers.run, *make_appending_writer(seed)),
        ]
        try:
            double_buckets(client, writers)
            writers.wait_for_both(4)
        finally:
            writers.stop.set()
        step_counts = [writer.result(60) for writer in running_writers]
    assert min(step_counts) > 3, note
    assert {committed_step.attempts for committed_step in writers.committed_steps.values()} == {1}, (
        f"{note}: a resize must not cause a second attempt"
    )
    check_snapshots(client, writers.committed_steps, version, note)
    check_files(client, writers.committed_steps, note)
    check_plans(client, note)
    (sizes,) = compute_bucket_sizes(client, "db.t")
    assert (sizes.buckets, sizes.shared_files > 0) == (64, True)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("mode", MODES)
def test_write_that_began_before_a_resize_is_committed_with_the_old_spec(
    client: IndexClient, server: ServerThread, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_upsert_table(client, spec=[("bucket[8]", 1)])
    upsert(client, "db.t", build_rows(*((key, "old") for key in range(40))), keys=["id"])
    files_before = server.list_written_files()
    attempts = run_before_commits(monkeypatch, lambda: resize(client, "db.t", buckets=16))
    report = upsert(client, "db.t", build_rows(*((key, "new") for key in range(20))), keys=["id"], mode=mode)
    assert (report.attempts, attempts[0]) == (1, 1)
    assert set(client.files("db.t", content="data")["spec_id"].to_pylist()) == {0}
    assert len(server.list_written_files() - files_before) == report.files_written
    second_report = upsert(client, "db.t", build_rows(*((key, "newer") for key in range(10))), keys=["id"], mode=mode)
    assert (second_report.attempts, second_report.updated) == (1, 10)
    assert 1 in client.files("db.t", content="data")["spec_id"].to_pylist()
    lands = [row[1] for row in read_rows(client)]
    assert lands == ["newer"] * 10 + ["new"] * 10 + ["old"] * 20


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("mode", MODES)
def test_concurrent_upserts_of_a_key_in_an_old_and_a_new_bucket_conflict(
    client: IndexClient, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both writers change key 5: one with the spec of 8 buckets, the other with 16. One of the writes is repeated."""
    create_upsert_table(client, spec=[("bucket[8]", 1)])
    upsert(client, "db.t", build_rows(*((key, "old") for key in range(40))), keys=["id"])
    other_key = next(key for key in range(40) if compute_bucket(8, key) != compute_bucket(8, 5))

    def upsert_the_same_key() -> None:
        resize(client, "db.t", buckets=16)
        upsert(client, "db.t", build_rows((5, "theirs", 1)), keys=["id"], mode=mode)

    run_before_commits(monkeypatch, upsert_the_same_key)
    report = upsert(client, "db.t", build_rows((5, "ours")), keys=["id"], columns=["land"], mode=mode)
    assert (report.attempts, report.updated) == (2, 1)
    assert [row for row in read_rows(client) if row[0] == 5] == [(5, "ours", 1, None)]

    def upsert_other_keys() -> None:
        resize(client, "db.t", buckets=32)
        upsert(client, "db.t", build_rows((other_key, "theirs")), keys=["id"], mode=mode)

    run_before_commits(monkeypatch, upsert_other_keys)
    report = upsert(client, "db.t", build_rows((5, "again")), keys=["id"], mode=mode)
    assert (report.attempts, report.updated) == (1, 1)  # Writers of different buckets do not conflict.
    assert {row[0]: row[1] for row in read_rows(client)} == dict.fromkeys(range(40), "old") | {
        5: "again",
        other_key: "theirs",
    }
