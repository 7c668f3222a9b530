r"""Safe output of names, paths, values and problems of tables on a terminal.

A writer of a table chooses its column names, file paths and partition values. A control sequence in one of these texts
could clear the screen, set the window's title, or write to the clipboard of the admin who lists the table. Therefore
control characters, and characters that change the direction of text, are printed as escapes (`\x1b`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import unicodedata
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH_CHARACTERS = 120
"""The width of the output in characters if it is not a terminal."""
_BAR_MIN, _BAR_MAX = 8, 44
"""The minimum and the maximum length of the longest bar, in characters."""
_SINGULAR = {"are": "is", "were": "was", "have": "has", "name": "names"}
"""The forms of verbs after "1 file", by the forms after "2 files"."""
_SIZE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_PRINTED_CONTROLS = "\n\t"
_BIDI_CONTROLS = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def escape_for_terminal(text: str) -> str:
    """Replace the characters that a terminal interprets by escapes."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escape_character(character) if _is_control(character) else character for character in text)


def _is_control(character: str) -> bool:
    return character not in _PRINTED_CONTROLS and (
        unicodedata.category(character) in ("Cc", "Cs") or character in _BIDI_CONTROLS
    )


def _escape_character(character: str) -> str:
    return (
        character.encode("ascii", "backslashreplace").decode() if ord(character) > 0x7F else f"\\x{ord(character):02x}"
    )


def say(text: str, *, err: bool = False) -> None:
    """Print a line to standard output or standard error, with escapes in place of control characters."""
    click.echo(escape_for_terminal(text), err=err)


class _PrintableConsole(Console):
    """A console that prints control characters as escapes.

    Rich converts all texts with `render_str`, including the cells and titles of tables.
    """

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(escape_for_terminal(text), **options)


def open_console(*, stderr: bool = False) -> Console:
    """Return a console with the width of the terminal, or a fixed width if the output is not a terminal."""
    terminal = _PrintableConsole(stderr=stderr)
    return terminal if terminal.is_terminal else _PrintableConsole(width=WIDTH_CHARACTERS, stderr=stderr)


def make_table(
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right_aligned_headers: Sequence[str] = (),
    title: str | None = None,
    framed: bool = True,
) -> Table:
    """Return a table for the console.

    Cells are not interpreted as markup, because names may contain brackets.

    Args:
        headers: The titles of the columns.
        rows: The cells of each row.
        right_aligned_headers: The columns that are aligned to the right.
        title: The title of the table, or None.
        framed: Whether the table has a frame.
    """
    table = Table(title=title, title_justify="left")
    if not framed:
        table = Table(box=None, pad_edge=False, header_style="bold")
    for header in headers:
        table.add_column(header, justify="right" if header in right_aligned_headers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(escape_for_terminal(text)) for text in row))
    return table


def print_rows(
    headers: Sequence[str], rows: Iterable[Sequence[str]], *, right_aligned_headers: Sequence[str] = ()
) -> None:
    open_console().print(make_table(headers, rows, right_aligned_headers=right_aligned_headers, framed=False))


def print_bars(rows: Sequence[tuple[str, float, str]], console: Console) -> None:
    """Print a bar for each row, which has a name, a length and a text to show after the bar.

    The longest bar fits into a line of the console.
    """
    names, texts = max(len(name) for name, _, _ in rows), max(len(text) for _, _, text in rows)
    length_max = max(length for _, length, _ in rows) or 1
    width = max(_BAR_MIN, min(_BAR_MAX, console.width - names - texts - len("    ")))
    for name, length, text in rows:
        bar = "█" * max(1, round(length / length_max * width))
        console.print(Text(f"  {name:<{names}} {bar:<{width}} {text}".rstrip()), soft_wrap=True)


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def print_result(result: Any, text: str, *, as_json: bool) -> None:
    """Print the result of a command as a sentence, or as JSON.

    The keys of the JSON are the names of a dataclass's fields with hyphens, as in the server's answers.
    """
    if not as_json:
        click.echo(escape_for_terminal(text))
    elif dataclasses.is_dataclass(result) and not isinstance(result, type):
        fields = msgspec.to_builtins(result, str_keys=True)
        print_json({name.replace("_", "-"): value for name, value in fields.items()})
    else:
        print_json(result)


def format_local_time(epoch_ms: int | None) -> str:
    return "" if epoch_ms is None else f"{datetime.fromtimestamp(epoch_ms / 1000, UTC):%Y-%m-%d %H:%M:%SZ}"


def show_count(count: int, noun: str, verb: str = "") -> str:
    """Return a number with a noun whose plural ends in s, such as "1 file" or "1,000 files".

    Args:
        count: The number.
        noun: The noun in the singular.
        verb: A verb in the plural that follows the noun, such as "were": "1 file was".
    """
    if count == 1:
        return f"1 {noun} {_SINGULAR[verb]}" if verb else f"1 {noun}"
    return f"{count:,} {noun}s {verb}".rstrip()


def show_size(count: int) -> str:
    """Return a size as text, in a suitable unit of powers of 1024 bytes.

    A size below 100 units has one digit after the point, unless it is a whole number.
    The web console uses the same form (`format.js`).
    """
    size, units = float(count), iter(_SIZE_UNITS)
    unit = next(units)
    while size >= 1024 and unit != _SIZE_UNITS[-1]:
        size, unit = size / 1024, next(units)
    if size >= 100 or size.is_integer():
        return f"{math.floor(size + 0.5):,} {unit}"
    return f"{math.floor(size * 10 + 0.5) / 10:.1f} {unit}"
