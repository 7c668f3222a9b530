"""Check a warehouse: write an object, read it and delete it, with the same settings as the server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

from seamark.commands.installation.engine_files import CheckResult
from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import ConfigError, RetryLater, SeamarkError
from seamark.metaserver.objects.router import open_objects
from seamark.metaserver.objects.storages import SERVER_STORAGES
from seamark.metaserver.objects.warehouse import Warehouse
from seamark.metaserver.settings.settings import Settings

TIMEOUT_S = 20.0
_CONTENT = b"Written by seamark doctor. It can be deleted."


def check_warehouse(settings: Settings) -> Iterator[CheckResult]:
    """Check that the warehouse can be written and read. A missing local folder is not created."""
    try:
        root = Warehouse(settings.make_warehouse_uri(), settings.allowed_locations).roots[0]
    except ConfigError as error:
        yield CheckResult(
            "warehouse", error.message, "Set --warehouse to a folder or to s3://BUCKET/PATH", is_fault=True
        )
        return
    if root.is_local and not Path(root.file_path).exists():
        yield _check_creatable(Path(root.file_path))
        return
    try:
        asyncio.run(_probe_storage(settings, str(root)))
    except (SeamarkError, TimeoutError) as error:
        text = error.message if isinstance(error, SeamarkError) else f"no answer within {TIMEOUT_S:g} s"
        fix = SERVER_STORAGES[root.scheme].suggest_fix(error, settings)
        yield CheckResult("warehouse", f"{root} cannot be written: {text}", fix, is_fault=True)
    else:
        yield CheckResult("warehouse", f"{root} can be written and read")


def _check_creatable(folder: Path) -> CheckResult:
    parent = folder
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if parent.is_dir() and os.access(parent, os.W_OK | os.X_OK):
        return CheckResult("warehouse", f"file://{folder} does not exist; the server creates it")
    fix = f"Let this account write {parent}, or set --warehouse to another folder"
    return CheckResult("warehouse", f"file://{folder} cannot be created", fix, is_fault=True)


async def _probe_storage(settings: Settings, root: str) -> None:
    """Write, read and delete an object. Errors of the storage are raised unchanged.

    Raises:
        RetryLater: The content that was read differs from the content that was written.
        TimeoutError: The storage does not answer within `TIMEOUT_S`.
    """
    clock = SystemClock()
    location = f"{root}/seamark-doctor-{clock.uuid4()}"
    async with asyncio.timeout(TIMEOUT_S), open_objects(settings, clock) as objects:
        await objects.create(location, _CONTENT)
        try:
            if await objects.read(location) != _CONTENT:
                raise RetryLater("the content of the object that was read differs from what was written")
        finally:
            await objects.delete(location)
