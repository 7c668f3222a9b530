"""Opens a catalog without a server, for commands that recover it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from seamark.formats.runtime.clock import Clock
from seamark.metaserver.access.keyring import Keyring
from seamark.metaserver.catalog.catalog import open_catalog
from seamark.metaserver.catalog.context import CatalogContext
from seamark.metaserver.objects.router import open_objects
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.port import PointerStore
from seamark.metaserver.timeline.timeline import open_timeline


@asynccontextmanager
async def open_context(settings: Settings, store: PointerStore, clock: Clock) -> AsyncIterator[CatalogContext]:
    """Open the context of a catalog that serves no requests.

    The signing keys are not loaded, so a lost encryption key does not matter.

    Raises:
        ConfigError: The warehouse is invalid.
    """
    keyring = Keyring((), clock)
    async with (
        open_objects(settings, clock) as objects,
        open_timeline(settings, store, clock) as timeline,
        open_catalog(settings, store, objects, clock, timeline, keyring) as catalog,
    ):
        yield catalog.context
