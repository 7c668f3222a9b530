"""`seamark indexer`: the process that keeps all indexes built and merged, a client of the running server.

Any number of them may run, and be killed at any time. Logs go to standard error. Exit codes: 0 when it was told to end
(SIGTERM, Ctrl-C), or `--once` and nothing failed; 1 when something did; 2 when the command makes no sense.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click
import structlog

from connector.errors import ClientError
from connector.indexer import Indexer
from connector.indexes import IndexClient
from metaserver.api.logs import configure_logging
from metaserver.cli.build import engine_options, interruptible, open_workers
from metaserver.cli.explain import served_at
from metaserver.cli.options import CONTEXT, load_settings, settings_flags

_log = structlog.get_logger("seamark.indexer")


@click.command(context_settings=CONTEXT)
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=1),
    metavar="SECONDS",
    default=30,
    show_default=True,
    help="Between the end of a round and the next.",
)
@click.option("--once", is_flag=True, help="One round, then end.")
@engine_options
@click.option(
    "--url", envvar="SEAMARK_URL", show_envvar=True, help="Of the server. Default: as --home/server.json has it."
)
@click.option("--token", envvar="SEAMARK_TOKEN", help="A bearer token, of a writer. [SEAMARK_TOKEN]")
@settings_flags(("home", "log_level", "log_format"))
def indexer(
    interval_s: float,
    once: bool,
    engine: str,
    master: str,
    url: str | None,
    token: str | None,
    config: Path | None,
    **flags: Any,
) -> None:
    """Keeps the indexes of all tables built, until SIGTERM or Ctrl-C.

    Round after round it looks at every table, indexes the data files that were committed since, and merges index files
    where there are many. Writers notice nothing. Only one of several indexers works on an index at a time.
    """
    configure_logging(load_settings(flags, config))
    try:
        client = IndexClient(url or served_at(config, {"home": flags["home"]}), token=token)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    keeper = Indexer(client, partial(open_workers, engine, master))
    with interruptible():
        try:
            _log.info("indexer started", url=client.url, engine=engine)
            if not once:
                keeper.run(interval_s)
            elif keeper.round().failed:
                raise click.exceptions.Exit(1)
        except KeyboardInterrupt as signal:
            _log.info("indexer ends", reason=str(signal) or "SIGINT")
        except ClientError as error:
            raise click.ClickException(error.message) from None
        finally:
            client.close()
