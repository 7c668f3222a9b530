"""Bearer tokens of this server: `smk_` and 256 random bits, which are shown once and stored only as SHA-256.

The digest needs neither salt nor stretching, because 256 random bits cannot be guessed. A timing attack
on a look-up by digest is useless, because the attacker cannot choose the digest of an unknown secret.

The name of a token is its principal, and the grants belong to the name. When a token has expired or was revoked, its
name can be used again. To replace a leaked token, revoke it, and create a token with the same name. If `create_token`
receives grants, they replace all grants of the name, including those as the owner of tables, so that a new token has no
more rights than requested. Denials are kept.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from seamark.formats.protocol.wire import to_base64url
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import AlreadyExists, BadRequest, CommitConflict
from seamark.metaserver.access.principal import check_token_name, make_grant
from seamark.metaserver.store.model import AccessToken, Grant
from seamark.metaserver.store.operations import Operation, RemoveGrantsOf, RevokeToken, SaveGrant, SaveToken
from seamark.metaserver.store.port import PointerStore

PREFIX = "smk_"
"""The prefix by which secret scanners and people can recognise a leaked token."""
SECRET_BYTES = 32
_SECRET = re.compile(rf"{PREFIX}[A-Za-z0-9_-]{{43,200}}")
"""Matches a secret of at least 43 characters of base64, because a digest without a salt needs 256 random bits."""
TTL_S_MAX = 100 * 366 * 86400


def compute_digest(secret: str) -> str:
    """Return the hexadecimal SHA-256 of a secret. The store contains this digest instead of the secret."""
    return hashlib.sha256(secret.encode(errors="surrogateescape")).hexdigest()


def is_live(token: AccessToken, now_ms: int) -> bool:
    return token.revoked_ms is None and (token.expires_ms is None or now_ms < token.expires_ms)


async def create_token(
    store: PointerStore,
    clock: Clock,
    name: str,
    ttl_s: int | None,
    grants: Sequence[Grant] | None,
    *,
    secret: str | None = None,
) -> str:
    """Create a token and its grants in one transaction, and return its secret, which cannot be shown again.

    Args:
        ttl_s: The lifetime, or None for a token without an expiry.
        grants: The new grants of the name. None keeps the existing grants.
        secret: The secret, or None for a random secret.

    Raises:
        BadRequest: A name or a role is invalid.
        AlreadyExists: A live token has the name.
    """
    check_token_name(name)
    if ttl_s is not None and not 0 < ttl_s <= TTL_S_MAX:
        raise BadRequest(f"The lifetime is {ttl_s} seconds; it must be 1 to {TTL_S_MAX}, or absent for no expiry")
    if secret is None:
        secret = PREFIX + to_base64url(clock.draw_bytes(SECRET_BYTES))
    elif not _SECRET.fullmatch(secret):
        raise BadRequest(
            f"The token must be {PREFIX} and 43 to 200 letters, digits, - and _, from 32 random bytes or more; "
            f"the text has {len(secret)} characters"
        )
    now_ms = clock.now_ms()
    token = AccessToken(
        id=str(clock.uuid7()),
        name=name,
        digest=compute_digest(secret),
        created_ms=now_ms,
        expires_ms=None if ttl_s is None else now_ms + ttl_s * 1000,
    )
    operations: list[Operation] = [SaveToken(token)]
    if grants is not None:
        operations.append(RemoveGrantsOf(name))
        for grant in grants:
            new_grant = make_grant(name, grant.role, grant.namespace, kind=grant.kind, name=grant.name, deny=grant.deny)
            operations.append(SaveGrant(new_grant))
    await store.transact(operations)
    return secret


async def ensure_token(
    store: PointerStore, clock: Clock, name: str, ttl_s: int | None, grants: Sequence[Grant] | None, secret: str
) -> bool:
    """Create a token with a chosen secret, unless a token with this name and secret exists.

    An existing token does not change, even if it was revoked or has expired. So a repeated call does not undo a
    revocation.

    Returns:
        Whether the token was created.

    Raises:
        BadRequest: The name, a role or the secret is invalid.
        AlreadyExists: A live token with another secret has the name, or a token with another name has the secret.
    """
    if await _token_exists(store, name, secret):
        return False
    try:
        await create_token(store, clock, name, ttl_s, grants, secret=secret)
    except (AlreadyExists, CommitConflict):
        # A concurrent process may have created this token.
        if await _token_exists(store, name, secret):
            return False
        raise
    return True


async def _token_exists(store: PointerStore, name: str, secret: str) -> bool:
    """Return whether the token with this name and secret exists.

    Raises:
        AlreadyExists: A token with a different name has the secret.
    """
    digest = compute_digest(secret)
    for token in await store.list_tokens():
        if token.digest == digest:
            if token.name != name:
                raise AlreadyExists(f"The text is the token of {token.name}; {name} needs another token")
            return True
    return False


async def revoke_token(store: PointerStore, clock: Clock, name: str) -> None:
    """Revoke the token with this name, and all access tokens made from it.

    The revocation takes effect with the next request on every replica.

    Raises:
        NotFound: No live token has this name.
    """
    await store.transact([RevokeToken(name=name, now_ms=clock.now_ms())])


async def list_live_tokens(store: PointerStore, clock: Clock) -> list[AccessToken]:
    now_ms = clock.now_ms()
    return [token for token in await store.list_tokens() if is_live(token, now_ms)]
