"""Namespaces. A namespace needs an existing parent, has properties, and can be dropped when it is empty."""

from __future__ import annotations

import builtins
from collections.abc import Collection, Mapping
from functools import partial

from seamark.formats.iceberg.metadata.properties import check_client_properties
from seamark.formats.protocol.wire import check_namespace, encode_json
from seamark.formats.runtime.errors import AlreadyExists, CommitConflict, TooLarge, Unprocessable
from seamark.metaserver.catalog.context import CatalogContext
from seamark.metaserver.catalog.ownership.claims import check_outside
from seamark.metaserver.catalog.policies import INHERITED_MAX, SETTERS, count_policies, record_setters
from seamark.metaserver.catalog.values import Caller, Page, PropertyChanges, make_owner
from seamark.metaserver.store.model import Namespace, NamespacePath
from seamark.metaserver.store.operations import CreateNamespace, DropNamespace, ReplaceNamespaceProperties
from seamark.metaserver.store.port import NAMED_NAMESPACES_MAX

PROPERTIES_CHARACTERS_MAX = 1 << 20
"""The maximum number of characters of all properties of a namespace.

The event loop reads the properties from the database for each request that needs the namespace. Table services also
read the properties of all parent namespaces.
"""
_DEEP_LEVELS_MIN = 9
"""The minimum number of levels of a deep namespace, for which the lower maximum `DEEP_CHARACTERS_MAX` applies."""
DEEP_CHARACTERS_MAX = 16 << 10


class Namespaces:
    def __init__(self, context: CatalogContext) -> None:
        self._context = context

    async def create(self, caller: Caller, path: NamespacePath, properties: dict[str, str]) -> Namespace:
        """Create a namespace.

        Raises:
            AlreadyExists: The namespace exists.
            NoSuchNamespace: The parent does not exist.
            BadRequest: The name or a property is invalid, for example a `location` outside the warehouse.
        """
        requested_ms = self._context.clock.now_ms()
        check_namespace(path)
        await self._check_properties(caller, path, properties)
        if "location" in properties:
            await self._context.check_location(caller, properties["location"], "The namespace's location")
            await check_outside(self._context, properties["location"], "The namespace's location")
        properties = record_setters(caller.principal_name, properties, {})
        namespace = self.add_location(Namespace(path=path, properties=properties))
        body = encode_json({"namespace": list(path), "properties": namespace.properties})
        await self._context.transact(
            [
                CreateNamespace(path=path, properties=properties),
                *make_owner(caller, path),
                self._context.make_namespace_instant(caller, path, "create", requested_ms=requested_ms),
                *self._context.make_answer_record(caller, status=200, body=body),
            ]
        )
        return namespace

    async def get(self, path: NamespacePath) -> Namespace:
        """Return the namespace. Its properties always include a `location`, which Trino needs for CTAS."""
        return self.add_location(await self._context.require_namespace(path))

    async def exists(self, path: NamespacePath) -> bool:
        return await self._context.store.load_namespace(path) is not None

    async def list(
        self,
        parent: NamespacePath,
        page_token: str | None,
        page_size: int | None,
        visible: Collection[str] | None = None,
    ) -> Page[NamespacePath]:
        """Return a page of the direct children of `parent`. An empty `parent` means the catalog.

        Args:
            visible: The names of the children that the caller may see, or None for all children. Only these names are
                looked up, so that neither the pages nor their duration reveal the number of other children.

        Raises:
            NoSuchNamespace: The parent does not exist.
        """
        if parent:
            await self._context.require_namespace(parent)

        async def read(after: str | None, limit: int) -> list[NamespacePath]:
            if visible is None:
                return await self._context.store.list_namespaces(parent, after, limit)
            names = sorted(name for name in visible if after is None or name > after)
            children: builtins.list[NamespacePath] = []
            for start in range(0, len(names), NAMED_NAMESPACES_MAX):
                children += await self._context.store.find_namespaces(
                    parent, names[start : start + NAMED_NAMESPACES_MAX]
                )
                if len(children) >= limit:
                    break
            return children[:limit]

        return await self._context.read_page(read, lambda child: child[-1], page_token, page_size)

    async def update_properties(
        self, caller: Caller, path: NamespacePath, removals: builtins.list[str], updates: dict[str, str]
    ) -> PropertyChanges:
        """Set and remove properties. If another request changes the properties at the same time, try again.

        Raises:
            Unprocessable: A key is both set and removed.
        """
        requested_ms = self._context.clock.now_ms()
        contradictory_keys = sorted(set(removals) & set(updates))
        if contradictory_keys:
            raise Unprocessable(
                f"Keys in both removals and updates: {', '.join(contradictory_keys)}; name each key once"
            )
        await self._check_properties(caller, path, updates)
        if "location" in updates:
            await self._context.check_location(caller, updates["location"], "The namespace's location")
            await check_outside(self._context, updates["location"], "The namespace's location")
        removed_names = dict.fromkeys(removals)
        for attempt in range(self._context.settings.commit_retries + 1):
            stored_namespace = await self._context.require_namespace(path)
            changes = PropertyChanges(
                updated=list(updates),
                removed=[key for key in removed_names if key in stored_namespace.properties],
                missing=[key for key in removed_names if key not in stored_namespace.properties],
            )
            properties = {
                key: value for key, value in stored_namespace.properties.items() if key not in removed_names
            } | updates
            properties = record_setters(caller.principal_name, properties, stored_namespace.properties)
            # A namespace from before the limit may exceed it, so removing properties is always allowed.
            if updates:
                _check_size(path, properties)
            replace = ReplaceNamespaceProperties(
                path=path, expected_version=stored_namespace.version, properties=properties
            )
            try:
                await self._context.transact(
                    [
                        replace,
                        self._context.make_namespace_instant(
                            caller, path, "update", requested_ms=requested_ms, changes=changes
                        ),
                        *self._context.make_answer_record(caller, status=200, body=encode_json(changes)),
                    ]
                )
            except CommitConflict:
                if attempt == self._context.settings.commit_retries:
                    raise
            else:
                return changes
        raise AssertionError("the loop returns or raises")

    async def put(self, caller: Caller, path: NamespacePath, properties: dict[str, str]) -> Namespace:
        """Create a namespace with these properties, or replace all properties of an existing namespace.

        If the namespace has exactly these properties, it does not change.

        Raises:
            NoSuchNamespace: The parent does not exist.
            AlreadyExists, CommitConflict: Other requests created or changed the namespace in each attempt.
        """
        properties = {name: value for name, value in properties.items() if name != SETTERS}
        for attempt in range(self._context.settings.commit_retries + 1):
            stored_namespace = await self._context.store.load_namespace(path)
            try:
                if stored_namespace is None:
                    return await self.create(caller, path, properties)
                if {
                    name: value for name, value in stored_namespace.properties.items() if name != SETTERS
                } != properties:
                    await self._replace_properties(caller, stored_namespace, properties)
            except (AlreadyExists, CommitConflict):
                # Another request created or changed the namespace.
                if attempt == self._context.settings.commit_retries:
                    raise
            else:
                return await self.get(path)
        raise AssertionError("the loop returns or raises")

    async def _replace_properties(
        self, caller: Caller, stored_namespace: Namespace, properties: dict[str, str]
    ) -> None:
        requested_ms = self._context.clock.now_ms()
        await self._check_properties(caller, stored_namespace.path, properties)
        location = properties.get("location")
        if location is not None and location != stored_namespace.properties.get("location"):
            await self._context.check_location(caller, location, "The namespace's location")
            await check_outside(self._context, location, "The namespace's location")
        former_properties = {name: value for name, value in stored_namespace.properties.items() if name != SETTERS}
        changes = PropertyChanges(
            updated=[name for name, value in properties.items() if former_properties.get(name) != value],
            removed=[name for name in former_properties if name not in properties],
            missing=[],
        )
        properties = record_setters(caller.principal_name, properties, stored_namespace.properties)
        await self._context.transact(
            [
                ReplaceNamespaceProperties(
                    path=stored_namespace.path, expected_version=stored_namespace.version, properties=properties
                ),
                self._context.make_namespace_instant(
                    caller, stored_namespace.path, "update", requested_ms=requested_ms, changes=changes
                ),
            ]
        )

    async def _check_properties(self, caller: Caller, path: NamespacePath, properties: dict[str, str]) -> None:
        _check_size(path, properties)
        check = partial(check_client_properties, properties, "A namespace")
        await self._context.large.run_by_size(caller.principal_name, caller.request_bytes, check)

    async def drop(self, caller: Caller, path: NamespacePath) -> None:
        """Drop a namespace.

        Raises:
            NoSuchNamespace: The namespace does not exist.
            NamespaceNotEmpty: The namespace contains tables, views, functions or namespaces. Dropped entries do not
                count.
        """
        await self._context.transact(
            [
                DropNamespace(path=path),
                self._context.make_namespace_instant(caller, path, "drop", requested_ms=self._context.clock.now_ms()),
                *self._context.make_answer_record(caller, status=204),
            ]
        )

    def add_location(self, namespace: Namespace) -> Namespace:
        if "location" in namespace.properties:
            return namespace
        location = self._context.warehouse.make_namespace_location(namespace.path)
        return Namespace(
            path=namespace.path,
            properties={**namespace.properties, "location": location},
            version=namespace.version,
        )


def _check_size(path: NamespacePath, properties: Mapping[str, str]) -> None:
    characters = sum(map(len, properties)) + sum(map(len, properties.values()))
    limit = PROPERTIES_CHARACTERS_MAX if len(path) < _DEEP_LEVELS_MIN else DEEP_CHARACTERS_MAX
    if characters > limit:
        scope = "" if len(path) < _DEEP_LEVELS_MIN else f" for a namespace with more than {_DEEP_LEVELS_MIN - 1} levels"
        raise TooLarge(
            f"The properties of the namespace would have {characters:,} characters; the limit is {limit:,}{scope}"
        )
    policies = count_policies(properties)
    if policies > INHERITED_MAX:
        raise TooLarge(f"The namespace would have {policies:,} policies for its tables; the limit is {INHERITED_MAX:,}")
