"""Functions that write and read encrypted files with pyarrow."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from seamark.connector.parquet.encryption.keys import ParquetKeys

CONFIGURATION = "SEAMARK_PARQUET_TEST_SERVICE"
"""The environment variable that ConfiguredKms requires."""
MASTER_KEYS = {name: bytes([number]) * 16 for number, name in enumerate(("kf", "k1", "k2", "other"), 1)}


_AAD = b"w"
"""The additional data that AES-GCM authenticates with each wrapped key."""


class PyArrowKms(pe.KmsClient):  # type: ignore[misc]
    """A KMS client for pyarrow that shares no code with Seamark."""

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> str:
        nonce = bytes(12)
        return base64.b64encode(AESGCM(MASTER_KEYS[master_key_identifier]).encrypt(nonce, key_bytes, _AAD)).decode()

    def unwrap_key(self, wrapped_key: str, master_key_identifier: str) -> bytes:
        return AESGCM(MASTER_KEYS[master_key_identifier]).decrypt(bytes(12), base64.b64decode(wrapped_key), _AAD)


class ConfiguredKms(PyArrowKms):
    """A KMS client that requires configuration, like the client of a real service.

    The constructor fails if the environment variable of the configuration is not set.
    """

    def __init__(self) -> None:
        super().__init__()
        if os.environ[CONFIGURATION] != "the service's address":
            raise ValueError(f"the environment variable {CONFIGURATION} must be the address of the key service")


def write_key_file(folder: Path, *namespaces: str) -> str:
    """Write a key file that allows `namespaces` for all master keys, and return its path."""
    path = folder / "keys.json"
    path.write_text(json.dumps({"namespaces": dict.fromkeys(MASTER_KEYS, namespaces)}))
    return str(path)


def build_keys(replaced_keys: Mapping[str, str] | None = None) -> ParquetKeys:
    return ParquetKeys(PyArrowKms(), replaced_keys)


def _build_factory() -> pe.CryptoFactory:
    return pe.CryptoFactory(lambda _: PyArrowKms())


def build_encryption(config: pe.EncryptionConfiguration) -> Any:
    return _build_factory().file_encryption_properties(pe.KmsConnectionConfig(), config)


def build_configuration(columns: Mapping[str, list[str]] | None = None, **options: Any) -> pe.EncryptionConfiguration:
    """Return pyarrow's configuration for encrypting a file.

    Args:
        columns: The columns by the name of the master key. By default, the footer's key encrypts all columns.
        options: Other fields of the configuration.
    """
    return pe.EncryptionConfiguration(
        footer_key="kf",
        column_keys=columns or {},
        uniform_encryption=not columns,
        cache_lifetime=timedelta(minutes=5),
        **options,
    )


def build_decryption() -> Any:
    return _build_factory().file_decryption_properties(
        pe.KmsConnectionConfig(), pe.DecryptionConfiguration(cache_lifetime=timedelta(minutes=5))
    )


def read_decrypted(path: Path) -> pa.Table:
    with pq.ParquetFile(path, decryption_properties=build_decryption(), page_checksum_verification=True) as file:
        return file.read()
