"""The settings for the files that the replicas of a catalog share, and for a server that tenants share."""

from __future__ import annotations

from dataclasses import dataclass

from seamark.formats.runtime.errors import ConfigError, ReadOnlyServer
from seamark.metaserver.settings.services import setting

ALL, READ = "all", "read"


@dataclass(frozen=True, kw_only=True)
class FleetSettings:
    role: str = setting(
        ALL,
        "What this server does. all: everything. read: it answers reads, and refuses changes; it flushes no rows, runs "
        "no table services and sends no events. So reading does not slow the servers that write.",
        choices=(ALL, READ),
    )
    writer_urls: tuple[str, ...] = setting(
        (),
        "URLs of servers with the role all. A server with the role read names them when it refuses a change.",
        schemes=("http", "https"),
    )
    peer_address: str = setting(
        "",
        "host:port on which this server answers other replicas, and by which they reach it, such as 10.0.0.5:8183. "
        "Replicas then read manifests, metadata and index files from the storage once for all of them. Port 0 selects "
        "a free port. If it is empty, the server does not answer replicas.",
    )
    peer_listen: str = setting(
        "",
        "host:port to listen on for other replicas, if it is not peer_address: behind a forwarded port, say.",
    )
    peer_weight: int = setting(
        1,
        "Share of the files that this replica keeps for all, in proportion to the weights of all. 0: it keeps none.",
        minimum=0,
        maximum=1000,
    )
    peer_lease_s: float = setting(
        15.0,
        "Seconds after which a replica that stopped without notice is no longer listed. A third of it is the time "
        "between renewals.",
        minimum=0.3,
        maximum=3600,
    )
    peer_connect_timeout_s: float = setting(
        1.0, "Timeout of a connection to another replica in seconds.", minimum=0.01, maximum=60
    )
    peer_requests_limit: int = setting(
        128, "Concurrent requests of other replicas per worker; more are refused, and the storage is read.", minimum=1
    )
    peer_file_limit_bytes: int = setting(64 << 20, "Largest file that replicas keep for each other.", minimum=1024)
    peer_memory_bytes: int = setting(
        256 << 20, "Budget for files that this replica keeps for all in memory, per worker.", minimum=0
    )
    peer_disk_bytes: int = setting(
        8 << 30,
        "Budget for files that this replica keeps for all on local disk, shared by the workers of a machine; 0 "
        "disables it.",
        minimum=0,
    )
    peer_disk_folder: str = setting("", "Folder for these files. Empty: <home>/cache/files.")

    drain_delay_s: float = setting(
        0.0,
        "Seconds after SIGTERM in which the server accepts connections while /readyz fails, so that a load balancer "
        "notices before connections are refused. Set it longer than the interval of its checks.",
        minimum=0,
        maximum=600,
    )
    stale_limit_s: int = setting(
        0,
        "Longest age in seconds of pointers and rights with which a request with Cache-Control: stale-if-error is "
        "answered while PostgreSQL or the storage does not answer. 0: such requests are refused as all others.",
        minimum=0,
        maximum=86_400,
    )
    stale_wait_s: float = setting(
        0.5, "Seconds that such a request waits for the database and the storage.", minimum=0.01, maximum=30
    )


def refuse_change(settings: FleetSettings, operation: str) -> ReadOnlyServer:
    """Return the error of a change at a server with the role read."""
    servers = f"one of {', '.join(settings.writer_urls)}" if settings.writer_urls else 'a server with the role "all"'
    return ReadOnlyServer(f"This server only reads (its setting role is read): send {operation} to {servers}")


def split_address(address: str, name: str = "peer_address") -> tuple[str, int]:
    """Return the host and the port of an address host:port. An IPv6 address is in brackets.

    Raises:
        ConfigError: The text is not an address; the message names the setting.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{name} is {address!r}; write host:port, such as 10.0.0.5:8183")
    return host.removeprefix("[").removesuffix("]"), int(port)


@dataclass(frozen=True, kw_only=True)
class TenantSettings:
    namespace_entries_limit: int = setting(
        1_000_000,
        "Namespaces, tables, views and functions, live and dropped, in a namespace of the first level and below it; "
        "more receive 403.",
        minimum=1,
    )
    namespace_properties_limit: int = setting(
        1 << 30,
        "Characters of the properties of the namespaces in a namespace of the first level, with itself; more receive "
        "403.",
        minimum=1,
    )
    database_rows_limit: int = setting(
        1_000_000,
        "Rows that a principal can add to the database in an hour per worker (instants, idempotency keys, audit "
        "records, entries, index files and others); further changes receive 429, but not drops.",
        minimum=1,
    )
    database_bytes_limit: int = setting(
        1 << 30, "Bytes of these rows; further changes receive 429, but not drops.", minimum=1
    )
    sql_queue_s: float = setting(
        10.0, "Seconds that a SQL statement waits for others to end; then it receives 503.", minimum=0, maximum=600
    )
