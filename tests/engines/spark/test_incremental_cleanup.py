"""Tests that Iceberg's clean-up deletes no live file.

The clean-up runs after the undo of a job, and on Puffin files with several vectors. Trino, Flink and other programs
call `expireSnapshots()` of Iceberg's Java library. It deletes the files that expired snapshots of the history have
marked as removed, and does not check whether they are live. Spark's procedure checks it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.partitioning import PartitionSpec
from pyspark.sql import SparkSession

from seamark.connector.client.errors import Conflict
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.values import CURRENT
from seamark.connector.jobs.rollback import undo_job
from seamark.connector.read.tables import open_table
from seamark.connector.write.appends import append
from seamark.connector.write.compaction import CompactionPolicy, compact
from seamark.connector.write.upserts import MODES, delete, upsert
from seamark.formats.iceberg.metadata.compaction import UNDONE_KEPT_MS
from tests.connector.jobs.test_expiration import list_needed_files, list_snapshot_ids, list_stored_files
from tests.connector.lake import open_catalog
from tests.connector.server_thread import ServerThread
from tests.connector.write.test_compaction import BY_PART, build_rows, count_scanned_rows, create_test_table
from tests.connector.write.test_shared_puffins import PuffinFiles
from tests.seeds import first_seed
from tests.server.rig import OffsetClock
from tests.services.spark import new_catalog

SMALL_FILES_POLICY = CompactionPolicy(1 << 20, 2)
FUTURE_MS = 1 << 45
BEHIND_MS = 1000 * UNDONE_KEPT_MS
"""How far the server's clock is behind at first. Iceberg refuses to write metadata with a time in the future."""


class CleanupLake:
    """A Seamark server and a Spark session, in which the server's catalog has the name `catalog`.

    The server's clock is behind at first, so that a test can move it forward without writing times in the future, which
    Iceberg refuses. `expire` expires all snapshots before a time that is far in the future.
    """

    def __init__(self, spark: SparkSession, home: Path) -> None:
        self.clock = OffsetClock()
        self.clock.ahead_ms = -BEHIND_MS
        self.server = ServerThread(home, warehouse=home.as_uri(), clock=self.clock)
        self.server.start()
        self.client = IndexClient(self.server.url)
        self.spark = spark
        self.catalog = new_catalog(spark, self.server.url)

    def close(self) -> None:
        self.client.close()
        self.server.stop()

    def expire(self, *, by_procedure: bool) -> None:
        """Expire all snapshots except the current snapshot, with Iceberg's library or with Spark's procedure."""
        if by_procedure:
            self.spark.sql(
                f"CALL {self.catalog}.system.expire_snapshots(table => 'db.t', "
                "older_than => TIMESTAMP '2100-01-01 00:00:00', retain_last => 1)"
            ).collect()
        else:
            self._load_table().expireSnapshots().expireOlderThan(FUTURE_MS).retainLast(1).commit()

    def _load_table(self) -> Any:
        jvm = self.spark._jvm
        assert jvm is not None
        return jvm.org.apache.iceberg.spark.Spark3Util.loadIcebergTable(
            self.spark._jsparkSession, f"{self.catalog}.db.t"
        )

    def read_rows(self) -> Counter[tuple[Any, ...]]:
        self.spark.sql(f"REFRESH TABLE {self.catalog}.db.t")
        return Counter(tuple(row) for row in self.spark.table(f"{self.catalog}.db.t").collect())


@pytest.fixture
def lake(spark: SparkSession, tmp_path: Path) -> Iterator[CleanupLake]:
    cleanup_lake = CleanupLake(spark, tmp_path)
    yield cleanup_lake
    cleanup_lake.close()


@pytest.mark.slow
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("rounds", [2, 8])
def test_icebergs_clean_up_after_undone_jobs_keeps_live_files(lake: CleanupLake, version: int, rounds: int) -> None:
    rng = random.Random(f"{first_seed()} {version} {rounds}")
    outcomes = Counter[str]()
    for number in range(rounds):
        with open_catalog(lake.server.url) as catalog:
            merge_properties = {"commit.manifest.min-count-to-merge": rng.choice(["2", "4", "100"])}
            create_test_table(catalog, version, rng.choice([PartitionSpec(), BY_PART]), **merge_properties)
            model: dict[int, str] = {}
            for step in range(rng.randint(3, 6)):
                _change_rows(lake.client, rng, model, f"{step}:")
            for attempt in range(rng.randint(1, 2)):
                if not compact(lake.client, "db.t", policy=SMALL_FILES_POLICY).commits:
                    continue
                job_id = open_table(lake.client, "db.t", CURRENT).snapshot_id
                for step in range(rng.randint(0, 2)):
                    _append_rows(lake.client, rng, model, f"after {attempt} {step}:")
                try:
                    undo_job(lake.client, "db.t", job_id)
                except Conflict:
                    outcomes["refused"] += 1
                else:
                    outcomes["undone"] += 1
                if rng.random() < 0.5:
                    _change_rows(lake.client, rng, model, f"then {attempt}:")
            expected = Counter((id_, id_ % 3, text) for id_, text in model.items())
            assert count_scanned_rows(lake.client) == expected
            for by_procedure in (number % 3 == 2, False):
                if rng.random() < 0.5:  # Without this step, the expiration would keep the undone snapshots.
                    lake.clock.ahead_ms += 2 * UNDONE_KEPT_MS
                lake.expire(by_procedure=by_procedure)
                table = catalog.load_table("db.t")
                assert [path for path in list_needed_files(table) if not path.exists()] == []
                assert count_scanned_rows(lake.client) == expected
                assert lake.read_rows() == expected
            lake.clock.ahead_ms += 2 * UNDONE_KEPT_MS
            lake.expire(by_procedure=False)
            assert len(list_snapshot_ids(catalog.load_table("db.t"))) == 1
            assert lake.read_rows() == expected
            catalog.drop_table("db.t")
    assert outcomes["undone"], outcomes


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [2, 8])
def test_icebergs_clean_up_keeps_puffin_files_with_a_live_vector(lake: CleanupLake, rounds: int) -> None:
    """Spark and Seamark replace each other's deletion vectors."""
    rng = random.Random(f"{first_seed()} {rounds}")
    lake.clock.ahead_ms = 0
    name, shared_count = f"{lake.catalog}.db.t", 0
    for _ in range(rounds):
        with open_catalog(lake.server.url) as catalog:
            create_test_table(catalog, 3, **{"write.delete.mode": "merge-on-read"})
            model: dict[int, str] = {}
            for step in range(3):
                first_id = 20 * step
                append(lake.client, "db.t", build_rows(range(first_id, first_id + 20)))
                model.update((number, str(number)) for number in range(first_id, first_id + 20))
            lake.read_rows()
            for _ in range(5):
                deleted_ids = rng.sample(sorted(model), 3 if rng.random() < 0.5 else 1)
                if rng.random() < 0.6:
                    lake.spark.sql(f"DELETE FROM {name} WHERE id IN ({','.join(map(str, deleted_ids))})")
                else:
                    delete(lake.client, "db.t", keys=pa.table({"id": deleted_ids}), mode="merge-on-read")
                    lake.spark.sql(f"REFRESH TABLE {name}")
                for id_ in deleted_ids:
                    del model[id_]
                puffin_files = PuffinFiles(catalog.load_table("db.t"))
                shared_count += sum(vector_count > 1 for vector_count in puffin_files.live_vector_counts.values())
                assert not puffin_files.marked_paths & puffin_files.live_vector_counts.keys()
                assert puffin_files.all_paths - puffin_files.live_vector_counts.keys() <= puffin_files.marked_paths
            append(lake.client, "db.t", build_rows([999]))
            model[999] = "999"
            lake.spark.sql(f"REFRESH TABLE {name}")
            lake.expire(by_procedure=False)
            table = catalog.load_table("db.t")
            assert len(list_snapshot_ids(table)) == 1
            assert [path for path in list_needed_files(table) if not path.exists()] == []
            puffins = {path for path in list_stored_files(table) if path.suffix == ".puffin"}
            assert puffins == {path for path in list_needed_files(table) if path.suffix == ".puffin"}
            expected = Counter((id_, id_ % 3, text) for id_, text in model.items())
            assert count_scanned_rows(lake.client) == lake.read_rows() == expected
            catalog.drop_table("db.t")
    assert shared_count, "no Puffin file had two live vectors"


def _change_rows(client: IndexClient, rng: random.Random, model: dict[int, str], text: str) -> None:
    ids = rng.sample(range(40), rng.randint(1, 8))
    if rng.random() < 0.7:
        upsert(client, "db.t", build_rows(ids, text), keys=["id"], mode=rng.choice(MODES))
        model.update((id_, f"{text}{id_}") for id_ in ids)
    else:
        delete(client, "db.t", keys=pa.table({"id": ids}), mode=rng.choice(MODES))
        for id_ in ids:
            model.pop(id_, None)


def _append_rows(client: IndexClient, rng: random.Random, model: dict[int, str], text: str) -> None:
    first_id = 100 + len(model) + 1000 * rng.randint(0, 1000)
    ids = [number for number in range(first_id, first_id + 5) if number not in model]
    append(client, "db.t", build_rows(ids, text))
    model.update((id_, f"{text}{id_}") for id_ in ids)
