"""Trino as a process, from jars (`make trino`), with the configuration folder that compose mounts.

The module sets only what compose's container provides (the node's address and data folder, and the variables that the
files name) and what tests of the protocol need (spooled results and https).
"""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trino.dbapi

from seamark.commands.installation.java import find_java_25_home
from tests.services.java import SHORT_LIVED
from tests.services.process import CACHE, DEPLOY, ManagedProcess, ServiceFailed, choose_free_port, is_http_ok
from tests.services.s3 import S3

ETC = DEPLOY / "trino" / "etc"
MAIN_SOURCE = DEPLOY / "trino" / "main" / "TrinoMain.java"
JARS = CACHE / "trino"
SPOOLING_SOURCE = Path(__file__).with_name("LocalSpooling.java")
CATALOG = "seamark"
"""The name of the catalog in compose's configuration."""
SERVICE_ENTRY = "seamark-service-entry.jar"
PLANS = "trino"
"""The value of `X-Seamark-Plans` in Trino's catalogs, which is the default of the proxy's option."""
BY_NAME = "_by_name"
"""The suffix of the names of catalogs in which plan tables have names."""


@dataclass
class Trino:
    """A running coordinator that is its own worker. `rows` runs a statement in one of its catalogs."""

    port: int
    process: ManagedProcess
    https_port: int | None = None

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start Trino, or restart it after its process has ended. The ports stay the same."""
        info_url = f"{self.base_url}/v1/info"
        self.process.start(lambda: is_http_ok(info_url, contains='"starting":false'), timeout_s=180)

    def rows(self, sql: str, session: dict[str, str] | None = None, *, catalog: str = CATALOG) -> list[list[Any]]:
        """Run `sql`, and return all rows. `session` has session properties.

        Raises:
            Exception: The statement failed. The client's error has Trino's message.
        """
        connection: Any = trino.dbapi.connect(  # type: ignore[no-untyped-call]
            host="127.0.0.1", port=self.port, user="tests", catalog=catalog, session_properties=session, encoding=None
        )
        try:
            rows: list[list[Any]] = connection.cursor().execute(sql).fetchall()
            return rows
        finally:
            connection.close()


def _assemble_iceberg_plugin() -> Path:
    """Return the folder of the plugin's jars, after adding the service entry that Trino's archive has."""
    folder = JARS / "plugin" / "iceberg"
    entry = folder / SERVICE_ENTRY
    if not any(folder.glob("trino-iceberg-*.jar")) or not any(JARS.glob("lib/trino-main-*.jar")):
        raise ServiceFailed(f"no Trino in {JARS}: run `make trino`")
    if not entry.exists():
        _write_plugin_jar(entry, "io.trino.plugin.iceberg.IcebergPlugin")
    return folder


def _write_plugin_jar(jar: Path, plugin: str, classes: Path | None = None) -> None:
    """Write a jar that names the class `plugin` as a plugin of Trino, and that has the files of `classes`."""
    with zipfile.ZipFile(jar, "w") as file:
        file.writestr("META-INF/services/io.trino.spi.Plugin", f"{plugin}\n")
        for class_file in sorted(classes.glob("*.class")) if classes else []:
            file.write(class_file, class_file.name)


def _install_plugins(folder: Path, home: Path, plugin_jars: Sequence[Path], *, spooling: bool) -> Path:
    """Create the folder of plugins with the Iceberg plugin, and that for spooled results if `spooling` is set.

    `home` is the home of the JDK. `plugin_jars` replace the jars of the Iceberg plugin.
    """
    plugins = folder / "plugin"
    plugins.mkdir()
    iceberg_plugin = _assemble_iceberg_plugin()
    if plugin_jars:
        (plugins / "iceberg").mkdir()
        for jar in (*plugin_jars, iceberg_plugin / SERVICE_ENTRY):
            (plugins / "iceberg" / jar.name).symlink_to(jar)
    else:
        (plugins / "iceberg").symlink_to(iceberg_plugin)
    if spooling:
        classes = folder / "classes"
        argv = [str(home / "bin" / "javac"), "-d", str(classes), "-cp", f"{JARS / 'lib'}/*", str(SPOOLING_SOURCE)]
        subprocess.run(argv, check=True)
        (plugins / "spooling").mkdir()
        _write_plugin_jar(plugins / "spooling" / "spooling.jar", SPOOLING_SOURCE.stem, classes)
    return plugins


def _write_spooling(folder: Path) -> dict[str, str]:
    """Write the configuration of spooling, which Trino reads only from its own folder. Return the added properties."""
    segments = folder / "segments"
    segments.mkdir()
    (folder / "etc").mkdir()
    (folder / "etc" / "spooling-manager.properties").write_text(f"spooling-manager.name=local\nfolder={segments}\n")
    return {
        "protocol.spooling.enabled": "true",
        "protocol.spooling.retrieval-mode": "coordinator_proxy",
        "protocol.spooling.shared-secret-key": base64.b64encode(os.urandom(32)).decode(),
    }


def _write_catalogs(
    folder: Path,
    more_catalogs: Mapping[str, str],
    extra: Mapping[str, str],
    changed_catalogs: Mapping[str, Mapping[str, str]],
    *,
    by_name: bool,
) -> Path:
    """Write the catalog of the Docker Compose setup, and further catalogs with changed properties.

    Args:
        more_catalogs: The URIs of further servers, by the names of their catalogs.
        extra: Properties that replace those of all catalogs.
        changed_catalogs: Further catalogs, with the properties that replace those of the first one.
        by_name: If True, each catalog has a twin `{name}_by_name` without the HTTP header `X-Seamark-Plans`.
    """
    catalogs = folder / "catalog"
    shutil.copytree(ETC / "catalog", catalogs)
    properties = _read_properties(catalogs / f"{CATALOG}.properties") | dict(extra)
    text = "".join(f"{name}={value}\n" for name, value in properties.items())
    (catalogs / f"{CATALOG}.properties").write_text(text)
    for name, uri in more_catalogs.items():
        (catalogs / f"{name}.properties").write_text(text.replace("${ENV:SEAMARK_URI}", uri))
    for name, changes in changed_catalogs.items():
        lines = [f"{key}={value}" for key, value in {**properties, **changes}.items()]
        (catalogs / f"{name}.properties").write_text("\n".join(lines) + "\n")
    for file in list(catalogs.glob("*.properties")) if by_name else []:
        lines = [line for line in file.read_text().splitlines() if "http-headers" not in line]
        (catalogs / f"{file.stem}{BY_NAME}.properties").write_text("\n".join(lines) + "\n")
    return catalogs


def _read_properties(path: Path) -> dict[str, str]:
    lines = (line.strip() for line in path.read_text().splitlines())
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@contextmanager
def trino_server(
    folder: Path,
    *,
    uri: str,
    more_catalogs: Mapping[str, str] | None = None,
    token: str = "unused",
    s3: S3 | None = None,
    spooling: bool = False,
    certificate: Path | None = None,
    jvm: Sequence[str] = ("-XX:-UseG1GC", *SHORT_LIVED),
    properties: Mapping[str, str] | None = None,
    by_name: bool = False,
    catalog: Mapping[str, str] | None = None,
    changed_catalogs: Mapping[str, Mapping[str, str]] | None = None,
    plugin_jars: Sequence[Path] = (),
) -> Iterator[Trino]:
    """Run Trino over the Seamark server at `uri`, and yield it.

    Local tables are readable from anywhere. The start takes 15 to 40 s.

    Args:
        more_catalogs: The URIs of further servers, by the names of their catalogs.
        certificate: A PEM file with a certificate and its key. With it, Trino also serves https.
        jvm: Options in addition to those of the file. Its garbage collector would take a fifth of the CPU time in
        tests.
        properties: Additional properties of Trino.
        catalog: Properties that replace those of the catalogs.
        changed_catalogs: Further catalogs, with the properties that replace those of the first one.
        plugin_jars: Jars of the Iceberg plugin that replace those of `make trino`.
    """
    home = find_java_25_home()
    if home is None:
        raise ServiceFailed("Trino needs a JDK 25: set JAVA25 to its home, or install one below /usr/lib/jvm")
    folder.mkdir(parents=True, exist_ok=True)
    port, https_port = choose_free_port(), choose_free_port() if certificate else None
    node = {
        **_read_properties(ETC / "node.properties"),
        "node.data-dir": str(folder / "data"),
        "node.bind-ip": "127.0.0.1",
        "node.internal-address": "127.0.0.1",
        "config": str(ETC / "config.properties"),
        "log.levels-file": str(ETC / "log.properties"),
        "log.enable-console": "true",
        "catalog.config-dir": str(
            _write_catalogs(folder, more_catalogs or {}, catalog or {}, changed_catalogs or {}, by_name=by_name)
        ),
        "plugin.dir": str(_install_plugins(folder, home, plugin_jars, spooling=spooling)),
        **(_write_spooling(folder) if spooling else {}),
    }
    if certificate:
        node |= {"http-server.https.enabled": "true", "http-server.https.port": str(https_port)}
        node |= {"http-server.https.keystore.path": str(certificate)}
    node |= properties or {}
    options = [f"@{ETC / 'jvm.config'}", *jvm]
    argv = [str(home / "bin" / "java"), *options, "-cp", f"{JARS / 'lib'}/*"]
    argv += [f"-D{key}={value}" for key, value in node.items()]
    env = {
        "SEAMARK_URI": uri,
        "SEAMARK_TOKEN": token,
        "SEAMARK_PLANS": PLANS,
        "TRINO_PORT": str(port),
        "TRINO_LOCAL_LOCATION": "/",
        "S3_ENDPOINT": s3.endpoint if s3 else "http://127.0.0.1:1",
        "S3_REGION": s3.region if s3 else "us-east-1",
        "S3_ACCESS_KEY": s3.access_key if s3 else "none",
        "S3_SECRET_KEY": s3.secret_key if s3 else "none",
    }
    process = ManagedProcess([*argv, str(MAIN_SOURCE)], log=folder / "trino.log", env=env, cwd=folder)
    running = Trino(port, process, https_port)
    with process:
        running.start()
        yield running
