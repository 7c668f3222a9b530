"""The number of fact files that a query needs at least, because they have a row that passes its filters and joins.

DuckDB finds the rows in the data files themselves, without the catalog.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import duckdb

from bench.ssb.generate import TABLES, get_table_path
from bench.ssb.queries import QUERIES
from bench.ssb.spark import FACT
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.names import Name


def list_data_paths(client: SeamarkClient, table: Name) -> list[str]:
    """Return the local paths of the data files in the current snapshot of a table."""
    return [urlsplit(path).path for path in client.files(table)["file_path"].to_pylist()]


def open_facts(paths: Sequence[str], data: Path) -> duckdb.DuckDBPyConnection:
    """Open DuckDB with the tables in `data`, except the facts, which are read from the files `paths`.

    The facts have an additional column `filename`.
    """
    db = duckdb.connect()
    for table in TABLES:
        source = f"read_parquet({list(paths)}, filename=true)" if table == FACT else f"'{get_table_path(data, table)}'"
        db.execute(f'CREATE VIEW "{table}" AS FROM {source}')
    return db


def count_files_with_rows(paths: Sequence[str], data: Path) -> dict[str, int]:
    """Return, for each query, the number of files in `paths` with a row for which its whole WHERE clause is true."""
    results = {}
    with closing(open_facts(paths, data)) as db:
        for query, sql in QUERIES.items():
            clauses = sql.partition("\nfrom ")[2].partition("\ngroup by ")[0]
            (results[query],) = db.execute(f"SELECT count(DISTINCT filename) FROM {clauses}").fetchall()[0]
    return results
