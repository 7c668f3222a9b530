"""Three star schemas on one server: TPC-H, the Star Schema Benchmark, and a retail schema (`retail.sql`).

Fact tables have many files in the order of their dates, as ingestion writes them. They have bitmap and Bloom indexes on
the columns that queries look up. Dimension tables have few files. DuckDB generates all data, and our writer writes
them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import duckdb
import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog

from bench.ssb.generate import TABLES, generate_ssb, get_table_path
from seamark.connector.client.indexes import IndexClient
from seamark.connector.write.appends import open_destination
from seamark.connector.write.table_writer import write_batches
from seamark.formats.iceberg.metadata.properties import TARGET_FILE_BYTES
from tests.services.process import CACHE
from tests.services.seamark import Seamark

NAMESPACES = ("tpch", "ssb", "retail")
FACT_FILES = 300
SALES, CUSTOMERS = 300_000, 20_000
SCALE_FACTOR = 0.05
_DIMENSION_FILES_MAX = 10
"""The maximum number of files of a table that is not a fact table."""
_DIMENSION_ROWS = 2_000
"""The number of rows in a file of a dimension."""


@dataclass(frozen=True)
class CorpusLayout:
    """The layout of a table.

    Attributes:
        order: The SQL sort order of the rows in the files.
        indexes: The kind of index by column.
    """

    order: str = ""
    indexes: Mapping[str, str] = field(default_factory=dict)
    is_fact: bool = False
    is_whole: bool = False
    """Whether the table is stored in one file."""


TPCH = {
    "region": CorpusLayout(),
    "nation": CorpusLayout(),
    "supplier": CorpusLayout("s_suppkey"),
    "customer": CorpusLayout("c_custkey"),
    "part": CorpusLayout("p_brand, p_partkey"),
    "partsupp": CorpusLayout("ps_partkey", {"ps_suppkey": "bitmap"}, is_fact=True),
    "orders": CorpusLayout("o_orderdate, o_orderkey", {"o_custkey": "bitmap", "o_orderkey": "bloom"}, is_fact=True),
    "lineitem": CorpusLayout(
        "l_shipdate, l_orderkey",
        # The orders of a quarter have a thousand keys. A Bloom filter with 1 % false positives would keep every
        # file.
        {"l_partkey": "bitmap", "l_suppkey": "bitmap", "l_orderkey": "bitmap"},
        is_fact=True,
    ),
}
SSB = {
    "lineorder": CorpusLayout(
        "lo_orderdate // 100, lo_suppkey % 25, lo_orderkey",
        {"lo_custkey": "bitmap", "lo_suppkey": "bitmap", "lo_partkey": "bitmap", "lo_orderdate": "bitmap"},
        is_fact=True,
    )
}
RETAIL = {
    **dict.fromkeys(("days", "stores", "items", "customers", "promotions"), CorpusLayout()),
    "sales": CorpusLayout(
        "",
        {
            **dict.fromkeys(("customer_key", "item_key", "store_key", "promotion_key"), "bitmap"),
            **dict.fromkeys(("ticket", "note"), "bloom"),
        },
        is_fact=True,
    ),
    "returns": CorpusLayout("", {"ticket": "bloom", "item_key": "bitmap", "customer_key": "bitmap"}, is_fact=True),
}


def create_star_schemas(server: Seamark, scratch: Path, *, share: float = 1.0) -> None:
    """Create and fill all tables of the three schemas.

    Args:
        share: The fraction of the rows and files to write; less than 1 for a short run.
    """
    scale, files = max(0.01, SCALE_FACTOR * share), max(8, round(FACT_FILES * share))
    star, tpch = generate_ssb(CACHE / "ssb", scale), scratch / "tpch"
    argv = [str(Path(sys.executable).parent / "tpchgen-cli"), "parquet", "-s", f"{scale:g}", "-o", str(tpch), "--quiet"]
    subprocess.run(argv, check=True)
    with duckdb.connect() as db, closing(IndexClient(server.base_url, timeout_s=600)) as client:
        catalog = load_catalog("sea", type="rest", uri=server.base_url)
        for namespace in NAMESPACES:
            catalog.create_namespace(namespace)
        for name, layout in TPCH.items():
            write_corpus_table(client, catalog, db, ("tpch", name), f"FROM '{tpch / name}.parquet'", layout, files)
        for name in TABLES:
            write_corpus_table(
                client,
                catalog,
                db,
                ("ssb", name),
                f"FROM '{get_table_path(star, name)}'",
                SSB.get(name, CorpusLayout()),
                files,
            )
        db.execute(f"SET VARIABLE sales = {round(SALES * share)}")
        db.execute(f"SET VARIABLE customers = {CUSTOMERS}")
        db.execute((Path(__file__).parent / "retail.sql").read_text())
        for name, layout in RETAIL.items():
            write_corpus_table(client, catalog, db, ("retail", name), f"FROM {name}", layout, files)
    shutil.rmtree(tpch)


def list_data_files(server: Seamark) -> dict[tuple[str, str], list[str]]:
    """Return the paths of the data files of all tables, by namespace and table name."""
    catalog = load_catalog("sea", type="rest", uri=server.base_url)
    names = [(namespace, name) for namespace in NAMESPACES for _, name in catalog.list_tables(namespace)]
    urls = {name: [task.file.file_path for task in catalog.load_table(name).scan().plan_files()] for name in names}
    return {name: sorted(url.removeprefix("file://") for url in table_urls) for name, table_urls in urls.items()}


def write_corpus_table(
    client: IndexClient,
    catalog: Catalog,
    db: duckdb.DuckDBPyConnection,
    name: tuple[str, str],
    query: str,
    layout: CorpusLayout,
    files: int,
) -> None:
    """Create a table with its indexes, and append the rows of `query` in batches of about equal size.

    A fact table gets `files` batches. A dimension table gets a batch for each `_DIMENSION_ROWS` rows, at most
    `_DIMENSION_FILES_MAX`. With `layout.is_whole`, there is one batch.
    """
    order = f" ORDER BY {layout.order}" if layout.order else ""
    rows: pa.Table = db.sql(query + order).to_arrow_table()
    # A batch is larger than the target size of a file, so it becomes one or a few files.
    properties = {} if layout.is_whole else {TARGET_FILE_BYTES: "500"}
    catalog.create_table(name, schema=rows.schema, properties=properties)
    for column, kind in layout.indexes.items():
        client.put_index(name, f"of_{column}", kind=kind, columns=[column])
    count = files if layout.is_fact else min(_DIMENSION_FILES_MAX, 1 + rows.num_rows // _DIMENSION_ROWS)
    count = 1 if layout.is_whole else count
    destination = open_destination(client, name)
    batches = rows.combine_chunks().to_batches(max_chunksize=max(1, -(-rows.num_rows // count)))
    destination.commit(client, write_batches(destination.target, batches))
