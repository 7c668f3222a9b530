"""`seamark advise`: recommends changes of a table, based on the recorded use of the table.

`seamark advise TABLE` proposes layouts and indexes, `seamark advise apply` makes one of these changes, and `seamark
advise ttl` lists columns that no query reads. Exit codes: 0 on success (even if there is no advice), 1 if the server
refuses or cannot be reached, 2 for invalid arguments.
"""

from __future__ import annotations

import json
from typing import Any

import click
from rich.table import Table

from seamark.commands.connecting import server_command, server_options
from seamark.commands.maintenance.rewriting import handle_failures, wait_option
from seamark.commands.terminal import (
    format_local_time,
    open_console,
    print_json,
    print_rows,
    say,
    show_count,
    show_size,
)
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.policies import advise_ttl, load_advice
from seamark.connector.jobs.advice import NOT_INDEXED, apply_proposal
from seamark.formats.iceberg.metadata.column_ttl import COLUMNS

_TABLE_COMMAND = "table"
_EXAMPLE_CATALOG = "sea"
"""The name of the catalog in Spark that the documentation uses. The user may have another name."""
_NUMBER_HEADERS = ("files", "bytes", "time", "cost", "pays after")


class _AdviseGroup(click.Group):
    """A command group whose first argument can be a table instead of a command."""

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = [_TABLE_COMMAND, *args]
        return super().resolve_command(context, args)


@click.group(cls=_AdviseGroup)
def advise() -> None:
    """Propose changes of a table, based on the statements that read it.

    `seamark advise TABLE` lists proposals, the best first.
    """


@advise.command(_TABLE_COMMAND)
@click.argument("table")
@click.option(
    "--days",
    type=click.IntRange(1, 3650),
    default=30,
    show_default=True,
    help="Number of days of the query history to use.",
)
@server_command
def table_command(client: IndexClient, table: str, days: int, as_json: bool) -> None:
    """Propose layouts and indexes for TABLE, the best first, with their predicted gain and cost.

    The numbers are averages over the recorded statements. To predict them, the server replays the query history on a
    sample of rows.
    """
    advice = load_advice(client, table, days=days)
    if as_json:
        print_json(advice)
        return
    say(f"{table}: {show_count(advice['statements'], 'statement')} in {show_count(days, 'day')}")
    if advice["before"] is not None:
        averages = advice["before"]
        say(
            f"An average statement with a condition reads {_show_files(averages['files'])} files, "
            f"{show_size(averages['bytes'])}."
        )
    if advice["reason"]:
        say(f"No proposals: {advice['reason']}.")
    if advice["proposals"]:
        print_rows(
            ("id", "proposal", *_NUMBER_HEADERS),
            (
                (
                    proposal["id"],
                    proposal["title"],
                    _show_files(proposal["predicted"]["files"]),
                    show_size(proposal["predicted"]["bytes"]),
                    f"{proposal['predicted']['seconds']:,.2f} s",
                    show_size(proposal["cost-bytes"]),
                    _show_days(proposal["pays-after-days"]),
                )
                for proposal in advice["proposals"]
            ),
            right_aligned_headers=_NUMBER_HEADERS,
        )
        say("")
        for proposal in advice["proposals"]:
            say(f"{proposal['id']}: {_format_commands(proposal['commands'])}")
    for applied_proposal in advice["applied"]:
        _show_applied(applied_proposal)


def _format_commands(commands: list[str]) -> str:
    """Return the commands of a proposal as one text.

    Statements that only Spark can run follow the words "in Spark" and `USE`, which selects the catalog of the examples
    in the documentation.
    """
    text = "; ".join(commands)
    return f"in Spark: USE {_EXAMPLE_CATALOG}; {text}" if commands and commands[0].startswith("ALTER TABLE ") else text


def _show_files(files: float) -> str:
    """Return the mean number of files. A small mean has a decimal, so that it is not shown as 0."""
    if 0 < files < 0.05:  # It would be rounded to 0.0.
        return "< 0.1"
    return f"{files:,.0f}" if files >= 10 or files == int(files) else f"{files:,.1f}"


def _show_days(days: float | None) -> str:
    if days is None:
        return "never"
    return f"{days:,.1f} days" if days < 1000 else "> 1,000 days"


@advise.command("apply")
@click.argument("table")
@click.argument("proposal_id", metavar="ID")
@click.option(
    "--days",
    type=click.IntRange(1, 3650),
    default=30,
    show_default=True,
    help="Number of days of the query history to use.",
)
@wait_option
@server_command
def apply_command(client: IndexClient, table: str, proposal_id: str, days: int, wait_s: float, as_json: bool) -> None:
    """Apply the proposal ID of `seamark advise TABLE`, and compare its prediction with measurements.

    An id always means the same change, even if the order of the proposals changes.
    """
    proposals = load_advice(client, table, days=days)["proposals"]
    proposal = next((proposal for proposal in proposals if proposal["id"] == proposal_id), None)
    if proposal is None:
        raise click.ClickException(
            f"There is no proposal {proposal_id!r}; `seamark advise {table}` lists the ids of the current proposals"
        )
    with handle_failures(f"The proposal {proposal['title']!r} was not applied"):
        applied_proposal = apply_proposal(client, table, proposal, wait_s=wait_s)
    if as_json:
        print_json(applied_proposal)
        return
    _show_applied(applied_proposal)
    if applied_proposal[NOT_INDEXED]:
        say(f"Some files are not indexed: {applied_proposal[NOT_INDEXED]}")


def _show_applied(applied_proposal: dict[str, Any]) -> None:
    """Print the prediction of an applied proposal and the measured results."""
    proposal = applied_proposal["proposal"]
    say(f"Applied on {format_local_time(applied_proposal['applied-ms'])}: {proposal['title']}")
    rows = [
        ("before", proposal["before"]),
        ("predicted", proposal["predicted"]),
        ("measured", applied_proposal["measured"]),
    ]
    rows.append(("statements since then", applied_proposal["recorded"]))
    print_rows(
        ("an average statement", "files", "bytes", "time"),
        (
            (name, f"{reads['files']:,.1f}", show_size(reads["bytes"]), f"{reads['seconds']:.2f} s")
            for name, reads in rows
            if reads is not None
        ),
        right_aligned_headers=("files", "bytes", "time"),
    )
    trial = applied_proposal["trial"]
    if trial is not None:
        say(f"Applied automatically. State: {trial['state']}. Reason: {trial['reason']}.")


@advise.command("ttl")
@click.argument("table")
@click.option(
    "--unread-days",
    type=click.IntRange(1, 3650),
    default=30,
    show_default=True,
    metavar="DAYS",
    help="List columns that no query has read in the last DAYS days.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the server's answer as JSON.")
@server_options
def ttl_command(client: IndexClient, table: str, unread_days: int, as_json: bool) -> None:
    """List columns of TABLE that no query reads in old partitions, and the commands that drop them there."""
    advice_report = advise_ttl(client, table, unread_days)
    if as_json:
        click.echo(json.dumps(advice_report, indent=2))
        return
    say(
        f"{table}: {show_count(advice_report['reads'], 'read')} in {show_count(advice_report['days'], 'day')}; the "
        f"columns are known for {advice_report['confidence']:.0%} of them"
    )
    if advice_report["reason"]:
        say(f"No advice: {advice_report['reason']}.")
    elif not advice_report["advice"]:
        say("Each column is read in all old partitions, or cannot be dropped.")
    else:
        open_console().print(_render_advice(advice_report["advice"]))
        for entry in advice_report["advice"]:
            say(f"{entry['statement']};")
        policy = ", ".join(entry["policy"] for entry in advice_report["advice"])
        say(f"Or as a policy: seamark policy set {table} '{COLUMNS}={policy}'")


def _render_advice(advice: list[dict[str, Any]]) -> Table:
    advice_table = Table(box=None, pad_edge=False, header_style="bold")
    for header in ("column", "partitions", "older than", "unread", "files", "size"):
        advice_table.add_column(header, justify="left" if header == "column" else "right", overflow="fold")
    for entry in advice:
        advice_table.add_row(
            entry["column"],
            f"{entry['partitions']:,}",
            show_count(entry["older-than-days"], "day"),
            show_count(entry["days-unread"], "day"),
            f"{entry['files']:,}",
            show_size(entry["size-in-bytes"]),
        )
    return advice_table
