"""`seamark trino-proxy`: a proxy for Trino's clients that rewrites statements so that Trino reads fewer files.

The command is a client of the running server, which it finds by `--url` or in the server's `--home`. Logs go to
standard error. Exit codes: 0 if it was stopped (SIGTERM, Ctrl-C), 1 if it cannot listen, 2 for invalid arguments.
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
    settings_flags,
    to_settings_error,
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
"""The maximum time in seconds in which a server behind the proxy has to answer the check at the start."""
_INFO_MAX = 10_000
"""The maximum number of bytes that are read of an answer."""
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
Command = TypeVar("Command", bound=Callable[..., Any])


def _make_limit_option(name: str, text: str, minimum: float = 0) -> Callable[[Command], Command]:
    """Return a decorator that adds an option for a limit in `ProxySettings`: seconds, bytes, or a number."""
    default = getattr(ProxySettings, name)
    kind = click.IntRange(min=int(minimum)) if isinstance(default, int) else click.FloatRange(min=minimum)
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
    help="URL of a Trino coordinator. Repeatable.",
)
@click.option(
    "--catalog",
    "catalogs",
    multiple=True,
    required=True,
    metavar="NAME",
    help="Name of this Seamark's catalog in Trino. Repeatable. Statements on other catalogs are not changed.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address that the proxy listens on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="Port that the proxy listens on. With 0, the proxy selects a free port.",
)
@click.option(
    "--tls-cert",
    type=_FILE,
    help="PEM file with the certificate of this proxy and its chain. If it is set, the proxy uses https.",
)
@click.option("--tls-key", type=_FILE, help="PEM file with the private key of --tls-cert.")
@click.option(
    "--trino-ca",
    type=_FILE,
    help="PEM file with the authorities of the coordinators' certificates. Default: the system's authorities.",
)
@click.option(
    "--ca",
    type=_FILE,
    help="PEM file with the authorities of Seamark's certificate. [SEAMARK_CA] Default: the system's authorities.",
)
@click.option(
    "--allow-plain-http",
    is_flag=True,
    help="Allow passwords and tokens to be sent unencrypted to other machines, with a warning. Default: refuse to "
    "start.",
)
@click.option("--trino-insecure", is_flag=True, help="Accept every certificate of a coordinator.")
@click.option(
    "--trust-forwarded",
    is_flag=True,
    help="Trust X-Forwarded-* headers, because another proxy is in front. Default: remove these headers.",
)
@click.option(
    "--budget-ms",
    type=click.FloatRange(min=0, min_open=True),
    metavar="MS",
    default=1000 * RewriteLimits().budget_s,
    show_default=True,
    help="Time limit in milliseconds for the plans of a statement. If they take longer, the original statement runs.",
)
@click.option(
    "--kept-max",
    "max_kept_fraction",
    type=click.FloatRange(0, 1),
    metavar="SHARE",
    default=RewriteLimits().max_kept_fraction,
    show_default=True,
    help="Maximum fraction of a table's files in a plan. If the fraction is larger, the reference to the table is not "
    "changed.",
)
@click.option(
    "--trust-time-zone",
    is_flag=True,
    help="State that Trino's sql.forced-session-time-zone is not set. Then conditions on times can prune files in "
    "sessions whose time zone is UTC.",
)
@click.option(
    "--plans",
    envvar="SEAMARK_PLANS",
    show_envvar=True,
    metavar="TEXT",
    default=ProxySettings.plans,
    show_default=True,
    help="Value of X-Seamark-Plans in Trino's catalogs (iceberg.rest-catalog.http-headers). Only these catalogs see "
    "the plans.",
)
@click.option(
    "--rules/--no-rules",
    default=ProxySettings.rules,
    show_default=True,
    help="Check for each rewritten statement whether Trino has row filters or column masks. --no-rules saves this "
    "request, and rewritten statements may wait in Trino's queue.",
)
@click.option(
    "--cubes",
    type=click.Choice(CUBE_USES),
    default=OFF,
    show_default=True,
    help="Whether aggregate queries are answered from cubes. exact excludes sums and averages of floats, and averages "
    "of integers. With --no-rules, no cubes are used, because Trino's row filters and column masks do not apply "
    "to the groups of a cube.",
)
@click.option(
    "--plan-header",
    is_flag=True,
    help="Send the numbers of files in the header X-Seamark-Plan, unless access rules apply to the client.",
)
@click.option(
    "--maintenance",
    type=click.IntRange(0, 64),
    metavar="COUNT",
    default=ProxySettings.maintenance,
    show_default=True,
    help="Maximum number of statements ALTER TABLE … MERGE FILES and DROP COLUMNS of clients that the proxy runs at "
    "the same time. They need the --token of a writer. With 0, the proxy passes them on to Trino, which refuses "
    "them.",
)
@_make_limit_option(
    "lease_s", "Lease of a plan in seconds. It must be longer than a statement waits in Trino's queue.", minimum=1
)
@_make_limit_option(
    "hold_s",
    "Seconds for which the proxy waits for the first row of a rewritten statement: if the statement fails before, the "
    "original statement runs instead.",
)
@_make_limit_option(
    "cube_rights_s",
    "Seconds for which a check of the rights on a table with a cube is not repeated for the same user. With 0, each "
    "statement is checked.",
)
@_make_limit_option(
    "statement_bytes", "Maximum length of a statement in bytes. Longer statements are not parsed and not changed."
)
@_make_limit_option("drain_s", "Seconds after SIGTERM in which running requests can finish.")
@_make_limit_option(
    "connections",
    "Maximum number of client connections. At the limit, the proxy closes silent or idle connections. With 0, the "
    "limit follows from the number of files that the process can open, and is at most 10,000.",
)
@_make_limit_option(
    "connections_per_address",
    "Maximum number of connections from one address. With 0, the limit is half of all connections, or all of them "
    "with --trust-forwarded.",
)
@_make_limit_option(
    "header_bytes",
    "Maximum size in bytes of the header of a request, with all its fields. Clients send prepared statements in "
    "header fields.",
    minimum=8192,
)
@_make_limit_option(
    "header_timeout_s",
    "Seconds in which the header of a request must arrive, or a TLS handshake must end.",
    minimum=0.1,
)
@_make_limit_option(
    "idle_timeout_s", "Seconds without a request after which the proxy closes a connection.", minimum=0.1
)
@_make_limit_option(
    "send_timeout_s",
    "Seconds after which the proxy closes a connection whose client does not read an answer.",
    minimum=0.1,
)
@_make_limit_option("body_bytes", "Maximum size in bytes of a request body before decompression.")
@_make_limit_option(
    "body_timeout_s", "Seconds in which a request body must arrive, plus one second for each 64 KiB of it.", minimum=0.1
)
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
    """Run a proxy in front of Trino that rewrites statements so that they read only the files of Seamark's plans.

    \b
    For instance, for a Trino at port 8081 in which this Seamark is the catalog lake:
      seamark trino-proxy --trino http://127.0.0.1:8081 --catalog lake --port 8080
    Trino needs http-server.process-forwarded=true. When the proxy is ready, it prints the address for clients. All
    Trino clients can use the proxy. If a plan fails, the original statement runs.
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
        raise to_settings_error(error) from None
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
    """Return texts about the servers behind the proxy that do not answer within `_ANSWER_S` or are other programs.

    The servers without an answer have one text together.

    Each request has its own thread, because name resolution has no time limit.
    """
    authorities = None if settings.authorities is None else ssl.create_default_context(cafile=settings.authorities)
    servers = {("Trino", url): (f"{url}/v1/info", settings.upstream_tls) for url in settings.trino}
    servers["Seamark", settings.seamark] = (f"{settings.seamark}/healthz", authorities)
    answers: dict[tuple[str, str], _Answer | None] = {}
    answer_arrived = threading.Condition()

    def add_answer(server: tuple[str, str], url: str, tls: ssl.SSLContext | None) -> None:
        answer = _request_answer(url, tls)
        with answer_arrived:
            answers[server] = answer
            answer_arrived.notify()

    for server, request in servers.items():
        threading.Thread(target=add_answer, args=(server, *request), daemon=True).start()
    with answer_arrived:
        answer_arrived.wait_for(lambda: len(answers) == len(servers), _ANSWER_S)
        answers_by_server = {server: answers.get(server) for server in servers}
    silent = [f"{name} at {url}" for (name, url), answer in answers_by_server.items() if answer is None]
    other_servers = [
        f"the server at {url} is not {name}"
        for (name, url), answer in answers_by_server.items()
        if answer is not None and not answer.is_from(name)
    ]
    return [*([f"there is no answer from {' and '.join(silent)}"] if silent else ()), *other_servers]


class _Answer(NamedTuple):
    """The status and the body of an HTTP answer."""

    status: int
    body: bytes

    def is_from(self, name: str) -> bool:
        """Return whether the answer can come from a server with this name.

        If another server in front of it answers, for example with 401, the function returns True too. Only a successful
        answer of Trino has a body to check, which contains `nodeVersion`.
        """
        return self.status != 404 and (name != "Trino" or self.status != 200 or b'"nodeVersion"' in self.body)


def _request_answer(url: str, tls: ssl.SSLContext | None) -> _Answer | None:
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
    """Check that no passwords or tokens are sent unencrypted over the network.

    If `allowed` is True, only log a warning.

    Raises:
        ValueError: Passwords or tokens would be sent unencrypted, and this is not allowed.
    """
    plain_routes = [f"to Trino at {url}" for url in settings.trino if _is_unencrypted_remote(url)]
    if settings.token and _is_unencrypted_remote(settings.seamark):
        plain_routes.append(f"to Seamark at {settings.seamark}")
    if tls is None and not settings.trust_forwarded and not is_loopback(host):
        plain_routes.append(f"from clients to {host or 'all addresses'}")
    if not plain_routes:
        return
    if not allowed:
        raise ValueError(
            f"Passwords and tokens would be sent unencrypted {', '.join(plain_routes)}; use https (--tls-cert and "
            "--tls-key for clients), or allow it on a trusted network with --allow-plain-http"
        )
    click.echo(f"Warning: passwords and tokens are sent unencrypted {', '.join(plain_routes)}", err=True)


def _is_unencrypted_remote(url: str) -> bool:
    """Return whether requests to the URL are sent over the network without TLS."""
    parts = urlsplit(url)
    try:
        return parts.scheme == "http" and not is_loopback(parts.hostname or "")
    except ConfigError:  # A name that cannot be resolved yet does not count as loopback.
        return True
