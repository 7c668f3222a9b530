"""Tests of incremental clustering: the rows equal those of a model, and queries open fewer files."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import DoubleType, LongType, NestedField, StringType

from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.values import CURRENT
from seamark.connector.jobs import clustering
from seamark.connector.jobs.clustering import cluster_incrementally
from seamark.connector.jobs.jobs import run_clustering
from seamark.connector.read.scans import scan
from seamark.connector.read.tables import open_table, plan
from seamark.connector.write.appends import append
from seamark.connector.write.upserts import MERGE_ON_READ, MODES, delete, upsert
from seamark.formats.iceberg.metadata.clustering import CURVES, ClusteringLayout, parse_layer
from seamark.formats.runtime.errors import SeamarkError
from tests.connector.lake import open_catalog
from tests.connector.server_thread import ServerThread
from tests.seeds import first_seed, list_seeds_by_version

SCHEMA = Schema(
    NestedField(1, "id", LongType(), required=False),
    NestedField(2, "part", LongType(), required=False),
    NestedField(3, "name", StringType(), required=False),
    NestedField(4, "price", DoubleType(), required=False),
)
ARROW = pa.schema([("id", pa.int64()), ("part", pa.int64()), ("name", pa.string()), ("price", pa.float64())])
BY_PART = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "part"))
COLUMNS = {"seamark.clustering.columns": "name, price"}


def build_rows(ids: range | list[int], seed_text: str = "", name_count: int = 100) -> pa.Table:
    rng = random.Random(f"{seed_text} {list(ids)[:3]}")
    texts = [None, *(f"a long common prefix {number:03d}" for number in range(name_count))]
    return pa.table(
        {
            "id": list(ids),
            "part": [number % 3 for number in ids],
            "name": [rng.choice(texts) for _ in ids],
            "price": [rng.choice([None, float("nan"), -0.0, 0.0, rng.random() * 1000]) for _ in ids],
        },
        schema=ARROW,
    )


def build_random_rows(count: int, seed: int) -> pa.Table:
    rng = np.random.default_rng(seed)
    return pa.table(
        {
            "id": np.arange(count),
            "part": np.zeros(count, dtype=np.int64),
            "name": [f"n{number:05d}" for number in rng.integers(0, 10_000, count)],
            "price": rng.random(count),
        },
        schema=ARROW,
    )


def to_comparable_row(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(repr(value) for value in row.values())


def count_scanned_rows(client: IndexClient, columns: list[str] | None = None) -> Counter[tuple[Any, ...]]:
    return Counter(map(to_comparable_row, scan(client, "db.t", columns).to_arrow().to_pylist()))


def create_table(
    catalog: RestCatalog, version: int, spec: PartitionSpec = UNPARTITIONED_PARTITION_SPEC, **properties: str
) -> None:
    catalog.create_namespace_if_not_exists("db")
    catalog.create_table(
        "db.t", SCHEMA, partition_spec=spec, properties={"format-version": str(version), **COLUMNS, **properties}
    )


def count_files_by_layer(client: IndexClient) -> Counter[str]:
    """Return the number of files by layer, or "" for files that no clustering has written.

    A layer is the group of files that one clustering run has written. Its name is in the names of the files.
    """
    return Counter((parse_layer(path) or ("", ""))[1] for path in client.files("db.t")["file_path"].to_pylist())


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("changes_max", "name_count"),
    [pytest.param(25, 8, id="short"), pytest.param(10_000, 100, id="long", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    ("seed", "version"),
    [
        *list_seeds_by_version([first_seed()]),
        *(
            pytest.param(first_seed() + number, version, marks=pytest.mark.slow)
            for number in (1, 2)
            for version in (2, 3)
        ),
    ],
)
def test_random_histories_with_clusterings_keep_the_rows(
    client: IndexClient,
    server: ServerThread,
    monkeypatch: pytest.MonkeyPatch,
    version: int,
    seed: int,
    changes_max: int,
    name_count: int,
) -> None:
    """The expected rows are in a dictionary.

    Writers also commit between the plan of a clustering and its commit, at most `changes_max` times. Later, the table
    is partitioned by names, of which there are `name_count`.
    """
    rng = random.Random(f"{seed} {version}")
    model: dict[int, dict[str, Any]] = {}
    rewrite = clustering._rewrite

    def change(number: int) -> None:
        ids = rng.sample(range(300), rng.randint(1, 60))
        if rng.random() < 0.7:
            input_rows = build_rows(ids, str(number), name_count)
            upsert(client, "db.t", input_rows, keys=["id"], mode=rng.choice([*MODES, None]))
            model.update({row["id"]: row for row in input_rows.to_pylist()})
        else:
            delete(client, "db.t", keys=pa.table({"id": ids[:9]}), mode=rng.choice([*MODES, None]))
            for id_ in ids[:9]:
                model.pop(id_, None)

    numbers = iter(range(10_000))

    remaining_changes = iter(range(changes_max))

    def rewrite_and_change(*arguments: Any) -> Any:
        new_table = rewrite(*arguments)
        if rng.random() < 0.5 and next(remaining_changes, None) is not None:
            change(next(numbers))
        return new_table

    monkeypatch.setattr(clustering, "_rewrite", rewrite_and_change)
    monkeypatch.setattr(clustering, "RANGE_BYTES", rng.choice([1000, 32 << 20]))
    monkeypatch.setattr(clustering, "LAYER_FILES", rng.choice([4, 2000]))
    monkeypatch.setattr(clustering, "BATCH_FILES", rng.choice([4, 2000]))
    commit_count = 0
    with open_catalog(server.url) as catalog:
        create_table(
            catalog, version, rng.choice([PartitionSpec(), BY_PART]), **{"write.target-file-size-bytes": "3000"}
        )
        for step in range(20):
            change(next(numbers))
            if step == 9:
                with catalog.load_table("db.t").update_spec() as spec:
                    spec.add_identity("name")
            if step == 13:
                with catalog.load_table("db.t").transaction() as transaction:
                    transaction.set_properties({"seamark.clustering.columns": "price", **CURVE_PROPERTIES[seed % 3]})
            if rng.random() < 0.5:
                report = cluster_incrementally(client, "db.t", full=rng.random() < 0.2)
                assert not report.errors
                commit_count += report.commits
                assert count_scanned_rows(client) == Counter(map(to_comparable_row, model.values()))
    assert commit_count > 1


CURVE_PROPERTIES = [{"seamark.clustering.curve": curve} for curve in CURVES]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("curve", "range_count"),
    [
        pytest.param("hilbert", 1, marks=pytest.mark.slow),
        ("hilbert", 7),
        ("zorder", 7),
        ("linear", 1),
        pytest.param("zorder", 1, marks=pytest.mark.slow),
        pytest.param("linear", 7, marks=pytest.mark.slow),
    ],
)
def test_query_on_a_clustered_table_opens_few_files(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch, curve: str, range_count: int
) -> None:
    with open_catalog(server.url) as catalog:
        create_table(catalog, 2, **{"seamark.clustering.curve": curve, "write.target-file-size-bytes": str(10_000)})
        table = catalog.load_table("db.t")
        input_rows = build_random_rows(20_000, 1)
        for number in range(8):
            table.append(input_rows.slice(2500 * number, 2500))
        sizes = client.files("db.t")["file_size_in_bytes"].to_pylist()
        # The job clusters one range after another, and this size makes `range_count` ranges.
        monkeypatch.setattr(clustering, "RANGE_BYTES", sum(sizes) // range_count + 1)
        rows_before = count_scanned_rows(client)
        report = cluster_incrementally(client, "db.t")
        assert (report.commits, report.files_before, report.rows) == (1, len(sizes), 20_000)
        assert count_scanned_rows(client) == rows_before
        files = report.files_after
        assert files >= 16, "with fewer files, the limits below would hold without clustering"
        assert sum(count_files_by_layer(client).values()) == files
        files_by_name = client.explain("db.t", "name = 'n05000'").files
        files_by_price = client.explain("db.t", "price BETWEEN 0.5 AND 0.501").files
    if curve == "linear":
        # The files are sorted by name, and the rows of one name can begin and end within a file.
        assert files_by_name <= 2
    else:
        # On a curve over two columns, the rows with one value of a column are in about the square root of the files.
        # The factor 2.5 allows for ranges of files that are not squares.
        assert files_by_name <= 2.5 * files**0.5
        assert files_by_price <= 2.5 * files**0.5


@pytest.mark.slow
def test_facts_are_clustered_by_attributes_of_a_joined_table_as_both_change(
    client: IndexClient, server: ServerThread
) -> None:
    """Each fact has the key of a customer. Queries select the facts of a city, whose customers have scattered keys."""
    joins = json.dumps({"customer": {"table": "db.customers", "on": {"part": "id"}}})
    schema = Schema(
        NestedField(1, "id", LongType(), required=False), NestedField(2, "city", StringType(), required=False)
    )
    properties = {"seamark.clustering.columns": "customer.city", "seamark.clustering.joins": joins}
    cities = [f"city {number * 7 % 20:02d}" for number in range(200)]

    def count_files_with(customer_ids: set[int]) -> int:
        tasks = plan(client, open_table(client, "db.t", CURRENT))
        return sum(
            bool(customer_ids.intersection(pq.read_table(task.path.removeprefix("file://"))["part"].to_pylist()))
            for task in tasks
        )

    with open_catalog(server.url) as catalog:
        create_table(catalog, 2, **properties, **{"write.target-file-size-bytes": "5000"})
        customers = catalog.create_table("db.customers", schema)
        customers.append(pa.table({"id": list(range(200)), "city": cities}))
        table = catalog.load_table("db.t")
        for number in range(8):
            input_rows = build_random_rows(1200, number)
            # Each file has facts of all customers, because 37 has no common factor with the number of customers.
            table.append(input_rows.set_column(1, "part", pa.array((input_rows["id"].to_numpy() * 37) % 200)))
        rows_before = count_scanned_rows(client)
        report = cluster_incrementally(client, "db.t")
        assert count_scanned_rows(client) == rows_before
        customers_of_city = {number for number, city in enumerate(cities) if city == "city 07"}
        # There are 20 cities, and the rows of a city can begin and end within a file.
        assert count_files_with(customers_of_city) <= report.files_after / 20 + 2
        # The next layer places the rows of the customers of a new city together.
        customers.append(pa.table({"id": list(range(200, 220)), "city": ["a new city"] * 20}))
        for number in range(8):
            input_rows = build_random_rows(1200, 100 + number)
            table.append(input_rows.set_column(1, "part", pa.array((input_rows["id"].to_numpy() * 37) % 220)))
        rows_before = count_scanned_rows(client)
        report = cluster_incrementally(client, "db.t")
        assert count_scanned_rows(client) == rows_before
        assert count_files_with(set(range(200, 220))) <= report.files_after / 20 + 2


@pytest.mark.slow
@pytest.mark.parametrize(("rounds", "rewrites_max"), [(16, 4.5), (40, 7)])
def test_clustering_rewrites_only_new_files_and_smaller_layers(
    client: IndexClient, server: ServerThread, rounds: int, rewrites_max: float
) -> None:
    """A run clusters the new files together with the layers (groups of files of earlier runs) that are not larger.

    So layers grow, and each row is rewritten a number of times that grows with the logarithm of the rounds.
    `rewrites_max` is an upper limit of that number for these rounds.
    """
    with open_catalog(server.url) as catalog:
        create_table(catalog, 2, **{"write.target-file-size-bytes": "20000"})
        written_bytes, layer_count_max = 0, 0
        for number in range(rounds):
            for append_number in range(5):
                append(
                    client,
                    "db.t",
                    build_rows(range(200 * (5 * number + append_number), 200 * (5 * number + append_number + 1))),
                )
            report = cluster_incrementally(client, "db.t")
            assert cluster_incrementally(client, "db.t").commits == 0
            assert report.commits == 1
            assert "" not in count_files_by_layer(client)
            written_bytes += report.bytes_after
            layer_count_max = max(layer_count_max, len(count_files_by_layer(client)))
        # Without merges of layers, there would be a layer for each round.
        assert layer_count_max <= 6
        size_bytes = sum(client.files("db.t")["file_size_in_bytes"].to_pylist())
        # If each run rewrote all files, each row would be rewritten rounds / 2 times.
        assert written_bytes < rewrites_max * size_bytes


@pytest.mark.slow
def test_files_clustered_by_previous_columns_stay_until_a_full_run(client: IndexClient, server: ServerThread) -> None:
    """The names of files contain the clustering columns and the layer, which is the run that has written the file."""
    with open_catalog(server.url) as catalog:
        create_table(catalog, 3)
        for number in range(5):
            append(client, "db.t", build_rows(range(100 * number, 100 * number + 100)))
        assert run_clustering(client, ("db", "t"))["files_after"] == 1
        (layer,) = count_files_by_layer(client)
        with catalog.load_table("db.t").transaction() as transaction:
            transaction.set_properties({"seamark.clustering.columns": '["id"]', "seamark.clustering.curve": "linear"})
        assert run_clustering(client, ("db", "t")) == {}
        assert list(count_files_by_layer(client)) == [layer]
        rows_before = count_scanned_rows(client, ["id", "_row_id"])
        assert cluster_incrementally(client, "db.t", full=True).commits == 1
        (path,) = client.files("db.t")["file_path"].to_pylist()
        assert parse_layer(path) == (
            ClusteringLayout(("id",), "linear").digest,
            path[-20:-8],
        )  # The 12 characters before ".parquet".
        assert count_scanned_rows(client, ["id", "_row_id"]) == rows_before
        assert scan(client, "db.t", ["id"]).to_arrow()["id"].to_pylist() == list(range(500))
        assert cluster_incrementally(client, "db.t", full=True).commits == 0


def test_clustering_rewrites_files_with_many_deletes(client: IndexClient, server: ServerThread) -> None:
    with open_catalog(server.url) as catalog:
        create_table(catalog, 2, **{"seamark.compaction.min-files": "2"})
        table = catalog.load_table("db.t")
        for number in range(2):
            table.append(build_rows(range(100 * number, 100 * number + 100)))
        assert cluster_incrementally(client, "db.t").commits == 1
        delete(client, "db.t", keys=pa.table({"id": list(range(50))}), mode=MERGE_ON_READ)
        table.refresh().append(build_rows(range(500, 600)))
        report = cluster_incrementally(client, "db.t", dry_run=True)
        assert (report.files_before, report.deletes_applied, report.commits) == (2, 1, 0)
        report = cluster_incrementally(client, "db.t")
        assert (report.files_before, report.deletes_applied, report.rows) == (2, 1, 250)
        assert client.files("db.t", content="deletes").num_rows == 0


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"write.metadata.metrics.column.name": "truncate(16)"}])
def test_bounds_of_clustered_strings_are_longer_than_their_common_prefix(
    client: IndexClient, server: ServerThread, settings: dict[str, str]
) -> None:
    prefix = "https://shop.example.com/catalogue/"
    with open_catalog(server.url) as catalog:
        create_table(
            catalog, 2, **{"seamark.clustering.columns": "name", "write.target-file-size-bytes": "20000", **settings}
        )
        table = catalog.load_table("db.t")
        names = [f"{prefix}{number:06d}" for number in range(5000)]
        for start in range(5):
            part = names[start::5]
            nulls = pa.nulls(len(part))
            table.append(pa.table([nulls, nulls, part, nulls], ["id", "part", "name", "price"]).cast(ARROW))
    assert cluster_incrementally(client, "db.t").files_after >= 3
    files = client.explain("db.t", f"name = '{prefix}002345'").files
    assert files == (client.files("db.t").num_rows if settings else 1)


@pytest.mark.slow
def test_files_with_deletes_are_clustered_again(client: IndexClient, server: ServerThread) -> None:
    with open_catalog(server.url) as catalog:
        create_table(catalog, 2)
        catalog.load_table("db.t").append(build_rows(range(100)))
    assert cluster_incrementally(client, "db.t").commits == 0
    delete(client, "db.t", keys=pa.table({"id": list(range(40))}), mode=MERGE_ON_READ)
    assert cluster_incrementally(client, "db.t").rows == 60
    delete(client, "db.t", keys=pa.table({"id": list(range(99))}), mode=MERGE_ON_READ)
    assert cluster_incrementally(client, "db.t").rows == 1
    assert client.files("db.t", content="deletes").num_rows == 0
    assert cluster_incrementally(client, "db.t").commits == 0


@pytest.mark.slow
def test_clustering_with_too_large_temporary_files_is_refused(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clustering, "RANGE_ROWS", 100)
    monkeypatch.setattr(clustering, "SPILL_BYTES", 1000)
    with open_catalog(server.url) as catalog:
        create_table(catalog, 2)
        for number in range(5):
            catalog.load_table("db.t").append(build_rows(range(number * 100, number * 100 + 100)))
    paths_before = client.files("db.t")["file_path"].to_pylist()
    report = cluster_incrementally(client, "db.t")
    assert (report.commits, len(report.errors)) == (0, 1)
    assert "use the Spark job" in report.errors[0]
    assert client.files("db.t")["file_path"].to_pylist() == paths_before
    with pytest.raises(RuntimeError, match="not rewritten"):
        run_clustering(client, ("db", "t"))


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("properties", "message"),
    [
        ({"seamark.clustering.columns": ""}, "no clustering columns"),
        ({"seamark.clustering.columns": "a,b,c,d,e,f,g"}, "must name 1 to 6"),
        ({"seamark.clustering.columns": "id,id"}, "must name 1 to 6"),
        ({"seamark.clustering.columns": "[1]"}, "must name 1 to 6"),
        ({"seamark.clustering.columns": "there"}, "no column 'there'"),
        ({"seamark.clustering.curve": "peano"}, "must be one of hilbert, zorder, linear"),
    ],
)
def test_invalid_clustering_policy_is_refused(
    client: IndexClient, server: ServerThread, properties: dict[str, str], message: str
) -> None:
    with open_catalog(server.url) as catalog:
        create_table(catalog, 2, **properties)
        with pytest.raises((InvalidRequest, SeamarkError), match=message):
            cluster_incrementally(client, "db.t")
