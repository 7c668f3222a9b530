"""`seamark token`, `seamark grant` and `seamark role`: manage logins and rights.

The commands write directly to the database, and running servers apply a change to the next request. An account of the
operating system that can open the database needs no login, so it can create the first admin. The audit log records each
change under `cli:` and the account's name.
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
    settings_flags,
    to_settings_error,
)
from seamark.commands.terminal import escape_for_terminal, format_local_time, print_json, print_result, say
from seamark.formats.runtime.clock import Clock, SystemClock
from seamark.formats.runtime.errors import BadRequest, ConfigError, SeamarkError
from seamark.metaserver.access.principal import (
    ROLE_PREFIX,
    Role,
    check_grantable_role,
    make_grant,
    parse_path,
    show_path,
)
from seamark.metaserver.access.tokens import create_token, ensure_token, is_live, revoke_token
from seamark.metaserver.runtime.home import (
    PRIVATE_UMASK,
    find_sqlite_file,
    is_running_without_authentication,
    make_private,
    prepare_home,
)
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import FUNCTION, NAMESPACE, SERVER, TABLE, VIEW, AuditRecord, Grant, NamespacePath
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
    help="Namespace of the role, including the namespaces and tables below it. Repeatable. Default: the whole catalog. "
    "Write a dot within a level as \\. (in most shells: '\\.').",
)
_OBJECT = (
    click.option(
        "--table",
        metavar="NAME",
        help="Table in the namespace of --namespace, which must be set once. Default: the namespace itself.",
    ),
    click.option("--view", metavar="NAME", help="View in the namespace of --namespace, which must be set once."),
    click.option(
        "--function", metavar="NAME", help="Function in the namespace of --namespace, which must be set once."
    ),
    click.option(
        "--server", is_flag=True, help="Use the server as the object, with its tokens, replicas and warehouses."
    ),
    click.option("--deny", is_flag=True, help="Deny the privilege. A denial overrides every grant."),
)
_database_options = settings_flags(("home", "database"))
_WAREHOUSE = click.option(
    "--warehouse",
    "warehouse_name",
    metavar="NAME",
    help="Further warehouse in which the role applies. Default: the server's own warehouse.",
)


def _add_object_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add to a command the options that name the object of a grant, and the option `--deny`."""
    for option in reversed(_OBJECT):
        command = option(command)
    return command


class _RightType(click.ParamType[str]):
    """The parameter type of a role or a privilege in a grant."""

    name = "role"

    def convert(self, value: str, param: click.Parameter | None, context: click.Context | None) -> str:
        try:
            return check_grantable_role(value)
        except BadRequest as error:
            self.fail(error.message, param, context)


_RIGHT = _RightType()


@click.group()
def token() -> None:
    """Create, list and revoke bearer tokens."""


@click.group()
def grant() -> None:
    """Add, list and remove grants of roles and privileges.

    The object of a grant is the server, the whole catalog, a namespace, a table, a view or a function. The grant
    applies to the object and everything in it.

    Roles are reader, writer, admin and owner. Privileges are browse, plan, read, maintain, write, create, drop and
    manage-grants.
    """


@click.group()
def role() -> None:
    """Add and remove the members of roles, and list the roles.

    In seamark grant add, the principal role:NAME is the role NAME. The members of a role have its rights.
    """


@token.command("create")
@click.argument("name")
@click.option("--role", type=_ROLES, help="Role of the token. It replaces the existing grants of NAME.")
@_NAMESPACE
@click.option(
    "--expires-in",
    metavar="TIME",
    help="Lifetime of the token, such as 12h, 30d or 1y. Default: the token never expires.",
)
@click.option(
    "--from-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File that contains the token: smk_ and at least 43 letters, digits, - and _. The command does not print it. "
    "If this token already exists, even if it is revoked, nothing changes. Default: a new random token.",
)
@json_option
@_database_options
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

    The token cannot be shown again. NAME identifies the token in the audit log and the timeline. Engines accept the
    token as `token`, or as `credential` in the form NAME:TOKEN.
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
        await _record_audit(store, clock, "createToken", name)
        return secret, await store.grants(name)

    secret, grants = _run(config, flags, work, adds_rights=True)
    if as_json:
        print_json({"name": name, "token": secret, "grants": [_to_grant_json(grant) for grant in grants]})
        return
    click.echo(secret)
    rights_text = "; ".join(_describe_grant(grant) for grant in grants) or "none yet; add some with seamark grant add"
    click.echo(f"Store the token now, because it is not shown again. Rights of {name}: {rights_text}", err=True)


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
    """Create the token whose text is in the file `path`, unless it exists."""
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the file is not UTF-8 text"
        raise click.ClickException(escape_for_terminal(f"Cannot read the token in {path}: {reason}")) from None

    async def work(store: PointerStore, clock: Clock) -> bool:
        is_new = await ensure_token(store, clock, name, ttl_s, make_grants(), secret)
        if is_new:
            await _record_audit(store, clock, "createToken", name)
        return is_new

    is_new = _run(config, flags, work, adds_rights=True)
    sentence = f"Created {name}" if is_new else f"The token {name} exists; nothing changed"
    print_result({"name": name, "created": is_new}, sentence, as_json=as_json)


@token.command("list")
@json_option
@_database_options
def list_tokens(as_json: bool, config: Path | None, **flags: Any) -> None:
    """List all tokens, including revoked tokens: name, state, creation, expiry, id."""

    async def work(store: PointerStore, clock: Clock) -> list[tuple[str, ...]]:
        now_ms = clock.now_ms()
        rows: list[tuple[str, ...]] = []
        for token in await store.list_tokens():
            # "ended" means revoked. Scripts read this word from the JSON output.
            state = "live" if is_live(token, now_ms) else "expired" if token.revoked_ms is None else "ended"
            rows.append(
                (
                    token.name,
                    state,
                    format_local_time(token.created_ms),
                    format_local_time(token.expires_ms) or "never",
                    token.id,
                )
            )
        return rows

    rows = _run(config, flags, work, creates=False)
    _print_table(("NAME", "STATE", "MADE", "EXPIRES", "ID"), rows, "There are no tokens.", as_json=as_json)


@token.command("revoke")
@click.argument("name")
@json_option
@_database_options
def revoke(name: str, as_json: bool, config: Path | None, **flags: Any) -> None:
    """Revoke the token NAME and all its access tokens.

    The grants of NAME remain, and apply to a new token with the same name.
    """

    async def work(store: PointerStore, clock: Clock) -> None:
        await revoke_token(store, clock, name)
        await _record_audit(store, clock, "revokeToken", name)

    _run(config, flags, work, creates=False)
    print_result({"revoked": name}, f"Revoked {name}", as_json=as_json)


@grant.command("add")
@click.argument("principal")
@click.argument("role", type=_RIGHT)
@_NAMESPACE
@_add_object_options
@_WAREHOUSE
@json_option
@_database_options
def add(
    principal: str, role: str, namespaces: tuple[str, ...], as_json: bool, config: Path | None, **flags: Any
) -> None:
    """Grant the role or privilege ROLE to PRINCIPAL, or deny a privilege with --deny.

    PRINCIPAL is the name of a token, oidc:SUBJECT for a user of the OIDC issuer, oidc-group:GROUP for a group of the
    issuer, or role:NAME for the members of a role. Principals of a further issuer begin with its name instead of oidc.
    """
    make_grants = _pop_object(flags, namespaces)
    _add_grants(lambda: make_grants(principal, role), principal, config, flags, as_json=as_json)


def _add_grants(
    make_grants: Callable[[], list[Grant]],
    principal: str,
    config: Path | None,
    flags: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    """Save the grants that `make_grants` returns, print them, and report a principal without a token."""

    async def work(store: PointerStore, clock: Clock) -> tuple[list[Grant], bool]:
        grants = make_grants()
        await store.transact([SaveGrant(grant) for grant in grants])
        for grant in grants:
            await _record_audit(store, clock, "addGrant", f"{grant.principal} {_describe_grant(grant)}")
        # A principal with a colon is a role or a user of an issuer, not a token. Tokens are stored in the database of
        # the server, even if the grant is for a further warehouse.
        is_known = ":" in principal or flags.get("warehouse_name") is not None
        return grants, is_known or any(token.name == principal for token in await store.list_tokens())

    grants, is_known = _run(config, flags, work, adds_rights=True)
    _print_grants(grants, "has", as_json=as_json)
    if not is_known:
        say(f"There is no token {principal} yet: seamark token create {principal}", err=True)


@grant.command("remove")
@click.argument("principal")
@click.argument("role", type=_RIGHT)
@_NAMESPACE
@_add_object_options
@_WAREHOUSE
@json_option
@_database_options
def remove(
    principal: str, role: str, namespaces: tuple[str, ...], as_json: bool, config: Path | None, **flags: Any
) -> None:
    """Remove the grant or denial of ROLE to PRINCIPAL on an object."""
    make_grants = _pop_object(flags, namespaces)
    _remove_grants(lambda: make_grants(principal, role), config, flags, as_json=as_json)


def _remove_grants(
    make_grants: Callable[[], list[Grant]], config: Path | None, flags: dict[str, Any], *, as_json: bool
) -> None:
    async def work(store: PointerStore, clock: Clock) -> list[Grant]:
        grants = make_grants()
        await store.transact([RemoveGrant(grant) for grant in grants])
        for grant in grants:
            await _record_audit(store, clock, "removeGrant", f"{grant.principal} {_describe_grant(grant)}")
        return grants

    _print_grants(_run(config, flags, work, creates=False), "no longer has", as_json=as_json)


def _print_grants(grants: list[Grant], verb: str, *, as_json: bool) -> None:
    lines = (f"{grant.principal} {verb} {_describe_grant(grant)}" for grant in grants)
    print_result([_to_grant_json(grant) for grant in grants], "\n".join(lines), as_json=as_json)


def _to_grant_json(grant: Grant) -> dict[str, Any]:
    document: dict[str, Any] = {"principal": grant.principal, "role": grant.role, "namespace": list(grant.namespace)}
    if grant.kind != NAMESPACE:
        document["kind"] = grant.kind
    if grant.name:
        document["name"] = grant.name
    if grant.deny:
        document["deny"] = True
    return document


def _pop_object(flags: dict[str, Any], namespaces: tuple[str, ...]) -> Callable[[str, str], list[Grant]]:
    """Remove the options of the object from `flags`, and return a function that makes grants on the object."""
    names = {kind: name for kind in (TABLE, VIEW, FUNCTION) if (name := flags.pop(kind)) is not None}
    on_server, deny = flags.pop("server"), flags.pop("deny")
    if len(names) + on_server > 1:
        raise click.UsageError(
            "A grant has exactly one object: use only one of --table, --view, --function and --server"
        )
    if names and len(namespaces) != 1:
        raise click.UsageError(f"--{next(iter(names))} requires one --namespace")
    if on_server and namespaces:
        raise click.UsageError("--server grants rights on the server itself, not on a namespace: leave out --namespace")
    kind, name = next(iter(names.items()), (SERVER if on_server else NAMESPACE, ""))

    def make_grants(principal: str, role: str) -> list[Grant]:
        paths = _parse_paths(namespaces)
        return [make_grant(principal, role, path, kind=kind, name=name, deny=deny) for path in paths]

    return make_grants


@grant.command("list")
@click.argument("principal", required=False)
@_WAREHOUSE
@json_option
@_database_options
def list_grants(principal: str | None, as_json: bool, config: Path | None, **flags: Any) -> None:
    """List the grants of PRINCIPAL, or all grants."""

    async def work(store: PointerStore, clock: Clock) -> list[tuple[str, ...]]:
        return [_make_grant_row(grant) for grant in await store.grants(None) if principal in (None, grant.principal)]

    rows = _run(config, flags, work, creates=False)
    empty_text = "There are no grants." if principal is None else f"{principal} has no grants."
    if as_json:
        # The names of the fields stay those of earlier versions.
        _print_table(("PRINCIPAL", "ROLE", "NAMESPACE"), rows, empty_text, as_json=True)
    else:
        _print_table(("PRINCIPAL", "RIGHT", "OBJECT"), rows, empty_text, as_json=False)


def _make_grant_row(grant: Grant) -> tuple[str, ...]:
    place = "(the server)" if grant.kind == SERVER else show_path(grant.namespace) or "(the whole catalog)"
    if grant.name:
        place += f", {grant.kind} {grant.name}"
    return grant.principal, f"deny {grant.role}" if grant.deny else grant.role, place


@role.command("add-member")
@click.argument("name")
@click.argument("principal")
@_WAREHOUSE
@json_option
@_database_options
def add_member(name: str, principal: str, as_json: bool, config: Path | None, **flags: Any) -> None:
    """Add PRINCIPAL to the members of the role NAME."""
    _add_grants(lambda: [make_grant(principal, ROLE_PREFIX + name, ())], principal, config, flags, as_json=as_json)


@role.command("remove-member")
@click.argument("name")
@click.argument("principal")
@_WAREHOUSE
@json_option
@_database_options
def remove_member(name: str, principal: str, as_json: bool, config: Path | None, **flags: Any) -> None:
    """Remove PRINCIPAL from the members of the role NAME."""
    _remove_grants(lambda: [make_grant(principal, ROLE_PREFIX + name, ())], config, flags, as_json=as_json)


@role.command("list")
@_WAREHOUSE
@json_option
@_database_options
def list_roles(as_json: bool, config: Path | None, **flags: Any) -> None:
    """List the roles with their members. A role exists as long as it has a member or a grant."""

    async def work(store: PointerStore, clock: Clock) -> list[tuple[str, ...]]:
        members: dict[str, list[str]] = {}
        for grant in await store.grants(None):
            if grant.principal.startswith(ROLE_PREFIX):
                members.setdefault(grant.principal, [])
            if grant.role.startswith(ROLE_PREFIX):
                members.setdefault(grant.role, []).append(grant.principal)
        return [(name.removeprefix(ROLE_PREFIX), ", ".join(sorted(members[name]))) for name in sorted(members)]

    rows = _run(config, flags, work, creates=False)
    _print_table(("ROLE", "MEMBERS"), rows, "There are no roles.", as_json=as_json)


def _run(
    config: Path | None, flags: dict[str, Any], work: Work[T], *, creates: bool = True, adds_rights: bool = False
) -> T:
    """Run `work` on the database of the settings, and report an error as a message and an exit code.

    Args:
        creates: Whether the command creates a missing database and reports it. If False, a missing database is an
            error, because the home may be wrong.
        adds_rights: Whether the command adds rights, and so reports a running server that does not apply them.
    """
    warehouse_name = flags.get("warehouse_name")
    settings = load_settings({name: value for name, value in flags.items() if name != "warehouse_name"}, config)
    database = find_sqlite_file(settings)
    is_new = database is not None and not os.path.lexists(database)
    if is_new and not creates:
        raise click.ClickException(
            escape_for_terminal(f"The database {database} does not exist; set --home or --database of the server")
        )
    try:
        result = asyncio.run(_run_with_store(settings, warehouse_name, work))
        if is_new:
            say(
                f"The database {database} is new. If a server is already running, it uses another database: set --home "
                "to the home of the server",
                err=True,
            )
        if adds_rights and is_running_without_authentication(settings):
            say(
                "The running server has auth=none, so every client is an admin; rights apply only if you start it with "
                "--auth",
                err=True,
            )
        return result
    except ConfigError as error:
        raise to_settings_error(error) from None
    except SeamarkError as error:
        raise click.ClickException(error.message) from None


async def _run_with_store(settings: Settings, warehouse_name: str | None, work: Work[T]) -> T:
    os.umask(PRIVATE_UMASK)
    # Without a configured database, the database is a file in the home folder, so this folder must exist.
    for path in make_private(settings) if settings.database else prepare_home(settings):
        click.echo(f"{path} could be read by other accounts; it is private now", err=True)
    clock = SystemClock()
    if warehouse_name is not None:
        settings = await find_warehouse_settings(settings, clock, warehouse_name)
    async with open_store(settings.make_database_url(), clock=clock) as store:
        return await work(store, clock)


async def _record_audit(store: PointerStore, clock: Clock, action: str, resource: str) -> None:
    """Add a record of a change to the audit log."""
    record_id = str(clock.uuid7())
    record = AuditRecord(
        id=record_id,
        at_ms=clock.now_ms(),
        principal_name=f"cli:{find_account_name()}",
        action=action,
        resource=resource,
        outcome="allowed",
        status=0,
        request_id=record_id,
    )
    await store.transact([SaveAudit((record,))])


def find_account_name() -> str:
    """Return the name of the operating system's account, for the audit log and the timeline."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # In a container, the user id may have no name.
        return "unknown"


def _parse_paths(namespaces: tuple[str, ...]) -> list[NamespacePath]:
    return [parse_path(text) for text in namespaces] if namespaces else [()]


def _describe_grant(grant: Grant) -> str:
    """Return a text with the right and the object of a grant, for messages."""
    if grant.kind == SERVER:
        place = "the server"
    elif grant.name:
        place = f"{grant.kind} {show_path((*grant.namespace, grant.name))}"
    else:
        place = show_path(grant.namespace) or "the whole catalog"
    return f"{'a denial of ' if grant.deny else ''}{grant.role} on {place}"


def _print_table(headers: tuple[str, ...], rows: list[tuple[str, ...]], empty_text: str, *, as_json: bool) -> None:
    if as_json:
        print_json([dict(zip(map(str.lower, headers), row, strict=True)) for row in rows])
        return
    if not rows:
        say(empty_text)
        return
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    for row in (headers, *rows):
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
