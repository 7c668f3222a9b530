"""Nessie's Iceberg REST catalog over an S3 store. `make nessie` downloads its program (245 MB) on demand."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from seamark.commands.installation.java import find_java_25_home
from tests.services.java import SHORT_LIVED
from tests.services.process import CACHE, REPO, ManagedProcess, ServiceFailed, choose_free_port, is_http_ok
from tests.services.s3 import S3

_KEYS = "store-keys"


@contextmanager
def run_nessie_server(s3: S3, location: str, *, log: Path) -> Iterator[str]:
    """Run Nessie with one warehouse, and yield the URI of its REST catalog. Install Nessie if it is missing.

    Args:
        s3: The store of the warehouse.
        location: The location of the warehouse, such as s3://bucket/nessie.
        log: The file of its output.

    Raises:
        ServiceFailed: There is no JDK for Nessie.
    """
    subprocess.run(["make", "-s", "nessie"], cwd=REPO, check=True)
    program = next((CACHE / "nessie").glob("nessie-quarkus-*-runner.jar"))
    port, management_port = choose_free_port(), choose_free_port()
    options = "nessie.catalog.service.s3.default-options"
    settings = {
        "quarkus.http.host": "127.0.0.1",
        "quarkus.http.port": str(port),
        "quarkus.management.host": "127.0.0.1",
        "quarkus.management.port": str(management_port),
        "quarkus.otel.sdk.disabled": "true",
        "nessie.version.store.type": "IN_MEMORY",
        "nessie.catalog.default-warehouse": "lake",
        "nessie.catalog.warehouses.lake.location": location,
        f"{options}.endpoint": s3.endpoint,
        f"{options}.region": s3.region,
        f"{options}.path-style-access": "true",
        f"{options}.access-key": f"urn:nessie-secret:quarkus:{_KEYS}",
        f"{_KEYS}.name": s3.access_key,
        f"{_KEYS}.secret": s3.secret_key,
    }
    home = find_java_25_home()
    if home is None:
        raise ServiceFailed("Nessie needs a JDK 21 or newer: set JAVA25 to the home of a JDK 25")
    argv = [
        str(Path(home) / "bin" / "java"),
        "-Xmx512m",
        *SHORT_LIVED,
        *(f"-D{name}={value}" for name, value in settings.items()),
    ]
    base_url = f"http://127.0.0.1:{port}/iceberg"
    process = ManagedProcess([*argv, "-jar", str(program)], log=log)
    with process:
        process.start(lambda: is_http_ok(f"{base_url}/v1/config"), timeout_s=120)
        yield base_url
