"""`seamark doctor`: checks an installation, and says how to repair each fault.

The command checks this machine, the server and the configurations of engines. Exit codes: 0 if there is no fault, 1 if
there is a fault, 2 for invalid arguments.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import urllib3

from seamark.commands.connecting import find_server_url
from seamark.commands.installation.engine_files import (
    CheckResult,
    SparkSetup,
    check_spark,
    check_trino,
    read_properties,
    read_running_spark,
)
from seamark.commands.installation.java import check_java
from seamark.commands.installation.packages import check_installation, list_missing_modules
from seamark.commands.options import (
    Misconfigured,
    address_options,
    json_option,
    load_settings,
    settings_flags,
)
from seamark.commands.terminal import print_json, say
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import ClientError, LoginRequired, describe_cause
from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.lazy_module import LazyModule
from seamark.formats.runtime.tls import build_seamark_context

if TYPE_CHECKING:
    from seamark.commands.installation import services, warehouse
else:
    services = LazyModule("seamark.commands.installation.services")
    warehouse = LazyModule("seamark.commands.installation.warehouse")

TIMEOUT_S = 5.0
SKEW_S_MAX = 30.0
_WEB = ("http://", "https://")
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.option(
    "--spark",
    "spark",
    metavar="FILE|URL",
    help="File spark-defaults.conf to check, or URL of the web interface of a running Spark, such as "
    "http://localhost:4040.",
)
@click.option("--trino", "trino_file", type=_FILE, help="Catalog file of Trino to check.")
@address_options
@json_option
@settings_flags(("home", "warehouse", "s3_endpoint"))
def doctor(
    spark: str | None,
    trino_file: Path | None,
    url: str | None,
    token: str | None,
    as_json: bool,
    config: Path | None,
    **flags: Any,
) -> None:
    """Check the installation, the warehouse, the server and the configurations of engines.

    \b
    For instance:
      seamark doctor --spark conf/spark-defaults.conf --trino etc/catalog/sea.properties
      seamark doctor --spark http://localhost:4040
    Each line of the output is one check. If a line begins with !, the line below it says how to repair the fault. If it
    begins with ~, the line below it is advice. The command checks the warehouse with the settings of the server on this
    machine: it writes, reads and deletes a small object. With --url, it uses the result of the server's own check
    instead.
    """
    findings = [*check_installation(), *check_java()]
    if url is None and not list_missing_modules("server"):
        settings = load_settings(flags, config)
        findings += (warehouse_findings := list(warehouse.check_warehouse(settings)))
        if not any(finding.is_fault for finding in warehouse_findings):
            findings += services.check_worker(settings)
    try:
        url = url or find_server_url(config, {"home": flags["home"]})
    except Misconfigured as error:
        findings.append(
            CheckResult("server", error.message, "Start it: seamark serve --home ./seamark-home", is_fault=True)
        )
    else:
        findings += check_server(url, token)
    if spark is not None:
        findings += _run_check(spark, lambda: check_spark(spark, _read_spark_setup(spark), url))
    if trino_file is not None:
        findings += _run_check(str(trino_file), lambda: check_trino(trino_file, url))
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in findings])
    else:
        _print_findings(findings)
    if any(finding.is_fault for finding in findings):
        raise click.exceptions.Exit(1)


def _read_spark_setup(spark: str) -> SparkSetup:
    return read_running_spark(spark) if spark.startswith(_WEB) else SparkSetup(read_properties(Path(spark)))


def _print_findings(findings: list[CheckResult]) -> None:
    for finding in findings:
        mark = "!" if finding.is_fault else "~" if finding.fix else " "
        say(f"{mark} {finding.subject}: {finding.text}")
        if finding.fix:
            say(f"    {finding.fix}")
    faults = sum(finding.is_fault for finding in findings)
    say(f"\n{len(findings)} checks, {faults} at fault" if faults else f"\n{len(findings)} checks, nothing at fault")


def _run_check(subject: str, check: Callable[[], Iterator[CheckResult]]) -> list[CheckResult]:
    try:
        return list(check())
    except (OSError, ValueError) as error:
        fix = "Set the option to the path of a properties file, or for Spark to the URL of its web interface"
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        return [CheckResult(subject, f"the file cannot be read: {reason}", fix, is_fault=True)]


def check_server(url: str, token: str | None) -> Iterator[CheckResult]:
    """Check that the server is reachable and ready, that its clock agrees, and that it accepts the token."""
    clock = SystemClock()
    try:
        pool = urllib3.PoolManager(retries=False, timeout=TIMEOUT_S, ssl_context=build_seamark_context())
    except ValueError as error:
        yield CheckResult(
            "server",
            str(error),
            "Set SEAMARK_CA and SEAMARK_CLIENT_CERT to files with certificates (PEM), or unset them",
            is_fault=True,
        )
        return
    try:
        answer = pool.request("GET", f"{url.rstrip('/')}/readyz")
    except (urllib3.exceptions.HTTPError, ValueError) as error:
        reason = describe_cause(error, url)
        fix = "Start it (seamark serve), or set --url to the address that it printed"
        if "SEAMARK_CA" in reason:
            # The reason for an untrusted certificate ends with its own fix, after a semicolon.
            reason, _, fix = reason.partition("; ")
            fix = fix[:1].upper() + fix[1:]
        yield CheckResult("server", f"{url} does not answer: {reason}", fix, is_fault=True)
        return
    if answer.status == 200:
        yield CheckResult("server", f"{url} is ready")
    else:
        yield CheckResult(
            "server",
            f"{url} is not ready: {_describe_failed_checks(answer)}",
            "Repair what the checks name; the server's log has details",
            is_fault=True,
        )
    skew_s = _measure_skew_s(answer.headers.get("Date"), clock.now_ms() / 1000)
    if abs(skew_s) > SKEW_S_MAX:
        fix = "Synchronise both clocks (NTP): tokens and signed requests have end times"
        yield CheckResult("clock", f"the clock of this machine differs from the server's by {skew_s:.0f} s", fix)
    try:
        client = SeamarkClient(url, token=token)
    except ValueError as error:
        yield CheckResult("token", str(error), "Set --url and --token", is_fault=True)
        return
    try:
        next(client.namespaces(), None)
        yield CheckResult("token", "accepted" if token else "none is needed to list namespaces")
        yield from services.check_services(client)
    except LoginRequired:
        fix = "Create one on the server (seamark token create NAME), and set SEAMARK_TOKEN"
        yield CheckResult("token", "the server refuses it" if token else "the server requires one", fix, is_fault=True)
    except ClientError as error:
        yield CheckResult("catalog", error.message, "The server's log has details", is_fault=True)
    finally:
        client.close()


def _describe_failed_checks(answer: urllib3.BaseHTTPResponse) -> str:
    try:
        checks = json.loads(answer.data)["checks"]
        return ", ".join(f"{name}: {state}" for name, state in checks.items() if state != "ok")
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"HTTP status {answer.status}; this may not be a Seamark server"


def _measure_skew_s(date: str | None, now_s: float) -> float:
    try:
        return 0.0 if date is None else parsedate_to_datetime(date).timestamp() - now_s
    except ValueError:
        return 0.0
