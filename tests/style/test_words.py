"""Documents, settings, routes and commands use no word of `banned_words.txt`."""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator
from dataclasses import fields

import click
import pytest

from seamark.commands.main import cli
from seamark.metaserver.settings.settings import Settings
from tests.api.bad_inputs import BAD_INPUTS
from tests.docs.commands import list_subcommands
from tests.docs.pages import REPO, Page, read_all_pages
from tests.style.words import BANNED_WORDS, find_banned, read_rules

RULES = read_rules(BANNED_WORDS.read_text())
PAGES_WITH_MESSAGES = {"bad-inputs.md"}
"""Pages that quote messages of the server; other tests check the words of these messages and of the titles."""
PAGES = [page for page in read_all_pages() if page.path.name not in PAGES_WITH_MESSAGES]
_FENCED_BLOCK = re.compile(r"^\s*```\w*\s*$.*?^\s*```\s*$", re.MULTILINE | re.DOTALL)
_OUTSIDE_DOCUMENT = re.compile(r"\b(?:DESIGN|FIELD|FEATURES|STYLE)\.md\b|\bissue [0-9]")


def _read_prose(page: Page) -> str:
    """Return the text outside of fenced blocks, with the same line numbers."""
    return _FENCED_BLOCK.sub(lambda block: "\n" * block[0].count("\n"), page.text)


def _list_summaries(node: object) -> Iterator[str]:
    """Yield every summary of an operation in an OpenAPI document."""
    if isinstance(node, dict):
        if isinstance(summary := node.get("summary"), str):
            yield summary
        for value in node.values():
            yield from _list_summaries(value)


def _list_help(command: click.Command) -> Iterator[str]:
    yield command.help or ""
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            yield parameter.help or ""
    for subcommand in list_subcommands(command).values():
        yield from _list_help(subcommand)


def test_pages_use_no_banned_word() -> None:
    assert PAGES
    assert [(str(page), banned_texts) for page in PAGES for banned_texts in find_banned(_read_prose(page), RULES)] == []


def test_pages_refer_to_no_document_outside_of_the_repository() -> None:
    assert [(str(page), match) for page in PAGES for match in _OUTSIDE_DOCUMENT.findall(page.text)] == []


def test_settings_use_no_banned_word() -> None:
    texts = [field.metadata["description"] for field in fields(Settings)]
    assert len(texts) > 50
    assert list(find_banned("\n\n".join(texts), RULES)) == []


def test_summaries_of_routes_use_no_banned_word() -> None:
    openapi = json.loads((REPO / "docs" / "reference" / "openapi.json").read_text())
    texts = list(_list_summaries(openapi["paths"]))
    assert len(texts) > 30
    assert list(find_banned("\n\n".join(texts), RULES)) == []


def test_help_of_commands_uses_no_banned_word() -> None:
    texts = list(_list_help(cli))
    assert len(texts) > 100
    assert list(find_banned("\n\n".join(texts), RULES)) == []


def test_titles_of_bad_inputs_use_no_banned_word() -> None:
    titles = [text for bad_input in BAD_INPUTS for text in (bad_input.group, bad_input.case)]
    assert len(titles) > 400
    assert list(find_banned("\n\n".join(titles), RULES)) == []


def _list_statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements below `node`, without their expressions, which are most of a tree."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child
            yield from _list_statements(child)


def _list_raised_texts(source: str) -> Iterator[str]:
    """Yield the string literals of the raise statements. A value in an f-string becomes `…`."""
    for statement in _list_statements(ast.parse(source)):
        if not isinstance(statement, ast.Raise) or statement.exc is None:
            continue
        f_string_part_ids = {
            id(part) for node in ast.walk(statement.exc) if isinstance(node, ast.JoinedStr) for part in node.values
        }
        for node in ast.walk(statement.exc):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in f_string_part_ids:
                yield node.value


def test_error_messages_use_no_banned_word() -> None:
    actual = {}
    for package in ("commands", "metaserver", "connector", "formats", "cache"):
        for path in sorted((REPO / package).rglob("*.py")):
            texts = list(_list_raised_texts(path.read_text()))
            if hits := list(find_banned("\n\n".join(texts), RULES)):
                actual[str(path.relative_to(REPO))] = hits
    assert actual == {}


CHECKED_PACKAGES = ("commands", "metaserver", "connector", "formats", "cache", "seamark", "bench")
"""Packages whose docstrings and comments use no banned word."""
_DOCSTRING_START = re.compile(r'\s*[rR]?"""')


def _list_comments(source: str) -> Iterator[str]:
    """Yield the docstrings and comments of Python and Cython, which have the same tokens."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and _DOCSTRING_START.match(token.line)):
            yield token.string


@pytest.mark.parametrize("package", CHECKED_PACKAGES)
def test_docstrings_and_comments_use_no_banned_word(package: str) -> None:
    actual = {}
    for path in sorted(path for path in (REPO / package).rglob("*") if path.suffix in (".py", ".pyx", ".pxd")):
        if hits := list(find_banned("\n\n".join(_list_comments(path.read_text())), RULES)):
            actual[str(path.relative_to(REPO))] = hits
    assert actual == {}


def test_text_of_a_raise_statement_is_found() -> None:
    source = 'if x:\n    raise E(f"a {x}" " told", kind="b") from C("not this")\nnot_this = "c"\n'
    assert sorted(_list_raised_texts(source)) == ["a … told", "b"]


def test_banned_phrase_is_found_across_lines_but_not_in_code() -> None:
    rules = read_rules("# a comment\n\\bis told\\b\treceives\n")
    assert list(find_banned("a\nclient is\ntold", rules)) == ["2: 'is\\ntold': write receives"]
    assert list(find_banned("`is told` and [this](is told.md)", rules)) == ["1: 'is told': write receives"]
    assert list(find_banned("`is told` and [this](is-told.md)", rules)) == []


@pytest.mark.parametrize("line", [r"\bis told\b", "\\bis told\\b\t ", "\\bis told\\b receives"])
def test_rule_without_a_replacement_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="a tab and a replacement"):
        read_rules(line)
