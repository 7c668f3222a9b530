"""The 99 queries and the tables of TPC-DS, from DuckDB's own extension.

The queries and the generator belong to TPC, so this repository does not contain them. pip downloads the
extension when the benchmark first runs. Fact tables are stored in the order of their dates, with indexes on
their keys, like those of the other star schemas.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
import zipfile
from contextlib import closing

import duckdb
from pyiceberg.catalog import load_catalog

from bench.corpus.lakes import FACT_FILES, CorpusLayout, write_corpus_table
from seamark.connector.analysis.scans import find_scans
from seamark.connector.client.indexes import IndexClient
from seamark.connector.duckdb.statements import DuckDBStatement, mark_name
from tests.services.process import CACHE
from tests.services.seamark import Seamark

NAMESPACE = "tpcds"
SCALE_FACTOR = 0.1
_SCALE_MIN = 0.01
"""The smallest scale. With 0.005 the generator of DuckDB 1.5.5 does not end."""
_ROUNDS = 5
_LIMIT = re.compile(r"\s+LIMIT\s+\d+\s*;?\s*$", re.IGNORECASE)
_KINDS = {"INTEGER": "int", "BIGINT": "long", "VARCHAR": "string", "DATE": "date"}
_BLOOM = ("ticket_number", "order_number")
FACTS = {
    "store_sales": ("ss_sold_date_sk", "ss"),
    "store_returns": ("sr_returned_date_sk", "sr"),
    "catalog_sales": ("cs_sold_date_sk", "cs"),
    "catalog_returns": ("cr_returned_date_sk", "cr"),
    "web_sales": ("ws_sold_date_sk", "ws"),
    "web_returns": ("wr_returned_date_sk", "wr"),
    "inventory": ("inv_date_sk", "inv"),
}
"""The fact tables: the order of their rows, and the prefix of their columns."""
_KEYS = (
    *("item_sk", "customer_sk", "bill_customer_sk", "ship_customer_sk", "refunded_customer_sk"),
    *("returning_customer_sk", "store_sk", "warehouse_sk", "hdemo_sk", "addr_sk", "promo_sk", "reason_sk"),
    *("call_center_sk", "web_site_sk"),
)


def open_tpcds_connection() -> duckdb.DuckDBPyConnection | None:
    """Open a connection with DuckDB's TPC-DS extension, and download the extension with pip if it is not in the cache.

    Return None if pip cannot download it.
    """
    folder = CACHE / "tpcds" / duckdb.__version__
    extension_path = next(folder.rglob("tpcds.duckdb_extension"), None)
    if extension_path is None:
        requirement = f"duckdb-extension-tpcds=={duckdb.__version__}"
        argv = [sys.executable, "-m", "pip", "download", requirement, "--no-deps", "--only-binary", ":all:", "-q", "-d"]
        if subprocess.run([*argv, str(folder)], capture_output=True).returncode:
            return None
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            wheel.extractall(folder)
        extension_path = next(folder.rglob("tpcds.duckdb_extension"))
    con = duckdb.connect()
    con.load_extension(str(extension_path))
    return con


def read_texts(con: duckdb.DuckDBPyConnection) -> dict[int, str]:
    """Return the text of each query by its number, without the LIMIT of the result.

    With a LIMIT the result would vary, because the order of rows with equal sort keys is not defined.
    """
    rows = con.execute("SELECT query_nr, query FROM tpcds_queries() ORDER BY ALL").fetchall()
    return {number: _LIMIT.sub("", text.strip().removesuffix(";")) for number, text in rows}


def create_tpcds_tables(con: duckdb.DuckDBPyConnection, server: Seamark, *, share: float) -> None:
    """Generate the tables of TPC-DS, and write them to the server.

    Args:
        share: The fraction of the full number of rows and files to write, 1 for all.
    """
    con.execute(f"CALL dsdgen(sf={max(_SCALE_MIN, SCALE_FACTOR * share):g})")
    catalog = load_catalog("sea", type="rest", uri=server.base_url)
    catalog.create_namespace(NAMESPACE)
    with closing(IndexClient(server.base_url, timeout_s=600)) as client:
        for table, columns in _read_columns(con).items():
            # With fewer rows, the fact tables also have fewer files. A dimension has only one file, so that the
            # dimensions are also then a small part of all files.
            layout = CorpusLayout(is_whole=True)
            if table in FACTS:
                order, prefix = FACTS[table]
                indexes = {f"{prefix}_{key}": "bitmap" for key in _KEYS}
                indexes |= {f"{prefix}_{key}": "bloom" for key in _BLOOM}
                indexes = {name: kind for name, kind in indexes.items() if name in columns}
                layout = CorpusLayout(order, indexes, is_fact=True)
            write_corpus_table(
                client, catalog, con, (NAMESPACE, table), f"FROM {table}", layout, max(8, round(FACT_FILES * share))
            )


def measure_analysis_ms(con: duckdb.DuckDBPyConnection, text: str) -> float:
    """Return the CPU time in ms of the analysis of a query, the shortest of several runs."""
    table_columns, best_s = _read_columns(con), float("inf")
    for _ in range(_ROUNDS):
        begin_s = time.thread_time()
        statement = DuckDBStatement(text)
        columns_by_table = {
            number: table_columns[reference.parts[-1].lower()]
            for number, reference in enumerate(statement.references)
            if reference is not None and reference.parts[-1].lower() in table_columns
        }
        # The statement's tables are replaced by generated names (marks), as the DuckDB client does before the analysis.
        marks = {mark_name(number): number for number in columns_by_table}
        marked_text = statement.to_marked_text(columns_by_table, utc=True)
        find_scans(
            marked_text,
            find_columns=lambda names, number_by_mark=marks, columns=columns_by_table: columns.get(
                number_by_mark.get(names[2], -1)
            ),
        )
        best_s = min(best_s, time.thread_time() - begin_s)
    return 1000 * best_s


def _read_columns(con: duckdb.DuckDBPyConnection) -> dict[str, dict[str, str]]:
    """Return the columns of each table, with their Iceberg types."""
    results: dict[str, dict[str, str]] = {}
    columns_query = "SELECT table_name, column_name, data_type FROM duckdb_columns() WHERE NOT internal"
    for table, column, kind in con.execute(columns_query).fetchall():
        results.setdefault(table, {})[column] = _KINDS.get(kind) or kind.lower().replace(",", ", ")
    return results
