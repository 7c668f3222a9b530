"""Azurite, Microsoft's emulator of Azure storage, with its data in memory.

`make services` puts it into `.cache/azurite`. It checks the signatures of keys and of SAS. It emulates the Blob
service, without a hierarchical namespace.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from azure.storage.blob import BlobServiceClient

from tests.services.process import CACHE, ManagedProcess, ServiceFailed, choose_free_port, is_port_open

ACCOUNT = "devstoreaccount1"
# The emulator's key is public, because every installation has the same key.
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
HOST = f"{ACCOUNT}.dfs.core.windows.net"
"""The host of the account in locations. The emulator has another address, which the setting azure_endpoint states."""
_PROGRAM = CACHE / "azurite" / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"


@dataclass
class Azurite:
    """A running emulator. `endpoint` is the URL of the Blob service of its account."""

    endpoint: str
    process: ManagedProcess
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def make_client(self) -> BlobServiceClient:
        return BlobServiceClient(self.endpoint, credential=ACCOUNT_KEY, retry_total=0)

    def create_container(self) -> str:
        """Create an empty container, and return its location."""
        name = f"seamark-{next(self._numbers)}"
        with self.make_client() as client:
            client.create_container(name)
        return f"abfss://{name}@{HOST}"

    def make_connection_string(self) -> str:
        """Return the connection string with which clients of Azure connect to the account."""
        scheme = self.endpoint.partition(":")[0]
        return (
            f"DefaultEndpointsProtocol={scheme};AccountName={ACCOUNT};AccountKey={ACCOUNT_KEY};"
            f"BlobEndpoint={self.endpoint};"
        )

    def make_settings(self) -> dict[str, str]:
        """Return the settings with which a server uses this account."""
        return {"azure_endpoint": self.endpoint, "azure_account_key": ACCOUNT_KEY}


@contextmanager
def run_azurite(folder: Path, *arguments: str, scheme: str = "http") -> Iterator[Azurite]:
    """Start an emulator, and yield it. `arguments` are additional arguments of its command."""
    if not _PROGRAM.exists():
        raise ServiceFailed("Azurite is not installed; run `make services`")
    port = choose_free_port()
    argv: Sequence[str] = [
        *("node", str(_PROGRAM), "--blobHost", "127.0.0.1", "--blobPort", str(port)),
        *("--inMemoryPersistence", "--silent", "--disableTelemetry", "--skipApiVersionCheck"),
        *arguments,
    ]
    with ManagedProcess(argv, log=folder / "azurite.log", cwd=folder) as process:
        process.start(lambda: is_port_open(port), timeout_s=60)
        yield Azurite(f"{scheme}://127.0.0.1:{port}/{ACCOUNT}", process)
