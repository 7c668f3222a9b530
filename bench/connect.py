"""Shell commands, programs and SQL that connect Spark, PyIceberg, Trino or DuckDB to a running server.

`tests/bench` runs the PyIceberg program unchanged, and compares the Spark options with the session of the tests.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

from seamark.connector.client.engines import EXTENSIONS, build_catalog_conf

CATALOG = "sea"


def format_spark(uri: str, jars: Iterable[Path], table: str) -> str:
    """Return a `pyspark` command and a first query."""
    conf = {"spark.sql.extensions": EXTENSIONS, **build_catalog_conf(CATALOG, uri)}
    words = ["pyspark", "--jars", ",".join(str(jar) for jar in jars)]
    # pyspark is a script that looks for Python in PATH.
    path = f"PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH "
    lines = [path + shlex.join(words), *(f"  --conf {shlex.quote(f'{key}={value}')}" for key, value in conf.items())]
    return " \\\n".join(lines) + f'\n>>> spark.sql("SELECT count(*) FROM {CATALOG}.{table}").show()'


def format_pyiceberg(uri: str, table: str) -> str:
    """Return a complete Python program that reads some rows of `table`."""
    return (
        "from pyiceberg.catalog import load_catalog\n"
        f'catalog = load_catalog("{CATALOG}", type="rest", uri="{uri}")\n'
        f'table = catalog.load_table("{table}")\n'
        "print(table.scan(limit=5).to_arrow().to_pylist())"
    )


def format_trino(uri: str, table: str) -> str:
    """Return a catalog file for Trino and a query. Trino must run on this machine, because the files are local."""
    lines = {
        "connector.name": "iceberg",
        "iceberg.catalog.type": "rest",
        "iceberg.rest-catalog.uri": uri,
        "fs.native-local.enabled": "true",
        "local.location": "/",
    }
    body = "\n".join(f"{key}={value}" for key, value in lines.items())
    return f"# etc/catalog/{CATALOG}.properties\n{body}\n\nSELECT count(*) FROM {CATALOG}.{table};"


def format_duckdb(uri: str, table: str) -> str:
    """Return SQL for DuckDB's shell. INSTALL downloads the extension once."""
    return (
        "INSTALL iceberg; LOAD iceberg;\n"
        f"ATTACH '' AS {CATALOG} (TYPE iceberg, ENDPOINT '{uri}', ACCESS_DELEGATION_MODE 'none', "
        "AUTHORIZATION_TYPE 'none');\n"
        f"SELECT count(*) FROM {CATALOG}.{table};"
    )
