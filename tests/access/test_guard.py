"""Tests that a server does not start without required logins or usable tokens, and prints a command that helps."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import structlog

from seamark.formats.runtime.clock import SimulatedClock
from seamark.formats.runtime.errors import ConfigError
from seamark.metaserver.access.guard import check_binding, check_logins, is_loopback_address
from seamark.metaserver.access.tokens import create_token, revoke_token
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.operations import SaveGrant
from seamark.metaserver.store.port import PointerStore


@pytest.mark.parametrize("host", ["127.0.0.1", "127.255.0.9", "::1", "localhost", "127.1", "::ffff:127.0.0.1"])
def test_loopback_needs_no_login(host: str) -> None:
    check_binding(Settings(host=host))


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "", "0", "::0", "192.0.2.1", "2001:db8::1", "::ffff:192.0.2.1", "::ffff:0.0.0.0", "10.1"]
)
def test_other_address_without_logins_is_rejected_with_the_commands_that_help(host: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_binding(Settings(host=host, home=Path("/srv/sea mark"), port=80))
    shown_host = host or "''"
    assert "\n  seamark token create admin --role admin --home '/srv/sea mark'\n" in error.value.message
    assert (
        f"\n  seamark serve --auth token --host {shown_host} --port 80 --home '/srv/sea mark'\n" in error.value.message
    )
    for auth in ("token", "oidc", "token+oidc"):
        check_binding(Settings(host=host, auth=auth))


def test_host_name_is_local_only_if_all_its_addresses_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def set_addresses(*addresses: str) -> None:
        # The form of `getaddrinfo`: family, type, protocol, canonical name, address.
        results = [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, 0)) for address in addresses]
        monkeypatch.setattr("seamark.metaserver.access.guard.socket.getaddrinfo", lambda *_, **__: results)

    set_addresses("127.0.0.1", "::1")
    check_binding(Settings(host="box"))
    for addresses in (("127.0.0.1", "192.0.2.1"), ("192.0.2.1",), ()):
        set_addresses(*addresses)
        with pytest.raises(ConfigError):
            check_binding(Settings(host="box"))


@pytest.mark.parametrize("host", ["no-such-host.invalid", "x" * 300, "a..b"])
def test_unresolvable_host_is_named_in_the_error(host: str) -> None:
    with pytest.raises(ConfigError, match="Cannot resolve"):
        check_binding(Settings(host=host))


def test_zones_and_invalid_addresses_do_not_count_as_loopback() -> None:
    assert is_loopback_address("::1%lo")
    for text in ("fe80::1%eth0", "", "localhost", "127.0.0.1.evil", "127.0.0.1/8"):
        assert not is_loopback_address(text)


async def test_token_mode_without_a_live_token_is_rejected_with_the_command(
    store: PointerStore, clock: SimulatedClock
) -> None:
    settings = Settings(auth="token", home=Path("/srv/x"), database="postgresql://u:secret@db/x")
    for _ in range(2):
        with pytest.raises(ConfigError, match="seamark token create admin --role admin --home /srv/x") as error:
            await check_logins(settings, store, clock)
        assert "secret" not in error.value.message
        await create_token(store, clock, "ann", 5, None)
        await check_logins(settings, store, clock)
        await revoke_token(store, clock, "ann")
    for auth in ("none", "token+oidc"):
        await check_logins(Settings(auth=auth), store, clock)


async def test_oidc_users_without_any_right_cause_a_warning(store: PointerStore, clock: SimulatedClock) -> None:
    with structlog.testing.capture_logs() as logs:
        await check_logins(Settings(auth="oidc"), store, clock)
        settings_with_roles = Settings(
            auth="oidc", oidc_issuer="https://i", oidc_audience="a", oidc_roles_claim="roles"
        )
        await check_logins(settings_with_roles, store, clock)
        await store.transact([SaveGrant(Grant("oidc:ann", "admin"))])
        await check_logins(Settings(auth="oidc"), store, clock)
    assert len(logs) == 1
    assert "seamark grant add" in logs[0]["event"]
