"""How new files are encrypted: as the file whose rows they get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from seamark.connector.client.storage import Storage
from seamark.connector.parquet.copy.leaves import Leaf
from seamark.connector.parquet.copy.source import SourceFile
from seamark.connector.parquet.encryption.footers import FileEncryption
from seamark.connector.parquet.encryption.keys import EncryptionScheme, ParquetKeys, Protection, scheme_of
from seamark.connector.parquet.encryption.kms import KeyUnavailable
from seamark.metaserver.iceberg.files.parquet import Unreadable


class FileProtection(NamedTuple):
    """Encryption of new files. `leaves`: their leaf columns, which the scheme's columns are for."""

    scheme: EncryptionScheme
    leaves: Sequence[Leaf]
    keys: ParquetKeys

    def new_encryption(self, location: str) -> FileEncryption:
        """With new keys, for one file. Unreadable."""
        try:
            return self.keys.new_encryption(self.scheme)
        except (KeyUnavailable, ValueError) as error:
            raise Unreadable(location, f"it cannot be encrypted: {error}") from None

    @property
    def secret_ids(self) -> frozenset[int]:
        """The ids of all columns with an encrypted part: their values may be in no file that is not encrypted."""
        protected = zip(self.leaves, self.scheme.columns, strict=True)
        paths = (leaf.ids for leaf, how in protected if how is not Protection.PLAIN)
        return frozenset(number for path in paths for number in path if number is not None)


def protection_of(source: SourceFile, leaves: Sequence[Leaf], keys: ParquetKeys) -> FileProtection | None:
    """How a new file with these leaf columns is encrypted if it gets rows of `source`; None: not at all. Unreadable if
    that is uncertain."""
    if source.encryption is None:
        return None
    positions = {leaf.ids: position for position, leaf in enumerate(source.leaves)}
    tops = {leaf.ids[0] for leaf in source.leaves}
    columns = [positions.get(leaf.ids, -1) for leaf in leaves]
    for leaf, column in zip(leaves, columns, strict=True):
        if column < 0 and (leaf.ids[0] in tops or None in tops):
            raise source.unreadable(
                "it is encrypted, and its columns have no field ids or another structure, so the key of each new "
                "column is uncertain"
            )
    try:
        scheme = scheme_of(source.encryption, [leaf.path for leaf in source.leaves], columns)
    except KeyUnavailable as error:
        raise source.unreadable(str(error)) from None
    return FileProtection(scheme, leaves, keys)


def protection_of_file(
    location: str, storage: Storage, leaves: Sequence[Leaf], keys: ParquetKeys
) -> FileProtection | None:
    """As `protection_of`, of a file that is opened for it. Unreadable."""
    with SourceFile(location, storage, keys=keys) as source:
        return protection_of(source, leaves, keys)
