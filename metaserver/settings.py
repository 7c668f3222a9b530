"""Every setting of the server: one frozen value, each field with its description.

Read by `cli.py` from, first wins: command-line flag, `SEAMARK_<NAME>` variable, key of the TOML file, default here.
The reference page `docs/reference/settings.md` is generated from this file, and a test compares them.
Fields whose metadata say `secret` are never logged or shown.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def setting(default: Any, description: str, *, secret: bool = False) -> Any:
    """A field with a default and what it means."""
    return dataclasses.field(default=default, metadata={"description": description, "secret": secret})


@dataclass(frozen=True, kw_only=True)
class Settings:
    home: Path = setting(
        Path("seamark-home"),
        "Folder for what the server keeps itself: the SQLite database and, by default, the warehouse.",
    )
    host: str = setting("127.0.0.1", "Address to bind. Anything but loopback needs authentication configured.")
    port: int = setting(8181, "TCP port; 0 takes a free one and prints it.")
    workers: int = setting(1, "Server processes sharing the port (SO_REUSEPORT).")
    warehouse: str = setting(
        "", "URI below which tables live: file:///path or s3://bucket/prefix. Empty: <home>/warehouse."
    )
    database: str = setting(
        "", "Pointer store: sqlite:///path or postgresql://user@host/db. Empty: <home>/seamark.db.", secret=True
    )
    prefix: str = setting("", "Path segment after /v1 that clients are told to use; empty for none.")
    allowed_locations: tuple[str, ...] = setting(
        (), "URIs besides the warehouse below which tables may be registered or created."
    )

    s3_endpoint: str = setting("", "URL of an S3-compatible store; empty for AWS.")
    s3_region: str = setting("us-east-1", "Region for requests and signatures.")
    s3_access_key_id: str = setting(
        "", "Access key of the server; empty takes the environment's AWS chain.", secret=True
    )
    s3_secret_access_key: str = setting("", "Secret key of the server.", secret=True)
    s3_path_style: bool = setting(True, "Path-style requests (http://host/bucket/key); false for virtual-host style.")
    s3_client_access: str = setting(
        "none",
        "What clients get for S3: none (their own credentials), signing (remote signing), static (the server's own keys, for trusted networks).",
    )
    storage_timeout_s: float = setting(30.0, "Seconds before one storage request is given up.")
    storage_retries: int = setting(3, "How often a failed storage request is tried again.")

    auth: str = setting(
        "none", "none (loopback only), token (bearer tokens of this server), oidc (JWTs of an issuer), token+oidc."
    )
    oidc_issuer: str = setting("", "Issuer URL whose JWTs are accepted.")
    oidc_audience: str = setting("", "Audience that a JWT must name.")
    oidc_jwks_url: str = setting("", "Where the issuer's keys are; empty asks the issuer's discovery document.")
    oidc_principal_claim: str = setting("sub", "Claim that names the principal.")
    oidc_roles_claim: str = setting(
        "", "Claim with a list of role[:namespace] strings; empty for grants of this server only."
    )
    oauth_token_ttl_s: int = setting(3600, "Seconds that an access token from /v1/oauth/tokens lives.")

    pg_pool_max: int = setting(10, "Connections to PostgreSQL per worker, at most.")
    store_queue_limit: int = setting(
        1024, "Transactions waiting for the SQLite writer, at most; more are refused with 503."
    )
    commit_retries: int = setting(8, "How often the server itself retries a lost pointer swap before it answers 409.")
    body_limit_bytes: int = setting(64 << 20, "Largest request body.")
    requests_limit: int = setting(512, "Requests being answered at once per worker; more get 503 and Retry-After.")
    page_limit: int = setting(1000, "Largest page of any listing.")
    metadata_cache_bytes: int = setting(512 << 20, "Budget for decoded metadata and rendered answers per worker.")
    drop_retention_s: int = setting(
        7 * 86400, "Seconds that a dropped table or view can be undropped; 0 drops for good at once."
    )
    idempotency_ttl_s: int = setting(86400, "Seconds that the first answer to an idempotency key is kept.")
    metrics_retention_s: int = setting(30 * 86400, "Seconds that scan and commit reports are kept.")
    audit_retention_s: int = setting(90 * 86400, "Seconds that audit records are kept.")
    timeline_keep: int = setting(1000, "Finished instants per table before older ones move to the archive.")
    watch_timeout_s: float = setting(60.0, "Longest a long-poll of the timeline is held open.")
    housekeeping_interval_s: float = setting(60.0, "Seconds between rounds of purging, archiving and pruning.")
    drain_timeout_s: float = setting(30.0, "Seconds that requests may finish after SIGTERM.")

    webhook_urls: tuple[str, ...] = setting((), "URLs that get every instant as a CloudEvent (HTTP POST).")
    webhook_secret: str = setting("", "Key of the HMAC-SHA256 signature on webhook bodies.", secret=True)

    log_level: str = setting("info", "debug, info, warning or error.")
    log_format: str = setting("auto", "json, console, or auto (console on a terminal).")
    otel_endpoint: str = setting("", "OTLP/HTTP endpoint for traces; empty for none.")

    def warehouse_uri(self) -> str:
        """The warehouse as a URI without a trailing slash."""
        return (self.warehouse or (self.home.absolute() / "warehouse").as_uri()).rstrip("/")

    def database_url(self) -> str:
        return self.database or f"sqlite:///{self.home.absolute() / 'seamark.db'}"
