"""Tests of the logins that each mode accepts, and of revocations, which take effect at once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from joserfc import jwt
from joserfc.jwk import OctKey
from multidict import CIMultiDict, CIMultiDictProxy

from seamark.formats.runtime.clock import SimulatedClock
from seamark.formats.runtime.errors import Forbidden, Unauthenticated
from seamark.metaserver.access.authenticator import Authenticator, open_authenticator
from seamark.metaserver.access.issued import ISSUER, PURPOSE
from seamark.metaserver.access.tokens import compute_digest, create_token, revoke_token
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.operations import RemoveGrant, SaveGrant
from seamark.metaserver.store.port import PointerStore
from tests.access.issuer import forge_token, get_rsa_key, run_issuer
from tests.access.keyrings import make_fixed_keyring

MakeAuthenticator = Callable[..., Any]
FAR_FUTURE_S = 9_999_999_999


@pytest.fixture
async def make_authenticator(store: PointerStore, clock: SimulatedClock) -> AsyncIterator[MakeAuthenticator]:
    async with AsyncExitStack() as stack:

        async def make(**options: Any) -> Authenticator:
            settings = Settings(**{"auth": "token", **options})
            return await stack.enter_async_context(
                open_authenticator(settings, store, make_fixed_keyring(clock=clock), clock)
            )

        yield make


def build_bearer_headers(token: str) -> CIMultiDict[str]:
    return CIMultiDict({"authorization": f"Bearer {token}"})


async def check_rejected(authenticator: Authenticator, token: str, reason: str) -> None:
    with pytest.raises(Unauthenticated, match=reason):
        await authenticator.authenticate(build_bearer_headers(token), None)


async def test_request_with_two_logins_is_rejected(
    make_authenticator: MakeAuthenticator, store: PointerStore, clock: SimulatedClock
) -> None:
    authenticator = await make_authenticator()
    headers = CIMultiDict[str]()
    for name in ("ann", "bob"):
        secret = await create_token(store, clock, name, None, [Grant(name, "reader")])
        headers.add("Authorization", f"Bearer {secret}")
    with pytest.raises(Unauthenticated, match="twice"):
        await authenticator.authenticate(CIMultiDictProxy(headers), None)


async def test_everyone_is_an_admin_without_logins(make_authenticator: MakeAuthenticator) -> None:
    authenticator = await make_authenticator(auth="none")
    for headers in ({}, {"Authorization": "Bearer anything"}, {"Host": "localhost:8181"}):
        principal = await authenticator.authenticate(headers, "127.0.0.1")
        assert (principal.name, principal.grants) == ("anonymous", (Grant("anonymous", "admin"),))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:1", "[::1]:8181", "x.localhost", "127.9.9.9:80", "LOCALHOST"])
async def test_server_without_logins_accepts_host_names_of_its_machine(
    make_authenticator: MakeAuthenticator, host: str
) -> None:
    authenticator = await make_authenticator(auth="none")
    await authenticator.authenticate({"Host": host}, "127.0.0.1")
    await authenticator.authenticate({"Host": host, "Origin": f"http://{host}"}, "::1")


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:8181"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "localhost.evil.example"},
        {"Host": "evil@127.0.0.1x"},
        {"Host": "192.168.1.5:8181"},
        {"Host": "[::1"},
        {"Host": "localhost", "Origin": "https://evil.example"},
        {"Host": "localhost", "Origin": "null"},
        {"Host": "localhost", "Origin": ""},
        {"Origin": "http://localhost.evil.example"},
    ],
)
async def test_server_without_logins_rejects_browsers_from_other_sites(
    make_authenticator: MakeAuthenticator, headers: dict[str, str]
) -> None:
    with pytest.raises(Forbidden, match="configure auth"):
        await (await make_authenticator(auth="none")).authenticate(headers, "127.0.0.1")


async def test_server_without_logins_rejects_other_machines(make_authenticator: MakeAuthenticator) -> None:
    for remote_address in ("10.0.0.1", "::ffff:10.0.0.1", "2001:db8::1", "nonsense"):
        with pytest.raises(Forbidden, match="own machine"):
            await (await make_authenticator(auth="none")).authenticate({}, remote_address)


@pytest.mark.parametrize("auth", ["token", "token+oidc"])
async def test_server_with_logins_treats_no_client_as_local(auth: str, make_authenticator: MakeAuthenticator) -> None:
    """`identify_local` raises an error if the server requires logins."""
    authenticator = await make_authenticator(auth=auth, oidc_issuer="https://issuer.example", oidc_audience="a")
    assert not authenticator.open
    with pytest.raises(RuntimeError, match="requires logins"):
        authenticator.identify_local({}, "127.0.0.1")


async def test_token_identifies_its_principal_with_current_grants(
    make_authenticator: MakeAuthenticator, store: PointerStore, clock: SimulatedClock
) -> None:
    secret = await create_token(store, clock, "ann", None, [Grant("ann", "reader", ("a",))])
    authenticator = await make_authenticator()
    principal = await authenticator.authenticate(build_bearer_headers(secret), None)
    assert (principal.name, principal.via) == ("ann", "token")
    assert principal.grants == (Grant("ann", "reader", ("a",)),)
    await store.transact([RemoveGrant(Grant("ann", "reader", ("a",))), SaveGrant(Grant("ann", "admin", ("b",)))])
    assert (await authenticator.authenticate(build_bearer_headers(secret), None)).grants == (
        Grant("ann", "admin", ("b",)),
    )


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (None, "requires a login"),
        ("", "requires a login"),
        ("Basic YTpi", "not a bearer"),
        ("Bearer", "not a bearer"),
        ("Bearer ", "not a bearer"),
        ("smk_x", "not a bearer"),
        ("Bearer smk_", "unknown"),
        ("Bearer smk_" + "x" * 43, "unknown"),
        ("Bearer nonsense", "unknown"),
        ("Bearer smk_\udce4", "unknown"),
        ("Bearer é", "unknown"),
        ("Bearer a.b.c", "not JSON"),
        ("Bearer None", "has no token: it sends 'None', as PyIceberg does; set token or credential"),
    ],
)
async def test_error_of_a_missing_or_unknown_login_names_the_header_to_send(
    make_authenticator: MakeAuthenticator, header: str | None, reason: str
) -> None:
    headers = {} if header is None else {"Authorization": header}
    with pytest.raises(Unauthenticated, match=reason):
        await (await make_authenticator()).authenticate(headers, None)


@pytest.mark.parametrize("scheme", ["bearer", "BEARER", "Bearer "])
async def test_authentication_scheme_is_read_in_any_case(
    make_authenticator: MakeAuthenticator, store: PointerStore, clock: SimulatedClock, scheme: str
) -> None:
    secret = await create_token(store, clock, "ann", None, None)
    await (await make_authenticator()).authenticate({"Authorization": f"{scheme} {secret}"}, None)


async def test_revoked_token_is_rejected_on_every_replica(
    make_authenticator: MakeAuthenticator, store: PointerStore, clock: SimulatedClock, tmp_path: Path
) -> None:
    secret = await create_token(store, clock, "ann", ttl_s=None, grants=None)
    authenticator = await make_authenticator()
    issued_token, _ = authenticator.issuer.issue((await authenticator.find_login(secret)).token)
    async with (
        open_store(f"sqlite:///{tmp_path / 'seamark.db'}", clock=clock) as other_store,
        open_authenticator(Settings(auth="token"), other_store, make_fixed_keyring(clock=clock), clock) as replica,
    ):
        for secret_text in (secret, issued_token):
            assert (await replica.authenticate(build_bearer_headers(secret_text), remote=None)).name == "ann"
        await revoke_token(other_store, clock, "ann")
    for secret_text in (secret, issued_token):
        await check_rejected(authenticator, secret_text, "ann was revoked")
    await create_token(store, clock, "ann", ttl_s=None, grants=[Grant("ann", "admin")])
    for secret_text in (secret, issued_token):  # A new token with the same name does not make them valid.
        await check_rejected(authenticator, secret_text, "ann was revoked")


async def test_expired_token_and_tokens_issued_from_it_are_rejected(
    make_authenticator: MakeAuthenticator, store: PointerStore, clock: SimulatedClock
) -> None:
    secret = await create_token(store, clock, "ann", 100, None)
    authenticator = await make_authenticator(oauth_token_ttl_s=3600)
    issued_token, ttl_s = authenticator.issuer.issue((await authenticator.find_login(secret)).token)
    assert ttl_s == 100
    clock.advance(99_999)
    await authenticator.authenticate(build_bearer_headers(secret), None)
    clock.advance(1)
    await check_rejected(authenticator, secret, "expired")
    await check_rejected(authenticator, issued_token, "expired")
    await create_token(store, clock, "ann", None, None)
    await check_rejected(authenticator, secret, "expired")


async def test_issued_token_expires_after_the_time_of_the_setting(
    make_authenticator: MakeAuthenticator, store: PointerStore, clock: SimulatedClock
) -> None:
    secret = await create_token(store, clock, "ann", None, [Grant("ann", "writer")])
    authenticator = await make_authenticator(oauth_token_ttl_s=10)
    issued_token, ttl_s = authenticator.issuer.issue((await authenticator.find_login(secret)).token)
    assert ttl_s == 10
    assert secret not in issued_token
    principal = await authenticator.authenticate(build_bearer_headers(issued_token), None)
    assert (principal.name, principal.grants) == ("ann", (Grant("ann", "writer"),))
    clock.advance(10_000)
    await check_rejected(authenticator, issued_token, "expired")


async def test_issued_token_with_a_foreign_signature_is_rejected(
    make_authenticator: MakeAuthenticator, store: PointerStore, clock: SimulatedClock
) -> None:
    secret = await create_token(store, clock, "ann", None, None)
    authenticator = await make_authenticator()
    login = await authenticator.find_login(secret)
    assert login.token is not None
    claims = {"iss": ISSUER, "aud": ISSUER, "sub": "ann", "exp": FAR_FUTURE_S, "token": login.token.digest}
    for algorithm in ("none", "HS256", "RS256", "HS512"):
        await check_rejected(
            authenticator, forge_token({"alg": algorithm, "kid": (b"s" * 8).hex()}, claims), "signed with|signature"
        )
    issued_token, _ = authenticator.issuer.issue(login.token)
    head, body, signature = issued_token.split(".")
    await check_rejected(authenticator, f"{head}.{forge_token({}, claims).split('.')[1]}.{signature}", "signature")
    await check_rejected(authenticator, f"{head}.{body}.", "signature")
    await check_rejected(authenticator, f"{head}.{body}.{signature[:-8]}", "signature")


async def test_signature_for_another_purpose_is_not_an_access_token(
    make_authenticator: MakeAuthenticator, store: PointerStore, clock: SimulatedClock
) -> None:
    secret = await create_token(store, clock, "ann", None, None)
    authenticator = await make_authenticator()
    key_id, secret_key = make_fixed_keyring(clock=clock).find_signing_key(PURPOSE)
    key, header = OctKey.import_key(secret_key), {"alg": "HS256", "kid": key_id.hex()}
    claims = {"iss": ISSUER, "aud": ISSUER, "sub": "ann", "exp": FAR_FUTURE_S, "token": compute_digest(secret)}
    await authenticator.authenticate(build_bearer_headers(jwt.encode(header, claims, key)), None)
    for invalid_claims in ({"aud": "else"}, {"sub": 7}, {"token": None}):
        await check_rejected(authenticator, jwt.encode(header, claims | invalid_claims, key), "not an access token")
    await check_rejected(authenticator, jwt.encode(header, claims | {"exp": None}, key), "no expiry")
    for unknown_header in ({"kid": "00" * 8}, {"kid": "no hex"}, {}):
        await check_rejected(
            authenticator, jwt.encode({"alg": "HS256", **unknown_header}, claims, key), "does not have"
        )


async def test_token_issued_without_logins_is_rejected_once_logins_are_required(
    make_authenticator: MakeAuthenticator,
) -> None:
    issued_token, _ = (await make_authenticator(auth="none")).issuer.issue(None)
    await check_rejected(await make_authenticator(), issued_token, "required no login")


async def test_each_mode_accepts_only_its_own_kinds_of_login(
    make_authenticator: MakeAuthenticator, store: PointerStore, clock: SimulatedClock
) -> None:
    secret = await create_token(store, clock, "ann", ttl_s=None, grants=None)
    async with run_issuer(clock) as issuer:
        issuer.publish(get_rsa_key())
        options = {"oidc_issuer": issuer.url, "oidc_audience": "seamark-test"}
        token_authenticator, oidc_authenticator = (
            await make_authenticator(),
            await make_authenticator(auth="oidc", **options),
        )
        authenticator_of_both = await make_authenticator(auth="token+oidc", **options)
        issued_token, _ = token_authenticator.issuer.issue((await token_authenticator.find_login(secret)).token)
        issuer_token = issuer.make_token(get_rsa_key())
        await check_rejected(token_authenticator, issuer_token, "only its own")
        await check_rejected(oidc_authenticator, secret, "only tokens of its OIDC issuer")
        await check_rejected(oidc_authenticator, issued_token, "only tokens of its OIDC issuer")
        for secret_text, name in ((secret, "ann"), (issued_token, "ann"), (issuer_token, "oidc:ann")):
            assert (
                await authenticator_of_both.authenticate(build_bearer_headers(secret_text), remote=None)
            ).name == name
        # This token names Seamark as its issuer, but the key of the OIDC issuer signed it.
        await check_rejected(authenticator_of_both, issuer.make_token(get_rsa_key(), iss=ISSUER), "signed with HS256")


@pytest.mark.parametrize(("behind_s", "is_accepted"), [(1, True), (30, True), (31, False)])
async def test_replica_with_a_slow_clock_accepts_a_new_token(
    store: PointerStore, clock: SimulatedClock, behind_s: int, is_accepted: bool
) -> None:
    secret = await create_token(store, clock, "ann", None, None)
    settings = Settings(auth="token")
    slow_clock = SimulatedClock(seed=1)
    async with (
        open_authenticator(settings, store, make_fixed_keyring(), clock) as issuing_authenticator,
        open_authenticator(settings, store, make_fixed_keyring(), slow_clock) as authenticator,
    ):
        slow_clock.advance(clock.now_ms() - slow_clock.now_ms())
        clock.advance(behind_s * 1000)
        issued_token, _ = issuing_authenticator.issuer.issue((await issuing_authenticator.find_login(secret)).token)
        if is_accepted:
            assert (await authenticator.find_login(issued_token)).principal.name == "ann"
        else:
            await check_rejected(authenticator, issued_token, "not valid yet")
