"""`seamark trino-proxy`: a proxy for Trino's clients.

It rewrites statements so that Trino reads fewer files.

It is a client of the running server, which is found by `--url` or in the `--home` of the server. Logs go
to standard error. Exit codes: 0 when it was stopped (SIGTERM, Ctrl-C), 1 when it cannot listen, 2 for
invalid arguments.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import click
import urllib3

from seamark.commands.connecting import find_server_url
from seamark.commands.options import (
    Misconfigured,
    address_options,
    load_settings,
    refuse,
    settings_flags,
)
from seamark.connector.cubes.summaries import CUBE_USES, OFF
from seamark.connector.trino.proxy import ProxySettings
from seamark.connector.trino.rewriter import RewriteLimits
from seamark.connector.trino.server import bind, make_upstream_tls, run
from seamark.formats.runtime.errors import ConfigError
from seamark.formats.runtime.tls import Certificate
from seamark.metaserver.access.guard import is_loopback
from seamark.metaserver.api.http.observability.logs import configure_logging

_ANSWER_S = 2.0
_INFO_MAX = 10_000
"""The maximum number of bytes of an answer that are read."""
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
Command = TypeVar("Command", bound=Callable[..., Any])


def _limit(name: str, text: str, least: float = 0) -> Callable[[Command], Command]:
    """Return an option for a limit in `ProxySettings`: seconds, bytes, or a number."""
    default = getattr(ProxySettings, name)
    kind = click.IntRange(min=int(least)) if isinstance(default, int) else click.FloatRange(min=least)
    unit = "SECONDS" if name.endswith("_s") else "BYTES" if name.endswith("_bytes") else "COUNT"
    flag = f"--{name.removesuffix('_s').replace('_', '-')}"
    return click.option(flag, name, type=kind, metavar=unit, default=default, show_default=True, help=text)


@click.command("trino-proxy")
@click.option(
    "--trino",
    "coordinators",
    multiple=True,
    required=True,
    metavar="URL",
    help="URL of a Trino coordinator; repeatable.",
)
@click.option(
    "--catalog",
    "catalogs",
    multiple=True,
    required=True,
    metavar="NAME",
    help="Name of this Seamark's catalog in Trino; repeatable. Statements on other catalogs stay unchanged.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="Port to listen on; 0 selects a free port.",
)
@click.option("--tls-cert", type=_FILE, help="Certificate of this proxy with its chain (PEM); enables https.")
@click.option("--tls-key", type=_FILE, help="Key of the certificate (PEM).")
@click.option(
    "--trino-ca", type=_FILE, help="Authorities of the coordinators' certificates (PEM). Default: the system's."
)
@click.option(
    "--ca", type=_FILE, help="Authorities of Seamark's certificate (PEM). [SEAMARK_CA] Default: the system's."
)
@click.option(
    "--allow-plain-http",
    is_flag=True,
    help="Allow unencrypted passwords and tokens beyond this machine, with a warning. Default: refuse to start.",
)
@click.option("--trino-insecure", is_flag=True, help="Accept any certificate of a coordinator.")
@click.option(
    "--trust-forwarded",
    is_flag=True,
    help="Trust X-Forwarded-* headers, because another proxy is in front. Default: drop them.",
)
@click.option(
    "--budget-ms",
    type=click.FloatRange(min=0, min_open=True),
    metavar="MS",
    default=1000 * RewriteLimits().budget_s,
    show_default=True,
    help="Time limit for the plans of a statement. If it is exceeded, the original statement runs.",
)
@click.option(
    "--kept-max",
    "max_kept_fraction",
    type=click.FloatRange(0, 1),
    metavar="SHARE",
    default=RewriteLimits().max_kept_fraction,
    show_default=True,
    help="Maximum share of a table's files in a plan. With a larger share, the reference to the table stays unchanged.",
)
@click.option(
    "--trust-time-zone",
    is_flag=True,
    help="Trino's sql.forced-session-time-zone is not set: conditions on times prune in sessions with the zone UTC.",
)
@click.option(
    "--plans",
    envvar="SEAMARK_PLANS",
    show_envvar=True,
    metavar="TEXT",
    default=ProxySettings.plans,
    show_default=True,
    help="Value of X-Seamark-Plans in Trino's catalogs (iceberg.rest-catalog.http-headers); "
    "only these catalogs see the plans.",
)
@click.option(
    "--rules/--no-rules",
    default=ProxySettings.rules,
    show_default=True,
    help="Check each rewritten statement for Trino's row filters and column masks. --no-rules saves this "
    "request, and rewritten statements may wait in Trino's queue.",
)
@click.option(
    "--cubes",
    type=click.Choice(CUBE_USES),
    default=OFF,
    show_default=True,
    help="Answer aggregate queries from cubes. exact excludes sums and averages of floats, and averages of integers. "
    "With --no-rules cubes are off, because Trino's row filters and column masks do not apply to the groups of a cube.",
)
@click.option(
    "--plan-header",
    is_flag=True,
    help="Send file counts in X-Seamark-Plan, unless access rules apply to the client.",
)
@click.option(
    "--maintenance",
    type=click.IntRange(0, 64),
    metavar="COUNT",
    default=ProxySettings.maintenance,
    show_default=True,
    help="Run ALTER TABLE … MERGE FILES and DROP COLUMNS of clients, at most this number at the same time; "
    "--token must be a writer's. 0: pass them on to Trino, which refuses them.",
)
@_limit("lease_s", "Lease of a plan; it must cover the time in Trino's queue.", least=1)
@_limit("hold_s", "Time in which a rewritten statement that fails before its first row is replaced by the original.")
@_limit("statement_bytes", "Longer statements are not parsed.")
@_limit("drain_s", "Seconds that running requests have to finish after SIGTERM.")
@_limit(
    "connections",
    "Maximum number of client connections; at the limit the proxy closes those that are silent or idle. 0: from "
    "the open-files limit of the process, at most 10,000.",
)
@_limit(
    "connections_per_address",
    "Maximum number of connections of one address. 0: half of them; all with --trust-forwarded.",
)
@_limit(
    "header_bytes",
    "Maximum size of a request header, all fields together; prepared statements are sent in headers.",
    least=8192,
)
@_limit("header_timeout_s", "Time limit of a request header and of a TLS handshake.", least=0.1)
@_limit("idle_timeout_s", "Time after which a connection without a request is closed.", least=0.1)
@_limit("send_timeout_s", "Time after which a connection with an unread answer is closed.", least=0.1)
@_limit("body_bytes", "Maximum size of a request body, as sent.")
@_limit("body_timeout_s", "Time limit of a request body, plus a second for each 64 KiB.", least=0.1)
@address_options
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
    max_kept_fraction: float,
    trust_time_zone: bool,
    cubes: str,
    ca: Path | None,
    allow_plain_http: bool,
    url: str | None,
    config: Path | None,
    **options: Any,
) -> None:
    """Run a proxy in front of Trino that rewrites statements to read only the files of Seamark's plans.

    \b
    For instance, for Trino at port 8081 that has this Seamark as its catalog lake:
      seamark trino-proxy --trino http://127.0.0.1:8081 --catalog lake --port 8080
    Trino needs http-server.process-forwarded=true. When the proxy is ready, it prints the address for
    clients. Every Trino client can use it. If a plan fails, the original statement runs.
    """
    flags = {name: options.pop(name) for name in ("home", "log_level", "log_format")}
    configure_logging(load_settings(flags, config))
    try:
        settings = ProxySettings(
            trino=coordinators,
            catalogs=frozenset(catalogs),
            seamark=url or find_server_url(config, {"home": flags["home"]}),
            limits=RewriteLimits(
                budget_ms / 1000, max_kept_fraction, trust_time_zone, cubes if options["rules"] else OFF
            ),
            authorities=None if ca is None else str(ca),
            upstream_tls=make_upstream_tls(trino_ca, verify=not trino_insecure),
            **options,
        )
        settings.check()
        tls = _make_tls_context(tls_cert, tls_key)
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
        faults = _find_unreachable_servers(settings)
        line = f"Trino is ready at {address}, over {settings.seamark}"
        if faults:
            line = f"The proxy listens at {address}, but {' and '.join(faults)}"
        run(settings, sock, tls, lambda: click.echo(line))


def _find_unreachable_servers(settings: ProxySettings) -> list[str]:
    """Return texts about servers behind the proxy that do not answer within `_ANSWER_S`, or are other servers.

    Name resolution has no time limit. Therefore each request has its own thread.
    """
    authorities = None if settings.authorities is None else ssl.create_default_context(cafile=settings.authorities)
    servers = {("Trino", url): (f"{url}/v1/info", settings.upstream_tls) for url in settings.trino}
    servers["Seamark", settings.seamark] = (f"{settings.seamark}/healthz", authorities)
    answers: dict[tuple[str, str], _Answer | None] = {}
    came = threading.Condition()

    def ask(server: tuple[str, str], url: str, tls: ssl.SSLContext | None) -> None:
        answer = _answer(url, tls)
        with came:
            answers[server] = answer
            came.notify()

    for server, request in servers.items():
        threading.Thread(target=ask, args=(server, *request), daemon=True).start()
    with came:
        came.wait_for(lambda: len(answers) == len(servers), _ANSWER_S)
        answer_of = {server: answers.get(server) for server in servers}
    silent = [f"{name} at {url}" for (name, url), answer in answer_of.items() if answer is None]
    other_servers = [
        f"the server at {url} is not {name}"
        for (name, url), answer in answer_of.items()
        if answer is not None and not answer.is_from(name)
    ]
    return [*([f"there is no answer from {' and '.join(silent)}"] if silent else ()), *other_servers]


class _Answer(NamedTuple):
    status: int
    body: bytes

    def is_from(self, name: str) -> bool:
        """Return whether the answer may come from a server of that name.

        A server in front of it may also answer, for example with 401.
        """
        return self.status != 404 and (name != "Trino" or self.status != 200 or b'"nodeVersion"' in self.body)


def _answer(url: str, tls: ssl.SSLContext | None) -> _Answer | None:
    """Return the answer of an HTTP server, or None if no HTTP server answers."""
    try:
        with urllib3.PoolManager(retries=False, timeout=_ANSWER_S, ssl_context=tls) as pool:
            response = pool.request("GET", url, preload_content=False)
            try:
                return _Answer(response.status, response.read(_INFO_MAX, decode_content=True))
            finally:
                response.close()
    except (urllib3.exceptions.HTTPError, ValueError):
        return None


def _make_tls_context(certificate: Path | None, key: Path | None) -> Certificate | None:
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ValueError("--tls-cert and --tls-key must be set together; set both or neither")
    return Certificate(certificate, key)


def _check_plain_http(settings: ProxySettings, host: str, tls: Certificate | None, *, allowed: bool) -> None:
    """Check that no passwords or tokens cross the network unencrypted.

    If the settings allow this, only a warning is logged.

    Raises:
        ValueError: Passwords or tokens would cross the network unencrypted, and this is not allowed.
    """
    legs = [f"to Trino at {url}" for url in settings.trino if _is_plain(url)]
    if settings.token and _is_plain(settings.seamark):
        legs.append(f"to Seamark at {settings.seamark}")
    if tls is None and not settings.trust_forwarded and not is_loopback(host):
        legs.append(f"from clients to {host or 'all addresses'}")
    if not legs:
        return
    if not allowed:
        raise ValueError(
            f"Passwords and tokens would be sent unencrypted {', '.join(legs)}; use https (--tls-cert and --tls-key "
            "for "
            "clients), or allow it on a trusted network with --allow-plain-http"
        )
    click.echo(f"Warning: passwords and tokens are sent unencrypted {', '.join(legs)}", err=True)


def _is_plain(url: str) -> bool:
    parts = urlsplit(url)
    try:
        return parts.scheme == "http" and not is_loopback(parts.hostname or "")
    except ConfigError:  # A name that cannot be resolved yet is not treated as loopback.
        return True
