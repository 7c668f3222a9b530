"""Tests that a compaction keeps the rows of a model, also while other writers change the table."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.expressions import In
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType

from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.values import CURRENT
from seamark.connector.jobs.jobs import run_compaction
from seamark.connector.read.scans import scan
from seamark.connector.read.tables import open_table
from seamark.connector.write import compaction, replacements
from seamark.connector.write.appends import append
from seamark.connector.write.compaction import CompactionPolicy, compact
from seamark.connector.write.upserts import MERGE_ON_READ, MODES, delete, upsert
from seamark.formats.iceberg.metadata.compaction import SMALL_FILE_MAX_FRACTION, SMALL_SORTED_FILE_MAX_FRACTION
from tests.connector.lake import open_catalog
from tests.connector.server_thread import ServerThread
from tests.connector.write.test_upserts import create_upsert_table as create_table
from tests.seeds import examples, list_seeds_by_version

SCHEMA = Schema(
    NestedField(1, "id", LongType(), required=False),
    NestedField(2, "part", LongType(), required=False),
    NestedField(3, "text", StringType(), required=False),
)
ARROW = pa.schema([("id", pa.int64()), ("part", pa.int64()), ("text", pa.string())])
BY_PART = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "part"))


def build_rows(ids: range | list[int], prefix: str = "") -> pa.Table:
    return pa.table(
        {"id": list(ids), "part": [number % 3 for number in ids], "text": [f"{prefix}{number}" for number in ids]},
        schema=ARROW,
    )


def count_scanned_rows(client: IndexClient, table_name: str = "db.t") -> Counter[tuple[Any, ...]]:
    """Count the rows that Seamark's reader returns. It applies all kinds of deletes."""
    return Counter(tuple(row.values()) for row in scan(client, table_name).to_arrow().to_pylist())


def count_pyiceberg_rows(catalog: RestCatalog, table_name: str = "db.t") -> Counter[tuple[Any, ...]]:
    """Count the rows that PyIceberg returns. It does not support equality deletes."""
    return Counter(tuple(row.values()) for row in catalog.load_table(table_name).scan().to_arrow().to_pylist())


def create_test_table(
    catalog: RestCatalog, version: int, spec: PartitionSpec = UNPARTITIONED_PARTITION_SPEC, **properties: str
) -> None:
    """Create `db.t`. An underscore in the name of a property represents a dot."""
    catalog.create_namespace_if_not_exists("db")
    options = {"format-version": str(version), **{name.replace("_", "."): value for name, value in properties.items()}}
    catalog.create_table("db.t", SCHEMA, partition_spec=spec, properties=options)


def create_three_batches(client: IndexClient, catalog: RestCatalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Create 6 small files in each of 3 partitions, and make compactions commit each partition separately."""
    create_test_table(catalog, 2, BY_PART)
    for number in range(6):
        upsert(client, "db.t", build_rows(range(number * 9, number * 9 + 9)), keys=["id"])
    monkeypatch.setattr(compaction, "BATCH_FILES", 6)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("spec", [PartitionSpec(), BY_PART], ids=["unpartitioned", "by part"])
def test_small_files_are_compacted_to_few_files_with_the_same_rows(
    client: IndexClient, server: ServerThread, version: int, spec: PartitionSpec
) -> None:
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, version, spec)
        for number in range(12):
            upsert(client, "db.t", build_rows(range(number * 10, number * 10 + 10)), keys=["id"])
        rows_before = count_scanned_rows(client)
        assert sum(rows_before.values()) == 120
        dry_report = compact(client, "db.t", dry_run=True)
        assert (dry_report.commits, dry_report.files_after) == (0, 1)
        assert dry_report.files_before == (36 if spec.fields else 12)
        assert count_scanned_rows(client) == rows_before
        report = compact(client, "db.t")
        partitions = 3 if spec.fields else 1
        assert (report.commits, report.conflicts, report.rows) == (1, 0, 120)
        assert (report.files_before, report.files_after) == (dry_report.files_before, partitions)
        assert client.files("db.t").num_rows == partitions
        assert count_scanned_rows(client) == rows_before
        if version == 2:
            assert count_pyiceberg_rows(catalog) == rows_before
        assert compact(client, "db.t").commits == 0


def test_compaction_applies_deletes_and_removes_their_files(client: IndexClient, server: ServerThread) -> None:
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, 2)
        table = catalog.load_table("db.t")
        table.append(build_rows(range(1000)))
        delete(client, "db.t", keys=pa.table({"id": list(range(500))}), mode=MERGE_ON_READ)
        expected = Counter(tuple(row.values()) for row in build_rows(range(500, 1000)).to_pylist())
        assert client.files("db.t", content="deletes").num_rows > 0
        report = compact(client, "db.t")
        assert (report.commits, report.deletes_applied) == (1, 1)
        assert client.files("db.t", content="deletes").num_rows == 0
        assert count_scanned_rows(client) == expected
        assert count_pyiceberg_rows(catalog) == expected


def test_compacted_rows_keep_their_ids_and_sequence_numbers(client: IndexClient, server: ServerThread) -> None:
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, 3)
        for number in range(6):
            upsert(client, "db.t", build_rows([number]), keys=["id"])
        upsert(client, "db.t", build_rows([2, 4], "new "), keys=["id"])
        columns = ["id", "text", "_row_id", "_last_updated_sequence_number"]

        def read_lineage() -> list[dict[str, Any]]:
            return sorted(scan(client, "db.t", columns).to_arrow().to_pylist(), key=lambda row: row["id"])

        lineage_before = read_lineage()
        assert compact(client, "db.t").commits == 1
        assert read_lineage() == lineage_before


def test_concurrent_change_of_a_file_discards_only_its_batch(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_catalog(server.url) as catalog:
        create_three_batches(client, catalog, monkeypatch)
        write = compaction.rewrite_rows
        calls: list[int] = []

        def write_and_change(*arguments: Any) -> Any:
            written_files = write(*arguments)
            calls.append(1)
            # The first batch is committed. The deletion of all ids removes the rows of the other two batches.
            if len(calls) == 2:
                delete(client, "db.t", keys=pa.table({"id": list(range(54))}))
                upsert(client, "db.t", build_rows([100, 101, 102]), keys=["id"])
            return written_files

        monkeypatch.setattr(compaction, "rewrite_rows", write_and_change)
        report = compact(client, "db.t")
        assert (len(calls), report.commits, report.conflicts) == (3, 1, 2)
        assert count_scanned_rows(client) == Counter(
            tuple(row.values()) for row in build_rows([100, 101, 102]).to_pylist()
        )


@pytest.mark.slow
@pytest.mark.parametrize(("appends", "files_max"), [(40, 15), pytest.param(120, 25, marks=pytest.mark.slow)])
def test_tiered_compaction_of_a_growing_table_rewrites_few_rows(
    client: IndexClient, server: ServerThread, appends: int, files_max: int
) -> None:
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, 2)
        rng = random.Random(3)
        rewritten_rows, batch_rows = 0, 50
        for number in range(appends):
            text = [rng.randbytes(200).hex() for _ in range(batch_rows)]
            ids = range(number * batch_rows, (number + 1) * batch_rows)
            batch = pa.table({"id": ids, "part": [0] * batch_rows, "text": text}, schema=ARROW)
            append(client, "db.t", batch)
            if number % 2:  # A compaction runs after every second append.
                rewritten_rows += compact(client, "db.t").rows
        assert sum(count_scanned_rows(client).values()) == batch_rows * appends
        assert client.files("db.t").num_rows < files_max
        # A merge takes at least five files, so a row is rewritten about log5(appends) times, which is at most 3. The
        # limit allows one more time.
        assert rewritten_rows < 4 * batch_rows * appends


def test_compaction_of_a_version_1_table_is_refused(client: IndexClient, server: ServerThread) -> None:
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, 1)
        with pytest.raises(InvalidRequest, match="version 1"):
            compact(client, "db.t")


@pytest.mark.parametrize(
    ("seed", "version"),
    [*list_seeds_by_version((0, 1), fast=1), *(pytest.param(2, version, marks=pytest.mark.slow) for version in (2, 3))],
)
def test_random_histories_with_compactions_keep_the_rows(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch, version: int, seed: int
) -> None:
    """The expected rows are in a dictionary.

    Writers also commit between the plan of a compaction and its commit.
    """
    rng = random.Random(f"{seed} {version}")
    model: dict[int, str] = {}
    write = compaction.rewrite_rows

    def change(number: int) -> None:
        ids = rng.sample(range(60), rng.randint(1, 12))
        if rng.random() < 0.6:
            upsert(client, "db.t", build_rows(ids, f"{number}:"), keys=["id"], mode=rng.choice([*MODES, None]))
            model.update((id_, f"{number}:{id_}") for id_ in ids)
        elif version == 2 and rng.random() < 0.4:
            catalog.load_table("db.t").delete(In("id", ids))  # type: ignore[call-arg]
            for id_ in ids:
                model.pop(id_, None)
        else:
            delete(client, "db.t", keys=pa.table({"id": ids}), mode=rng.choice([*MODES, None]))
            for id_ in ids:
                model.pop(id_, None)

    numbers = iter(range(10_000))

    def write_and_change(*arguments: Any) -> Any:
        written_files = write(*arguments)
        if rng.random() < 0.5:
            change(next(numbers))
        return written_files

    monkeypatch.setattr(compaction, "rewrite_rows", write_and_change)
    monkeypatch.setattr(compaction, "BATCH_FILES", rng.choice([3, 7, 2000]))
    commit_count = 0
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, version, rng.choice([PartitionSpec(), BY_PART]))
        for _ in range(examples(25, 8)):
            change(next(numbers))
            if rng.random() < 0.4:
                policy = CompactionPolicy(rng.choice([3000, 1 << 20]), rng.choice([2, 5]))
                report = compact(client, "db.t", policy=policy)
                commit_count += report.commits
                assert count_scanned_rows(client) == Counter((id_, id_ % 3, text) for id_, text in model.items())
    assert commit_count > 0


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("seed", "version"),
    [
        *list_seeds_by_version((0, 1), fast=1),
        *(pytest.param(seed, version, marks=pytest.mark.slow) for seed in (2, 3) for version in (2, 3)),
    ],
)
def test_rows_that_are_deleted_during_a_compaction_stay_deleted(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch, version: int, seed: int
) -> None:
    """Writers also commit before each repeated commit of the compaction.

    The expected rows are in a dictionary. Rows that no writer changes keep their row ids. With an odd seed, the table
    is not partitioned, and some upserts are equality upserts. With a seed above 1, the table is sorted.
    """
    rng = random.Random(f"{seed} {version}")
    model: dict[int, str] = {}
    touched_ids: set[int] = set()
    numbers = iter(range(10_000))
    new_ids = iter(range(1000, 100_000))

    def change() -> None:
        number, ids = next(numbers), rng.sample(sorted(model), rng.randint(1, 5))
        touched_ids.update(ids)
        mode = rng.choice([*MODES, None])
        if rng.random() < 0.5:
            ids.append(next(new_ids))
            strategy = "equality" if seed % 2 and rng.random() < 0.4 else None
            upsert(
                client,
                "db.t",
                build_rows(ids, f"{number}:"),
                keys=["id"],
                mode=None if strategy else mode,
                strategy=strategy,
            )
            model.update((id_, f"{number}:{id_}") for id_ in ids)
        else:
            delete(client, "db.t", keys=pa.table({"id": ids}), mode=mode)
            for id_ in ids:
                model.pop(id_)

    def read_lineage() -> dict[int, tuple[int, int]]:
        columns = ["id", "_row_id", "_last_updated_sequence_number"]
        actual_rows = scan(client, "db.t", columns).to_arrow()
        return {row["id"]: (row["_row_id"], row["_last_updated_sequence_number"]) for row in actual_rows.to_pylist()}

    write, original_open_table = compaction.rewrite_rows, open_table

    def write_while_others_change(*arguments: Any) -> Any:
        written_files = write(*arguments)
        change()
        return written_files

    def open_while_others_change(*arguments: Any, **options: Any) -> Any:
        reopened_table = original_open_table(*arguments, **options)
        if rng.random() < 0.4:
            change()
        return reopened_table

    monkeypatch.setattr(compaction, "rewrite_rows", write_while_others_change)
    monkeypatch.setattr(replacements, "open_table", open_while_others_change)
    monkeypatch.setattr(replacements, "_WAIT_S", 0.001)
    deleted_count = 0
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, version, PartitionSpec() if seed % 2 else BY_PART)
        if seed > 1:
            sort_by_text_descending(client)
        for _ in range(4):
            for _ in range(6):
                ids = [next(new_ids) for _ in range(rng.randint(20, 60))]
                rng.shuffle(ids)
                upsert(client, "db.t", build_rows(ids), keys=["id"])
                model.update((id_, str(id_)) for id_ in ids)
            change()
            touched_ids.clear()
            lineage_before = read_lineage() if version == 3 else {}
            report = compact(client, "db.t", policy=CompactionPolicy(rng.choice([3000, 1 << 20]), 2))
            deleted_count += report.rows_deleted
            assert count_scanned_rows(client) == Counter((id_, id_ % 3, text) for id_, text in model.items())
            if version == 3:
                lineage_after = read_lineage()
                assert {id_: lineage_after[id_] for id_ in model.keys() & lineage_before.keys() - touched_ids} == {
                    id_: lineage_before[id_] for id_ in model.keys() & lineage_before.keys() - touched_ids
                }
            if rng.random() < 0.5:
                evolve_spec(client)
    assert deleted_count > 0


def test_rows_that_a_rollback_restores_discard_the_batch(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rollback restores rows that the new files do not have."""
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, 2)
        for number in range(6):
            upsert(client, "db.t", build_rows(range(number * 50, number * 50 + 50)), keys=["id"])
        rows_before, snapshot = count_scanned_rows(client), catalog.load_table("db.t").metadata.current_snapshot_id
        delete(client, "db.t", keys=pa.table({"id": list(range(10, 20))}), mode=MERGE_ON_READ)
        write = compaction.rewrite_rows

        def write_and_roll_back(*arguments: Any) -> Any:
            written_files = write(*arguments)
            apply_updates(
                client, {"action": "set-snapshot-ref", "ref-name": "main", "type": "branch", "snapshot-id": snapshot}
            )
            return written_files

        paths_on_disk = set(server.home.rglob("*.parquet"))
        with monkeypatch.context() as context:
            context.setattr(compaction, "rewrite_rows", write_and_roll_back)
            report = compact(client, "db.t")
        assert (report.commits, report.conflicts) == (0, 1)
        assert count_scanned_rows(client) == rows_before
        assert set(server.home.rglob("*.parquet")) == paths_on_disk


def sort_by_text_descending(client: IndexClient) -> None:
    field = {"source-id": 3, "transform": "identity", "direction": "desc", "null-order": "nulls-first"}
    apply_updates(
        client,
        {"action": "add-sort-order", "sort-order": {"order-id": -1, "fields": [field]}},
        {"action": "set-default-sort-order", "sort-order-id": -1},
    )


def evolve_spec(client: IndexClient) -> None:
    field = {"source-id": 1, "field-id": 1001, "name": "id_bucket", "transform": "bucket[3]"}
    apply_updates(
        client,
        {"action": "add-spec", "spec": {"fields": [field]}},
        {"action": "set-default-spec", "spec-id": -1},
    )


def test_deletion_vectors_in_one_file_count_for_each_data_file(client: IndexClient, server: ServerThread) -> None:
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, 3)
        for number in range(10):
            upsert(client, "db.t", build_rows(range(number * 20, number * 20 + 20)), keys=["id"])
        delete(client, "db.t", keys=pa.table({"id": list(range(0, 200, 4))}), mode=MERGE_ON_READ)
        assert len(set(client.files("db.t", content="deletes")["file_path"].to_pylist())) == 1
        report = compact(client, "db.t", policy=CompactionPolicy(1, 2))
        assert (report.files_before, report.rows) == (10, 150)
        assert client.files("db.t", content="deletes").num_rows == 0


@pytest.mark.slow
def test_upgrade_during_a_compaction_is_a_conflict(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the rows would lose the row ids that the upgrade has assigned."""
    columns = ["id", "_row_id", "_last_updated_sequence_number"]
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, 2)
        for number in range(6):
            upsert(client, "db.t", build_rows([number]), keys=["id"])
        write = compaction.rewrite_rows

        def write_and_upgrade(*arguments: Any) -> Any:
            written_files = write(*arguments)
            apply_updates(client, {"action": "upgrade-format-version", "format-version": 3})
            upsert(client, "db.t", build_rows([100]), keys=["id"])
            return written_files

        with monkeypatch.context() as context:
            context.setattr(compaction, "rewrite_rows", write_and_upgrade)
            report = compact(client, "db.t")
        assert (report.commits, report.conflicts) == (0, 1)
        rows_before = sorted(map(str, scan(client, "db.t", columns).to_arrow().to_pylist()))
        assert compact(client, "db.t").commits == 1
        assert sorted(map(str, scan(client, "db.t", columns).to_arrow().to_pylist())) == rows_before


def apply_updates(client: IndexClient, *updates: dict[str, Any]) -> None:
    client._request_json("POST", "/v1/namespaces/db/tables/t", {}, {"requirements": [], "updates": list(updates)})


@pytest.mark.slow
def test_missing_file_stops_only_the_batch_that_contains_it(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_catalog(server.url) as catalog:
        create_three_batches(client, catalog, monkeypatch)
        Path(client.files("db.t")["file_path"].to_pylist()[0].removeprefix("file://")).unlink()
        report = compact(client, "db.t")
        assert (report.commits, len(report.errors)) == (2, 1)
        with pytest.raises(RuntimeError, match="1 parts of the table were not rewritten"):
            run_compaction(client, ("db", "t"))


@pytest.mark.slow
def test_compaction_that_would_not_reduce_files_is_discarded(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, the writer of a sorted table ends a file when its buffer is full, regardless of the target size."""
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, 2)
        for number in range(6):
            upsert(client, "db.t", build_rows([number]), keys=["id"])
        paths_before = set(client.files("db.t")["file_path"].to_pylist())
        paths_on_disk = set(server.home.rglob("*.parquet"))
        monkeypatch.setattr(compaction, "NEW_FILES_MAX_FRACTION", 0.1)  # One new file for 6 is too many.
        report = compact(client, "db.t")
        assert (report.commits, report.given_up) == (0, 1)
        assert set(client.files("db.t")["file_path"].to_pylist()) == paths_before
        assert set(server.home.rglob("*.parquet")) == paths_on_disk
        # In a sorted table, a file counts as small only below a smaller size, so fewer compactions are discarded.
        assert (
            CompactionPolicy.from_metadata(open_table(client, "db.t", CURRENT).metadata, {}).small_file_fraction
            == SMALL_FILE_MAX_FRACTION
        )
        field = {"source-id": 1, "transform": "identity", "direction": "asc", "null-order": "nulls-first"}
        order = {"order-id": -1, "fields": [field]}
        apply_updates(
            client,
            {"action": "add-sort-order", "sort-order": order},
            {"action": "set-default-sort-order", "sort-order-id": -1},
        )
        assert (
            CompactionPolicy.from_metadata(open_table(client, "db.t", CURRENT).metadata, {}).small_file_fraction
            == SMALL_SORTED_FILE_MAX_FRACTION
        )


def test_file_that_was_added_twice_stays_and_other_files_are_merged(client: IndexClient, server: ServerThread) -> None:
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, 2)
        for number in range(6):
            upsert(client, "db.t", build_rows([number]), keys=["id"])
        table = catalog.load_table("db.t")
        file = next(iter(table.scan().plan_files())).file
        with table.transaction() as transaction, transaction.update_snapshot().fast_append() as files:
            files.append_data_file(file)
        rows_before = count_scanned_rows(client)
        assert sorted(rows_before.values()) == [1] * 5 + [2]
        report = compact(client, "db.t", policy=CompactionPolicy(1 << 20, 2))
        assert (report.files_before, report.files_after, report.files_skipped, report.errors) == (5, 1, 2, [])
        assert count_scanned_rows(client) == rows_before


@pytest.mark.slow
def test_target_size_above_two_gibibytes_is_accepted_by_every_writer(client: IndexClient, server: ServerThread) -> None:
    with open_catalog(server.url) as catalog:
        create_test_table(catalog, 2, **{"write_target-file-size-bytes": str(3 << 30)})
        for number in range(6):
            upsert(client, "db.t", build_rows([number]), keys=["id"])
        assert compact(client, "db.t").files_after == 1


@pytest.mark.slow
def test_files_with_uuids_in_nested_columns_are_merged(client: IndexClient) -> None:
    uuid_types: dict[str, Any] = {
        "one": {"type": "struct", "fields": [{"id": 5, "name": "u", "required": False, "type": "uuid"}]},
        "many": {"type": "list", "element-id": 6, "element-required": False, "element": "uuid"},
        "named": {
            **{"type": "map", "key-id": 7, "key": "string"},
            **{"value-id": 8, "value-required": False, "value": "uuid"},
        },
    }
    fields = [
        {"id": 1 + n, "name": name, "required": False, "type": kind}
        for n, (name, kind) in enumerate(uuid_types.items())
    ]
    create_table(client, fields=fields)
    arrow_types = [pa.struct([("u", pa.binary(16))]), pa.list_(pa.binary(16)), pa.map_(pa.string(), pa.binary(16))]
    written_rows = []
    for number in range(2):
        key = bytes([number] * 16)
        rows = [{"one": {"u": key}, "many": [key, None], "named": [("a", key)]}, dict.fromkeys(uuid_types)]
        append(client, "db.t", pa.Table.from_pylist(rows, pa.schema(list(zip(uuid_types, arrow_types, strict=True)))))
        written_rows += rows
    report = compact(client, "db.t", policy=CompactionPolicy(1 << 20, 2))
    assert (report.files_before, report.files_after) == (2, 1)
    values = scan(client, "db.t").to_arrow().to_pylist()
    assert sorted(map(repr, values)) == sorted(map(repr, written_rows))
