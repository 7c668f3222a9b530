"""Trino as a process, from jars (`make trino`), with the configuration folder that compose mounts.

Only what compose's container gives by itself is set here: the node's address and data folder, and the variables that
the files name.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trino.dbapi

from tests.services.java import SHORT_LIVED, java_25_home
from tests.services.process import CACHE, DEPLOY, ManagedProcess, ServiceFailed, free_port, http_ok
from tests.services.s3 import S3

ETC = DEPLOY / "trino" / "etc"
MAIN = DEPLOY / "trino" / "main" / "TrinoMain.java"
JARS = CACHE / "trino"


@dataclass
class Trino:
    """A running coordinator that is its own worker; `rows` runs a statement in the catalog `seamark`."""

    port: int
    process: ManagedProcess

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def rows(self, sql: str, session: dict[str, str] | None = None) -> list[list[Any]]:
        """All rows of `sql`; raises the client's error, with Trino's message, when the statement fails. `session` are
        session properties."""
        connection: Any = trino.dbapi.connect(  # type: ignore[no-untyped-call]
            host="127.0.0.1", port=self.port, user="tests", catalog="seamark", session_properties=session
        )
        try:
            found: list[list[Any]] = connection.cursor().execute(sql).fetchall()
            return found
        finally:
            connection.close()


def _plugin_folder() -> Path:
    """The plugin's jars, with the service entry that Trino's archive would carry."""
    folder = JARS / "plugin"
    entry = folder / "iceberg" / "seamark-service-entry.jar"
    if not any(folder.glob("iceberg/trino-iceberg-*.jar")) or not any(JARS.glob("lib/trino-main-*.jar")):
        raise ServiceFailed(f"no Trino in {JARS}: run `make trino`")
    if not entry.exists():
        with zipfile.ZipFile(entry, "w") as jar:
            jar.writestr("META-INF/services/io.trino.spi.Plugin", "io.trino.plugin.iceberg.IcebergPlugin\n")
    return folder


def _read_properties(path: Path) -> dict[str, str]:
    lines = (line.strip() for line in path.read_text().splitlines())
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@contextmanager
def trino_server(folder: Path, *, uri: str, token: str = "unused", s3: S3 | None = None) -> Iterator[Trino]:
    """Trino over the Seamark server at `uri`; local tables are readable anywhere. Takes 15 to 40 s to start."""
    home = java_25_home()
    if home is None:
        raise ServiceFailed("Trino needs a JDK 25: set JAVA25 to its home, or install one below /usr/lib/jvm")
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    node = {
        **_read_properties(ETC / "node.properties"),
        "node.data-dir": str(folder / "data"),
        "node.bind-ip": "127.0.0.1",
        "node.internal-address": "127.0.0.1",
        "config": str(ETC / "config.properties"),
        "log.levels-file": str(ETC / "log.properties"),
        "log.enable-console": "true",
        "catalog.config-dir": str(ETC / "catalog"),
        "plugin.dir": str(_plugin_folder()),
    }
    options = [f"@{ETC / 'jvm.config'}", SHORT_LIVED[0]]  # the garbage collector is the file's
    argv = [str(home / "bin" / "java"), *options, "-cp", f"{JARS / 'lib'}/*"]
    argv += [f"-D{key}={value}" for key, value in node.items()]
    env = {
        "SEAMARK_URI": uri,
        "SEAMARK_TOKEN": token,
        "TRINO_PORT": str(port),
        "TRINO_LOCAL_LOCATION": "/",
        "S3_ENDPOINT": s3.endpoint if s3 else "http://127.0.0.1:1",
        "S3_REGION": s3.region if s3 else "us-east-1",
        "S3_ACCESS_KEY": s3.access_key if s3 else "none",
        "S3_SECRET_KEY": s3.secret_key if s3 else "none",
    }
    process = ManagedProcess([*argv, str(MAIN)], log=folder / "trino.log", env=env, cwd=folder)
    with process:
        process.start(lambda: http_ok(f"http://127.0.0.1:{port}/v1/info", contains='"starting":false'), timeout_s=180)
        yield Trino(port, process)
