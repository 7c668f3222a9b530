"""The common parts of the `seamark run` commands that rewrite data files.

The commands have a dry run, wait for other jobs, can run on Spark, and print a report.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

import click
import structlog

from seamark.commands.build import handle_sigterm
from seamark.commands.connecting import server_command
from seamark.commands.maintenance.launching import PROCESS, launch_options, run_on_spark
from seamark.commands.options import parse_duration
from seamark.commands.terminal import print_result, show_count, show_size
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.rewrite_lease import REWRITE_WAIT_S, rewrite_lease
from seamark.connector.jobs.failures import JobIncomplete
from seamark.connector.write.replacements import RewriteReport
from seamark.formats.runtime.errors import SeamarkError
from seamark.formats.services.service import TableService

Option = Callable[[Any], Any]

wait_option = click.option(
    "--wait",
    "wait_s",
    default=f"{REWRITE_WAIT_S:g}s",
    show_default=True,
    metavar="DURATION",
    callback=lambda context, option, text: float(parse_duration(text, "--wait")),
    help="Time to wait for another job that rewrites files of the same table, such as 30s or 10m.",
)


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Print only warnings while the context is active, on stderr, because a command prints its result itself.

    If logging is already configured, the configuration stays.
    """
    if structlog.is_configured():
        yield
        return
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    try:
        yield
    finally:
        structlog.reset_defaults()


@contextmanager
def handle_failures(refusal: str) -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, and end the command with `refusal` and the reason if the work fails."""
    with handle_sigterm(), quiet_logs():
        try:
            yield
        except (OSError, SeamarkError, JobIncomplete) as error:
            raise click.ClickException(f"{refusal}: {error}") from None


def rewriting_command(
    group: click.Group,
    service_or_name: TableService | str,
    *options: Option,
    refusal: str,
    verb: str,
    dry_run_help: str = "Show which files would be replaced, but commit nothing.",
) -> Callable[[Callable[..., RewriteReport]], click.Command]:
    """Return a decorator that makes a command of a function that rewrites a table.

    The function takes the client, the table, `dry_run` and its own options.

    Args:
        group: The group to which the command is added.
        service_or_name: The table service to which the command belongs, or the name of a command without a service.
            If the service runs on Spark, the command has options for Spark.
        options: The options of the function.
        refusal: The message of a failure, with "{table}".
        verb: The verb for the effect of the command on files.
        dry_run_help: The help of the option `--dry-run`.
    """
    service = None if isinstance(service_or_name, str) else service_or_name
    name = service_or_name if isinstance(service_or_name, str) else service_or_name.command
    on_spark = service.name if service is not None and service.runs_on_spark else None

    def decorate(work: Callable[..., RewriteReport]) -> click.Command:
        @wraps(work)
        def run(
            client: IndexClient,
            table: str,
            dry_run: bool,
            wait_s: float,
            as_json: bool,
            on: str = PROCESS,
            master: str | None = None,
            submit_options: str = "",
            **arguments: Any,
        ) -> None:
            with handle_failures(refusal.format(table=table)):
                if on_spark is None or on == PROCESS or dry_run:
                    # A dry run changes nothing, so it does not wait for other jobs.
                    job = f"seamark run {name}"
                    with nullcontext() if dry_run else rewrite_lease(client, table, job=job, wait_s=wait_s):
                        report = work(client, table, dry_run=dry_run, **arguments)
                else:
                    report = run_on_spark(
                        client, on_spark, table, on, master, submit_options, wait_s=wait_s, **arguments
                    )
            print_result(report, _format_result(report, table, verb, dry_run=dry_run), as_json=as_json)
            if report.errors:
                raise click.ClickException(
                    f"{show_count(len(report.errors), 'part', 'are')} of {table} not rewritten: {report.errors[0]}"
                )

        shared: list[Option] = [click.option("--dry-run", is_flag=True, help=dry_run_help), wait_option]
        if on_spark is not None:
            shared.append(launch_options)
        command: Any = run
        for decorator in reversed([click.argument("table"), *options, *shared, server_command]):
            command = decorator(command)
        return group.command(name)(command)

    return decorate


def _format_result(report: RewriteReport, table: str, verb: str, *, dry_run: bool) -> str:
    if not report.files_before and not report.conflicts:
        return f"{table} has nothing to {verb}."
    became, qualifier = ("would become", "about ") if dry_run else ("became", "")
    text = (
        f"{show_count(report.files_before, 'file')} ({show_size(report.bytes_before)}) of {table} {became} "
        f"{qualifier}{report.files_after:,} ({show_size(report.bytes_after)});"
        f" {show_count(report.deletes_applied, 'delete file')} applied."
    )
    if report.row_groups_copied or report.row_groups_encoded:
        encoded_groups = sum(report.row_groups_encoded.values())
        text += f" {show_count(report.row_groups_copied, 'row group', 'were')} copied, {encoded_groups:,} encoded"
        text += "".join(f"; {reason}: {count:,}" for reason, count in sorted(report.row_groups_encoded.items())) + "."
    if report.conflicts:
        text += (
            f" {report.conflicts:,} of the batches were not committed, because writers changed too much; run the "
            "command again."
        )
    if report.files_skipped:
        text += (
            f" {show_count(report.files_skipped, 'file')} skipped, because they are not Parquet, are encrypted, or are "
            "in the table twice."
        )
    return text
