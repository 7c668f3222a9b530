"""Tests of logins by client certificates: principals, groups and roles, untrusted clients, and renewals under load."""

from __future__ import annotations

import asyncio
import datetime
import gc
import os
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pyspark
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.name import _ASN1Type
from cryptography.x509.oid import ExtendedKeyUsageOID, ExtensionOID, NameOID
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import ForbiddenError

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.engines import NO_HIVE, build_catalog_conf
from seamark.formats.protocol.wire import to_base64url
from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import ConfigError
from seamark.formats.runtime.revocations import RevokedCertificates
from seamark.formats.runtime.tls import Certificate, ClientCertificate
from seamark.metaserver.access.certificates.identities import CertificateIdentities
from seamark.metaserver.access.certificates.rules import CertificateRule, compile_pattern, read_rules
from seamark.metaserver.access.principal import check_principal_name
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.access.standing_rights import StandingRights
from seamark.metaserver.access.tokens import create_token
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.settings.sources import check_consistency
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.operations import RemoveGrant, SaveGrant
from seamark.metaserver.store.port import PointerStore
from tests.access.issuer import get_rsa_key, run_issuer
from tests.server.rig import OffsetClock, RunningServer, run_server
from tests.services.authority import Authority, ClientFiles
from tests.services.process import CACHE
from tests.waits import PATIENCE_S

SPIFFE = "spiffe://lake.example/ns/etl/sa/nightly"
NAMESPACES = "/v1/namespaces"


def build_uri_name(text: str) -> x509.GeneralName:
    return x509.UniformResourceIdentifier(text)


@asynccontextmanager
async def serve(
    home: Path, authority: Authority, auth: str = "token+cert", **settings: Any
) -> AsyncIterator[RunningServer]:
    tls = {"tls_cert": str(authority.certificate), "tls_key": str(authority.key), "tls_client_ca": str(authority.file)}
    async with run_server(home, auth=auth, **{**tls, **settings}) as server:
        yield server


def build_client_context(authority: Authority, files: ClientFiles | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.file)
    if files is not None:
        context.load_cert_chain(files.certificate, files.key)
    return context


@asynccontextmanager
async def connect(authority: Authority, files: ClientFiles | None = None) -> AsyncIterator[aiohttp.ClientSession]:
    """Open the HTTP session of a client that uses one connection for all requests.

    `files` are its certificate and key. A client without `files` has no certificate.
    """
    connector = aiohttp.TCPConnector(ssl=build_client_context(authority, files), limit=1, keepalive_timeout=PATIENCE_S)
    async with aiohttp.ClientSession(connector=connector) as http:
        yield http


async def send_request(
    http: aiohttp.ClientSession, server: RunningServer, path: str = NAMESPACES, **headers: str
) -> tuple[int, str]:
    request_headers = {name.replace("_", "-"): value for name, value in headers.items()}
    async with http.get(server.url + path, headers=request_headers) as answer:
        return answer.status, await answer.text()


async def save_grants(server: RunningServer, *grants: Grant) -> None:
    await server.components.store.transact([SaveGrant(grant) for grant in grants])


async def test_certificate_is_a_login_with_the_grants_of_its_principal(tmp_path: Path, authority: Authority) -> None:
    files = authority.issue_client("nightly", build_uri_name(SPIFFE))
    async with serve(tmp_path / "home", authority, "cert") as server, connect(authority, files) as http:
        assert (await send_request(http, server, f"{NAMESPACES}/db"))[0] == 403
        await save_grants(server, Grant(f"cert:{SPIFFE}", "reader", ("db",)))
        status, text = await send_request(http, server)
        assert (status, "db" in text) == (200, True)
        # PyIceberg sends this header if its property token is not set.
        assert (await send_request(http, server, Authorization="Bearer None"))[0] == 200
        async with http.post(f"{server.url}{NAMESPACES}", json={"namespace": ["other"]}) as answer:
            assert answer.status == 403
            assert f"cert:{SPIFFE} may not createNamespace" in await answer.text()
        await server.components.store.transact([RemoveGrant(Grant(f"cert:{SPIFFE}", "reader", ("db",)))])
        assert (await send_request(http, server, f"{NAMESPACES}/db"))[0] == 403


async def test_certificate_rules_assign_principals_groups_and_roles(tmp_path: Path, authority: Authority) -> None:
    partner = Authority(tmp_path, file="partner.pem")
    bundle = tmp_path / "bundle.pem"
    bundle.write_text(authority.pem + partner.pem)
    rules = tmp_path / "rules.toml"
    rules.write_text(
        '[[rule]]\nuri = "spiffe://lake.example/ns/{namespace}/sa/{account}"\nprincipal = "{account}.{namespace}"\n'
        f'groups = ["{{namespace}}", "services"]\nauthorities = ["{authority.digest.upper()}"]\n'
        '[[rule]]\ndns = "{host}.lake.example"\nprincipal = "host-{host}"\nroles = ["reader:{host}", "role:etl"]\n'
    )
    service = authority.issue_client("service", build_uri_name(SPIFFE))
    impostor = partner.issue_client("impostor", build_uri_name(SPIFFE))
    host = partner.issue_client("host", x509.DNSName("DB.lake.example"), x509.DNSName("*.lake.example"))
    deep_files = partner.issue_client("deeper", x509.DNSName("db.x.lake.example"))
    settings = {"tls_client_ca": str(bundle), "tls_client_rules_file": str(rules)}
    async with serve(tmp_path / "home", authority, "cert", **settings) as server:
        await save_grants(server, Grant("cert-group:etl", "reader", ("db",)))
        async with connect(authority, service) as http:
            status, text = await send_request(http, server)
            assert (status, "db" in text) == (200, True)
            async with http.post(f"{server.url}{NAMESPACES}", json={"namespace": ["x"]}) as answer:
                assert "cert:nightly.etl may not" in await answer.text()
        async with connect(authority, host) as http:
            status, text = await send_request(http, server)
            assert (status, "db" in text) == (200, True)
            await save_grants(server, Grant("role:etl", "admin"))
            async with http.post(f"{server.url}{NAMESPACES}", json={"namespace": ["x"]}) as answer:
                assert answer.status == 200
        for files in (impostor, deep_files):
            async with connect(authority, files) as http:
                status, text = await send_request(http, server)
                assert (status, "names no principal" in text) == (401, True)


async def test_untrusted_clients_are_refused(tmp_path: Path, authority: Authority) -> None:
    other_authority = Authority(tmp_path, file="stranger.pem")
    async with serve(tmp_path / "home", authority) as server:
        store = server.components.store
        await save_grants(server, Grant(f"cert:{SPIFFE}", "admin"), Grant("cert:root", "admin"))
        token = await create_token(store, server.components.clock, "ann", None, [Grant("ann", "admin")])
        bearer = f"Bearer {token}"
        refused_in_handshake = {
            "an expired certificate": authority.issue_client("expired", build_uri_name(SPIFFE), valid_s=-60),
            "another authority of the same name": other_authority.issue_client("foreign", build_uri_name(SPIFFE)),
            "a certificate of a server": authority.issue_client(
                "web", build_uri_name(SPIFFE), usage=ExtendedKeyUsageOID.SERVER_AUTH
            ),
        }
        for case, files in refused_in_handshake.items():
            async with connect(authority, files) as http:
                with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
                    pytest.fail(f"{case}: {await send_request(http, server)}")
        clients_without_name = {
            "no alternative name": authority.issue_client("plain", common_name="root"),
            "only a DNS name": authority.issue_client("host", x509.DNSName("root"), common_name="root"),
            "two URIs": authority.issue_client(
                "two", build_uri_name(SPIFFE), build_uri_name("spiffe://lake.example/other")
            ),
            "a long URI": authority.issue_client("long", build_uri_name("spiffe://lake.example/" + "x" * 300)),
        }
        for case, files in clients_without_name.items():
            async with connect(authority, files) as http:
                status, text = await send_request(http, server)
                assert (status, "names no principal" in text) == (401, True), (case, text)
                # A certificate without a principal, for example a proxy's, does not affect a login by token.
                assert (await send_request(http, server, Authorization=bearer))[0] == 200, case
        async with connect(authority, authority.issue_client("service", build_uri_name(SPIFFE))) as http:
            assert (await send_request(http, server))[0] == 200
            status, text = await send_request(http, server, Authorization=bearer)
            assert (status, f"cert:{SPIFFE}, and the token of ann" in text) == (401, True), text
            assert (await send_request(http, server, Authorization="Bearer smk_unknown"))[0] == 401
            assert (await send_request(http, server, Authorization="Basic cm9vdDpyb290"))[0] == 401
        pem = refused_in_handshake["an expired certificate"].certificate.read_text().replace("\n", "%0A")
        async with connect(authority) as http:
            for header in (
                "X-Forwarded-Client-Cert",
                "X-SSL-Client-Cert",
                "X-Client-Cert",
                "Client-Cert",
                "SSL-Client-S-DN",
            ):
                value = f"By={SPIFFE};URI={SPIFFE};Cert={pem}"
                status, text = await send_request(http, server, **{header: value, "X-SSL-Client-Verify": "SUCCESS"})
                assert status == 401, header
            assert (await send_request(http, server, Authorization=bearer))[0] == 200


@pytest.mark.parametrize("copies", [1, 2])
def test_unreadable_alternative_names_give_no_login(copies: int) -> None:
    der = build_unusual_certificate(copies)
    rules = {kind: CertificateRule(kind, re.compile("(?P<name>.+)"), "{name}") for kind in ("cn", "dns")}
    certificate = ClientCertificate(der, b"authority")
    clock = SystemClock()
    dns_identity = CertificateIdentities([rules["dns"]], clock).identify(certificate)
    assert (dns_identity.name, "alternative names cannot be read" in dns_identity.problem) == ("", True), dns_identity
    cn_identity = CertificateIdentities([rules["cn"]], clock).identify(certificate)
    assert (cn_identity.name, cn_identity.problem) == ("cert:ann", "")


def build_unusual_certificate(copies: int) -> bytes:
    """Return a self-signed certificate with unusual alternative names.

    Args:
        copies: The number of extensions of alternative names. If it is 1, the extension also has the name of an EDI
            party, which few parsers support.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ann")])
    now = datetime.datetime.now(datetime.UTC)
    names = bytes.fromhex("30 0b a5 04 a1 02 0c 00 82 03 61 2e 62" if copies == 1 else "30 05 82 03 61 2e 62")
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(5)
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.UnrecognizedExtension(ExtensionOID.SUBJECT_ALTERNATIVE_NAME, names), False)
    )
    if copies == 2:
        # The builder refuses a second extension of this type. An extension of another type gets its identifier later.
        builder = builder.add_extension(x509.UnrecognizedExtension(ExtensionOID.ISSUER_ALTERNATIVE_NAME, names), False)
    der = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)
    issuer_names_id, subject_names_id = bytes.fromhex("0603551d12"), bytes.fromhex("0603551d11")
    return der.replace(issuer_names_id, subject_names_id)


async def test_token_without_the_required_certificate_is_refused(tmp_path: Path, authority: Authority) -> None:
    issuer = {"oidc_issuer": "https://issuer.invalid", "oidc_audience": "seamark"}  # The server never contacts it.
    async with serve(tmp_path / "home", authority, "token+oidc", tls_client_auth="required", **issuer) as server:
        components = server.components
        token = await create_token(
            components.store, components.clock, "ann", ttl_s=None, grants=[Grant("ann", "admin")]
        )
        form = {"grant_type": "client_credentials", "client_id": "ann", "client_secret": token}
        async with connect(authority) as http:
            assert (await send_request(http, server, "/readyz"))[0] == 200
            status, text = await send_request(http, server, Authorization=f"Bearer {token}")
            assert (status, "requires a client certificate" in text) == (401, True)
            async with http.post(f"{server.url}/v1/oauth/tokens", data=form) as answer:
                assert answer.status == 401
            job_token = components.authenticator.service_tokens.issue(("db",), 60)
            assert (await send_request(http, server, f"{NAMESPACES}/db/tables", Authorization=f"Bearer {job_token}"))[
                0
            ] == 200
        # Here, the name in the certificate is not a login, so any certificate of the authority suffices.
        async with connect(authority, authority.issue_client("service", build_uri_name(SPIFFE))) as http:
            assert (await send_request(http, server))[0] == 401
            assert (await send_request(http, server, Authorization=f"Bearer {token}"))[0] == 200
            async with http.post(f"{server.url}/v1/oauth/tokens", data=form) as answer:
                assert answer.status == 200


async def test_oidc_token_bound_to_a_certificate_is_refused_without_it(tmp_path: Path, authority: Authority) -> None:
    clock = SystemClock()
    own_certificate, other_certificate = authority.issue_client("own"), authority.issue_client("other")
    leaf = x509.load_pem_x509_certificate(own_certificate.certificate.read_bytes())
    digest = to_base64url(leaf.fingerprint(hashes.SHA256()))
    async with run_issuer(clock) as issuer:
        issuer.publish(get_rsa_key())
        options = {"oidc_issuer": issuer.url, "oidc_audience": issuer.build_claims()["aud"]}
        async with serve(tmp_path / "home", authority, "oidc", **options) as server:
            await save_grants(server, Grant("oidc:ann", "admin"))
            bound_token = f"Bearer {issuer.make_token(get_rsa_key(), cnf={'x5t#S256': digest})}"
            unbound_token = f"Bearer {issuer.make_token(get_rsa_key())}"
            invalid_token = f"Bearer {issuer.make_token(get_rsa_key(), cnf={'x5t#S256': 'AAAA'})}"
            for files, statuses in (
                (own_certificate, (200, 200, 401)),
                (other_certificate, (401, 200, 401)),
                (None, (401, 200, 401)),
            ):
                async with connect(authority, files) as http:
                    for bearer, status in zip((bound_token, unbound_token, invalid_token), statuses, strict=True):
                        assert (await send_request(http, server, Authorization=bearer))[0] == status


async def test_login_of_an_open_connection_ends_when_its_certificate_expires(
    tmp_path: Path, authority: Authority
) -> None:
    files = authority.issue_client("service", build_uri_name(SPIFFE), valid_s=3600)
    clock = OffsetClock()
    async with serve(tmp_path / "home", authority, "cert", clock=clock) as server, connect(authority, files) as http:
        await save_grants(server, Grant(f"cert:{SPIFFE}", "reader"))
        assert (await send_request(http, server))[0] == 200
        clock.ahead_ms = 3_601_000
        status, text = await send_request(http, server)
        assert (status, "has expired" in text) == (401, True)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2])
async def test_removed_authority_ends_the_logins_of_open_connections(
    tmp_path: Path, authority: Authority, version: ssl.TLSVersion
) -> None:
    old_authority, bundle = Authority(tmp_path, file="old.pem"), tmp_path / "bundle.pem"
    bundle.write_text(authority.pem + old_authority.pem)
    async with serve(tmp_path / "home", authority, "cert", tls_client_ca=str(bundle)) as server:
        await save_grants(server, Grant(f"cert:{SPIFFE}", "reader"))
        certificate = server.components.certificate
        assert certificate is not None
        contexts = [
            build_client_context(authority, ca.issue_client(f"client-{ca.file.name}", build_uri_name(SPIFFE)))
            for ca in (authority, old_authority)
        ]
        host, port = "127.0.0.1", int(server.url.rpartition(":")[2])
        sessions: list[ssl.SSLSession | None] = []

        async def send_on(stream: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> int:
            """Send a request in an open connection, and return the status."""
            reader, writer = stream
            writer.write(f"GET {NAMESPACES} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
            length = re.search(rb"(?i)content-length: (\d+)", head)
            await reader.readexactly(int(length[1]) if length else 0)
            return int(head.split()[1])

        streams = []
        for context in contexts:
            context.minimum_version = context.maximum_version = version
            reader, writer = await asyncio.open_connection(host, port, ssl=context)
            streams.append((reader, writer))
            assert await send_on((reader, writer)) == 200
            sessions.append(writer.get_extra_info("ssl_object").session)
        assert await asyncio.to_thread(resume, contexts[1], host, port, sessions[1]) == 200
        bundle.write_text(authority.pem)
        await certificate.reload()
        assert [await send_on(stream) for stream in streams] == [200, 401]
        assert await asyncio.to_thread(resume, contexts[1], host, port, sessions[1]) != 200
        assert await asyncio.to_thread(resume, contexts[0], host, port, sessions[0]) == 200
        bundle.write_text("no certificate")
        await certificate.reload()  # An unusable bundle changes nothing.
        stream = await asyncio.open_connection(host, port, ssl=contexts[0])
        assert await send_on(stream) == 200
        for _, writer in (*streams, stream):
            writer.close()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2])
async def test_revoked_certificate_ends_its_login_in_new_open_and_resumed_connections(
    tmp_path: Path, authority: Authority, version: ssl.TLSVersion
) -> None:
    clients = [authority.issue_client(name, build_uri_name(SPIFFE)) for name in ("stays", "revoked")]
    crl_file = tmp_path / "clients.crl"
    crl_file.write_text(authority.build_revocation_list())
    async with serve(tmp_path / "home", authority, "cert", tls_client_crl=str(crl_file)) as server:
        await save_grants(server, Grant(f"cert:{SPIFFE}", "reader"))
        certificate = server.components.certificate
        assert certificate is not None
        address = "127.0.0.1", int(server.url.rpartition(":")[2])
        contexts = [build_client_context(authority, files) for files in clients]
        for context in contexts:
            context.minimum_version = context.maximum_version = version
        sessions = [await asyncio.to_thread(open_session, context, *address) for context in contexts]

        async def resume_session(number: int) -> int:
            return await asyncio.to_thread(resume, contexts[number], *address, sessions[number])

        async with (
            connect(authority, clients[0]) as lasting_connection,
            connect(authority, clients[1]) as revoked_connection,
        ):
            assert [(await send_request(http, server))[0] for http in (lasting_connection, revoked_connection)] == [
                200,
                200,
            ]
            crl_file.write_text(authority.build_revocation_list(clients[1]))
            await certificate.reload()
            assert (await send_request(lasting_connection, server))[0] == 200
            status, text = await send_request(revoked_connection, server)
            assert (status, "was revoked" in text) == (401, True)
        assert await resume_session(0) == 200
        assert await resume_session(1) != 200
        async with connect(authority, clients[1]) as http:
            with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
                await send_request(http, server)
        for unusable_text in ("", authority.build_revocation_list() + Authority(tmp_path, file="other.pem").pem):
            crl_file.write_text(unusable_text)
            await certificate.reload()  # The revocation list of the file has not changed.
            async with connect(authority, clients[0]) as http:
                assert (await send_request(http, server))[0] == 200
        crl_file.write_text(authority.build_revocation_list(valid_s=-60))
        await certificate.reload()
        async with connect(authority, clients[0]) as http:
            with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
                await send_request(http, server)


async def test_outdated_or_missing_revocation_list_ends_logins_in_open_and_resumed_connections(
    tmp_path: Path, authority: Authority
) -> None:
    files, crl_file, clock = (
        authority.issue_client("client", build_uri_name(SPIFFE)),
        tmp_path / "clients.crl",
        OffsetClock(),
    )
    crl_file.write_text(authority.build_revocation_list(valid_s=3600) + authority.build_revocation_list(valid_s=-60))
    async with serve(tmp_path / "home", authority, "cert", clock=clock, tls_client_crl=str(crl_file)) as server:
        await save_grants(server, Grant(f"cert:{SPIFFE}", "reader"))
        certificate = server.components.certificate
        assert certificate is not None
        address, context = ("127.0.0.1", int(server.url.rpartition(":")[2])), build_client_context(authority, files)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        session = await asyncio.to_thread(open_session, context, *address)
        async with connect(authority, files) as http:

            async def ask_both() -> list[int]:
                resumed_status = await asyncio.to_thread(resume, context, *address, session)
                return [(await send_request(http, server))[0], resumed_status]

            assert await ask_both() == [200, 200]
            clock.ahead_ms = 3_601_000
            assert await ask_both() == [401, 401]
            assert "no current revocation list" in (await send_request(http, server))[1]
            crl_file.write_text(authority.build_revocation_list(valid_s=7200))
            await certificate.reload()
            assert await ask_both() == [200, 200]
            other_issuer_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "another authority")])
            crl_file.write_text(authority.build_revocation_list(issuer=other_issuer_name))
            await certificate.reload()
            assert await ask_both() == [401, 401]


@pytest.mark.parametrize(
    ("names", "kind", "is_equal"),
    [
        (["test authority"], _ASN1Type.PrintableString, True),
        (["  TEST \t Authority "], _ASN1Type.BMPString, True),
        (["testauthority"], _ASN1Type.UTF8String, False),
        (["test authority", "test authority"], _ASN1Type.UTF8String, False),
    ],
)
def test_revocation_list_applies_if_openssl_considers_its_issuer_equal(
    tmp_path: Path, authority: Authority, names: list[str], kind: _ASN1Type, is_equal: bool
) -> None:
    """OpenSSL and the server agree on whether two issuer names are equal."""
    files, crl_file = authority.issue_client("client", build_uri_name(SPIFFE)), tmp_path / "clients.crl"
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name, _type=kind) for name in names])
    crl_file.write_text(authority.build_revocation_list(files, issuer=issuer))
    verify_command = [
        "openssl",
        "verify",
        "-crl_check",
        "-CAfile",
        authority.file,
        "-CRLfile",
        crl_file,
        files.certificate,
    ]
    refusal = subprocess.run(verify_command, check=False, capture_output=True, text=True).stderr
    assert ("certificate revoked" if is_equal else "unable to get certificate CRL") in refusal
    leaf = x509.load_pem_x509_certificate(files.certificate.read_bytes()).public_bytes(serialization.Encoding.DER)
    revoked_certificates = RevokedCertificates(crl_file)
    assert (revoked_certificates.includes(leaf), revoked_certificates.is_covered(leaf, SystemClock().now_ms())) == (
        is_equal,
        is_equal,
    )


async def test_event_loop_runs_while_a_revocation_list_is_loaded(tmp_path: Path, authority: Authority) -> None:
    crl_file = tmp_path / "clients.crl"
    crl_file.write_text(authority.build_revocation_list())
    certificate = Certificate(authority.certificate, authority.key, authority.file, crl_file)
    files = authority.issue_client("client")
    crl_file.write_text(authority.build_revocation_list(files))
    reload, turns = asyncio.ensure_future(certificate.reload()), 0
    while not reload.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 1, "the reload blocked the loop"


def open_session(context: ssl.SSLContext, host: str, port: int) -> ssl.SSLSession | None:
    """Send a request in a new TLS connection, and return the session, with which the client can resume it later."""
    with (
        socket.create_connection((host, port), PATIENCE_S) as plain_socket,
        context.wrap_socket(plain_socket, server_hostname=host) as tls_socket,
    ):
        tls_socket.sendall(f"GET {NAMESPACES} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        assert b" 200 " in tls_socket.recv(4096)
        return tls_socket.session


def resume(context: ssl.SSLContext, host: str, port: int, session: ssl.SSLSession | None) -> int:
    """Send a request in a connection that resumes the TLS session of an earlier connection.

    Return the status of the answer, or 0 if the handshake fails.
    """
    with (
        socket.create_connection((host, port), PATIENCE_S) as plain_socket,
        suppress(ssl.SSLError, ConnectionError),
        context.wrap_socket(plain_socket, server_hostname=host, session=session) as tls_socket,
    ):
        tls_socket.sendall(f"GET {NAMESPACES} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        answer = tls_socket.recv(4096)
        return int(answer.split()[1]) if answer else 0
    return 0


async def test_renewals_under_load_fail_no_request(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replace the certificates of the server and of the clients, and their authority, while clients send requests."""
    bundle, files = tmp_path / "bundle.pem", authority.issue_client("client", build_uri_name(SPIFFE))
    bundle.write_text(authority.pem)
    monkeypatch.setenv("SEAMARK_CA", str(bundle))
    monkeypatch.setenv("SEAMARK_CLIENT_CERT", str(files.certificate))
    monkeypatch.setenv("SEAMARK_CLIENT_KEY", str(files.key))
    async with serve(tmp_path / "home", authority, "cert", tls_client_ca=str(bundle)) as server:
        await save_grants(server, Grant(f"cert:{SPIFFE}", "reader"))
        certificate = server.components.certificate
        assert certificate is not None
        answer_counts = [0, 0]  # The number of answers that each client has received.
        stop_event = asyncio.Event()

        async def list_repeatedly(number: int, *, reuses: bool) -> None:
            client = SeamarkClient(server.url, retries=0)
            while not stop_event.is_set():
                assert ("db",) in await asyncio.to_thread(lambda client=client: list(client.namespaces()))
                answer_counts[number] += 1
                if not reuses:
                    client.close()
                    client = SeamarkClient(server.url, retries=0)
            client.close()

        async def wait_for_answers(further_answers: int = 2) -> None:
            goals = [count + further_answers for count in answer_counts]
            while any(count < goal for count, goal in zip(answer_counts, goals, strict=True)):
                assert not any(task.done() for task in tasks), [task.exception() for task in tasks if task.done()]
                await asyncio.sleep(0.01)

        tasks = [
            asyncio.create_task(list_repeatedly(0, reuses=True)),
            asyncio.create_task(list_repeatedly(1, reuses=False)),
        ]
        await wait_for_answers()
        successor = Authority(tmp_path, file="successor.pem")
        bundle.write_text(authority.pem + successor.pem)
        await certificate.reload()
        await wait_for_answers()
        successor.issue("renewed server")
        await certificate.reload()
        await wait_for_answers()
        # The file is replaced by a rename, as certificate managers do, so that no client reads half of it.
        renewed_files = successor.issue_client("renewed", build_uri_name(SPIFFE))
        renewed_files.key.rename(files.key)
        renewed_files.certificate.rename(files.certificate)
        await wait_for_answers()
        stop_event.set()
        await asyncio.gather(*tasks)
        stop_event.clear()
        bundle.write_text(successor.pem)
        await certificate.reload()
        tasks = [
            asyncio.create_task(list_repeatedly(0, reuses=True)),
            asyncio.create_task(list_repeatedly(1, reuses=False)),
        ]
        await wait_for_answers()
        stop_event.set()
        await asyncio.gather(*tasks)


def use_pyiceberg(url: str, tls: dict[str, Any]) -> str:
    """List namespaces, and return them with the principal that PyIceberg's error names.

    PyIceberg closes its connections only when its catalog is collected as garbage.
    """
    catalog = load_catalog("sea", type="rest", uri=url, ssl=tls)
    namespaces = catalog.list_namespaces()
    try:
        catalog.create_namespace("other")
    except ForbiddenError as error:
        refusal = str(error)
    del catalog
    gc.collect()
    name = re.search(r"cert:\S+", refusal)
    assert name is not None
    return f"{namespaces} {name[0]}"


async def test_clients_log_in_with_certificates(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = authority.issue_client("client", build_uri_name(SPIFFE))
    monkeypatch.setenv("SEAMARK_CA", str(authority.file))
    async with serve(tmp_path / "home", authority, "cert") as server:
        await save_grants(server, Grant(f"cert:{SPIFFE}", "reader"))
        monkeypatch.setenv("SEAMARK_CLIENT_CERT", str(files.certificate))
        monkeypatch.setenv("SEAMARK_CLIENT_KEY", str(authority.key))
        with pytest.raises(ValueError, match="SEAMARK_CLIENT_CERT"):
            await asyncio.to_thread(lambda: list(SeamarkClient(server.url).namespaces()))
        monkeypatch.setenv("SEAMARK_CLIENT_KEY", str(files.key))
        client = SeamarkClient(server.url, retries=0)
        assert await asyncio.to_thread(lambda: list(client.namespaces())) == [("db",)]
        # These variables would override the property with the authorities.
        for variable in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
            monkeypatch.delenv(variable, raising=False)
        tls = {"cabundle": str(authority.file), "client": {"cert": str(files.certificate), "key": str(files.key)}}
        assert await asyncio.to_thread(use_pyiceberg, server.url, tls) == f"[('db',)] cert:{SPIFFE}"
        client.close()
        async with connect(authority) as http:  # During this request the server closes the ended connections.
            assert (await send_request(http, server, "/readyz"))[0] == 200


async def test_standing_rights_of_a_certificate_depend_on_its_grants_and_on_accepted_logins(
    store: PointerStore, tmp_path: Path
) -> None:
    settings = Settings(auth="token+cert", tls_client_ca="ca.pem", tls_cert="c.pem", tls_key="c.key")
    clock, table = SystemClock(), Securable(("db",), "table", "t")
    rights = StandingRights(store, clock, settings)
    name = f"cert:{SPIFFE}"
    assert await rights.explain_loss(name, "loadTable", table) == "the rights were withdrawn"
    await store.transact([SaveGrant(Grant(name, "reader"))])
    assert await rights.explain_loss(name, "loadTable", table) is None
    rights_without_certificate = StandingRights(store, clock, Settings(auth="token"))
    assert (
        await rights_without_certificate.explain_loss(name, "loadTable", table)
        == "the server no longer accepts this kind of login"
    )
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\ncn = "{name}"\nprincipal = "{name}"\ngroups = ["g"]\n')
    rights_with_groups = StandingRights(store, clock, Settings(auth="cert", tls_client_rules_file=str(rules)))
    # The groups of the certificate may have grants, and are known only during its requests.
    assert await rights_with_groups.explain_loss("cert:other", "loadTable", table) is None


@pytest.mark.parametrize("name", ["cert:ann", "cert-group:etl", f"cert:{SPIFFE}"])
def test_grants_can_name_certificates_and_their_groups(name: str) -> None:
    assert check_principal_name(name) == name


@given(st.data())
def test_pattern_matches_only_names_with_a_nonempty_value_for_each_placeholder(data: st.DataObject) -> None:
    kind, separator = data.draw(st.sampled_from([("uri", "/"), ("dns", "."), ("email", "@")]))
    text_strategy = st.text(st.sampled_from("ab.*+/@\\^$ é"), min_size=1, max_size=6)
    fixed_texts = data.draw(st.lists(text_strategy, min_size=2, max_size=3))
    values = [data.draw(text_strategy) for _ in fixed_texts[1:]]
    names = [f"v{chr(ord('a') + number)}" for number in range(len(values))]
    pattern = compile_pattern(
        kind, fixed_texts[0] + "".join(f"{{{name}}}{text}" for name, text in zip(names, fixed_texts[1:], strict=True))
    )
    filled_name = fixed_texts[0] + "".join(value + text for value, text in zip(values, fixed_texts[1:], strict=True))
    match = pattern.fullmatch(filled_name)
    if not any(separator in value for value in values):
        assert match is not None
    if match is not None:
        parts = [match[name] for name in names]
        assert all(parts)
        assert not any(separator in part for part in parts)
        assert (
            fixed_texts[0] + "".join(part + text for part, text in zip(parts, fixed_texts[1:], strict=True))
            == filled_name
        )
    assert pattern.fullmatch(filled_name + separator + "x" * (len(fixed_texts[-1]) + 1)) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must have only tables"),
        ('[[rule]]\nuri = "x"\n', "Set principal and exactly one of"),
        ('[[rule]]\nuri = "x"\ncn = "y"\nprincipal = "p"\n', "exactly one of"),
        ('[[rule]]\nuri = "{a}{a}"\nprincipal = "p"\n', "is invalid"),
        ('[[rule]]\nuri = "{A}"\nprincipal = "p"\n', "brace"),
        ('[[rule]]\nuri = "{a}"\nprincipal = "{b}"\n', "the pattern lacks: b"),
        ('[[rule]]\nuri = "{a}"\nprincipal = "p"\nroles = ["king"]\n', "A role of"),
        ('[[rule]]\nuri = "{a}"\nprincipal = "p"\nauthorities = ["abc"]\n', "no SHA-256 digest"),
        ('[[rule]]\nuri = "{a}"\nprincipal = "p"\ngroup = ["g"]\n', "did you mean 'groups'"),
        ('[[rule]]\nuri = 7\nprincipal = "p"\n', "text in one line"),
        ("[[rule", "not valid TOML"),
    ],
)
def test_invalid_rules_stop_the_start(tmp_path: Path, text: str, message: str) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_rules(Settings(auth="cert", tls_client_rules_file=str(rules)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"auth": "cert"}, "set tls_client_ca"),
        ({"tls_client_ca": "ca.pem"}, "needs tls_cert"),
        ({"tls_client_auth": "required"}, "set tls_client_ca"),
        ({"tls_client_crl": "ca.crl"}, "set tls_client_ca"),
        ({"auth": "token", "tls_client_rules_file": "rules.toml"}, "add +cert"),
    ],
)
def test_contradicting_client_certificate_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_consistency(Settings(**settings))


@pytest.mark.spark
@pytest.mark.slow
async def test_spark_logs_in_with_the_certificate_in_its_key_store(tmp_path: Path, authority: Authority) -> None:
    files = authority.issue_client("spark", build_uri_name(SPIFFE))
    key_store, trust_store = tmp_path / "c.p12", tmp_path / "t.p12"
    export_command = ["openssl", "pkcs12", "-export", "-passout", "pass:changeit"]
    export_command += ["-in", files.certificate, "-inkey", files.key, "-out", key_store]
    subprocess.run(export_command, check=True)
    import_command = ["keytool", "-importcert", "-noprompt", "-alias", "lake", "-storetype", "pkcs12"]
    import_command += ["-storepass", "changeit", "-file", authority.file, "-keystore", trust_store]
    subprocess.run(import_command, check=True, capture_output=True)
    options = {
        "keyStore": key_store,
        "trustStore": trust_store,
        "keyStorePassword": "changeit",
        "trustStorePassword": "changeit",
    }
    async with serve(tmp_path / "home", authority, "cert") as server:
        await save_grants(server, Grant(f"cert:{SPIFFE}", "admin"))
        conf = {
            **NO_HIVE,
            **build_catalog_conf("sea", server.url),
            "spark.master": "local[1]",
            "spark.driver.extraClassPath": f"{CACHE / 'jars'}/*",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.driver.extraJavaOptions": " ".join(
                f"-Djavax.net.ssl.{key}={value}" for key, value in options.items()
            ),
        }
        argv = [str(Path(pyspark.__file__).parent / "bin" / "spark-sql")]
        argv += [part for key, value in conf.items() for part in ("--conf", f"{key}={value}")]
        sql = "CREATE TABLE sea.db.t AS SELECT 40 + 2 AS answer; SELECT answer FROM sea.db.t;"
        env = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
        result = await asyncio.to_thread(
            subprocess.run, [*argv, "-e", sql], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "42" in result.stdout.split()
