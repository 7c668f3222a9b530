"""Tests that no secret appears in logs, representations, the audit log, answers or files."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog

from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.access.tokens import compute_digest, create_token
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.open import open_store
from tests.server.rig import build_settings, run_server


async def test_no_token_appears_in_logs_audit_answers_or_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    clock = SystemClock()
    async with open_store(build_settings(tmp_path).make_database_url(), clock=clock) as store:
        secret = await create_token(store, clock, "ann", None, [Grant("ann", "admin")])
    texts: list[str] = []
    with structlog.testing.capture_logs() as logs:
        async with run_server(tmp_path, auth="token") as server:

            async def send(method: str, path: str, **options: object) -> str:
                async with server.http.request(method, server.url + path, **options) as answer:  # type: ignore[arg-type]
                    texts.append(f"{answer.headers} {await answer.text()}")
                    return await answer.text()

            bearer = {"Authorization": f"Bearer {secret}"}
            await send("GET", "/v1/config", headers=bearer)
            await send("GET", "/v1/config", headers={"Authorization": f"Basic {secret}"})
            await send("GET", "/v1/config", headers={"Authorization": f"Bearer x{secret}"})
            await send("POST", "/v1/namespaces", headers=bearer, json={"namespace": ["made"]})
            await send("GET", "/api/v1/tokens", headers=bearer)
            form = {"grant_type": "client_credentials", "client_id": "bob", "client_secret": secret}
            await send("POST", "/v1/oauth/tokens", data=form)
            await send("POST", f"/v1/oauth/tokens?client_secret={secret}", data={"grant_type": "x"})
            await send("GET", f"/v1/namespaces?token={secret}")
            stored_token = (await server.components.authenticator.find_login(secret)).token
            assert stored_token is not None
            jwt, _ = server.components.authenticator.issuer.issue(stored_token)
            await send("GET", "/v1/config", headers={"Authorization": f"Bearer {jwt}"})
            await send("GET", "/v1/config", headers={"Authorization": f"Bearer {jwt}x"})
            await server.components.audit.flush()
            audit = repr(await server.components.store.read_audit_records(None, 1000))
            reprs = repr(server.components.authenticator) + repr(vars(server.components.authenticator.issuer))
    all_texts = {"answers": str(texts), "logs": str(logs), "audit": audit, "stdlib": caplog.text, "repr": reprs}
    assert len(logs) > 5
    assert "createNamespace" in audit
    for source, text in all_texts.items():
        for hidden_text in (secret, secret.removeprefix("smk_"), jwt, jwt.rpartition(".")[2], compute_digest(secret)):
            assert hidden_text not in text, source
    for file in tmp_path.rglob("*"):
        if file.is_file():
            assert secret.encode() not in file.read_bytes()
            assert jwt.encode() not in file.read_bytes()


def test_settings_show_no_secrets_as_text() -> None:
    settings = Settings(
        database="postgresql://u:hunter2@db/x?password=hunter2",
        s3_access_key_id="hunter2",
        s3_secret_access_key="hunter2",
        webhook_secret="hunter2",
        webhook_urls=("https://u:hunter2@x/hunter2",),
    )
    assert "hunter2" not in str(settings.redact())
    assert "hunter2" not in repr(settings)
    assert "hunter2" not in str(settings)
