"""Tests of service tokens, the logins of table services' worker processes. Only the server can create them."""

from __future__ import annotations

import base64

import pytest

from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import Unauthenticated
from seamark.metaserver.access.authorizer import GrantAuthorizer
from seamark.metaserver.access.keyring import Keyring, SigningKey
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.access.worker_tokens import ServiceTokens
from tests.server.rig import OffsetClock

PREFIX = ServiceTokens.prefix


def build_keyring(root: bytes = b"r" * 32) -> Keyring:
    return Keyring([SigningKey(b"12345678", 0, root)], SystemClock())


async def test_service_token_is_a_writer_of_only_its_namespace() -> None:
    tokens = ServiceTokens(build_keyring(), SystemClock())
    principal, _ = tokens.verify_token(tokens.issue(("shop", "eu"), 60))
    authorizer = GrantAuthorizer(None)
    assert await authorizer.allows(principal, "commitChange", Securable(("shop", "eu"), "table", "t"))
    assert await authorizer.allows(principal, "registerIndexFiles", Securable(("shop", "eu", "deep"), "table", "t"))
    for namespace in ((), ("shop",), ("shop", "us"), ("other",)):
        assert not await authorizer.allows(principal, "loadTable", Securable(namespace, "table", "t"))
    for operation in ("purgeDropped", "addGrant", "createToken", "registerTable"):
        assert not await authorizer.allows(principal, operation, Securable(("shop", "eu")))


async def test_service_token_is_a_reader_of_only_the_further_tables_that_it_names() -> None:
    tokens = ServiceTokens(build_keyring(), SystemClock())
    principal, _ = tokens.verify_token(tokens.issue(("shop",), 60, [(("secret",), "names")]))
    authorizer = GrantAuthorizer(None)
    names = Securable(("secret",), "table", "names")
    for operation in ("loadTable", "readRows", "planTableScan"):
        assert await authorizer.allows(principal, operation, names)
    for operation in ("commitChange", "updateTable", "dropTable", "registerIndexFiles", "putIndex"):
        assert not await authorizer.allows(principal, operation, names)
    for securable in (Securable(("secret",), "table", "other"), Securable(("secret", "names"), "table", "t")):
        assert not await authorizer.allows(principal, "loadTable", securable)


def test_service_token_expires() -> None:
    clock = OffsetClock()
    tokens = ServiceTokens(build_keyring(), clock)
    token = tokens.issue(("shop",), 60)
    clock.ahead_ms = 59_000
    tokens.verify_token(token)
    clock.ahead_ms = 61_000
    with pytest.raises(Unauthenticated, match="expired"):
        tokens.verify_token(token)


def test_text_without_a_valid_signature_is_not_accepted_as_a_service_token() -> None:
    tokens = ServiceTokens(build_keyring(), SystemClock())
    token = tokens.issue(("shop",), 60)
    raw_token = base64.urlsafe_b64decode(token.removeprefix(PREFIX) + "==")
    forged_tokens = [
        raw_token[:index] + bytes([raw_token[index] ^ 1]) + raw_token[index + 1 :] for index in range(len(raw_token))
    ]
    texts = [PREFIX + base64.urlsafe_b64encode(item).decode().rstrip("=") for item in forged_tokens]
    texts += [
        PREFIX,
        PREFIX + "é",
        PREFIX + "A" * 10_000,
        token[:-1],
        token + "A",
        PREFIX + "!" * 40,
    ]
    for text in texts:
        with pytest.raises(Unauthenticated):
            tokens.verify_token(text)
    with pytest.raises(Unauthenticated):
        ServiceTokens(build_keyring(b"other" + b"r" * 27), SystemClock()).verify_token(token)
