"""`seamark indexer`: a client process that builds, merges and audits the indexes of all tables.

Several indexers can run at the same time, and they can be killed at any time. Logs go to standard error. Exit codes: 0
if the process was stopped (SIGTERM, Ctrl-C), or if it has finished with `--once` and nothing failed; 1 if something
failed; 2 for invalid arguments.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click
import structlog

from seamark.commands.build import engine_options, handle_sigterm, open_workers
from seamark.commands.connecting import find_server_url
from seamark.commands.options import address_options, load_settings, settings_flags
from seamark.connector.client.errors import ClientError
from seamark.connector.client.indexes import IndexClient
from seamark.connector.index.indexer import AuditLimits, Indexer
from seamark.metaserver.api.http.observability.logs import configure_logging

_SECONDS_PER_HOUR = 3600
_log = structlog.get_logger("seamark.indexer")


@click.command()
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=1),
    metavar="SECONDS",
    default=30,
    show_default=True,
    help="Seconds between two rounds.",
)
@click.option("--once", is_flag=True, help="Run only one round.")
@click.option(
    "--audit-bytes",
    type=click.IntRange(min=0),
    metavar="BYTES",
    default=AuditLimits().size_bytes,
    show_default=True,
    help="Bytes of index files to verify in a round. With 0, the indexer verifies none.",
)
@click.option(
    "--audit-seconds",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    default=AuditLimits().seconds,
    show_default=True,
    help="Maximum seconds for which a round verifies index files.",
)
@click.option(
    "--audit-every",
    "audit_hours",
    type=click.FloatRange(min=0),
    metavar="HOURS",
    default=AuditLimits().every_s / _SECONDS_PER_HOUR,
    show_default=True,
    help="Minimum hours between two audits of an index.",
)
@engine_options
@address_options
@settings_flags(("home", "log_level", "log_format"))
def indexer(
    interval_s: float,
    once: bool,
    audit_bytes: int,
    audit_seconds: float,
    audit_hours: float,
    engine: str,
    master: str,
    url: str | None,
    token: str | None,
    config: Path | None,
    **flags: Any,
) -> None:
    """Index the data files of all tables, until SIGTERM or Ctrl-C.

    Each round indexes the new data files of each table and merges small index files. Writers do not wait. If several
    indexers run, only one of them works on an index at a time.

    At the end of a round, the indexer verifies index files, beginning with the index whose last audit is the oldest. It
    checks their checksums, and compares entries with data files. It quarantines wrong index files and rebuilds them in
    the next round.
    """
    configure_logging(load_settings(flags, config))
    try:
        client = IndexClient(url or find_server_url(config, {"home": flags["home"]}), token=token)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    limits = AuditLimits(audit_bytes, audit_seconds, _SECONDS_PER_HOUR * audit_hours)
    index_rounds = Indexer(client, partial(open_workers, engine, master), audit_limits=limits if audit_bytes else None)
    with handle_sigterm():
        try:
            _log.info("indexer started", url=client.url, engine=engine)
            if not once:
                index_rounds.run(interval_s)
            elif index_rounds.maintain_all_tables().failed:
                raise click.exceptions.Exit(1)
        except KeyboardInterrupt as interrupt:
            _log.info("indexer ends", reason=str(interrupt) or "SIGINT")
        except ClientError as error:
            raise click.ClickException(error.message) from None
        finally:
            client.close()
