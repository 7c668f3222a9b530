"""The names in the `Args` and `Attributes` of docstrings exist in the functions and classes that they describe."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.style.test_names import PRODUCT, REPO, TESTS, list_files

_SECTION = re.compile(r"(\w+):")
_ITEM = re.compile(r" {4}\**(\w+):")
_BASES_WITHOUT_FIELDS = {"ABC", "Exception", "Generic", "NamedTuple", "Protocol", "Struct", "TypedDict"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def find_missing_names(source: str, file: str) -> Iterator[str]:
    """Yield each name in the `Args` or `Attributes` of a docstring that the function or class does not have.

    A class may have the fields of its bases. It is left out if a base is defined in another module.
    """
    if "Args:\n" not in source and "Attributes:\n" not in source:
        return  # Most modules need not be parsed.
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, Function | ast.ClassDef)]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    for node in nodes:
        docstring = ast.get_docstring(node)
        described_names = list(_list_described_names(docstring or ""))
        if not described_names:
            continue
        names = _list_class_names(node, classes) if isinstance(node, ast.ClassDef) else _list_parameters(node)
        for name in described_names:
            if names is not None and name not in names:
                yield f"{file}:{node.lineno}: {node.name} has no {name}"


def _list_described_names(docstring: str) -> Iterator[str]:
    section = ""
    for line in docstring.splitlines():
        if line and not line.startswith(" "):
            match = _SECTION.fullmatch(line)
            section = match[1] if match else ""
        elif section in ("Args", "Attributes") and (match := _ITEM.match(line)):
            yield match[1]


def _list_parameters(function: Function) -> set[str]:
    return {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}


def _list_class_names(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str] | None:
    """Return the fields, methods, attributes and parameters of a class, or None if a base is in another module."""
    names: set[str] = set()
    for base in node.bases:
        expression = base.value if isinstance(base, ast.Subscript) else base
        base_name = expression.attr if isinstance(expression, ast.Attribute) else ast.unparse(expression)
        if base_name in classes and base_name != node.name:
            base_names = _list_class_names(classes[base_name], classes)
            if base_names is None:
                return None
            names |= base_names
        elif base_name not in _BASES_WITHOUT_FIELDS:
            return None
    for item in node.body:
        if isinstance(item, ast.AnnAssign):
            names.add(ast.unparse(item.target))
        elif isinstance(item, ast.Assign):
            names |= {ast.unparse(target) for target in item.targets}
        elif isinstance(item, Function):
            names |= {item.name} | _list_parameters(item)
            names |= {
                inner.attr
                for inner in ast.walk(item)
                if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id == "self"
            }
    return names


@pytest.mark.parametrize("packages", [PRODUCT, TESTS])
def test_docstrings_describe_names_that_exist(packages: tuple[str, ...]) -> None:
    missing_names = [
        missing_name
        for path in list_files(packages)
        for missing_name in find_missing_names(path.read_text(), str(path.relative_to(REPO)))
    ]
    assert missing_names == []


_DOCSTRING = '"""Do it.\n\n{indent}{section}:\n{indent}    size: The size.\n{indent}"""'


def _write_docstring(section: str, indent: str = "    ") -> str:
    return _DOCSTRING.format(section=section, indent=indent)


@pytest.mark.parametrize(
    "source",
    [
        f"def f(length):\n    {_write_docstring('Args')}",
        f"async def f(*, length):\n    {_write_docstring('Args')}",
        f"class A:\n    {_write_docstring('Attributes')}\n    length: int",
        f"class A(NamedTuple):\n    {_write_docstring('Attributes')}\n    length: int",
        f"class B:\n    length: int\nclass A(B):\n    {_write_docstring('Attributes')}",
        f"class A:\n    {_write_docstring('Args')}\n    def __init__(self, length): self._size = length",
    ],
)
def test_name_that_does_not_exist_is_found(source: str) -> None:
    assert len(list(find_missing_names(source, "x.py"))) == 1


@pytest.mark.parametrize(
    "source",
    [
        f"def f(size):\n    {_write_docstring('Args')}",
        f"def f(*size):\n    {_write_docstring('Args')}",
        f"def f():\n    {_write_docstring('Raises')}",
        f"class A:\n    {_write_docstring('Attributes')}\n    size: int",
        f"class A:\n    {_write_docstring('Attributes')}\n    def __init__(self): self.size = 1",
        f"class A:\n    {_write_docstring('Args')}\n    def __init__(self, size): ...",
        f"class B:\n    size: int\nclass A(B):\n    {_write_docstring('Attributes')}",
        f"class A(other.B):\n    {_write_docstring('Attributes')}",
    ],
)
def test_existing_names_and_inherited_fields_are_accepted(source: str) -> None:
    assert list(find_missing_names(source, "x.py")) == []
