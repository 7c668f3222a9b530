"""Provides the keys of files, which a key management service unwraps.

A new file has the encryption of the files from which its rows come: the same encrypted columns, the same algorithm and
the same master keys. The keys of the file itself are new.

A process that works for several users, such as a job, uses a master key only for tables in namespaces that the key file
lists (`read_table_keys`). A program that reads its own files uses all keys (`read_environment_keys`).
"""

from __future__ import annotations

import base64
import binascii
import importlib
import os
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow.parquet.encryption as pe

from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.names import Name, join_name, split_name, split_table
from seamark.connector.parquet.encryption.footers import FileEncryption, FileKey, OpenedFooter
from seamark.connector.parquet.encryption.key_material import KeyMaterial, KeyReference, unwrap_file_key, wrap_file_key
from seamark.connector.parquet.encryption.kms import KeyUnavailable, KeyWrapper, Kms, MasterKeyFile
from seamark.formats.runtime.decoding import convert_json

KEY_FILE = "SEAMARK_PARQUET_KEY_FILE"
"""The environment variable for the path of a file with master keys."""
KMS_CLASS = "SEAMARK_PARQUET_KMS"
"""The environment variable with the class of a key service's client, as `module:name`.

The client is created without arguments.
"""
EVERY_NAMESPACE = "*"
"""An entry of the key file instead of a namespace that allows a master key for all tables."""
_NAME_SHOWN_MAX_CHARACTERS = 200


class Protection(Enum):
    """The protection of a column that does not have its own key."""

    PLAIN = "plain"
    FOOTER_KEY = "footer key"


class EncryptionScheme(NamedTuple):
    """The encryption of files, without the keys.

    Attributes:
        footer: The wrapping of the footer's key.
        columns: The protection of each leaf column: the wrapping of its key, or a `Protection`.
        signed: Whether the footer is readable without a key, and has a signature.
        ctr_pages: Whether pages are encrypted without a tag (the algorithm AES_GCM_CTR_V1).
    """

    footer: KeyReference
    columns: tuple[KeyReference | Protection, ...]
    signed: bool = False
    ctr_pages: bool = False


def find_scheme(source_footer: OpenedFooter, paths: Sequence[str], columns: Sequence[int]) -> EncryptionScheme:
    """Return the encryption scheme for a new file with the rows of an opened file.

    Args:
        source_footer: The footer of the file.
        paths: The paths of the leaf columns of the file.
        columns: For each leaf column of the new file, the index of the leaf column of the opened file, or -1 if that
            file does not have the column. A missing column is encrypted with the footer's key if all columns of the
            opened file are encrypted with it.

    Raises:
        KeyUnavailable: The keys were not wrapped by parquet's key tools, or the file has an AAD prefix.
    """
    if source_footer.has_prefix:
        raise KeyUnavailable(
            "the file has an AAD prefix, which identifies the file, so a new file cannot have the same prefix"
        )
    sizes = {
        number: cipher.key_bytes
        for ciphers in source_footer.ciphers
        for number, cipher in enumerate(ciphers)
        if cipher is not None
    }
    missing_leaf = Protection.FOOTER_KEY if len(sizes) == len(paths) else Protection.PLAIN

    def choose_protection(column: int) -> KeyReference | Protection:
        if column < 0:
            return missing_leaf
        if column not in sizes:
            return Protection.PLAIN
        metadata = source_footer.keys.get(paths[column])
        if metadata is None:
            return Protection.FOOTER_KEY
        return KeyMaterial.parse(metadata).reference._replace(key_bytes=sizes[column])

    footer = KeyMaterial.parse(source_footer.footer_metadata).reference._replace(
        key_bytes=source_footer.footer_key_bytes
    )
    return EncryptionScheme(
        footer, tuple(choose_protection(column) for column in columns), source_footer.is_signed, source_footer.ctr_pages
    )


class ParquetKeys:
    """Unwraps and wraps the keys of files with a key management service.

    Attributes:
        replaced_keys: The master keys that new files use in place of old master keys, by the name of the old key.
    """

    def __init__(self, kms: Kms, replaced_keys: Mapping[str, str] | None = None) -> None:
        self._wrapper, self._replaced_keys = KeyWrapper(kms), dict(replaced_keys or {})
        self.aad_prefix = None

    def find_key(self, metadata: bytes | None, column: str | None) -> bytes:
        return unwrap_file_key(KeyMaterial.parse(metadata), self._wrapper)

    def create_encryption(self, scheme: EncryptionScheme) -> FileEncryption:
        """Create the encryption of one file with new keys.

        Raises:
            KeyUnavailable: A key cannot be wrapped.
        """
        footer = self._create_key(scheme.footer, footer=True)
        columns = [
            None
            if column is Protection.PLAIN
            else footer
            if isinstance(column, Protection)
            else self._create_key(column, footer=False)
            for column in scheme.columns
        ]
        return FileEncryption(footer, columns, signed=scheme.signed, ctr_pages=scheme.ctr_pages)

    def _create_key(self, reference: KeyReference, *, footer: bool) -> FileKey:
        key = os.urandom(reference.key_bytes)
        master = self._replaced_keys.get(reference.master, reference.master)
        return FileKey(key, wrap_file_key(key, reference._replace(master=master), self._wrapper, footer=footer))

    def make_decryption_properties(self) -> Any:
        """Return the decryption properties for pyarrow's readers, which can also read unencrypted files with them."""
        wrapper = self._wrapper

        class Client(pe.KmsClient):  # type: ignore[misc]
            def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> str:
                return wrapper.wrap(key_bytes, master_key_identifier)

            def unwrap_key(self, wrapped_key: str | bytes, master_key_identifier: str) -> bytes:
                # Older versions of the client return bytes.
                text = wrapped_key.decode() if isinstance(wrapped_key, bytes) else wrapped_key
                return wrapper.unwrap(text, master_key_identifier)

        factory = pe.CryptoFactory(lambda _: Client())
        return factory.file_decryption_properties(pe.KmsConnectionConfig())


class EnvironmentKeys:
    """Loads the keys of `read_table_keys` when a file first needs them.

    Loading is delayed, because the client of a key management service may log in when it is created. The keys are not
    pickled, because each process reads its own environment variables.
    """

    def __init__(self, table: Name | None = None) -> None:
        """Create the object without keys. The keys are loaded from the environment at the first use.

        Args:
            table: The table whose files need the keys. If it is None, there are no keys.
        """
        self._table = table
        self._loaded_keys: list[ParquetKeys | None] = []

    def __call__(self) -> ParquetKeys | None:
        """Return the keys, or None if there are none.

        Raises:
            InvalidRequest: The key file or the key service is invalid.
        """
        if not self._loaded_keys:
            self._loaded_keys.append(None if self._table is None else read_table_keys(self._table))
        return self._loaded_keys[0]

    def __reduce__(self) -> tuple[type[EnvironmentKeys], tuple[Name | None]]:
        return EnvironmentKeys, (self._table,)


class _KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    """The content of the key file."""

    keys: dict[str, str] = {}
    replaced: dict[str, str] = {}
    """The names of master keys that new files use, by the name of the old master key that they replace."""
    namespaces: dict[str, list[str]] = {}
    """The namespaces for whose tables a master key may be used, or `EVERY_NAMESPACE`, by master key."""


class NamespaceKms:
    """A key service that wraps and unwraps keys for the tables of one namespace.

    It uses only the master keys that the key file lists for this namespace or for a namespace above it.
    """

    def __init__(self, kms: Kms, namespace: Sequence[str], namespaces: Mapping[str, Sequence[str]]) -> None:
        """Restrict a key service to the tables of a namespace.

        Args:
            namespaces: The namespaces of each master key, as in the key file.

        Raises:
            InvalidRequest: The name of a namespace is invalid.
        """
        self._kms, self._namespace = kms, tuple(namespace)
        self._allowed_masters = frozenset(
            master for master, names in namespaces.items() if any(_is_within(self._namespace, name) for name in names)
        )

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> str | bytes:
        self._check(master_key_identifier)
        return self._kms.wrap_key(key_bytes, master_key_identifier)

    def unwrap_key(self, wrapped_key: str, master_key_identifier: str) -> str | bytes:
        self._check(master_key_identifier)
        return self._kms.unwrap_key(wrapped_key, master_key_identifier)

    def _check(self, master: str) -> None:
        if master not in self._allowed_masters:
            raise KeyUnavailable(
                f"the master key {master[:_NAME_SHOWN_MAX_CHARACTERS]!r} is not for tables of the namespace "
                f"{join_name(self._namespace)}; an operator has to add it to `namespaces` in the file of {KEY_FILE}"
            )


def _is_within(namespace: tuple[str, ...], name: str) -> bool:
    if name == EVERY_NAMESPACE:
        return True
    try:
        levels = split_name(name)
    except ValueError as error:
        raise InvalidRequest(f"The key file has an invalid namespace: {error}") from None
    return namespace[: len(levels)] == levels


def read_environment_keys(environment: Mapping[str, str] | None = None) -> ParquetKeys | None:
    """Return all keys that the environment variables define, or None if the variables are not set.

    Raises:
        InvalidRequest: The key file or the key service is invalid. The message does not quote the key file.
    """
    configuration = _read_environment(os.environ if environment is None else environment)
    if configuration is None:
        return None
    kms, file = configuration
    return ParquetKeys(kms, replaced_keys=file.replaced)  # New files use other master keys in place of these keys.


def read_table_keys(table: Name, environment: Mapping[str, str] | None = None) -> ParquetKeys | None:
    """Return the keys that the environment variables define for the table's namespace, or None if they are not set.

    Only master keys for this namespace are used, so a job cannot decrypt a copy of a file from a different namespace.

    Raises:
        InvalidRequest: The key file or the key service is invalid.
    """
    configuration = _read_environment(os.environ if environment is None else environment)
    if configuration is None:
        return None
    kms, file = configuration
    namespace_kms = NamespaceKms(kms, split_table(table)[:-1], file.namespaces)
    return ParquetKeys(namespace_kms, replaced_keys=file.replaced)  # New files use other master keys in place of these.


def has_keys(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether the environment variables define a key file or a key service."""
    environment = os.environ if environment is None else environment
    return bool(environment.get(KEY_FILE) or environment.get(KMS_CLASS))


def _read_environment(environment: Mapping[str, str]) -> tuple[Kms, _KeyFile] | None:
    path, name = environment.get(KEY_FILE), environment.get(KMS_CLASS)
    if not path and not name:
        return None
    file = _read_key_file(Path(path)) if path else _KeyFile()
    if name:
        return _create_client(name), file
    try:
        return MasterKeyFile({key: _decode_base64(text, path or "") for key, text in file.keys.items()}), file
    except ValueError as error:
        raise InvalidRequest(f"The key file {path} is invalid: {error}") from None


def _read_key_file(path: Path) -> _KeyFile:
    try:
        return convert_json(path.read_bytes(), _KeyFile)
    except OSError as error:
        raise InvalidRequest(f"The key file {path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidRequest(
            f'The key file {path} is not a JSON object such as {{"keys": {{"name": "16, 24 or 32 bytes in base64"}}, '
            '"replaced": {"old name": "name"}, "namespaces": {"name": ["namespace"]}}'
        ) from None


def _decode_base64(text: str, path: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        raise InvalidRequest(f"The key file {path} has a key that is not base64") from None


def _create_client(name: str) -> Kms:
    module, _, attribute = name.partition(":")
    try:
        client: Kms = getattr(importlib.import_module(module), attribute)()
    except Exception as error:  # noqa: BLE001  the class may raise any exception
        raise InvalidRequest(
            f"{KMS_CLASS} is {name!r}, not module:name of a class with wrap_key and unwrap_key that can be created "
            f"without arguments: {type(error).__name__}"
        ) from None
    return client
