"""Reads and writes the key metadata of parquet's key tools, by which readers find the keys of a file.

The format is that of parquet-java (crypto.keytools.KeyMaterial).

Each file has its own keys, and contains them in wrapped form in JSON. A key is wrapped by a master key of a key
management service, or by a key encryption key that is itself wrapped by a master key ("double wrapping").
"""

from __future__ import annotations

import base64
import binascii
import os
from typing import NamedTuple

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from seamark.connector.parquet.encryption.kms import KeyUnavailable, KeyWrapper
from seamark.connector.parquet.encryption.modules import KEY_BYTES, NONCE_BYTES
from seamark.formats.runtime.decoding import convert_json

_TYPE = "PKMT1"
_DEFAULT = "DEFAULT"
_KEY_ENCRYPTION_KEY_BYTES = 16
_METADATA_BYTES_MAX = 64 << 10


class KeyMaterial(msgspec.Struct, rename="camel", omit_defaults=True, frozen=True):
    """The JSON of the key metadata. All readers of the file can read it, so it contains only wrapped keys."""

    key_material_type: str = ""
    internal_storage: bool | None = None
    is_footer_key: bool | None = None
    kms_instance_id: str | None = msgspec.field(default=None, name="kmsInstanceID")
    kms_instance_url: str | None = msgspec.field(default=None, name="kmsInstanceURL")
    master_key_id: str = msgspec.field(default="", name="masterKeyID")
    wrapped_key: str = msgspec.field(default="", name="wrappedDEK")
    double_wrapping: bool | None = None
    key_encryption_key_id: str | None = msgspec.field(default=None, name="keyEncryptionKeyID")
    wrapped_key_encryption_key: str | None = msgspec.field(default=None, name="wrappedKEK")

    @staticmethod
    def parse(metadata: bytes | None) -> KeyMaterial:
        """Decode key metadata.

        Raises:
            KeyUnavailable: The metadata was not written by parquet's key tools, or the keys are not in the file.
        """
        if not metadata or len(metadata) > _METADATA_BYTES_MAX:
            raise KeyUnavailable(
                f"the key metadata of {len(metadata or b''):,} bytes was not written by parquet's key tools"
            )
        try:
            material = convert_json(metadata, KeyMaterial)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise KeyUnavailable("the key metadata was not written by parquet's key tools") from None
        if material.key_material_type != _TYPE:
            raise KeyUnavailable(f"the key metadata has the type {material.key_material_type[:20]!r}, not {_TYPE}")
        if not material.internal_storage:
            raise KeyUnavailable("the key material is not in the file; external key material is not supported")
        return material

    @property
    def reference(self) -> KeyReference:
        return KeyReference(
            self.master_key_id,
            bool(self.double_wrapping),
            self.kms_instance_id or _DEFAULT,
            self.kms_instance_url or _DEFAULT,
        )


class KeyReference(NamedTuple):
    """The way in which the keys of a file are wrapped.

    Attributes:
        master: The name of the master key.
        double_wrapping: Whether the master key wraps a key encryption key, which wraps the key of the file.
        key_bytes: The length of the keys of the file in bytes.
        instance_id: The id of the key service, which readers may use.
        instance_url: The URL of the key service, which readers may use.
    """

    master: str
    double_wrapping: bool = False
    instance_id: str = _DEFAULT
    instance_url: str = _DEFAULT
    key_bytes: int = 16


def unwrap_file_key(material: KeyMaterial, wrapper: KeyWrapper) -> bytes:
    """Return the key of a file.

    With double wrapping, the master key wraps only a key encryption key (KEK), which wraps the key of the file.

    Raises:
        KeyUnavailable: The key cannot be unwrapped.
    """
    if not material.double_wrapping:
        key = wrapper.unwrap(material.wrapped_key, material.master_key_id)
    else:
        key_encryption_key = wrapper.unwrap(material.wrapped_key_encryption_key or "", material.master_key_id)
        try:
            wrapped_key = base64.b64decode(material.wrapped_key, validate=True)
            aad = base64.b64decode(material.key_encryption_key_id or "", validate=True)
            key = AESGCM(key_encryption_key).decrypt(wrapped_key[:NONCE_BYTES], wrapped_key[NONCE_BYTES:], aad)
        except (InvalidTag, ValueError, binascii.Error):
            raise KeyUnavailable("the key was not wrapped by its key encryption key") from None
    if len(key) not in KEY_BYTES:
        raise KeyUnavailable(f"the key service returned a key of {len(key)} bytes for {material.master_key_id!r}")
    return key


def wrap_file_key(key: bytes, reference: KeyReference, wrapper: KeyWrapper, *, footer: bool) -> bytes:
    """Wrap a key, and return its key metadata.

    With double wrapping, a new key encryption key (KEK) wraps the key, and the master key wraps the KEK. Only the
    metadata of the footer's key names the key service.

    Args:
        key: The key of a footer or a column.
        reference: The master key, and the way in which keys are wrapped.
        wrapper: The key service.
        footer: Whether the key is the key of a footer.

    Raises:
        KeyUnavailable: The key cannot be wrapped.
    """
    kek_id = wrapped_kek = None
    if reference.double_wrapping:
        key_encryption_key, kek_id_bytes = os.urandom(_KEY_ENCRYPTION_KEY_BYTES), os.urandom(_KEY_ENCRYPTION_KEY_BYTES)
        nonce = os.urandom(NONCE_BYTES)
        wrapped_text = base64.b64encode(nonce + AESGCM(key_encryption_key).encrypt(nonce, key, kek_id_bytes)).decode()
        kek_id, wrapped_kek = (
            base64.b64encode(kek_id_bytes).decode(),
            wrapper.wrap(key_encryption_key, reference.master),
        )
    else:
        wrapped_text = wrapper.wrap(key, reference.master)
    return msgspec.json.encode(
        KeyMaterial(
            key_material_type=_TYPE,
            internal_storage=True,
            is_footer_key=footer,
            kms_instance_id=reference.instance_id if footer else None,
            kms_instance_url=reference.instance_url if footer else None,
            master_key_id=reference.master,
            wrapped_key=wrapped_text,
            double_wrapping=reference.double_wrapping,
            key_encryption_key_id=kek_id,
            wrapped_key_encryption_key=wrapped_kek,
        )
    )
