"""Java on this machine, and Iceberg's own REST server as the yardstick.

PATH's java (17 or newer) runs Spark, the compliance kit and the fixture; Trino alone asks for 25, found by `JAVA25` or
below /usr/lib/jvm.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.services.process import CACHE, REPO, ManagedProcess, ServiceFailed, free_port, http_ok

RCK = REPO / "tests" / "rck"
SHORT_LIVED = (
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseSerialGC",
    "-XX:+UnlockDiagnosticVMOptions",
    "-XX:-BytecodeVerificationRemote",
)
"""Options of every JVM of the tests: none lives long enough to win back what its optimizing compiler costs. The classes
of released jars are sound; to verify them is a fifth of the CPU time of a start of Trino."""


def java_17() -> str:
    """Path of a `java` from 17 on: JAVA_HOME's, else the one on PATH."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None or not Path(java).exists():
        raise ServiceFailed("no java found: install a JDK 17 or newer, or set JAVA_HOME")
    return java


def rck_classpath() -> str:
    """Jars of the compliance kit and the fixture, resolved by `make jars` into .cache/rck/classpath.txt."""
    resolved = CACHE / "rck" / "classpath.txt"
    if not resolved.exists():
        raise ServiceFailed(f"{resolved} is missing: run `make jars`")
    return resolved.read_text().strip()


@contextmanager
def java_fixture(warehouse: Path, *, log: Path) -> Iterator[str]:
    """Iceberg's `RESTCatalogServer` over a JDBC catalog in SQLite, strict about namespaces; yields its base URL."""
    port = free_port()
    base_url = f"http://127.0.0.1:{port}"
    argv = [java_17(), "-Xmx1g", *SHORT_LIVED, "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", rck_classpath()]
    env = {
        "CATALOG_REST_PORT": str(port),
        "CATALOG_WAREHOUSE": f"file:{warehouse}",
        "CATALOG_JDBC_STRICT__MODE": "true",
    }
    process = ManagedProcess([*argv, "org.apache.iceberg.rest.RESTCatalogServer"], log=log, env=env)
    with process:
        process.start(lambda: http_ok(f"{base_url}/v1/config"), timeout_s=60)
        yield base_url
