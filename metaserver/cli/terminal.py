"""Safe output of names, paths, values and problems of tables on a terminal.

A writer of a table chooses its column names, file paths and partition values. A control sequence in them could clear
the screen, set the window's title or write to the clipboard of the admin who lists the table. Control characters, and
characters that change the direction of the text, are therefore printed as escapes (`\\x1b`).
"""

from __future__ import annotations

import unicodedata
from typing import Any

import click
from rich.console import Console
from rich.text import Text

WIDTH = 120
"""The width when the output is not a terminal."""
_KEPT = "\n\t"
_DIRECTIONS = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def printable(text: str) -> str:
    """The text with escapes instead of characters that a terminal interprets."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(character) if _is_control(character) else character for character in text)


def _is_control(character: str) -> bool:
    return character not in _KEPT and (unicodedata.category(character) in ("Cc", "Cs") or character in _DIRECTIONS)


def _escaped(character: str) -> str:
    return (
        character.encode("ascii", "backslashreplace").decode() if ord(character) > 0x7F else f"\\x{ord(character):02x}"
    )


def say(text: str, *, err: bool = False) -> None:
    """Prints a line to standard output or standard error."""
    click.echo(printable(text), err=err)


class _PrintableConsole(Console):
    """Rich converts every text with `render_str`, including cells and titles of tables."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def open_console(*, stderr: bool = False) -> Console:
    """As wide as the terminal; otherwise a fixed width."""
    terminal = _PrintableConsole(stderr=stderr)
    return terminal if terminal.is_terminal else _PrintableConsole(width=WIDTH, stderr=stderr)
