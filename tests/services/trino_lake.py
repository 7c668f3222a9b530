"""One Trino for all tests that do not break it, over two Seamark servers, with spooled results and https."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.services.s3 import S3
from tests.services.seamark import Seamark
from tests.services.trino import CATALOG, Trino, trino_server

REMOTE = "remote"
"""The name of the catalog of the server whose tables are in S3."""


@dataclass
class TrinoLake:
    """Trino with two Seamark servers.

    Attributes:
        servers: The servers, by catalog name.
        client_properties: The properties with which other engines open each catalog, by catalog name.
        ca_path: The CA certificate of Trino's HTTPS endpoint.
    """

    trino: Trino
    servers: dict[str, Seamark]
    client_properties: dict[str, dict[str, str]]
    ca_path: Path

    @property
    def seamark(self) -> Seamark:
        """The server of the tables on local files."""
        return self.servers[CATALOG]


@contextmanager
def open_trino_lake(folder: Path, s3: S3, properties: Mapping[str, str]) -> Iterator[TrinoLake]:
    """Open both servers and Trino. `properties` are additional properties of Trino.

    Each catalog of Trino has a second one, `…_by_name`, in which plan tables have names.
    """
    warehouse = f"s3://{s3.create_bucket()}/warehouse"
    certificate, key = create_self_signed(folder)
    key_and_certificate = folder / "trino.pem"
    key_and_certificate.write_text(key.read_text() + certificate.read_text())
    with (
        Seamark(folder / "local") as local_server,
        Seamark(folder / "remote", warehouse=warehouse, env=s3.build_seamark_env()) as remote_server,
        trino_server(
            folder / "trino",
            uri=local_server.base_url,
            more_catalogs={REMOTE: remote_server.base_url},
            s3=s3,
            spooling=True,
            certificate=key_and_certificate,
            by_name=True,
            properties=properties,
        ) as trino,
    ):
        servers = {CATALOG: local_server, REMOTE: remote_server}
        yield TrinoLake(trino, servers, {CATALOG: {}, REMOTE: s3.build_client_properties()}, certificate)


def create_self_signed(folder: Path) -> tuple[Path, Path]:
    """Write a self-signed certificate for this machine, and its key. Return the paths of both files."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    key_options = [
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    name_options = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    outputs = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", "req", "-x509", *key_options, *name_options, *outputs], check=True, capture_output=True)
    return certificate, key
