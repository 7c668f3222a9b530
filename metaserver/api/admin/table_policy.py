"""The route that returns the policy of a table."""

from __future__ import annotations

from seamark.metaserver.api.http.describe import ResponseSpec
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.api.http.keys import CATALOG, SETTINGS
from seamark.metaserver.catalog.policies import load_policies
from seamark.metaserver.services.policy import TablePolicy, policy_of


@Route(
    "GET",
    "/api/v1/tables/{namespace}/{table}/policy",
    "loadTablePolicy",
    "Returns the properties that table services follow, and where each is set",
    tags=("metadata",),
    answers=(
        ResponseSpec(200, "Of the table, its namespaces, and the server", TablePolicy),
        ResponseSpec(404, "No such table"),
    ),
)
async def load_table_policy(call: Call) -> TablePolicy:
    catalog = call.app[CATALOG]
    metadata = (await catalog.tables.load(call.namespace, call.name)).metadata
    return policy_of(metadata, await load_policies(catalog.parts.store, call.namespace), call.app[SETTINGS])
