"""The policy of a table: what its properties, those of its namespaces, and the settings say to the table services."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from seamark.metaserver.catalog.policies import PREFIXES, Policies
from seamark.metaserver.commit.expiration.orphan_files import AGE, AGE_DEFAULT_MS
from seamark.metaserver.commit.expiration.policy import MAX_AGE, MAX_AGE_DEFAULT_MS, MAX_REF_AGE, MIN_SNAPSHOTS
from seamark.metaserver.errors import BadRequest
from seamark.metaserver.iceberg.metadata.clustering import COLUMNS as CLUSTERING_COLUMNS
from seamark.metaserver.iceberg.metadata.clustering import CURVE as CLUSTERING_CURVE
from seamark.metaserver.iceberg.metadata.clustering import HILBERT, ClusteringLayout, joins_of
from seamark.metaserver.iceberg.metadata.clustering import JOINS as CLUSTERING_JOINS
from seamark.metaserver.iceberg.metadata.column_ttl import COLUMNS as TTL_COLUMNS
from seamark.metaserver.iceberg.metadata.column_ttl import TIME_COLUMN as TTL_TIME_COLUMN
from seamark.metaserver.iceberg.metadata.column_ttl import TtlPolicy
from seamark.metaserver.iceberg.metadata.compaction import MIN_FILES, MIN_FILES_DEFAULT
from seamark.metaserver.iceberg.metadata.manifest_policy import MIN_COUNT as MANIFESTS_MIN_COUNT
from seamark.metaserver.iceberg.metadata.manifest_policy import MIN_COUNT_DEFAULT as MANIFESTS_MIN_COUNT_DEFAULT
from seamark.metaserver.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.iceberg.metadata.service_switches import (
    BUCKET_SPLITTING_ENABLED,
    CLUSTERING_ENABLED,
    COLUMN_TTL_ENABLED,
    COMPACTION_ENABLED,
    EXPIRATION_ENABLED,
    MANIFESTS_ENABLED,
    ORPHAN_FILES_ENABLED,
    STATISTICS_ENABLED,
)
from seamark.metaserver.iceberg.metadata.statistics import CHANGED_PERCENT, CHANGED_PERCENT_DEFAULT, StatisticsPolicy
from seamark.metaserver.iceberg.metadata.statistics import COLUMNS as STATISTICS_COLUMNS
from seamark.metaserver.iceberg.types.near_names import near_names
from seamark.metaserver.services.budgets import NORMAL, PRIORITIES, PRIORITY, WINDOW, parse_windows
from seamark.metaserver.services.launching.launchers import AUTO, CHOICES, why_ignored
from seamark.metaserver.services.launching.launchers import PROPERTY as LAUNCHER
from seamark.metaserver.settings import Settings

_NAME_SHOWN = 200
_DEFAULTS: dict[str, str | Callable[[Settings], bool]] = {
    COMPACTION_ENABLED: lambda settings: settings.services_compaction,
    MIN_FILES: str(MIN_FILES_DEFAULT),
    CLUSTERING_ENABLED: lambda settings: settings.services_clustering,
    CLUSTERING_COLUMNS: "",
    CLUSTERING_CURVE: HILBERT,
    CLUSTERING_JOINS: "",
    COLUMN_TTL_ENABLED: lambda settings: settings.services_column_ttl,
    TTL_COLUMNS: "",
    TTL_TIME_COLUMN: "",
    EXPIRATION_ENABLED: lambda settings: settings.services_expiration,
    MAX_AGE: str(MAX_AGE_DEFAULT_MS),
    MIN_SNAPSHOTS: "1",
    MAX_REF_AGE: "",
    ORPHAN_FILES_ENABLED: lambda settings: settings.services_orphan_files,
    AGE: str(AGE_DEFAULT_MS),
    LAUNCHER: AUTO,
    PRIORITY: NORMAL,
    WINDOW: "",
    STATISTICS_ENABLED: lambda settings: settings.services_statistics,
    STATISTICS_COLUMNS: "",
    CHANGED_PERCENT: str(CHANGED_PERCENT_DEFAULT),
    MANIFESTS_ENABLED: lambda settings: settings.services_manifests,
    MANIFESTS_MIN_COUNT: str(MANIFESTS_MIN_COUNT_DEFAULT),
    BUCKET_SPLITTING_ENABLED: lambda settings: settings.services_bucket_splitting,
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
        if name in (CLUSTERING_COLUMNS, CLUSTERING_CURVE, CLUSTERING_JOINS):
            try:
                joins_of(properties)
                ClusteringLayout.of({CLUSTERING_COLUMNS: "c", name: value})
            except BadRequest as error:
                return error.message
        elif name == TTL_COLUMNS:
            try:
                TtlPolicy.of(properties)
            except BadRequest as error:
                return error.message
        elif name == TTL_TIME_COLUMN:
            if not value.strip():
                return f"{name} is {value!r}; it must be the name of a column"
        elif name == LAUNCHER:
            if value not in CHOICES:
                return f"{name} is {value!r}; it must be one of {', '.join(CHOICES)}"
        elif name == PRIORITY:
            if value not in PRIORITIES:
                return f"{name} is {value!r}; it must be one of {', '.join(PRIORITIES)}"
        elif name == WINDOW:
            if not parse_windows(value):
                return f"{name} is {value!r}; it must be a time of day in UTC, such as 22:00-06:00, or several"
        elif name in (STATISTICS_COLUMNS, CHANGED_PERCENT):
            try:
                StatisticsPolicy.of({name: value})
            except BadRequest as error:
                return error.message
        elif isinstance(default, str):
            if not value.isdecimal() or len(value) > 19 or not 0 < int(value) < 1 << 63:
                return f"{name} is {value!r}; it must be a whole number above 0"
        elif value not in ("true", "false"):
            return f"{name} is {value!r}; it must be true or false"
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
        if found.name != LAUNCHER:
            return found
        return msgspec.structs.replace(found, ignored=why_ignored(found.value, settings.services_launchers))

    return TablePolicy(settings.services_workers > 0, tuple(explained(find(name)) for name in _DEFAULTS))
