"""Changes to views: creation, and the update actions of the REST spec for views (`ViewUpdate`).

The module has no side effects, like `updates`. The rules are those of Java's `ViewMetadata.Builder`: a version that
equals an existing version is not added again, versions beyond `version.history.num-entries` are removed, and a
replacement keeps every SQL dialect unless `replace.drop-dialect.allowed` is set. One rule is more lenient: adding an
existing item makes it the "last added" item.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from seamark.formats.iceberg.metadata import properties as props
from seamark.formats.iceberg.metadata.builder import ComparisonBudget
from seamark.formats.iceberg.metadata.updates import (
    TABLE_ACTIONS,
    AddSchema,
    AssignUuid,
    RemoveProperties,
    SetProperties,
    Update,
    UpgradeFormatVersion,
    make_simple_update,
    read_update,
    updates_by_action,
)
from seamark.formats.iceberg.types import schema as schemas
from seamark.formats.iceberg.types.reading import INT_MAX, Int32, check_number, convert_json_value
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.iceberg.views.view import (
    FORMAT_VERSION,
    Representation,
    ViewLogEntry,
    ViewMetadata,
    ViewVersion,
    check_view_invariants,
)
from seamark.formats.runtime.errors import BadRequest, InvalidArgument

HISTORY_SIZE = "version.history.num-entries"
HISTORY_SIZE_DEFAULT = 10
DROP_DIALECT_ALLOWED = "replace.drop-dialect.allowed"
LAST_ADDED = -1


class AddViewVersion(Update, frozen=True):
    action = "add-view-version"
    view_version: ViewVersion

    def apply(self, builder: _ViewBuilder) -> None:
        builder.add_version(self.view_version)


class _ViewBuilder:
    """The working copy of a view to which the updates of a commit are applied."""

    def __init__(self, base: ViewMetadata | None, now_ms: int) -> None:
        self.base = base
        self.now_ms = now_ms
        self.changed = base is None
        self.uuid = None if base is None else base.view_uuid
        self.location = None if base is None else base.location
        self.properties = {} if base is None else dict(base.properties)
        self.schemas = {} if base is None else {schema.id: schema for schema in base.schemas}
        self.versions = {} if base is None else dict(base.versions_by_id)
        self.current_version_id = None if base is None else base.current_version_id
        self.log_entry: ViewLogEntry | None = None
        self.added_versions: set[int] = set()
        self.last_schema_id: int | None = None
        self.last_version_id: int | None = None
        self._comparisons = ComparisonBudget()

    def assign_uuid(self, uuid: str) -> None:
        if self.uuid is not None and self.uuid.lower() != uuid.lower():
            raise BadRequest("Cannot reassign uuid")
        if self.uuid is None:
            self.uuid, self.changed = uuid, True

    def upgrade_format_version(self, version: int) -> None:
        if version < FORMAT_VERSION:
            raise BadRequest(f"Cannot downgrade v{FORMAT_VERSION} view to v{version}")
        if version > FORMAT_VERSION:
            raise BadRequest(f"Unsupported format version: {version}")

    def set_location(self, location: str) -> None:
        if not location:
            raise BadRequest("Invalid view location: empty")
        if location != self.location:
            self.location, self.changed = location, True

    def set_properties(self, updates: Mapping[str, str]) -> None:
        if updates:
            self.properties.update(updates)
            self.changed = True

    def remove_properties(self, removals: Sequence[str]) -> None:
        for name in removals:
            self.changed = True
            self.properties.pop(name, None)

    def add_schema(self, new_schema: Schema) -> None:
        schema = schemas.normalize_schema(new_schema)
        self._comparisons.spend(len(self.schemas), len(schema.index.by_id))
        schema_id = next((old.id for old in self.schemas.values() if old.is_same_as(schema)), None)
        if schema_id is None:
            schema_id = max(self.schemas, default=-1) + 1
            check_number(schema_id, INT_MAX, "id of the new schema")
            self.schemas[schema_id] = schemas.copy_with_id(schema, schema_id)
            self.changed = True
        self.last_schema_id = schema_id

    def add_version(self, new_version: ViewVersion) -> None:
        """Add a version, unless the view has a version with the same behaviour, and make it the last added version.

        A version whose id is in use, or is lower than an id in use, gets the next free id.

        Raises:
            BadRequest: The version is invalid.
        """
        version = self._resolve_schema(new_version)
        _check_representations(version.representations)
        # Limit the total number of comparisons in one commit.
        self._comparisons.spend(len(self.versions), len(version.representations))
        version_id = next((old.version_id for old in self.versions.values() if old.behaves_as(version)), None)
        if version_id is None:
            version_id = max(version.version_id, max(self.versions, default=version.version_id - 1) + 1)
            check_number(version_id, INT_MAX, "id of the new version")
            self.versions[version_id] = msgspec.structs.replace(version, version_id=version_id)
            self.added_versions.add(version_id)
            self.changed = True
        self.last_version_id = version_id

    def _resolve_schema(self, version: ViewVersion) -> ViewVersion:
        """Return the version with the id of its schema, if it refers to the last added schema.

        Raises:
            BadRequest: The version refers to no schema of the view.
        """
        if version.schema_id == LAST_ADDED:
            if self.last_schema_id is None:
                raise BadRequest("Cannot set last added schema: no schema has been added")
            return msgspec.structs.replace(version, schema_id=self.last_schema_id)
        if version.schema_id not in self.schemas:
            raise BadRequest(f"Cannot add version with unknown schema: {version.schema_id}")
        return version

    def set_current_version(self, version_id: int) -> None:
        """Make a version the current version, and add an entry to the log. If it already is current, change nothing.

        Raises:
            BadRequest: The view has no such version.
        """
        if version_id == LAST_ADDED:
            if self.last_version_id is None:
                raise BadRequest("Cannot set last version id: no current version id has been set")
            version_id = self.last_version_id
        version = self.versions.get(version_id)
        if version is None:
            raise BadRequest(f"Cannot set current version to unknown version: {version_id}")
        if version_id == self.current_version_id:
            return
        # A version of this change has its own time. An older version becomes current now, so the log has the present
        # time.
        entry_time_ms = version.timestamp_ms if version_id in self.added_versions else self.now_ms
        self.log_entry = ViewLogEntry(entry_time_ms, version_id)
        self.current_version_id, self.changed = version_id, True

    def build(self) -> ViewMetadata:
        if self.base is not None and not self.changed:
            return self.base
        if self.location is None:
            raise BadRequest("Invalid location: null")
        if self.uuid is None:
            raise BadRequest("Invalid view: no uuid was assigned")
        if self.current_version_id is None:
            raise BadRequest("Invalid view: no versions were added and set as current")
        current = self.versions[self.current_version_id]
        if self.base is not None and not props.parse_bool(self.properties, DROP_DIALECT_ALLOWED, False):
            _check_dialects(self.base.current_version, current)
        log = () if self.base is None else self.base.version_log
        if self.log_entry is not None:
            log = (*log, self.log_entry)
        versions, log = self._retain_versions(current, log)
        result = ViewMetadata(
            view_uuid=self.uuid,
            format_version=FORMAT_VERSION,
            location=self.location,
            properties=self.properties,
            schemas=tuple(self.schemas.values()),
            current_version_id=self.current_version_id,
            versions=versions,
            version_log=log,
        )
        check_view_invariants(result)
        return result

    def _retain_versions(
        self, current: ViewVersion, log: tuple[ViewLogEntry, ...]
    ) -> tuple[tuple[ViewVersion, ...], tuple[ViewLogEntry, ...]]:
        """Return the versions that are kept, and their log.

        The newest versions, which have the highest ids, are kept up to the size of the history. The current version and
        as many versions as this commit adds are always kept.

        Raises:
            BadRequest: The property with the size of the history is invalid.
        """
        size = props.parse_int(self.properties, HISTORY_SIZE, HISTORY_SIZE_DEFAULT)
        if size <= 0:
            raise BadRequest(f"{HISTORY_SIZE} must be positive but was {size}")
        kept_count = max(size, len(self.added_versions | {current.version_id}))
        if len(self.versions) <= kept_count:
            return tuple(self.versions.values()), log
        newest_ids = sorted(self.versions.keys() - {current.version_id}, reverse=True)[: kept_count - 1]
        versions = (current, *(self.versions[version_id] for version_id in newest_ids))
        kept_ids = {version.version_id for version in versions}
        log_entries: list[ViewLogEntry] = []
        for entry in log:
            if entry.version_id in kept_ids:
                log_entries.append(entry)
            else:
                # With entries before a gap, the log would show a wrong current version.
                log_entries.clear()
        return versions, tuple(log_entries)


def _check_representations(representations: tuple[Representation, ...]) -> None:
    if not representations:
        raise BadRequest("Invalid view version: it has no representations")
    seen_dialects: set[str] = set()
    for item in representations:
        if item.type.lower() != "sql":
            raise BadRequest(f"Found unsupported view representations: [{item.type}]")
        if item.sql is None or item.dialect is None:
            raise BadRequest("Invalid SQL view representation: `sql` and `dialect` are required")
        dialect = item.dialect.lower()
        if dialect in seen_dialects:
            raise InvalidArgument(f"Invalid view version: Cannot add multiple queries for dialect {dialect}")
        seen_dialects.add(dialect)


def _check_dialects(previous: ViewVersion, current: ViewVersion) -> None:
    """Check that a new version has all dialects of the previous version."""
    if not previous.dialects <= current.dialects:
        raise BadRequest(
            f"Cannot replace view due to loss of view dialects ({DROP_DIALECT_ALLOWED}=false):\n"
            f"Previous dialects: [{', '.join(sorted(previous.dialects))}]\n"
            f"New dialects: [{', '.join(sorted(current.dialects))}]"
        )


VIEW_ACTIONS = updates_by_action(
    AssignUuid,
    UpgradeFormatVersion,
    AddSchema,
    make_simple_update("set-location", _ViewBuilder.set_location, "location", str),
    SetProperties,
    RemoveProperties,
    AddViewVersion,
    make_simple_update("set-current-view-version", _ViewBuilder.set_current_version, "view_version_id", Int32),
)


def build_view_metadata(
    *,
    uuid: str,
    location: str,
    schema: object,
    view_version: object,
    properties: Mapping[str, str],
    now_ms: int,
) -> ViewMetadata:
    """Return the first metadata of a view.

    Args:
        uuid: The UUID of the view.
        location: The location of the view.
        schema: The JSON of the schema in the create request.
        view_version: The JSON of the version in the create request. Its `schema-id` is ignored, because the version
            uses the schema of the request.
        properties: The properties of the view.
        now_ms: The current time in milliseconds since the epoch.

    Raises:
        BadRequest: A value is invalid.
    """
    builder = _ViewBuilder(None, now_ms)
    builder.uuid = uuid
    builder.set_location(location)
    builder.set_properties(properties)
    builder.add_schema(convert_json_value(schema, Schema, "schema"))
    version = convert_json_value(view_version, ViewVersion, "view version")
    builder.add_version(msgspec.structs.replace(version, schema_id=LAST_ADDED))
    builder.set_current_version(LAST_ADDED)
    return builder.build()


def apply_view_updates(
    base: ViewMetadata | None, updates: Sequence[object], *, now_ms: int, new_uuid: str | None = None
) -> ViewMetadata:
    """Apply updates to the metadata of a view in order. If they change nothing, return `base` itself.

    Args:
        base: The metadata of the view, or None to build a new view.
        updates: The JSON of the updates.
        now_ms: The current time in milliseconds since the epoch.
        new_uuid: The UUID of a new view, unless an update assigns a UUID.

    Raises:
        BadRequest: An update is invalid.
    """
    table_only_actions = [name for name in TABLE_ACTIONS if name not in VIEW_ACTIONS]
    builder = _ViewBuilder(base, now_ms)
    for raw in updates:
        read_update(raw, VIEW_ACTIONS, table_only_actions, "view").apply(builder)
    if builder.uuid is None:
        builder.uuid = new_uuid
    return builder.build()
