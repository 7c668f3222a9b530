"""Upserts and deletes by equality deletes, without lookups of the stored rows.

The tests check the rows of the table after such changes: with concurrent writers, across partition specs, and in random
histories with all other kinds of row changes.
"""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest

from seamark.connector.arrow.casting import Unwritable
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.values import CURRENT
from seamark.connector.read.scans import scan
from seamark.connector.read.tables import open_table, plan
from seamark.connector.write.appends import append, commit
from seamark.connector.write.buckets import resize
from seamark.connector.write.equality_upserts import EQUALITY
from seamark.connector.write.table_writer import write_batches
from seamark.connector.write.target import create_target
from seamark.connector.write.upserts import delete, upsert
from tests.connector.server_thread import ServerThread
from tests.connector.write.test_upserts import ARROW, BY_ID, FIELDS, MODES, build_rows, create_upsert_table, read_rows
from tests.connector.write.test_upserts_at_once import run_before_commits
from tests.connector.write.test_upserts_history import RECORD, Shape, Step, change_spec, check_snapshots, draw_steps
from tests.seeds import mark_fast


def read_lands(client: IndexClient) -> dict[int, str]:
    actual_rows = read_rows(client)
    assert len({row[0] for row in actual_rows}) == len(actual_rows)
    return {row[0]: row[1] for row in actual_rows}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("spec", [[], [("bucket[4]", 1)], [("truncate[10]", 1), ("bucket[2]", 1)]], ids=str)
@pytest.mark.parametrize("version", [2, 3])
def test_equality_upsert_replaces_rows_with_its_keys_and_reads_no_file(
    client: IndexClient, version: int, spec: list[tuple[str, int]]
) -> None:
    create_upsert_table(client, version=version, spec=spec)
    append(client, "db.t", build_rows(*((key, "old") for key in range(30))))
    report = upsert(
        client, "db.t", build_rows((5, "lost"), (5, "new"), (6, "new"), (99, "new")), keys=["id"], strategy=EQUALITY
    )
    expected = dict.fromkeys(range(30), "old") | {5: "new", 6: "new", 99: "new"}
    assert read_lands(client) == expected
    assert (report.attempts, report.files_read, report.duplicate) == (1, 0, False)
    upsert(client, "db.t", build_rows((5, "newer")), keys=["id"], strategy=EQUALITY)
    assert read_lands(client) == expected | {5: "newer"}
    delete_report = delete(client, "db.t", keys=pa.table({"id": [6, 7, 555]}), strategy=EQUALITY)
    assert delete_report.files_written > 0
    remaining_lands = {key: land for key, land in (expected | {5: "newer"}).items() if key not in (6, 7)}
    assert read_lands(client) == remaining_lands
    report = upsert(client, "db.t", build_rows((5, "located"), (6, "back")), keys=["id"], mode="merge-on-read")
    assert (report.updated, report.inserted) == (1, 1)
    assert read_lands(client) == remaining_lands | {5: "located", 6: "back"}


def test_equality_upsert_replaces_keys_within_their_partitions(client: IndexClient) -> None:
    create_upsert_table(client, spec=[("identity", 2), ("bucket[2]", 1)])
    append(client, "db.t", build_rows((1, "de", 1), (1, "fr", 1), (2, "de", 1)))
    upsert(client, "db.t", build_rows((1, "fr", 2), (2, "it", 2)), keys=["id", "land"], strategy=EQUALITY)
    values = scan(client, "db.t", ["id", "land", "ts"]).to_arrow().to_pylist()
    assert sorted(tuple(value.values()) for value in values) == [(1, "de", 1), (1, "fr", 2), (2, "de", 1), (2, "it", 2)]


def test_equality_upsert_replaces_rows_of_all_earlier_specs(client: IndexClient) -> None:
    create_upsert_table(client, spec=[("bucket[2]", 1)])
    for number, bucket_count in enumerate((2, 4, 8)):
        resize(client, "db.t", buckets=bucket_count)
        append(client, "db.t", build_rows(*((key, "old") for key in range(20 * number, 20 * number + 20))))
    upsert(client, "db.t", build_rows(*((key, "new") for key in range(0, 60, 3))), keys=["id"], strategy=EQUALITY)
    assert read_lands(client) == {key: "old" if key % 3 else "new" for key in range(60)}


def test_equality_upsert_requires_a_spec_without_fields_or_with_key_fields(client: IndexClient) -> None:
    create_upsert_table(client, spec=[("identity", 2)])
    append(client, "db.t", build_rows((1, "de"), (2, "fr")))
    with pytest.raises(Unwritable, match="spec 0 of the table has the field p0, which is not derived from the key id"):
        upsert(client, "db.t", build_rows((1, "it")), keys=["id"], strategy=EQUALITY)
    change_spec(client, "t", transform="", source=0, spec_id=1)  # The new spec has no field.
    append(client, "db.t", build_rows((3, "de")))
    change_spec(client, "t", transform="identity", source=2, spec_id=2)  # Column 2 is not a key.
    upsert(client, "db.t", build_rows((1, "it"), (3, "it")), keys=["id"], strategy=EQUALITY)
    assert read_lands(client) == {1: "it", 2: "fr", 3: "it"}


def test_equality_upsert_of_a_promoted_int_key_near_the_minimum_is_refused(client: IndexClient) -> None:
    """Rows of the smallest int are in different partitions, depending on the type of the column.

    `truncate[10]` rounds down to a multiple of 10: the result overflows for an int, but not for a long.
    """
    fields_with_int_id = [{**field, "type": "int"} if field["name"] == "id" else field for field in FIELDS]
    create_upsert_table(client, spec=[("truncate[10]", 1)], fields=fields_with_int_id)
    minimum = -(2**31)  # `minimum + 8` is a multiple of 10, so its truncation does not overflow.
    append(client, "db.t", build_rows((minimum, "de"), (5, "de")))
    updates = [
        {"action": "add-schema", "schema": {"type": "struct", "schema-id": 1, "fields": FIELDS}},
        {"action": "set-current-schema", "schema-id": -1},
    ]
    body = json.dumps({"requirements": [], "updates": updates}).encode()
    client._request("POST", "/v1/namespaces/db/tables/t", {}, body)
    with pytest.raises(Unwritable, match="a key of column id is next to the smallest int"):
        upsert(client, "db.t", build_rows((minimum, "fr"), (5, "fr")), keys=["id"], strategy=EQUALITY)
    upsert(client, "db.t", build_rows((5, "fr"), (minimum + 8, "fr")), keys=["id"], strategy=EQUALITY)
    upsert(client, "db.t", build_rows((minimum, "it")), keys=["id"])
    assert read_lands(client) == {minimum: "it", 5: "fr", minimum + 8: "fr"}
    assert scan(client, "db.t", ["id"], where="id < 0").to_arrow().num_rows == 2


@pytest.mark.slow
def test_equality_upsert_with_a_wide_truncation_of_a_promoted_int_is_refused(client: IndexClient) -> None:
    create_upsert_table(client, spec=[("truncate[1500000000]", 1)])
    with pytest.raises(Unwritable, match="a key of column id is in the range of ints"):
        upsert(client, "db.t", build_rows((1_100_000_000, "de")), keys=["id"], strategy=EQUALITY)
    upsert(client, "db.t", build_rows((2**31, "de")), keys=["id"], strategy=EQUALITY)
    assert read_lands(client) == {2**31: "de"}


def test_equality_upsert_treats_a_spec_of_void_fields_as_unpartitioned(client: IndexClient) -> None:
    create_upsert_table(client, spec=[("void", 2)])
    append(client, "db.t", build_rows((1, "de"), (2, "fr")))
    upsert(client, "db.t", build_rows((1, "it"), (3, "it")), keys=["id"], strategy=EQUALITY)
    assert read_lands(client) == {1: "it", 2: "fr", 3: "it"}
    change_spec(client, "t", "identity", 2, 1)
    append(client, "db.t", build_rows((4, "de"), (5, "de")))
    delete(client, "db.t", keys=pa.table({"id": [1, 4]}), strategy=EQUALITY)
    assert read_lands(client) == {2: "fr", 3: "it", 5: "de"}


@pytest.mark.slow
def test_equality_upsert_ignores_void_fields_next_to_key_fields(client: IndexClient) -> None:
    create_upsert_table(client, spec=[("void", 2), ("bucket[4]", 1)])
    append(client, "db.t", build_rows(*((key, "old") for key in range(10))))
    upsert(client, "db.t", build_rows((1, "new"), (99, "new")), keys=["id"], strategy=EQUALITY)
    assert read_lands(client) == dict.fromkeys(range(10), "old") | {1: "new", 99: "new"}


def test_changes_that_equality_deletes_cannot_express_are_refused(client: IndexClient, server: ServerThread) -> None:
    create_upsert_table(client, version=1)
    with pytest.raises(Unwritable, match="it has no delete files; upgrade it"):
        upsert(client, "db.t", build_rows((1, "de")), keys=["id"], strategy=EQUALITY)
    fields = [
        {"id": 1, "name": "x", "required": False, "type": "double"},
        {"id": 2, "name": "y", "required": False, "type": "int"},
    ]
    create_upsert_table(client, "f", fields=fields)
    with pytest.raises(Unwritable, match="column x has a type that readers compare differently"):
        upsert(client, "db.f", pa.table({"x": [1.0]}), keys=["x"], strategy=EQUALITY)
    with pytest.raises(Unwritable, match="a key must not have nulls"):
        delete(client, "db.f", keys=pa.table({"y": pa.array([None], pa.int32())}), strategy=EQUALITY)
    assert server.list_written_files() == set()
    no_keys = pa.table({"y": pa.array([], pa.int32())})
    assert delete(client, "db.f", keys=no_keys, strategy=EQUALITY).snapshot_id is None


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precombine": "ts"}, "precombine needs the stored rows"),
        ({"columns": ["land"]}, "columns needs the stored rows"),
        ({"mode": "copy-on-write"}, "requires merge-on-read"),
    ],
    ids=["precombine", "columns", "copy-on-write"],
)
def test_equality_upsert_refuses_options_that_need_the_stored_rows(
    client: IndexClient, options: dict[str, Any], message: str
) -> None:
    create_upsert_table(client)
    with pytest.raises(ValueError, match=message):
        upsert(client, "db.t", build_rows((1, "de")), keys=["id"], strategy=EQUALITY, **options)
    with pytest.raises(ValueError, match="rows are deleted by keys, not by a predicate"):
        delete(client, "db.t", where="id = 1", strategy=EQUALITY)


# Concurrent writers


def test_equality_upsert_has_no_conflict_and_the_last_commit_wins(
    client: IndexClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_upsert_table(client, spec=[("bucket[4]", 1)])
    append(client, "db.t", build_rows((1, "old"), (2, "old")))
    run_before_commits(
        monkeypatch, lambda: upsert(client, "db.t", build_rows((1, "theirs"), (2, "theirs")), keys=["id"])
    )
    assert upsert(client, "db.t", build_rows((1, "ours")), keys=["id"], strategy=EQUALITY).attempts == 1
    assert read_lands(client) == {1: "ours", 2: "theirs"}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("mode", MODES)
def test_located_upsert_is_repeated_after_a_concurrent_equality_upsert(
    client: IndexClient, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_upsert_table(client, spec=[("bucket[4]", 1)], properties=BY_ID)
    append(client, "db.t", build_rows((1, "old", 1), (2, "old", 1)))
    run_before_commits(
        monkeypatch, lambda: upsert(client, "db.t", build_rows((1, "theirs", 2)), keys=["id"], strategy=EQUALITY)
    )
    report = upsert(client, "db.t", build_rows((1, "ours")), keys=["id"], columns=["land"], mode=mode)
    assert report.attempts == 2
    assert read_rows(client) == [(1, "ours", 2, None), (2, "old", 1, None)]


def test_equality_upsert_replaces_rows_that_are_written_concurrently_with_a_new_spec(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_upsert_table(client, spec=[("bucket[4]", 1)])
    append(client, "db.t", build_rows((1, "old"), (2, "old")))
    other_paths: set[Any] = set()

    def resize_and_upsert() -> None:
        files_before = server.list_written_files()
        resize(client, "db.t", buckets=8)
        upsert(client, "db.t", build_rows((1, "theirs"), (3, "theirs")), keys=["id"], mode="merge-on-read")
        other_paths.update(server.list_written_files() - files_before)

    files_before = server.list_written_files()
    run_before_commits(monkeypatch, resize_and_upsert)
    report = upsert(client, "db.t", build_rows((1, "ours"), (3, "ours")), keys=["id"], strategy=EQUALITY)
    assert report.attempts == 2
    assert read_lands(client) == {1: "ours", 2: "old", 3: "ours"}
    # The first attempt left no file.
    assert len(server.list_written_files() - files_before - other_paths) == report.files_written


def test_equality_upsert_replaces_rows_that_a_concurrent_compaction_moved(
    client: IndexClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_upsert_table(client, spec=[("bucket[2]", 1)])
    append(client, "db.t", build_rows(*((key, "old") for key in range(10))))

    def split_buckets() -> None:
        """Double the number of buckets, and rewrite all files into the new buckets, as a table service does."""
        resize(client, "db.t", buckets=4)
        opened_table = open_table(client, "db.t", CURRENT)
        stored_rows = scan(client, "db.t").to_arrow()
        written_files = write_batches(
            create_target(opened_table.metadata, opened_table.storage), stored_rows.to_batches()
        )
        removed_files = [{"file-path": task.path} for task in plan(client, opened_table)]
        body = {"operation": "replace", "add": list(written_files.files), "remove": removed_files}
        commit(client, "db.t", {**body, "read-snapshot-id": opened_table.snapshot_id}, lambda: None)

    run_before_commits(monkeypatch, split_buckets)
    report = upsert(client, "db.t", build_rows((1, "new"), (2, "new")), keys=["id"], strategy=EQUALITY)
    assert report.attempts == 2
    assert read_lands(client) == dict.fromkeys(range(10), "old") | {1: "new", 2: "new"}
    assert {task.spec_id for task in plan(client, open_table(client, "db.t", CURRENT))} == {1}


def test_repeated_equality_upsert_of_a_producer_is_committed_once(client: IndexClient) -> None:
    create_upsert_table(client)
    for land, duplicate in (("de", False), ("fr", True)):
        report = upsert(client, "db.t", build_rows((1, land)), keys=["id"], producer=("job", 1), strategy=EQUALITY)
        assert report.duplicate == duplicate
    assert read_lands(client) == {1: "de"}


# Histories


@dataclass(frozen=True)
class EqualityDeleteStep(Step):
    """A step that changes rows by equality deletes, and does not search for the stored rows."""

    def take(self, client: IndexClient, name: str) -> None:
        summary = {"step": str(self.number)}
        input_table = pa.Table.from_pylist(self.rows, ARROW)
        if self.kind == "upsert":
            upsert(client, name, input_table, keys=["id"], summary=summary, strategy=EQUALITY)
        else:
            delete(client, name, keys=input_table.select(["id"]), summary=summary, strategy=EQUALITY)


def draw_mixed_steps(rng: random.Random, step_count: int) -> list[Step]:
    """Return random steps. About half of the upserts and of the deletes by key use equality deletes."""
    new_steps: list[Step] = []
    for step in draw_steps(rng, step_count, MODES):
        needs_no_lookup = step.kind == "delete-keys" or (step.kind == "upsert" and step.precombine_column is None)
        if step.kind == "upsert" and rng.random() < 0.4:
            # An upsert by equality deletes cannot compare the rows, so the step loses its precombine column.
            new_steps.append(EqualityDeleteStep(step.number, "upsert", step.rows))
        elif needs_no_lookup and rng.random() < 0.6:
            new_steps.append(EqualityDeleteStep(step.number, step.kind, step.rows))
        else:
            new_steps.append(step)
    return new_steps


SHAPES = (
    Shape(3, (), (RECORD,)),
    Shape(2, (("bucket[2]", 1), ("bucket[4]", 1), ("bucket[8]", 1))),
    Shape(3, (("bucket[4]", 1), ("bucket[8]", 1)), (RECORD,)),
    Shape(2, (("identity", 2), ("", 0), ("bucket[3]", 1)), (RECORD,)),
)


def run_steps(
    client: IndexClient, seed: int, shape: Shape, step_count: int, *, writers: int, check_interval: int
) -> None:
    """Run the steps with several writers while partition specs change, and check the snapshots.

    The rows are read with Seamark only, because PyIceberg does not support equality deletes.
    """
    note = f"seed {seed}, {shape}, {writers} writers"
    first_spec = [shape.specs[0]] if shape.specs else []
    create_upsert_table(client, version=shape.version, spec=first_spec, properties=dict(shape.properties))
    steps_by_number = {step.number: step for step in draw_mixed_steps(random.Random(seed), step_count)}
    spec_count = max(1, len(shape.specs))
    if first_spec == [("identity", 2)]:
        # Before a spec without fields exists, equality deletes by id are refused. Until then, the steps search for the
        # stored rows. The spec changes during the first steps of the second round, so these steps also search.
        early_steps = [step for step in steps_by_number.values() if step.number <= step_count // spec_count + writers]
        steps_by_number |= {
            step.number: Step(step.number, step.kind, step.rows)
            for step in early_steps
            if isinstance(step, EqualityDeleteStep)
        }
    clients = [IndexClient(client.url) for _ in range(writers)]
    with ThreadPoolExecutor(writers + 1) as pool:
        for round_number in range(spec_count):
            round_steps = [
                step for step in steps_by_number.values() if step.number * spec_count // step_count == round_number
            ]
            for start in range(0, len(round_steps), writers):
                concurrent_steps = zip(round_steps[start : start + writers], clients, strict=False)
                futures = [pool.submit(step.commit, own_client, "db.t") for step, own_client in concurrent_steps]
                if round_number and not start:
                    pool.submit(change_spec, client, "t", *shape.specs[round_number], round_number).result(60)
                for step, future in zip(round_steps[start:], futures, strict=False):
                    assert future.exception(120) is None, f"{note}, {step}: {future.exception()!r}"
    for own_client in clients:
        own_client.close()
    # For a table of version 2, `check_snapshots` would also read the rows with PyIceberg.
    check_snapshots(client, "t", steps_by_number, note, version=3, check_interval=check_interval, writers=writers)


@pytest.mark.parametrize("writers", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("number", mark_fast(range(len(SHAPES)), 1))
def test_every_snapshot_matches_its_history_with_equality_deletes(
    client: IndexClient, number: int, writers: int
) -> None:
    run_steps(client, 10 * writers + number, SHAPES[number], 24, writers=writers, check_interval=2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_every_snapshot_matches_a_long_history_with_equality_deletes(client: IndexClient, seed: int) -> None:
    run_steps(client, seed, SHAPES[seed % len(SHAPES)], 100, writers=1 + seed % 4, check_interval=4)
