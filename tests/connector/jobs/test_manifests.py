"""Tests of rewrites of manifests in random histories and with concurrent writers.

PyIceberg reads the same live entries as before a rewrite, and a plan of a partition reads fewer manifests.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyiceberg.expressions import EqualTo
from pyiceberg.expressions.visitors import manifest_evaluator
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.table import Table
from pyiceberg.transforms import BucketTransform, IdentityTransform

import seamark.duckdb
from seamark.commands.main import cli
from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.indexes import IndexClient
from seamark.connector.jobs.jobs import run_manifest_rewrite
from seamark.connector.jobs.server_jobs import rewrite_manifests
from seamark.connector.read.scans import scan
from seamark.connector.write.appends import append
from seamark.connector.write.compaction import CompactionPolicy, compact
from seamark.connector.write.upserts import MODES, delete, upsert
from seamark.metaserver.commit.engine_commits.manifest_corrections import ManifestCorrections
from seamark.metaserver.commit.rewriting import manifest_rewrite
from seamark.metaserver.commit.rewriting.manifest_rewrite import ManifestRewrite
from tests.connector.jobs.test_orphan_files import list_all_files
from tests.connector.lake import open_catalog
from tests.connector.server_thread import ServerThread
from tests.connector.write.test_compaction import BY_PART, build_rows, count_scanned_rows, create_test_table
from tests.seeds import first_seed, list_seeds_by_version

BY_BUCKET = PartitionSpec(PartitionField(1, 1000, BucketTransform(8), "id_bucket"))
NO_MERGE = {"commit_manifest-merge_enabled": "false"}


def count_entries(table: Table) -> Counter[tuple[Any, ...]]:
    """Count the live entries of the current snapshot by the fields that a rewrite must keep."""
    snapshot = table.current_snapshot()
    assert snapshot is not None
    entries: Counter[tuple[Any, ...]] = Counter()
    for manifest in snapshot.manifests(table.io):
        next_row_id = manifest.first_row_id if hasattr(manifest, "first_row_id") else None
        for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True):
            file = entry.data_file
            row_id = getattr(file, "first_row_id", None)
            if row_id is None and next_row_id is not None:
                row_id, next_row_id = next_row_id, next_row_id + file.record_count
            entries[
                manifest.partition_spec_id,
                file.content,
                file.file_path,
                tuple(file.partition),
                file.record_count,
                entry.snapshot_id,
                entry.sequence_number,
                tuple(sorted((file.lower_bounds or {}).items())),
                row_id,
            ] += 1
    return entries


def count_lineage(client: IndexClient) -> Counter[tuple[Any, ...]]:
    rows = scan(client, "db.t", ["id", "_row_id", "_last_updated_sequence_number"]).to_arrow()
    return Counter(tuple(row.values()) for row in rows.to_pylist())


def count_read_manifests(table: Table, column: str, value: int) -> int:
    """Return the number of data manifests that PyIceberg reads to plan `column = value`."""
    snapshot, scan = table.current_snapshot(), table.scan(EqualTo(column, value))  # type: ignore[call-arg]
    assert snapshot is not None
    evaluators: dict[int, Callable[[Any], bool]] = {
        spec_id: manifest_evaluator(spec, table.schema(), scan.partition_filters[spec_id], case_sensitive=True)
        for spec_id, spec in table.specs().items()
    }
    return sum(
        evaluators[manifest.partition_spec_id](manifest)
        for manifest in snapshot.manifests(table.io)
        if manifest.content == 0
    )


@pytest.mark.parametrize(("case", "version"), list_seeds_by_version(range(2), fast=1))
def test_rewrites_in_random_histories_keep_the_live_entries(
    client: IndexClient, server: ServerThread, version: int, case: int
) -> None:
    rng, rewrite_count = random.Random(first_seed() * 10 + case), 0
    with open_catalog(server.url) as catalog:
        properties = {"commit_manifest_target-size-bytes": str(rng.choice((9000, 20_000, 8 << 20)))}
        create_test_table(catalog, version, rng.choice((PartitionSpec(), BY_PART, BY_BUCKET)), **NO_MERGE, **properties)
        for step in range(20):
            ids, random_number = sorted(rng.sample(range(300), rng.randint(1, 40))), rng.random()
            if random_number < 0.4:
                append(client, "db.t", build_rows([1000 * step + number for number in ids]))
            elif random_number < 0.6:
                upsert(client, "db.t", build_rows(ids, f"{step}"), keys=["id"], mode=rng.choice(MODES))
            elif random_number < 0.75:
                delete(client, "db.t", keys=pa.table({"id": ids}), mode=rng.choice(MODES))
            elif random_number < 0.82:
                compact(client, "db.t", policy=CompactionPolicy(20_000, 3))
            elif random_number < 0.86 and len(catalog.load_table("db.t").specs()) == 1:
                with catalog.load_table("db.t").update_spec() as update:
                    update.add_field("text", IdentityTransform(), "by_text")
            table = catalog.load_table("db.t")
            if rng.random() < 0.6 or table.current_snapshot() is None:
                continue
            entries_before, rows_before = count_entries(table), count_scanned_rows(client)
            lineage_before = count_lineage(client) if version == 3 else None
            report = rewrite_manifests(client, "db.t", min_count=2)
            table = catalog.load_table("db.t")
            snapshot = table.current_snapshot()
            assert snapshot is not None
            assert count_entries(table) == entries_before
            assert count_scanned_rows(client) == rows_before
            assert lineage_before is None or count_lineage(client) == lineage_before
            if report["snapshot-id"] is not None:
                rewrite_count += 1
                assert snapshot.snapshot_id == report["snapshot-id"]
                assert len(snapshot.manifests(table.io)) == (
                    report["manifests"] - report["manifests-before"] + report["manifests-after"]
                )
                assert report["manifests-after"] < report["manifests-before"]
                assert rewrite_manifests(client, "db.t", min_count=2)["snapshot-id"] is None, (
                    "a repeated rewrite has nothing to do"
                )
        assert rewrite_count > 1


def test_plan_of_a_partition_reads_few_manifests_after_a_rewrite(client: IndexClient, server: ServerThread) -> None:
    with open_catalog(server.url) as catalog:
        # The small target size makes the rewrite write several manifests. A parameter's name has underscores instead of
        # the dots of the property.
        create_test_table(catalog, 2, BY_PART, **NO_MERGE, **{"commit_manifest_target-size-bytes": "6500"})
        for number in range(30):
            append(client, "db.t", build_rows(range(number * 30, number * 30 + 30)))
        table = catalog.load_table("db.t")
        assert [count_read_manifests(table, "part", part) for part in range(3)] == [30, 30, 30]
        dry_report = rewrite_manifests(client, "db.t", dry_run=True)
        assert catalog.load_table("db.t").metadata_location == table.metadata_location
        report = rewrite_manifests(client, "db.t")
        assert dry_report == {**report, "snapshot-id": None, "bytes-after": 0}
        assert report["partition-manifests-before"] == 30
        actual = [count_read_manifests(catalog.load_table("db.t"), "part", part) for part in range(3)]
        assert sum(actual) / 3 == pytest.approx(report["partition-manifests-after"], abs=0.01)
        # The manifests are sorted by part, so a part shares at most its first and its last manifest.
        assert max(actual) <= 2 + report["manifests-after"] // 3
        # Each of the two borders between the three parts can be within a manifest, which is then read for two parts.
        assert 3 <= report["manifests-after"] <= sum(actual) <= report["manifests-after"] + 2


@pytest.mark.slow
def test_rewrite_keeps_the_changes_of_concurrent_writers(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writers commit after the manifests are written and before the rewrite commits.

    An append does not invalidate the rewrite. A change that removes a file replaces one of the manifests, so the
    rewrite reads the manifests again, at most three times.
    """
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, 2, BY_PART, **NO_MERGE)
        for number in range(6):
            append(client, "db.t", build_rows([number, number + 100]))
        commit = ManifestRewrite._commit
        concurrent_writes: list[Callable[[], Any]] = []

        async def write_and_commit(self: ManifestRewrite, *arguments: Any) -> Any:
            if concurrent_writes:
                await asyncio.to_thread(concurrent_writes.pop())
            return await commit(self, *arguments)

        monkeypatch.setattr(ManifestRewrite, "_commit", write_and_commit)
        # The writer must commit while the lock is free; in the server, this happens just before the lock is
        # taken.
        rewrite = server.components.manifest_rewrite
        monkeypatch.setattr(rewrite, "_publisher", _Unlocked(rewrite._publisher))
        concurrent_writes.append(lambda: append(client, "db.t", build_rows([7])))
        report = rewrite_manifests(client, "db.t", min_count=2)
        assert (report["conflicts"], report["manifests-before"]) == (0, 6)
        assert count_scanned_rows(client)[7, 1, "7"] == 1

        def upsert_rows() -> None:
            upsert(client, "db.t", build_rows([0, 1, 2], "new"), keys=["id"], mode="copy-on-write")

        for number in range(5):
            append(client, "db.t", build_rows([200 + number]))
        concurrent_writes.append(upsert_rows)
        report = rewrite_manifests(client, "db.t", min_count=2)
        assert report["snapshot-id"] is not None
        assert count_scanned_rows(client)[0, 0, "new0"] == 1
        for number in range(5):
            append(client, "db.t", build_rows([300 + number]))
        concurrent_writes.extend([upsert_rows] * manifest_rewrite.REWRITE_ATTEMPTS_MAX)
        table = catalog.load_table("db.t")
        report = rewrite_manifests(client, "db.t", min_count=2)
        assert (report["snapshot-id"], report["conflicts"] > 0) == (None, True)
        assert run_manifest_rewrite(client, ("db", "t")) == {}
        rows_before = count_scanned_rows(client)
        # The first 6 appends add two rows each, and the later appends 1 and 10 rows.
        assert rows_before.total() == 12 + 1 + 10
        server.run(rewrite._cleanup.close())
        paths: set[Path] = set()
        for snapshot in catalog.load_table("db.t").metadata.snapshots:
            paths.add(Path(snapshot.manifest_list.removeprefix("file://")))
            paths |= {Path(manifest.manifest_path.removeprefix("file://")) for manifest in snapshot.manifests(table.io)}
        assert {path for path in list_all_files(table) if path.suffix == ".avro"} == paths, (
            "files of discarded attempts are deleted"
        )


class _Unlocked:
    """A publisher whose lock does not exclude other holders."""

    def __init__(self, publisher: Any) -> None:
        self._publisher = publisher

    def lock(self, *_: Any) -> Any:
        return nullcontext()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._publisher, name)


@pytest.mark.slow
def test_policy_sets_the_number_of_manifests_from_which_a_rewrite_is_due(
    client: IndexClient, server: ServerThread
) -> None:
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, 2, **NO_MERGE, **{"seamark_manifests_min-count": "5"})
        for number in range(4):
            append(client, "db.t", build_rows([number]))
        assert run_manifest_rewrite(client, ("db", "t")) != {}, "each partition is in four manifests"
        for number in range(3):
            append(client, "db.t", build_rows([10 + number]))
        append(client, "db.t", build_rows([20]))
        assert run_manifest_rewrite(client, ("db", "t"))["manifests_after"] == 1
        append(client, "db.t", build_rows([21]))
        assert run_manifest_rewrite(client, ("db", "t")) == {}
        with catalog.load_table("db.t").transaction() as transaction:
            transaction.set_properties({"seamark.manifests.min-count": "x"})
        with pytest.raises(InvalidRequest, match="min-count"):
            rewrite_manifests(client, "db.t")


@pytest.mark.slow
def test_rewrite_of_a_version_1_table_is_refused(client: IndexClient, server: ServerThread) -> None:
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, 1)
        with pytest.raises(InvalidRequest, match="format version 1"):
            rewrite_manifests(client, "db.t")


@pytest.mark.slow
def test_manifest_and_undo_commands_print_their_changes(client: IndexClient, server: ServerThread) -> None:
    def run_command(*arguments: str) -> str:
        result = CliRunner().invoke(cli, ["run", *arguments], env={"SEAMARK_URL": client.url})
        assert result.exit_code == 0, result.output
        return " ".join(result.output.split())

    with open_catalog(server.url) as catalog:
        create_test_table(catalog, 2, BY_PART, **NO_MERGE)
        assert "has no snapshot" in run_command("statistics", "db.t")
        for number in range(4):
            append(client, "db.t", build_rows(range(number * 3, number * 3 + 3)))
        assert "12 of 12 data files (12 rows) would be read" in run_command("statistics", "db.t", "--dry-run")
        assert "3 columns, 3 partitions; 12 of 12 data files (12 rows) were read" in run_command("statistics", "db.t")
        assert "4 of 4 manifests of db.t would become 1" in run_command("manifests", "db.t", "--dry-run")
        assert "in 1 of them on average; before, they were in 4" in run_command("manifests", "db.t")
        assert "no manifests to rewrite" in run_command("manifests", "db.t")
        assert "nothing to split" in run_command("split-buckets", "db.t")


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("version", [2, 3])
def test_rewrite_repairs_bounds_that_break_readers(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """Commits of earlier versions of the server have such bounds: DuckDB truncates a lower bound within a character."""
    text = "El cliente llamó por teléfono"
    with monkeypatch.context() as patches, closing(seamark.duckdb.connect(server.url)) as con:
        patches.setattr(ManifestCorrections, "correct", _repair_nothing)
        con.execute(f"CREATE TABLE sea.db.t (id BIGINT, t VARCHAR) WITH ('format-version' = {version})")
        for number in range(2):
            con.execute(f"INSERT INTO sea.db.t VALUES ({number}, '{text}')")
    with open_catalog(server.url) as catalog:
        assert list_lower_bounds(catalog.load_table("db.t")) == [text.encode()[:16]] * 2
        pages = client.plan("db.t", {"stats-fields": ["t"]})
        assert [task["data-file"].get("lower-bounds") for page in pages for task in page["file-scan-tasks"]] == [
            None
        ] * 2
        assert scan(client, "db.t", where=f"t = '{text}'").to_arrow().num_rows == 2
        dry_report = rewrite_manifests(client, "db.t", dry_run=True)
        report = rewrite_manifests(client, "db.t")
        assert dry_report["files-repaired"] == report["files-repaired"] == report["manifests-before"] == 2
        assert set(list_lower_bounds(catalog.load_table("db.t"))) == {b"El cliente llam"}
        assert sorted(scan(client, "db.t", where=f"t = '{text}'").to_arrow()["id"].to_pylist()) == [0, 1]
        assert rewrite_manifests(client, "db.t")["snapshot-id"] is None


async def _repair_nothing(*_: object) -> None:
    return None


def list_lower_bounds(table: Table) -> list[bytes]:
    """Return the lower bounds of column 2 in the live files."""
    snapshot = table.current_snapshot()
    assert snapshot is not None
    manifests = snapshot.manifests(table.io)
    entries = [
        entry for manifest in manifests for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True)
    ]
    return [bytes(entry.data_file.lower_bounds[2]) for entry in entries]
