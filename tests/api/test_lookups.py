"""Rows by their keys over HTTP, against the rows that a reader sees."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from metaserver.api.arrow import ARROW_STREAM
from tests.api.client import Api
from tests.api.stored import Row, Snapshot, Stored, some_row

Found = tuple[int, str, int]
"""Number of the key, path, position."""
LOOKUP = "/api/v1/tables/db/t/lookup"


def stream(table: pa.Table, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


async def ask(api: Api, keys: Sequence[Any], **more: Any) -> dict[str, Any]:
    answer = await api("POST", LOOKUP, {"keys": list(keys), **more})
    assert answer.status == 200, answer.raw
    found: dict[str, Any] = answer.json
    return found


async def ask_arrow(api: Api, keys: pa.Table, query: str = "") -> pa.Table:
    headers = {"Content-Type": ARROW_STREAM, "Accept": ARROW_STREAM}
    answer = await api("POST", f"{LOOKUP}?{query}", stream(keys), headers=headers)
    assert answer.status == 200, answer.raw
    return pa.ipc.open_stream(answer.raw).read_all()


def wanted(stored: Stored, snapshot: Snapshot, keys: Sequence[Row], columns: Sequence[int]) -> list[Found]:
    """All live rows, by plain comparison of their texts, as NaN is NaN here."""
    by_key: dict[tuple[str, ...], list[tuple[str, int]]] = {}
    for path, position, row in stored.live_rows(snapshot):
        by_key.setdefault(tuple(repr(row[at - 1]) for at in columns), []).append((path, position))
    return sorted(
        (number, *found) for number, key in enumerate(keys) for found in by_key.get(tuple(map(repr, key)), [])
    )


def told(answer: dict[str, Any]) -> list[Found]:
    assert not any("undecided" in row for row in answer["rows"])
    return sorted((row["key"], row["file-path"], row["position"]) for row in answer["rows"])


def as_json(key: Row) -> list[Any]:
    return ["NaN" if isinstance(value, float) and math.isnan(value) else value for value in key]


async def a_table(api: Api, rng: random.Random, **options: Any) -> Stored:
    """Some files, deletes of what kinds the version has, more files."""
    stored = await Stored.create(api, **options)
    for _ in range(3):
        files = []
        for _ in range(rng.choice([1, 2, 3])):
            part = rng.choice([1, 2])
            files.append(stored.data_file([some_row(rng, part) for _ in range(rng.choice([1, 20, 50]))], group_rows=8))
        live = [*(stored.snapshots[-1].data if stored.snapshots else []), *files]
        await stored.commit(files)
        await stored.commit(deletes=some_deletes(stored, live, rng))
    return stored


def some_deletes(stored: Stored, live: Sequence[Any], rng: random.Random) -> list[Any]:
    made: list[Any] = []
    spots = {file.path: {rng.randrange(file.record_count) for _ in range(rng.choice([1, 5]))} for file in live}
    taken = {delete.referenced for one in stored.snapshots[-1:] for delete in one.deletes if delete.is_vector}
    for part in (1, 2):
        mine = [file for file in live if not stored.partitioned or file.partition == (part,)]
        chosen = [file for file in mine if rng.random() < 0.5]
        if not chosen:
            continue
        if stored.version > 2:
            fresh = {file.path: spots[file.path] for file in chosen if file.path not in taken}
            taken |= set(fresh)
            made += stored.vectors(fresh, part)
        else:
            made.append(stored.position_deletes([(file.path, at) for file in chosen for at in spots[file.path]], part))
            one = rng.choice(chosen)
            made.append(stored.position_deletes([(one.path, at) for at in spots[one.path]], part, named=True))
        ids = rng.choice([[1], [1, 2], [2, 3], [1, 2, 3]])
        rows = [some_row(rng, part) for _ in range(3)]
        made.append(stored.equality_deletes(ids, [tuple(row[at - 1] for at in ids) for row in rows], part))
    return made


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("partitioned", [False, True])
@pytest.mark.parametrize("columns", [["id"], ["name", "id"], ["price"]])
async def test_lookups_are_scans_in_every_snapshot(
    api: Api, version: int, partitioned: bool, columns: list[str]
) -> None:
    for seed in range(2):
        rng = random.Random(f"{seed} {version} {partitioned} {columns}")
        stored = await a_table(api, rng, version=version, partitioned=partitioned)
        ids = [("id", "name", "price", "part").index(one) + 1 for one in columns]
        await stored.index("keys", "record", columns, stored.snapshots[-1].data, parts=2)
        for snapshot in stored.snapshots:
            rows = [some_row(rng, 1) for _ in range(rng.choice([1, 30]))]
            keys = [tuple(row[at - 1] for at in ids) for row in rows]
            answer = await ask(api, list(map(as_json, keys)), index="keys", **{"snapshot-id": snapshot.id})
            expected = wanted(stored, snapshot, keys, ids)
            assert told(answer) == expected, f"seed {seed}"
            assert answer["complete"]
            assert answer["missing"] == [n for n in range(len(keys)) if n not in {one[0] for one in expected}]
        assert (await api("DELETE", "/v1/namespaces/db/tables/t")).status == 204
