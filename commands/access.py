"""`seamark token` and `seamark grant`: manage logins and rights.

The commands write directly to the database; running servers apply a change to the next request. An
account that can open the database needs no login; this is how the first admin is created. The audit log
records each change under `cli:` and the account of the operating system.
"""

from __future__ import annotations

import asyncio
import getpass
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from seamark.commands.options import (
    json_option,
    load_settings,
    parse_duration,
    refuse,
    settings_flags,
)
from seamark.commands.terminal import escape_for_terminal, print_json, print_result, say, time_text
from seamark.formats.runtime.clock import Clock, SystemClock
from seamark.formats.runtime.errors import ConfigError, SeamarkError
from seamark.metaserver.access.principal import Role, is_foreign, make_grant, parse_path, show_path
from seamark.metaserver.access.tokens import create_token, ensure_token, is_live, revoke_token
from seamark.metaserver.runtime.home import PRIVATE_UMASK, make_private, prepare_home, sqlite_file
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import AuditRecord, Grant, NamespacePath
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.operations import RemoveGrant, SaveAudit, SaveGrant
from seamark.metaserver.store.port import PointerStore
from seamark.metaserver.warehouses.warehouses import find_warehouse_settings

T = TypeVar("T")
Work = Callable[[PointerStore, Clock], Awaitable[T]]

_ROLES = click.Choice([role.value for role in Role])
_NAMESPACE = click.option(
    "--namespace",
    "namespaces",
    multiple=True,
    metavar="A.B",
    help="Namespace of the role, including everything below it; repeatable. Default: the whole catalog. Write a dot "
    "within a level as \\. (in most shells: '\\.').",
)
_where = settings_flags(("home", "database"))
_WAREHOUSE = click.option(
    "--warehouse",
    "warehouse_name",
    metavar="NAME",
    help="The further warehouse in which the role counts. Default: the server's own warehouse.",
)


@click.group()
def token() -> None:
    """Create, list and revoke bearer tokens."""


@click.group()
def grant() -> None:
    """Add, list and remove grants: reader, writer or admin, on the whole catalog or a namespace and everything below
    it.
    """


@token.command("create")
@click.argument("name")
@click.option("--role", type=_ROLES, help="The only role of the token; it replaces existing grants of this name.")
@_NAMESPACE
@click.option(
    "--expires-in", metavar="TIME", help="The lifetime, such as 12h, 30d or 1y. Default: the token never expires."
)
@click.option(
    "--from-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File with the token: smk_ and 43 or more letters, digits, - and _. If this token exists, also revoked, "
    "nothing changes. The command does not print it. Default: a random token.",
)
@json_option
@_where
def create(
    name: str,
    role: str | None,
    namespaces: tuple[str, ...],
    expires_in: str | None,
    from_file: Path | None,
    as_json: bool,
    config: Path | None,
    **flags: Any,
) -> None:
    """Create the token NAME and print it on standard output.

    No later command shows it.

    Audit log and timeline show NAME. Engines take the token as `token`, or as `credential` NAME:TOKEN.
    """
    if namespaces and role is None:
        raise click.UsageError("--namespace requires --role")
    ttl_s = None if expires_in is None else parse_duration(expires_in, "--expires-in")

    def make_grants() -> list[Grant] | None:
        return None if role is None else [make_grant(name, role, path) for path in _parse_paths(namespaces)]

    if from_file is not None:
        _create_from_file(name, ttl_s, make_grants, from_file, config, flags, as_json=as_json)
        return

    async def work(store: PointerStore, clock: Clock) -> tuple[str, list[Grant]]:
        secret = await create_token(store, clock, name, ttl_s, make_grants())
        await _audit(store, clock, "createToken", name)
        return secret, await store.grants(name)

    secret, grants = _run(config, flags, work)
    if as_json:
        print_json({"name": name, "token": secret, "grants": [_grant_json(one) for one in grants]})
        return
    click.echo(secret)
    may = "; ".join(_describe_grant(grant) for grant in grants) or "nothing yet: see seamark grant add"
    click.echo(f"Keep it: it is not shown again. {name} may do: {may}", err=True)


def _create_from_file(
    name: str,
    ttl_s: int | None,
    make_grants: Callable[[], list[Grant] | None],
    path: Path,
    config: Path | None,
    flags: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    """Create the token in the file `path`, unless it exists."""
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise click.ClickException(escape_for_terminal(f"Cannot read the token in {path}: {reason}")) from None

    async def work(store: PointerStore, clock: Clock) -> bool:
        is_new = await ensure_token(store, clock, name, ttl_s, make_grants(), secret)
        if is_new:
            await _audit(store, clock, "createToken", name)
        return is_new

    is_new = _run(config, flags, work)
    sentence = f"Created {name}" if is_new else f"The token {name} exists; nothing changed"
    print_result({"name": name, "created": is_new}, sentence, as_json=as_json)


@token.command("list")
@json_option
@_where
def list_tokens(as_json: bool, config: Path | None, **flags: Any) -> None:
    """List all tokens, including revoked tokens: name, state, creation, expiry, id."""

    async def work(store: PointerStore, clock: Clock) -> list[tuple[str, ...]]:
        now_ms = clock.now_ms()
        rows: list[tuple[str, ...]] = []
        for token in await store.tokens():
            state = "live" if is_live(token, now_ms) else "expired" if token.revoked_ms is None else "ended"
            rows.append(
                (token.name, state, time_text(token.created_ms), time_text(token.expires_ms) or "never", token.id)
            )
        return rows

    rows = _run(config, flags, work, creates=False)
    _show_rows(("NAME", "STATE", "MADE", "EXPIRES", "ID"), rows, "There are no tokens.", as_json=as_json)


@token.command("revoke")
@click.argument("name")
@json_option
@_where
def revoke(name: str, as_json: bool, config: Path | None, **flags: Any) -> None:
    """Revoke the token NAME and all its access tokens.

    Its grants stay for a new token of the same name.
    """

    async def work(store: PointerStore, clock: Clock) -> None:
        await revoke_token(store, clock, name)
        await _audit(store, clock, "revokeToken", name)

    _run(config, flags, work, creates=False)
    print_result({"revoked": name}, f"Revoked {name}", as_json=as_json)


@grant.command("add")
@click.argument("principal")
@click.argument("role", type=_ROLES)
@_NAMESPACE
@_WAREHOUSE
@json_option
@_where
def add(
    principal: str, role: str, namespaces: tuple[str, ...], as_json: bool, config: Path | None, **flags: Any
) -> None:
    """Grant ROLE to PRINCIPAL.

    PRINCIPAL is a token's name, oidc:SUBJECT for a user of the OIDC issuer, or oidc-group:GROUP for its group. Other
    issuers have their own names instead of oidc.
    """

    async def work(store: PointerStore, clock: Clock) -> tuple[list[Grant], bool]:
        grants = [make_grant(principal, role, path) for path in _parse_paths(namespaces)]
        await store.transact([SaveGrant(grant) for grant in grants])
        for grant in grants:
            await _audit(store, clock, "addGrant", f"{principal} {_describe_grant(grant)}")
        # The tokens are in the database of the server, also for a further warehouse.
        is_known = is_foreign(principal) or flags.get("warehouse_name") is not None
        return grants, is_known or any(one.name == principal for one in await store.tokens())

    grants, is_known = _run(config, flags, work)
    _print_grants(grants, f"{principal} has", as_json=as_json)
    if not is_known:
        say(f"There is no token {principal} yet: seamark token create {principal}", err=True)


@grant.command("remove")
@click.argument("principal")
@click.argument("role", type=_ROLES)
@_NAMESPACE
@_WAREHOUSE
@json_option
@_where
def remove(
    principal: str, role: str, namespaces: tuple[str, ...], as_json: bool, config: Path | None, **flags: Any
) -> None:
    """Remove a grant of ROLE to PRINCIPAL with the same namespace."""

    async def work(store: PointerStore, clock: Clock) -> list[Grant]:
        grants = [make_grant(principal, role, path) for path in _parse_paths(namespaces)]
        await store.transact([RemoveGrant(grant) for grant in grants])
        for grant in grants:
            await _audit(store, clock, "removeGrant", f"{principal} {_describe_grant(grant)}")
        return grants

    _print_grants(_run(config, flags, work, creates=False), f"{principal} no longer has", as_json=as_json)


def _print_grants(grants: list[Grant], text: str, *, as_json: bool) -> None:
    lines = (f"{text} {_describe_grant(grant)}" for grant in grants)
    print_result([_grant_json(grant) for grant in grants], "\n".join(lines), as_json=as_json)


def _grant_json(grant: Grant) -> dict[str, Any]:
    return {"principal": grant.principal, "role": grant.role, "namespace": list(grant.namespace)}


@grant.command("list")
@click.argument("principal", required=False)
@_WAREHOUSE
@json_option
@_where
def list_grants(principal: str | None, as_json: bool, config: Path | None, **flags: Any) -> None:
    """List the grants of PRINCIPAL, or all grants."""

    async def work(store: PointerStore, clock: Clock) -> list[tuple[str, ...]]:
        grants = await store.grants(principal)
        return [(grant.principal, grant.role, show_path(grant.namespace) or "(the whole catalog)") for grant in grants]

    rows = _run(config, flags, work, creates=False)
    nothing = "There are no grants." if principal is None else f"{principal} has no grants."
    _show_rows(("PRINCIPAL", "ROLE", "NAMESPACE"), rows, nothing, as_json=as_json)


def _run(config: Path | None, flags: dict[str, Any], work: Work[T], *, creates: bool = True) -> T:
    """Run `work` on the database of the settings. An error becomes a message and an exit code.

    Args:
        creates: Whether a missing database is created, which the command reports. If False, a missing database is an
            error, because the home may be wrong.
    """
    warehouse_name = flags.get("warehouse_name")
    settings = load_settings({name: value for name, value in flags.items() if name != "warehouse_name"}, config)
    database = sqlite_file(settings)
    is_new = database is not None and not os.path.lexists(database)
    if is_new and not creates:
        raise click.ClickException(
            escape_for_terminal(f"The database {database} does not exist; set --home or --database of the server")
        )
    try:
        result = asyncio.run(_open_and(settings, warehouse_name, work))
        if is_new:
            say(
                f"The database {database} is new. If a server runs already, it has another one: name its --home",
                err=True,
            )
        return result
    except ConfigError as error:
        raise refuse(error) from None
    except SeamarkError as error:
        raise click.ClickException(error.message) from None


async def _open_and(settings: Settings, warehouse_name: str | None, work: Work[T]) -> T:
    os.umask(PRIVATE_UMASK)
    for path in make_private(settings) if settings.database else prepare_home(settings):
        click.echo(f"{path} was accessible to other accounts and is private now", err=True)
    clock = SystemClock()
    if warehouse_name is not None:
        settings = await find_warehouse_settings(settings, clock, warehouse_name)
    async with open_store(settings.database_url(), clock=clock) as store:
        return await work(store, clock)


async def _audit(store: PointerStore, clock: Clock, action: str, resource: str) -> None:
    record_id = str(clock.uuid7())
    record = AuditRecord(
        id=record_id,
        at_ms=clock.now_ms(),
        principal_name=f"cli:{account_name()}",
        action=action,
        resource=resource,
        outcome="allowed",
        status=0,
        request_id=record_id,
    )
    await store.transact([SaveAudit((record,))])


def account_name() -> str:
    """Return the account of the operating system, for the audit log and the timeline."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # A container may run with a user id that has no name.
        return "unknown"


def _parse_paths(namespaces: tuple[str, ...]) -> list[NamespacePath]:
    return [parse_path(text) for text in namespaces] if namespaces else [()]


def _describe_grant(grant: Grant) -> str:
    return f"{grant.role} on {show_path(grant.namespace) or 'the whole catalog'}"


def _show_rows(heads: tuple[str, ...], rows: list[tuple[str, ...]], nothing: str, *, as_json: bool) -> None:
    if as_json:
        print_json([dict(zip(map(str.lower, heads), row, strict=True)) for row in rows])
        return
    if not rows:
        say(nothing)
        return
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
