"""Decrypts and encrypts Parquet footers (parquet-format: Encryption.md, "File Format").

A decrypted footer is converted to the footer of an unencrypted file, so all other code handles only this form. The
ciphers of the column chunks are returned separately. A footer is either encrypted or signed. In a signed footer, the
metadata of an encrypted column is encrypted separately, and an unencrypted copy of the metadata has no statistics.
"""

from __future__ import annotations

import hmac
import os
import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

from seamark.connector.parquet.encryption.modules import (
    FILE_ID_BYTES,
    NONCE_BYTES,
    ORDINAL_MAX,
    TAG_BYTES,
    Module,
    ModuleCipher,
    Undecryptable,
)
from seamark.formats.iceberg.files import _footer, thrift
from seamark.formats.iceberg.files.footer import (
    COLUMNS,
    ENCRYPTED_MAGIC,
    MAGIC,
    encode_binary,
    encode_fields,
    encode_structures,
)
from seamark.formats.iceberg.files.thrift import BINARY, LIST, STRUCT

SIGNATURE_BYTES = NONCE_BYTES + TAG_BYTES
# Field ids of FileMetaData.
_GROUPS, _ALGORITHM, _KEY_METADATA = 4, 8, 9
# Field ids of ColumnChunk.
_METADATA, _CRYPTO, _ENCRYPTED_METADATA = 3, 8, 9
_SECRET = frozenset({12, 13, 16, 17})
"""The fields of ColumnMetaData that must be encrypted: statistics of values, encodings, sizes and geometries."""
# Field ids of EncryptionAlgorithm. Both algorithms have an AAD prefix, a unique id, and a flag that is true if readers
# must supply the prefix.
_GCM, _GCM_CTR = 1, 2
_PREFIX, _UNIQUE, _SUPPLY = 1, 2, 3
# Field ids of ColumnCryptoMetaData.
_FOOTER_KEY, _COLUMN_KEY = 1, 2

Raw = dict[int, tuple[int, bytes]]


class FileKeys(Protocol):
    """Provides the keys of encrypted files."""

    def find_key(self, metadata: bytes | None, column: str | None) -> bytes:
        """Return the key that is identified by key metadata of a file.

        Args:
            metadata: The key metadata in the file, or None.
            column: The path of the column, or None for the footer.

        Raises:
            KeyUnavailable: The key cannot be unwrapped.
        """

    @property
    def aad_prefix(self) -> bytes | None:
        """The AAD prefix of files that do not contain their AAD prefix, or None."""


class OpenedFooter(NamedTuple):
    """A decrypted footer, and the ciphers of the file.

    Attributes:
        plain: The FileMetaData in the form for an unencrypted file.
        ciphers: The ciphers by row group and column, with None for a column that is not encrypted.
        keys: The key metadata of columns with their own key, by path.
        footer_metadata: The key metadata of the footer's key, or None.
        footer_key_bytes: The length of the footer's key.
        is_signed: Whether the footer is signed instead of encrypted.
        ctr_pages: Whether pages are encrypted without a tag.
        has_prefix: Whether the AAD has a prefix.
    """

    plain: bytes
    ciphers: Sequence[Sequence[ModuleCipher | None]]
    keys: Mapping[str, bytes]
    footer_metadata: bytes | None
    footer_key_bytes: int
    is_signed: bool
    ctr_pages: bool
    has_prefix: bool


def is_signed(footer: bytes) -> bool:
    """Return whether an unencrypted footer belongs to a file with encrypted columns.

    Only the footer of such a file has a field for the encryption algorithm or for the key of its signature.

    Raises:
        ValueError: The footer is invalid.
    """
    return any(number in (_ALGORITHM, _KEY_METADATA) for number, *_ in _footer.spans(footer, 0)[0])


def open_footer(data: bytes, keys: FileKeys, *, encrypted: bool) -> OpenedFooter:
    """Decrypt an encrypted footer, or verify the signature of a signed footer.

    Args:
        data: The bytes after the pages and before the length of the footer.
        keys: The keys of the file.
        encrypted: Whether the file has the magic number PARE.

    Raises:
        Undecryptable: The key is wrong, or the bytes were changed.
        KeyUnavailable: A key cannot be unwrapped.
        ValueError: The bytes are not a footer.
    """
    if encrypted:
        crypto, end = thrift.read_structure(data)
        # Fields 1 and 2 of FileCryptoMetaData are the algorithm and the key metadata.
        fields: Mapping[int, tuple[int, object]] = {
            _ALGORITHM: crypto.get(1, (0, None)),
            _KEY_METADATA: crypto.get(2, (0, None)),
        }
    else:
        spans, end = _footer.spans(data, 0)
        encryption_fields = encode_fields(
            {
                number: (kind, data[begin:stop])
                for number, kind, begin, stop in spans
                if number in (_ALGORITHM, _KEY_METADATA)
            }
        )
        fields = thrift.read_structure(encryption_fields)[0]
    algorithm, file_aad, has_prefix = _read_algorithm(fields.get(_ALGORITHM, (0, None)), keys)
    kind, value = fields.get(_KEY_METADATA, (0, None))
    metadata = bytes(value) if kind == BINARY and isinstance(value, bytes) else None
    key, remaining = keys.find_key(metadata, None), data[end:]
    footer_cipher = ModuleCipher(key, file_aad, ctr_pages=algorithm == _GCM_CTR)
    if encrypted:
        try:
            plain_footer = footer_cipher.decrypt_footer(remaining)
        except Undecryptable:
            if file_aad:
                raise
            file_aad = None
            footer_cipher = ModuleCipher(key, None, ctr_pages=algorithm == _GCM_CTR)
            plain_footer = footer_cipher.decrypt_footer(remaining)
    else:
        plain_footer = data[:end]
        if len(remaining) != SIGNATURE_BYTES or not hmac.compare_digest(
            footer_cipher.compute_signature(plain_footer, remaining[:NONCE_BYTES]), remaining
        ):
            raise Undecryptable("the signature does not match the footer: the key is wrong, or the file was changed")
    decoder = _FooterDecoder(keys, footer_cipher, file_aad, ctr_pages=algorithm == _GCM_CTR, signed=not encrypted)
    plain_footer = decoder.strip_encryption(plain_footer)
    return OpenedFooter(
        plain_footer,
        decoder.ciphers,
        decoder.key_metadata_by_column,
        metadata,
        footer_cipher.key_bytes,
        not encrypted,
        algorithm == _GCM_CTR,
        has_prefix,
    )


def _read_algorithm(value: tuple[int, object], keys: FileKeys) -> tuple[int, bytes | None, bool]:
    """Return the id of the algorithm, the AAD of the file, and whether the AAD has a prefix.

    The AAD is additional data that is authenticated with each encrypted part, so that parts of other files cannot be
    inserted. It consists of an optional prefix and the unique id of the file. A file may leave its prefix to the
    reader.

    Args:
        value: The type and the decoded value of the field `encryption_algorithm`.
        keys: The keys, with the prefix for a file that does not store its prefix.

    Raises:
        ValueError: The algorithm is missing or unknown.
        Undecryptable: The reader has no prefix for a file that does not store its prefix.
    """
    kind, union = value
    if kind != STRUCT or not isinstance(union, dict) or len(union) != 1:
        raise ValueError("the file has no encryption algorithm")
    number, (kind, content) = next(iter(union.items()))
    if number not in (_GCM, _GCM_CTR) or kind != STRUCT:
        raise ValueError(f"the encryption algorithm {number} is unknown")
    prefix, unique = (bytes(content.get(field, (BINARY, b""))[1] or b"") for field in (_PREFIX, _UNIQUE))
    if not prefix and content.get(_SUPPLY, (thrift.FALSE,))[0] == thrift.TRUE:
        if keys.aad_prefix is None:
            raise Undecryptable("the AAD prefix is not stored in the file, and the reader has no AAD prefix")
        prefix = keys.aad_prefix
    return number, prefix + unique, bool(prefix)


class _FooterDecoder:
    """Decrypts the metadata of the column chunks of one footer."""

    def __init__(
        self, keys: FileKeys, footer_cipher: ModuleCipher, file_aad: bytes | None, *, ctr_pages: bool, signed: bool
    ) -> None:
        self._file_keys, self._footer_cipher, self._file_aad = keys, footer_cipher, file_aad
        self._ctr_pages, self._is_signed = ctr_pages, signed
        self._ciphers: dict[bytes, ModuleCipher] = {}
        """The ciphers, by encoded ColumnCryptoMetaData."""
        self.ciphers: list[list[ModuleCipher | None]] = []
        self.key_metadata_by_column: dict[str, bytes] = {}

    def strip_encryption(self, data: bytes) -> bytes:
        """Return the FileMetaData in the form for an unencrypted file.

        The fields of the encryption are left out, and the metadata of all columns is decrypted.
        """
        spans, _ = _footer.spans(data, 0)
        fields: Raw = {
            number: (kind, data[begin:end])
            for number, kind, begin, end in spans
            if number not in (_ALGORITHM, _KEY_METADATA)
        }
        groups_offset = next((begin for number, kind, begin, _ in spans if number == _GROUPS and kind == LIST), None)
        if groups_offset is None:
            raise ValueError("the file has no row groups")
        groups = [
            self._decode_group(data, begin, ordinal)
            for ordinal, begin in enumerate(_footer.items(data, groups_offset)[:-1])
        ]
        fields[_GROUPS] = LIST, encode_structures(groups)
        return encode_fields(fields)

    def _decode_group(self, data: bytes, offset: int, ordinal: int) -> bytes:
        """Return a row group's metadata in the form for an unencrypted file, and add its columns' ciphers to `ciphers`.

        Args:
            data: The footer.
            offset: The position of the row group's metadata in the footer.
            ordinal: The ordinal of the row group in the file, from 0. Encryption stores it in 16 bits.
        """
        spans, _ = _footer.spans(data, offset)
        fields: Raw = {number: (kind, data[begin:end]) for number, kind, begin, end in spans}
        columns_offset = next((begin for number, kind, begin, _ in spans if number == COLUMNS and kind == LIST), None)
        if columns_offset is None:
            raise ValueError("a row group has no columns")
        ciphers: list[ModuleCipher | None] = []
        chunks = []
        # The positions at which the chunks begin, and the end of the last chunk.
        chunk_offsets = _footer.items(data, columns_offset)
        for column, (begin, end) in enumerate(pairwise(chunk_offsets)):
            plain_chunk, cipher = self._decode_chunk(data, begin, end, ordinal, column)
            chunks.append(plain_chunk)
            ciphers.append(cipher)
        if ordinal > ORDINAL_MAX and any(ciphers):
            raise ValueError(f"the file has more than {ORDINAL_MAX + 1:,} row groups, the maximum for encryption")
        self.ciphers.append(ciphers)
        fields[COLUMNS] = LIST, encode_structures(chunks)
        return encode_fields(fields)

    def _decode_chunk(
        self, data: bytes, offset: int, end: int, group: int, column: int
    ) -> tuple[bytes, ModuleCipher | None]:
        """Return a column chunk's metadata in the form for an unencrypted file, and the cipher of its pages.

        The cipher is None if the column is not encrypted.

        Args:
            data: The footer.
            offset: The position of the chunk's metadata in the footer.
            end: The end of the chunk's metadata in the footer.
            group: The ordinal of the row group.
            column: The ordinal of the column.
        """
        spans, _ = _footer.spans(data, offset)
        fields: Raw = {number: (kind, data[begin:stop]) for number, kind, begin, stop in spans}
        crypto = fields.pop(_CRYPTO, None)
        module = fields.pop(_ENCRYPTED_METADATA, None)
        if crypto is None:
            if module is not None:
                raise ValueError("a column without a key has encrypted metadata")
            # DuckDB encrypts all columns with the footer's key without ColumnCryptoMetaData in the chunks. Its files
            # are recognised by a footer that is encrypted without an AAD. In other files, the column is not encrypted.
            return data[offset:end], self._footer_cipher if self._file_aad is None else None
        if crypto[0] != STRUCT:
            raise ValueError("the key of a column has an unexpected type")
        cipher = self._make_cipher(bytes(crypto[1]))
        if module is not None:
            if module[0] != BINARY:
                raise ValueError("the encrypted metadata of a column has an unexpected type")
            # The bytes of a field are decoded as the only field of a structure.
            structure, _ = thrift.read_structure(encode_fields({1: (BINARY, module[1])}))
            _, encrypted_metadata = structure[1]
            metadata = cipher.create_chunk_cipher(group, column).decrypt(
                Module.COLUMN_METADATA, memoryview(encrypted_metadata)
            )
            fields[_METADATA] = STRUCT, strip_padding(metadata)
        elif self._is_signed or cipher is not self._footer_cipher:
            raise ValueError("the metadata of an encrypted column is not encrypted")
        return encode_fields(fields), cipher

    def _make_cipher(self, crypto_metadata: bytes) -> ModuleCipher:
        cipher = self._ciphers.get(crypto_metadata)
        if cipher is not None:
            return cipher
        union = thrift.read_structure(crypto_metadata)[0]
        if len(union) != 1:
            raise ValueError("a column has several keys or none")
        number, (kind, value) = next(iter(union.items()))
        if number == _FOOTER_KEY:
            cipher = self._footer_cipher
        elif number == _COLUMN_KEY and kind == STRUCT:
            # Fields 1 and 2 of EncryptionWithColumnKey are the path, as a pair (type of the elements, elements), and
            # the key metadata.
            kind, path_list = value.get(1, (0, None))
            if kind != LIST or path_list[0] != BINARY:
                raise ValueError("the key of a column has no path")
            path = b".".join(path_list[1]).decode(errors="replace")
            content = value.get(2, (BINARY, None))[1]
            metadata = bytes(content) if isinstance(content, bytes) else b""
            self.key_metadata_by_column[path] = metadata
            cipher = ModuleCipher(self._file_keys.find_key(metadata, path), self._file_aad, ctr_pages=self._ctr_pages)
        else:
            raise ValueError(f"the key of a column has the unknown kind {number}")
        self._ciphers[crypto_metadata] = cipher
        return cipher


def strip_padding(structure: bytes) -> bytes:
    """Return an encoded Thrift structure without the bytes that follow it.

    parquet-java encrypts its whole buffer, which may be longer than the structure.

    Raises:
        ValueError: The bytes do not begin with a structure.
    """
    return structure[: _footer.spans(structure, 0)[1]]


class FileKey:
    """A key of a new file, with the key metadata by which readers find the key. Its repr does not contain the key."""

    __slots__ = ("key", "metadata")

    def __init__(self, key: bytes, metadata: bytes | None) -> None:
        self.key, self.metadata = key, metadata

    def __repr__(self) -> str:
        return f"FileKey({len(self.key)} bytes)"


class FileEncryption:
    """The encryption of one new file. Its keys are used only for this file.

    Attributes:
        columns: The keys of the leaf columns of the file: None for a column that is not encrypted, and `footer` itself
            for a column that is encrypted with the footer's key.
    """

    def __init__(
        self,
        footer: FileKey,
        columns: Sequence[FileKey | None],
        *,
        signed: bool = False,
        ctr_pages: bool = False,
        aad_prefix: bytes | None = None,
    ) -> None:
        """Create the ciphers of the file.

        Args:
            footer: The key of the footer.
            columns: The key of each leaf column: `footer` itself, its own key, or None for an unencrypted column.
            signed: Whether the footer is signed instead of encrypted.
            ctr_pages: Whether pages are encrypted with AES-CTR, which has no tag, instead of AES-GCM.
            aad_prefix: The AAD prefix, which is stored in the file.

        Raises:
            ValueError: The file has more columns than can be encrypted.
        """
        if len(columns) > ORDINAL_MAX + 1:
            raise ValueError(f"an encrypted file has at most {ORDINAL_MAX + 1:,} columns, not {len(columns):,}")
        self.signed = signed
        self._footer = footer
        self._columns = columns
        unique = os.urandom(FILE_ID_BYTES)
        file_aad = (aad_prefix or b"") + unique
        fields: thrift.Fields = {_UNIQUE: (BINARY, unique)}
        if aad_prefix:
            fields[_PREFIX] = BINARY, aad_prefix
        self._algorithm = thrift.write_structure({_GCM_CTR if ctr_pages else _GCM: (STRUCT, fields)})
        self._cipher = ModuleCipher(footer.key, file_aad, ctr_pages=ctr_pages)
        self.ciphers: list[ModuleCipher | None] = [
            None
            if key is None
            else self._cipher
            if key is footer
            else ModuleCipher(key.key, file_aad, ctr_pages=ctr_pages)
            for key in columns
        ]

    @property
    def magic(self) -> bytes:
        return MAGIC if self.signed else ENCRYPTED_MAGIC

    def encrypt_chunk(self, chunk: bytes, group: int, column: int, path: Sequence[bytes]) -> bytes:
        """Return an encoded ColumnChunk with key metadata, and with only the metadata that all readers may see.

        An encrypted footer already protects the metadata of columns with the footer's key. The metadata of other
        columns is encrypted separately. A signed footer also contains that metadata in plain text, without
        statistics, for readers without keys.
        """
        key, cipher = self._columns[column], self.ciphers[column]
        if key is None or cipher is None:
            return chunk
        spans, _ = _footer.spans(chunk, 0)
        fields: Raw = {number: (kind, chunk[begin:end]) for number, kind, begin, end in spans}
        if key is self._footer:
            crypto: thrift.Fields = {_FOOTER_KEY: (STRUCT, {})}
        else:
            structure: thrift.Fields = {1: (LIST, (BINARY, list(path)))}
            if key.metadata is not None:
                structure[2] = BINARY, key.metadata
            crypto = {_COLUMN_KEY: (STRUCT, structure)}
        fields[_CRYPTO] = STRUCT, thrift.write_structure(crypto)
        if self.signed or key is not self._footer:
            metadata = bytes(fields.pop(_METADATA)[1])
            encrypted_metadata = cipher.create_chunk_cipher(group, column).encrypt(Module.COLUMN_METADATA, metadata)
            fields[_ENCRYPTED_METADATA] = BINARY, encode_binary(encrypted_metadata)
            if self.signed:
                fields[_METADATA] = STRUCT, _strip_statistics(metadata)
        return encode_fields(fields)

    def list_footer_fields(self) -> dict[int, tuple[int, bytes]]:
        """Return the additional fields of FileMetaData in a signed footer."""
        if not self.signed:
            return {}
        fields = {_ALGORITHM: (STRUCT, self._algorithm)}
        if self._footer.metadata is not None:
            fields[_KEY_METADATA] = BINARY, encode_binary(self._footer.metadata)
        return fields

    def encode_footer(self, footer: bytes) -> bytes:
        """Return the encrypted or signed footer, with its length and the magic number.

        An encrypted footer follows a structure (FileCryptoMetaData) with the algorithm and the key metadata.
        """
        if self.signed:
            data = footer + self._cipher.compute_signature(footer)
        else:
            crypto: Raw = {1: (STRUCT, self._algorithm)}
            if self._footer.metadata is not None:
                crypto[2] = BINARY, encode_binary(self._footer.metadata)
            data = encode_fields(crypto) + self._cipher.encrypt_footer(footer)
        return data + struct.pack("<I", len(data)) + self.magic


def _strip_statistics(metadata: bytes) -> bytes:
    spans, _ = _footer.spans(metadata, 0)
    return encode_fields(
        {number: (kind, metadata[begin:end]) for number, kind, begin, end in spans if number not in _SECRET}
    )
