"""`seamark index verify` compares indexes with the data. `seamark index rebuild-registry` lists index files again.

Exit codes: 0 if everything is correct, 1 if something is wrong or the server refuses or cannot be reached, 2 for
invalid arguments.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as ProgressBar

from seamark.commands.connecting import server_command
from seamark.commands.options import Misconfigured
from seamark.commands.terminal import make_table, open_console, print_json, say, show_count, show_size
from seamark.connector.client.indexes import IndexClient
from seamark.connector.index.audits import QUARANTINED, Audit, audit_index
from seamark.connector.index.verification import VerificationResult
from seamark.formats.runtime.errors import BadRequest, Corrupt

SAMPLED_FILES_DEFAULT = 3
_SHOWN_PROBLEMS_MAX = 20


@click.command("verify")
@click.argument("table")
@click.argument("name", required=False)
@click.option(
    "--sample",
    type=click.IntRange(min=0),
    default=SAMPLED_FILES_DEFAULT,
    show_default=True,
    metavar="N",
    help="Number of data files to read for each index file.",
)
@click.option(
    "--seed", type=int, help="Seed with which the data files are chosen at random. Set it to repeat an earlier run."
)
@click.option("--dry-run", is_flag=True, help="Only report problems, and do not quarantine index files.")
@server_command
def verify_command(
    client: IndexClient, table: str, name: str | None, sample: int, seed: int | None, dry_run: bool, as_json: bool
) -> None:
    """Verify the index NAME of TABLE, or all its indexes, against the data.

    The command reads each index file in use (checksums, counts) and some of its data files (each key), and compares the
    row counts of the index with those of the table. It quarantines wrong index files: plans do not use them, and the
    next build replaces them. This machine reads the data files, so it needs access to the table's storage.
    """
    indexes = client.indexes(table) if name is None else [client.index(table, name)]
    for index in indexes:
        if index.health == "broken":
            say(f"Index {index.name} is broken: {index.problem}", err=True)
    names = [index.name for index in indexes if index.kind not in (None, "bucket") and index.health != "broken"]
    if not names:
        raise Misconfigured(f"{table} has no index that can be verified; see seamark index list {table}")
    audits: list[Audit] = []
    for index_name in names:
        try:
            audit = _audit_index(client, table, index_name, sample=sample, report=not dry_run, seed=seed)
        except (BadRequest, Corrupt, OSError) as error:
            raise click.ClickException(f"Index {index_name} cannot be verified: {error}") from None
        audits.append(audit)
        if not as_json:
            _print_audit(audit)
    if as_json:
        print_json([_to_json(audit) for audit in audits])
    wrong_indexes = sum(bool(audit.problems) for audit in audits)
    if wrong_indexes:
        raise click.ClickException(f"{wrong_indexes} of {len(names)} indexes are not correct")


def _to_json(audit: Audit) -> dict[str, Any]:
    return {
        "name": audit.index.name,
        "problems": list(audit.problems),
        "seed": audit.seed,
        "rows": audit.rows,
        "rows-not-counted": audit.uncounted,
        "rows-in-files": audit.covered_rows,
        "index-files": [
            {
                "location": file.location,
                "files": file.files,
                "rows": file.rows,
                "verdict": _describe_verdict(audit, file),
            }
            for file in audit.verdicts
        ],
    }


def _audit_index(client: IndexClient, table: str, name: str, **options: Any) -> Audit:
    console = open_console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with ProgressBar(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task_id = bar.add_task(f"Index {name}", total=None)
        return audit_index(client, table, name, **options, on_verdict=partial(_advance_bar, bar, task_id))


def _advance_bar(bar: ProgressBar, task_id: TaskID, verdict: VerificationResult, total: int) -> None:
    bar.update(task_id, total=total, advance=1)


def _print_audit(audit: Audit) -> None:
    index = audit.index
    if audit.verdicts:
        verdict_table = make_table(
            ("index file", "data files", "rows", "read again", "unreadable", "verdict"),
            (
                (
                    _shorten_location(verdict.location),
                    *(f"{count:,}" for count in (verdict.files, verdict.rows, verdict.sampled_files)),
                    f"{verdict.unreadable_files:,}",
                    _describe_verdict(audit, verdict),
                )
                for verdict in audit.verdicts
            ),
            right_aligned_headers=("data files", "rows", "read again", "unreadable"),
            title=f"Index {index.name}",
        )
        open_console().print(verdict_table)
    for problem in audit.problems[:_SHOWN_PROBLEMS_MAX]:
        say(problem, err=True)
    if len(audit.problems) > _SHOWN_PROBLEMS_MAX:
        say(f"… and {show_count(len(audit.problems) - _SHOWN_PROBLEMS_MAX, 'problem')} more", err=True)
    coverage = f"{index.files:,} of {show_count(index.files_total, 'data file')}"
    files = f"{show_count(len(audit.verdicts), 'index file')}, {coverage}"
    rows = f"rows not counted: {audit.uncounted}"
    if audit.rows is not None:
        rows = f"{show_count(audit.rows, 'row')} counted"
    state = f"invalid (repeat with --seed {audit.seed})" if audit.problems else "valid"
    if index.lag_files:
        state += f", {show_count(index.lag_files, 'data file')} to index"
    say(f"Index {index.name}: {files}, {rows}, {audit.covered_rows:,} in the data files; {state}")


def _describe_verdict(audit: Audit, verdict: VerificationResult) -> str:
    if verdict.has_newer_version:
        return "newer format version"
    state = audit.states.get(verdict.location)
    if not verdict.problems:
        return "valid" if state is None else "replaced in the meantime"
    if state == QUARANTINED:
        return "invalid: quarantined"
    return "invalid" if state is None else f"invalid here, but valid on the server ({state})"


def _shorten_location(location: str) -> str:
    """Return the folder of the build and the name of the file. All index files of a table are below the same folder."""
    return "/".join(location.split("/")[-2:])


@click.command("rebuild-registry")
@click.argument("table")
@server_command
def rebuild_registry_command(client: IndexClient, table: str, as_json: bool) -> None:
    """Register index files in TABLE's folder that the server does not list.

    Use this command after the loss of the database, when the tables are registered again. The files do not record
    quarantines, so run `seamark index verify` afterwards.
    """
    result = client.rebuild_index_registry(table)
    if as_json:
        print_json(result)
        return
    for registration in result["registered"]:
        say(
            f"Index {registration['index']}: {show_count(registration['index-files'], 'index file')} registered, of "
            f"{show_count(registration['files'], 'data file')} and {show_count(registration['rows'], 'row')}, "
            f"{show_size(registration['size-in-bytes'])}"
        )
    say(
        f"{show_count(result['known'], 'index file', 'were')} listed already, {result['redundant']:,} describe nothing "
        f"new, {result['left-out-files']:,} are left out"
    )
    for left_out in result["left-out"][:_SHOWN_PROBLEMS_MAX]:
        say(f"  {left_out['location']}: {left_out['reason']}", err=True)
    if result["left-out-files"] > _SHOWN_PROBLEMS_MAX:
        say("  …", err=True)
