"""Runs a statement that maintains the files of a table, in this process or in a separate process.

    python -m seamark.connector.jobs.statement_runs

This command reads a `StatementJob` as JSON from its standard input, and writes a `StatementAnswer`. The process may be
killed at any time: each commit of the job is complete, and files that the job has not committed are orphan files.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.rewrite_lease import REWRITE_WAIT_S, rewrite_lease
from seamark.connector.jobs.failures import FAILURES, format_error_line
from seamark.connector.jobs.file_merges import drop_columns, merge_files
from seamark.connector.jobs.statements import (
    MergeFiles,
    StatementAnswer,
    StatementJob,
    StatementResult,
    TableStatement,
)
from seamark.connector.write.replacements import BatchRunner, RewriteReport, run_here
from seamark.formats.runtime.decoding import convert_json

_NICE = 10
"""The increase of the process's nice value, so that the server's own process has priority for the CPU."""
_MESSAGE_CHARACTERS_MAX = 2000


def run_statement(
    client: SeamarkClient,
    statement: TableStatement,
    *,
    utc: bool,
    runner: BatchRunner = run_here,
    wait_s: float = REWRITE_WAIT_S,
) -> StatementResult:
    """Run a statement, and return its result.

    Args:
        utc: Whether the session's time zone is UTC.
        runner: Runs the batches of files that are rewritten, by default in this process.
        wait_s: The maximum time in seconds to wait while a different job rewrites files of the table.

    Raises:
        RewriteRunning: A different job is still rewriting files of the table after `wait_s`.
        InvalidRequest: The statement cannot be applied to the table, or files cannot be read. The commits of the
            remaining files are not undone.
    """
    job = "MERGE FILES" if isinstance(statement, MergeFiles) else "DROP COLUMNS"
    with rewrite_lease(client, statement.table, job=job, wait_s=wait_s):
        return _run(client, statement, utc=utc, runner=runner)


def _run(client: SeamarkClient, statement: TableStatement, *, utc: bool, runner: BatchRunner) -> StatementResult:
    if isinstance(statement, MergeFiles):
        report = merge_files(
            client,
            statement.table,
            where=statement.where,
            target_bytes=statement.target_bytes,
            utc=utc,
            runner=runner,
        )
    else:
        report = drop_columns(client, statement.table, statement.columns, where=statement.where, utc=utc, runner=runner)
    return _convert_report(report)


def _convert_report(report: RewriteReport) -> StatementResult:
    if report.errors:
        raise InvalidRequest(
            f"{len(report.errors):,} parts of the table were not rewritten, but {report.files_before:,} files were; "
            f"the first error: {report.errors[0]}"
        )
    return StatementResult(
        report.files_before,
        report.files_after,
        report.bytes_before,
        report.bytes_after,
        report.row_groups_copied,
        sum(report.row_groups_encoded.values()),
        report.commits,
        report.conflicts,
    )


def run_and_catch_errors(job: StatementJob) -> StatementAnswer:
    """Run a statement, and return its answer. Any error is converted to an answer with a message of one line."""
    client = SeamarkClient(job.url, token=job.token)
    try:
        return StatementAnswer(run_statement(client, job.statement, utc=job.utc))
    except Exception as error:  # noqa: BLE001  the client of the statement waits for an answer
        return StatementAnswer(
            error=format_error_line(error, _MESSAGE_CHARACTERS_MAX, with_class=not isinstance(error, FAILURES))
        )
    finally:
        client.close()


def main(source: Any = None) -> None:
    """Run the statement from standard input, or from `source`, and write its answer to standard output.

    The output of libraries is redirected to standard error, so that it does not mix with the answer.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.nice(_NICE)
    job = convert_json((source or sys.stdin.buffer).read(), StatementJob)
    answers.write(msgspec.json.encode(run_and_catch_errors(job)))
    answers.flush()


if __name__ == "__main__":
    main()
