"""All settings of the server: one immutable value, whose fields have descriptions and limits.

`sources.py` reads the values from flags, `SEAMARK_<NAME>` variables and the TOML file. This file has the defaults, and
the page `docs/reference/settings.md` is generated from it. Secret fields are never logged or shown (`Settings.redact`).
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from seamark.formats.storage.storages import STORAGES
from seamark.metaserver.settings.client_certificates import ClientCertificateSettings
from seamark.metaserver.settings.clouds import CloudSettings
from seamark.metaserver.settings.events import EventSettings
from seamark.metaserver.settings.fleet import FleetSettings, TenantSettings
from seamark.metaserver.settings.gateway import GatewaySettings
from seamark.metaserver.settings.opa import OpaSettings
from seamark.metaserver.settings.openfga import OpenFgaSettings
from seamark.metaserver.settings.services import ServiceSettings, setting
from seamark.metaserver.settings.streams import StreamSettings
from seamark.metaserver.settings.warehouses import WarehouseSettings

ENVIRONMENT_PREFIX = "SEAMARK_"
_USER_INFO = re.compile(r"(?<!abfs://)(?<!abfss://)(?<=://)[^@\s/]*@")  # Azure's URLs have a container there.


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
    OpenFgaSettings,
    EventSettings,
):
    """All settings of the server."""

    home: Path = setting(
        Path("seamark-home"),
        "Folder of the server's own files: the SQLite database, the keys and, by default, the warehouse. Only the "
        "account of the server can read it (mode 0700). If engines run under other accounts, put the warehouse "
        "elsewhere.",
    )
    host: str = setting(
        "127.0.0.1", "Address that the server listens on. Any address except loopback requires authentication."
    )
    port: int = setting(
        8181,
        "TCP port that the server listens on. With 0, the server selects a free port and prints it.",
        minimum=0,
        maximum=65535,
    )
    tls_cert: str = setting(
        "",
        "PEM file with the certificate of the server and its chain. If it is set, the server uses https, with TLS 1.2 "
        "or later. It reloads the file when the file changes, and on SIGHUP.",
    )
    tls_key: str = setting("", "PEM file with the private key of tls_cert, without a passphrase.")
    workers: int = setting(1, "Number of server processes. They share the port (SO_REUSEPORT).", minimum=1, maximum=256)
    warehouse: str = setting(
        "",
        "URI of the root folder of all tables: file:///path, s3://bucket/prefix, gs://bucket/prefix, or the abfss:// "
        "URI of a folder in Azure. If it is empty, the folder is <home>/warehouse.",
        schemes=STORAGES,
    )
    database: str = setting(
        "",
        "URL of the database (the pointer store): sqlite:///path or postgresql://user@host/db. If it is empty, the "
        "server uses SQLite in <home>/seamark.db.",
        secret=True,
        schemes=("sqlite", "postgresql", "postgres"),
    )
    prefix: str = setting(
        "", "Path segment after /v1 that the server announces to clients. If it is empty, there is none."
    )
    allowed_locations: tuple[str, ...] = setting(
        (), "URIs outside the warehouse below which clients can also register or create tables.", schemes=STORAGES
    )
    trusted_engines: tuple[str, ...] = setting(
        (),
        "Principals of engines that act for many users, such as Trino: names of tokens, or <issuer>:<subject>. These "
        "engines can set any user as the owner of a view; the view runs with the rights of its owner. A writer of the "
        "whole catalog can do so too, unless the server has or can have further warehouses (warehouse_roots): then "
        "only an admin of the server, in the server's own warehouse.",
    )

    warehouse_umask: str = setting(
        "",
        "Permissions to remove from the files and folders of a local warehouse outside the home folder, as an octal "
        "umask such as 022 or 027. If it is empty, the umask of the server process applies. Everything inside the "
        "home folder is private.",
    )

    s3_endpoint: str = setting(
        "", "URL of an S3-compatible store. If it is empty, the server uses AWS.", schemes=("http", "https")
    )
    s3_region: str = setting("us-east-1", "Region for S3 requests and their signatures.", pattern="[a-z0-9-]{1,40}")
    s3_access_key_id: str = setting(
        "", "S3 access key of the server. If it is empty, the server uses AWS's default credential chain.", secret=True
    )
    s3_secret_access_key: str = setting("", "S3 secret key of the server.", secret=True)
    s3_path_style: bool = setting(
        True, "Whether S3 requests use path style (http://host/bucket/key). With false, they use virtual-host style."
    )
    s3_client_access: str = setting(
        "none",
        "Credentials that clients receive for S3: none (they use their own credentials), signing (remote signing), "
        "static (the server's own keys, for trusted networks), gateway (the objects gateway, with keys for one "
        "table), or sts (temporary AWS keys for one table, from s3_sts_role).",
        choices=("none", "signing", "static", "gateway", "sts"),
    )
    s3_folder: str = setting(
        "",
        "Absolute path of a local folder that stores the objects of s3:// locations; each of its folders is a "
        "bucket. If it is empty, the server uses an S3 store.",
    )
    storage_timeout_s: float = setting(30.0, "Timeout of a storage request in seconds.", minimum=0.1)
    storage_retries: int = setting(3, "Retries of a failed storage request.", minimum=0, maximum=100)

    auth: str = setting(
        "none",
        "Login methods: none (only on loopback), or one or several of token (bearer tokens of this server), oidc "
        "(JWTs of OIDC issuers) and cert (client certificates), joined by +, such as token+oidc.",
        choices=("none", "token", "oidc", "token+oidc", "cert", "token+cert", "oidc+cert", "token+oidc+cert"),
    )
    oidc_issuer: str = setting("", "URL of the OIDC issuer whose JWTs the server accepts.", schemes=("http", "https"))
    oidc_audience: str = setting("", "Audience that each JWT must contain.")
    oidc_jwks_url: str = setting(
        "",
        "URL of the OIDC issuer's keys. If it is empty, the server reads the URL from the issuer's discovery document.",
        schemes=("http", "https"),
    )
    oidc_principal_claim: str = setting("sub", "Claim of a JWT that contains the name of the principal.")
    oidc_roles_claim: str = setting(
        "",
        "Claim of a JWT that contains a list of roles, each as role or role:namespace. If it is empty, only the "
        "grants of this server count.",
    )
    oidc_groups_claim: str = setting(
        "",
        "Claim of a JWT that contains a list of groups. A user also has the grants of these groups; the group "
        "engineers is the principal oidc-group:engineers. If it is empty, the server ignores groups.",
    )
    oidc_issuers_file: str = setting(
        "",
        "TOML file with further OIDC issuers. Each issuer is a table [[issuer]] with name, url and audience. The "
        "server reads the file when it starts.",
    )
    oauth_token_ttl_s: int = setting(
        3600, "Seconds for which an access token from /v1/oauth/tokens is valid.", minimum=1
    )
    clock_leeway_s: int = setting(
        30,
        "Clock difference in seconds that the server tolerates between replicas, and between itself and the OIDC "
        "issuer. It accepts a token this long before its start, and a token of an issuer this long after its end.",
        minimum=0,
        maximum=600,
    )
    encryption_key: str = setting(
        "",
        "Key that encrypts the signing keys in the database: 32 random bytes in base64 (openssl rand -base64 32). All "
        "replicas need the same key. It can be a list separated by commas: the first key encrypts, and all keys "
        "decrypt. If it is empty, the server reads encryption_key_file.",
        secret=True,
    )
    encryption_key_file: str = setting(
        "",
        "File with encryption keys, one on each line. The server creates it at its first start. If it is empty, the "
        "file is <home>/encryption.key. Do not include the file in backups of the database.",
    )
    signing_key_rotation_s: int = setting(
        30 * 86400,
        "Age in seconds at which the server replaces the key that signs access tokens, plan tokens and page tokens. "
        "The old key still verifies tokens until its last token has expired.",
        minimum=3600,
    )
    rights_recheck_s: float = setting(
        5.0,
        "Seconds between two checks whether the readers of event streams and the holders of gateway keys still have "
        "their rights.",
        minimum=0.05,
        maximum=60,
    )

    pg_pool_max: int = setting(10, "Maximum number of connections to PostgreSQL per worker.", minimum=1, maximum=1000)
    store_queue_limit: int = setting(
        1024,
        "Maximum number of transactions that wait for the SQLite writer. The server refuses further transactions "
        "with 503.",
        minimum=1,
    )
    commit_retries: int = setting(
        8,
        "Number of times that the server retries a commit after a collision with another commit. It gives up after "
        "that, but not before storage_timeout_s has passed.",
        minimum=0,
        maximum=1000,
    )
    commit_group_max: int = setting(
        64,
        "Maximum number of waiting changes of a table that the server commits together. Each change still gets its "
        "own snapshot.",
        minimum=1,
    )
    commit_files_limit: int = setting(
        200_000, "Maximum number of files that a change can add and remove (POST /api/v1/tables/…/commit).", minimum=1
    )
    commit_history_limit: int = setting(
        1000,
        "Maximum number of earlier snapshots that a commit reads. It reads them to find conflicts since its read "
        "snapshot, and to find commits of a producer that are missing in the database. A change whose read snapshot "
        "is older is a conflict.",
        minimum=1,
    )
    commit_turn_after: int = setting(
        3,
        "Number of conflicts after which a change of rows receives priority: it commits before the other changes of "
        "the table. POST /api/v1/tables/…/commit identifies a change by its change-id.",
        minimum=1,
    )
    commit_turn_s: float = setting(
        10.0,
        "Seconds for which other changes of a table wait for a change with priority, at most half of "
        "storage_timeout_s. With 0, no change gets priority. Each process gives priority only to its own changes.",
        minimum=0.0,
    )
    commit_memory_bytes: int = setting(
        128 << 20, "Memory budget in bytes for cached manifests and manifest lists of commits, per worker.", minimum=0
    )
    body_limit_bytes: int = setting(
        64 << 20,
        "Size in bytes of the largest request body, decompressed, of a commit or of a lookup with keys in Arrow "
        "format.",
        minimum=1024,
    )
    medium_body_limit_bytes: int = setting(
        4 << 20,
        "Size in bytes of the largest request body, decompressed, of operations that take a filter, a schema, a view "
        "or a list of index files.",
        minimum=1024,
    )
    small_body_limit_bytes: int = setting(
        1 << 20,
        "Size in bytes of the largest request body, decompressed, of all other operations. For a login, the limit is "
        "16 KiB.",
        minimum=1024,
    )
    bodies_memory_bytes: int = setting(
        256 << 20,
        "Memory budget in bytes for request bodies, per worker. One principal can use half of it. Requests beyond the "
        "budget get 503, and requests beyond a principal's half get 429.",
        minimum=1024,
    )
    body_timeout_s: float = setting(
        30.0, "Seconds in which a request body must arrive, plus one second for each 64 KiB of it.", minimum=0.1
    )
    requests_limit: int = setting(
        512,
        "Maximum number of concurrent requests per worker. Further requests get 503 with Retry-After. One principal "
        "can use half of them, and gets 429 for more. If the server has no logins, all requests together can use all "
        "of them.",
        minimum=1,
    )
    connections_limit: int = setting(
        0,
        "Maximum number of open connections per worker. At the limit, the server closes silent or idle connections. "
        "With 0, the limit is half of the files that the process can open, but at most 10,000.",
        minimum=0,
    )
    connections_per_address: int = setting(
        0,
        "Maximum number of open connections from one address, per worker. With 0, the limit is half of "
        "connections_limit.",
        minimum=0,
    )
    header_timeout_s: float = setting(10.0, "Seconds in which the header of a request must arrive.", minimum=0.1)
    idle_timeout_s: float = setting(
        300.0,
        "Seconds that a connection stays open without a request. Set it longer than the same timeout of a proxy in "
        "front of the server.",
        minimum=1,
    )
    send_timeout_s: float = setting(
        60.0,
        "Seconds in which a client must receive 64 KiB of a waiting answer. If it does not, the server closes its "
        "connection.",
        minimum=0.1,
    )
    page_limit: int = setting(1000, "Maximum number of entries in a page of a listing.", minimum=1)
    metadata_cache_bytes: int = setting(
        512 << 20,
        "Memory budget in bytes for decoded table metadata and encoded answers, per worker. Requests can use four "
        "times as many bytes, but at least 1 GiB, for metadata above 16 MiB; one principal can use half of it, and "
        "gets 503 for more.",
        minimum=0,
    )
    scan_planning_mode: str = setting(
        "auto",
        "Planner of scans that the server announces to clients: server, client, or auto (the server, except for "
        "tables of format version 3). The table property seamark.scan-planning-mode overrides it.",
        choices=("auto", "server", "client"),
    )
    plan_inline_limit: int = setting(
        1000,
        "Maximum number of files that the answer to a scan request lists. Clients fetch larger plans in pages.",
        minimum=0,
    )
    plan_page_size: int = setting(4000, "Maximum number of files in a page of a scan plan.", minimum=1, maximum=100_000)
    plan_residual_bytes: int = setting(
        4 << 20,
        "Maximum number of bytes of residual filters in an answer or a page of a scan. If repeating a long filter for "
        "each file would exceed the limit, the server omits the residuals, as the REST specification allows. "
        "PyIceberg, and Java clients that send X-Seamark-Residuals: short, filter rows by their own filter but need "
        "some residual: they receive a shorter residual that keeps more rows. Other Java clients receive exact "
        "residuals, and fewer files in each answer. Residuals of up to 1 KiB are never shortened and do not count.",
        minimum=0,
    )
    plan_async_files: int = setting(
        5_000_000,
        "Number of manifest entries from which the server plans a scan asynchronously (status submitted).",
        minimum=0,
    )
    plan_memory_bytes: int = setting(
        1 << 30,
        "Memory budget in bytes for decoded manifests, manifest lists, views and plans, per worker. Of a decoded "
        "manifest that is mapped from the disk cache, only the columns that were used count.",
        minimum=0,
    )
    plan_answers_bytes: int = setting(
        64 << 20,
        "Memory budget in bytes for encoded answers to small scans, per worker. A quarter of it is for encoded "
        "partition values, and an eighth for parsed partition filters of metadata listings.",
        minimum=0,
    )
    plan_disk_bytes: int = setting(
        8 << 30,
        "Disk budget in bytes for decoded manifests, shared by the workers of a machine. With 0, the server stores "
        "none on disk.",
        minimum=0,
    )
    plan_disk_folder: str = setting(
        "", "Folder for decoded manifests. If it is empty, the folder is <home>/cache/blocks."
    )
    plan_threads: int = setting(
        0, "Number of threads that decode manifests, per worker. With 0, there is one for each core.", minimum=0
    )
    plan_time_budget_s: float = setting(
        10.0,
        "Seconds that the planner spends on pruning a scan. It keeps the files that it has not checked in this time.",
        minimum=0,
    )
    plan_manifest_limit_bytes: int = setting(
        1 << 30,
        "Size in bytes of the largest manifest or manifest list that the server reads. It refuses larger files.",
        minimum=1024,
    )
    plan_prepare_bytes: int = setting(
        16 << 20,
        "Maximum number of bytes of a commit's new manifests that the server decodes before the next plan needs "
        "them. With 0, it decodes none in advance.",
        minimum=0,
    )
    plan_table_lease_s: int = setting(
        600, "Lease in seconds of a plan table, if the request does not state one.", minimum=1
    )
    plan_table_lease_max_s: int = setting(
        3600, "Longest lease in seconds that a request can state for a plan table.", minimum=1, maximum=30 * 86400
    )
    plan_table_grace_s: int = setting(
        3600,
        "Seconds for which the files of a plan table still exist after its lease has ended, for queries that are "
        "running.",
        minimum=0,
    )
    plan_tables_limit: int = setting(
        100_000,
        "Maximum number of plan tables with live leases in the whole catalog. One principal can have half of them. "
        "The server refuses to create more.",
        minimum=0,
    )
    plan_snapshots_limit: int = setting(
        1000,
        "Maximum number of plan snapshots that loadTable adds to a table. The header X-Seamark-Plans of the request "
        "selects them, and those with the longest leases are added.",
        minimum=0,
        maximum=100_000,
    )
    plan_tables_bytes: int = setting(
        32 << 30,
        "Maximum number of bytes of plan table files that a worker has written and not yet deleted, that is, until "
        "plan_table_grace_s after the end of their leases. One principal can use half of it. The server refuses to "
        "create more plan tables.",
        minimum=0,
    )
    plan_table_memory_bytes: int = setting(
        128 << 20,
        "Memory budget in bytes for decoded manifests from which plan tables use only some entries, per worker.",
        minimum=0,
    )
    plan_table_files_limit: int = setting(
        100_000,
        "Maximum number of files that a plan table lists in new manifests, because the plan contains only some files "
        "of their old manifests. The server does not create a plan table that needs more.",
        minimum=0,
    )
    join_memory_bytes: int = setting(
        256 << 20,
        "Memory budget in bytes for the join columns of other tables and their keys, per worker.",
        minimum=0,
    )
    join_read_bytes: int = setting(
        128 << 20,
        "Maximum number of bytes of a table's data files that the planner reads for the joins of a request.",
        minimum=0,
    )
    join_rows_limit: int = setting(
        5_000_000,
        "Maximum number of rows of a joined table after pruning by the table's own filter. The planner does not use "
        "joins with larger tables.",
        minimum=0,
    )
    join_wait_s: float = setting(
        2.0,
        "Seconds that a request waits for the keys of joined tables. The planner does not use keys that arrive later.",
        minimum=0,
    )
    decoded_limit_bytes: int = setting(
        256 << 20,
        "Memory limit in bytes for the decoded columns of a table in a join, or for a decoded delete file. The "
        "planner does not use larger data: it keeps more files, and reports rows as undecided.",
        minimum=1 << 20,
    )
    index_memory_bytes: int = setting(
        1 << 30,
        "Memory budget in bytes for opened index files, per worker. A file that is mapped from the disk cache counts "
        "with an eighth of its size, because the kernel can reclaim its pages. A record index has 24 bytes for each "
        "row.",
        minimum=0,
    )
    index_disk_bytes: int = setting(
        16 << 30,
        "Disk budget in bytes for index files, shared by the workers of a machine. With 0, the server stores none "
        "on disk.",
        minimum=0,
    )
    index_disk_folder: str = setting("", "Folder for index files. If it is empty, the folder is <home>/cache/indexes.")
    cube_memory_bytes: int = setting(
        256 << 20,
        "Memory budget in bytes for merged groups of cubes, and for answers from them, per worker.",
        minimum=0,
    )
    cube_disk_bytes: int = setting(
        4 << 30,
        "Disk budget in bytes for merged groups of cubes in <home>/cache/cubes, shared by the workers of a machine. "
        "With 0, the server stores none on disk.",
        minimum=0,
    )
    index_file_limit_bytes: int = setting(
        2 << 30,
        "Size in bytes of the largest index file that the server reads. It does not use larger files.",
        minimum=1024,
    )
    index_whole_bytes: int = setting(
        16 << 20,
        "Size in bytes above which the server reads only some ranges of an index file that is not in memory, while it "
        "fetches the complete file in the background.",
        minimum=0,
    )
    index_wait_s: float = setting(
        1.0,
        "Seconds that a scan waits for index files that are not in memory. After that, it continues without them, and "
        "a later scan can use them.",
        minimum=0,
    )
    index_retention_s: int = setting(
        3600,
        "Seconds for which replaced and quarantined index files are kept before housekeeping deletes them.",
        minimum=0,
    )
    drop_retention_s: int = setting(
        7 * 86400, "Seconds for which a dropped table or view can be restored. With 0, drops are permanent.", minimum=0
    )
    sql: str = setting(
        "loopback",
        "Whether POST /api/v1/sql runs queries: on, off, or loopback (only while the server listens only on loopback "
        "addresses).",
        choices=("loopback", "on", "off"),
    )
    sql_statements_limit: int = setting(
        4,
        "Maximum number of concurrent SQL statements per worker. Further statements wait for sql_queue_s. One "
        "principal can use half of them, and gets 429 for more. A quarter of them, and at least one, is reserved for "
        "principals without a running statement.",
        minimum=1,
        maximum=1000,
    )
    sql_memory_bytes: int = setting(
        2 << 30,
        "Memory limit in bytes of the process that runs a SQL statement, in addition to the memory of its libraries. "
        "DuckDB uses half of it.",
        minimum=256 << 20,
    )
    sql_threads: int = setting(
        0, "Number of DuckDB threads for a SQL statement. With 0, there is one for each core.", minimum=0, maximum=256
    )
    sql_time_s: float = setting(
        60.0,
        "Seconds that a SQL statement can run, including the time in which the client reads the answer.",
        minimum=0.1,
        maximum=3600,
    )
    sql_rows_limit: int = setting(
        1_000_000,
        "Maximum number of rows in the answer to a SQL statement. A statement with more rows fails.",
        minimum=1,
    )
    sql_bytes_limit: int = setting(
        256 << 20,
        "Maximum number of bytes in the answer to a SQL statement. A statement with a larger answer fails.",
        minimum=1024,
    )
    indexes_limit: int = setting(64, "Maximum number of indexes that can be defined on a table.", minimum=0)
    idempotency_ttl_s: int = setting(
        86400, "Seconds for which the server keeps the first answer to an idempotency key.", minimum=1
    )
    metrics_retention_s: int = setting(
        30 * 86400, "Seconds for which the server keeps scan and commit reports.", minimum=1
    )
    metrics_reports_limit: int = setting(
        1000,
        "Maximum number of scan and commit reports that the server keeps for a table. A new report replaces the "
        "oldest one.",
        minimum=1,
    )
    metrics_report_limit_bytes: int = setting(
        128 << 10, "Size in bytes of the largest scan or commit report that the server accepts.", minimum=1024
    )
    metrics_rate_bytes: int = setting(
        16 << 20,
        "Maximum number of bytes of reports that a principal can send in a minute, per worker. Further reports "
        "get 429.",
        minimum=1024,
    )
    column_usage_days: int = setting(
        180,
        "Days for which the server remembers which columns were read by plans and scan reports, for `seamark advise "
        "ttl`. With 0, it records nothing.",
        minimum=0,
        maximum=3650,
    )
    column_usage_counters: int = setting(
        20_000,
        "Maximum number of different reads (table, columns, age of the oldest partition) that wait in memory until "
        "the server records them, once a minute. One principal can use half of them. Reads beyond the limit are "
        "recorded as reads of all columns.",
        minimum=1,
    )
    query_history_days: int = setting(
        90,
        "Days for which the server remembers which shapes of statements read a table, for `seamark history` and "
        "`seamark advise`. With 0, it records nothing.",
        minimum=0,
        maximum=3650,
    )
    query_history_literals: str = setting(
        "dropped",
        "What the query history records about the values in the filters of statements: nothing (`dropped`), a keyed "
        "hash (`hashed`), or some filters with their values (`kept`).",
        choices=("dropped", "hashed", "kept"),
    )
    query_history_shapes: int = setting(
        400,
        "Maximum number of statement shapes that the query history keeps for a table. One principal can be the first "
        "user of a quarter of them. Statements of further shapes are counted together.",
        minimum=4,
        maximum=10_000,
    )
    query_history_waiting: int = setting(
        10_000,
        "Maximum number of statement shapes that wait in memory until the server records them, once a minute. One "
        "principal can use half of them. Statements beyond the limit are counted without their shapes.",
        minimum=1,
    )
    audit_reads: bool = setting(False, "Whether the audit log also records requests that only read.")
    audit_retention_s: int = setting(90 * 86400, "Seconds for which the server keeps audit records.", minimum=1)
    timeline_keep: int = setting(
        1000,
        "Number of finished instants of a table that stay in the main timeline. Older instants move to the archive.",
        minimum=1,
    )
    watch_timeout_s: float = setting(
        60.0, "Maximum number of seconds that a long poll of the timeline can wait.", minimum=0, maximum=3600
    )
    watch_poll_s: float = setting(
        0.5,
        "Seconds between two checks for commits of other replicas, while a client watches the timeline.",
        minimum=0.01,
        maximum=60,
    )
    watchers_limit: int = setting(
        256, "Maximum number of open long polls and event streams per worker. Further requests get 503.", minimum=0
    )
    free_space_min_bytes: int = setting(
        64 << 20,
        "Free bytes on the disks of the home folder, the SQLite database and a local warehouse below which /readyz "
        "fails. On a small disk, the limit is a twentieth of its size.",
        minimum=0,
    )
    housekeeping_interval_s: float = setting(
        60.0,
        "Seconds between two rounds of housekeeping, which purges dropped tables, archives instants and deletes "
        "expired records.",
        minimum=0.05,
    )
    drain_timeout_s: float = setting(30.0, "Seconds after SIGTERM in which running requests can finish.", minimum=0)

    def make_warehouse_uri(self) -> str:
        """Return the warehouse as a URI without a trailing slash."""
        return (self.warehouse or f"file://{self.home.absolute() / 'warehouse'}").rstrip("/")

    def make_database_url(self) -> str:
        return self.database or f"sqlite:///{self.home.absolute() / 'seamark.db'}"

    def list_changed(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, in the form that `redact` returns."""
        redacted_values = self.redact()
        return {
            field.name: redacted_values[field.name]
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }

    def redact(self) -> dict[str, Any]:
        """Return the settings in a form for logs: secrets as ***, URLs without passwords, and paths as text."""
        redacted_values: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "database":
                value = redact_url(self.make_database_url())
            elif field.metadata["secret"]:
                value = "***" if value else ""
            elif isinstance(value, str) and "://" in value:
                value = redact_url(value)
            elif isinstance(value, tuple):
                value = tuple(_USER_INFO.sub("***@", item) if isinstance(item, str) else item for item in value)
            redacted_values[field.name] = str(value) if isinstance(value, Path) else value
        return redacted_values


def redact_url(url: str) -> str:
    """Return `url` without its password and query, because both may contain secrets. An invalid URL becomes `***`."""
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
    """Return the name of the environment variable of a setting, such as `SEAMARK_PORT` for `port`."""
    return ENVIRONMENT_PREFIX + name.upper()


def make_flag_name(name: str) -> str:
    """Return the command-line flag of a setting, such as `--s3-endpoint` for `s3_endpoint`."""
    return "--" + name.replace("_", "-")


_LAST_PARTS = (
    EventSettings,
    CloudSettings,
    TenantSettings,
    WarehouseSettings,
    GatewaySettings,
    FleetSettings,
    ServiceSettings,
)
_PART_POSITIONS = {
    field.name: position for position, part in enumerate(_LAST_PARTS, 1) for field in dataclasses.fields(part)
}
"""The position of each field whose part of the settings is shown after the settings of `Settings` itself."""
FIELDS: dict[str, dataclasses.Field[Any]] = {
    field.name: field
    for field in sorted(dataclasses.fields(Settings), key=lambda field: _PART_POSITIONS.get(field.name, 0))
}
