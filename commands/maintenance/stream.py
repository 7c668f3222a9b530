"""`seamark stream`: lists, shows, flushes, pauses and drains stream tables through the running server.

Exit codes: 0 on success, 1 if the server refuses or cannot be reached, 2 for invalid arguments.
"""

from __future__ import annotations

from typing import Any

import click

from seamark.commands.connecting import server_command
from seamark.commands.terminal import print_json, print_result, print_rows, say, show_count, show_size
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.names import join_name
from seamark.connector.streams.status import (
    drain_stream,
    flush_stream,
    list_streams,
    load_stream,
    load_stream_topic,
    pause_stream,
    resume_stream,
)
from seamark.formats.runtime.clock import SystemClock


@click.group()
def stream() -> None:
    """List, show, flush, pause and drain stream tables, which accept single rows."""


@stream.command("list")
@server_command
def list_command(client: IndexClient, as_json: bool) -> None:
    """List the stream tables that you have rights to see, with their rows that wait for a flush."""
    streams = list(list_streams(client))
    if as_json:
        print_json(streams)
    elif not streams:
        say("There is no stream table that you have rights to see and that has rows in the log.")
    else:
        number_headers = ("waiting rows", "memory", "oldest", "flushed", "durable")
        headers = ("table", *number_headers, "flush")
        print_rows(headers, map(_make_stream_row, streams), right_aligned_headers=number_headers)


@stream.command()
@click.argument("table")
@server_command
def show(client: IndexClient, table: str, as_json: bool) -> None:
    """Show the rows of the stream table TABLE that wait for a flush, and the offsets of its shards."""
    state = load_stream(client, table)
    if as_json:
        print_json(state)
        return
    age = _show_age(state["oldest-ms"])
    say(
        f"{table}: {show_count(state['waiting-rows'], 'row')} ({show_size(state['waiting-bytes'])}) "
        f"{'waits' if state['waiting-rows'] == 1 else 'wait'} for a flush{f', the oldest for {age}' if age else ''}; "
        f"{show_count(state['fresh-files'], 'fresh file')}"
        + ("" if state["paused"] is None else f"; paused: {state['paused']}")
    )
    if state["flush-error"] is not None:
        say(f"The last flush failed, and will be retried: {state['flush-error']}")
    headers = ("shard", "flushed", "durable")
    rows = [(str(shard["shard"]), f"{shard['flushed']:,}", f"{shard['durable']:,}") for shard in state["shards"]]
    print_rows(headers, rows, right_aligned_headers=headers)


@stream.command()
@click.argument("table")
@server_command
def topic(client: IndexClient, table: str, as_json: bool) -> None:
    """Show the topic to which Kafka producers can write rows of the stream table TABLE directly."""
    name = load_stream_topic(client, table)
    print_result({"table": table, "topic": name}, name, as_json=as_json)


@stream.command()
@click.argument("table")
@server_command
def flush(client: IndexClient, table: str, as_json: bool) -> None:
    """Write the waiting rows of the stream table TABLE to data files now."""
    rows = flush_stream(client, table)
    text = f"{show_count(rows, 'row')} of {table} {'was' if rows == 1 else 'were'} flushed"
    print_result({"table": table, "rows": rows}, text, as_json=as_json)


_reason_option = click.option(
    "--reason",
    default="",
    help="Reason why the table does not accept rows. Refused writers get it in the error message.",
)


@stream.command()
@click.argument("table")
@_reason_option
@server_command
def pause(client: IndexClient, table: str, reason: str, as_json: bool) -> None:
    """Refuse new rows of the stream table TABLE until it is resumed. Waiting rows are still flushed."""
    reason = pause_stream(client, table, reason)
    print_result({"table": table, "paused": reason}, f"{table} is paused: {reason}", as_json=as_json)


@stream.command()
@click.argument("table")
@server_command
def resume(client: IndexClient, table: str, as_json: bool) -> None:
    """Accept rows of the paused stream table TABLE again."""
    resume_stream(client, table)
    print_result({"table": table, "paused": None}, f"{table} accepts rows again", as_json=as_json)


@stream.command()
@click.argument("table")
@_reason_option
@server_command
def drain(client: IndexClient, table: str, reason: str, as_json: bool) -> None:
    """Pause the stream table TABLE, and write all of its waiting rows to data files."""
    rows = drain_stream(client, table, reason)
    text = f"{show_count(rows, 'row')} of {table} {'was' if rows == 1 else 'were'} flushed; {table} is paused"
    print_result({"table": table, "rows": rows}, text, as_json=as_json)


def _make_stream_row(state: dict[str, Any]) -> tuple[str, ...]:
    shards = state["shards"]
    return (
        join_name((*state["namespace"], state["table"])),
        f"{state['waiting-rows']:,}",
        show_size(state["waiting-bytes"]),
        _show_age(state["oldest-ms"]),
        f"{sum(shard['flushed'] for shard in shards):,}",
        f"{sum(shard['durable'] for shard in shards):,}",
        "" if state["flush-error"] is None else "fails",
    )


def _show_age(oldest_ms: int | None) -> str:
    return "" if oldest_ms is None else f"{max(0.0, (SystemClock().now_ms() - oldest_ms) / 1000):.1f} s"
