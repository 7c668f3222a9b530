"""Tests of OIDC with a real issuer over HTTP: accepted and rejected tokens, and rotating keys."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web
from joserfc.jwk import ECKey, OctKey, RSAKey

from seamark.formats.runtime.clock import SimulatedClock
from seamark.formats.runtime.errors import BadRequest, RetryLater, Unauthenticated
from seamark.metaserver.access import oidc
from seamark.metaserver.access.authenticator import Authenticator, open_authenticator
from seamark.metaserver.access.jwt import LENGTH_MAX
from seamark.metaserver.access.principal import Principal
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.operations import SaveGrant
from seamark.metaserver.store.port import PointerStore
from tests.access.issuer import (
    AUDIENCE,
    LocalIssuer,
    forge_token,
    generate_ec_key,
    generate_okp_key,
    get_rsa_key,
    run_issuer,
)
from tests.access.keyrings import make_fixed_keyring

MakeAuthenticator = Callable[..., Any]


@pytest.fixture
async def issuer(clock: SimulatedClock) -> AsyncIterator[LocalIssuer]:
    async with run_issuer(clock) as issuer:
        issuer.publish(get_rsa_key())
        yield issuer


@pytest.fixture
async def make_authenticator(
    issuer: LocalIssuer, store: PointerStore, clock: SimulatedClock
) -> AsyncIterator[MakeAuthenticator]:
    """Yield a function that opens an authenticator. It trusts the issuer, and has the given settings."""
    async with AsyncExitStack() as stack:

        async def make(**options: Any) -> Authenticator:
            return await stack.enter_async_context(
                open_authenticator(issuer.make_settings(**options), store, make_fixed_keyring(clock=clock), clock)
            )

        yield make


async def log_in(authenticator: Authenticator, token: str) -> Principal:
    return await authenticator.authenticate({"Authorization": f"Bearer {token}"}, "10.0.0.1")


async def check_rejected(authenticator: Authenticator, token: str, reason: str) -> None:
    with pytest.raises(Unauthenticated, match=reason):
        await log_in(authenticator, token)


async def test_subject_has_a_prefix_that_no_token_name_can_have(
    issuer: LocalIssuer, make_authenticator: MakeAuthenticator
) -> None:
    principal = await log_in(await make_authenticator(), issuer.make_token(get_rsa_key(), sub="admin"))
    assert (principal.name, principal.via, principal.grants) == ("oidc:admin", "oidc", ())


async def test_every_kind_of_key_is_accepted_with_its_own_algorithm(
    issuer: LocalIssuer, make_authenticator: MakeAuthenticator
) -> None:
    ec_key, okp_key = generate_ec_key(), generate_okp_key()
    issuer.publish(get_rsa_key(), ec_key, okp_key)
    authenticator = await make_authenticator()
    for key, algorithm in ((get_rsa_key(), "RS256"), (ec_key, "ES256"), (okp_key, "Ed25519")):
        assert (await log_in(authenticator, issuer.make_token(key, algorithm))).name == "oidc:ann"
    assert issuer.key_request_count == 1


@pytest.mark.filterwarnings("ignore:EdDSA is deprecated")  # The test signs with this name.
async def test_algorithm_name_eddsa_is_accepted(issuer: LocalIssuer, make_authenticator: MakeAuthenticator) -> None:
    okp_key = generate_okp_key()
    issuer.publish(okp_key)
    assert (await log_in(await make_authenticator(), issuer.make_token(okp_key, "EdDSA"))).name == "oidc:ann"


async def test_roles_come_from_the_claim_and_from_stored_grants(
    issuer: LocalIssuer, make_authenticator: MakeAuthenticator, store: PointerStore
) -> None:
    await store.transact([SaveGrant(Grant("oidc:ann", "admin", ("z",))), SaveGrant(Grant("ann", "admin", ()))])
    roles = ["reader", r"writer:a.b\.c", "offline_access", "admin:", "admin:..", "root", 7, None, "ADMIN"]
    token = issuer.make_token(get_rsa_key(), realm={"roles": roles})
    principal = await log_in(await make_authenticator(oidc_roles_claim="realm.roles"), token)
    assert principal.grants == (
        Grant("oidc:ann", "reader"),
        Grant("oidc:ann", "writer", ("a", "b.c")),
        Grant("oidc:ann", "admin", ("z",)),
    )
    principal_without_claim = await log_in(await make_authenticator(), token)
    assert principal_without_claim.grants == (Grant("oidc:ann", "admin", ("z",)),)


async def test_another_claim_can_name_the_principal(issuer: LocalIssuer, make_authenticator: MakeAuthenticator) -> None:
    authenticator = await make_authenticator(oidc_principal_claim="email")
    assert (await log_in(authenticator, issuer.make_token(get_rsa_key(), email="a@x"))).name == "oidc:a@x"
    for invalid_name in (None, "", 7, ["a"], "a\nb", "a" * 300):
        await check_rejected(authenticator, issuer.make_token(get_rsa_key(), email=invalid_name), "email|principal")


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"iss": "https://else.example"}, "issuer"),
        ({"iss": None}, "issuer"),
        ({"aud": "another"}, "audience"),
        ({"aud": None}, "audience"),
        ({"aud": ["another"]}, "audience"),
        ({"aud": {AUDIENCE: 1}}, "audience"),
        ({"aud": AUDIENCE + "x"}, "audience"),
        ({"exp": None}, "no expiry"),
        ({"exp": "soon"}, "exp is not a number"),
        ({"exp": True}, "exp is not a number"),
        ({"exp": 1e300}, "exp is not a time"),
        ({"exp": 10**400}, "exp is not a time"),
        ({"exp": 5}, "expired"),
        ({"nbf": 9_999_999_999}, "not valid yet .nbf"),
        ({"iat": 9_999_999_999}, "not valid yet .iat"),
        ({"nbf": "x"}, "nbf is not a number"),
        ({"sub": None}, "has no name"),
    ],
)
async def test_wrong_claims_are_rejected(
    issuer: LocalIssuer, make_authenticator: MakeAuthenticator, claims: dict[str, Any], reason: str
) -> None:
    await check_rejected(await make_authenticator(), issuer.make_token(get_rsa_key(), **claims), reason)


async def test_one_matching_audience_is_sufficient(issuer: LocalIssuer, make_authenticator: MakeAuthenticator) -> None:
    await log_in(await make_authenticator(), issuer.make_token(get_rsa_key(), aud=["another", AUDIENCE]))


async def test_times_are_checked_to_the_second_with_a_small_leeway(
    issuer: LocalIssuer, make_authenticator: MakeAuthenticator, clock: SimulatedClock
) -> None:
    authenticator = await make_authenticator()
    now_s = clock.now_ms() // 1000
    leeway_s = Settings().clock_leeway_s
    token = issuer.make_token(get_rsa_key(), exp=now_s + 10, nbf=now_s + leeway_s, iat=now_s + leeway_s)
    await log_in(authenticator, token)
    await check_rejected(authenticator, issuer.make_token(get_rsa_key(), nbf=now_s + leeway_s + 1), "not valid yet")
    clock.advance((10 + leeway_s) * 1000 - 1)
    await log_in(authenticator, token)
    clock.advance(1)
    await check_rejected(authenticator, token, "expired")


async def test_token_without_a_signature_is_rejected(
    issuer: LocalIssuer, make_authenticator: MakeAuthenticator
) -> None:
    authenticator = await make_authenticator()
    for algorithm in ("none", "None", "NONE", "", None, 5):
        await check_rejected(
            authenticator, forge_token({"alg": algorithm, "kid": "rsa-0"}, issuer.build_claims()), "must be signed with"
        )
    await check_rejected(authenticator, forge_token({"kid": "rsa-0"}, issuer.build_claims()), "must be signed with")
    await check_rejected(
        authenticator, forge_token({"alg": "RS256", "kid": "rsa-0"}, issuer.build_claims()), "signature"
    )


async def test_hmac_with_the_public_key_is_rejected(issuer: LocalIssuer, make_authenticator: MakeAuthenticator) -> None:
    authenticator = await make_authenticator()
    public_key = get_rsa_key().as_pem(private=False)
    for algorithm in ("HS256", "RS256"):
        unsigned_token = forge_token({"alg": algorithm, "kid": "rsa-0"}, issuer.build_claims()).rpartition(".")[0]
        digest = hmac.digest(public_key, unsigned_token.encode(), hashlib.sha256)
        token = f"{unsigned_token}.{forge_token({}, {}, digest).rpartition('.')[2]}"
        await check_rejected(authenticator, token, "must be signed with RS256" if algorithm == "HS256" else "signature")


async def test_algorithm_that_does_not_belong_to_the_key_is_rejected(
    issuer: LocalIssuer, make_authenticator: MakeAuthenticator
) -> None:
    ec_key = generate_ec_key()
    issuer.publish(get_rsa_key(), ec_key)
    authenticator = await make_authenticator()
    await check_rejected(
        authenticator, issuer.make_token(ec_key, "ES256", {"kid": "rsa-0"}), "must be signed with RS256"
    )
    await check_rejected(
        authenticator, issuer.make_token(get_rsa_key(), "RS256", {"kid": "ec"}), "must be signed with ES256"
    )
    await check_rejected(authenticator, issuer.make_token(get_rsa_key(), "RS512"), "must be signed with RS256")
    await check_rejected(authenticator, issuer.make_token(get_rsa_key(), "PS256"), "must be signed with RS256")


async def test_another_key_under_a_known_kid_is_rejected(
    issuer: LocalIssuer, make_authenticator: MakeAuthenticator
) -> None:
    await check_rejected(
        await make_authenticator(), issuer.make_token(get_rsa_key(1), header={"kid": "rsa-0"}), "signature"
    )


async def test_changed_claim_invalidates_the_signature(
    issuer: LocalIssuer, make_authenticator: MakeAuthenticator
) -> None:
    head, _, signature = issuer.make_token(get_rsa_key()).split(".")
    claims = forge_token({}, issuer.build_claims(sub="root")).split(".")[1]
    await check_rejected(await make_authenticator(), f"{head}.{claims}.{signature}", "signature")


async def test_keys_within_the_token_itself_are_ignored(
    issuer: LocalIssuer, make_authenticator: MakeAuthenticator
) -> None:
    own_rsa_key = get_rsa_key(1)
    header = {"kid": None, "jwk": own_rsa_key.as_dict(private=False), "jku": f"{issuer.url}/keys"}
    await check_rejected(await make_authenticator(), issuer.make_token(own_rsa_key, header=header), "signature")


async def test_critical_extensions_are_rejected(issuer: LocalIssuer, make_authenticator: MakeAuthenticator) -> None:
    authenticator = await make_authenticator()
    for header in ({"crit": ["b64"], "b64": False}, {"crit": ["exp"]}, {"b64": False}):
        await check_rejected(
            authenticator, forge_token({"alg": "RS256", "kid": "rsa-0", **header}, issuer.build_claims()), "extension"
        )


async def test_unknown_header_fields_of_real_issuers_are_ignored(
    issuer: LocalIssuer, make_authenticator: MakeAuthenticator
) -> None:
    header = {"typ": "at+jwt", "x5t": "abc", "nonce": "n", "pi.atm": "1", "x5c": ["A" * 2000]}
    await log_in(await make_authenticator(), issuer.make_token(get_rsa_key(), header=header))


@pytest.mark.parametrize(
    "token",
    [
        "a.b.c", "..", "a.b", "a.b.c.d", "é.é.é", "e30.e30.", "W10.W10.W10", "bnVsbA.bnVsbA.x", "e30=.e30=.",
        "e+/.e30.x", "\x00.\x00.\x00", "e30.e30", " . . ", "eyJ9.eyJ9.x", "e.e.e", "W1tbW1tb.e30.x",
    ],
)  # fmt: skip
async def test_malformed_token_is_rejected_without_a_request_to_the_issuer(
    issuer: LocalIssuer, make_authenticator: MakeAuthenticator, token: str
) -> None:
    await check_rejected(await make_authenticator(), token, "token")
    assert issuer.key_request_count == 0


async def test_huge_token_is_rejected_without_being_parsed(
    issuer: LocalIssuer, make_authenticator: MakeAuthenticator
) -> None:
    authenticator = await make_authenticator()
    await check_rejected(authenticator, issuer.make_token(get_rsa_key(), padding="x" * LENGTH_MAX), "the limit")
    await check_rejected(authenticator, "a" * LENGTH_MAX + ".b.c", "the limit")
    deep_header = base64.urlsafe_b64encode(b"[" * 6000).decode()
    await check_rejected(authenticator, f"{deep_header}.{deep_header}.x", "JSON")
    assert issuer.key_request_count == 0


# Keys ----------------------------------------------------------------------------------------------------------------


async def test_new_key_is_fetched_when_its_first_token_arrives(
    issuer: LocalIssuer, make_authenticator: MakeAuthenticator, clock: SimulatedClock
) -> None:
    authenticator = await make_authenticator()
    await log_in(authenticator, issuer.make_token(get_rsa_key(0)))
    issuer.publish(get_rsa_key(0), get_rsa_key(1))
    clock.advance(61_000)
    await log_in(authenticator, issuer.make_token(get_rsa_key(1)))
    await log_in(authenticator, issuer.make_token(get_rsa_key(0)))
    assert issuer.key_request_count == 2


async def test_unknown_keys_cause_at_most_one_fetch_a_minute(
    issuer: LocalIssuer, make_authenticator: MakeAuthenticator, clock: SimulatedClock
) -> None:
    authenticator = await make_authenticator()
    await log_in(authenticator, issuer.make_token(get_rsa_key()))
    unknown_tokens = [
        forge_token({"alg": "RS256", "kid": f"no-{number}"}, issuer.build_claims()) for number in range(30)
    ]
    for round_number in (1, 2, 3):
        await asyncio.gather(*(check_rejected(authenticator, token, "does not publish") for token in unknown_tokens))
        assert issuer.key_request_count == round_number
        clock.advance(60_000)
        unknown_tokens = [
            forge_token({"alg": "RS256", "kid": f"{round_number}-{number}"}, issuer.build_claims())
            for number in range(30)
        ]


async def test_first_tokens_share_one_fetch(issuer: LocalIssuer, make_authenticator: MakeAuthenticator) -> None:
    authenticator = await make_authenticator()
    await asyncio.gather(*(log_in(authenticator, issuer.make_token(get_rsa_key())) for _ in range(20)))
    assert (issuer.discovery_count, issuer.key_request_count) == (1, 1)


async def test_withdrawn_key_is_soon_rejected(
    issuer: LocalIssuer, make_authenticator: MakeAuthenticator, clock: SimulatedClock
) -> None:
    authenticator = await make_authenticator()
    await log_in(authenticator, issuer.make_token(get_rsa_key(0)))
    issuer.publish(get_rsa_key(1))
    clock.advance(int(oidc.FRESH_S * 1000))
    await check_rejected(authenticator, issuer.make_token(get_rsa_key(0)), "does not publish")


async def test_failing_issuer_does_not_lock_out_users_with_known_keys(
    issuer: LocalIssuer, make_authenticator: MakeAuthenticator, clock: SimulatedClock
) -> None:
    authenticator = await make_authenticator()
    await log_in(authenticator, issuer.make_token(get_rsa_key()))
    issuer.key_answer = web.Response(status=500)
    clock.advance(int(oidc.FRESH_S * 1000))
    for _ in range(5):
        await log_in(authenticator, issuer.make_token(get_rsa_key()))
    assert issuer.key_request_count == 2  # After a failure, the server waits for `RETRY_S`.
    clock.advance(int(oidc.RETRY_S * 1000))
    await log_in(authenticator, issuer.make_token(get_rsa_key()))
    assert issuer.key_request_count == 3
    with pytest.raises(RetryLater):  # A new key may have signed the token, and the server cannot read it.
        await log_in(authenticator, issuer.make_token(get_rsa_key(1)))
    clock.advance(int(oidc.STALE_S * 1000))
    with pytest.raises(RetryLater):
        await log_in(authenticator, issuer.make_token(get_rsa_key()))
    issuer.key_answer = None
    clock.advance(int(oidc.RETRY_S * 1000))
    await log_in(authenticator, issuer.make_token(get_rsa_key()))


@pytest.mark.parametrize(
    "answer",
    [
        web.Response(status=500),
        web.Response(status=302, headers={"Location": "/moved"}),
        web.Response(body=b"<html>"),
        web.Response(body=b"[]"),
        web.Response(body=b'{"keys": 7}'),
        web.Response(body=b'{"keys": []}'),
        web.Response(body=b'{"keys": [7, null, {}]}'),
        web.Response(body=b'{"keys": "' + b"x" * oidc.BYTES_MAX + b'"}'),
    ],
    ids=["500", "redirect", "html", "list", "number", "empty", "no-keys", "huge"],
)
async def test_issuer_without_usable_keys_is_a_503(
    issuer: LocalIssuer, make_authenticator: MakeAuthenticator, answer: web.StreamResponse
) -> None:
    issuer.key_answer = answer
    with pytest.raises(RetryLater, match="keys of the issuer") as error:
        await log_in(await make_authenticator(), issuer.make_token(get_rsa_key()))
    assert error.value.retry_after_s >= 1


async def test_unavailable_issuer_is_a_503(
    make_authenticator: MakeAuthenticator, issuer: LocalIssuer, unused_tcp_port: int
) -> None:
    unavailable_url = f"http://127.0.0.1:{unused_tcp_port}"
    with pytest.raises(RetryLater):
        await log_in(
            await make_authenticator(oidc_issuer=unavailable_url), issuer.make_token(get_rsa_key(), iss=unavailable_url)
        )


@pytest.mark.parametrize(
    "discovery", [{"issuer": "https://else.example"}, {"jwks_uri": 7}, {"jwks_uri": "file:///etc/passwd"}]
)
async def test_discovery_document_of_another_issuer_is_rejected(
    issuer: LocalIssuer, make_authenticator: MakeAuthenticator, discovery: dict[str, Any]
) -> None:
    issuer.discovery = discovery
    with pytest.raises(RetryLater):
        await log_in(await make_authenticator(), issuer.make_token(get_rsa_key()))
    assert issuer.key_request_count == 0


async def test_configured_jwks_url_needs_no_discovery(
    issuer: LocalIssuer, make_authenticator: MakeAuthenticator
) -> None:
    await log_in(await make_authenticator(oidc_jwks_url=f"{issuer.url}/keys"), issuer.make_token(get_rsa_key()))
    assert issuer.discovery_count == 0


async def test_token_without_a_kid_is_checked_only_if_there_is_one_key(
    issuer: LocalIssuer, make_authenticator: MakeAuthenticator, clock: SimulatedClock
) -> None:
    authenticator = await make_authenticator()
    token = issuer.make_token(get_rsa_key(), header={"kid": None})
    await log_in(authenticator, token)
    issuer.publish(get_rsa_key(0), get_rsa_key(1))
    clock.advance(int(oidc.FRESH_S * 1000))
    await check_rejected(authenticator, issuer.make_token(get_rsa_key(), header={"kid": None}), "does not publish")
    await check_rejected(authenticator, forge_token({"alg": "RS256", "kid": 7}, issuer.build_claims()), "kid")


def test_only_public_keys_for_our_algorithms_are_used() -> None:
    rsa = get_rsa_key().as_dict(private=False)
    # 171 characters of base64 are a modulus of 1,024 bits, which is too short.
    small_key = RSAKey.generate_key(2048).as_dict(private=False) | {"kid": "small", "n": rsa["n"][:171]}
    document = {
        "keys": [
            rsa,
            small_key,
            OctKey.generate_key(256, {"kid": "oct"}).as_dict(private=True),
            ECKey.generate_key("P-384", {"kid": "p384"}).as_dict(private=False),
            {**rsa, "kid": "encrypts", "use": "enc"},
            {**rsa, "kid": "pss", "alg": "PS256"},
            {**rsa, "kid": "broken", "n": "!!!" * 200},
            {"kty": "EC", "crv": "P-256", "kid": "off-curve", "x": "AA", "y": "AA"},
            {"kty": "RSA", "kid": "empty"},
        ]
    }
    assert list(oidc.read_keys(document)) == ["rsa-0"]
    invalid_documents: list[object] = [None, [], {"keys": {}}, {}, {"keys": [rsa] * (oidc.KEYS_MAX + 1)}]
    for invalid_document in invalid_documents:
        with pytest.raises(BadRequest):
            oidc.read_keys(invalid_document)
