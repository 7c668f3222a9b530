"""Bearer tokens of this server: `smk_` and 256 random bits, shown once, kept as SHA-256 only.

The digest needs neither salt nor stretching, because nobody guesses 256 random bits; and a lookup by digest tells a
timing attacker nothing that helps, because nobody can choose the digest of a secret that they do not know.

A token's name is its principal. It may be used again once the old token has ended, and the grants are the name's: so a
leaked token is replaced by revoking it and creating one of the same name. Where `create_token` is given grants, they
replace whatever the name had, so that a new token never inherits more than was asked for it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence

from metaserver.access.principal import check_token_name, make_grant
from metaserver.clock import Clock
from metaserver.errors import BadRequest, CommitConflict, NotFound
from metaserver.store.port import (
    Grant,
    Operation,
    PointerStore,
    RemoveGrant,
    RevokeToken,
    SaveGrant,
    SaveToken,
    Token,
)

PREFIX = "smk_"
"""Lets secret scanners, and people, see what leaked."""
SECRET_BYTES = 32
TTL_S_MAX = 100 * 366 * 86400


def digest_of(secret: str) -> str:
    """Hexadecimal SHA-256, as the store keeps it."""
    return hashlib.sha256(secret.encode(errors="surrogateescape")).hexdigest()


def is_live(token: Token, now_ms: int) -> bool:
    return token.revoked_ms is None and (token.expires_ms is None or now_ms < token.expires_ms)


async def create_token(
    store: PointerStore, clock: Clock, name: str, ttl_s: int | None, grants: Sequence[Grant] | None
) -> str:
    """The secret of a new token, which nothing can show again. Token and grants are saved in one transaction.

    `ttl_s` None never expires. `grants` None leaves the name's grants as they are, else they become exactly these.
    BadRequest for a name or role that cannot be; AlreadyExists while a live token has the name.
    """
    check_token_name(name)
    if ttl_s is not None and not 0 < ttl_s <= TTL_S_MAX:
        raise BadRequest(f"A token lives from 1 to {TTL_S_MAX} seconds, or for ever; {ttl_s} is neither")
    secret = PREFIX + base64.urlsafe_b64encode(clock.random_bytes(SECRET_BYTES)).rstrip(b"=").decode()
    now_ms = clock.now_ms()
    token = Token(
        id=str(clock.uuid7()),
        name=name,
        digest=digest_of(secret),
        created_ms=now_ms,
        expires_ms=None if ttl_s is None else now_ms + ttl_s * 1000,
    )
    operations: list[Operation] = [SaveToken(token)]
    if grants is not None:
        wanted = {make_grant(name, grant.role, grant.namespace) for grant in grants}
        had = set(await store.grants(name))
        operations += [RemoveGrant(grant) for grant in had - wanted]
        operations += [SaveGrant(grant) for grant in wanted]
    try:
        await store.transact(operations)
    except NotFound:
        raise CommitConflict(f"The grants of {name} were changed meanwhile; try again") from None
    return secret


async def revoke_token(store: PointerStore, clock: Clock, name: str) -> None:
    """The token, and every access token made from it, is refused from the next request on, by every replica.

    NotFound if no live token has this name."""
    await store.transact([RevokeToken(name=name, now_ms=clock.now_ms())])


async def live_tokens(store: PointerStore, clock: Clock) -> list[Token]:
    now_ms = clock.now_ms()
    return [token for token in await store.tokens() if is_live(token, now_ms)]
