"""The settings for the files that the replicas of a catalog share, and for a server that tenants share."""

from __future__ import annotations

from dataclasses import dataclass

from seamark.formats.runtime.errors import ConfigError, ReadOnlyServer
from seamark.metaserver.settings.services import setting

ALL, READ = "all", "read"


@dataclass(frozen=True, kw_only=True)
class FleetSettings:
    """The settings of replicas."""

    role: str = setting(
        ALL,
        "The requests that this server accepts: all (reads and changes), or read (only reads; it refuses changes). A "
        "server with read also flushes no rows, runs no table services and sends no events, so that reads do not slow "
        "down the servers that write.",
        choices=(ALL, READ),
    )
    writer_urls: tuple[str, ...] = setting(
        (),
        "URLs of servers whose role is all. A server whose role is read names them in the message with which it "
        "refuses a change.",
        schemes=("http", "https"),
    )
    peer_address: str = setting(
        "",
        "host:port at which other replicas reach this server, such as 10.0.0.5:8183. The replicas then read each "
        "manifest, metadata file and index file from the storage only once in total. Port 0 selects a free port. If "
        "it is empty, the server does not answer replicas.",
    )
    peer_listen: str = setting(
        "",
        "host:port on which the server listens for other replicas, if it differs from peer_address, for example "
        "behind a forwarded port. If it is empty, the server listens on peer_address.",
    )
    peer_weight: int = setting(
        1,
        "Weight of this replica. Each replica stores a share of the shared files in proportion to its weight. With 0, "
        "this replica stores none.",
        minimum=0,
        maximum=1000,
    )
    peer_lease_s: float = setting(
        15.0,
        "Seconds after which the other replicas remove a replica that stopped without notice from their list. A "
        "replica renews its entry about three times in this period.",
        minimum=0.3,
        maximum=3600,
    )
    peer_connect_timeout_s: float = setting(
        1.0, "Timeout in seconds of a connection to another replica.", minimum=0.01, maximum=60
    )
    peer_requests_limit: int = setting(
        128,
        "Maximum number of concurrent requests of other replicas per worker. The server refuses further requests, "
        "and the replicas then read from the storage.",
        minimum=1,
    )
    peer_file_limit_bytes: int = setting(
        64 << 20, "Size in bytes of the largest file that replicas store for each other.", minimum=1024
    )
    peer_memory_bytes: int = setting(
        256 << 20,
        "Memory budget in bytes for the files that this replica stores for all replicas, per worker.",
        minimum=0,
    )
    peer_disk_bytes: int = setting(
        8 << 30,
        "Disk budget in bytes for the files that this replica stores for all replicas, shared by the workers of a "
        "machine. With 0, it stores none on disk.",
        minimum=0,
    )
    peer_disk_folder: str = setting(
        "",
        "Folder for the files that this replica stores for all replicas. If it is empty, the folder is "
        "<home>/cache/files.",
    )

    drain_delay_s: float = setting(
        0.0,
        "Seconds after SIGTERM in which the server still accepts connections although /readyz fails, so that a load "
        "balancer notices it before connections are refused. Set it longer than the interval of the load balancer's "
        "checks.",
        minimum=0,
        maximum=600,
    )
    stale_limit_s: int = setting(
        0,
        "Greatest age in seconds of the table pointers and rights from which the server may answer a request with "
        "Cache-Control: stale-if-error while PostgreSQL or the storage does not answer. With 0, the server refuses "
        "these requests like all others.",
        minimum=0,
        maximum=86_400,
    )
    stale_wait_s: float = setting(
        0.5,
        "Seconds that a request with Cache-Control: stale-if-error waits for the database and the storage.",
        minimum=0.01,
        maximum=30,
    )


def refuse_change(settings: FleetSettings, operation: str) -> ReadOnlyServer:
    """Return the error for a change that was sent to a server whose role is read."""
    servers = f"one of {', '.join(settings.writer_urls)}" if settings.writer_urls else 'a server with the role "all"'
    return ReadOnlyServer(
        f"This server accepts no changes, because its setting role is read: send {operation} to {servers}"
    )


def split_address(address: str, name: str = "peer_address") -> tuple[str, int]:
    """Split an address host:port into the host and the port. An IPv6 address must be in brackets.

    Raises:
        ConfigError: The text is not an address. The message names the setting `name`.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{name} is {address!r}; write host:port, such as 10.0.0.5:8183")
    return host.removeprefix("[").removesuffix("]"), int(port)


@dataclass(frozen=True, kw_only=True)
class TenantSettings:
    """The limits of a server that tenants share."""

    namespace_entries_limit: int = setting(
        1_000_000,
        "Maximum number of namespaces, tables, views and functions in a top-level namespace and all namespaces below "
        "it, including dropped entries. A request that exceeds it gets 403.",
        minimum=1,
    )
    namespace_properties_limit: int = setting(
        1 << 30,
        "Maximum number of characters in the properties of a top-level namespace and all namespaces below it. A "
        "request that exceeds it gets 403.",
        minimum=1,
    )
    database_rows_limit: int = setting(
        1_000_000,
        "Maximum number of rows that a principal can add to the database in an hour, per worker: instants, "
        "idempotency keys, audit records, entries, index files and others. Further changes get 429. Drops are always "
        "allowed.",
        minimum=1,
    )
    database_bytes_limit: int = setting(
        1 << 30,
        "Maximum number of bytes that a principal can add to the database in an hour, per worker. Further changes "
        "get 429. Drops are always allowed.",
        minimum=1,
    )
    sql_queue_s: float = setting(
        10.0,
        "Seconds that a SQL statement waits for running statements to end. After that, it fails with 503.",
        minimum=0,
        maximum=600,
    )
