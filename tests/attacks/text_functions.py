"""Measure each function of the packages that takes only text, on long hostile texts.

As a module it prints each function whose time grows faster than its text. The functions are found in the syntax trees,
so a new function needs no entry here. An exception counts as an answer.
"""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import GeneratorType
from typing import Any

from seamark.formats.iceberg.expressions.sql import parse_sql
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.protocol.wire import encode_json
from seamark.formats.runtime.decoding import convert_json
from tests.attacks.patterns import PACKAGES, REPO, generate_by_size, measure_excessive_growth, shorten_text
from tests.attacks.world import SCHEMA

NOT_CALLED = (
    "cache/disk.py",
    "connector/client/storage.py",
    "connector/duckdb/session.py",
    "connector/spark/",
    "connector/trino/server.py",
    "commands/",
    "metaserver/objects/local.py",
    "metaserver/settings/settings",
    "metaserver/store/",
)
"""Files and folders with functions that open files or connections, take texts of the operator, or need Spark."""
_VALUES: dict[str, Any] = {"int": 1, "bool": False, "float": 1.0, "str | None": None}
TEXT_CHARACTERS = 6_000
# fmt: off
_REPEATED_TEXTS = (
    *("1", "a", "A", " ", "\n", "\0", "\\", "/", ".", ",", ";", ":", "=", "&", "%", "+", "-", "_", "@", "#", "?", "$"),
    *("'", '"', "`", "(", "[", "{", "<", ")", "]", "}", "''", '""', "é", "\u0300\u0316", "\u0f73", "\ufdfa", "\u0130"),
    *("--", "/*", "*/", "//", "../", "%25", "%2F", "a.", "a,", "1,", "a=", "a=1,", "a=1&", "\\.", "1.", "1e", "0x"),
    *("NOT ", "a AND ", "a OR ", "a=1 OR ", "CASE ", "ROW(", "SELECT ", "(SELECT ", "[0]", '{"a":', "a b ", "|| a "),
    *("WITH a AS (", "a, ", "1 + ", "- ", "a[", "f(", "CAST(", "a IN (", "BETWEEN ", "<a>", "&lt;", "a/", "x=1/"),
    *("EXPLAIN ", "EXECUTE a USING ", "a::b ", "a.b(", "TABLE t ", "UNION ", "JOIN t ", "(a, ", "VALUES (", ">", "IS "),
    *("a\n", "\x1f", "*", "x'", "1/0 "),
)
_PREFIXES_AND_SUFFIXES = (
    *(("", ""), ("", "!"), ("SELECT ", ""), ("a(", ")"), ('["', '"]'), ("'", "'")),
    ("SELECT * FROM t WHERE a IN (", "1)"),
)
# fmt: on


def list_functions() -> Iterator[tuple[str, Callable[[str], object]]]:
    """Yield (name, callable with one text) of each function whose required arguments are texts or plain values.

    The name contains the file and the line. The functions include the parser of predicates, which also needs a schema.
    """
    schema = convert_json(encode_json(SCHEMA), Schema)
    yield "parse_sql", _build_call(partial(parse_sql, schema=schema), ["str"], {})
    for package in PACKAGES:
        for path in sorted((REPO / package).rglob("*.py")):
            file = path.relative_to(REPO).as_posix()
            if file.startswith(NOT_CALLED) or file.endswith("__main__.py"):
                continue
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.FunctionDef) and (types := _list_types(node)) is not None:
                    module = importlib.import_module("seamark." + file.removesuffix(".py").replace("/", "."))
                    yield f"{file}:{node.lineno} {node.name}", _build_call(getattr(module, node.name), *types)


def _list_types(node: ast.FunctionDef) -> tuple[list[str], dict[str, str]] | None:
    """Return the types of the required arguments, by position and by name.

    Return None if no argument can receive a text (`str`, `bytes` or `object`), or if an argument has a type that is
    neither one of these nor a key of `_VALUES`.
    """
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    required_parameters = positional[: len(positional) - len(arguments.defaults)]
    named_arguments = [
        argument
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    ]
    types_by_name = {
        parameter.arg: ast.unparse(parameter.annotation) if parameter.annotation else ""
        for parameter in (*required_parameters, *named_arguments)
    }
    known_types = {"str", "bytes", "object", *_VALUES}
    if not {"str", "bytes", "object"} & set(types_by_name.values()) or not set(types_by_name.values()) <= known_types:
        return None
    return [types_by_name[parameter.arg] for parameter in required_parameters], {
        parameter.arg: types_by_name[parameter.arg] for parameter in named_arguments
    }


def _build_call(function: Any, positional_types: list[str], keyword_types: dict[str, str]) -> Callable[[str], object]:
    """Return a function that passes its text to the measured function, and returns the result.

    It returns the items of a generator as a list, and None after an exception.
    """
    plain_function = inspect.unwrap(function)  # Without the cache, because it would answer the second measurement.

    def choose_value(kind: str, text: str) -> Any:
        if kind == "bytes":
            return text.encode("utf-8", "surrogatepass")
        return text if kind in ("str", "object") else _VALUES[kind]

    def call(text: str) -> object:
        with suppress(Exception):
            answer = plain_function(
                *(choose_value(kind, text) for kind in positional_types),
                **{name: choose_value(kind, text) for name, kind in keyword_types.items()},
            )
            if isinstance(answer, GeneratorType):
                return list(answer)
            return answer
        return None

    return call


def build_hostile_texts(characters: int) -> Iterator[str]:
    """Yield long texts of repeated parts, in an order that does not depend on the length."""
    for prefix, suffix in _PREFIXES_AND_SUFFIXES:
        for part in _REPEATED_TEXTS:
            yield prefix + part * (characters // len(part)) + suffix


def find_superlinear_texts(function_name: str, call: Callable[[str], object]) -> Iterator[str]:
    """Yield a description of the first text for which the function needs more than linear time."""
    for texts in generate_by_size(build_hostile_texts, TEXT_CHARACTERS):
        growth = measure_excessive_growth(call, texts)
        if growth is not None:
            yield f"{function_name} on {shorten_text(texts)}: ×{growth:.1f}"
            return


def main() -> None:
    """Print each function whose time is not linear in its text, and the number of all functions."""
    count = 0
    gc.disable()  # A garbage collection in one of two measurements looks like growth.
    for function_name, call in list_functions():
        count += 1
        print(f"begins {function_name}", file=sys.stderr, flush=True)
        for fault in find_superlinear_texts(function_name, call):
            print(fault, flush=True)
    print(f"{count} functions")


if __name__ == "__main__":
    main()
