"""`seamark snapshot` and `seamark timeline`: show the history of a table, through the running server.

Exit codes: 0 on success, 1 if the server refuses or cannot be reached, 2 for invalid arguments.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import click
import msgspec

from seamark.commands.connecting import server_command, server_options
from seamark.commands.terminal import format_local_time, print_json, print_rows, say, show_count, show_size
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.names import join_name
from seamark.connector.client.values import TimelineInstant

_INSTANTS_SHOWN_DEFAULT = 20
_FOLLOW_S = 1.0
"""The time in seconds between two requests for new instants."""
_DETAILS_MAX, _DETAILS_CHARACTERS_MAX = 6, 200
"""The maximum number of values that are shown of an instant's summary, and of their characters."""
_HIDDEN = ("request-id", "definition-id")
"""The keys of an instant's summary that only `--json` prints, because people do not need them."""


@click.group()
def snapshot() -> None:
    """List and show snapshots of a table."""


@snapshot.command("list")
@click.argument("table")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=_INSTANTS_SHOWN_DEFAULT,
    show_default=True,
    help="Maximum number of snapshots to show.",
)
@server_command
def list_snapshots(client: IndexClient, table: str, limit: int, as_json: bool) -> None:
    """List the snapshots of TABLE, newest first, and the branches and tags that point to them."""
    snapshots, refs = _load_snapshots(client, table)
    shown_snapshots = snapshots[:limit]
    if as_json:
        print_json(
            [
                {**shown_snapshot, "refs": refs.get(shown_snapshot["snapshot-id"], [])}
                for shown_snapshot in shown_snapshots
            ]
        )
        return
    if not shown_snapshots:
        say(f"{table} has no snapshots.")
        return
    print_rows(
        ("snapshot", "committed", "operation", "rows", "files", "size", "refs"),
        (
            (
                str(shown_snapshot["snapshot-id"]),
                format_local_time(shown_snapshot["timestamp-ms"]),
                _read_summary(shown_snapshot, "operation"),
                _read_count(shown_snapshot, "total-records"),
                _read_count(shown_snapshot, "total-data-files"),
                _show_files_size(shown_snapshot),
                ", ".join(refs.get(shown_snapshot["snapshot-id"], [])),
            )
            for shown_snapshot in shown_snapshots
        ),
        right_aligned_headers=("rows", "files", "size"),
    )
    if len(snapshots) > limit:
        say(f"{show_count(len(snapshots) - limit, 'older snapshot', 'are')} not shown; set --limit to show more")


@snapshot.command()
@click.argument("table")
@click.argument("snapshot")
@server_command
def show(client: IndexClient, table: str, snapshot: str, as_json: bool) -> None:
    """Show the snapshot of TABLE with the id SNAPSHOT, or of the branch or tag SNAPSHOT."""
    snapshots, refs = _load_snapshots(client, table)
    match = next(
        (
            candidate
            for candidate in snapshots
            if str(candidate["snapshot-id"]) == snapshot or snapshot in refs.get(candidate["snapshot-id"], ())
        ),
        None,
    )
    if match is None:
        raise click.ClickException(f"{table} has no snapshot, branch or tag {snapshot}")
    if as_json:
        print_json({**match, "refs": refs.get(match["snapshot-id"], [])})
        return
    summary = match.get("summary", {})
    facts = {
        "snapshot": str(match["snapshot-id"]),
        "parent": str(match.get("parent-snapshot-id") or ""),
        "committed": format_local_time(match["timestamp-ms"]),
        "schema": str(match.get("schema-id", "")),
        "refs": ", ".join(refs.get(match["snapshot-id"], [])),
        **dict(sorted(summary.items())),
    }
    print_rows(("property", "value"), facts.items())


def _load_snapshots(client: IndexClient, table: str) -> tuple[list[dict[str, Any]], dict[int, list[str]]]:
    """Return the snapshots, newest first, and the names of branches and tags by snapshot id."""
    metadata: dict[str, Any] = msgspec.json.decode(client.load_table(table, history=True).metadata)
    refs: dict[int, list[str]] = {}
    for name, ref in sorted(metadata.get("refs", {}).items()):
        refs.setdefault(ref["snapshot-id"], []).append(name)
    return sorted(metadata.get("snapshots", ()), key=lambda snapshot: -int(snapshot["timestamp-ms"])), refs


def _read_summary(snapshot: dict[str, Any], name: str) -> str:
    return str(snapshot.get("summary", {}).get(name, ""))


def _show_files_size(snapshot: dict[str, Any]) -> str:
    size = _read_summary(snapshot, "total-files-size")
    return show_size(int(size)) if size.isdecimal() else ""


def _read_count(snapshot: dict[str, Any], name: str) -> str:
    text = _read_summary(snapshot, name)
    return f"{int(text):,}" if text.isdecimal() else text


@click.command()
@click.argument("table", required=False)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=_INSTANTS_SHOWN_DEFAULT,
    show_default=True,
    help="Maximum number of instants to show.",
)
@click.option(
    "--action", help="Action of the instants to show: commit, create, drop, index, maintenance, … Default: all actions."
)
@click.option("--follow", is_flag=True, help="Keep printing new instants until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on each line, oldest first.")
@server_options
def timeline(
    client: IndexClient, table: str | None, limit: int, action: str | None, follow: bool, as_json: bool
) -> None:
    """Show the latest instants of TABLE, or of everything that you have rights to read, oldest first."""
    newest = list(client.timeline(table, action=action, newest_first=True, limit=limit))
    _print_instants(newest[::-1], as_json=as_json)
    if not newest and not as_json and not follow:
        say(f"No instant has the action {action}." if action else "Nothing happened yet.")
    since = newest[0].position if newest else None
    while follow:
        time.sleep(_FOLLOW_S)
        new_instants = list(client.timeline(table, action=action, since=since))
        _print_instants(new_instants, as_json=as_json)
        since = new_instants[-1].position if new_instants else since


def _print_instants(instants: list[TimelineInstant], *, as_json: bool) -> None:
    if as_json:
        for instant in instants:
            click.echo(json.dumps(msgspec.structs.asdict(instant)))
    elif instants:
        print_rows(("time", "action", "state", "what", "who", "details"), map(_make_instant_row, instants))


def _make_instant_row(instant: TimelineInstant) -> tuple[str, ...]:
    entry_name = join_name((*instant.namespace, *([instant.name] if instant.name else [])))
    return (
        format_local_time(instant.requested_ms),
        instant.action,
        instant.state,
        entry_name,
        instant.principal_name,
        _describe_change(instant.summary),
    )


def _describe_change(summary: Mapping[str, Any]) -> str:
    """Return a text that describes the change of an instant.

    For a commit without a snapshot, which changes properties, schemas or references, the text lists its `updates`.
    """
    updates = summary.get("updates")
    if "operation" not in summary and isinstance(updates, list):
        return ", ".join(dict.fromkeys(map(str, updates)))[:_DETAILS_CHARACTERS_MAX]
    visible = [
        f"{name} {value}" for name, value in summary.items() if isinstance(value, str | int) and name not in _HIDDEN
    ]
    return ", ".join(visible[:_DETAILS_MAX])[:_DETAILS_CHARACTERS_MAX]
