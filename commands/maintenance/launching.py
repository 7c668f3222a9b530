"""The option `--on` of `seamark run`, which runs a job on Spark in the same way as the server's table services."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from seamark.commands.options import Misconfigured
from seamark.commands.programs import SPARK_DRIVER
from seamark.commands.terminal import say
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.names import split_table
from seamark.connector.spark.java import find_java_problem
from seamark.connector.write.replacements import RewriteReport
from seamark.formats.protocol.wire import RECHECK_AFTER
from seamark.metaserver.services.job import Job, JobFailed
from seamark.metaserver.services.launching.launchers import CLUSTER, LOCAL, JobLogin
from seamark.metaserver.services.launching.spark_submit import SparkSubmit, find_submit_program

PROCESS = "process"
_LOCAL_MASTER = "local[*]"


def launch_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add `--on`, `--master` and `--submit-options` to a command."""
    command = click.option(
        "--submit-options",
        default="",
        metavar="WORDS",
        help="Further options of spark-submit, such as '--executor-memory 4g --conf key=value'.",
    )(command)
    command = click.option(
        "--master",
        envvar="SPARK_MASTER",
        show_envvar=True,
        help="Spark master for --on cluster: spark://host:7077, yarn or k8s://….",
    )(command)
    return click.option(
        "--on",
        type=click.Choice((PROCESS, LOCAL, CLUSTER)),
        default=PROCESS,
        show_default=True,
        help="Where the files are rewritten: in this process, by Spark on this machine (local), or by Spark on a "
        "cluster (cluster).",
    )(command)


def _ignore_progress(_: object) -> None:
    """Ignore the progress of a job, which the server would record."""


def run_on_spark(
    client: IndexClient,
    service: str,
    table: str,
    launcher_name: str,
    master: str | None,
    submit_options: str,
    **arguments: Any,
) -> RewriteReport:
    """Run a job that rewrites files by spark-submit.

    Args:
        client: A client of the server.
        service: The table service to which the job belongs.
        table: The name of the table.
        launcher_name: `LOCAL` for Spark in a process of this machine, or `CLUSTER`.
        master: The URL of the Spark master for `CLUSTER`.
        submit_options: Further options of spark-submit.
        arguments: The arguments of the job.

    Raises:
        Misconfigured: The Spark master is not set, or Spark is not installed.
        ClickException: The job fails.
    """
    if launcher_name == CLUSTER and not master:
        raise Misconfigured("--on cluster needs --master, such as spark://host:7077")
    program = find_submit_program()
    if program is None:
        raise Misconfigured("Spark is not installed; run pip install 'seamark[spark]', or use --on process")
    if not _has_environment_file(program) and (problem := find_java_problem()) is not None:
        raise Misconfigured(f"Spark does not start: {problem}, or use --on process")
    if launcher_name == LOCAL and importlib.util.find_spec("pyspark") is None:
        raise Misconfigured("PySpark is not installed; run pip install 'seamark[spark]', or use --on process")
    *namespace, name = split_table(table)
    # The umask can only be read by setting it.
    umask = os.umask(0o022)
    os.umask(umask)

    async def read_token(_: Job) -> str:
        return str(client.token)

    login = JobLogin(client.url, None if client.token is None else read_token, None, umask)
    launcher = SparkSubmit(
        _LOCAL_MASTER if launcher_name == LOCAL else str(master), submit_options, login, os.environ, SPARK_DRIVER
    )
    if sys.stderr.isatty():
        say(f"Starting Spark for {service} of {table}", err=True)
    try:
        job = Job(service, tuple(namespace), name, uuid="", arguments=arguments)
        totals = asyncio.run(launcher.run(job, _ignore_progress))
    except JobFailed as error:
        raise click.ClickException(f"The job on {table} failed: {error}") from None
    # If another job has the lease of the table, the job only states when to try again.
    if RECHECK_AFTER in totals and len(totals) == 1:
        raise click.ClickException(f"Another job is rewriting files of {table}; try again later")
    return RewriteReport(**totals)


def _has_environment_file(program: str) -> bool:
    """Return whether the spark-submit at `program` reads a file spark-env.sh.

    This file can set a Java that other programs do not find.
    """
    folder = os.environ.get("SPARK_CONF_DIR") or Path(program).resolve().parents[1] / "conf"
    return Path(folder, "spark-env.sh").is_file()
