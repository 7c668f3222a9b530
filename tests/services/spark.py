"""Spark for tests: one small local session for the whole run. Catalogs are added by name."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyspark.util
from pyspark.sql import SparkSession

from seamark.connector.client.engines import build_catalog_conf
from seamark.connector.spark.session import add_catalog, iceberg_jars, open_session, session_conf
from tests.services.java import SHORT_LIVED, find_java_17
from tests.services.process import CACHE

INTERPRETED = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
"""Options that disable compiled Java code for queries. With few rows, the compilation takes a sixth of all CPU time."""
_LARGE_CODE = ("-XX:ReservedCodeCacheSize=192m", "-XX:-MethodFlushing")
"""Options for a larger code cache.

Without the optimizing compiler a JVM has 48 MB. The compiled code of all tests in a process is larger, so the JVM would
discard code and compile it again.
"""
_numbers = itertools.count()


def _read_result(connection: Any) -> Any:
    """Read a result, and close its socket.

    PySpark leaves the socket to the garbage collector. Its warning would fail the test that runs at this time.
    """
    port, secret, *_ = connection
    file, sock = pyspark.util.local_connect_and_auth(port, secret)
    sock.settimeout(None)
    sock.close()  # The socket is closed when `file` is closed.
    return file


pyspark.util._create_local_socket = _read_result  # type: ignore[assignment]


@contextmanager
def spark_session(folder: Path, conf: Mapping[str, str] | None = None) -> Iterator[SparkSession]:
    """Open a session whose scratch files are in `folder`.

    The session is stopped at the end. The next session reuses the JVM.
    """
    find_java_17()
    scratch = {
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.driver.memory": "1500m",
        "spark.driver.extraJavaOptions": " ".join((*SHORT_LIVED, *_LARGE_CODE)),
    }
    session = open_session("seamark-tests", {**session_conf(iceberg_jars(CACHE / "jars")), **scratch, **(conf or {})})
    try:
        yield session
    finally:
        session.stop()


def new_catalog(spark: SparkSession, uri: str, *, token: str = "", extra: Mapping[str, str] | None = None) -> str:
    """Add a catalog for the server at `uri` under a name that is new in this JVM, and return the name."""
    name = f"sea{next(_numbers)}"
    add_catalog(spark, build_catalog_conf(name, uri, token=token, extra=extra))
    return name
