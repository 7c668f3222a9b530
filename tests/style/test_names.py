"""Rules for names: public class names are unique, names are terms of the field, and names say what they hold or do.

The rules are checked on the syntax trees of the product, and of the tests and benches.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PRODUCT = ("commands", "metaserver", "connector", "formats", "cache", "deploy")
TESTS = ("tests", "bench")


def list_files(packages: Iterable[str]) -> list[Path]:
    return sorted(path for package in packages for path in (REPO / package).rglob("*.py"))


COINED = re.compile(
    r"is_beyond_us|has_cold_door|_chilling|suspect_soon|in_vain|fate|told|untold|unsaid|afar|asked_by_java|marks_of"
    r"|wanted_of|begun|builts|patience_s|left_alone|unheld|in_doubt|holding|anew|allow_anew|nobody"
)
"""Names of functions, classes, parameters and variables that no engine, specification or database uses."""
VAGUE = re.compile(r"_?(?:one|found|known|given|kept|others|made|who)")
"""Names of variables and parameters that do not say what they hold. Comprehensions of one line may use them."""
FUNCTION_WITHOUT_VERB = re.compile(r"_?(?:(?!all|any)[a-z0-9]+_)?of")
"""Names of functions that end with `of` after one word, such as `key_of`, and `of` itself.

`all_of` and `any_of` combine conditions. Class methods and static methods construct objects.
"""
BARE_LIMIT = re.compile(
    r"_?(?:BATCH|PAGE|PAGE_SIZE|LIMIT|DEFAULT_LIMIT|TRIES|ATTEMPTS|SAMPLES?|PARTS|PIECE|SHARES?|READERS|AT_ONCE|WORTH)"
)
"""Names of constants that do not say what they limit, or in which unit."""


def list_public_classes(source: str) -> Iterator[str]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def find_repeated_classes(sources: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the public class names that several files define, and these files.

    Args:
        sources: Pairs of a file and its source.
    """
    files: defaultdict[str, list[str]] = defaultdict(list)
    for file, source in sources:
        for name in list_public_classes(source):
            files[name].append(file)
    return {name: defining_files for name, defining_files in files.items() if len(defining_files) > 1}


def list_names(source: str) -> Iterator[str]:
    """Yield the names that `source` defines or binds."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def list_vague_names(source: str) -> Iterator[str]:
    """Yield the vague names that `source` binds outside of comprehensions of one line."""
    tree = ast.parse(source)
    in_comprehensions = {
        id(name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp)
        and node.lineno == node.end_lineno
        for name in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in in_comprehensions:
            name = node.id
        else:
            continue
        if VAGUE.fullmatch(name):
            yield f"{node.lineno}: {name}"


def list_functions_without_verb(source: str) -> Iterator[str]:
    """Yield the functions whose names have no verb, because they end with `of` after one word, such as `rows_of`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and FUNCTION_WITHOUT_VERB.fullmatch(node.name):
            decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
            if not decorators & {"staticmethod", "classmethod", "property", "cached_property"}:
                yield f"{node.lineno}: {node.name}"


def list_bare_limits(source: str) -> Iterator[str]:
    """Yield `line: name` for each constant of a module that has a literal, and whose name matches `BARE_LIMIT`."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and any(isinstance(part, ast.Constant) for part in ast.walk(node.value)):
            for target in node.targets:
                if isinstance(target, ast.Name) and BARE_LIMIT.fullmatch(target.id):
                    yield f"{node.lineno}: {target.id}"


def check_all(packages: Iterable[str], list_faults: Callable[[str], Iterable[str]]) -> list[str]:
    files = list_files(packages)
    assert files
    return [f"{path.relative_to(REPO)}:{fault}" for path in files for fault in list_faults(path.read_text("utf-8"))]


@pytest.mark.parametrize("packages", [PRODUCT, TESTS], ids=["product", "tests"])
def test_public_class_name_is_defined_once(packages: tuple[str, ...]) -> None:
    sources = [(str(path.relative_to(REPO)), path.read_text(encoding="utf-8")) for path in list_files(packages)]
    assert find_repeated_classes(sources) == {}


def test_names_are_terms_of_the_field() -> None:
    def list_coined_names(source: str) -> Iterator[str]:
        return (f" {name}" for name in list_names(source) if COINED.fullmatch(name))

    assert check_all(PRODUCT, list_coined_names) == [], "use the terms of docs/glossary.md"


@pytest.mark.parametrize("packages", [PRODUCT, TESTS], ids=["product", "tests"])
def test_names_of_variables_say_what_their_values_are(packages: tuple[str, ...]) -> None:
    assert check_all(packages, list_vague_names) == []


def test_functions_of_the_product_have_verbs() -> None:
    assert check_all(PRODUCT, list_functions_without_verb) == []


def test_names_of_constants_say_what_they_limit() -> None:
    assert check_all(PRODUCT, list_bare_limits) == []


def test_checks_find_a_repeated_class_and_a_coined_name() -> None:
    text, other = (
        "class Part: ...\nclass _Part: ...",
        "def f(told):\n    class _Part: ...\n    afar = told\nclass Part: ...",
    )
    assert find_repeated_classes([("a.py", text), ("b.py", other)]) == {"Part": ["a.py", "b.py"]}
    assert {name for name in list_names(other) if COINED.fullmatch(name)} == {"told", "afar"}


def test_checks_find_a_vague_variable_and_a_function_without_a_verb() -> None:
    text = (
        "def key_of(given):\n    return [one for one in given]\n"
        "class Rows:\n    @staticmethod\n    def of(kept): ...\n    def of_rows(self): ...\n    def of(self): ..."
    )
    assert list(list_vague_names(text)) == ["1: given", "5: kept"]
    assert list(list_functions_without_verb(text)) == ["1: key_of", "7: of"]
    assert list(list_bare_limits("_BATCH = 100\nEVENTS_PER_BATCH = 100")) == ["1: _BATCH"]
