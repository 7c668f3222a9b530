"""The policy of a table: what its properties, those of its namespaces, and the settings say to the table services."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from seamark.formats.iceberg.metadata import (
    clustering,
    column_ttl,
    compaction,
    manifest_policy,
    service_switches,
    statistics,
)
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.types.near_names import near_names
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.catalog.policies import PREFIXES, Policies
from seamark.metaserver.commit.expiration.orphan_files import AGE, AGE_DEFAULT_MS
from seamark.metaserver.commit.expiration.policy import MAX_AGE, MAX_AGE_DEFAULT_MS, MAX_REF_AGE, MIN_SNAPSHOTS
from seamark.metaserver.services import budgets
from seamark.metaserver.services.launching import launchers
from seamark.metaserver.settings.settings import Settings

_NAME_SHOWN = 200
_DEFAULTS: dict[str, str | Callable[[Settings], bool]] = {
    service_switches.COMPACTION_ENABLED: lambda settings: settings.services_compaction,
    compaction.MIN_FILES: str(compaction.MIN_FILES_DEFAULT),
    service_switches.CLUSTERING_ENABLED: lambda settings: settings.services_clustering,
    clustering.COLUMNS: "",
    clustering.CURVE: clustering.HILBERT,
    clustering.JOINS: "",
    service_switches.COLUMN_TTL_ENABLED: lambda settings: settings.services_column_ttl,
    column_ttl.COLUMNS: "",
    column_ttl.TIME_COLUMN: "",
    service_switches.EXPIRATION_ENABLED: lambda settings: settings.services_expiration,
    MAX_AGE: str(MAX_AGE_DEFAULT_MS),
    MIN_SNAPSHOTS: "1",
    MAX_REF_AGE: "",
    service_switches.ORPHAN_FILES_ENABLED: lambda settings: settings.services_orphan_files,
    AGE: str(AGE_DEFAULT_MS),
    launchers.PROPERTY: launchers.AUTO,
    budgets.PRIORITY: budgets.NORMAL,
    budgets.WINDOW: "",
    service_switches.STATISTICS_ENABLED: lambda settings: settings.services_statistics,
    statistics.COLUMNS: "",
    statistics.CHANGED_PERCENT: str(statistics.CHANGED_PERCENT_DEFAULT),
    service_switches.MANIFESTS_ENABLED: lambda settings: settings.services_manifests,
    manifest_policy.MIN_COUNT: str(manifest_policy.MIN_COUNT_DEFAULT),
    service_switches.BUCKET_SPLITTING_ENABLED: lambda settings: settings.services_bucket_splitting,
}
"""The default of each property, or the setting that is its default. Empty: no limit, or no columns."""


def is_policy_property(name: str) -> bool:
    """Whether the name is that of a property of the table services, or begins like one. The properties of the gateway's
    cache belong to no service."""
    return name.startswith(PREFIXES) and not name.startswith("seamark.cache.")


def similar_properties(name: str) -> str:
    """Properties of a policy with a similar name, most similar first, joined by "or"; empty if there are none."""
    return " or ".join(near_names(name, _DEFAULTS, most=2))


def check_policy(properties: Mapping[str, str]) -> str | None:
    """What is wrong with the properties of a policy, if something is: an unknown name, or a value of another type."""
    for name, value in properties.items():
        default = _DEFAULTS.get(name)
        if default is None:
            near = similar_properties(name)
            known = f"did you mean {near}?" if near else f"the properties of a policy are {', '.join(_DEFAULTS)}"
            return f"{name[:_NAME_SHOWN]!r} is unknown; {known}"
        try:
            required = _required(name, value, default, properties)
        except BadRequest as error:
            return error.message
        if required:
            return f"{name} is {value!r}; it must be {required}"
    return None


def _required(
    name: str, value: str, default: str | Callable[[Settings], bool], properties: Mapping[str, str]
) -> str | None:
    """What the value must be, if it is not that. BadRequest for values that have their own parser."""
    match name:
        case clustering.COLUMNS | clustering.CURVE | clustering.JOINS:
            clustering.joins_of(properties)
            clustering.ClusteringLayout.of({clustering.COLUMNS: "c", name: value})
        case column_ttl.COLUMNS:
            column_ttl.TtlPolicy.of(properties)
        case statistics.COLUMNS | statistics.CHANGED_PERCENT:
            statistics.StatisticsPolicy.of({name: value})
        case column_ttl.TIME_COLUMN:
            return None if value.strip() else "the name of a column"
        case launchers.PROPERTY:
            return None if value in launchers.CHOICES else f"one of {', '.join(launchers.CHOICES)}"
        case budgets.PRIORITY:
            return None if value in budgets.PRIORITIES else f"one of {', '.join(budgets.PRIORITIES)}"
        case budgets.WINDOW:
            return None if budgets.parse_windows(value) else "a time of day in UTC, such as 22:00-06:00, or several"
        case _ if isinstance(default, str):
            is_number = value.isdecimal() and len(value) <= 19 and 0 < int(value) < 1 << 63
            return None if is_number else "a whole number above 0"
        case _:
            return None if value in ("true", "false") else "true or false"
    return None


class PolicyProperty(msgspec.Struct, frozen=True, rename="kebab"):
    """`source`: table, namespace, setting or default. `namespace`: the levels of the namespace that has the property.
    `ignored`: why the server ignores the value, if it does."""

    name: str
    value: str
    source: str
    namespace: tuple[str, ...] | None = None
    ignored: str | None = None


class TablePolicy(msgspec.Struct, frozen=True, rename="kebab"):
    """`runs`: whether the server runs table services at all."""

    runs: bool
    properties: tuple[PolicyProperty, ...]


def policy_of(metadata: TableMetadata, inherited: Policies, settings: Settings) -> TablePolicy:
    """The values in effect; values that the services ignore are returned unchanged."""

    def find(name: str) -> PolicyProperty:
        if name in metadata.properties:
            return PolicyProperty(name, metadata.properties[name], "table")
        if name in inherited:
            return PolicyProperty(name, inherited[name].value, "namespace", inherited[name].namespace)
        default = _DEFAULTS[name]
        if isinstance(default, str):
            return PolicyProperty(name, default, "default")
        return PolicyProperty(name, str(default(settings)).lower(), "setting")

    def explained(found: PolicyProperty) -> PolicyProperty:
        if found.name != launchers.PROPERTY:
            return found
        return msgspec.structs.replace(found, ignored=launchers.why_ignored(found.value, settings.services_launchers))

    return TablePolicy(settings.services_workers > 0, tuple(explained(find(name)) for name in _DEFAULTS))
