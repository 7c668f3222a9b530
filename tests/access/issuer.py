"""An OIDC issuer on a real port: discovery document, JWK set, rotating keys, and configurable misbehaviour."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer
from joserfc import jws
from joserfc.jwk import ECKey, OKPKey, RSAKey

from seamark.formats.runtime.clock import Clock
from seamark.metaserver.settings.settings import Settings

AnyKey = RSAKey | ECKey | OKPKey
AUDIENCE = "seamark-test"
_RSA = [RSAKey.generate_key(2048, {"kid": f"rsa-{number}"}) for number in range(2)]
"""Created once, because RSA keys take time."""


def get_rsa_key(number: int = 0) -> RSAKey:
    return _RSA[number]


def generate_ec_key(kid: str = "ec") -> ECKey:
    return ECKey.generate_key("P-256", {"kid": kid})


def generate_okp_key(kid: str = "okp") -> OKPKey:
    return OKPKey.generate_key("Ed25519", {"kid": kid})


class LocalIssuer:
    """An OpenID issuer whose keys, discovery document and faults a test sets.

    It counts the requests for its documents.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.url = ""
        self.published_keys: list[dict[str, Any]] = []
        self.discovery_count = 0
        self.key_request_count = 0
        self.key_answer: web.StreamResponse | None = None
        """If set, the answer to requests for the keys, which can be an error."""
        self.discovery: dict[str, Any] = {}
        """Fields that replace those of the correct discovery document."""

    def publish(self, *keys: AnyKey) -> None:
        self.published_keys = [key.as_dict(private=False) for key in keys]

    def make_settings(self, **options: Any) -> Settings:
        return Settings(**{"auth": "oidc", "oidc_issuer": self.url, "oidc_audience": AUDIENCE, **options})

    def build_claims(self, **options: Any) -> dict[str, Any]:
        """Return the claims of a token that is valid for five minutes.

        `options` replace claims. The value None removes a claim.
        """
        now_s = self.clock.now_ms() // 1000
        all_claims = {
            "iss": self.url, "aud": AUDIENCE, "sub": "ann", "iat": now_s, "nbf": now_s, "exp": now_s + 300, **options,
        }  # fmt: skip
        return {name: value for name, value in all_claims.items() if value is not None}

    def make_token(
        self, key: AnyKey, algorithm: str = "RS256", header: dict[str, Any] | None = None, **claims: Any
    ) -> str:
        options = {"alg": algorithm, "kid": key.kid, **(header or {})}
        header_fields = {name: value for name, value in options.items() if value is not None}
        payload = json.dumps(self.build_claims(**claims)).encode()
        registry = jws.JWSRegistry(algorithms=[algorithm], strict_check_header=False)
        registry.max_header_length = registry.max_payload_length = 1 << 20
        return jws.serialize_compact(header_fields, payload, key, registry=registry)

    async def _discover(self, request: web.Request) -> web.Response:
        self.discovery_count += 1
        return web.json_response({"issuer": self.url, "jwks_uri": f"{self.url}/keys", **self.discovery})

    async def _answer_moved_keys(self, request: web.Request) -> web.Response:
        return web.json_response({"keys": self.published_keys})

    async def _answer_keys(self, request: web.Request) -> web.StreamResponse:
        self.key_request_count += 1
        if self.key_answer is not None:
            return web.Response(
                status=self.key_answer.status,
                headers=self.key_answer.headers,
                body=getattr(self.key_answer, "body", None),
            )
        return web.json_response({"keys": self.published_keys})


@asynccontextmanager
async def run_issuer(clock: Clock) -> AsyncIterator[LocalIssuer]:
    issuer = LocalIssuer(clock)
    app = web.Application()
    app.router.add_get("/.well-known/openid-configuration", issuer._discover)
    app.router.add_get("/keys", issuer._answer_keys)
    app.router.add_get("/moved", issuer._answer_moved_keys)
    async with TestServer(app, host="127.0.0.1") as server:
        issuer.url = str(server.make_url("")).rstrip("/")
        yield issuer


def forge_token(header: dict[str, Any], claims: dict[str, Any], signature: bytes = b"") -> str:
    """Return a JSON Web Token of a header, claims and a signature. The parts need not be valid."""
    parts = (json.dumps(header).encode(), json.dumps(claims).encode(), signature)
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)
