"""The schema as numbered migrations, and the generator that migrates a database.

A released migration is never edited. A change of the schema needs a new migration. The driver runs `apply_migrations`
in one transaction under a lock (SQLite: BEGIN EXCLUSIVE, PostgreSQL: an advisory lock), so that replicas may start at
the same time. A database with a newer version is refused, because a write could violate rules of the newer version.
"""

from __future__ import annotations

from seamark.formats.runtime.errors import ConfigError
from seamark.metaserver.store.sql.statement import SqlDialect, Steps, StoreStatement

_INSTANT_COLUMNS = """
    position {text} PRIMARY KEY, id {text} NOT NULL UNIQUE, action {text} NOT NULL, state {text} NOT NULL,
    kind {text} NOT NULL, namespace {text} NOT NULL, name {text} NOT NULL, uuid {text} NOT NULL,
    requested_ms {int} NOT NULL, completed_ms {int}, who {text} NOT NULL, snapshot_id {int},
    metadata_location {text}, fingerprint {text}, summary {text} NOT NULL
"""

_ENTRY_COLUMNS = """
    kind {text} NOT NULL, namespace {text} NOT NULL, name {text} NOT NULL, uuid {text} NOT NULL,
    metadata_location {text} NOT NULL, previous_location {text}, version {int} NOT NULL,
    created_ms {int} NOT NULL, updated_ms {int} NOT NULL
"""

_FIRST = (
    """CREATE TABLE namespaces (
        path {text} PRIMARY KEY, parent {text} NOT NULL, properties {text} NOT NULL, version {int} NOT NULL
    ) {table}""",
    "CREATE INDEX namespaces_by_parent ON namespaces (parent, path)",
    # A name is unique within its `space`. Tables and views share one space, and functions have their own.
    "CREATE TABLE entries (space {text} NOT NULL, "
    + _ENTRY_COLUMNS
    + ", PRIMARY KEY (namespace, space, name)) {table}",
    "CREATE INDEX entries_by_kind ON entries (namespace, kind, name)",
    "CREATE INDEX entries_by_uuid ON entries (uuid)",
    "CREATE TABLE dropped (id {text} PRIMARY KEY, "
    + _ENTRY_COLUMNS
    + ", purge {int} NOT NULL, dropped_ms {int} NOT NULL, expires_ms {int} NOT NULL, who {text} NOT NULL) {table}",
    "CREATE INDEX dropped_by_uuid ON dropped (uuid)",
    "CREATE INDEX dropped_by_namespace ON dropped (namespace, id)",
    "CREATE INDEX dropped_by_expiry ON dropped (expires_ms, id)",
    "CREATE TABLE instants (" + _INSTANT_COLUMNS + ") {table}",
    "CREATE INDEX instants_by_uuid ON instants (uuid, position)",
    "CREATE INDEX instants_by_name ON instants (namespace, name, position)",
    "CREATE INDEX instants_by_fingerprint ON instants (uuid, fingerprint) WHERE fingerprint IS NOT NULL",
    "CREATE INDEX instants_unfinished ON instants (state, position) WHERE state IN ('requested', 'inflight')",
    "CREATE TABLE instants_archive (" + _INSTANT_COLUMNS + ") {table}",
    "CREATE INDEX archive_by_uuid ON instants_archive (uuid, position)",
    "CREATE INDEX archive_by_name ON instants_archive (namespace, name, position)",
    "CREATE INDEX archive_by_fingerprint ON instants_archive (uuid, fingerprint) WHERE fingerprint IS NOT NULL",
    """CREATE TABLE idempotency (
        key {text} PRIMARY KEY, scope {text} NOT NULL, request_hash {text} NOT NULL, status {int} NOT NULL,
        body {bytes}, metadata_location {text}, expires_ms {int} NOT NULL
    ) {table}""",
    "CREATE INDEX idempotency_by_expiry ON idempotency (expires_ms)",
    """CREATE TABLE metrics (
        id {text} PRIMARY KEY, uuid {text} NOT NULL, namespace {text} NOT NULL, name {text} NOT NULL,
        report_type {text} NOT NULL, snapshot_id {int}, received_ms {int} NOT NULL, who {text} NOT NULL,
        report {text} NOT NULL
    ) {table}""",
    "CREATE INDEX metrics_by_uuid ON metrics (uuid, id)",
    "CREATE INDEX metrics_by_time ON metrics (received_ms)",
    """CREATE TABLE tokens (
        id {text} PRIMARY KEY, name {text} NOT NULL, digest {text} NOT NULL UNIQUE, created_ms {int} NOT NULL,
        expires_ms {int}, revoked_ms {int}
    ) {table}""",
    "CREATE UNIQUE INDEX tokens_live ON tokens (name) WHERE revoked_ms IS NULL",
    """CREATE TABLE grants (
        principal {text} NOT NULL, namespace {text} NOT NULL, role {text} NOT NULL,
        PRIMARY KEY (principal, namespace, role)
    ) {table}""",
    """CREATE TABLE audit (
        id {text} PRIMARY KEY, at_ms {int} NOT NULL, who {text} NOT NULL, action {text} NOT NULL,
        resource {text} NOT NULL, outcome {text} NOT NULL, status {int} NOT NULL, request_id {text} NOT NULL,
        remote {text} NOT NULL
    ) {table}""",
    "CREATE INDEX audit_by_time ON audit (at_ms)",
    "CREATE TABLE cursors (consumer {text} PRIMARY KEY, position {text} NOT NULL) {table}",
    """CREATE TABLE leases (
        name {text} PRIMARY KEY, holder {text} NOT NULL, until_ms {int} NOT NULL, fence {int} NOT NULL
    ) {table}""",
    "CREATE TABLE secrets (name {text} PRIMARY KEY, value {bytes} NOT NULL) {table}",
)

_FIRST_POSTGRES = (
    "CREATE SEQUENCE instant_sequence",
    "CREATE TABLE timeline_epoch (epoch BIGINT NOT NULL)",
    "INSERT INTO timeline_epoch (epoch) VALUES (0)",
)

_INDEX_FILES = (
    """CREATE TABLE index_files (
        uuid {text} NOT NULL, location {text} NOT NULL, definition {text} NOT NULL, kind {text} NOT NULL,
        level {int} NOT NULL, file_count {int} NOT NULL, row_count {int} NOT NULL, size_bytes {int} NOT NULL,
        snapshot_id {int}, created_ms {int} NOT NULL, state {text} NOT NULL, changed_ms {int} NOT NULL, reason {text},
        PRIMARY KEY (uuid, location)
    ) {table}""",
    "CREATE TABLE index_versions (uuid {text} PRIMARY KEY, version {int} NOT NULL) {table}",
)

_PRODUCERS = (
    """CREATE TABLE producers (
        uuid {text} NOT NULL, producer {text} NOT NULL, sequence {int} NOT NULL, snapshot_id {int},
        changed_ms {int} NOT NULL, PRIMARY KEY (uuid, producer)
    ) {table}""",
)

_PLAN_TABLES = (
    # A plan without a name is retired, and its files are to be deleted.
    """CREATE TABLE plan_tables (
        id {text} PRIMARY KEY, namespace {text} NOT NULL, name {text}, of_name {text} NOT NULL, uuid {text} NOT NULL,
        location {text} NOT NULL, files {text} NOT NULL, snapshot_id {int} NOT NULL, file_count {int} NOT NULL,
        size_bytes {int} NOT NULL, considered_count {int} NOT NULL, considered_bytes {int}, expires_ms {int} NOT NULL
    ) {table}""",
    "CREATE UNIQUE INDEX plan_tables_by_name ON plan_tables (namespace, name)",
    "CREATE INDEX plan_tables_by_expiry ON plan_tables (expires_ms) WHERE name IS NOT NULL",
    "CREATE INDEX list_retired_plan_tables ON plan_tables (id) WHERE name IS NULL",
)

_CLAIMS = (
    # The catalog adds the claims of older tables, because it can read their metadata (`catalog/ownership/claims.py`).
    """CREATE TABLE claims (
        location {text} NOT NULL, uuid {text} NOT NULL, shared {int} NOT NULL, PRIMARY KEY (location, uuid)
    ) {table}""",
    "CREATE INDEX claims_by_uuid ON claims (uuid)",
    "CREATE TABLE claim_turns (turn {int} NOT NULL)",
    "INSERT INTO claim_turns (turn) VALUES (0)",
)

_PLAN_SNAPSHOTS = (
    "ALTER TABLE plan_tables ADD COLUMN audience {text}",
    "ALTER TABLE plan_tables ADD COLUMN shown_id {int}",
    "ALTER TABLE plan_tables ADD COLUMN shown {text}",
    "CREATE INDEX plan_tables_shown ON plan_tables (namespace, of_name, audience, expires_ms) "
    "WHERE audience IS NOT NULL AND name IS NOT NULL",
)

_NO_PLAIN_SECRETS = (
    # Delete the old signing keys: they were not encrypted, so anyone with a copy of the database could sign.
    "DELETE FROM secrets",
)

_REPLICAS = (
    """CREATE TABLE replicas (
        address {text} PRIMARY KEY, weight {int} NOT NULL, version {text} NOT NULL, protocol {int} NOT NULL,
        started_ms {int} NOT NULL, until_ms {int} NOT NULL
    ) {table}""",
)

_COLUMN_READS = (
    """CREATE TABLE column_reads (
        uuid {text} NOT NULL, day {int} NOT NULL, column_id {int} NOT NULL, oldest_age_d {int} NOT NULL,
        reads {int} NOT NULL, PRIMARY KEY (uuid, day, column_id)
    ) {table}""",
    "CREATE INDEX column_reads_by_day ON column_reads (day)",
)

_LEASE_STATES = ("ALTER TABLE leases ADD COLUMN state {text}",)

_RETAINED = (
    # Retained entries have no name, but keep their claims, because their files still exist.
    "CREATE TABLE retained (id {text} NOT NULL, "
    + _ENTRY_COLUMNS
    + ", purge {int} NOT NULL, dropped_ms {int} NOT NULL, expires_ms {int} NOT NULL, who {text} NOT NULL, "
    "checked_ms {int} NOT NULL, PRIMARY KEY (uuid)) {table}",
    "CREATE UNIQUE INDEX retained_by_id ON retained (id)",
    "CREATE INDEX retained_by_namespace ON retained (namespace, id)",
    "CREATE INDEX retained_by_check ON retained (checked_ms, uuid)",
    "ALTER TABLE claims ADD COLUMN spelled {text}",
)

_STREAM_OFFSETS = (
    # The rows of a shard before the offset `flushed` are in the table's files.
    """CREATE TABLE stream_offsets (
        uuid {text} NOT NULL, shard {int} NOT NULL, flushed {int} NOT NULL, log {text} NOT NULL,
        PRIMARY KEY (uuid, shard)
    ) {table}""",
)

_REMOVAL_FLUSHES = (
    # A row contains the snapshot of the last flush before a commit that removes rows, until this commit reads it.
    """CREATE TABLE removal_flushes (
        uuid {text} NOT NULL, snapshot_id {int} NOT NULL,
        PRIMARY KEY (uuid)
    ) {table}""",
)

_QUERY_HISTORY = (
    """CREATE TABLE query_shapes (
        uuid {text} NOT NULL, fingerprint {text} NOT NULL, owner {text} NOT NULL, shape {text} NOT NULL,
        samples {text} NOT NULL, PRIMARY KEY (uuid, fingerprint)
    ) {table}""",
    # A row contains the sums of an hour. For older days, housekeeping merges all hours into the first hour of the day.
    """CREATE TABLE query_counts (
        uuid {text} NOT NULL, fingerprint {text} NOT NULL, hour {int} NOT NULL, statements {int} NOT NULL,
        files_in {int} NOT NULL, files_left {int} NOT NULL, sized {int} NOT NULL, bytes_in {int} NOT NULL,
        bytes_left {int} NOT NULL, plan_us {int} NOT NULL, PRIMARY KEY (uuid, fingerprint, hour)
    ) {table}""",
    "CREATE INDEX query_counts_by_hour ON query_counts (hour)",
    """CREATE TABLE applied_advice (
        uuid {text} NOT NULL, id {text} NOT NULL, applied_ms {int} NOT NULL, advice {text} NOT NULL,
        PRIMARY KEY (uuid, id)
    ) {table}""",
)

_QUERY_SUMS = (
    # Each row of `query_counts`, and of its index, contained the UUID and the fingerprint, which took most of the
    # space. A row of `query_sums` contains the number of its shape instead. Existing shapes get small numbers.
    """CREATE TABLE query_sums (
        number {int} NOT NULL, hour {int} NOT NULL, statements {int} NOT NULL, files_in {int} NOT NULL,
        files_left {int} NOT NULL, sized {int} NOT NULL, bytes_in {int} NOT NULL, bytes_left {int} NOT NULL,
        plan_us {int} NOT NULL, timed {int} NOT NULL, run_us {int} NOT NULL, timed_files {int} NOT NULL,
        timed_bytes {int} NOT NULL, PRIMARY KEY (number, hour)
    ) {table}""",
    "CREATE INDEX query_sums_by_hour ON query_sums (hour)",
    "ALTER TABLE query_shapes ADD COLUMN number {int} NOT NULL DEFAULT 0",
    "INSERT INTO query_shapes (uuid, fingerprint, owner, shape, samples) "
    "SELECT DISTINCT uuid, '', '', '', '' FROM query_counts WHERE fingerprint = ''",
    # Number all shapes by one sort, because the migration locks the database. Counting the earlier shapes for each
    # shape would take quadratic time.
    "UPDATE query_shapes SET number = numbered.place FROM (SELECT uuid, fingerprint, row_number() OVER "
    "(ORDER BY uuid, fingerprint) AS place FROM query_shapes) AS numbered "
    "WHERE query_shapes.uuid = numbered.uuid AND query_shapes.fingerprint = numbered.fingerprint",
    "CREATE UNIQUE INDEX query_shapes_by_number ON query_shapes (number)",
    "INSERT INTO query_sums SELECT number, hour, statements, files_in, files_left, sized, bytes_in, bytes_left, "
    "plan_us, 0, 0, 0, 0 FROM query_counts JOIN query_shapes ON query_shapes.uuid = query_counts.uuid "
    "AND query_shapes.fingerprint = query_counts.fingerprint",
    "DROP TABLE query_counts",
)

_WAREHOUSES = (
    """CREATE TABLE warehouses (
        name {text} PRIMARY KEY, id {text} NOT NULL UNIQUE, location {text} NOT NULL, location_key {text} NOT NULL,
        settings {text} NOT NULL, credentials {bytes}, created_ms {int} NOT NULL, who {text} NOT NULL,
        version {int} NOT NULL
    ) {table}""",
    # The table has one row. `id` is the id of the warehouse, or empty in the database of a server.
    "CREATE TABLE catalog_state (id {text} NOT NULL, closed {int} NOT NULL)",
    "INSERT INTO catalog_state (id, closed) VALUES ('', 0)",
)

_OBJECT_GRANTS = (
    # Copy the table, because columns are added to the primary key. Existing grants are on namespaces. The defaults are
    # for rows that a replica of an earlier version adds during a rolling update.
    "ALTER TABLE grants RENAME TO namespace_grants",
    """CREATE TABLE grants (
        principal {text} NOT NULL, role {text} NOT NULL, namespace {text} NOT NULL,
        kind {text} NOT NULL DEFAULT 'namespace', name {text} NOT NULL DEFAULT '', deny {int} NOT NULL DEFAULT 0,
        PRIMARY KEY (principal, namespace, name, kind, role, deny)
    ) {table}""",
    "INSERT INTO grants (principal, role, namespace) SELECT principal, role, namespace FROM namespace_grants",
    "DROP TABLE namespace_grants",
    "CREATE INDEX grants_by_entry ON grants (namespace, name) WHERE name <> ''",
    # This table contains the grants on dropped entries, which undrop restores.
    """CREATE TABLE dropped_grants (
        dropped_id {text} NOT NULL, principal {text} NOT NULL, role {text} NOT NULL, kind {text} NOT NULL,
        deny {int} NOT NULL, PRIMARY KEY (dropped_id, principal, role, kind, deny)
    ) {table}""",
)

_GRANT_COUNTS = (
    # A drop of a namespace and the limits of grants look up grants by namespace.
    "DROP INDEX grants_by_entry",
    "CREATE INDEX grants_by_object ON grants (namespace, name)",
)

_JOINED_TABLES = (
    # The joined tables of earlier plans are unknown, so the column is NULL for them.
    "ALTER TABLE plan_tables ADD COLUMN joined {text}",
)

MIGRATIONS: tuple[dict[str, tuple[str, ...]], ...] = (
    {"": _FIRST, "PostgreSQL": _FIRST_POSTGRES},
    {"": _INDEX_FILES},
    {"": _PRODUCERS},
    {"": _PLAN_TABLES},
    {"": _CLAIMS},
    {"": _PLAN_SNAPSHOTS},
    {"": _NO_PLAIN_SECRETS},
    {"": _REPLICAS},
    {"": _COLUMN_READS},
    {"": _LEASE_STATES},
    {"": _RETAINED},
    {"": _STREAM_OFFSETS},
    {"": _REMOVAL_FLUSHES},
    {"": _QUERY_HISTORY},
    {"": _WAREHOUSES},
    {"": _QUERY_SUMS},
    {"": _OBJECT_GRANTS},
    {"": _GRANT_COUNTS},
    {"": _JOINED_TABLES},
)
"""The migrations. The statements of version n are in MIGRATIONS[n - 1].

The key "" has the statements for all databases, and the name of a dialect has the statements for this database only.
"""


def create_schema(version: int, dialect: SqlDialect) -> Steps[None]:
    """Create the schema of the given version in an empty database."""
    yield StoreStatement("CREATE TABLE schema_version (version {int} NOT NULL)")
    for step in MIGRATIONS[:version]:
        for sql in (*step.get("", ()), *step.get(dialect.name, ())):
            yield StoreStatement(sql)
    yield StoreStatement("INSERT INTO schema_version (version) VALUES ($1)", (version,))


def apply_migrations(dialect: SqlDialect) -> Steps[int]:
    """Apply missing migrations, and return the version before them.

    Raises:
        ConfigError: The database is newer than this code, or belongs to another program.
    """
    yield StoreStatement("CREATE TABLE IF NOT EXISTS schema_version (version {int} NOT NULL)")
    rows = yield StoreStatement("SELECT version FROM schema_version")
    if len(rows) > 1:
        raise ConfigError("The database's schema_version table has several rows; restore the database from a backup")
    version = int(rows[0][0]) if rows else 0
    if version > len(MIGRATIONS):
        raise ConfigError(
            f"The database has schema version {version}, this server supports up to {len(MIGRATIONS)}; "
            "start a server of at least the version that wrote the database"
        )
    if version < 0:
        raise ConfigError(f"The database has the invalid schema version {version}; restore it from a backup")
    # In a step, the statements for all databases have the empty name, and come before those for one database.
    for step in MIGRATIONS[version:]:
        for sql in (*step.get("", ()), *step.get(dialect.name, ())):
            yield StoreStatement(sql)
    if not rows:
        yield StoreStatement("INSERT INTO schema_version (version) VALUES ($1)", (len(MIGRATIONS),))
    elif version < len(MIGRATIONS):
        yield StoreStatement("UPDATE schema_version SET version = $1", (len(MIGRATIONS),))
    return version


def renew_epoch() -> Steps[bool]:
    """Start a new epoch of the timeline in PostgreSQL if the stored positions are ahead of the cluster.

    Positions contain transaction ids. If a dump is restored into another cluster, the transaction ids of that cluster
    may be smaller. In the old epoch, new instants would sort before instants that readers have already seen.

    Returns:
        Whether a new epoch started.
    """
    is_renewed = False
    # Repeat, because a copied database may contain positions of later epochs. An epoch is written as four hexadecimal
    # digits, so that positions sort as text. Therefore the last epoch is 65,535.
    while (
        yield StoreStatement(
            "UPDATE timeline_epoch SET epoch = epoch + 1 WHERE epoch < 65535 AND lpad(to_hex(epoch), 4, '0') "
            "|| lpad(to_hex(pg_snapshot_xmax(pg_current_snapshot())::text::bigint), 16, '0') <= "
            "greatest((SELECT max(position) FROM instants), (SELECT max(position) FROM instants_archive)) RETURNING 1"
        )
    ):
        is_renewed = True
    return is_renewed
