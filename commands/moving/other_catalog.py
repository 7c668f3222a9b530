"""The options and messages that `seamark import` and `seamark export` share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from seamark.commands.options import parse_properties
from seamark.commands.terminal import escape_for_terminal, print_json, say, show_count
from seamark.connector.client.names import join_name, split_name
from seamark.connector.moving.moves import MoveSelection, Result
from seamark.connector.moving.source import Levels

Command = TypeVar("Command", bound=Callable[..., Any])
_WORKERS_MAX = 64


def moving_options(command: Command) -> Command:
    """Add to a command the options that describe the other catalog, select tables and limit the work."""
    for option in (
        click.option("--dry-run", is_flag=True, help="Check everything, but change nothing."),
        click.option(
            "--parallel",
            "workers",
            type=click.IntRange(1, _WORKERS_MAX),
            default=8,
            show_default=True,
            help="Maximum number of requests at the same time. An import registers up to 64 tables in a request.",
        ),
        click.option(
            "--table",
            "tables",
            metavar="NAME",
            multiple=True,
            help="Table or view to register, such as db.t; others are left out. Repeatable.",
        ),
        click.option(
            "--namespace",
            "namespaces",
            metavar="NAME",
            multiple=True,
            help="Namespace to register, with the namespaces below it; others are left out. Repeatable.",
        ),
        click.option(
            "--catalog-token",
            envvar="SEAMARK_CATALOG_TOKEN",
            show_envvar=True,
            help="Bearer token for the other catalog.",
        ),
        click.option(
            "--properties",
            "properties_file",
            type=click.Path(dir_okay=False, path_type=Path),
            help="File with PyIceberg properties of the other catalog and its storage, one NAME=VALUE on each line, "
            "such as credential, rest.sigv4-enabled or s3.endpoint.",
        ),
        click.option("--catalog-warehouse", metavar="NAME", help="Warehouse of the other catalog, if it has several."),
    ):
        command = option(command)
    return command


def read_properties(path: Path | None, token: str | None, warehouse: str | None) -> dict[str, str]:
    """Return the PyIceberg properties from the file and the options.

    Raises:
        ClickException: The file cannot be read.
    """
    properties: dict[str, str] = {}
    if path is not None:
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise click.ClickException(escape_for_terminal(f"Cannot read the properties in {path}: {error}")) from None
        properties = parse_properties([line for line in lines if line and not line.startswith("#")], str(path))
    if token:
        properties["token"] = token
    if warehouse:
        properties["warehouse"] = warehouse
    return properties


def make_selection(namespaces: Sequence[str], tables: Sequence[str]) -> MoveSelection:
    return MoveSelection([parse_name(name) for name in namespaces], [parse_name(name) for name in tables])


def parse_name(text: str) -> Levels:
    """Split a name at its dots, and return the levels.

    Raises:
        UsageError: A level is empty.
    """
    try:
        return split_name(text)
    except ValueError as error:
        raise click.UsageError(escape_for_terminal(str(error))) from None


def show_results(results: Iterable[Result], *, as_json: bool, action: str) -> None:
    """Print the results, and exit with code 1 if an entry was refused.

    Args:
        results: The results of the entries.
        as_json: Whether to print JSON.
        action: The participle for a registered entry, such as "imported".
    """
    entries: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    for result in results:
        # The printed counts are of tables and views. A namespace counts only if it was refused or is gone.
        counts[result.outcome] += result.kind != "namespace" or result.outcome in ("refused", "gone")
        if as_json:
            entries.append(
                {
                    "kind": result.kind,
                    "name": list(result.name),
                    "outcome": action if result.outcome == "moved" else result.outcome,
                    "reason": result.reason,
                }
            )
        elif result.reason:
            moved_text = "created" if result.kind == "namespace" else action
            outcome = moved_text if result.outcome == "moved" else result.outcome
            say(f"{outcome}: {result.kind} {join_name(result.name)}: {result.reason}", err=True)
    if as_json:
        print_json(entries)
    else:
        # `show_count` only adds an s to the noun.
        moved_text = show_count(counts["moved"], "table or view", "").replace("table or views", "tables and views")
        say(
            f"{moved_text} {action}, {counts['unchanged']:,} unchanged, {counts['gone']:,} gone, "
            f"{counts['refused']:,} refused"
        )
    if counts["refused"]:
        raise click.exceptions.Exit(1)
