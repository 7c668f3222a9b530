"""Java on this machine, and Iceberg's own REST server as the yardstick.

PATH's java (17 or newer) runs Spark, the compliance kit and the fixture; Trino alone asks for 25, found by `JAVA25` or
below /usr/lib/jvm.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
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


def compiled(source: Path, classpath: Sequence[str]) -> Path:
    """Folder of the classes of `source`, compiled anew when it or the first jar is another.

    Two that compile at once both win.
    """
    stamp = f"{source.stat().st_mtime_ns}-{Path(classpath[0]).stem}"
    folder = CACHE / "java-classes" / source.stem / stamp
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=folder.parent))
    beside = Path(java_17()).with_name("javac")
    javac = str(beside) if beside.exists() else shutil.which("javac")
    if javac is None:
        raise ServiceFailed("no javac found: install a JDK, not only a Java runtime")
    argv = [javac, "-nowarn", "-d", str(fresh), "-cp", ":".join(classpath), str(source)]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode != 0:
        raise ServiceFailed(f"{source.name} does not compile\n{done.stderr}")
    if not folder.exists():
        try:
            fresh.rename(folder)
        except OSError:
            if not folder.exists():
                raise
    return folder


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
