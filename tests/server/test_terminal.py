"""Tests that names of tables in the output of commands cannot control the user's terminal."""

from __future__ import annotations

import asyncio
import io
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.table import Table

from seamark.commands import explain, terminal
from tests.api.client import Api
from tests.server.rig import run_server

HOSTILE_TEXTS = {
    "clears the screen": "a\x1b[2Jb",
    "writes to the clipboard": "a\x1b]52;c;ZXZpbA==\x07b",
    "one character of C1": "a\x9b31mb",
    "overwrites the shown text": "safe\rb",
    "erases the shown text": "a\x08\x7fb",
    "reverses the text": "a\u202eb\u2066",
    "half a character": "a\ud800b",
}


@pytest.mark.parametrize("text", HOSTILE_TEXTS.values(), ids=HOSTILE_TEXTS)
def test_control_characters_are_removed_from_shown_text(text: str) -> None:
    escaped_text = terminal.escape_for_terminal(text)
    assert all(character.isprintable() for character in escaped_text), escaped_text
    assert "\\" in escaped_text


@pytest.mark.parametrize(
    "text", ["plain", "Übergröße", "日本語", "two\nlines\tand a tab", "", "\\x1b as it is written"]
)
def test_ordinary_text_is_shown_unchanged(text: str) -> None:
    assert terminal.escape_for_terminal(text) == text


def test_noun_and_verb_agree_with_their_count() -> None:
    counts = [terminal.show_count(count, "data file") for count in (0, 1, 1000)]
    assert counts == ["0 data files", "1 data file", "1,000 data files"]
    assert [terminal.show_count(count, "part", "were") for count in (1, 2)] == ["1 part was", "2 parts were"]


_PLURAL = re.compile(
    r"\{[^{}\"]*:,\} (?:[a-z]+ )?(?:files|tables|rows|days|columns|snapshots|manifests|partitions|keys)\b"
)


def test_commands_print_counts_by_show_count() -> None:
    """The commands use `show_count`, which chooses between "1 file" and "2 files".

    With a plural in the code, a user with a small table would see "1 files". A plural is allowed after a limit in
    `_LIMITS`, which is never 1.
    """
    folder = Path(terminal.__file__).parent
    plurals_by_file = {
        path.name: matches
        for path in sorted(folder.rglob("*.py"))
        if (matches := [match for match in _PLURAL.findall(path.read_text()) if match.split(":,")[0] not in _LIMITS])
    }
    assert plurals_by_file == {}


_LIMITS = ("{TABLE_ROWS_MAX", "{request.rows_max")
"""Numbers that are always larger than 1."""


@pytest.mark.parametrize("text", HOSTILE_TEXTS.values(), ids=HOSTILE_TEXTS)
def test_console_tables_and_lines_contain_no_control_characters(text: str) -> None:
    console = terminal.open_console()
    console.file = output = io.StringIO()
    table = Table(title=text)
    table.add_column(text)
    table.add_row(text)
    console.print(table)
    console.print(text, markup=False)
    console.print(f"Index {text}", highlight=False)
    assert all(character.isprintable() or character == "\n" for character in output.getvalue()), output.getvalue()


async def test_hostile_column_name_is_shown_by_explain_as_an_escape(
    tmp_path: Path,
) -> None:
    name = "id\x1b]0;owned\x07"
    schema = {"type": "struct", "schema-id": 0, "fields": [{"id": 1, "name": name, "required": False, "type": "long"}]}
    async with run_server(tmp_path) as server:
        answer = await Api(server)("POST", "/v1/namespaces/db/tables", {"name": "t", "schema": schema})
        assert answer.status == 200
        arguments = ["db.t", f'"{name}" > 5', "--url", server.url]
        result = await asyncio.to_thread(CliRunner().invoke, explain.explain, arguments)
    assert "owned" in result.output
    assert "\x1b" not in result.output
    assert "\\x1b" in result.output
