"""Tests of the groups that the server reads from index files of cubes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from seamark.formats.index.kinds import cube
from seamark.formats.index.kinds.cube import CUBE
from seamark.metaserver.api.lookups import cube_groups
from seamark.metaserver.api.lookups.cube_groups import GroupReading

SCHEMA = pa.schema([("d0", pa.string()), ("m0", pa.int64())])
FUNCTIONS = {"m0": "count"}


def build_ids(*numbers: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array([(number, number) for number in numbers], dtype=np.uint64)


def index_file(location: str, entries: dict[int, pa.RecordBatch]) -> Any:
    """Return an open index file with an entry for each id of a data file."""
    blob = memoryview(b"".join(map(bytes, CUBE.encode(list(entries.values())))))
    return SimpleNamespace(location=location, files=SimpleNamespace(ids=build_ids(*entries)), index=CUBE.open(blob))


def groups(*names: str, count: int = 1) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(names), pa.array([count] * len(names), pa.int64())], schema=SCHEMA)


def wrong_offsets() -> pa.RecordBatch:
    buffers = [None, pa.py_buffer(np.array([0, 1 << 30, 2], np.int32)), pa.py_buffer(b"ab")]
    country = pa.Array.from_buffers(pa.string(), 2, buffers)
    return pa.RecordBatch.from_arrays([country, pa.array([1, 1], pa.int64())], schema=SCHEMA)


def decode(reading: GroupReading) -> pa.Table:
    return pa.ipc.open_stream(reading.encode()).read_all()


def test_damaged_entry_is_reported_and_covers_no_file() -> None:
    reading = GroupReading(SCHEMA, FUNCTIONS, build_ids(3, 1, 2))
    damaged = index_file("damaged", {1: groups("a"), 2: wrong_offsets()})
    assert reading.add([damaged, index_file("whole", {3: groups("a", "b")})]) == {"damaged"}
    table = decode(reading)
    assert sorted(table.to_pylist(), key=str) == [{"d0": "a", "m0": 2}, {"d0": "b", "m0": 1}]
    assert table.schema.metadata[b"covered"] == b"Aw==", "the files 3 and 1 are covered, the file 2 is not"


def test_groups_that_cannot_be_combined_cover_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise pa.ArrowInvalid("damaged")

    monkeypatch.setattr(cube, "_aggregate", fail)
    reading = GroupReading(SCHEMA, FUNCTIONS, build_ids(1))
    assert reading.add([index_file("damaged", {1: groups("a")})]) == {"damaged"}
    table = decode(reading)
    assert table.num_rows == 0
    assert table.schema.metadata[b"covered"] == b"AA=="


def test_reading_stops_at_the_maximum_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cube_groups, "_COMBINED_BYTES", 1000)
    monkeypatch.setattr(cube_groups, "BYTES_MAX", 2000)
    reading = GroupReading(SCHEMA, FUNCTIONS, build_ids(*range(5)))
    entries = {number: groups(f"{number}" * 1500) for number in range(5)}
    assert reading.add([index_file("whole", entries)]) == set()
    assert reading.is_done
    table = decode(reading)
    assert table.num_rows == 2
    assert table.schema.metadata[b"covered"] == b"Aw=="


def test_sums_that_overflow_are_left_to_the_engine() -> None:
    reading = GroupReading(SCHEMA, FUNCTIONS, build_ids(1, 2))
    entries = {number: groups("a", count=2**62) for number in (1, 2)}
    assert reading.add([index_file("whole", entries)]) == set()
    assert decode(reading).to_pylist() == [{"d0": "a", "m0": 2**62}] * 2
