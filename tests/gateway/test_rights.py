"""Tests of the rights of vended credentials. They equal those of the login, expire, and end with revocations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.exceptions import ClientError

from seamark.formats.runtime.clock import SimulatedClock, SystemClock
from seamark.formats.runtime.errors import Forbidden
from seamark.metaserver.access.gateway_keys import ObjectGrant
from seamark.metaserver.access.tokens import create_token
from seamark.metaserver.gateway.ownership import GrantChecker
from seamark.metaserver.server import serve_gateway
from seamark.metaserver.store.model import AccessToken, Claim, Entry, EntryKind
from seamark.metaserver.store.model import Grant as RoleGrant
from seamark.metaserver.store.open import open_store
from tests.gateway.rig import SCHEMA, Keys, read_keys
from tests.server.rig import OffsetClock, build_settings, run_server
from tests.services.process import choose_free_port

FAR_FUTURE_MS = 1 << 60
"""The expiry of grants that do not expire during a test."""


async def _create_tokens(home: Path) -> dict[str, str]:
    """Create four principals with tokens in the database of a server, and return the tokens by principal.

    `writer` and `reader` have rights on the namespace `db`, `other` on the namespace `other`, and `admin` on all.
    """
    home.mkdir(parents=True)
    tokens, clock = {}, SystemClock()
    async with open_store(f"sqlite:///{home}/seamark.db", clock=clock, queue_limit=10) as store:
        for name, role, namespace in (
            ("admin", "admin", ()),
            ("writer", "writer", ("db",)),
            ("reader", "reader", ("db",)),
            ("other", "writer", ("other",)),
        ):
            grants = [RoleGrant(principal=name, role=role, namespace=namespace)]
            tokens[name] = await create_token(store, clock, name, ttl_s=None, grants=grants)
    return tokens


def _collect_codes(keys: Keys) -> dict[str, str]:
    """Carry out seven operations on objects of the table of `keys`. Return the error code, or OK, by operation."""
    client, object_key = keys.make_client(), {"Bucket": keys.bucket, "Key": keys.prefix + "data/o"}

    def call_for_code(call: Any, **arguments: Any) -> str:
        try:
            call(**arguments)
        except ClientError as error:
            return error.response["Error"]["Code"]
        return "OK"

    delete_request = {"Objects": [{"Key": object_key["Key"] + "2"}]}
    try:
        return {
            "put": call_for_code(client.put_object, **object_key, Body=b"x"),
            "get": call_for_code(client.get_object, **object_key),
            "list": call_for_code(client.list_objects_v2, Bucket=keys.bucket, Prefix=keys.prefix),
            "upload": call_for_code(client.create_multipart_upload, **object_key),
            "copy": call_for_code(
                client.copy_object, **(object_key | {"Key": keys.prefix + "c"}), CopySource=object_key
            ),
            "delete many": call_for_code(client.delete_objects, Bucket=keys.bucket, Delete=delete_request),
            "delete": call_for_code(client.delete_object, **(object_key | {"Key": keys.prefix + "c"})),
        }
    finally:
        client.close()


async def test_credentials_have_the_rights_of_the_login_and_expire(tmp_path: Path) -> None:
    home, clock = tmp_path / "home", OffsetClock()
    tokens = await _create_tokens(home)
    settings: dict[str, Any] = {
        "auth": "token",
        "warehouse": "s3://lake/wh",
        "s3_folder": str(tmp_path / "objects"),
        "s3_client_access": "gateway",
        "gateway_port": choose_free_port(),
        "gateway_keys_s": 60,
    }
    async with run_server(home, clock=clock, **settings) as server, serve_gateway(server.components):

        async def load(principal: str, tag: str = "") -> tuple[int, Any, str]:
            headers = {"Authorization": f"Bearer {tokens[principal]}"} | ({"If-None-Match": tag} if tag else {})
            async with server.http.get(f"{server.url}/v1/namespaces/db/tables/t", headers=headers) as answer:
                return (
                    answer.status,
                    await answer.json() if answer.status == 200 else None,
                    answer.headers.get("ETag", ""),
                )

        async def create(**body: Any) -> Any:
            headers = {"Authorization": f"Bearer {tokens['writer']}"}
            async with server.http.post(
                f"{server.url}/v1/namespaces/db/tables", headers=headers, json={"schema": SCHEMA, **body}
            ) as answer:
                assert answer.status == 200, await answer.text()
                return await answer.json()

        await create(name="t")
        assert (await load("other"))[0] == 403
        _, writer_table, tag = await load("writer")
        _, reader_table, read_tag = await load("reader")
        writer_keys, reader_keys = read_keys(writer_table), read_keys(reader_table)
        assert set((await asyncio.to_thread(_collect_codes, writer_keys)).values()) == {"OK"}
        codes = await asyncio.to_thread(_collect_codes, reader_keys)
        assert {name for name, code in codes.items() if code == "OK"} == {"get", "list"}
        assert {code for code in codes.values() if code != "OK"} == {"AccessDenied"}
        # An answer is cached only for its principal, and only while its credentials are valid.
        assert tag != read_tag
        assert (await load("writer", tag))[0] == 304
        assert (await load("reader", tag))[0] == 200
        staged_answer = await create(name="new", **{"stage-create": True})
        assert (await asyncio.to_thread(_collect_codes, read_keys(staged_answer)))["put"] == "OK"
        clock.ahead_ms = 61_000
        status, later_table, _ = await load("writer", tag)
        assert status == 200
        later_keys = read_keys(later_table)
        assert later_keys.token != writer_keys.token
        # botocore signs with the real time, 61 s before the server's. The signature is valid for longer than that.
        assert set((await asyncio.to_thread(_collect_codes, writer_keys)).values()) == {"ExpiredToken"}
        assert set((await asyncio.to_thread(_collect_codes, later_keys)).values()) == {"OK"}


async def test_credentials_stop_working_after_their_principal_loses_the_right(tmp_path: Path) -> None:
    """The test replaces a role by a smaller role, and then deletes a token. The remaining rights stay usable."""
    home = tmp_path / "home"
    tokens = await _create_tokens(home)
    settings: dict[str, Any] = {
        "auth": "token",
        "warehouse": "s3://lake/wh",
        "s3_folder": str(tmp_path / "objects"),
        "s3_client_access": "gateway",
        "gateway_port": choose_free_port(),
        "rights_recheck_s": 0.05,
    }
    async with run_server(home, **settings) as server, serve_gateway(server.components):

        async def send(principal: str, method: str, path: str, body: Any = None) -> Any:
            headers = {"Authorization": f"Bearer {tokens[principal]}"}
            async with server.http.request(method, server.url + path, headers=headers, json=body) as answer:
                assert answer.status < 300, await answer.text()
                return await answer.json() if answer.status == 200 else None

        async def read_outcomes(keys: Keys) -> tuple[str, str]:
            codes = await asyncio.to_thread(_collect_codes, keys)
            return codes["get"], codes["put"]

        async def wait_for_outcomes(keys: Keys, expected_outcomes: tuple[str, str]) -> None:
            async with asyncio.timeout(60):
                while await read_outcomes(keys) != expected_outcomes:
                    await asyncio.sleep(0.02)

        table, grants = "/v1/namespaces/db/tables/t", "/api/v1/grants"
        await send("writer", "POST", "/v1/namespaces/db/tables", {"name": "t", "schema": SCHEMA})
        keys_by_principal = {
            principal: read_keys(await send(principal, "GET", table)) for principal in ("writer", "reader", "admin")
        }
        ok, refusals = ("OK", "OK"), ("AccessDenied", "AccessDenied")
        for principal, expected in (("writer", ok), ("reader", ("OK", "AccessDenied")), ("admin", ok)):
            assert await read_outcomes(keys_by_principal[principal]) == expected
        # After losing the role writer, the right to read remains, with new credentials.
        await send("admin", "PUT", grants, {"principal": "writer", "role": "reader", "namespace": ["db"]})
        await send("admin", "DELETE", f"{grants}?principal=writer&role=writer&namespace=db")
        await wait_for_outcomes(keys_by_principal["writer"], refusals)
        assert await read_outcomes(read_keys(await send("writer", "GET", table))) == ("OK", "AccessDenied")
        await send("admin", "DELETE", "/api/v1/tokens/reader")
        await wait_for_outcomes(keys_by_principal["reader"], refusals)
        assert await read_outcomes(keys_by_principal["admin"]) == ok


def _do_overlap(folder: str, other_folder: str) -> bool:
    return f"{folder}/".startswith(f"{other_folder}/") or f"{other_folder}/".startswith(f"{folder}/")


@asynccontextmanager
async def _run_without_polling(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    """Open a server with a gateway that polls its database, and repeats its checks of rights, only once a minute.

    Yield a function that sends a request and returns its JSON.
    """
    settings: dict[str, Any] = {
        "warehouse": "s3://lake/wh",
        "s3_folder": str(tmp_path / "objects"),
        "s3_client_access": "gateway",
        "gateway_port": choose_free_port(),
        "rights_recheck_s": 60.0,
        "watch_poll_s": 60.0,
    }
    async with run_server(tmp_path / "home", **settings) as server, serve_gateway(server.components):

        async def send(method: str, path: str, body: Any = None) -> Any:
            async with server.http.request(method, f"{server.url}{path}", json=body) as answer:
                assert answer.status < 300, await answer.text()
                return await answer.json() if answer.status == 200 else None

        yield send


async def test_credentials_of_a_dropped_table_are_rejected_at_once(tmp_path: Path) -> None:
    async with _run_without_polling(tmp_path) as send:
        keys = read_keys(await send("POST", "/v1/namespaces/db/tables", {"name": "t", "schema": SCHEMA}))
        other_keys = read_keys(await send("POST", "/v1/namespaces/db/tables", {"name": "u", "schema": SCHEMA}))
        for table_keys in (keys, other_keys):
            assert set((await asyncio.to_thread(_collect_codes, table_keys)).values()) == {"OK"}
        await send("DELETE", "/v1/namespaces/db/tables/t")

        async def is_refused() -> bool:
            return set((await asyncio.to_thread(_collect_codes, keys)).values()) == {"AccessDenied"}

        async with asyncio.timeout(60):
            while not await is_refused():
                await asyncio.sleep(0.02)
        assert set((await asyncio.to_thread(_collect_codes, other_keys)).values()) == {"OK"}


async def test_credentials_of_a_table_moved_to_another_namespace_are_rejected_at_once(tmp_path: Path) -> None:
    """If the credentials stayed valid, a user without rights on the new namespace could read and write the table.

    A rename within the namespace does not end the credentials.
    """
    async with _run_without_polling(tmp_path) as send:

        async def rename(source: tuple[str, str], target: tuple[str, str]) -> None:
            names = [{"namespace": [namespace], "name": name} for namespace, name in (source, target)]
            await send("POST", "/v1/tables/rename", dict(zip(("source", "destination"), names, strict=True)))

        async def list_codes(keys: Keys) -> set[str]:
            return set((await asyncio.to_thread(_collect_codes, keys)).values())

        await send("POST", "/v1/namespaces", {"namespace": ["other"]})
        keys = read_keys(await send("POST", "/v1/namespaces/db/tables", {"name": "t", "schema": SCHEMA}))
        await rename(("db", "t"), ("db", "u"))
        assert await list_codes(keys) == {"OK"}
        await rename(("db", "u"), ("other", "u"))
        async with asyncio.timeout(60):
            while await list_codes(keys) != {"AccessDenied"}:
                await asyncio.sleep(0.02)
        assert await list_codes(read_keys(await send("GET", "/v1/namespaces/other/tables/u"))) == {"OK"}


async def test_body_that_ends_after_its_table_was_dropped_is_not_stored(tmp_path: Path) -> None:
    async with _run_without_polling(tmp_path) as send:
        keys = read_keys(await send("POST", "/v1/namespaces/db/tables", {"name": "t", "schema": SCHEMA}))
        assert set((await asyncio.to_thread(_collect_codes, keys)).values()) == {"OK"}
        endpoint = urlsplit(keys.endpoint)
        target, signed_headers = keys.sign("PUT", "data/late")
        head = "".join(f"{name}: {value}\r\n" for name, value in signed_headers.items())
        reader, writer = await asyncio.open_connection(endpoint.hostname, endpoint.port)
        parts = tmp_path / "objects" / ".seamark-uploads"
        with closing(writer):
            writer.write(f"PUT {target} HTTP/1.1\r\n{head}Content-Length: 100\r\n\r\n".encode() + b"x" * 99)
            async with asyncio.timeout(60):
                while not [path for path in parts.rglob("*") if path.is_file() and path.name != "lock"]:
                    await asyncio.sleep(0.02)
                await send("DELETE", "/v1/namespaces/db/tables/t")
                while set((await asyncio.to_thread(_collect_codes, keys)).values()) != {"AccessDenied"}:
                    await asyncio.sleep(0.02)
                writer.write(b"x")
                assert (await reader.readline()).split()[1] == b"403"
        assert not list((tmp_path / "objects").rglob("late"))


async def test_credentials_contain_the_pinned_property_of_their_table(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "warehouse": "s3://lake/wh",
        "s3_folder": str(tmp_path / "objects"),
        "s3_client_access": "gateway",
        "gateway_port": choose_free_port(),
    }
    async with run_server(tmp_path / "home", **settings) as server:
        http, tables = server.http, f"{server.url}/v1/namespaces/db/tables"
        for name, value in (("no", None), ("yes", "true"), ("wrong", "maybe")):
            properties = {} if value is None else {"seamark.cache.pinned": value}
            await http.post(tables, json={"name": name, "schema": SCHEMA, "properties": properties})
            async with http.get(f"{tables}/{name}") as answer:
                keys = read_keys(await answer.json())
            grant, _ = server.components.gateway_keys.verify(keys.token, keys.access_key)
            assert (grant.pinned, grant.staged) == (name == "yes", False)


class _Claims:
    """A store whose claims a test chooses. A claim states that a location belongs to a table.

    The table `staged` is not in the catalog. Other tables are live, except `dropped_uuids`.
    """

    def __init__(self, claims: dict[str, list[str]]) -> None:
        self.by_uuid, self.calls = claims, 0
        self.dropped_uuids: set[str] = set()
        self.namespace = ("db",)

    async def count_names(self, uuid: str, *, dropped: bool = True, namespace: tuple[str, ...] | None = None) -> int:
        return int(
            uuid != "staged" and (dropped or uuid not in self.dropped_uuids) and namespace in (None, self.namespace)
        )

    async def list_entries_by_uuid(self, uuid: str) -> list[Entry]:
        is_live = uuid != "staged" and uuid not in self.dropped_uuids
        return [Entry(EntryKind.TABLE, self.namespace, "t", uuid, "", None, 1, 0, 0)] if is_live else []

    async def claims(self, uuid: str) -> list[Claim]:
        self.calls += 1
        return [Claim(uuid=uuid, location=location, shared=False) for location in self.by_uuid.get(uuid, [])]

    async def find_overlapping_claims(self, keys: list[str], uuid: str, limit: int) -> list[Claim]:
        return [
            Claim(uuid=other_uuid, location=location, shared=False)
            for other_uuid, locations in self.by_uuid.items()
            for location in locations
            if other_uuid != uuid and any(_do_overlap(location, key) for key in keys)
        ]


async def test_credentials_become_invalid_when_their_table_loses_its_location() -> None:
    clock, claims = SimulatedClock(1), _Claims({"t": ["s3://bkt/t"]})
    checker = GrantChecker(claims, clock, build_settings(Path("unused"), rights_recheck_s=5))
    grant = ObjectGrant("t", "s3://bkt/t", writable=True, principal_name="w", expires_ms=FAR_FUTURE_MS)
    for _ in range(3):
        await checker.check(grant)
    assert claims.calls == 1
    forged_grant = ObjectGrant("t", "s3://bkt/elsewhere", writable=True, principal_name="w", expires_ms=FAR_FUTURE_MS)
    with pytest.raises(Forbidden):
        await checker.check(forged_grant)
    await checker.check(
        ObjectGrant("staged", "s3://bkt/new", writable=True, principal_name="w", expires_ms=FAR_FUTURE_MS, staged=True)
    )
    with pytest.raises(Forbidden, match="dropped"):
        await checker.check(
            ObjectGrant("staged", "s3://bkt/new2", writable=True, principal_name="w", expires_ms=FAR_FUTURE_MS)
        )
    for inside_location in ("s3://bkt/t", "s3://bkt/t/data", "s3://bkt"):
        with pytest.raises(Forbidden):
            await checker.check(
                ObjectGrant(
                    "staged", inside_location, writable=True, principal_name="w", expires_ms=FAR_FUTURE_MS, staged=True
                )
            )
    claims.dropped_uuids = {"t"}
    await checker.check(grant)
    clock.advance(6000)  # The checker uses an earlier result for `rights_recheck_s`.
    for is_staged in (True, False):
        with pytest.raises(Forbidden, match="dropped"):
            await checker.check(
                ObjectGrant(
                    "t", "s3://bkt/t", writable=True, principal_name="w", expires_ms=FAR_FUTURE_MS, staged=is_staged
                )
            )
    claims.dropped_uuids = set()
    await checker.check(grant)
    grant_in_db = ObjectGrant(
        "t", "s3://bkt/t", writable=True, principal_name="w", expires_ms=FAR_FUTURE_MS, namespace=("db",)
    )
    await checker.check(grant_in_db)
    await checker.check(
        ObjectGrant(
            "staged",
            "s3://bkt/new",
            writable=True,
            principal_name="w",
            expires_ms=FAR_FUTURE_MS,
            staged=True,
            namespace=("db",),
        )
    )
    for is_staged in (True, False):
        with pytest.raises(Forbidden, match="moved"):
            await checker.check(
                ObjectGrant(
                    "t",
                    "s3://bkt/t",
                    writable=True,
                    principal_name="w",
                    expires_ms=FAR_FUTURE_MS,
                    staged=is_staged,
                    namespace=("other",),
                )
            )
    claims.by_uuid = {"u": ["s3://bkt/t"]}
    await checker.check(grant)
    clock.advance(6000)
    with pytest.raises(Forbidden):
        await checker.check(grant)


class _Logins(_Claims):
    """A store with the claims of one table, and the logins of principals."""

    def __init__(self, grants: dict[str, list[RoleGrant]]) -> None:
        super().__init__({"t": ["s3://bkt/t"]})
        self._grants = grants

    async def grants(self, principal: str) -> list[RoleGrant]:
        return self._grants.get(principal, [])

    async def list_owned(self, *_: object) -> list[RoleGrant]:
        return []

    async def find_token_by_name(self, name: str) -> AccessToken | None:
        return AccessToken("i", name, "d", 0, None, None) if name in self._grants else None


@pytest.mark.parametrize("claim", ["", "roles"])
async def test_role_claims_of_an_issuer_do_not_invalidate_credentials(claim: str) -> None:
    logins = _Logins({"oidc:granted": [RoleGrant("oidc:granted", "reader", ("db",))]})
    settings = build_settings(Path("unused"), auth="token+oidc", oidc_issuer="https://i", oidc_roles_claim=claim)
    checker = GrantChecker(logins, SimulatedClock(1), settings)

    async def is_allowed(principal: str, namespace: tuple[str, ...] = ("db",), *, writable: bool = False) -> bool:
        try:
            await checker.check(ObjectGrant("t", "s3://bkt/t", writable, principal, FAR_FUTURE_MS, namespace=namespace))
        except Forbidden:
            return False
        return True

    assert await is_allowed("oidc:granted")
    assert await is_allowed("oidc:granted", writable=True) == bool(claim)
    assert await is_allowed("oidc:other") == bool(claim)
    assert not await is_allowed("no token")
    assert await is_allowed("service:seamark", writable=True)
    assert await is_allowed("table t", ())


@pytest.mark.parametrize(("auth", "accepted_principal"), [("token", "ann"), ("oidc", "oidc:eve")])
async def test_credentials_end_when_their_kind_of_login_is_disabled(auth: str, accepted_principal: str) -> None:
    """The gateway checks the setting `auth` again, because it may change after the credentials were issued."""
    logins = _Logins({principal: [RoleGrant(principal, "reader", ("db",))] for principal in ("ann", "oidc:eve")})
    settings = build_settings(Path("unused"), auth=auth, oidc_issuer="https://i")
    checker = GrantChecker(logins, SimulatedClock(1), settings)
    for principal in ("ann", "oidc:eve"):
        check = checker.check(
            ObjectGrant(
                "t", "s3://bkt/t", writable=False, principal_name=principal, expires_ms=FAR_FUTURE_MS, namespace=("db",)
            )
        )
        if principal == accepted_principal:
            await check
        else:
            with pytest.raises(Forbidden, match="no longer accepts"):
                await check
