"""Routes with which tools such as Terraform declare a state. A repeated request changes nothing.

The body of a PUT is the whole state: a property that is missing in the body is removed.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.api.admin.table_services import load_requested_policy
from seamark.metaserver.api.http.describe import ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.api.http.table_updates import commit_updates
from seamark.metaserver.services.policy import PROPERTIES, TablePolicy, check_policy


class NamespaceState(msgspec.Struct, frozen=True):
    """The declared state of a namespace."""

    properties: Annotated[dict[str, str], doc("All properties that the namespace has after the request.")] = {}


class NamespaceAnswer(msgspec.Struct, frozen=True):
    """A namespace, as the specification's loadNamespaceMetadata returns it."""

    namespace: list[str]
    properties: dict[str, str]


class PolicyState(msgspec.Struct, frozen=True):
    """The declared policy of a table."""

    properties: Annotated[
        dict[str, str],
        doc("All policy properties that the table has after the request. Other properties do not change."),
    ]


@Route(
    "PUT",
    "/api/v1/namespaces/{namespace}",
    "putNamespace",
    "Create a namespace with these properties, or replace its properties; idempotent",
    tags=("metadata",),
    answers=(
        ResponseSpec(200, "The namespace", NamespaceAnswer),
        ResponseSpec(400, "A property is invalid"),
        ResponseSpec(404, "The parent does not exist"),
        ResponseSpec(409, "Other requests changed the properties at the same time"),
    ),
).takes(NamespaceState)
async def put_namespace(call: Call, body: NamespaceState) -> NamespaceAnswer:
    """Create a namespace with these properties, or replace its properties."""
    namespace = await call.components.catalog.namespaces.put(call.caller, call.namespace, body.properties)
    return NamespaceAnswer(list(namespace.path), dict(namespace.properties))


@Route(
    "PUT",
    "/api/v1/tables/{namespace}/{table}/policy",
    "putTablePolicy",
    "Replace the properties of a table that control its table services; idempotent",
    tags=("metadata",),
    answers=(
        ResponseSpec(200, "The policy, with inherited properties and defaults", TablePolicy),
        ResponseSpec(400, "A property is unknown, or its value is invalid"),
        ResponseSpec(404, "No such table"),
        ResponseSpec(409, "Concurrent commits conflicted in every attempt"),
    ),
).takes(PolicyState)
async def put_table_policy(call: Call, body: PolicyState) -> TablePolicy:
    """Replace the properties of a table that control its table services."""
    if problem := check_policy(body.properties):
        raise BadRequest(f"The policy is invalid: {problem}")

    def compute_updates(metadata: TableMetadata) -> list[dict[str, Any]]:
        present_properties = {name: value for name, value in metadata.properties.items() if name in PROPERTIES}
        changed_properties = {
            name: value for name, value in body.properties.items() if present_properties.get(name) != value
        }
        removed_names = sorted(present_properties.keys() - body.properties.keys())
        updates: list[dict[str, Any]] = []
        if changed_properties:
            updates.append({"action": "set-properties", "updates": changed_properties})
        if removed_names:
            updates.append({"action": "remove-properties", "removals": removed_names})
        return updates

    await commit_updates(call, compute_updates)
    return await load_requested_policy(call)
