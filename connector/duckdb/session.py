"""Opens DuckDB connections with an attached Seamark catalog.

DuckDB reads and writes Iceberg tables with its extensions `avro`, `httpfs` and `iceberg`. Their files come from PyPI
packages (`pip install 'seamark[duckdb]'`) if these are installed, and otherwise from DuckDB's own repository.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import duckdb

from seamark.connector.client.names import check_url
from seamark.connector.plans.quotes import quote_name, quote_text
from seamark.formats.protocol.wire import FRESH_HEADER

EXTENSIONS = ("avro", "httpfs", "iceberg")


@dataclass(frozen=True)
class AttachedCatalog:
    """The address of an attached catalog, and the token for it."""

    uri: str
    token: str | None = field(repr=False)


_attached: WeakKeyDictionary[duckdb.DuckDBPyConnection, dict[str, AttachedCatalog]] = WeakKeyDictionary()
"""The attached catalogs of each connection, by their lower-case names in statements."""


def connect(
    uri: str,
    *,
    name: str = "sea",
    token: str | None = None,
    on_s3: bool = False,
    database: str = ":memory:",
    config: dict[str, Any] | None = None,
) -> duckdb.DuckDBPyConnection:
    """Return a new DuckDB connection with the catalog at `uri` attached as `name`.

    Extensions from PyPI are not signed by DuckDB's repository, so `allow_unsigned_extensions` is on unless `config`
    sets it.

    Args:
        uri: The address of the catalog.
        name: The name of the catalog in DuckDB.
        token: A bearer token.
        on_s3: Whether the tables are in S3. DuckDB then uses keys from the server.
        database: The argument of `duckdb.connect`: the path of a database file, or `:memory:`.
        config: The argument of `duckdb.connect`: settings of DuckDB.
    """
    con = duckdb.connect(database, config={"allow_unsigned_extensions": "true", **(config or {})})
    try:
        attach(con, uri, name=name, token=token, on_s3=on_s3)
    except BaseException:
        con.close()
        raise
    return con


def attach(
    con: duckdb.DuckDBPyConnection, uri: str, *, name: str = "sea", token: str | None = None, on_s3: bool = False
) -> None:
    """Attach the catalog at `uri` (http://host:port) as `name`, so that `sql` can plan the queries of `con`.

    The catalog must be attached separately for each cursor of a connection. The function turns off DuckDB's file cache
    (`enable_external_file_cache`), because DuckDB would return wrong rows of tables with deletion vectors.

    Args:
        con: The connection.
        uri: The address of the catalog.
        name: The name of the catalog in DuckDB.
        token: A bearer token.
        on_s3: Whether the tables are in S3. DuckDB then uses keys from the server
            (`SEAMARK_S3_CLIENT_ACCESS=static` or `sts`).

    Raises:
        ValueError: The URL is invalid.
        duckdb.Error: DuckDB cannot attach the catalog.
    """
    check_url(uri)
    uri = uri.rstrip("/")
    load_extensions(con)
    # If the cache has a range of a Puffin file with several deletion vectors, the Iceberg extension of DuckDB 1.5.5
    # takes the first vector of the range for each of them.
    con.execute("SET GLOBAL enable_external_file_cache = false")
    options = [
        "TYPE iceberg",
        f"ENDPOINT {quote_text(uri)}",
        f"ACCESS_DELEGATION_MODE '{'vended_credentials' if on_s3 else 'none'}'",
    ]
    secret, headers = quote_name(f"seamark_{name}"), f"EXTRA_HTTP_HEADERS MAP {{{quote_text(FRESH_HEADER)}: 'true'}}"
    if token is None:
        options.append("AUTHORIZATION_TYPE 'none'")
        con.execute(f"CREATE OR REPLACE SECRET {secret} (TYPE http, {headers}, SCOPE {quote_text(uri)})")
    else:
        con.execute(f"CREATE OR REPLACE SECRET {secret} (TYPE iceberg, TOKEN {quote_text(token)}, {headers})")
        options.append(f"SECRET {secret}")
    con.execute(f"ATTACH IF NOT EXISTS '' AS {quote_name(name)} ({', '.join(options)})")
    _attached.setdefault(con, {})[name.lower()] = AttachedCatalog(uri, token)


def list_attached_catalogs(con: duckdb.DuckDBPyConnection) -> dict[str, AttachedCatalog]:
    """Return the attached catalogs, by their lower-case names."""
    return dict(_attached.get(con, {}))


def load_extensions(con: duckdb.DuckDBPyConnection) -> None:
    """Load the extensions of `EXTENSIONS`.

    Raises:
        duckdb.Error: An extension is neither on this machine nor in DuckDB's repository.
    """
    loaded_names = {
        str(row[0]) for row in con.execute("SELECT extension_name FROM duckdb_extensions() WHERE loaded").fetchall()
    }
    for name in EXTENSIONS:
        if name in loaded_names:
            continue
        file = find_extension(name)
        if file is None:
            con.execute(f"INSTALL {name}")
            con.execute(f"LOAD {name}")
        else:
            con.execute(f"LOAD {quote_text(str(file))}")


def find_extension(name: str) -> Path | None:
    """Return the file of the extension for this version of DuckDB, or None if it is not installed from PyPI."""
    spec = importlib.util.find_spec(f"duckdb_extension_{name}")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / "extensions" / f"v{duckdb.__version__}" / f"{name}.duckdb_extension"
    return file if file.exists() else None
