"""The tables of the benchmark. Each namespace has all five tables, with its own layout and indexes of the facts.

They are created once for a scale and a number of files, below `.cache/bench/trino`. Each run starts a server on a copy
of the server's folder as it was after the creation, so that it finds no plan of an earlier run. Spark writes the facts
once, in an order that no query filters on. Seamark's job (`connector/spark/frames/clustering.py`) clusters them into
each layout. The other tables, and layouts that differ only in their indexes, are clones: their metadata names the same
files.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pyspark.sql import SparkSession

from bench.ssb.generate import TABLES, generate_ssb
from bench.ssb.spark import FACT, write_table
from seamark.connector.client.indexes import IndexClient
from seamark.connector.index.builds import build
from seamark.connector.spark.frames.clustering import cluster
from seamark.connector.spark.index_job import SparkWorkers
from seamark.connector.spark.session import connect
from seamark.connector.write.clustering import JoinedTable
from tests.services.process import CACHE
from tests.services.seamark import Seamark
from tests.services.spark import spark_session

FORMAT = 1
"""The version of the tables. It must increase when the tables change, so that stored lakes are replaced."""
LAKES = CACHE / "bench" / "trino"
BASE = "base"
BASE_FILES = 16
KEYS = ("lo_custkey", "lo_suppkey", "lo_partkey", "lo_orderdate")
INDEXED_COLUMNS = (*KEYS, "lo_discount", "lo_quantity")
JOINS = {
    "customer": JoinedTable((BASE, "customer"), {"lo_custkey": "c_custkey"}),
    "supplier": JoinedTable((BASE, "supplier"), {"lo_suppkey": "s_suppkey"}),
    "part": JoinedTable((BASE, "part"), {"lo_partkey": "p_partkey"}),
}
SPARK_OPTIONS = {"spark.driver.memory": "2g", "spark.driver.extraJavaOptions": "", "spark.sql.shuffle.partitions": "4"}


@dataclass(frozen=True)
class FactLayout:
    """The layout of the facts in the namespace `name`.

    The facts have the same files as the layout `base_layout`, or are clustered by the columns `cluster_columns`.
    """

    name: str
    index: str | None
    cluster_columns: tuple[str, ...] = ()
    curve: str = "hilbert"
    base_layout: str | None = None

    @property
    def label(self) -> str:
        files = next(item for item in LAYOUTS if item.name == (self.base_layout or self.name))
        return f"{_LAYOUT_LABELS[files.name]}, {'min/max' if self.index is None else self.index}"


_LAYOUT_LABELS = {
    "written": "as written",
    "dated": "by date",
    "zorder": "z-order on date, discount, quantity",
    "hilbert": "Hilbert on date, cities, brand",
}
LAYOUTS = (
    FactLayout("written", "bitmap", ("lo_orderkey",)),
    FactLayout("dated", "bitmap", ("lo_orderdate",)),
    FactLayout("zorder", None, ("lo_orderdate", "lo_discount", "lo_quantity"), "zorder"),
    FactLayout("zorder_bloom", "bloom", base_layout="zorder"),
    FactLayout("zorder_bitmap", "bitmap", base_layout="zorder"),
    FactLayout("hilbert", "bitmap", ("lo_orderdate", "customer.c_city", "supplier.s_city", "part.p_brand1")),
)


@contextmanager
def open_lake(
    scratch: Path, scale: float, files: int, layouts: Sequence[FactLayout] = LAYOUTS
) -> Iterator[tuple[Seamark, Path]]:
    """Yield a server with these layouts, and the folder of the Parquet files from which the tables were made."""
    data = generate_ssb(CACHE / "ssb", scale)
    suffix = "" if len(layouts) == len(LAYOUTS) else "-" + "-".join(layout.name for layout in layouts)
    folder = LAKES.resolve() / f"sf{scale:g}-{files}{suffix}"
    marker = folder / "made.json"
    expected = {"format": FORMAT, "folder": str(folder)}
    if not marker.exists() or json.loads(marker.read_text()) != expected:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with _build_server(folder / "home", folder) as server:
            _create_lake(server, scratch, data, files, layouts)
        marker.write_text(json.dumps(expected))
    shutil.copytree(folder / "home", scratch / "home")
    try:
        with _build_server(scratch / "home", folder) as server:
            yield server, data
    finally:
        # The server stores plans in the warehouse, which all runs share. The next run must not find them.
        for plans in (folder / "warehouse").glob("*/*/_seamark/plans"):
            shutil.rmtree(plans, ignore_errors=True)


def _build_server(home: Path, folder: Path) -> Seamark:
    warehouse = (folder / "warehouse").as_uri()
    return Seamark(home, warehouse=warehouse, env={"SEAMARK_LOG_LEVEL": "warning"})


def _create_lake(server: Seamark, scratch: Path, data: Path, files: int, layouts: Sequence[FactLayout]) -> None:
    with (
        closing(IndexClient(server.base_url, timeout_s=600)) as client,
        spark_session(scratch / "spark", SPARK_OPTIONS) as spark,
    ):
        connect(spark, "sea", server.base_url)
        spark.sql(f"CREATE NAMESPACE sea.{BASE}")
        for table in TABLES:
            write_table(spark, data, table, f"sea.{BASE}.{table}", BASE_FILES)
        for layout in layouts:
            body = json.dumps({"namespace": [layout.name]}).encode()
            client._request("POST", "/v1/namespaces", {}, body)
            for table in TABLES:
                _clone_table(
                    client, (layout.base_layout or BASE if table == FACT else BASE, table), (layout.name, table)
                )
            _write_layout(client, spark, layout, files)


def _clone_table(client: IndexClient, source: tuple[str, str], target: tuple[str, str]) -> None:
    """Create a table with the same files as `source`.

    The copy has `gc.enabled` = false, so the server never deletes the shared files for it. The benchmark deletes no
    files of the source.
    """
    loaded_table = client.load_table(source, history=True)
    metadata = json.loads(loaded_table.metadata)
    folder = Path(urlsplit(metadata["location"]).path).parents[1] / "/".join(target)
    metadata |= {"table-uuid": str(uuid.uuid4()), "location": folder.as_uri(), "metadata-log": []}
    metadata["properties"] = {**metadata["properties"], "gc.enabled": "false"}
    path = folder / "metadata" / f"00000-{uuid.uuid4()}.metadata.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(metadata))
    body = json.dumps({"name": target[1], "metadata-location": path.as_uri()}).encode()
    client._request("POST", f"/v1/namespaces/{target[0]}/register", {}, body)


def _write_layout(client: IndexClient, spark: SparkSession, layout: FactLayout, files: int) -> None:
    """Write the tables of a layout.

    The tasks that write the files also build the indexes that exist then. Other indexes are built from the files
    afterwards.
    """
    fact = (layout.name, FACT)
    names = [f"of_{column}" for column in INDEXED_COLUMNS] if layout.index else []
    for name, column in zip(names, INDEXED_COLUMNS, strict=False):
        client.put_index(fact, name, kind=layout.index, columns=[column])
    if layout.cluster_columns:
        cluster(spark, fact, layout.cluster_columns, joins=JOINS, curve=layout.curve, files=files, client=client)
    for name in names:
        report = build(client, fact, name, SparkWorkers(spark))
        if report.files_not_indexed:
            raise RuntimeError(
                f"index {name} of layout {layout.name} does not cover {report.files_not_indexed} files: "
                f"{report.skipped[:3]}"
            )
