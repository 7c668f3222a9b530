"""Statements that run on Trino directly and through the proxy with equal answers, and tables for them.

The tables have many small files, so that plans prune some of them.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import trino.exceptions
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.io.pyarrow import _dataframe_to_data_files

from bench.ssb.generate import TABLES, generate_ssb, get_table_path
from tests.deploy.shop import connect_to_trino
from tests.services.trino_lake import TrinoLake
from tests.services.trino_proxy import TrinoProxy, run_trino_proxy

SCALE_FACTOR = 0.01
_FILES, _FILES_PER_MANIFEST = 20, 8
"""The number of files of each table with enough rows, and of the files of one manifest."""
_TPCH = {
    "lineitem": "l_shipdate",
    "orders": "o_orderdate",
    "customer": "c_mktsegment, c_nationkey",
    "part": "p_brand, p_size",
    "partsupp": "ps_partkey",
    "supplier": "s_nationkey",
    "nation": "n_name",
    "region": "r_name",
}
_SSB = {
    "lineorder": "lo_discount, lo_quantity",
    "date": "d_datekey",
    "customer": "c_region, c_city",
    "part": "p_brand1",
    "supplier": "s_region, s_city",
}
"""The tables, and the columns by which their rows are sorted."""


@dataclass
class StatementResult:
    """The result of a statement: its rows, or an error.

    Attributes:
        rows: The number of times that each row occurs, by the row as text.
        columns: The name and the type of each column.
        changed_rows: The row count that Trino reports for a statement with an update type, otherwise None.
        error: The name of the error, or an empty text.
    """

    rows: Counter[str] = field(default_factory=Counter)
    columns: list[tuple[str, str]] = field(default_factory=list)
    changed_rows: int | None = None
    error: str = ""


class TrinoAndProxy:
    """The coordinator and the proxy in front of it, which run a statement at the same time."""

    def __init__(self, direct_port: int, proxy: TrinoProxy) -> None:
        self.proxy = proxy
        self.counts: Counter[str] = Counter()
        self._ports = (direct_port, proxy.port)
        self._threads = ThreadPoolExecutor(2)

    def close(self) -> None:
        self._threads.shutdown()

    def ask(
        self, sql: str, parameters: Sequence[Any] = (), *, schemas: tuple[str, str], **options: Any
    ) -> StatementResult:
        """Run a statement with and without the proxy, check that both results are equal, and return the result.

        Args:
            schemas: The schema of the direct statement, and the schema of the statement through the proxy.
        """
        direct_answer, proxied_answer = self._threads.map(
            lambda port, schema: _run_statement(port, sql, parameters, schema=schema, **options), self._ports, schemas
        )
        text = f"{sql}\n-- with {parameters} in {schemas}"
        assert proxied_answer.error == direct_answer.error, text
        assert proxied_answer.columns == direct_answer.columns, text
        assert proxied_answer.rows == direct_answer.rows, text
        assert proxied_answer.changed_rows == direct_answer.changed_rows, text
        self.counts["asked"] += 1
        self.counts["failed"] += bool(direct_answer.error)
        self.counts["with rows"] += bool(direct_answer.rows)
        return direct_answer


def _run_statement(port: int, sql: str, parameters: Sequence[Any], **options: Any) -> StatementResult:
    connection = connect_to_trino(port, timezone="UTC", **options)
    try:
        cursor = connection.cursor()
        cursor.execute(sql, list(parameters) or None)
        rows = Counter(map(repr, cursor.fetchall()))
        columns = [(column[0], column[1]) for column in cursor.description or []]
        changed_rows = cursor.rowcount if cursor.update_type else None
        return StatementResult(rows, columns, changed_rows)
    except trino.exceptions.TrinoQueryError as error:
        return StatementResult(error=error.error_name)
    finally:
        connection.close()


@contextmanager
def open_trino_and_proxy(folder: Path, lake: TrinoLake) -> Iterator[TrinoAndProxy]:
    """Open the proxy with settings for these tests.

    The proxy waits for slow plans, and shows clients no error of a rewritten statement.
    """
    flags = ("--trino", lake.trino.base_url, "--budget-ms", "20000", "--hold", "30", "--trust-time-zone")
    with run_trino_proxy(folder, *flags, seamark=lake.seamark.base_url) as proxy:
        trino_and_proxy = TrinoAndProxy(lake.trino.port, proxy)
        try:
            yield trino_and_proxy
        finally:
            trino_and_proxy.close()


# The creation of tables


def make_benchmark_tables(folder: Path, lake: TrinoLake) -> None:
    """Make the tables of TPC-H in the namespace `tpch`, and those of the Star Schema Benchmark in `ssb`."""
    program = Path(sys.executable).parent / "tpchgen-cli"
    argv = [str(program), "parquet", "-s", f"{SCALE_FACTOR:g}", "-o", str(folder / "tpch"), "--quiet"]
    (folder / "tpch").mkdir()
    subprocess.run(argv, check=True, capture_output=True)
    star = generate_ssb(folder / "ssb", SCALE_FACTOR)
    catalog = load_catalog("seamark", type="rest", uri=lake.seamark.base_url)
    with duckdb.connect() as db:
        for schema, tables, paths in (
            ("tpch", _TPCH, {name: folder / "tpch" / f"{name}.parquet" for name in _TPCH}),
            ("ssb", _SSB, {name: get_table_path(star, name) for name in TABLES}),
        ):
            catalog.create_namespace(schema)
            for name, order in tables.items():
                rows = db.sql(f"FROM '{paths[name]}' ORDER BY {order}").to_arrow_table()
                write_files(catalog, f"{schema}.{name}", rows, _FILES)
    catalog.close()


def write_files(catalog: Catalog, table: str | tuple[str, ...], rows: pa.Table, files: int) -> None:
    """Write the rows in their order to about `files` files with one commit.

    One PyIceberg append for each file would take ten times as long.
    """
    step = max(1, -(-len(rows) // files))
    created_table = catalog.create_table(table, schema=rows.schema)
    starts = range(0, len(rows), step)
    with created_table.transaction() as change:
        for first_file in range(0, len(starts), _FILES_PER_MANIFEST):
            with change.update_snapshot().fast_append() as manifest:
                for start in starts[first_file : first_file + _FILES_PER_MANIFEST]:
                    part = rows.slice(start, step)
                    for file in _dataframe_to_data_files(change.table_metadata, part, created_table.io):
                        manifest.append_data_file(file)
