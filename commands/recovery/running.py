"""The environment of commands that open the database themselves: settings, the home folder, locks and errors."""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import click

from seamark.commands.options import Misconfigured, load_settings, to_settings_error
from seamark.commands.terminal import escape_for_terminal, say
from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import ConfigError, SeamarkError
from seamark.metaserver.runtime.home import PRIVATE_UMASK, lock_home, make_private, prepare_home
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.warehouses.warehouses import find_warehouse_settings

T = TypeVar("T")

STORAGE_SETTINGS = (
    *("home", "database", "warehouse", "allowed_locations", "warehouse_umask"),
    *(
        "s3_endpoint",
        "s3_region",
        "s3_access_key_id",
        "s3_secret_access_key",
        "s3_path_style",
        "s3_folder",
        "s3_backend",
    ),
    *("azure_endpoint", "azure_account_key", "azure_tenant_id", "azure_client_id", "azure_client_secret"),
    *("gcs_endpoint", "gcs_service_account_key", "gcs_service_account_file", "hdfs_config_folder"),
)
"""The flags of commands that read the warehouse. Other settings come from variables and the TOML file."""


warehouse_name_option = click.option(
    "--warehouse-name",
    metavar="NAME",
    help="Further warehouse, which has its own database. Default: the server's own warehouse.",
)


def run_offline(
    work: Callable[[Settings], Coroutine[Any, Any, T]],
    flags: dict[str, Any],
    config: Path | None,
    *,
    is_locked: bool,
    creates: bool = False,
) -> T:
    """Run the work of a command with the settings, and report its errors as messages.

    Args:
        work: The work, which opens the database.
        flags: The settings from the command line.
        config: The TOML file with settings.
        is_locked: Whether the command refuses to run while a server runs from the home folder.
        creates: Whether a missing home folder is created.
    """
    has_warehouse_name = "warehouse_name" in flags
    warehouse_name, warehouse_uri = flags.pop("warehouse_name", None), flags.get("warehouse")
    if has_warehouse_name and warehouse_uri and not set(warehouse_uri) & set(":/"):
        raise Misconfigured(
            f"--warehouse is the URI of the server's own warehouse, not {escape_for_terminal(warehouse_uri)}; for the "
            f"further warehouse of this name, write --warehouse-name {escape_for_terminal(shlex.quote(warehouse_uri))}"
        )
    settings = load_settings(flags, config)
    try:
        os.umask(PRIVATE_UMASK)
        for path in prepare_home(settings) if creates else make_private(settings):
            say(f"{path} could be read by other accounts; it is private now", err=True)
        with _lock_home(settings, takes_lock=is_locked):
            if warehouse_name is not None:
                settings = asyncio.run(find_warehouse_settings(settings, SystemClock(), warehouse_name))
            return asyncio.run(work(settings))
    except ConfigError as error:
        raise to_settings_error(error) from None
    except SeamarkError as error:
        raise click.ClickException(escape_for_terminal(error.message)) from None


@contextmanager
def _lock_home(settings: Settings, *, takes_lock: bool) -> Iterator[None]:
    if takes_lock and settings.home.is_dir():
        with lock_home(settings, click.get_current_context().command_path):
            yield
    else:
        yield


def read_program_version() -> str:
    return metadata.version("seamark")
