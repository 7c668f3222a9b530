"""`seamark serve`: runs one server, or a supervisor with its workers, until it is stopped."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path
from typing import Any

import click

from seamark.commands.options import load_settings, settings_flags, to_settings_error
from seamark.commands.serving.extensions import EXTENSIONS
from seamark.commands.serving.workers import supervise
from seamark.formats.runtime.errors import ConfigError, SeamarkError
from seamark.metaserver.api.http.observability.logs import configure_logging
from seamark.metaserver.api.listening import bind_socket, make_server_url
from seamark.metaserver.objects.router import prepare_warehouse_root
from seamark.metaserver.runtime.home import PRIVATE_UMASK, lock_home, prepare_home, write_server_file
from seamark.metaserver.server import log_repaired, open_certificate, run
from seamark.metaserver.settings.settings import Settings, redact_url


@click.command()
@settings_flags()
def serve(config: Path | None, **flags: Any) -> None:
    """Run the server until SIGTERM or Ctrl-C.

    Each flag is also an environment variable (in brackets) and a key of the TOML file. A flag has precedence over a
    variable, a variable over the file, and the file over the default. When the server is ready, it prints its URL. Logs
    go to standard error.
    """
    settings = load_settings(flags, config)
    try:
        _serve(settings)
    except ConfigError as error:
        raise to_settings_error(error) from None
    except SeamarkError as error:
        raise click.ClickException(error.message) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        full_path = error.filename or f"the home {settings.home}"
        raise to_settings_error(
            ConfigError(f"The disk of {full_path} is full: free space, then start the server again")
        ) from None


def _serve(settings: Settings) -> None:
    """Prepare the home folder and the warehouse, and run the server with the lock of the home folder."""
    # The server's own files are private. Files of tables outside the home folder keep the usual modes.
    umask = os.umask(PRIVATE_UMASK)
    settings = dataclasses.replace(settings, warehouse_umask=settings.warehouse_umask or f"{umask:03o}")
    configure_logging(settings)
    log_repaired(prepare_home(settings))
    prepare_warehouse_root(settings)
    with lock_home(settings):
        _serve_locked(settings)


def _serve_locked(settings: Settings) -> None:
    """Run the server, or the supervisor of several server processes. The caller holds the lock of the home folder.

    When the server is ready, its address is written to a file and printed. The file is removed at the end.
    """
    open_certificate(settings)  # Refuse invalid files before anything starts.
    shared = settings.workers > 1
    sock = bind_socket(settings, shared=shared)
    url, port = make_server_url(settings, sock), sock.getsockname()[1]
    written_files: list[Path] = []

    def announce() -> None:
        written_files.append(write_server_file(settings, url, port))
        database = redact_url(settings.make_database_url())
        click.echo(f"Seamark is ready at {url}, warehouse {settings.make_warehouse_uri()}, database {database}")

    try:
        if shared:
            supervise(settings, sock, announce)
        else:
            run(settings, sock, EXTENSIONS, announce)
    finally:
        sock.close()
        for path in written_files:
            path.unlink(missing_ok=True)
