"""Logs whether the storage of the warehouse answers when a server starts, with advice if it does not answer.

A server starts without its storage, because the storage may become available later. This module logs the
problem once. Otherwise, only the errors of requests would show it.
"""

from __future__ import annotations

import asyncio

import structlog

from seamark.formats.runtime.errors import SeamarkError
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.objects.storages import find_storage
from seamark.metaserver.settings.settings import Settings

TIMEOUT_S = 10.0
INTERVAL_S = 10.0
_log = structlog.get_logger("seamark.server")


async def wait_until_reachable(objects: ObjectStore, settings: Settings) -> None:
    """Wait until the storage answers.

    If it does not answer at first, log one warning, and log again when it answers.
    """
    has_warned = False
    while (error := await _ping(objects)) is not None:
        if not has_warned:
            warehouse = settings.make_warehouse_uri()
            address = find_storage(warehouse).get_endpoint(settings)
            endpoint = {"endpoint": address} if address else {}
            reason = error.message if isinstance(error, SeamarkError) else str(error)
            reason = reason or f"no answer within {TIMEOUT_S:g} s"
            fix = find_storage(warehouse).suggest_fix(error, settings)
            _log.warning("the warehouse is not usable", warehouse=warehouse, **endpoint, error=reason, fix=fix)
            has_warned = True
        await asyncio.sleep(INTERVAL_S)
    if has_warned:
        _log.info("the warehouse is usable", warehouse=settings.make_warehouse_uri())


async def _ping(objects: ObjectStore) -> SeamarkError | OSError | None:
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await objects.ping()
    except (SeamarkError, OSError) as error:  # TimeoutError is an OSError.
        return error
    return None
