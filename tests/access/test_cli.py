"""Tests of `seamark token` and `seamark grant`, as an operator types them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from seamark.commands.main import cli
from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import Unauthenticated
from seamark.metaserver.access.authenticator import open_authenticator
from seamark.metaserver.access.principal import Principal
from seamark.metaserver.runtime.home import write_server_file
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import AuditRecord, Grant
from seamark.metaserver.store.open import open_store
from tests.access.keyrings import make_fixed_keyring


def run_seamark(home: Path, *arguments: str) -> Result:
    result = CliRunner().invoke(cli, [*arguments, "--home", str(home)], prog_name="seamark")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def authenticate_secret(home: Path, secret: str) -> Principal:
    async def authenticate() -> Principal:
        settings, clock = Settings(home=home, auth="token"), SystemClock()
        async with (
            open_store(settings.make_database_url(), clock=clock) as store,
            open_authenticator(settings, store, make_fixed_keyring(clock=clock), clock) as authenticator,
        ):
            return await authenticator.authenticate({"Authorization": f"Bearer {secret}"}, None)

    return asyncio.run(authenticate())


def read_audit(home: Path) -> list[AuditRecord]:
    async def read() -> list[AuditRecord]:
        async with open_store(Settings(home=home).make_database_url(), clock=SystemClock()) as store:
            return await store.read_audit_records(None, 100)

    return asyncio.run(read())


def test_first_admin_can_be_created_in_a_new_home(tmp_path: Path) -> None:
    home = tmp_path / "new"
    admin_result = run_seamark(home, "token", "create", "admin", "--role", "admin")
    assert admin_result.exit_code == 0
    secret = admin_result.stdout.strip()  # Alone on standard output, for scripts
    assert authenticate_secret(home, secret) == Principal("admin", (Grant("admin", "admin"),), "token")
    assert "admin on the whole catalog" in admin_result.stderr
    assert secret not in admin_result.stderr
    note = (
        f"The database {home / 'seamark.db'} is new. If a server is already running, it uses another database: set "
        "--home to the home of the server"
    )
    assert note in admin_result.stderr.splitlines()
    assert note not in run_seamark(home, "token", "create", "ann").stderr


def test_listing_in_a_missing_home_creates_nothing(tmp_path: Path) -> None:
    home = tmp_path / "new"
    for arguments in (
        ("token", "list"),
        ("grant", "list"),
        ("token", "revoke", "ann"),
        ("grant", "remove", "a", "admin"),
    ):
        result = run_seamark(home, *arguments)
        assert result.exit_code == 1
        assert f"The database {home / 'seamark.db'} does not exist; set --home" in result.stderr
        assert not home.exists()
    run_seamark(home, "grant", "add", "oidc:bob", "reader")
    assert run_seamark(home, "token", "list").stdout == "There are no tokens.\n"
    assert run_seamark(home, "grant", "list", "ann").stdout == "ann has no grants.\n"
    assert run_seamark(home, "token", "list", "--json").stdout == "[]\n"


def test_grant_to_a_missing_token_prints_a_note(tmp_path: Path) -> None:
    assert "no token ann yet: seamark token create ann" in run_seamark(tmp_path, "grant", "add", "ann", "reader").stderr
    run_seamark(tmp_path, "token", "create", "ann")
    for principal in ("ann", "oidc:bob"):
        assert "no token" not in run_seamark(tmp_path, "grant", "add", principal, "writer").stderr


@pytest.mark.parametrize(("auth", "is_reported"), [("none", True), ("token", False)])
def test_new_rights_on_a_running_server_without_authentication_print_a_note(
    tmp_path: Path, auth: str, is_reported: bool
) -> None:
    write_server_file(Settings(home=tmp_path, auth=auth), "http://127.0.0.1:1", 1)
    for arguments in (("token", "create", "ann"), ("grant", "add", "ann", "reader")):
        assert ("has auth=none" in run_seamark(tmp_path, *arguments).stderr) is is_reported


def test_role_can_be_limited_to_namespaces_and_a_time(tmp_path: Path) -> None:
    options = ("--role", "writer", "--namespace", "a.b", "--namespace", r"c\.d", "--expires-in", "3d")
    secret = run_seamark(tmp_path, "token", "create", "ann", *options).stdout.strip()
    grants = (Grant("ann", "writer", ("a", "b")), Grant("ann", "writer", ("c.d",)))
    assert authenticate_secret(tmp_path, secret).grants == grants
    stdout = run_seamark(tmp_path, "token", "list").stdout
    assert "ann" in stdout
    assert "live" in stdout
    assert secret not in stdout
    lines = run_seamark(tmp_path, "grant", "list").stdout.splitlines()
    assert lines[0].split() == ["PRINCIPAL", "RIGHT", "OBJECT"]
    assert [line.split() for line in lines[1:]] == [["ann", "writer", "a.b"], ["ann", "writer", r"c\.d"]]


def test_token_of_a_file_is_created_once_and_stays_revoked(tmp_path: Path) -> None:
    file, secret = tmp_path / "token", f"smk_{'a' * 43}"
    file.write_text(f"{secret}\n")
    home = tmp_path / "home"
    create_command = ("token", "create", "ann", "--role", "writer", "--from-file", str(file))
    assert run_seamark(home, *create_command).stdout == "Created ann\n"
    assert authenticate_secret(home, secret).grants == (Grant("ann", "writer", ()),)
    run_seamark(home, "grant", "remove", "ann", "writer")
    assert run_seamark(home, *create_command).stdout == "The token ann exists; nothing changed\n"
    assert authenticate_secret(home, secret).grants == ()
    run_seamark(home, "token", "revoke", "ann")
    assert json.loads(run_seamark(home, *create_command, "--json").stdout) == {"name": "ann", "created": False}
    with pytest.raises(Unauthenticated):
        authenticate_secret(home, secret)
    file.write_text(f"smk_{'b' * 43}")
    assert run_seamark(home, *create_command).exit_code == 0
    refusal_of_copy = run_seamark(home, "token", "create", "bob", "--from-file", str(file))
    assert (refusal_of_copy.exit_code, "is the token of ann; bob needs another token" in refusal_of_copy.stderr) == (
        1,
        True,
    )
    file.write_text(secret.replace("a", "c"))
    refusal = run_seamark(home, *create_command)
    assert (refusal.exit_code, "already" in refusal.stderr) == (1, True)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"smk_short", "43 to 200 letters"), (b"", "43 to 200 letters"), (b"\xff", "not UTF-8"), (None, "No such file")],
)
def test_file_without_a_strong_token_is_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    refusal = run_seamark(tmp_path / "home", "token", "create", "ann", "--from-file", str(file))
    assert refusal.exit_code == 1
    assert message in refusal.stderr


def test_revoked_token_is_rejected_and_can_be_replaced(tmp_path: Path) -> None:
    old_token = run_seamark(tmp_path, "token", "create", "ann", "--role", "reader").stdout.strip()
    assert run_seamark(tmp_path, "token", "create", "ann").exit_code == 1
    assert run_seamark(tmp_path, "token", "revoke", "ann").exit_code == 0
    with pytest.raises(Exception, match="revoked"):
        authenticate_secret(tmp_path, old_token)
    new_token = run_seamark(tmp_path, "token", "create", "ann").stdout.strip()
    assert authenticate_secret(tmp_path, new_token).grants == (Grant("ann", "reader"),)


def test_grants_are_added_and_removed(tmp_path: Path) -> None:
    assert run_seamark(tmp_path, "grant", "add", "oidc:bob", "writer", "--namespace", "a").exit_code == 0
    assert "oidc:bob" in run_seamark(tmp_path, "grant", "list", "oidc:bob").stdout
    assert "oidc:bob" not in run_seamark(tmp_path, "grant", "list", "ann").stdout
    result = run_seamark(tmp_path, "grant", "remove", "oidc:bob", "writer")
    assert result.exit_code == 1
    assert "does not exist" in result.stderr
    assert run_seamark(tmp_path, "grant", "remove", "oidc:bob", "writer", "--namespace", "a").exit_code == 0
    assert "oidc:bob" not in run_seamark(tmp_path, "grant", "list").stdout


def test_commands_grant_and_deny_privileges_on_single_objects(tmp_path: Path) -> None:
    table = ("--namespace", r"shop\.eu", "--table", "orders")
    added_result = run_seamark(tmp_path, "grant", "add", "role:analysts", "read", *table)
    assert added_result.stdout == "role:analysts has read on table shop\\.eu.orders\n"
    denied_result = run_seamark(tmp_path, "grant", "add", "ann", "browse", *table, "--deny", "--json")
    document = {"principal": "ann", "role": "browse", "namespace": ["shop.eu"]}
    assert json.loads(denied_result.stdout) == [{**document, "kind": "table", "name": "orders", "deny": True}]
    assert run_seamark(tmp_path, "grant", "add", "ann", "browse", "--server").exit_code == 0
    assert run_seamark(tmp_path, "role", "add-member", "analysts", "ann").exit_code == 0
    rows = json.loads(run_seamark(tmp_path, "grant", "list", "ann", "--json").stdout)
    assert {(row["role"], row["namespace"]) for row in rows} == {
        ("browse", "(the server)"),
        ("deny browse", r"shop\.eu, table orders"),
        ("role:analysts", "(the whole catalog)"),
    }
    assert json.loads(run_seamark(tmp_path, "role", "list", "--json").stdout) == [
        {"role": "analysts", "members": "ann"}
    ]
    assert run_seamark(tmp_path, "grant", "remove", "ann", "browse", *table, "--deny").exit_code == 0
    assert run_seamark(tmp_path, "role", "remove-member", "analysts", "ann").exit_code == 0
    assert [row["role"] for row in json.loads(run_seamark(tmp_path, "grant", "list", "ann", "--json").stdout)] == [
        "browse"
    ]


def test_command_for_a_grant_names_one_object(tmp_path: Path) -> None:
    for options, message in (
        (("read", "--table", "t"), "--table requires one --namespace"),
        (("read", "--namespace", "a", "--table", "t", "--view", "v"), "use only one of"),
        (("read", "--namespace", "a", "--server"), "leave out --namespace"),
        (("reader", "--deny"), "Only a privilege can be denied"),
        (("role:x", "--namespace", "a"), "leave out the object"),
        (("reading",), "is not a role"),
    ):
        refusal = run_seamark(tmp_path, "grant", "add", "ann", *options)
        assert refusal.exit_code != 0
        assert message in refusal.stderr, options


def test_operators_commands_are_audited(tmp_path: Path) -> None:
    run_seamark(tmp_path, "token", "create", "ann", "--role", "reader")
    run_seamark(tmp_path, "grant", "add", "ann", "writer", "--namespace", "a")
    run_seamark(tmp_path, "token", "revoke", "ann")
    records = read_audit(tmp_path)
    assert [(record.action, record.resource) for record in records] == [
        ("createToken", "ann"),
        ("addGrant", "ann writer on a"),
        ("revokeToken", "ann"),
    ]
    assert all(record.principal_name.startswith("cli:") for record in records)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("token", "create", "a:b"), 1, "letters, digits"),
        (("token", "create", "ann", "--role", "root"), 2, "reader"),
        (("token", "create", "ann", "--namespace", "a"), 2, "--role"),
        (("token", "create", "ann", "--expires-in", "soon"), 2, "3d|number and"),
        (("token", "create", "ann", "--expires-in", "0d"), 2, "number and"),
        (("token", "create", "ann", "--expires-in", "999y"), 1, "seconds"),
        (("token", "create", "ann", "--role", "reader", "--namespace", "a..b"), 1, "namespace"),
        (("token", "revoke", "ann"), 1, "does not exist"),
        (("grant", "add", "A:b", "reader"), 1, "<issuer>:<subject>"),
        (("token", "list", "--database", "mysql://x"), 2, "sqlite"),
    ],
)
def test_mistakes_are_reported_in_one_message(
    tmp_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    result = run_seamark(tmp_path, *arguments)
    assert result.exit_code == code
    assert any(alternative in result.stderr for alternative in message.split("|")), result.stderr
    assert "Traceback" not in result.output
