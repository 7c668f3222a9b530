"""Rules of style that are checked on the syntax trees of the packages, so that no reader has to check them."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from seamark.formats.runtime import errors

REPO = Path(__file__).resolve().parents[2]
PACKAGES = ("commands", "metaserver", "connector", "formats", "cache")
FILES = sorted(path.relative_to(REPO) for package in PACKAGES for path in (REPO / package).rglob("*.py"))

WALL_CLOCK = {"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns"}
CLOCK_OWNERS = {"formats/runtime/clock.py"}
"""The only files that may read the clock or draw random numbers; other files receive a `Clock`."""
TYPES_OWNER = "formats/runtime/decoding.py"
"""The only file in which msgspec examines types, because this requires a lock."""
LINES_PER_MODULE_MAX, MODULES_PER_FOLDER_MAX = 700, 20
CLIENT_PACKAGES = ("connector/",)
"""Packages that run outside the server, where there is no `Clock`."""


def find_breaches(source: str, file: str) -> Iterator[str]:
    """Yield every violation of a rule in `source`, with its line."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        where = f"{file}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"{where}: a bare except also catches KeyboardInterrupt: name the exceptions"
        if _is_orphan_task(node):
            yield f"{where}: no variable keeps the task, so Python may delete it early and report no failure"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Import | ast.ImportFrom):
                    yield f"{file}:{inner.lineno}: an import inside a function hides a cycle: remove the cycle"
        if file != TYPES_OWNER and isinstance(node, ast.Call) and _is_type_examination(node):
            yield f"{where}: a type is examined without a lock: use convert_json, convert_msgpack or convert_values"
        if file not in CLOCK_OWNERS and not file.startswith(CLIENT_PACKAGES):
            if isinstance(node, ast.Import) and any(alias.name in ("random", "secrets") for alias in node.names):
                yield f"{where}: randomness comes from the Clock, so that a simulation replays"
            if isinstance(node, ast.ImportFrom) and node.module in ("time", "random", "secrets"):
                yield f"{where}: time and randomness come from the Clock"
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and (node.value.id, node.attr) in {("time", name) for name in WALL_CLOCK}
            ):
                yield f"{where}: time comes from the Clock, not from time.{node.attr}"
            if isinstance(node, ast.Attribute) and node.attr in ("utcnow", "now") and _is_datetime(node.value):
                yield f"{where}: time comes from the Clock, not from datetime.{node.attr}"
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "uuid"
                and node.attr in ("uuid1", "uuid4", "uuid7")
            ):
                yield f"{where}: UUIDs come from the Clock"


def _is_orphan_task(node: ast.AST) -> bool:
    """Return True if a statement starts a task without keeping a reference to it; a task group keeps its tasks."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return False
    called_function = node.value.func
    if isinstance(called_function, ast.Name):
        return called_function.id in ("create_task", "ensure_future")
    if not (isinstance(called_function, ast.Attribute) and called_function.attr in ("create_task", "ensure_future")):
        return False
    # A call is probably `asyncio.get_running_loop()`, so its result counts as a loop.
    return isinstance(called_function.value, ast.Name | ast.Call) and _describe_owner(called_function.value) in (
        "asyncio",
        "loop",
        "call",
    )


def _is_type_examination(call: ast.Call) -> bool:
    """Return True if msgspec examines a type in the call.

    Two threads that examine a struct concurrently crash the process.
    """
    called_name = ast.unparse(call.func)
    if called_name in ("msgspec.json.decode", "msgspec.msgpack.decode"):
        return len(call.args) > 1 or bool(call.keywords)
    return called_name.startswith("msgspec.") and called_name.rpartition(".")[2] in ("Decoder", "convert")


def _describe_owner(node: ast.expr) -> str:
    """Return the name that the node is, or `call` for other nodes, such as `asyncio.get_running_loop()`."""
    return node.id if isinstance(node, ast.Name) else "call"


def _is_datetime(node: ast.expr) -> bool:
    return (isinstance(node, ast.Name) and node.id == "datetime") or (
        isinstance(node, ast.Attribute) and node.attr == "datetime"
    )


def test_modules_follow_the_rules() -> None:
    assert FILES
    assert [breach for file in FILES for breach in find_breaches((REPO / file).read_text(), str(file))] == []


@pytest.mark.parametrize(
    "breach",
    [
        "import time\nx = time.time()",
        "import time\nx = time.monotonic()",
        "from time import time_ns",
        "import random",
        "from random import choice",
        "import secrets",
        "try:\n    pass\nexcept:\n    pass",
        "import asyncio\nasyncio.create_task(f())",
        "import asyncio\nasyncio.get_running_loop().create_task(f())",
        "loop.create_task(f())",
        "def f():\n    import json",
        "async def f():\n    from a import b",
        "import datetime\nx = datetime.datetime.now()",
        "import uuid\nx = uuid.uuid4()",
        "x = msgspec.json.decode(data, type=Point)",
        "x = msgspec.msgpack.Decoder(Point)",
        "x = msgspec.convert(value, Point)",
    ],
)
def test_each_rule_detects_its_violation(breach: str) -> None:
    assert len(list(find_breaches(breach, "metaserver/x.py"))) >= 1


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.sleep(1)",
        "x = msgspec.json.decode(data)",
        "task = asyncio.create_task(f())",
        "async def f():\n    group.create_task(g())",
    ],
)
def test_rules_accept_correct_code(source: str) -> None:
    assert list(find_breaches(source, "metaserver/x.py")) == []


def parse_error_tree(text: str) -> dict[str, str]:
    """Return the base of each class in the tree that the docstring shows; the base of the root is Exception."""
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in text.splitlines():
        match = re.match(r"^ {4}((?:│   |    )*)(?:[├└]── )?([A-Z]\w+)", line)
        if match is None:
            continue
        branch = "── " in line.split(match[2])[0]
        depth = len(match[1]) // 4 + (1 if branch else 0)
        path[depth:] = [match[2]]
        parents[match[2]] = path[depth - 1] if depth else "Exception"
    return parents


def list_error_bases() -> dict[str, str]:
    """Return the name of the base of each class of errors, by the name of the class."""
    error_classes = [item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, Exception)]
    return {error_class.__name__: error_class.__bases__[0].__name__ for error_class in error_classes}


def test_no_module_has_more_than_700_lines() -> None:
    lengths = {str(file): len((REPO / file).read_text().splitlines()) for file in FILES}
    assert {file: length for file, length in lengths.items() if length > LINES_PER_MODULE_MAX} == {}


@pytest.mark.parametrize("package", [*PACKAGES, "bench", "tests"])
def test_no_folder_has_more_than_20_modules(package: str) -> None:
    counts = Counter(path.parent for path in (REPO / package).rglob("*.py") if path.name != "__init__.py")
    assert {str(folder): count for folder, count in counts.items() if count > MODULES_PER_FOLDER_MAX} == {}


def test_tree_drawn_in_the_errors_module_matches_the_classes() -> None:
    assert errors.__doc__ is not None
    assert parse_error_tree(errors.__doc__) == list_error_bases()


def test_no_two_errors_share_a_kind() -> None:
    kinds = [
        error_class.kind
        for error_class in vars(errors).values()
        if isinstance(error_class, type)
        and issubclass(error_class, errors.SeamarkError)
        and error_class is not errors.SeamarkError
    ]
    shared_kinds = {kind for kind in kinds if kinds.count(kind) > 1}
    assert shared_kinds == set()
