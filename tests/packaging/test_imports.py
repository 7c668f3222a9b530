"""Tests that each part of the package imports only the libraries of its extra, and only when they are used."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import distribution
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]

DEMO_COMMANDS = ("seamark.commands.demo",)
SQL_COMMANDS = ("seamark.commands.sql",)
MOVE_COMMANDS = ("seamark.commands.moving",)
PARTS = {
    "client": ((), ("seamark", "seamark.connector", "seamark.formats", "seamark.cache.memory")),
    "spark": (("spark",), ("seamark.spark", "seamark.connector.spark")),
    "trino": (("trino",), ("seamark.connector.trino", "seamark.connector.analysis", "seamark.formats.runtime")),
    "duckdb": (
        ("duckdb",),
        (
            "seamark.duckdb",
            "seamark.connector.duckdb",
            "seamark.connector.cubes",
            "seamark.connector.sql",
            *SQL_COMMANDS,
        ),
    ),
    "server": (("server", "otel"), ("seamark.commands", "seamark.metaserver", "seamark.formats", "seamark.cache")),
    "demo": (("server", "demo"), DEMO_COMMANDS),
    "moving": (("moving",), ("seamark.connector.moving", *MOVE_COMMANDS)),
}
"""By part: the extras that it needs, and the packages whose modules can all be imported with them."""
MODULES_OF_EXTRAS = (
    "seamark.connector.analysis",
    "seamark.connector.cubes",
    "seamark.connector.duckdb",
    "seamark.connector.moving",
    "seamark.connector.spark",
    "seamark.connector.trino",
    "seamark.connector.plans",
    "seamark.connector.sql",
    "seamark.formats.runtime.connections",
    "seamark.formats.runtime.protocol_errors",
)
"""Modules of the client's packages that need the libraries of an extra."""
OTHER_COMMANDS = ("seamark.commands.trino_proxy", *DEMO_COMMANDS, *SQL_COMMANDS, *MOVE_COMMANDS)
"""Commands that need the libraries of other extras than that of the server."""

# The script hides the modules HIDDEN from imports, and imports the modules NAMES.
IMPORT_ALL = """
import importlib, sys
from importlib.machinery import PathFinder

class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Installed
for name in NAMES:
    importlib.import_module(name)
"""


def list_requirements(lines: list[str]) -> Iterator[str]:
    """Yield the names of the distributions, without their versions and extras."""
    for line in lines:
        yield re.split(r"[\s<>=!~;\[]", line, maxsplit=1)[0]


def compute_closure(names: Iterator[str]) -> set[str]:
    """Return the normalised names of these distributions and of all their installed requirements."""
    pending_names, closure = list(names), set()
    while pending_names:
        name = re.sub(r"[-_.]+", "-", pending_names.pop()).lower()
        if name in closure:
            continue
        closure.add(name)
        requirement_lines = [line for line in distribution(name).requires or () if "extra ==" not in line]
        pending_names += [
            required_name for required_name in list_requirements(requirement_lines) if is_installed(required_name)
        ]
    return closure


def is_installed(name: str) -> bool:
    try:
        distribution(name)
    except ModuleNotFoundError:
        return False
    return True


def list_top_modules(names: set[str]) -> set[str]:
    """Return the modules that these distributions put on the path."""
    return {
        path.parts[0].removesuffix(".py").partition(".")[0]
        for name in names
        for path in distribution(name).files or ()
        if path.suffix in (".py", ".so") and not path.parts[0].startswith(("..", "__"))
    }


def list_project_libraries() -> set[str]:
    """Return the installed libraries that the project requires, and those that they require."""
    requirements = [*PROJECT["dependencies"], *(line for lines in EXTRAS.values() for line in lines)]
    return compute_closure(name for name in list_requirements(requirements) if is_installed(name))


def list_modules_below(package: str) -> Iterator[str]:
    folder = REPO.joinpath(*package.split("."))
    if not folder.is_dir():
        yield package
        return
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(REPO).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def list_part_modules(part: str) -> list[str]:
    _, packages = PARTS[part]
    module_names = []
    for package in packages:
        package_modules = [package] if package == "seamark" else list_modules_below(package)
        for name in package_modules:
            if part == "client" and name.startswith(MODULES_OF_EXTRAS):
                continue
            if part == "server" and name.startswith(OTHER_COMMANDS):
                continue
            module_names.append(name)
    return module_names


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=[] if part in ("client", "server") else pytest.mark.slow) for part in PARTS]
)
def test_each_part_can_be_imported_with_only_the_libraries_of_its_extra(part: str) -> None:
    extras, _ = PARTS[part]
    requirements = [*PROJECT["dependencies"], *(line for extra in extras for line in EXTRAS[extra])]
    allowed_names = compute_closure(list_requirements(requirements))
    hidden_modules = list_top_modules(list_project_libraries()) - list_top_modules(allowed_names)
    assert hidden_modules
    script = f"HIDDEN = {sorted(hidden_modules)!r}\nNAMES = {list_part_modules(part)!r}\n{IMPORT_ALL}"
    result = subprocess.run([sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.parametrize(
    ("imported_module", "absent_modules"),
    [
        ("seamark", ("pyarrow", "numpy", "aiohttp", "pyspark", "sqlglot", "seamark.connector")),
        ("seamark.spark", ("pyspark", "aiohttp", "sqlglot")),
        ("seamark.commands.main", ("pyarrow", "numpy", "aiohttp", "rich", "seamark.metaserver.server")),
    ],
)
def test_import_is_delayed_until_the_first_use(imported_module: str, absent_modules: tuple[str, ...]) -> None:
    script = f"import sys, {imported_module}; print([name for name in {absent_modules!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("imported_module", ["seamark", "seamark.spark", "seamark.duckdb"])
def test_interpreter_completes_all_names(imported_module: str) -> None:
    module = import_module(imported_module)
    assert len(module.__all__) > 3
    assert dir(module) == sorted(module.__all__)


def test_help_imports_no_command() -> None:
    script = (
        "import sys; from click.testing import CliRunner; from seamark.commands.main import cli;"
        "assert 'trino-proxy' in CliRunner().invoke(cli, ['--help']).output; print(*sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True, check=True)
    assert set(result.stdout.split()).isdisjoint({"aiohttp", "numpy", "pyarrow", "rich", "importlib.metadata"})


def test_client_never_imports_the_server() -> None:
    """The client imports the server neither directly nor through another module.

    `seamark` names everything that a user imports from it.
    """
    script = "import sys, seamark; [getattr(seamark, name) for name in seamark.__all__]; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True, check=True)
    subpackages = {name.split(".")[1] for name in result.stdout.split() if name.startswith("seamark.")}
    assert subpackages >= {"connector", "formats"}
    assert subpackages.isdisjoint({"commands", "metaserver"})


@pytest.mark.parametrize(
    ("package", "other_packages"),
    [
        ("metaserver", "commands|connector"),
        ("connector", "commands|metaserver"),
        ("formats", "commands|connector|metaserver"),
    ],
)
def test_no_string_names_a_module_that_import_linter_forbids(package: str, other_packages: str) -> None:
    """import-linter detects neither a lazy import by name nor a module that a process runs."""
    pattern = re.compile(rf"\bseamark\.(?:{other_packages})\.")
    files = sorted((REPO / package).rglob("*.py"))
    assert files
    assert [str(path) for path in files if pattern.search(path.read_text())] == []


def test_no_file_imports_our_modules_without_the_package_seamark() -> None:
    """In a checkout, an import such as `import metaserver` would make a second copy of each class."""
    packages = "commands|metaserver|connector|formats|cache"
    bare_import = re.compile(rf"^\s*(?:from|import|cimport) (?:{packages})(?:\.| import|$)", re.MULTILINE)
    files = [
        path
        for folder in ("commands", "metaserver", "connector", "formats", "cache", "tests", "bench", "docs")
        for path in (REPO / folder).rglob("*")
        if path.suffix in (".py", ".pyx", ".pxd", ".pyi", ".md")
    ]
    assert len(files) > 500
    assert [str(path) for path in files if bare_import.search(path.read_text())] == []


@pytest.mark.parametrize("package", ["commands", "metaserver", "connector", "formats", "cache"])
def test_error_of_an_import_without_seamark_names_the_right_import(package: str) -> None:
    command = [sys.executable, "-c", f"import {package}"]
    result = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    sentence = f"ImportError: The package is named seamark.{package}, not {package}; import seamark.{package}"
    assert result.stderr.strip().endswith(sentence)
