"""Check the configurations of engines: whether a file, or a running Spark, connects to this server.

The configuration of a running Spark comes from the REST API of its web interface (`spark.ui.port`, 4040 by default),
which hides the values of secrets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import urllib3

from seamark.connector.client.engines import CATALOG_CLASS, EXTENSIONS, RUNTIME
from seamark.connector.client.errors import describe_cause

SIZE_MAX = 1 << 20
UI_SIZE_MAX = 16 << 20
UI_TIMEOUT_S = 10.0
_SPARK_CATALOG = "spark.sql.catalog."
RUNTIME_NAME = re.compile(r"iceberg-spark-runtime-(\d+\.\d+)_\d+\.\d+")


@dataclass(frozen=True)
class CheckResult:
    """The result of a check.

    Attributes:
        subject: What was checked.
        text: The result as text.
        fix: How to fix the problem, or an empty text if there is no problem.
        is_fault: Whether the checked software does not work without the fix. If False, the fix is advice.
    """

    subject: str
    text: str
    fix: str = ""
    is_fault: bool = False


def read_properties(path: Path) -> dict[str, str]:
    """Return the keys and values of a properties file. A key and its value are separated by `=`, `:` or white space.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is too large.
    """
    with path.open(encoding="utf-8") as file:
        text = file.read(SIZE_MAX + 1)
    if len(text) > SIZE_MAX:
        raise ValueError(f"the file has more than {SIZE_MAX:,} characters")
    settings = {}
    for line in text.splitlines():
        if (entry := line.strip()) and entry[0] not in "#!":
            key, _, value = re.sub(r"\s*[=:\s]\s*", "\0", entry, count=1).partition("\0")
            settings[key] = value
    return settings


@dataclass(frozen=True)
class SparkSetup:
    """The configuration of Spark, from a file or from a running application.

    Attributes:
        properties: The properties of the configuration.
        version: The version of a running Spark, or an empty text.
        jars: All entries of the class path of a running application.
    """

    properties: Mapping[str, str]
    version: str = ""
    jars: tuple[str, ...] = ()


def read_running_spark(url: str) -> SparkSetup:
    """Return the configuration of the latest application that Spark's web interface shows.

    Args:
        url: The URL of the web interface, such as http://localhost:4040.

    Raises:
        ValueError: There is no application, or the web interface does not answer.
    """
    base = f"{url.rstrip('/')}/api/v1/applications"
    with urllib3.PoolManager(retries=False, timeout=UI_TIMEOUT_S) as pool:
        applications = _request_ui(pool, base)
        try:
            application = applications[0]
            environment = _request_ui(pool, f"{base}/{quote(application['id'], safe='')}/environment")
            return SparkSetup(
                {str(name): str(value) for name, value in environment["sparkProperties"]},
                str(application["attempts"][-1].get("appSparkVersion", "")),
                tuple(str(entry) for entry, _ in environment["classpathEntries"]),
            )
        except (LookupError, TypeError, ValueError):
            raise ValueError(f"{base} does not answer as Spark's web interface does") from None


def _request_ui(pool: urllib3.PoolManager, url: str) -> Any:
    try:
        answer = pool.request("GET", url, preload_content=False)
        try:
            data = answer.read(UI_SIZE_MAX + 1)
        finally:
            answer.close()
    except urllib3.exceptions.HTTPError as error:
        raise ValueError(f"{url} does not answer: {describe_cause(error)}") from None
    if answer.status != 200 or len(data) > UI_SIZE_MAX:
        raise ValueError(f"{url} answered with HTTP status {answer.status}")
    try:
        return json.loads(data)
    except ValueError:
        raise ValueError(f"The answer of {url} is not JSON") from None


def check_spark(subject: str, setup: SparkSetup, url: str | None) -> Iterator[CheckResult]:
    """Check Iceberg's jar, the session extensions, and every Iceberg catalog."""
    subject, properties = f"Spark, {subject}", setup.properties
    yield from _check_runtime(subject, setup)
    catalogs = [key.removeprefix(_SPARK_CATALOG) for key, value in properties.items() if value == CATALOG_CLASS]
    catalogs = [name for name in catalogs if "." not in name]
    if not catalogs:
        fix = f"Add the line: {_SPARK_CATALOG}sea {CATALOG_CLASS}; seamark connect spark prints all lines"
        yield CheckResult(subject, "the file defines no Iceberg catalog", fix, is_fault=True)
    if EXTENSIONS not in properties.get("spark.sql.extensions", ""):
        yield CheckResult(
            subject, "MERGE INTO, CALL and branches are not enabled", f"Add the line: spark.sql.extensions {EXTENSIONS}"
        )
    for name in catalogs:
        prefix = f"{_SPARK_CATALOG}{name}."
        catalog_conf = {key.removeprefix(prefix): value for key, value in properties.items() if key.startswith(prefix)}
        yield from _check_rest(
            f"{subject}, catalog {name}",
            catalog_conf,
            type_key="type",
            uri_key="uri",
            prefix=prefix,
            separator=" ",
            url=url,
        )
        if catalog_conf.get("cache-enabled", "true") != "false":
            fix = f"Add the line: {prefix}cache-enabled false"
            yield CheckResult(f"{subject}, catalog {name}", "Spark caches tables and misses commits of others", fix)


def _check_runtime(subject: str, setup: SparkSetup) -> Iterator[CheckResult]:
    property_values = [
        value for key, value in setup.properties.items() if key.startswith("spark.jars") or "ClassPath" in key
    ]
    versions = {match[1] for text in (*property_values, *setup.jars) for match in RUNTIME_NAME.finditer(text)}
    # The name of the jar has the major and the minor version of Spark.
    spark_version = ".".join(setup.version.split(".")[:2])
    if not versions:
        fix = f"Add the line: spark.jars.packages {RUNTIME}"
        if setup.jars:
            yield CheckResult(subject, "Iceberg's jar is not on its class path", fix, is_fault=True)
        else:
            yield CheckResult(
                subject, "the file names no Iceberg jar", f"{fix}, unless the jar is in Spark's folder jars"
            )
    elif spark_version and spark_version not in versions:
        fix = (
            f"Use iceberg-spark-runtime-{spark_version}_…, if Iceberg has one for this Spark, or Spark {min(versions)}"
        )
        text = f"Spark has the version {spark_version}, and Iceberg's jar is for Spark {', '.join(sorted(versions))}"
        yield CheckResult(subject, text, fix, is_fault=True)


def check_trino(path: Path, url: str | None) -> Iterator[CheckResult]:
    """Check a catalog file of Trino, `etc/catalog/NAME.properties`."""
    subject, properties = f"Trino, {path}", read_properties(path)
    if properties.get("connector.name") != "iceberg":
        text = f"connector.name is {properties.get('connector.name', 'missing')}"
        yield CheckResult(subject, text, "Set connector.name=iceberg", is_fault=True)
    yield from _check_rest(
        subject,
        properties,
        type_key="iceberg.catalog.type",
        uri_key="iceberg.rest-catalog.uri",
        prefix="",
        separator="=",
        url=url,
    )
    file_systems = [
        key for key in properties if re.fullmatch(r"fs\.[a-z0-9-]+\.enabled", key) and properties[key] == "true"
    ]
    if not file_systems:
        fix = (
            "Add fs.native-local.enabled=true and local.location=/ for local files, or fs.native-s3.enabled=true for S3"
        )
        yield CheckResult(subject, "no file system is enabled, so Trino cannot read data files", fix, is_fault=True)
    if "fs.native-local.enabled" in file_systems and properties.get("local.location") != "/":
        yield CheckResult(
            subject,
            "local.location is not /, so absolute paths of data files are not found",
            "Set local.location=/",
            True,
        )


def _check_rest(
    subject: str,
    catalog_conf: Mapping[str, str],
    *,
    type_key: str,
    uri_key: str,
    prefix: str,
    separator: str,
    url: str | None,
) -> Iterator[CheckResult]:
    """Check that a catalog has type `rest` and the server's address.

    Args:
        prefix: The text before each key in the configuration file.
        separator: The text between a key and its value in the file.
    """
    if catalog_conf.get(type_key) != "rest":
        text = f"{prefix}{type_key} is {catalog_conf.get(type_key, 'missing')}"
        yield CheckResult(subject, text, f"Set {prefix}{type_key}{separator}rest", is_fault=True)
    uri = catalog_conf.get(uri_key, "").rstrip("/")
    if not uri:
        value = url or "http://127.0.0.1:8181"
        yield CheckResult(
            subject, f"{prefix}{uri_key} is missing", f"Set {prefix}{uri_key}{separator}{value}", is_fault=True
        )
    elif uri.endswith("/v1"):
        fix = f"Set {prefix}{uri_key}{separator}{uri.removesuffix('/v1')}"
        yield CheckResult(subject, f"{uri} ends in /v1, which engines append themselves", fix, is_fault=True)
    elif url is not None and "${" not in uri and uri != url.rstrip("/"):
        fix = f"Set {prefix}{uri_key}{separator}{url}, unless another server is meant"
        yield CheckResult(subject, f"{uri} is not the address of this server, which is {url}", fix)
    else:
        yield CheckResult(subject, f"connects to {uri}")
