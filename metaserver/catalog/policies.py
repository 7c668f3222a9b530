"""Policies of table services and of the gateway's cache. They are properties of a table, or of a namespace.

A property of a namespace applies to all tables in it. The value nearest to the table is effective: the value of the
table, then the value of its namespace, then the values of the parent namespaces.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import chain, islice
from typing import NamedTuple

import msgspec

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.decoding import convert_json
from seamark.formats.services.services import SERVICES, list_inherited_prefixes
from seamark.metaserver.access.principal import ANONYMOUS_NAME
from seamark.metaserver.access.worker_tokens import SERVICE_PRINCIPAL
from seamark.metaserver.store.model import NamespacePath
from seamark.metaserver.store.port import PointerStore

PREFIXES = ("seamark.cache.preload", "seamark.services.", *list_inherited_prefixes())
"""The prefixes of the properties that tables inherit from namespaces."""

SETTERS = "seamark.policy.set-by"
"""The property that contains, as a JSON object, the principal that set each property of the policy.

The server maintains it (`record_setters`).
"""


_RECORDED = (
    *PREFIXES,
    *(prefix for service in SERVICES.values() for prefix in service.property_prefixes if not service.is_inherited),
)
"""The prefixes of the properties for which the server records the principal that set them."""


class Inherited(NamedTuple):
    """The value of a property that tables inherit from a namespace."""

    value: str
    namespace: NamespacePath
    principal_name: str = ""
    """The principal that set the property, or an empty text if it is unknown."""


Policies = Mapping[str, Inherited]
INHERITED_MAX = 200
"""The maximum number of policies that a table inherits. They may come from up to a thousand parent namespaces."""


def add_policies(outer_policies: Policies, namespace: NamespacePath, properties: Mapping[str, str]) -> Policies:
    """Return the policies that the tables of a namespace inherit.

    If there are more than `INHERITED_MAX` policies, the policies of the nearest namespaces are kept.

    Args:
        outer_policies: The policies for the tables of the parent namespace.
        namespace: The namespace whose tables inherit the policies.
        properties: The properties of the namespace.
    """
    policy_properties = {name: value for name, value in properties.items() if name.startswith(PREFIXES)}
    if not policy_properties:
        return outer_policies
    setters = parse_setters(properties)
    own_policies = {
        name: Inherited(value, namespace, setters.get(name, "")) for name, value in policy_properties.items()
    }
    inherited_properties = ((name, policy) for name, policy in outer_policies.items() if name not in own_policies)
    return dict(islice(chain(own_policies.items(), inherited_properties), INHERITED_MAX))


def parse_setters(properties: Mapping[str, str]) -> dict[str, str]:
    """Return the principal that set each property of a policy. Properties without a known setter are left out.

    If the record of the setters is invalid, no setter is known.
    """
    try:
        return convert_json(properties.get(SETTERS) or "{}", dict[str, str])
    except msgspec.MsgspecError:
        return {}


def is_own_policy(name: str) -> bool:
    """Return whether a property is a policy that only Seamark reads.

    The result for the policies `history.expire.…` is False, because engines read and set them too.
    """
    return name.startswith(PREFIXES) and name.startswith("seamark.")


def record_setters(
    principal: str,
    properties: Mapping[str, str],
    old_properties: Mapping[str, str],
    kept_names: Collection[str] = (),
) -> dict[str, str]:
    """Return the properties, with the names of their setters added.

    A job has only the rights that these principals have when the job runs.

    The server stores the names in one property of the table or namespace, which no client can set. Each change is
    computed from the stored value. Names are stored only for the properties with a prefix in `_RECORDED`. Without
    logins there are no names.

    Args:
        principal: The principal that changes the properties: the setter of each value that differs from
            `old_properties`. If it is the principal of the table services, the properties keep their setters.
        properties: The properties after the change. Names of setters in them are ignored.
        old_properties: The properties before the change.
        kept_names: The properties that keep their setters, even if their values change.
    """
    former_setters = parse_setters(old_properties)
    setters: dict[str, str] = {}
    for name, value in properties.items():
        if not name.startswith(_RECORDED):
            continue
        keeps_setter = principal == SERVICE_PRINCIPAL or (name in kept_names and name in old_properties)
        if value != old_properties.get(name) and not keeps_setter:
            if principal != ANONYMOUS_NAME:
                setters[name] = principal
        elif name in former_setters:
            setters[name] = former_setters[name]
    other_properties = {name: value for name, value in properties.items() if name != SETTERS}
    return (
        {**other_properties, SETTERS: msgspec.json.encode(setters, order="sorted").decode()}
        if setters
        else other_properties
    )


def count_policies(properties: Iterable[str]) -> int:
    return sum(name.startswith(PREFIXES) for name in properties)


async def load_policies(store: PointerStore, path: NamespacePath) -> Policies:
    """Return the policies that tables of the namespace inherit."""
    policies: Policies = {}
    for depth in range(1, len(path) + 1):
        namespace = await store.load_namespace(path[:depth])
        if namespace is not None:
            policies = add_policies(policies, namespace.path, namespace.properties)
    return policies


def find_effective_setters(metadata: TableMetadata, policies: Policies) -> dict[str, str]:
    """Return the principal that set each property of the policy that the table has or inherits, by property.

    Properties with unknown setters are left out.
    """
    inherited_properties = {
        name: policy.principal_name for name, policy in policies.items() if name not in metadata.properties
    }
    return {
        name: value for name, value in {**inherited_properties, **parse_setters(metadata.properties)}.items() if value
    }


def with_policies(metadata: TableMetadata, policies: Policies) -> TableMetadata:
    """Return the table metadata with the inherited properties, for table services.

    A property of the table itself takes precedence. Callers must not store the result, because the inherited properties
    would then become properties of the table.
    """
    if not policies:
        return metadata
    inherited_properties = {name: policy.value for name, policy in policies.items()}
    return msgspec.structs.replace(metadata, properties={**inherited_properties, **metadata.properties})
