"""Encrypts and decrypts the modules of a Parquet file (parquet-format: Encryption.md).

A module is a part of the file that is encrypted separately: a footer, a page header, a page, an index or a
Bloom filter. It consists of its length (4 bytes, little endian), a nonce, the ciphertext, and a tag if the
algorithm is AES-GCM. The tag also authenticates the position of the module: the file, the row group, the
column and the page. Therefore a module must be encrypted again when it moves. With AES_GCM_CTR_V1, pages
have no tag.

Keys do not occur in any repr or message.
"""

from __future__ import annotations

import os
import struct
from enum import IntEnum

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

LENGTH_BYTES, NONCE_BYTES, TAG_BYTES = 4, 12, 16
OVERHEAD_BYTES = LENGTH_BYTES + NONCE_BYTES + TAG_BYTES
"""The number of bytes that encryption with a tag adds to a module."""
ORDINAL_MAX = 32_767
"""The maximum ordinal of row groups, columns and pages. Ordinals are signed 16-bit integers."""
KEY_BYTES = (16, 24, 32)
FILE_ID_BYTES = 8
Plain = bytes | memoryview
_FIRST_BLOCK = b"\0\0\0\1"
"""The initial value of the AES-CTR counter, which follows the nonce."""


class Module(IntEnum):
    """A kind of module: a part of a file that is encrypted separately. The values are those of parquet-format."""

    FOOTER = 0
    COLUMN_METADATA = 1
    DATA_PAGE = 2
    DICTIONARY_PAGE = 3
    DATA_PAGE_HEADER = 4
    DICTIONARY_PAGE_HEADER = 5
    COLUMN_INDEX = 6
    OFFSET_INDEX = 7
    BLOOM_HEADER = 8
    BLOOM_BITSET = 9


_PAGES = frozenset({Module.DATA_PAGE, Module.DICTIONARY_PAGE})


class Undecryptable(ValueError):
    """Raised if a module (a separately encrypted part of a Parquet file) cannot be decrypted.

    The key is wrong, or the bytes were changed or moved.
    """


class ModuleCipher:
    """Encrypts and decrypts the modules of one file with one key.

    Attributes:
        file_aad: The file's AAD prefix and its unique id. It is None for a file that DuckDB has written: its tags do
            not authenticate positions, and its page headers contain the sizes before the encryption.
        ctr_pages: Whether pages are encrypted without a tag.

    Raises:
        ValueError: The key has an invalid length.
    """

    def __init__(self, key: bytes, file_aad: bytes | None, *, ctr_pages: bool) -> None:
        if len(key) not in KEY_BYTES:
            raise ValueError(f"an AES key has 16, 24 or 32 bytes, not {len(key)}")
        self._gcm, self._algorithm = AESGCM(key), algorithms.AES(key)
        self._file_aad, self.ctr_pages, self.key_bytes = file_aad, ctr_pages, len(key)

    def make_footer_aad(self) -> bytes:
        return b"" if self._file_aad is None else self._file_aad + bytes([Module.FOOTER])

    def encrypt_footer(self, plaintext: bytes) -> bytes:
        return self._encrypt_gcm(plaintext, self.make_footer_aad())

    def decrypt_footer(self, module: bytes) -> bytes:
        return self._decrypt_gcm(memoryview(module), self.make_footer_aad(), Module.FOOTER)

    def compute_signature(self, footer: bytes, nonce: bytes | None = None) -> bytes:
        """Return the signature of an unencrypted footer. It consists of the nonce and the tag."""
        nonce = os.urandom(NONCE_BYTES) if nonce is None else nonce
        return nonce + self._gcm.encrypt(nonce, footer, self.make_footer_aad())[-TAG_BYTES:]

    def create_chunk_cipher(self, group: int, column: int) -> ChunkCipher:
        """Return the cipher of the modules of a column chunk.

        Raises:
            ValueError: An ordinal is too large for encryption.
        """
        if group > ORDINAL_MAX or column > ORDINAL_MAX:
            raise ValueError(
                f"the row group {group:,} or the column {column:,} exceeds {ORDINAL_MAX:,}, the maximum for encryption"
            )
        return ChunkCipher(self, self._file_aad, struct.pack("<hh", group, column))

    def _encrypt_gcm(self, plaintext: Plain, aad: bytes) -> bytes:
        nonce = os.urandom(NONCE_BYTES)
        ciphertext = self._gcm.encrypt(nonce, plaintext, aad)
        return b"".join((struct.pack("<I", NONCE_BYTES + len(ciphertext)), nonce, ciphertext))

    def _decrypt_gcm(self, module: memoryview, aad: bytes, kind: Module) -> bytes:
        if len(module) < OVERHEAD_BYTES or struct.unpack_from("<I", module)[0] != len(module) - LENGTH_BYTES:
            raise Undecryptable(f"{_describe(kind)} has {len(module):,} bytes, which its length field contradicts")
        body = LENGTH_BYTES + NONCE_BYTES
        try:
            return self._gcm.decrypt(module[LENGTH_BYTES:body], module[body:], aad)
        except InvalidTag:
            raise Undecryptable(
                f"{_describe(kind)} cannot be decrypted: the key is wrong, or the file was changed"
            ) from None

    def _apply_ctr(self, data: Plain, nonce: bytes) -> bytes:
        """Encrypt or decrypt data with AES-CTR, which is its own inverse."""
        counter = Cipher(self._algorithm, modes.CTR(nonce + _FIRST_BLOCK)).encryptor()
        return counter.update(data) + counter.finalize()


class ChunkCipher:
    """Encrypts and decrypts the modules of one column chunk."""

    def __init__(self, cipher: ModuleCipher, file_aad: bytes | None, ordinals: bytes) -> None:
        self._cipher, self._file_aad, self._ordinals = cipher, file_aad, ordinals

    @property
    def uncounted_bytes(self) -> int:
        """The number of bytes of a page in the file that the size in its header does not include.

        Only DuckDB, whose files have no AAD, leaves the length, the nonce and the tag out of the size.
        """
        return OVERHEAD_BYTES if self._file_aad is None else 0

    def encrypt(self, module: Module, plaintext: Plain, page: int | None = None) -> bytes:
        """Encrypt a module.

        Args:
            module: The kind of the module.
            plaintext: The bytes to encrypt.
            page: The ordinal of the page if the module belongs to a data page.

        Raises:
            ValueError: The ordinal is too large for encryption.
        """
        if self._cipher.ctr_pages and module in _PAGES:
            nonce = os.urandom(NONCE_BYTES)
            length = struct.pack("<I", NONCE_BYTES + len(plaintext))
            return length + nonce + self._cipher._apply_ctr(plaintext, nonce)
        return self._cipher._encrypt_gcm(plaintext, self._make_aad(module, page))

    def decrypt(self, module: Module, data: memoryview, page: int | None = None) -> bytes:
        """Decrypt a module.

        Args:
            module: The kind of the module.
            data: The module, including its length.
            page: The ordinal of the page if the module belongs to a data page.

        Raises:
            Undecryptable: The key is wrong, or the bytes were changed or moved.
        """
        if self._cipher.ctr_pages and module in _PAGES:
            body = LENGTH_BYTES + NONCE_BYTES
            if len(data) < body or struct.unpack_from("<I", data)[0] != len(data) - LENGTH_BYTES:
                raise Undecryptable(f"{_describe(module)} has {len(data):,} bytes, which its length field contradicts")
            return self._cipher._apply_ctr(data[body:], bytes(data[LENGTH_BYTES:body]))
        return self._cipher._decrypt_gcm(data, self._make_aad(module, page), module)

    def _make_aad(self, module: Module, page: int | None) -> bytes:
        """Return the additional authenticated data (AAD) of a module, which binds it to its place in its file.

        It consists of the identity of the file, the kind of the module, and the ordinals of the row group, the column
        and the page. It is empty if the cipher has no identity of a file.

        Raises:
            ValueError: The ordinal of the page is too large for encryption.
        """
        if self._file_aad is None:
            return b""
        aad = self._file_aad + bytes([module]) + self._ordinals
        if page is None:
            return aad
        if page > ORDINAL_MAX:
            raise ValueError(f"a column chunk has more than {ORDINAL_MAX + 1:,} pages, the maximum for encryption")
        return aad + struct.pack("<h", page)


def _describe(module: Module) -> str:
    return "the " + module.name.lower().replace("_", " ")
