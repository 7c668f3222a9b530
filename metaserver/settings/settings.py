"""All settings of the server: one frozen value, whose fields have their descriptions and limits.

`sources.py` reads flags, `SEAMARK_<NAME>` variables and the TOML file; the defaults are here. The page
`docs/reference/settings.md` is generated from this file. Secret fields are never logged or shown
(`Settings.redact`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from seamark.formats.storage.storages import STORAGES
from seamark.metaserver.settings.client_certificates import ClientCertificateSettings
from seamark.metaserver.settings.clouds import CloudSettings
from seamark.metaserver.settings.fleet import FleetSettings, TenantSettings
from seamark.metaserver.settings.gateway import GatewaySettings
from seamark.metaserver.settings.opa import OpaSettings
from seamark.metaserver.settings.services import ServiceSettings, setting
from seamark.metaserver.settings.streams import StreamSettings
from seamark.metaserver.settings.warehouses import WarehouseSettings

ENVIRONMENT_PREFIX = "SEAMARK_"


@dataclass(frozen=True, kw_only=True)
class Settings(
    ClientCertificateSettings,
    CloudSettings,
    WarehouseSettings,
    GatewaySettings,
    ServiceSettings,
    StreamSettings,
    TenantSettings,
    FleetSettings,
    OpaSettings,
):
    home: Path = setting(
        Path("seamark-home"),
        "Folder of the server's own files: the SQLite database, its keys and, by default, the warehouse. "
        "Private to the account of the server (mode 0700): if engines run under other accounts, put the "
        "warehouse elsewhere.",
    )
    host: str = setting("127.0.0.1", "Address to bind. Any address except loopback requires authentication.")
    port: int = setting(8181, "TCP port; 0 selects a free port and prints it.", minimum=0, maximum=65535)
    tls_cert: str = setting(
        "",
        "Certificate of the server with its chain (PEM); enables https. The server reloads it when the file "
        "changes, and on SIGHUP. The oldest accepted version is TLS 1.2.",
    )
    tls_key: str = setting("", "Key of tls_cert (PEM, without a passphrase).")
    workers: int = setting(1, "Server processes that share the port (SO_REUSEPORT).", minimum=1, maximum=256)
    warehouse: str = setting(
        "",
        "URI of the root of all tables: file:///path, s3://bucket/prefix, gs://bucket/prefix, or the abfss:// URI of "
        "a folder in Azure. Empty: <home>/warehouse.",
        schemes=STORAGES,
    )
    database: str = setting(
        "",
        "Pointer store: sqlite:///path or postgresql://user@host/db. Empty: <home>/seamark.db.",
        secret=True,
        schemes=("sqlite", "postgresql", "postgres"),
    )
    prefix: str = setting("", "Path segment after /v1 that the server announces to clients; empty for none.")
    allowed_locations: tuple[str, ...] = setting(
        (), "URIs besides the warehouse below which clients can register or create tables.", schemes=STORAGES
    )
    trusted_engines: tuple[str, ...] = setting(
        (),
        "Principals (names of tokens, <issuer>:<subject>) of engines that act for many users, such as Trino. They"
        " can set any user as the owner of a view, with whose rights it runs. A writer of the whole catalog "
        "always can.",
    )

    warehouse_umask: str = setting(
        "",
        "Permissions to remove from files and folders of a local warehouse outside the home, as an octal "
        "umask such as 022 or 027. If it is empty, the umask of the server process applies. Everything "
        "inside the home is private.",
    )

    s3_endpoint: str = setting("", "URL of an S3-compatible store; empty for AWS.", schemes=("http", "https"))
    s3_region: str = setting("us-east-1", "Region for requests and signatures.", pattern="[a-z0-9-]{1,40}")
    s3_access_key_id: str = setting("", "Access key of the server; empty uses AWS's credential chain.", secret=True)
    s3_secret_access_key: str = setting("", "Secret key of the server.", secret=True)
    s3_path_style: bool = setting(True, "Path-style requests (http://host/bucket/key); false for virtual-host style.")
    s3_client_access: str = setting(
        "none",
        "What clients receive for S3: none (they use their own credentials), signing (remote signing), static"
        " (the server's own keys, for trusted networks), gateway (the objects gateway, with keys for one table), sts "
        "(temporary keys of AWS for one table, from s3_sts_role).",
        choices=("none", "signing", "static", "gateway", "sts"),
    )
    s3_folder: str = setting(
        "", "Absolute path of a local folder for s3:// locations, with a folder for each bucket. Empty: an S3 store."
    )
    storage_timeout_s: float = setting(30.0, "Timeout of a storage request in seconds.", minimum=0.1)
    storage_retries: int = setting(3, "Retries of a failed storage request.", minimum=0, maximum=100)

    auth: str = setting(
        "none",
        "none (loopback only), or one or several of token (bearer tokens of this server), oidc (JWTs of issuers) and "
        "cert (client certificates), such as token+oidc.",
        choices=("none", "token", "oidc", "token+oidc", "cert", "token+cert", "oidc+cert", "token+oidc+cert"),
    )
    oidc_issuer: str = setting("", "Issuer URL whose JWTs are accepted.", schemes=("http", "https"))
    oidc_audience: str = setting("", "Audience that a JWT must name.")
    oidc_jwks_url: str = setting(
        "", "URL of the issuer's keys; empty uses the issuer's discovery document.", schemes=("http", "https")
    )
    oidc_principal_claim: str = setting("sub", "Claim that names the principal.")
    oidc_roles_claim: str = setting(
        "", "Claim with a list of role[:namespace] strings; empty: only grants of this server."
    )
    oidc_groups_claim: str = setting(
        "",
        "Claim with a list of groups. A user has the grants of the groups too, such as those of oidc-group:engineers. "
        "If it is empty, the server ignores groups.",
    )
    oidc_issuers_file: str = setting(
        "",
        "TOML file with more issuers, each a table [[issuer]] with name, url and audience. It is read at the start.",
    )
    oauth_token_ttl_s: int = setting(3600, "Seconds that an access token from /v1/oauth/tokens is valid.", minimum=1)
    clock_leeway_s: int = setting(
        30,
        "Allowed clock difference between replicas and the OIDC issuer, in seconds. A token is accepted this "
        "long before its start, and a token of the issuer this long after its end.",
        minimum=0,
        maximum=600,
    )
    encryption_key: str = setting(
        "",
        "Key that encrypts the signing keys in the database: 32 random bytes in base64 (openssl rand -base64 "
        "32), the same for all replicas. In a list separated by commas, the first key encrypts and all keys "
        "decrypt. If it is empty, the server reads encryption_key_file.",
        secret=True,
    )
    encryption_key_file: str = setting(
        "",
        "File with encryption keys, one in each line; created at the first start. Empty: "
        "<home>/encryption.key. Do not include it in backups of the database.",
    )
    signing_key_rotation_s: int = setting(
        30 * 86400,
        "Age at which the key that signs access tokens, plan tokens and page tokens is replaced. The old key "
        "verifies until its last signature has expired.",
        minimum=3600,
    )
    rights_recheck_s: float = setting(
        5.0,
        "Seconds between checks of the rights of readers of event streams and of holders of the gateway's keys.",
        minimum=0.05,
        maximum=60,
    )

    pg_pool_max: int = setting(10, "Maximum number of connections to PostgreSQL per worker.", minimum=1, maximum=1000)
    store_queue_limit: int = setting(
        1024, "Maximum number of transactions that wait for the SQLite writer; more are refused with 503.", minimum=1
    )
    commit_retries: int = setting(
        8, "Retries of a commit that lost its race, after storage_timeout_s at the earliest.", minimum=0, maximum=1000
    )
    commit_group_max: int = setting(
        64,
        "Maximum number of waiting changes of a table that are committed together; each has its own snapshot.",
        minimum=1,
    )
    commit_files_limit: int = setting(
        200_000, "Files that a change can add and remove (POST /api/v1/tables/…/commit).", minimum=1
    )
    commit_history_limit: int = setting(
        1000,
        "Maximum number of earlier snapshots that a commit reads: for conflicts since its read snapshot (more"
        " are a conflict), and for commits of a producer that are missing in the database.",
        minimum=1,
    )
    commit_turn_after: int = setting(
        3,
        "Conflicts after which a change of rows receives priority: it commits before the other "
        "changes of the table. POST /api/v1/tables/…/commit identifies a change by its change-id.",
        minimum=1,
    )
    commit_turn_s: float = setting(
        10.0,
        "Seconds that other changes of a table wait for a change with priority; at most half of "
        "storage_timeout_s. With 0, no change gets priority. Each process grants its own.",
        minimum=0.0,
    )
    commit_memory_bytes: int = setting(
        128 << 20, "Budget for cached manifests and manifest lists of commits, per worker.", minimum=0
    )
    body_limit_bytes: int = setting(
        64 << 20,
        "Largest request body, decompressed, of commits, and of keys to look up as Arrow.",
        minimum=1024,
    )
    medium_body_limit_bytes: int = setting(
        4 << 20,
        "Largest request body, decompressed, of operations that take a filter, a schema, a view or a list of index "
        "files.",
        minimum=1024,
    )
    small_body_limit_bytes: int = setting(
        1 << 20,
        "Largest request body, decompressed, of all other operations; a login has a limit of 16 KiB.",
        minimum=1024,
    )
    bodies_memory_bytes: int = setting(
        256 << 20,
        "Bytes of request bodies in memory per worker; a principal can use half. Beyond: 503 or 429.",
        minimum=1024,
    )
    body_timeout_s: float = setting(
        30.0, "Seconds for a request body to arrive, plus a second for each 64 KiB of it.", minimum=0.1
    )
    requests_limit: int = setting(
        512,
        "Concurrent requests per worker; more receive 503 and Retry-After. A principal can use half of them "
        "and receives 429 beyond. Without a login there is no share.",
        minimum=1,
    )
    connections_limit: int = setting(
        0,
        "Open connections per worker; at the limit the server closes silent or idle connections. 0: half of "
        "the files that the process can open, at most 10,000.",
        minimum=0,
    )
    connections_per_address: int = setting(
        0, "Open connections of an address per worker; 0: half of connections_limit.", minimum=0
    )
    header_timeout_s: float = setting(10.0, "Seconds for the header of a request to arrive.", minimum=0.1)
    idle_timeout_s: float = setting(
        300.0,
        "Seconds that a connection stays open without a request; set it longer than in a proxy in front of the server.",
        minimum=1,
    )
    send_timeout_s: float = setting(
        60.0,
        "Seconds in which a client that an answer waits for has to take 64 KiB of it; otherwise the server closes its "
        "connection.",
        minimum=0.1,
    )
    page_limit: int = setting(1000, "Largest page of any listing.", minimum=1)
    metadata_cache_bytes: int = setting(
        512 << 20, "Budget for decoded metadata and encoded answers per worker.", minimum=0
    )
    scan_planning_mode: str = setting(
        "auto",
        "The planner that the server announces to clients: server, client, or auto (the server, except for "
        "tables of format version 3). The table property seamark.scan-planning-mode overrides it.",
        choices=("auto", "server", "client"),
    )
    plan_inline_limit: int = setting(
        1000, "Maximum number of files in the answer to a scan; clients fetch larger plans in pages.", minimum=0
    )
    plan_page_size: int = setting(4000, "Files in a page of a scan.", minimum=1, maximum=100_000)
    plan_residual_bytes: int = setting(
        4 << 20,
        "Bytes of residual filters in an answer or page of a scan. If the files would repeat a long filter "
        "beyond the limit, residuals are omitted, as the REST specification allows. PyIceberg, and Java clients "
        "that send X-Seamark-Residuals: short, need a residual and filter rows by their own filter: they "
        "receive a shorter residual that keeps more rows. Other Java clients receive exact residuals, and "
        "fewer files in each answer. Residuals of up to 1 KiB are never shortened and do not count.",
        minimum=0,
    )
    plan_async_files: int = setting(
        5_000_000, "Manifest entries to read from which a scan is answered asynchronously (submitted).", minimum=0
    )
    plan_memory_bytes: int = setting(
        1 << 30,
        "Budget for decoded manifests per worker, including manifest lists, views and plans. Of mapped files of the "
        "disk cache, the columns that were used count.",
        minimum=0,
    )
    plan_answers_bytes: int = setting(
        64 << 20,
        "Budget for encoded answers to small scans, per worker. A quarter is for encoded partition values, an eighth "
        "for parsed partition filters of metadata listings.",
        minimum=0,
    )
    plan_disk_bytes: int = setting(
        8 << 30,
        "Budget for decoded manifests on local disk, shared by the workers of a machine; 0 disables it.",
        minimum=0,
    )
    plan_disk_folder: str = setting(
        "", "Folder for decoded manifests. If it is empty, the folder is <home>/cache/blocks."
    )
    plan_threads: int = setting(
        0, "Threads that decode manifests, per worker. With 0, there is one for each core.", minimum=0
    )
    plan_time_budget_s: float = setting(
        10.0, "Seconds for pruning a scan; files that are not checked in time are kept.", minimum=0
    )
    plan_manifest_limit_bytes: int = setting(
        1 << 30, "Largest manifest or manifest list that is read; larger files are refused.", minimum=1024
    )
    plan_prepare_bytes: int = setting(
        16 << 20, "Bytes of new manifests of a commit that are decoded before the next plan; 0: none.", minimum=0
    )
    plan_table_lease_s: int = setting(600, "Default lease of a plan table in seconds.", minimum=1)
    plan_table_lease_max_s: int = setting(3600, "Longest lease of a plan table.", minimum=1, maximum=30 * 86400)
    plan_table_grace_s: int = setting(
        3600,
        "Seconds that the files of a plan table stay after the end of its lease, for running queries.",
        minimum=0,
    )
    plan_tables_limit: int = setting(
        100_000,
        "Maximum number of plan tables with live leases, in the whole catalog. A principal can use half of it; more "
        "are not created for it.",
        minimum=0,
    )
    plan_snapshots_limit: int = setting(
        1000,
        "Plan snapshots of a table that loadTable adds for a value of X-Seamark-Plans; those with the longest leases.",
        minimum=0,
        maximum=100_000,
    )
    plan_tables_bytes: int = setting(
        32 << 30,
        "Bytes of plan table files that a worker has written and whose leases, plus plan_table_grace_s, have not ended."
        " A principal can use half of this; more are not created for it.",
        minimum=0,
    )
    plan_table_memory_bytes: int = setting(
        128 << 20, "Budget for decoded manifests that plan tables keep in part, per worker.", minimum=0
    )
    plan_table_files_limit: int = setting(
        100_000,
        "Files that a plan table can list in new manifests, from manifests that the plan keeps in part; for "
        "more no plan table is created.",
        minimum=0,
    )
    join_memory_bytes: int = setting(
        256 << 20,
        "Budget for join columns of other tables and their keys, per worker.",
        minimum=0,
    )
    join_read_bytes: int = setting(
        128 << 20, "Bytes of data files of a table that are read for the joins of a request.", minimum=0
    )
    join_rows_limit: int = setting(
        5_000_000,
        "Rows of a joined table after pruning by its own filter; joins with larger tables are skipped.",
        minimum=0,
    )
    join_wait_s: float = setting(
        2.0, "Seconds that a request waits for the keys of joined tables; later keys are not used.", minimum=0
    )
    decoded_limit_bytes: int = setting(
        256 << 20,
        "Memory for the decoded columns of a table in a join, or for a decoded delete file. A plan does not "
        "use larger data: it keeps more files, and rows are undecided.",
        minimum=1 << 20,
    )
    index_memory_bytes: int = setting(
        1 << 30,
        "Budget for opened index files per worker. Only an eighth of files mapped from the disk cache counts,"
        " because the kernel can reclaim their pages. A record index has 24 bytes for each row.",
        minimum=0,
    )
    index_disk_bytes: int = setting(
        16 << 30, "Budget for index files on local disk, shared by the workers of a machine; 0 disables it.", minimum=0
    )
    index_disk_folder: str = setting("", "Folder for index files. Empty: <home>/cache/indexes.")
    cube_memory_bytes: int = setting(
        256 << 20, "Budget for merged groups of cubes, and for answers from them, per worker.", minimum=0
    )
    cube_disk_bytes: int = setting(
        4 << 30,
        "Budget for merged groups of cubes in <home>/cache/cubes, shared by the workers of a machine; 0 disables it.",
        minimum=0,
    )
    index_file_limit_bytes: int = setting(
        2 << 30, "Largest index file that is read; larger files are not used.", minimum=1024
    )
    index_whole_bytes: int = setting(
        16 << 20,
        "Index files larger than this that are not in memory are probed by a few range reads, while the whole"
        " file is fetched in the background.",
        minimum=0,
    )
    index_wait_s: float = setting(
        1.0,
        "Seconds that a scan waits for index files that are not in memory; then it continues without them, "
        "and a later scan uses them.",
        minimum=0,
    )
    index_retention_s: int = setting(
        3600,
        "Seconds that superseded and quarantined index files are kept before housekeeping deletes them.",
        minimum=0,
    )
    drop_retention_s: int = setting(
        7 * 86400, "Seconds that a dropped table or view can be restored; 0 drops it permanently.", minimum=0
    )
    sql: str = setting(
        "loopback",
        "Where POST /api/v1/sql runs queries: loopback (only while the server listens on loopback addresses), on, off.",
        choices=("loopback", "on", "off"),
    )
    sql_statements_limit: int = setting(
        4,
        "Concurrent SQL statements per worker; more wait for sql_queue_s. A principal can use half of them and "
        "receives 429 beyond. A quarter of them, and at least one, is for principals that run nothing.",
        minimum=1,
        maximum=1000,
    )
    sql_memory_bytes: int = setting(
        2 << 30,
        "Memory limit of the process of a SQL statement, beside its libraries; DuckDB uses half of it.",
        minimum=256 << 20,
    )
    sql_threads: int = setting(
        0, "Threads of DuckDB for a statement. With 0, there is one for each core.", minimum=0, maximum=256
    )
    sql_time_s: float = setting(
        60.0,
        "Seconds that a SQL statement can run, with the time in which the client reads.",
        minimum=0.1,
        maximum=3600,
    )
    sql_rows_limit: int = setting(1_000_000, "Rows of a SQL statement's answer; for more it fails.", minimum=1)
    sql_bytes_limit: int = setting(256 << 20, "Bytes of a SQL statement's answer; for more it fails.", minimum=1024)
    indexes_limit: int = setting(64, "Indexes that can be defined on a table.", minimum=0)
    idempotency_ttl_s: int = setting(86400, "Seconds that the first answer to an idempotency key is kept.", minimum=1)
    metrics_retention_s: int = setting(30 * 86400, "Seconds that scan and commit reports are kept.", minimum=1)
    metrics_reports_limit: int = setting(
        1000, "Scan and commit reports that are kept for a table; a new report replaces the oldest.", minimum=1
    )
    metrics_report_limit_bytes: int = setting(128 << 10, "Largest scan or commit report.", minimum=1024)
    metrics_rate_bytes: int = setting(
        16 << 20, "Bytes of reports that a principal can send in a minute per worker; more receive 429.", minimum=1024
    )
    column_usage_days: int = setting(
        180,
        "Days for which the server remembers which columns plans and scan reports read, for `seamark advise ttl`. 0: "
        "it records nothing.",
        minimum=0,
        maximum=3650,
    )
    column_usage_counters: int = setting(
        20_000,
        "Different reads (table, columns, age of the oldest partition) that wait in memory to be recorded, once a "
        "minute; a principal can use half. Beyond, reads count as reads of every column.",
        minimum=1,
    )
    query_history_days: int = setting(
        90,
        "Days for which the server remembers which statements read a table, by their shapes, for `seamark history` and "
        "`seamark advise`. With 0, it records nothing.",
        minimum=0,
        maximum=3650,
    )
    query_history_literals: str = setting(
        "dropped",
        "What the query history records of the values that statements compare: nothing (`dropped`), a keyed hash "
        "(`hashed`), or some filters with their values (`kept`).",
        choices=("dropped", "hashed", "kept"),
    )
    query_history_shapes: int = setting(
        400,
        "Shapes of statements that the query history keeps for a table; a principal can be the first user of a "
        "quarter. Statements of further shapes are counted together.",
        minimum=4,
        maximum=10_000,
    )
    query_history_waiting: int = setting(
        10_000,
        "Shapes of statements that wait in memory to be recorded, once a minute; a principal can use half. Statements "
        "beyond are counted without their shapes.",
        minimum=1,
    )
    audit_reads: bool = setting(False, "Also audit requests that only read.")
    audit_retention_s: int = setting(90 * 86400, "Seconds that audit records are kept.", minimum=1)
    timeline_keep: int = setting(
        1000, "Finished instants of a table in the main table; older instants move to the archive.", minimum=1
    )
    watch_timeout_s: float = setting(60.0, "Longest duration of a long-poll of the timeline.", minimum=0, maximum=3600)
    watch_poll_s: float = setting(
        0.5, "Seconds between checks for commits of other replicas, while a client watches.", minimum=0.01, maximum=60
    )
    watchers_limit: int = setting(256, "Open long-polls and event streams per worker; more receive 503.", minimum=0)
    free_space_min_bytes: int = setting(
        64 << 20,
        "Free bytes on the disks of the home, the SQLite database and a local warehouse below which /readyz "
        "fails; on a small disk a twentieth of its size.",
        minimum=0,
    )
    housekeeping_interval_s: float = setting(
        60.0, "Seconds between housekeeping rounds: purging, archiving, deleting expired records.", minimum=0.05
    )
    drain_timeout_s: float = setting(30.0, "Seconds that running requests have to finish after SIGTERM.", minimum=0)

    webhook_urls: tuple[str, ...] = setting(
        (), "URLs that receive every instant as a CloudEvent (HTTP POST).", secret=True, schemes=("http", "https")
    )
    webhook_secret: str = setting("", "Key of the HMAC-SHA256 signature on webhook bodies.", secret=True)
    event_kafka: str = setting(
        "",
        "Topic of Apache Kafka that receives every instant as a CloudEvent: kafka://host:port[,host:port]/topic. The "
        "topic must exist. If it is empty, the server sends none.",
        schemes=("kafka",),
    )
    event_kafka_client_properties: str = setting(
        "",
        "A file with further properties of the Kafka client of event_kafka, one name=value on each line, such as "
        "those of TLS and SASL.",
    )
    event_nats: str = setting(
        "",
        "Subject of NATS JetStream that receives every instant as a CloudEvent, such as nats://host:port/subject or "
        "tls://host:port/subject. The address may begin with user:password@ and name several servers, separated by "
        "commas. A stream must have the subjects subject.>. If it is empty, the server "
        "sends none.",
        secret=True,
        schemes=("nats", "tls"),
    )

    openlineage_url: str = setting(
        "",
        "URL that receives OpenLineage events of jobs (HTTP POST), such as https://marquez.example/api/v1/lineage. "
        "If it is empty, the server sends none.",
        secret=True,
        schemes=("http", "https"),
    )
    openlineage_api_key: str = setting("", "Key that requests to openlineage_url have as bearer token.", secret=True)
    openlineage_namespace: str = setting("seamark", "Namespace of jobs in OpenLineage events.")

    log_level: str = setting("info", "debug, info, warning or error.", choices=("debug", "info", "warning", "error"))
    log_format: str = setting(
        "auto", "json, console, or auto (console on a terminal).", choices=("auto", "json", "console")
    )
    otel_endpoint: str = setting("", "OTLP/HTTP endpoint for traces; empty for none.", schemes=("http", "https"))

    def make_warehouse_uri(self) -> str:
        """Return the warehouse as a URI without a trailing slash."""
        return (self.warehouse or f"file://{self.home.absolute() / 'warehouse'}").rstrip("/")

    def make_database_url(self) -> str:
        return self.database or f"sqlite:///{self.home.absolute() / 'seamark.db'}"

    def list_changed(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, as `redact` shows them."""
        redacted_values = self.redact()
        return {
            field.name: redacted_values[field.name]
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }

    def redact(self) -> dict[str, Any]:
        """Return the settings for logs: secrets as ***, URLs without passwords, paths and tuples as JSON values."""
        redacted_values: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "database":
                value = redact_url(self.make_database_url())
            elif field.metadata["secret"]:
                value = "***" if value else ""
            elif isinstance(value, str) and "://" in value:
                value = redact_url(value)
            redacted_values[field.name] = str(value) if isinstance(value, Path) else value
        return redacted_values


def redact_url(url: str) -> str:
    """Return `url` without its password and query, which may contain a secret."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "***"
    netloc = parts.netloc
    if "@" in netloc:
        userinfo, _, hostport = netloc.rpartition("@")
        user, colon, _ = userinfo.partition(":")
        netloc = f"{user}{':***' if colon else ''}@{hostport}"
    return f"{parts.scheme}://{netloc}{parts.path}"


def make_variable_name(name: str) -> str:
    """Return the environment variable of a setting: `SEAMARK_PORT` for `port`."""
    return ENVIRONMENT_PREFIX + name.upper()


def make_flag_name(name: str) -> str:
    """Return the command-line flag of a setting: `--s3-endpoint` for `s3_endpoint`."""
    return "--" + name.replace("_", "-")


_PARTS = (CloudSettings, TenantSettings, WarehouseSettings, GatewaySettings, FleetSettings, ServiceSettings)
_LAST = {field.name: position for position, part in enumerate(_PARTS, 1) for field in dataclasses.fields(part)}
FIELDS: dict[str, dataclasses.Field[Any]] = {
    field.name: field for field in sorted(dataclasses.fields(Settings), key=lambda field: _LAST.get(field.name, 0))
}
