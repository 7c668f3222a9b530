"""What the commands for namespaces, tables and snapshots print."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import click
from rich.table import Table
from rich.text import Text

from seamark.metaserver.cli.terminal import open_console, printable

Command = TypeVar("Command", bound=Callable[..., Any])

json_option: Callable[[Command], Command] = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def print_rows(heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[str] = ()) -> None:
    """`numbers`: the columns that are aligned to the right."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        shown.add_column(head, justify="right" if head in numbers else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(Text(printable(text)) for text in row))  # not markup: names contain brackets
    open_console().print(shown)


def time_text(epoch_ms: int | None) -> str:
    return "" if epoch_ms is None else f"{datetime.fromtimestamp(epoch_ms / 1000, UTC):%Y-%m-%d %H:%M:%SZ}"


def parse_properties(texts: Sequence[str], option: str) -> dict[str, str]:
    """UsageError for a text that is not NAME=VALUE."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise click.UsageError(f"{option} {text!r} has no value; write NAME=VALUE")
        found[name] = value
    return found
