"""`seamark keys`: replaces the keys that sign access tokens, plan tokens and page tokens, directly in the database."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import click

from seamark.commands.options import json_option, load_settings, settings_flags, to_settings_error
from seamark.commands.terminal import print_result
from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import ConfigError, SeamarkError
from seamark.metaserver.access.keyring import REFRESH_S, renew_keys
from seamark.metaserver.runtime.home import PRIVATE_UMASK, prepare_home
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.open import open_store
from seamark.metaserver.warehouses.definitions import make_settings


@click.group()
def keys() -> None:
    """Replace the keys that sign access tokens, plan tokens and page tokens."""


@keys.command("renew")
@json_option
@settings_flags(("home", "database", "encryption_key", "encryption_key_file"))
def renew(as_json: bool, config: Path | None, **flags: Any) -> None:
    """Replace the signing keys. Access tokens, running scans and running listings become invalid.

    Use this command if a key may have leaked, or if the encryption key is lost. Bearer tokens (seamark token) and
    tables stay valid, and clients log in again automatically. Running servers use the new keys within a minute.
    """
    settings = load_settings(flags, config)
    try:
        protected_by = asyncio.run(_renew_keys(settings))
    except ConfigError as error:
        raise to_settings_error(error) from None
    except SeamarkError as error:
        raise click.ClickException(error.message) from None
    print_result(
        {"encrypted-with": protected_by, "used-within-s": REFRESH_S},
        f"New signing keys, encrypted with {protected_by}. Running servers use them within {REFRESH_S:g} s.",
        as_json=as_json,
    )


async def _renew_keys(settings: Settings) -> str:
    """Replace the signing keys of the server and of all further warehouses.

    Returns:
        A description of the key or file with which the new keys are encrypted.
    """
    os.umask(PRIVATE_UMASK)
    for path in prepare_home(settings):
        click.echo(f"{path} could be read by other accounts; it is private now", err=True)
    clock = SystemClock()
    async with open_store(settings.make_database_url(), clock=clock) as store:
        protected_by = await renew_keys(settings, store, clock)
        for warehouse in await store.list_warehouses():
            warehouse_settings = make_settings(settings, warehouse, {}, {})
            async with open_store(warehouse_settings.make_database_url(), clock=clock) as warehouse_store:
                await renew_keys(warehouse_settings, warehouse_store, clock)
        return protected_by
