"""The catalog: all catalog services of one server, for the API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from msgspec import structs

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import CommitUnknown, Corrupt, NotFound
from seamark.metaserver.access.keyring import Keyring
from seamark.metaserver.access.page_tokens import PageTokens
from seamark.metaserver.catalog.column_usage import ColumnUsage
from seamark.metaserver.catalog.context import CatalogContext
from seamark.metaserver.catalog.documents import Documents
from seamark.metaserver.catalog.dropped import Dropped
from seamark.metaserver.catalog.functions import Functions
from seamark.metaserver.catalog.imports import ImportLimits, Imports
from seamark.metaserver.catalog.metrics import MetricsReports
from seamark.metaserver.catalog.namespaces import Namespaces
from seamark.metaserver.catalog.ownership.claims import (
    check_claimed_location,
    check_staged,
    check_writable,
    create_missing_claims,
)
from seamark.metaserver.catalog.plans.plan_tables import PlanTables
from seamark.metaserver.catalog.plans.plan_views import PlanViews
from seamark.metaserver.catalog.staging import StagingPasses
from seamark.metaserver.catalog.tables import Tables
from seamark.metaserver.catalog.values import Caller, LoadedTable, LoadedView
from seamark.metaserver.catalog.views import Views
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.objects.warehouse import Warehouse
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import Entry, EntryKind, IdempotencyRecord, NamespacePath
from seamark.metaserver.store.port import PointerStore
from seamark.metaserver.timeline.timeline import Timeline


@dataclass(frozen=True)
class Catalog:
    """The services of the catalog, and checks that several parts of the API need."""

    namespaces: Namespaces
    tables: Tables
    views: Views
    functions: Functions
    imports: Imports
    dropped: Dropped
    plan_tables: PlanTables
    plan_views: PlanViews
    metrics: MetricsReports
    column_usage: ColumnUsage
    documents: Documents
    warehouse: Warehouse
    staging: StagingPasses
    pages: PageTokens
    context: CatalogContext

    async def load_location(self, namespace: NamespacePath, name: str) -> str:
        """Return the table's location.

        Raises:
            NoSuchTable: The table does not exist.
            Forbidden: The table has not claimed the location that its metadata names.
        """
        loaded_table = await self.tables.load(namespace, name)
        assert loaded_table.entry is not None
        await check_claimed_location(self.context, loaded_table.entry.uuid, loaded_table.metadata.location)
        return loaded_table.metadata.location

    async def check_owned(self, uuid: str, location: str) -> None:
        """Check that a table has claimed a location.

        Raises:
            Forbidden: The table has not claimed the location.
        """
        await check_claimed_location(self.context, uuid, location)

    async def check_writable(self, loaded_table: LoadedTable) -> None:
        """Check that the server would write only inside the table's claimed locations.

        The table's metadata determine where the server writes.

        Raises:
            Forbidden: The server would write outside these locations.
        """
        assert loaded_table.entry is not None
        await check_writable(self.context, loaded_table.entry.uuid, loaded_table.metadata)

    async def find_staged_location(self, caller: Caller, token: str, namespace: NamespacePath, name: str) -> str:
        """Return the location of a staged table.

        Args:
            caller: The principal that writes the files of the table.
            token: The signed token that the server returned when the table was staged.
            namespace: The namespace of the table.
            name: The name for which the table was staged.

        Raises:
            Forbidden: The token is invalid, or another table has claimed the location meanwhile.
        """
        location = self.staging.read_location(token, namespace, name)
        await check_staged(self.context, caller, location, namespace, name)
        return location

    async def replay(self, record: IdempotencyRecord) -> LoadedTable | LoadedView | None:
        """Return the table or view that a recorded request committed, or None if the record contains the whole answer.

        If the metadata file is missing, the method does not raise NotFound: the request succeeded, and a client that
        receives 404 for a commit deletes the files that it wrote for the commit.

        Raises:
            CommitUnknown: The metadata file in the record has been deleted since.
        """
        location = record.metadata_location
        if location is None:
            return None
        # The record has only the location of the metadata file, from which the whole answer is rendered.
        entry = Entry(kind=EntryKind.TABLE, namespace=(), name="", uuid="", metadata_location=location)
        try:
            return LoadedTable(entry=entry, metadata=await self.documents.table(location))
        except Corrupt:  # The metadata file belongs to a view.
            view = structs.replace(entry, kind=EntryKind.VIEW)
            return LoadedView(entry=view, metadata=await self.documents.view(location))
        except NotFound:
            raise CommitUnknown(
                f"The request with this idempotency key succeeded, but its metadata file {location} was deleted since; "
                "load the table to see its current state"
            ) from None


@asynccontextmanager
async def open_catalog(
    settings: Settings,
    store: PointerStore,
    objects: ObjectStore,
    clock: Clock,
    timeline: Timeline,
    keyring: Keyring,
    *,
    stored_objects: ObjectStore | None = None,
    import_limits: ImportLimits | None = None,
    is_further: bool = False,
) -> AsyncIterator[Catalog]:
    """Open the catalog.

    Args:
        stored_objects: The storage without the caches that `objects` may have. The default is `objects`.
        import_limits: The limits of imports that the catalogs of a process share. The default is new limits.
        is_further: Whether the catalog is that of a further warehouse, which has no allowed locations.

    Raises:
        ConfigError: The warehouse URI is invalid.
    """
    warehouse = Warehouse(settings.make_warehouse_uri(), settings.allowed_locations, is_further=is_further)
    documents = Documents(objects, clock, budget_bytes=settings.metadata_cache_bytes, stored_objects=stored_objects)
    context = CatalogContext(
        settings=settings,
        store=store,
        objects=objects,
        warehouse=warehouse,
        clock=clock,
        documents=documents,
        timeline=timeline,
        pages=PageTokens(keyring, clock),
    )
    await create_missing_claims(context)
    plans, tables, views = PlanTables(context), Tables(context), Views(context)
    try:
        yield Catalog(
            namespaces=Namespaces(context),
            tables=tables,
            views=views,
            functions=Functions(context),
            imports=Imports(context, tables, views, import_limits or ImportLimits()),
            dropped=Dropped(context),
            plan_tables=plans,
            plan_views=PlanViews(context, plans),
            metrics=MetricsReports(context),
            column_usage=ColumnUsage(context),
            documents=documents,
            warehouse=warehouse,
            staging=StagingPasses(clock, keyring),
            pages=context.pages,
            context=context,
        )
    finally:
        await documents.close()
