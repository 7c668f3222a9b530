"""A record index has as many live entries as its table has rows, after every kind of write and merge.

Keys are nearly random, and the test looks each of them up. DuckDB counts the rows of the files that PyIceberg lists,
and the test counts the entries in the index files. Neither shares code with the writers or with the lookups. The
expected rows follow from the keys alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.storage import Storage
from seamark.connector.index.builds import InProcessWorkers
from seamark.connector.index.indexer import Indexer
from seamark.connector.index.merges import MERGED_FILES_MIN
from seamark.connector.write.appends import append
from seamark.connector.write.upserts import delete, upsert
from seamark.formats.index.index_file import open_index_file
from seamark.formats.index.kinds.record import RecordBlob
from tests.connector.lake import open_catalog
from tests.connector.write.test_upserts import create_upsert_table
from tests.seeds import mark_fast

Longs = npt.NDArray[np.int64]

FIELDS: list[dict[str, Any]] = [
    {"id": 1, "name": "k", "required": True, "type": "long"},
    {"id": 2, "name": "v", "required": False, "type": "int"},
]
KEYS_PER_LOOKUP = 1_000_000


def mix_numbers(numbers: npt.NDArray[Any]) -> Longs:
    """Return int64[n], distinct and nearly random keys. splitmix64 maps different numbers to different keys."""
    mixed = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))).view(np.int64)


def build_rows(numbers: Longs, value: int) -> pa.Table:
    return pa.table({"k": mix_numbers(numbers), "v": np.full(len(numbers), value, np.int32)})


@dataclass
class GrowingTable:
    """A table and its expected rows.

    Attributes:
        live_rows: bool[n], True if the row of key n exists.
        sampled_keys: The number of keys that are looked up after each step.
    """

    client: IndexClient
    mode: str
    sampled_keys: int
    live_rows: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(5))

    def insert(self, count: int) -> None:
        new_keys = np.arange(len(self.live_rows), len(self.live_rows) + count)
        append(self.client, "db.t", build_rows(new_keys, 0))
        self.live_rows = np.concatenate([self.live_rows, np.ones(count, np.bool_)])

    def upsert(self, updated: int, inserted_rows: int) -> None:
        updated_rows = self.rng.choice(np.flatnonzero(self.live_rows), updated, replace=False)
        keys = np.concatenate([updated_rows, np.arange(len(self.live_rows), len(self.live_rows) + inserted_rows)])
        report = upsert(self.client, "db.t", build_rows(keys, 1), keys=["k"], mode=self.mode)
        assert (report.updated, report.inserted) == (updated, inserted_rows)
        self.live_rows = np.concatenate([self.live_rows, np.ones(inserted_rows, np.bool_)])

    def delete(self, count: int) -> None:
        removed_keys = self.rng.choice(np.flatnonzero(self.live_rows), count, replace=False)
        report = delete(self.client, "db.t", keys=build_rows(removed_keys, 0).select(["k"]), mode=self.mode)
        assert report.deleted == count
        self.live_rows[removed_keys] = False

    def merge(self) -> None:
        count_before = sum(self.client.index("db.t", "keys").json["levels"].values())
        report = Indexer(self.client, lambda: closing(InProcessWorkers())).maintain_all_tables()
        assert (report.failed, report.damaged) == (0, 0)
        assert report.merges > 0
        assert sum(self.client.index("db.t", "keys").json["levels"].values()) < count_before

    # Counts

    def check(self, step: str) -> None:
        """Check that the files and the index have exactly the expected rows.

        The keys are distinct and nearly random, so their number and their exclusive or identify the set of keys.
        The index has an entry for each stored row, also for deleted rows.
        """
        data, deletes = self.list_files()
        count, key_hash, deleted_rows = _count_rows(data, deletes)
        keys = mix_numbers(np.flatnonzero(self.live_rows))
        assert (count, key_hash) == (len(keys), int(np.bitwise_xor.reduce(keys))), step
        assert self.count_entries(set(data)) - deleted_rows == count, step
        index = self.client.index("db.t", "keys")
        assert (index.health, index.lag_files) == ("ok", 0), step
        sample_size = min(self.sampled_keys, len(self.live_rows))
        self.check_lookup(data, self.rng.choice(len(self.live_rows), sample_size, replace=False), step)

    def list_files(self) -> tuple[list[str], list[str]]:
        """Return the paths of the data files and of the delete files that PyIceberg lists."""
        with open_catalog(self.client.url) as catalog, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tasks = list(catalog.load_table("db.t").scan().plan_files())
        deletes = {delete_file.file_path for task in tasks for delete_file in task.delete_files}
        return [task.file.file_path for task in tasks], sorted(deletes)

    def count_entries(self, data: set[str]) -> int:
        """Return the number of entries for these data files in the live index files.

        Check that exactly one index file describes each data file.
        """
        described_paths: list[str] = []
        total = 0
        for index_file in self.client.index("db.t", "keys").json["index-files"]:
            if index_file["state"] != "live":
                continue
            opened_file = open_index_file(Storage().read(index_file["location"]), index_file["location"])
            counts = RecordBlob(opened_file.blob).counts
            numbers = [number for number, path in enumerate(opened_file.files.paths) if path in data]
            described_paths += [opened_file.files.paths[number] for number in numbers]
            total += int(counts[numbers].sum())
        assert sorted(described_paths) == sorted(data)
        return total

    def check_lookup(self, data: list[str], numbers: Longs, step: str) -> None:
        """Check that a lookup finds the row of each live key, and reports all other keys as missing."""
        keys = mix_numbers(numbers)
        answer = self.client.lookup("db.t", {"k": keys})
        assert (answer.complete, answer.undecided) == (True, 0), step
        live_positions = np.flatnonzero(self.live_rows[numbers])
        assert np.array_equal(np.sort(answer.rows["key"].to_numpy()), live_positions), step
        assert answer.missing == len(numbers) - len(live_positions), step
        found_rows = pa.table(
            {
                "path": answer.rows["file_path"],
                "position": answer.rows["position"],
                "wanted": keys[answer.rows["key"].to_numpy()],
            }
        )
        with duckdb.connect() as db:
            db.register("found_rows", found_rows)
            ((correct_count,),) = db.execute(
                "SELECT count(*) FROM read_parquet($data, filename = true, file_row_number = true) d JOIN found_rows f"
                " ON d.filename = replace(f.path, 'file://', '') AND d.file_row_number = f.position AND d.k = f.wanted",
                {"data": _to_local_paths(data)},
            ).fetchall()
        assert correct_count == len(live_positions), step

    def check_all_keys(self) -> None:
        """Check a lookup of every key that the table has ever had."""
        rows_found = 0
        for start in range(0, len(self.live_rows), KEYS_PER_LOOKUP):
            numbers = np.arange(start, min(start + KEYS_PER_LOOKUP, len(self.live_rows)))
            answer = self.client.lookup("db.t", {"k": mix_numbers(numbers)})
            assert np.array_equal(np.sort(answer.rows["key"].to_numpy()), np.flatnonzero(self.live_rows[numbers]))
            rows_found += len(answer.rows)
        assert rows_found == np.count_nonzero(self.live_rows)


def _to_local_paths(paths: list[str]) -> list[str]:
    return [path.removeprefix("file://") for path in paths]


def _count_rows(data: list[str], deletes: list[str]) -> tuple[int, int, int]:
    """Return the number of rows, the exclusive or of their keys, and the number of deleted rows of the data files."""
    with duckdb.connect() as db:
        parquet_reader = "read_parquet($data, filename = true, file_row_number = true)"
        parameters: dict[str, Any] = {"data": _to_local_paths(data)}
        if deletes:
            deleted_rows_query = (
                "SELECT DISTINCT replace(file_path, 'file://', '') AS filename, pos FROM read_parquet($deletes)"
            )
            db.execute(f"CREATE TABLE gone AS {deleted_rows_query}", {"deletes": _to_local_paths(deletes)})
        else:
            db.execute("CREATE TABLE gone (filename VARCHAR, pos BIGINT)")
        match_condition = "g.filename = d.filename AND g.pos = d.file_row_number"
        ((count, key_hash),) = db.execute(
            f"SELECT count(*), bit_xor(k) FROM {parquet_reader} d ANTI JOIN gone g ON {match_condition}", parameters
        ).fetchall()
        ((deleted_rows,),) = db.execute(
            f"SELECT count(*) FROM {parquet_reader} d SEMI JOIN gone g ON {match_condition}", parameters
        ).fetchall()
    return count, key_hash, deleted_rows


def change_and_check(client: IndexClient, mode: str, *, keys: int, rounds: int, sampled_keys: int) -> None:
    """Insert, upsert, delete and merge `rounds` times, and check the table after each step.

    Args:
        keys: The number of keys that all rounds together insert. A change affects up to a hundredth of them.
        sampled_keys: The number of keys of each lookup.
    """
    create_upsert_table(client, version=2, fields=FIELDS, properties={"seamark.index.keys": "record(k)"})
    table = GrowingTable(client, mode, sampled_keys)
    hundredth = keys // 100
    for round_number in range(rounds):
        for _ in range(MERGED_FILES_MIN):
            table.insert(keys // (rounds * MERGED_FILES_MIN))
        steps: dict[str, Callable[[], None]] = {
            "inserts": lambda: None,
            "upserts": lambda: table.upsert(hundredth, hundredth // 2),
            "deletes": lambda: table.delete(hundredth),
            "merges": table.merge,
            "deletes after the merge": lambda: table.delete(hundredth // 2),
            "upserts after the merge": lambda: table.upsert(hundredth // 2, hundredth),
        }
        for step, act in steps.items():
            act()
            table.check(f"{step}, turn {round_number}")
    table.check_all_keys()


@pytest.mark.parametrize("mode", mark_fast(["merge-on-read", "copy-on-write"], 1))
def test_record_index_has_an_entry_for_each_row_after_each_kind_of_write(client: IndexClient, mode: str) -> None:
    change_and_check(client, mode, keys=200_000, rounds=1, sampled_keys=20_000)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_record_index_of_50_million_rows_has_an_entry_for_each_row(client: IndexClient) -> None:
    change_and_check(client, "merge-on-read", keys=50_000_000, rounds=3, sampled_keys=200_000)
