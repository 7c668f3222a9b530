"""fake-gcs-server, an emulator of Google Cloud Storage, with its data in memory.

`make services` builds it into `.cache/bin`. The emulator serves the JSON API, and reads and listings of the XML API. It
has neither the uploads of the XML API nor their condition `x-goog-if-generation-match`, which obstore uses. So a proxy
(`tests/services/clouds/gcs_proxy.py`) turns such an upload into the upload of the JSON API with the same condition, and
answers as the XML API does. The emulator accepts every token.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import requests
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.services.clouds.gcs_proxy import TOKEN_PATH
from tests.services.process import (
    CACHE,
    REPO,
    ManagedProcess,
    ServiceFailed,
    choose_free_port,
    is_http_ok,
    is_port_open,
)

_PROGRAM = CACHE / "bin" / "fake-gcs-server"


@dataclass
class GoogleStorage:
    """A running emulator. `endpoint` is the address of the proxy in front of it."""

    endpoint: str
    process: ManagedProcess
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def create_bucket(self) -> str:
        """Create an empty bucket, and return its location."""
        name = f"seamark-{next(self._numbers)}"
        requests.post(f"{self.endpoint}/storage/v1/b", json={"name": name}, timeout=10).raise_for_status()
        return f"gs://{name}"

    def make_settings(self) -> dict[str, str]:
        """Return the settings with which a server uses the emulator."""
        key = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
        return {"gcs_endpoint": self.endpoint, "gcs_service_account_key": json.dumps(key)}

    def make_service_account(self) -> dict[str, str]:
        """Return the key of a service account. The proxy issues tokens to it."""
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        text = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return {
            "type": "service_account",
            "project_id": "tests",
            "private_key_id": "1",
            "private_key": text.decode(),
            "client_email": "engine@tests.iam.gserviceaccount.com",
            "client_id": "1",
            "token_uri": f"{self.endpoint}{TOKEN_PATH}",
        }

    def make_client_properties(self) -> dict[str, str]:
        """Return the properties with which PyIceberg and Seamark's client use the emulator."""
        expires = datetime.now(UTC) + timedelta(hours=1)
        return {
            "gcs.service.host": self.endpoint,
            "gcs.oauth2.token": "any",
            "gcs.oauth2.token-expires-at": str(int(expires.timestamp() * 1000)),
        }


@contextmanager
def run_gcs(folder: Path) -> Iterator[GoogleStorage]:
    """Start an emulator and its proxy, and yield the emulator."""
    if not _PROGRAM.exists():
        raise ServiceFailed("fake-gcs-server is not installed; run `make services`")
    port, proxy_port = choose_free_port(), choose_free_port()
    upstream, endpoint = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{proxy_port}"
    argv = [
        *(str(_PROGRAM), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory"),
        *("-public-host", f"127.0.0.1:{proxy_port}", "-external-url", endpoint, "-log-level", "error"),
    ]
    with ManagedProcess(argv, log=folder / "gcs.log", cwd=folder) as process:
        process.start(lambda: is_http_ok(f"{upstream}/storage/v1/b"), timeout_s=60)
        argv = [sys.executable, "-m", "tests.services.clouds.gcs_proxy", upstream, str(proxy_port)]
        with ManagedProcess(argv, log=folder / "gcs-proxy.log", cwd=REPO) as proxy:
            proxy.start(lambda: is_port_open(proxy_port), timeout_s=60)
            yield GoogleStorage(endpoint, process)
