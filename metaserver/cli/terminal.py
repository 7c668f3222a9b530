"""What commands print of tables: names, paths, values and problems, none of which a terminal may obey.

Whoever may write a table chooses its column names, file paths and partition values. A control sequence among them would
clear the screen, set the window's title or write to the clipboard of the admin who looks at the table. So control
characters, and those that change the direction of the text, are shown as escapes (`\\x1b`).
"""

from __future__ import annotations

import unicodedata
from typing import Any

import click
from rich.console import Console
from rich.text import Text

WIDTH = 120
"""Where the output is no terminal."""
_KEPT = "\n\t"
_DIRECTIONS = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def printable(text: str) -> str:
    """The text with escapes in place of what a terminal would obey."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(one) if _is_obeyed(one) else one for one in text)


def _is_obeyed(character: str) -> bool:
    return character not in _KEPT and (unicodedata.category(character) in ("Cc", "Cs") or character in _DIRECTIONS)


def _escaped(character: str) -> str:
    return (
        character.encode("ascii", "backslashreplace").decode() if ord(character) > 0x7F else f"\\x{ord(character):02x}"
    )


def say(text: str, *, err: bool = False) -> None:
    """A line of output, or of complaint."""
    click.echo(printable(text), err=err)


class _PrintableConsole(Console):
    """Rich makes every piece of text that it is given by `render_str`, cells and titles of tables included."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def open_console(*, stderr: bool = False) -> Console:
    """As wide as the terminal; else of a width that does not depend on who calls."""
    terminal = _PrintableConsole(stderr=stderr)
    return terminal if terminal.is_terminal else _PrintableConsole(width=WIDTH, stderr=stderr)
