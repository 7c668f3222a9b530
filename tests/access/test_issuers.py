"""Tests of several OIDC issuers: names that cannot collide, groups, private authorities, and the file of issuers."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from seamark.formats.runtime.clock import SimulatedClock
from seamark.formats.runtime.errors import ConfigError, RetryLater, Unauthenticated
from seamark.metaserver.access.authenticator import Authenticator, open_authenticator
from seamark.metaserver.access.principal import Principal, is_foreign
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.access.standing_rights import StandingRights
from seamark.metaserver.settings.issuers import GROUP_SUFFIX, is_issuer_name, read_issuers
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.operations import SaveGrant
from seamark.metaserver.store.port import GROUPS_MAX, PointerStore
from tests.access.issuer import AUDIENCE, LocalIssuer, generate_ec_key, get_rsa_key, run_issuer
from tests.access.keyrings import make_fixed_keyring
from tests.services.authority import Authority


@pytest.fixture
async def first_issuer(clock: SimulatedClock) -> AsyncIterator[LocalIssuer]:
    async with run_issuer(clock) as issuer:
        issuer.publish(get_rsa_key())
        yield issuer


@pytest.fixture
async def second_issuer(clock: SimulatedClock) -> AsyncIterator[LocalIssuer]:
    async with run_issuer(clock) as issuer:
        issuer.publish(get_rsa_key(1))
        yield issuer


class AuthenticatorFactory:
    """Opens authenticators that accept the issuers in the settings and in `file`, which the settings may name."""

    def __init__(self, stack: AsyncExitStack, store: PointerStore, clock: SimulatedClock, folder: Path) -> None:
        self._stack, self._store, self._clock = stack, store, clock
        self.file = folder / "issuers.toml"

    async def open(self, settings: Settings) -> Authenticator:
        keyring = make_fixed_keyring(clock=self._clock)
        return await self._stack.enter_async_context(open_authenticator(settings, self._store, keyring, self._clock))


@pytest.fixture
async def factory(store: PointerStore, clock: SimulatedClock, tmp_path: Path) -> AsyncIterator[AuthenticatorFactory]:
    async with AsyncExitStack() as stack:
        yield AuthenticatorFactory(stack, store, clock, tmp_path)


def build_issuer_table(url: str, name: str = "corp", **keys: str) -> str:
    values = {"name": name, "url": url, "audience": AUDIENCE, **keys}
    return "[[issuer]]\n" + "".join(f'{key} = "{value}"\n' for key, value in values.items())


async def log_in(authenticator: Authenticator, token: str) -> Principal:
    return await authenticator.authenticate({"Authorization": f"Bearer {token}"}, "10.0.0.1")


async def test_same_subject_of_two_issuers_is_two_principals(
    factory: AuthenticatorFactory, first_issuer: LocalIssuer, second_issuer: LocalIssuer
) -> None:
    factory.file.write_text(build_issuer_table(second_issuer.url))
    authenticator = await factory.open(first_issuer.make_settings(oidc_issuers_file=str(factory.file)))
    assert (await log_in(authenticator, first_issuer.make_token(get_rsa_key()))).name == "oidc:ann"
    assert (await log_in(authenticator, second_issuer.make_token(get_rsa_key(1)))).name == "corp:ann"


async def test_key_of_one_issuer_does_not_sign_tokens_of_another_issuer(
    factory: AuthenticatorFactory, first_issuer: LocalIssuer, second_issuer: LocalIssuer
) -> None:
    factory.file.write_text(build_issuer_table(second_issuer.url))
    authenticator = await factory.open(first_issuer.make_settings(oidc_issuers_file=str(factory.file)))
    for issuer, foreign_key in ((first_issuer, get_rsa_key(1)), (second_issuer, get_rsa_key())):
        for kid in ("rsa-0", "rsa-1"):
            with pytest.raises(Unauthenticated):
                await log_in(authenticator, issuer.make_token(foreign_key, header={"kid": kid}))
    with pytest.raises(Unauthenticated, match="not from the issuer"):
        await log_in(authenticator, first_issuer.make_token(get_rsa_key(), iss="https://unknown.example"))


async def test_unavailable_issuer_does_not_delay_users_of_another(
    factory: AuthenticatorFactory, first_issuer: LocalIssuer, unused_tcp_port: int
) -> None:
    unavailable_url = f"http://127.0.0.1:{unused_tcp_port}"
    factory.file.write_text(build_issuer_table(unavailable_url))
    authenticator = await factory.open(first_issuer.make_settings(oidc_issuers_file=str(factory.file)))
    with pytest.raises(RetryLater):
        await log_in(authenticator, first_issuer.make_token(get_rsa_key(), iss=unavailable_url))
    assert (await log_in(authenticator, first_issuer.make_token(get_rsa_key()))).name == "oidc:ann"


async def test_members_have_the_grants_of_their_groups(
    factory: AuthenticatorFactory, first_issuer: LocalIssuer, store: PointerStore
) -> None:
    engineers = Grant("oidc-group:data engineers", "writer", ("shop",))
    await store.transact(
        [
            SaveGrant(grant)
            for grant in (engineers, Grant("oidc-group:admins", "admin"), Grant("corp-group:data engineers", "admin"))
        ]
    )
    authenticator = await factory.open(first_issuer.make_settings(oidc_groups_claim="groups"))

    async def list_grants(groups: object, **claims: object) -> tuple[Grant, ...]:
        return (await log_in(authenticator, first_issuer.make_token(get_rsa_key(), groups=groups, **claims))).grants

    assert await list_grants(["data engineers", "others", 7, None, "a\nb", ""]) == (engineers,)
    assert await list_grants("data engineers") == (engineers,)
    for empty_groups in (None, {}, 7, [["admins"]], {"admins": True}):
        assert await list_grants(empty_groups) == ()
    for subject in ("group:admins", "-group:admins", "oidc-group:admins", "admins"):
        assert await list_grants([], sub=subject) == ()
    assert await list_grants(["oidc-group:admins", ":admins"]) == ()
    own_grant = Grant("oidc:ann", "reader", ("other",))
    await store.transact([SaveGrant(own_grant)])
    assert await list_grants(["data engineers"]) == (own_grant, engineers)
    authenticator_without_claim = await factory.open(first_issuer.make_settings())
    assert (
        await log_in(authenticator_without_claim, first_issuer.make_token(get_rsa_key(), groups=["admins"]))
    ).grants == (own_grant,)


async def test_groups_beyond_the_limit_are_ignored(
    factory: AuthenticatorFactory, first_issuer: LocalIssuer, store: PointerStore
) -> None:
    await store.transact([SaveGrant(Grant(f"oidc-group:{name}", "reader")) for name in ("g0", "last")])
    authenticator = await factory.open(first_issuer.make_settings(oidc_groups_claim="groups"))
    groups = [f"g{number}" for number in range(GROUPS_MAX)]
    principal = await log_in(authenticator, first_issuer.make_token(get_rsa_key(), groups=[*groups, "last"]))
    assert principal.grants == (Grant("oidc-group:g0", "reader"),)
    principal = await log_in(authenticator, first_issuer.make_token(get_rsa_key(), groups=[*groups[1:], "last"]))
    assert principal.grants == (Grant("oidc-group:last", "reader"),)


async def test_kubernetes_service_account_logs_in_with_its_token(
    factory: AuthenticatorFactory, store: PointerStore, clock: SimulatedClock, tmp_path: Path
) -> None:
    """The issuer is like that of a cluster: it has a private authority, and sends its keys only for a bearer token."""
    authority, key = Authority(tmp_path), generate_ec_key("cluster")
    authority.issue("cluster")
    tls_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls_context.load_cert_chain(authority.certificate, authority.key)
    cluster, token_file = LocalIssuer(clock), tmp_path / "token"
    cluster.publish(key)

    @web.middleware
    async def require_token(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("Authorization") != "Bearer second":
            raise web.HTTPUnauthorized
        return await handler(request)  # type: ignore[no-any-return]

    app = web.Application(middlewares=[require_token])
    app.router.add_get("/.well-known/openid-configuration", cluster._discover)
    app.router.add_get("/keys", cluster._answer_keys)
    server = TestServer(app, host="127.0.0.1", scheme="https")
    await server.start_server(ssl=tls_context)
    try:
        cluster.url = str(server.make_url("")).rstrip("/")
        table = build_issuer_table(
            cluster.url,
            "k8s",
            ca_file=str(authority.file),
            token_file=str(token_file),
            groups_claim="kubernetes.io.namespace",
        )
        factory.file.write_text(table)
        token_file.write_text("first\n")
        authenticator = await factory.open(Settings(auth="oidc", oidc_issuers_file=str(factory.file)))
        grant = Grant("k8s-group:etl", "writer", ("raw",))
        await store.transact([SaveGrant(grant)])
        claims = {"kubernetes.io": {"namespace": "etl", "serviceaccount": {"name": "loader", "uid": "1"}}}
        bearer = cluster.make_token(key, "ES256", sub="system:serviceaccount:etl:loader", **claims)
        with pytest.raises(RetryLater):
            await log_in(authenticator, bearer)
        token_file.write_text("second\n")  # Kubernetes renews the token in place.
        clock.advance(10_000)
        principal = await log_in(authenticator, bearer)
        assert principal.name == "k8s:system:serviceaccount:etl:loader"
        assert principal.grants == (grant,)
        factory.file.write_text(table.replace(f'ca_file = "{authority.file}"\n', ""))
        authenticator_without_authority = await factory.open(Settings(auth="oidc", oidc_issuers_file=str(factory.file)))
        with pytest.raises(RetryLater):
            await log_in(authenticator_without_authority, bearer)
    finally:
        await server.close()


async def test_rights_end_when_the_issuer_is_removed(
    factory: AuthenticatorFactory, store: PointerStore, clock: SimulatedClock
) -> None:
    """Jobs and credentials for objects act for a principal without its token.

    The server therefore checks whether it still accepts the issuer of the principal's login.
    """
    await store.transact([SaveGrant(Grant("corp:ann", "reader"))])

    async def write_issuers_and_explain_loss(*issuer_tables: str) -> str | None:
        factory.file.write_text("".join(issuer_tables) or build_issuer_table("https://else.example", "other"))
        settings = Settings(auth="oidc", oidc_issuers_file=str(factory.file))
        return await StandingRights(store, clock, settings).explain_loss(
            "corp:ann", "updateTable", Securable(("shop",))
        )

    assert await write_issuers_and_explain_loss() == "the server no longer accepts this kind of login"
    assert (
        await write_issuers_and_explain_loss(build_issuer_table("https://corp.example")) == "the rights were withdrawn"
    )
    assert (
        await write_issuers_and_explain_loss(build_issuer_table("https://corp.example", groups_claim="groups")) is None
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[issuer", "not valid TOML"),
        ("", "only tables"),
        ("issuer = 1", "only tables"),
        ("issuer = [1]", "only tables"),
        ("x = 1\n" + build_issuer_table("https://a"), "only tables"),
        ('[[issuer]]\nname = "a"\nurl = "https://a"', "'audience' of issuer 1 .* missing"),
        (build_issuer_table("https://a", colour="x"), "'colour' of issuer 1 .* the keys are name"),
        (build_issuer_table("https://a", role_claim="x"), "did you mean 'roles_claim'"),
        (build_issuer_table("https://a").replace(f'"{AUDIENCE}"', "7"), "'audience' .* 7 is not"),
        (build_issuer_table("ftp://a"), "'url' .* 'ftp://a' is not"),
        (build_issuer_table("https://"), "'url' .* 'https://' is not"),
        (build_issuer_table("https://a", jwks_url="file:///etc/passwd"), "'jwks_url'"),
        (build_issuer_table("https://a", principal_claim=""), "principal_claim"),
        *(
            (build_issuer_table("https://a", name), "lowercase letters")
            for name in ("A", "a:b", "service", "x-group", "-a")
        ),
        (build_issuer_table("https://a", "oidc"), "Two OIDC issuers have the name 'oidc'"),
        (build_issuer_table("https://a") + build_issuer_table("https://b"), "the name 'corp'"),
        (build_issuer_table("https://first.example"), "the url 'https://first.example'"),
        ("".join(build_issuer_table(f"https://{number}", f"i{number}") for number in range(33)), "at most 32"),
    ],
)
def test_invalid_file_of_issuers_names_the_fault(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "issuers.toml"
    file.write_text(content)
    settings = Settings(oidc_issuer="https://first.example", oidc_audience="a", oidc_issuers_file=str(file))
    with pytest.raises(ConfigError, match=message):
        read_issuers(settings)


def test_missing_file_of_issuers_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Cannot read the file"):
        read_issuers(Settings(oidc_issuers_file=str(tmp_path / "missing")))


_NAMES = st.text("ab-group", min_size=1, max_size=9).filter(is_issuer_name)
_SUBJECTS = st.text("ab:-group", min_size=1, max_size=9)


@given(st.tuples(_NAMES, st.booleans(), _SUBJECTS), st.tuples(_NAMES, st.booleans(), _SUBJECTS))
def test_different_subjects_and_groups_have_different_names(
    first_subject: tuple[str, bool, str], second_subject: tuple[str, bool, str]
) -> None:
    names = [
        f"{issuer}{GROUP_SUFFIX if is_group else ''}:{subject}"
        for issuer, is_group, subject in (first_subject, second_subject)
    ]
    assert (names[0] == names[1]) == (first_subject == second_subject)
    assert all(map(is_foreign, names))
