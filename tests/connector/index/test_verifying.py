"""The audit finds every fault of a wrong index file, and none in a correct one."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seamark.connector.client.storage import Storage
from seamark.connector.index.files import (
    DataFile,
    IndexTask,
    WrittenIndex,
    encode_index_file,
    index_data_files,
    read_file_keys,
)
from seamark.connector.index.verification import VerificationResult, verify_index_file
from seamark.connector.parquet.columns import Projection
from seamark.formats.iceberg.types.schema import Field, Schema
from seamark.formats.index.definitions import define_index
from seamark.formats.index.kinds import bitmap, bloom, record

SCHEMA = Schema((Field(1, "name", False, "string"),))


def write_data_file(folder: Path, name: str, values: list[Any]) -> DataFile:
    path = folder / name
    field = pa.field("name", pa.string(), metadata={"PARQUET:field_id": "1"})
    pq.write_table(pa.table([pa.array(values, pa.string())], pa.schema([field])), path)
    return DataFile(path.as_uri(), path.stat().st_size, len(values))


@pytest.fixture(params=["bloom", "bitmap", "record"])
def task(tmp_path: Path, request: pytest.FixtureRequest) -> IndexTask:
    return IndexTask("t", define_index("i", request.param, ["name"], SCHEMA), Projection(SCHEMA), tmp_path.as_uri())


@pytest.fixture
def files(tmp_path: Path) -> list[DataFile]:
    return [
        write_data_file(tmp_path, "a.parquet", ["x", None, "y", "x"]),
        write_data_file(tmp_path, "b.parquet", ["z"] * 200),
        write_data_file(tmp_path, "c.parquet", []),
    ]


def verify(task: IndexTask, written_index: WrittenIndex | str) -> VerificationResult:
    location = written_index if isinstance(written_index, str) else written_index.location
    assert location is not None
    return verify_index_file(location, task, sample=10, rng=random.Random(1))


def test_audit_finds_no_problem_in_a_correct_index_file(task: IndexTask, files: list[DataFile]) -> None:
    verdict = verify(task, index_data_files(task, files))
    assert (verdict.files, verdict.rows, verdict.sampled_files, verdict.unreadable_files, verdict.problems) == (
        3,
        204,
        3,
        0,
        (),
    )


def test_audit_finds_an_index_that_does_not_match_the_data_file(
    task: IndexTask, files: list[DataFile], tmp_path: Path
) -> None:
    other_file = write_data_file(tmp_path, "other.parquet", ["p", "q", "r", None])
    entries: list[Any] = []
    for wrong_file in (other_file, files[1], files[2]):  # The index file describes a different file than the first.
        keys = read_file_keys(task, wrong_file)
        builders = {
            "bloom": lambda column_keys: bloom.build_filter(column_keys[0]),
            "bitmap": lambda column_keys: bitmap.build_bitmap(column_keys[0]),
            "record": record.build_records,
        }
        entries.append(builders[task.definition.kind](keys))
    location = f"{task.folder}/wrong.puffin"
    Storage().write(location, encode_index_file("t", task.definition, files, entries))
    verdict = verify(task, location)
    assert verdict.problems
    assert all("a.parquet" in problem for problem in verdict.problems)


def test_audit_reports_damage_as_a_problem_and_raises_no_error(task: IndexTask, files: list[DataFile]) -> None:
    written_index = index_data_files(task, files)
    assert written_index.location is not None
    path = Path(written_index.location.removeprefix("file://"))
    whole_file = path.read_bytes()
    # Zeros may be padding, and no index depends on the digits of the footer's snapshot ids ("-1").
    middle = next(
        offset for offset in range(len(whole_file) // 2, len(whole_file)) if whole_file[offset] not in b"\x001"
    )
    # The changed byte is near the start, in the middle or in the footer at the end.
    for offset in (10, middle, len(whole_file) - 30):
        path.write_bytes(whole_file[:offset] + bytes([whole_file[offset] ^ 1]) + whole_file[offset + 1 :])
        assert verify(task, written_index).problems, offset
    path.write_bytes(whole_file[:-9])
    assert verify(task, written_index).problems
    path.unlink()
    assert verify(task, written_index).problems


def test_audit_counts_missing_data_files_without_a_problem(task: IndexTask, files: list[DataFile]) -> None:
    written_index = index_data_files(task, files)
    Path(files[1].path.removeprefix("file://")).unlink()
    verdict = verify(replace(task), written_index)
    assert (verdict.sampled_files, verdict.unreadable_files, verdict.problems) == (2, 1, ())
