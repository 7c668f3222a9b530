"""Java on this machine, and Iceberg's own REST server for comparison.

The java on PATH (17 or newer) runs Spark, the compliance kit and the fixture. Only Trino needs Java 25. `JAVA25` names
its home, or it is found below /usr/lib/jvm.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.services.process import CACHE, REPO, ManagedProcess, ServiceFailed, choose_free_port, is_http_ok

RCK = REPO / "tests" / "rck"
_LOCAL_FILES = Path(__file__).with_name("LocalFiles.java")
SHORT_LIVED = (
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseSerialGC",
    "-XX:+UnlockDiagnosticVMOptions",
    "-XX:-BytecodeVerificationRemote",
)
"""Options of every JVM of the tests.

No JVM runs long enough to benefit from its optimizing compiler. The classes of released jars are valid, and their
verification takes a fifth of the CPU time of a start of Trino.
"""


def find_java_17() -> str:
    """Return the path of the program java in JAVA_HOME, or in PATH if JAVA_HOME is not set.

    It should have version 17 or newer, but the version is not checked.

    Raises:
        ServiceFailed: There is no program java.
    """
    home = os.environ.get("JAVA_HOME")
    java_path = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java_path is None or not Path(java_path).exists():
        raise ServiceFailed("no java found: install a JDK 17 or newer, or set JAVA_HOME")
    return java_path


def compile_java(source: Path, classpath: Sequence[str]) -> Path:
    """Return the folder with the classes of `source`, and compile them if they are missing.

    Compile again if the source or the name of the first jar has changed. If two processes compile at the same time,
    both succeed.

    Raises:
        ServiceFailed: There is no compiler, or the source does not compile.
    """
    stamp = f"{source.stat().st_mtime_ns}-{Path(classpath[0]).stem}"
    folder = CACHE / "java-classes" / source.stem / stamp
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    new_folder = Path(tempfile.mkdtemp(dir=folder.parent))
    javac_path = Path(find_java_17()).with_name("javac")
    javac = str(javac_path) if javac_path.exists() else shutil.which("javac")
    if javac is None:
        raise ServiceFailed("no javac found: install a JDK, not only a Java runtime")
    argv = [javac, "-nowarn", "-d", str(new_folder), "-cp", ":".join(classpath), str(source)]
    result = subprocess.run(argv, capture_output=True, text=True)
    if result.returncode != 0:
        raise ServiceFailed(f"{source.name} does not compile\n{result.stderr}")
    if not folder.exists():
        try:
            new_folder.rename(folder)
        except OSError:
            if not folder.exists():
                raise
    return folder


def configure_local_files() -> dict[str, str]:
    """Return settings with which Spark starts no process for each local file that it creates.

    Raises:
        ServiceFailed: The Java installation has no compiler.
    """
    pyspark = importlib.util.find_spec("pyspark")
    assert pyspark is not None
    assert pyspark.origin is not None
    hadoop = sorted((Path(pyspark.origin).parent / "jars").glob("hadoop-client-api-*.jar"))
    classes = compile_java(_LOCAL_FILES, [str(hadoop[-1])])
    return {"spark.driver.extraClassPath": str(classes), "spark.hadoop.fs.file.impl": _LOCAL_FILES.stem}


def read_rck_classpath() -> str:
    """Return the jars of the compliance kit and the fixture, which `make jars` lists in .cache/rck/classpath.txt."""
    classpath_path = CACHE / "rck" / "classpath.txt"
    if not classpath_path.exists():
        raise ServiceFailed(f"{classpath_path} is missing: run `make jars`")
    return classpath_path.read_text().strip()


@contextmanager
def run_java_fixture(warehouse: Path, *, log: Path) -> Iterator[str]:
    """Run Iceberg's `RESTCatalogServer` over a JDBC catalog in SQLite, and yield its base URL.

    The server requires that namespaces exist.
    """
    port = choose_free_port()
    base_url = f"http://127.0.0.1:{port}"
    argv = [
        find_java_17(),
        "-Xmx1g",
        *SHORT_LIVED,
        "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
        "-cp",
        read_rck_classpath(),
    ]
    env = {
        "CATALOG_REST_PORT": str(port),
        "CATALOG_WAREHOUSE": f"file:{warehouse}",
        "CATALOG_JDBC_STRICT__MODE": "true",
    }
    process = ManagedProcess([*argv, "org.apache.iceberg.rest.RESTCatalogServer"], log=log, env=env)
    with process:
        process.start(lambda: is_http_ok(f"{base_url}/v1/config"), timeout_s=60)
        yield base_url
