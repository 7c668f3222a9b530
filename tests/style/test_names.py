"""Rules for names: public class names are unique, and names are terms of the field.

The rules are checked on the syntax trees of the packages that follow the glossary.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PACKAGES = [REPO / "commands", REPO / "metaserver", REPO / "connector", REPO / "formats", REPO / "cache"]
"""The packages in each of which a public class name is defined only once."""
FILES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))
COINED = re.compile(
    r"is_beyond_us|has_cold_door|_chilling|suspect_soon|in_vain|fate|told|untold|unsaid|afar|asked_by_java|marks_of"
    r"|wanted_of|begun|builts|patience_s|left_alone|unheld|in_doubt|holding|anew|allow_anew|nobody"
)
"""Names of functions, classes, parameters and variables that no engine, specification or database uses."""


def list_public_classes(source: str) -> Iterator[str]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def find_repeated_classes(sources: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the public class names that several files define, with these files.

    `sources` has pairs of file and source.
    """
    files: defaultdict[str, list[str]] = defaultdict(list)
    for file, source in sources:
        for name in list_public_classes(source):
            files[name].append(file)
    return {name: actual_file for name, actual_file in files.items() if len(actual_file) > 1}


def list_names(source: str) -> Iterator[str]:
    """Yield the names that `source` defines or binds."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.relative_to(REPO).as_posix())
def test_public_class_name_is_defined_once_in_a_package(package: Path) -> None:
    paths = sorted(package.rglob("*.py"))
    assert paths
    assert find_repeated_classes((str(path), path.read_text(encoding="utf-8")) for path in paths) == {}


def test_names_are_terms_of_the_field() -> None:
    assert FILES
    coined = [
        f"{path.relative_to(REPO)}: {name}"
        for path in FILES
        for name in list_names(path.read_text(encoding="utf-8"))
        if COINED.fullmatch(name)
    ]
    assert coined == [], "use the terms of docs/glossary.md"


def test_checks_find_a_repeated_class_and_a_coined_name() -> None:
    text, other = (
        "class Part: ...\nclass _Part: ...",
        "def f(told):\n    class _Part: ...\n    afar = told\nclass Part: ...",
    )
    assert find_repeated_classes([("a.py", text), ("b.py", other)]) == {"Part": ["a.py", "b.py"]}
    assert {name for name in list_names(other) if COINED.fullmatch(name)} == {"told", "afar"}
