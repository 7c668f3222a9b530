"""Check the installed software: Python, the compiled kernels, the libraries of extras, and Iceberg's jar for Spark."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from seamark.commands.installation.engine_files import RUNTIME_NAME, CheckResult
from seamark.connector.client.engines import RUNTIME

KERNELS = ("index.kernels._scan", "index.kernels._bloom", "iceberg.manifests._manifest")
EXTRAS = {
    "server": ("aiohttp", "obstore", "asyncpg", "fastavro", "diskcache"),
    "spark": ("pyspark", "pandas"),
    "trino": ("aiohttp", "trino"),
    "duckdb": ("aiohttp", "duckdb", "duckdb_extension_iceberg"),
}
INSTALLERS = {
    "apt-get": "apt-get install gcc libc6-dev python3-dev",
    "dnf": "dnf install gcc python3-devel",
    "zypper": "zypper install gcc python3-devel",
}
"""The command that installs a C compiler with Python's headers, by the name of the system's package manager.

setup.py has the same list.
"""


def check_installation() -> Iterator[CheckResult]:
    """Check Python, the compiled kernels, the extras, and Iceberg's jar for Spark."""
    major_minor_micro = sys.version_info[:3]
    version = ".".join(map(str, major_minor_micro))
    is_too_old = sys.version_info < (3, 11)
    yield CheckResult("Python", version, "Install Python 3.11 or newer" if is_too_old else "", is_fault=is_too_old)
    missing_kernels = [name for name in KERNELS if importlib.util.find_spec(f"seamark.formats.{name}") is None]
    if missing_kernels:
        compiler_step = "" if shutil.which("cc") else f"{_choose_compiler_command()}, then "
        yield CheckResult(
            "compiled kernels", f"{missing_kernels[0]} is missing", f"Run: {compiler_step}make venv", is_fault=True
        )
    else:
        yield CheckResult("compiled kernels", "present")
    for extra in EXTRAS:
        missing_modules = list_missing_modules(extra)
        text = f"lacks {', '.join(missing_modules)}" if missing_modules else "installed"
        fix = f"To use it, run: pip install 'seamark[{extra}]'" if missing_modules else ""
        yield CheckResult(f"extra {extra}", text, fix)
    yield from _check_iceberg_jar()


def list_missing_modules(extra: str) -> list[str]:
    """Return the libraries of an extra that are not installed."""
    return [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]


def _choose_compiler_command() -> str:
    return next((command for program, command in INSTALLERS.items() if shutil.which(program)), "install a C compiler")


def _check_iceberg_jar() -> Iterator[CheckResult]:
    """Check that PySpark finds Iceberg's jar without a download, and that their versions match.

    If PySpark is not installed, there is nothing to check.
    """
    try:
        spark_version = ".".join(metadata.version("pyspark").split(".")[:2])
    except metadata.PackageNotFoundError:
        return
    jars = sorted(jar for folder in _list_jar_folders() for jar in folder.glob("*iceberg-spark-runtime-*.jar"))
    matching_jars = [
        jar for jar in jars if (match := RUNTIME_NAME.search(jar.name)) is not None and match[1] == spark_version
    ]
    if matching_jars:
        yield CheckResult("Iceberg's jar", str(matching_jars[-1]))
    elif jars:
        fix = f"Iceberg's jar must be for Spark {spark_version}; Seamark is tested with: pip install 'seamark[spark]'"
        yield CheckResult("Iceberg's jar", f"{jars[-1].name} is not for Spark {spark_version}", fix)
    else:
        fix = f"Spark downloads it from Maven Central by --packages {RUNTIME}; in a checkout: make jars"
        yield CheckResult("Iceberg's jar", "the jar is not on this machine", fix)


def _list_jar_folders() -> Iterator[Path]:
    """Yield the folders that can contain jars: of Spark, of a checkout, and of Ivy and Maven, in which --packages looks
    before it downloads.
    """
    spec = importlib.util.find_spec("pyspark")
    if spec is not None and spec.origin is not None:
        yield Path(spec.origin).parent / "jars"
    if home := os.environ.get("SPARK_HOME"):
        yield Path(home) / "jars"
    yield Path(".cache", "jars")
    yield from (folder / "jars" for folder in Path.home().glob(".ivy2*"))
    yield from Path.home().glob(".m2/repository/org/apache/iceberg/iceberg-spark-runtime-*/*")
