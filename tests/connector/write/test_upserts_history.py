"""Tests of random histories of changes by concurrent writers: every snapshot has the rows of a model, which is a dict.

The changes are appends, upserts and deletes. The snapshots decide the order of the steps: each snapshot names the step
that made it, and the model applies the steps in that order. The model has rows and no files, and shares no code with
the writers.
"""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.rest import RestCatalog

from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.values import At
from seamark.connector.write.appends import append
from seamark.connector.write.equality_upserts import EQUALITY
from seamark.connector.write.upserts import delete, upsert
from tests.connector.write.test_upserts import ARROW, COLUMNS, MODES, create_upsert_table, read_rows
from tests.seeds import examples

Row = dict[str, Any]
LANDS = ("de", "fr", "it", None, "d\0e", "\0", "a/../b")
"""Partition values. Some have characters that are special in paths."""
FIRST_APPENDED_KEY = 1000


@dataclass(frozen=True)
class Step:
    """A change of one `kind`: append, upsert, partial-upsert, equality-upsert, delete-keys or delete-where.

    A partial upsert changes some columns. An equality upsert writes equality deletes, without a lookup of the old rows.

    Each step has its own producer, so it always makes a snapshot, even if it changes nothing, and it can be repeated at
    any time.
    """

    number: int
    kind: str
    rows: list[Row] = field(default_factory=list)
    precombine_column: str | None = None
    mode: str = MODES[0]
    strategy: str | None = None
    range_condition: tuple[str, int] = ("", 0)

    def commit(self, client: IndexClient, name: str) -> Any:
        """Commit the change, and return its report."""
        options: dict[str, Any] = {"summary": {"step": str(self.number)}, "producer": (f"step {self.number}", 0)}
        write_options: dict[str, Any] = {"mode": self.mode, "strategy": self.strategy}
        input_table = pa.Table.from_pylist(self.rows, ARROW)
        match self.kind:
            case "append":
                return append(client, name, input_table, **options)
            case "equality-upsert":
                return upsert(client, name, input_table, keys=["id"], strategy=EQUALITY, **options)
            case "upsert":
                return upsert(
                    client,
                    name,
                    input_table,
                    keys=["id"],
                    precombine=self.precombine_column,
                    **write_options,
                    **options,
                )
            case "partial-upsert":
                return upsert(
                    client,
                    name,
                    input_table,
                    keys=["id"],
                    precombine=self.precombine_column,
                    columns=["note"],
                    **write_options,
                    **options,
                )
            case "delete-keys":
                return delete(client, name, keys=input_table, key=["id"], **write_options, **options)
            case "delete-where":
                land, ts = self.range_condition
                return delete(client, name, where=f"land = '{land}' AND ts < {ts}", mode=self.mode, **options)
        raise AssertionError(self.kind)

    def repeat(self, client: IndexClient, name: str) -> None:
        """Repeat the step, and check that it is a duplicate."""
        repeated_report = self.commit(client, name)
        assert repeated_report["duplicate"] if isinstance(repeated_report, dict) else repeated_report.duplicate, (
            f"{self} was committed again"
        )

    def apply_to(self, model: dict[int, Row]) -> dict[int, Row]:
        """Return the rows by key after the step."""
        new_model = dict(model)
        if self.kind == "append":
            return new_model | {row["id"]: row for row in self.rows}
        if self.kind == "delete-keys":
            return {key: row for key, row in new_model.items() if key not in {row["id"] for row in self.rows}}
        if self.kind == "delete-where":
            land, ts = self.range_condition
            return {
                key: row
                for key, row in new_model.items()
                if not (row["land"] == land and row["ts"] is not None and row["ts"] < ts)
            }
        latest_rows: dict[int, Row] = {}
        for row in self.rows:
            if row["id"] not in latest_rows or not self.is_older(row, latest_rows[row["id"]]):
                latest_rows[row["id"]] = row
        for key, row in latest_rows.items():
            stored_row = new_model.get(key)
            if stored_row is not None and self.is_older(row, stored_row):
                continue
            if self.kind == "partial-upsert":
                changed_columns = {"id": key, "note": row["note"]} | (
                    {self.precombine_column: row[self.precombine_column]} if self.precombine_column else {}
                )
                row = (stored_row or dict.fromkeys(COLUMNS)) | changed_columns
            new_model[key] = row
        return new_model

    def is_older(self, row: Row, other: Row) -> bool:
        if self.precombine_column is None:
            return False
        own_key, other_key = row[self.precombine_column], other[self.precombine_column]
        if own_key is None or other_key is None:
            return own_key is None and other_key is not None
        return bool(own_key < other_key)


def draw_steps(
    rng: random.Random, step_count: int, modes: tuple[str, ...], *, has_equality_upserts: bool = False
) -> Iterator[Step]:
    """Yield random steps. With `has_equality_upserts`, some are upserts that write equality deletes."""
    next_key = FIRST_APPENDED_KEY
    next_key_after_steps = [next_key]

    def draw_row(key: int, number: int) -> Row:
        ts = None if rng.random() < 0.1 else rng.randrange(100)
        return {"id": key, "land": rng.choice(LANDS), "ts": ts, "note": f"{number}.{rng.randrange(10)}"}

    for number in range(step_count):
        # Upserts have the most cases, so they are the most frequent steps.
        weights = {
            "append": 2,
            "upsert": 6,
            "partial-upsert": 4,
            "delete-keys": 2,
            "delete-where": 1,
            "equality-upsert": 6 if has_equality_upserts else 0,
        }
        kind = rng.choices(list(weights), list(weights.values()))[0]
        ids = [rng.randrange(-20, 60) for _ in range(rng.choice((1, 3, 12)))]
        if kind == "append":
            ids = list(range(next_key, next_key + 5))
            next_key += 5
        elif rng.random() < 0.3 and (end := next_key_after_steps[-5:][0]) > FIRST_APPENDED_KEY:
            # Use only keys that were appended at least five steps ago: a concurrent append does not check whether keys
            # exist.
            ids.append(rng.randrange(FIRST_APPENDED_KEY, end))
        next_key_after_steps.append(next_key)
        yield Step(
            number,
            kind,
            rows=[draw_row(id_, number) for id_ in ids],
            precombine_column=None if kind == "equality-upsert" else rng.choice((None, "ts", "ts", "note")),
            mode=rng.choice(modes),
            strategy="scan" if rng.random() < 0.3 else None,
            range_condition=(rng.choice(LANDS[:3]) or "", rng.randrange(60)),
        )


def list_model_rows(model: dict[int, Row]) -> list[tuple[Any, ...]]:
    return [tuple(model[id_][column] for column in COLUMNS) for id_ in sorted(model)]


def change_spec(client: IndexClient, name: str, transform: str, source: int, spec_id: int) -> None:
    """Add a partition spec with one field, or with none if `transform` is empty, and make it the default."""
    field = {"name": f"q{spec_id}", "transform": transform, "source-id": source, "field-id": 2000 + spec_id}
    updates = [
        {"action": "add-spec", "spec": {"spec-id": spec_id, "fields": [field] if transform else []}},
        {"action": "set-default-spec", "spec-id": -1},
    ]
    body = json.dumps({"requirements": [], "updates": updates}).encode()
    client._request("POST", f"/v1/namespaces/db/tables/{name}", {}, body)


def check_snapshots(
    client: IndexClient,
    name: str,
    taken_steps: dict[int, Step],
    note: str,
    *,
    version: int,
    check_interval: int,
    writers: int,
) -> None:
    """Check the rows of every `check_interval`-th snapshot and of the last with Seamark's reader.

    In tables of version 2, also check a fifth of these snapshots with PyIceberg, whose reader is slower. Also check
    that each step is in exactly one snapshot.
    """
    metadata = json.loads(client.load_table(f"db.{name}", history=True).metadata)
    model: dict[int, Row] = {}
    checked_numbers: set[int] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with RestCatalog("sea", uri=client.url) as catalog:
            pyiceberg_table = catalog.load_table(f"db.{name}") if version == 2 else None
            snapshots = sorted(metadata.get("snapshots", []), key=lambda snapshot: snapshot["sequence-number"])
            for position, snapshot in enumerate(snapshots):
                number = int(snapshot["summary"]["step"])
                assert number not in checked_numbers, f"{note}: step {number} is in two snapshots"
                checked_numbers.add(number)
                model = taken_steps[number].apply_to(model)
                expected, snapshot_id = list_model_rows(model), snapshot["snapshot-id"]
                message = f"{note}, after step {taken_steps[number]}"
                is_last = position == len(snapshots) - 1
                if position % check_interval == 0 or is_last:
                    assert read_rows(client, f"db.{name}", At(snapshot_id=snapshot_id)) == expected, message
                if pyiceberg_table is not None and (position % (5 * check_interval) == 0 or is_last):
                    rows = pyiceberg_table.scan(snapshot_id=snapshot_id, selected_fields=COLUMNS).to_arrow()
                    assert [
                        tuple(value.values()) for value in rows.select(COLUMNS).sort_by("id").to_pylist()
                    ] == expected, message
    assert taken_steps.keys() == checked_numbers, (
        f"{note}: these steps are lost: {[taken_steps[step] for step in sorted(taken_steps.keys() - checked_numbers)]}"
    )


@dataclass(frozen=True)
class Shape:
    """The layout of a table: its format version, its properties and its successive specs of (transform, source id)."""

    version: int
    specs: tuple[tuple[str, int], ...] = ()
    properties: tuple[tuple[str, str], ...] = ()

    @property
    def supports_equality_upserts(self) -> bool:
        """Whether equality deletes by the key apply to every file, and all readers that check the rows support them.

        In tables of version 2, PyIceberg also checks the rows, and it does not support equality deletes. With an
        identity partition, an equality delete applies only to the files of the same partition.
        """
        return self.version == 3 and not any(name == "identity" for name, _ in self.specs)

    def __str__(self) -> str:
        specs = " then ".join(f"{name}({source})" for name, source in self.specs)
        return f"v{self.version} {specs} {dict(self.properties)}"


ATTEMPTS_MAX = 12
"""The largest number of attempts of one change, beside at most three other writers."""
RECORD = ("seamark.index.ids", "record(id)")
BLOOM = ("seamark.index.ids", "bloom(id)")
SHAPES = (
    Shape(3, (), (RECORD,)),
    Shape(2, (("identity", 2),), (BLOOM,)),
    Shape(3, (("bucket[4]", 1),)),
    Shape(2, (("bucket[4]", 1), ("bucket[8]", 1), ("identity", 2)), (RECORD,)),
    Shape(3, (("identity", 2), ("bucket[3]", 1), ("", 0)), (BLOOM, ("seamark.index.lands", "bitmap(land)"))),
    Shape(2, (("", 0), ("bucket[2]", 1), ("bucket[4]", 1))),
)


def run_steps(
    client: IndexClient, seed: int, shape: Shape, step_count: int, *, writers: int, check_interval: int, name: str = "t"
) -> None:
    note = f"seed {seed}, {shape}"
    rng = random.Random(seed)
    first_spec = [shape.specs[0]] if shape.specs and shape.specs[0][0] else []
    create_upsert_table(client, name, version=shape.version, spec=first_spec, properties=dict(shape.properties))
    steps_by_number = {
        step.number: step
        for step in draw_steps(rng, step_count, MODES, has_equality_upserts=shape.supports_equality_upserts)
    }
    spec_count = max(1, len(shape.specs))
    clients = [IndexClient(client.url) for _ in range(writers)]
    with ThreadPoolExecutor(writers) as pool:
        for round_number in range(spec_count):
            if round_number:
                change_spec(client, name, *shape.specs[round_number], round_number)
            round_steps = [
                step for step in steps_by_number.values() if step.number * spec_count // step_count == round_number
            ]
            for start in range(0, len(round_steps), writers):
                concurrent_steps = zip(round_steps[start : start + writers], clients, strict=False)
                futures = [pool.submit(step.commit, own_client, f"db.{name}") for step, own_client in concurrent_steps]
                for step, future in zip(round_steps[start:], futures, strict=False):
                    assert future.exception(120) is None, f"{note}, {step}: {future.exception()!r}"
                    attempts = getattr(future.result(), "attempts", 1)
                    assert attempts <= ATTEMPTS_MAX, f"{note}, {step}: it needed {attempts} attempts"
                if start and rng.random() < 0.3:
                    rng.choice(round_steps[:start]).repeat(clients[0], f"db.{name}")
    for open_client in clients:
        open_client.close()
    check_snapshots(
        client, name, steps_by_number, note, version=shape.version, check_interval=check_interval, writers=writers
    )


FAST_SHAPES = (1,)
"""The positions in `SHAPES` of the tables that the fast tests use."""


@pytest.mark.parametrize("writers", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=[] if number in FAST_SHAPES else pytest.mark.slow) for number in range(len(SHAPES))],
)
def test_every_snapshot_matches_its_history(client: IndexClient, number: int, writers: int) -> None:
    run_steps(client, 100 * writers + number, SHAPES[number], examples(30, 10), writers=writers, check_interval=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_every_snapshot_matches_a_long_history_of_several_writers(client: IndexClient, seed: int) -> None:
    run_steps(client, seed, SHAPES[seed % len(SHAPES)], 120, writers=1 + seed % 4, check_interval=3)
