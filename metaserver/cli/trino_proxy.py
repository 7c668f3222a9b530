"""`seamark trino-proxy`: what Trino's clients connect to in the place of Trino, so that it reads only what matters.

A client of the running server, which is found by `--url`, or where `--home` says it listens. Logs go to standard error.
Exit codes: 0 when it was told to end (SIGTERM, Ctrl-C), 1 when it cannot listen, 2 when the command makes no sense.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from connector.trino.proxy import ProxySettings
from connector.trino.rewriter import Limits
from connector.trino.server import bind, run, upstream_tls
from metaserver.access.guard import is_loopback
from metaserver.api.http.logs import configure_logging
from metaserver.cli.connecting import served_at
from metaserver.cli.options import CONTEXT, Misconfigured, load_settings, refuse, settings_flags
from metaserver.errors import ConfigError
from metaserver.tls import Certificate

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("trino-proxy", context_settings=CONTEXT)
@click.option(
    "--trino", "coordinators", multiple=True, required=True, metavar="URL", help="A coordinator; may be given again."
)
@click.option(
    "--catalog",
    "catalogs",
    multiple=True,
    required=True,
    metavar="NAME",
    help="What Trino calls the catalog of this Seamark; may be given again. Statements over others go on as they are.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0 takes a free one.")
@click.option("--tls-cert", type=_FILE, help="Certificate of this proxy, with its chain (PEM): clients use https.")
@click.option("--tls-key", type=_FILE, help="Its key (PEM).")
@click.option(
    "--trino-ca", type=_FILE, help="Authorities of the coordinators' certificates (PEM). Default: the system's."
)
@click.option(
    "--ca", type=_FILE, help="Authorities of Seamark's certificate (PEM). [SEAMARK_CA] Default: the system's."
)
@click.option(
    "--allow-plain-http",
    is_flag=True,
    help="Let passwords and tokens travel unencrypted beyond this machine, with a warning; else that is refused.",
)
@click.option("--trino-insecure", is_flag=True, help="Believe any certificate of a coordinator.")
@click.option(
    "--trust-forwarded",
    is_flag=True,
    help="Another proxy is before this one, and its X-Forwarded-* headers are true. Else they are dropped.",
)
@click.option(
    "--budget-ms",
    type=click.FloatRange(min=0, min_open=True),
    metavar="MS",
    default=1000 * Limits().budget_s,
    show_default=True,
    help="What a statement waits for its plans; then it goes on as it came.",
)
@click.option(
    "--kept-max",
    type=click.FloatRange(0, 1),
    metavar="SHARE",
    default=Limits().kept_max,
    show_default=True,
    help="Where a plan keeps more of a table's files than this, the table is read as it is.",
)
@click.option(
    "--trust-time-zone",
    is_flag=True,
    help="Trino's sql.forced-session-time-zone is not set: sessions that say UTC are in UTC, and their times prune.",
)
@click.option(
    "--plans",
    envvar="SEAMARK_PLANS",
    show_envvar=True,
    metavar="TEXT",
    default=ProxySettings.plans,
    show_default=True,
    help="What Trino's catalogs send in X-Seamark-Plans (iceberg.rest-catalog.http-headers): they alone see the plans.",
)
@click.option(
    "--rules/--no-rules",
    default=ProxySettings.rules,
    show_default=True,
    help="Trino's access control may have row filters and column masks: each rewritten statement is checked for them. "
    "--no-rules saves a request for each, and lets statements wait in Trino's queue with their plans.",
)
@click.option(
    "--plan-header",
    is_flag=True,
    help="X-Seamark-Plan tells clients how many files are left, unless rules are in force for them.",
)
@click.option(
    "--lease",
    "lease_s",
    type=click.IntRange(min=1),
    metavar="SECONDS",
    default=ProxySettings.lease_s,
    show_default=True,
    help="How long a plan's name is good for: a statement may wait in Trino's queue.",
)
@click.option(
    "--hold",
    "hold_s",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    default=ProxySettings.hold_s,
    show_default=True,
    help="Within this time a rewritten statement that fails before its first row is run again as it came.",
)
@click.option(
    "--statement-bytes",
    type=click.IntRange(min=0),
    metavar="BYTES",
    default=ProxySettings.statement_bytes,
    show_default=True,
    help="Longer statements go on unread.",
)
@click.option(
    "--drain",
    "drain_s",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    default=ProxySettings.drain_s,
    show_default=True,
    help="For requests that are under way when it is told to end.",
)
@click.option(
    "--connections",
    type=click.IntRange(min=0),
    metavar="COUNT",
    default=ProxySettings.connections,
    show_default=True,
    help="Open connections of clients; at the limit, those that are silent or idle make room. 0: by the files that the "
    "process may open, at most 10,000.",
)
@click.option(
    "--connections-per-address",
    type=click.IntRange(min=0),
    metavar="COUNT",
    default=ProxySettings.connections_per_address,
    show_default=True,
    help="Of them, those of one address. 0: half of them; all with --trust-forwarded.",
)
@click.option(
    "--header-bytes",
    type=click.IntRange(min=8192),
    metavar="BYTES",
    default=ProxySettings.header_bytes,
    show_default=True,
    help="Largest header of a request, all fields together: prepared statements come in headers.",
)
@click.option(
    "--header-timeout",
    "header_timeout_s",
    type=click.FloatRange(min=0.1),
    metavar="SECONDS",
    default=ProxySettings.header_timeout_s,
    show_default=True,
    help="How long the header of a request, and a TLS handshake, may take to arrive.",
)
@click.option(
    "--idle-timeout",
    "idle_timeout_s",
    type=click.FloatRange(min=0.1),
    metavar="SECONDS",
    default=ProxySettings.idle_timeout_s,
    show_default=True,
    help="How long a connection is kept open without a request.",
)
@click.option(
    "--send-timeout",
    "send_timeout_s",
    type=click.FloatRange(min=0.1),
    metavar="SECONDS",
    default=ProxySettings.send_timeout_s,
    show_default=True,
    help="How long a client may leave an answer unread before its connection is cut.",
)
@click.option(
    "--body-bytes",
    type=click.IntRange(min=0),
    metavar="BYTES",
    default=ProxySettings.body_bytes,
    show_default=True,
    help="Largest body of a request, as it is sent.",
)
@click.option(
    "--body-timeout",
    "body_timeout_s",
    type=click.FloatRange(min=0.1),
    metavar="SECONDS",
    default=ProxySettings.body_timeout_s,
    show_default=True,
    help="How long a body may take to arrive, and a second more for each 64 KiB of it.",
)
@click.option(
    "--url", envvar="SEAMARK_URL", show_envvar=True, help="Of the server. Default: as --home/server.json has it."
)
@click.option("--token", envvar="SEAMARK_TOKEN", help="A bearer token, of a reader. [SEAMARK_TOKEN]")
@settings_flags(("home", "log_level", "log_format"))
def trino_proxy(
    coordinators: tuple[str, ...],
    catalogs: tuple[str, ...],
    host: str,
    port: int,
    tls_cert: Path | None,
    tls_key: Path | None,
    trino_ca: Path | None,
    trino_insecure: bool,
    budget_ms: float,
    kept_max: float,
    trust_time_zone: bool,
    ca: Path | None,
    allow_plain_http: bool,
    url: str | None,
    config: Path | None,
    **given: Any,
) -> None:
    """Stands before Trino, and has it read only the files that a statement needs, by Seamark's plans.

    \b
    For instance, for Trino at port 8081 that has this Seamark as its catalog lake:
      seamark trino-proxy --trino http://127.0.0.1:8081 --catalog lake --port 8080
    Trino needs http-server.process-forwarded=true. When ready, one line says where clients connect. Any client of Trino
    works with it; whatever goes wrong with a plan, the statement runs as it came.
    """
    flags = {name: given.pop(name) for name in ("home", "log_level", "log_format")}
    configure_logging(load_settings(flags, config))
    try:
        settings = ProxySettings(
            trino=coordinators,
            catalogs=frozenset(catalogs),
            seamark=url or served_at(config, {"home": flags["home"]}),
            limits=Limits(budget_ms / 1000, kept_max, trust_time_zone),
            authorities=None if ca is None else str(ca),
            upstream_tls=upstream_tls(trino_ca, verify=not trino_insecure),
            **given,
        )
        settings.check()
        tls = _tls(tls_cert, tls_key)
        _check_plain_http(settings, host, tls, allowed=allow_plain_http)
    except ConfigError as error:
        raise refuse(error) from None
    except (ValueError, OSError) as error:
        raise Misconfigured(str(error)) from None
    try:
        sock = bind(host, port)
    except OSError as error:
        raise click.ClickException(f"Cannot listen on {host}:{port}: {error.strerror or error}") from None
    with sock:
        address = f"{'https' if tls else 'http'}://{host}:{sock.getsockname()[1]}"
        run(settings, sock, tls, lambda: click.echo(f"Trino is ready at {address}, over {settings.seamark}"))


def _tls(certificate: Path | None, key: Path | None) -> Certificate | None:
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ValueError("--tls-cert and --tls-key go together")
    return Certificate(certificate, key)


def _check_plain_http(settings: ProxySettings, host: str, tls: Certificate | None, *, allowed: bool) -> None:
    """ValueError where passwords or our token would cross the network unencrypted and nobody said that they may; a
    warning where somebody did."""
    legs = [f"to Trino at {url}" for url in settings.trino if _is_plain(url)]
    if settings.token and _is_plain(settings.seamark):
        legs.append(f"to Seamark at {settings.seamark}")
    if tls is None and not settings.trust_forwarded and not is_loopback(host):
        legs.append(f"from clients to {host or 'all addresses'}")
    if not legs:
        return
    if not allowed:
        raise ValueError(
            f"Passwords and tokens would travel unencrypted {', '.join(legs)}: use https (--tls-cert and --tls-key for "
            "clients), or allow it on a network that you trust with --allow-plain-http"
        )
    click.echo(f"Warning: passwords and tokens travel unencrypted {', '.join(legs)}", err=True)


def _is_plain(url: str) -> bool:
    parts = urlsplit(url)
    try:
        return parts.scheme == "http" and not is_loopback(parts.hostname or "")
    except ConfigError:  # a name that is not known yet is nobody's loopback
        return True
