"""Attacks on a running server by someone with a copy of the database."""

from __future__ import annotations

import base64
import json
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import requests
from joserfc import jwt
from joserfc.jwk import OctKey

from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.access.tokens import create_token
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.open import open_store
from tests.server.rig import build_settings
from tests.services.seamark import Seamark


@pytest.fixture
async def secret(tmp_path: Path) -> str:
    clock = SystemClock()
    home = tmp_path / "seamark"
    home.mkdir()
    async with open_store(build_settings(home).make_database_url(), clock=clock) as store:
        return await create_token(store, clock, "root", None, [Grant("root", "admin")])


def test_token_signed_with_any_content_of_a_database_copy_is_rejected(
    secret: str, start_seamark: Callable[..., Seamark]
) -> None:
    session = requests.Session()
    server = start_seamark(flags=("--auth", "token"), env={"SEAMARK_ENCRYPTION_KEY": ""})

    def request_status(token: str) -> int:
        url = f"{server.base_url}/api/v1/tokens"
        return session.get(url, headers={"Authorization": f"Bearer {token}"}, timeout=30).status_code

    form = {"grant_type": "client_credentials", "client_secret": secret}
    real_token = requests.post(f"{server.base_url}/v1/oauth/tokens", data=form, timeout=30).json()["access_token"]
    assert request_status(real_token) == 200
    with sqlite3.connect(f"file:{server.home / 'seamark.db'}?mode=ro", uri=True) as copy:
        stored_bytes = [bytes(row[0]) for row in copy.execute("SELECT value FROM secrets")]
        digest = copy.execute("SELECT digest FROM tokens WHERE name = 'root'").fetchone()[0]
    copy.close()
    assert stored_bytes
    now_s = int(time.time())
    claims = {"iss": "seamark", "aud": "seamark", "sub": "root", "iat": now_s, "exp": now_s + 600, "token": digest}
    head = base64.urlsafe_b64decode(real_token.split(".")[0] + "==")
    kid = json.loads(head)["kid"]
    key_bytes = 32
    candidates = [
        value[start : start + key_bytes]
        for value in stored_bytes
        for start in range(max(1, len(value) - key_bytes + 1))
    ]
    for key in [*stored_bytes, *candidates]:
        for header in ({"alg": "HS256", "kid": kid}, {"alg": "HS256", "kid": "seamark"}):
            assert request_status(jwt.encode(header, claims, OctKey.import_key(key))) == 401
