"""The route that lists replicas: the servers that share the database and read files through each other."""

from __future__ import annotations

from typing import Annotated

import msgspec

from seamark.formats.runtime.decoding import convert_attributes
from seamark.metaserver.api.http.describe import ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Check, Route
from seamark.metaserver.store.model import STREAM_OWNER_PROTOCOL


class ReplicaAnswer(msgspec.Struct, frozen=True, rename="kebab"):
    """A replica with a live lease."""

    address: Annotated[str, doc("The address (host:port) at which the replica serves other replicas.")]
    weight: Annotated[int, doc("The share of files that the replica caches, relative to the sum of all weights.")]
    version: Annotated[str, doc("The version of the program.")]
    protocol: Annotated[
        int, doc("The version of the protocol between replicas. Replicas with a different version are not queried.")
    ]
    started_ms: int
    expires_in_ms: Annotated[int, doc("The remaining time of the lease in ms, by the clock of the database.")]


class ReplicasAnswer(msgspec.Struct, frozen=True, rename="kebab"):
    """All replicas with live leases."""

    replicas: Annotated[list[ReplicaAnswer], doc("The replicas, sorted by address.")]


@Route(
    method="GET",
    path="/api/v1/replicas",
    operation="listReplicas",
    summary="List the replicas with live leases: servers with peer_address on the database of this server",
    check=Check.CATALOG,
    tags=("operation",),
    answers=(ResponseSpec(200, "All replicas", ReplicasAnswer), ResponseSpec(403, "Requires the role admin")),
)
async def list_replicas(call: Call) -> ReplicasAnswer:
    """List the replicas whose leases are live."""
    stored_replicas = await call.components.store.replicas()
    # The owners of streams have leases in the same list, but serve no files to replicas.
    replicas = [replica for replica in stored_replicas if replica.protocol != STREAM_OWNER_PROTOCOL]
    return ReplicasAnswer([convert_attributes(replica, ReplicaAnswer) for replica in replicas])
