"""The policy of a table for table services, from the properties of the table and its namespaces and the settings."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.types.near_names import find_near_names
from seamark.formats.runtime.errors import BadRequest
from seamark.formats.services.service import Requirement, ServiceProperty
from seamark.formats.services.services import SERVICES
from seamark.metaserver.catalog.policies import PREFIXES, Policies
from seamark.metaserver.services import budgets
from seamark.metaserver.services.launching import launchers
from seamark.metaserver.settings.settings import Settings

_NAME_SHOWN_CHARACTERS = 200


def _require_one_of(name: str, choices: tuple[str, ...]) -> Requirement:
    """Make a requirement: a function that returns None if the property has one of the values, else the valid values."""
    return lambda properties: None if properties[name] in choices else f"one of {', '.join(choices)}"


def _explain_invalid_window(properties: Mapping[str, str]) -> str | None:
    """Return None if the property names at least one valid window, or else the description of a valid value."""
    windows = budgets.parse_windows(properties[budgets.WINDOW])
    return None if windows else "a time of day in UTC, such as 22:00-06:00, or several"


_SCHEDULING = (
    ServiceProperty(launchers.PROPERTY, launchers.AUTO, _require_one_of(launchers.PROPERTY, launchers.CHOICES)),
    ServiceProperty(budgets.PRIORITY, budgets.NORMAL, _require_one_of(budgets.PRIORITY, tuple(budgets.PRIORITIES))),
    ServiceProperty(budgets.WINDOW, "", _explain_invalid_window, "any time"),
)
"""The properties that control the jobs of all services."""
PROPERTIES: dict[str, ServiceProperty] = {
    declared.name: declared
    for properties in (*(service.list_policy_properties() for service in SERVICES.values()), _SCHEDULING)
    for declared in properties
}
"""The properties of a policy, by name."""
_SERVICE_BY_SWITCH = {service.switch: service for service in SERVICES.values() if service.switch is not None}


def is_policy_property(name: str) -> bool:
    """Return whether the name is a property of the table services, or has the prefix of such a property.

    The properties of the gateway's cache belong to no service.
    """
    return name.startswith(PREFIXES) and not name.startswith("seamark.cache.")


def find_similar_properties(name: str) -> str:
    """Return the names of policy properties that are similar to a name, joined by "or". It is empty if there are none.

    The most similar name is first.
    """
    return " or ".join(find_near_names(name, PROPERTIES, maximum=2))


def check_policy(properties: Mapping[str, str]) -> str | None:
    """Return the error in the properties of a policy: an unknown name, or an invalid value.

    Returns:
        None if all properties are valid.
    """
    for name, value in properties.items():
        service_property = PROPERTIES.get(name)
        if service_property is None:
            similar_names = find_similar_properties(name)
            hint = (
                f"did you mean {similar_names}?"
                if similar_names
                else f"the properties of a policy are {', '.join(PROPERTIES)}"
            )
            return f"{name[:_NAME_SHOWN_CHARACTERS]!r} is unknown; {hint}"
        try:
            required = service_property.requirement(properties)
        except BadRequest as error:
            return error.message
        if required:
            return f"{name} is {value!r}; it must be {required}"
    return None


class PolicyProperty(msgspec.Struct, frozen=True, rename="kebab"):
    """A property with its effective value.

    Attributes:
        source: The source of the value: table, namespace, setting or default.
        namespace: The levels of the namespace that has the property.
        ignored: The reason why the server ignores the value, or None.
    """

    name: str
    value: str
    source: str
    namespace: tuple[str, ...] | None = None
    ignored: str | None = None


class TablePolicy(msgspec.Struct, frozen=True, rename="kebab"):
    """The properties of a table that control its services.

    Attributes:
        runs: Whether the server runs table services.
    """

    runs: bool
    properties: tuple[PolicyProperty, ...]


def build_policy(metadata: TableMetadata, inherited_policies: Policies, settings: Settings) -> TablePolicy:
    """Return the effective values of a table's properties. Values that the services ignore are returned unchanged."""

    def find_effective_value(service_property: ServiceProperty) -> PolicyProperty:
        name = service_property.name
        if name in metadata.properties:
            return PolicyProperty(name, metadata.properties[name], "table")
        if name in inherited_policies:
            return PolicyProperty(name, inherited_policies[name].value, "namespace", inherited_policies[name].namespace)
        if name in _SERVICE_BY_SWITCH:
            return PolicyProperty(name, str(settings.runs_by_default(_SERVICE_BY_SWITCH[name])).lower(), "setting")
        return PolicyProperty(name, service_property.default, "default")

    def add_reason_if_ignored(policy: PolicyProperty) -> PolicyProperty:
        if policy.name != launchers.PROPERTY:
            return policy
        return msgspec.structs.replace(
            policy, ignored=launchers.explain_ignored_launcher(policy.value, settings.services_launchers)
        )

    return TablePolicy(
        settings.services_workers > 0,
        tuple(
            add_reason_if_ignored(find_effective_value(service_property)) for service_property in PROPERTIES.values()
        ),
    )
