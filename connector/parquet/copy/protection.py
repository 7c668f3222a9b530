"""Decides how new files are encrypted: a new file has the encryption of the file from which its rows come.

Values that are derived from an encrypted column must not be stored in an unencrypted file, for example as partition
values or metrics in manifests. They must not determine the order of rows, because the order is visible in unencrypted
columns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from seamark.connector.arrow.casting import Unwritable
from seamark.connector.client.storage import Storage
from seamark.connector.parquet.copy.leaves import Leaf
from seamark.connector.parquet.copy.source import SourceFile
from seamark.connector.parquet.encryption.footers import FileEncryption
from seamark.connector.parquet.encryption.keys import EncryptionScheme, ParquetKeys, Protection, find_scheme
from seamark.connector.parquet.encryption.kms import KeyUnavailable
from seamark.formats.iceberg.files.parquet import Unreadable


class FileProtection(NamedTuple):
    """The encryption of new files.

    Attributes:
        scheme: The encryption scheme.
        leaves: The leaf columns of the new files. The scheme has an entry for each leaf column.
        keys: The keys of the files.
    """

    scheme: EncryptionScheme
    leaves: Sequence[Leaf]
    keys: ParquetKeys

    def create_encryption(self, location: str) -> FileEncryption:
        """Create the encryption of one file with new keys.

        Raises:
            Unreadable: The file cannot be encrypted.
        """
        try:
            return self.keys.create_encryption(self.scheme)
        except (KeyUnavailable, ValueError) as error:
            raise Unreadable(location, f"the file cannot be encrypted: {error}") from None

    @property
    def secret_ids(self) -> frozenset[int]:
        """The ids of all columns with an encrypted leaf column.

        Their values must not be stored in unencrypted files.
        """
        leaves_with_protection = zip(self.leaves, self.scheme.columns, strict=True)
        paths = (leaf.ids for leaf, protection in leaves_with_protection if protection is not Protection.PLAIN)
        return frozenset(number for path in paths for number in path if number is not None)

    def refuse(self, column_ids: Iterable[int], use: str) -> None:
        """Check that none of these columns is encrypted.

        Args:
            column_ids: The ids of the columns.
            use: The text for the error message that says what the writer would publish.

        Raises:
            Unwritable: A column is encrypted.
        """
        secret = self.secret_ids
        for column_id in column_ids:
            if column_id in secret:
                paths = (leaf.path for leaf in self.leaves if column_id in leaf.ids)
                raise Unwritable(
                    f"the files encrypt the column {next(paths, column_id)}, and {use}; choose a column that the files "
                    "do not encrypt"
                )


PUBLISHES_PARTITIONS = "the partition spec of the table would publish its values in manifests"
PUBLISHES_ORDER = "the sort order of the table would publish the order of its values"
PUBLISHES_LAYOUT = "the clustering of the table would publish the order of its values"


@contextmanager
def hide_values(protection: FileProtection | None) -> Iterator[None]:
    """Hide the details of errors about rows of encrypted files, because the details may quote values.

    All readers of the table can see the errors of jobs.
    """
    try:
        yield
    except Unwritable:
        if protection is None:
            raise
        raise Unwritable("rows of an encrypted file do not fit the columns of the table") from None


def check_deletes(source: SourceFile, column_ids: Collection[int]) -> None:
    """Check that equality deletes compare no encrypted column of the file.

    Without this check, a writer without keys could learn values of the file from the number of remaining rows.

    Raises:
        Unreadable: The deletes compare an encrypted column.
    """
    if source.encryption is None or not column_ids:
        return
    for number, leaf in enumerate(source.leaves):
        is_secret = any(ciphers[number] is not None for ciphers in source.encryption.ciphers)
        if is_secret and (None in leaf.ids or not set(column_ids).isdisjoint(leaf.ids)):
            raise source.make_unreadable_error(
                f"equality deletes compare its encrypted column {leaf.path}, which would reveal values of it; "
                "remove these deletes with an engine that has the keys"
            )


def find_protection(source: SourceFile, leaves: Sequence[Leaf], keys: ParquetKeys) -> FileProtection | None:
    """Return the encryption of a new file with rows of `source`, or None if the new file is not encrypted.

    Each new column has the protection of the column with the same field ids. A column that `source` does not have (the
    index -1) is encrypted with the footer's key if all columns of `source` are encrypted with it.

    Args:
        source: The file from which the rows come.
        leaves: The leaf columns of the new file.
        keys: The keys of encrypted files.

    Raises:
        Unreadable: The encryption of the new file is uncertain.
    """
    if source.encryption is None:
        return None
    positions = {leaf.ids: position for position, leaf in enumerate(source.leaves)}
    top_ids = {leaf.ids[0] for leaf in source.leaves}
    columns = [positions.get(leaf.ids, -1) for leaf in leaves]
    for leaf, column in zip(leaves, columns, strict=True):
        if column < 0 and (leaf.ids[0] in top_ids or None in top_ids):
            raise source.make_unreadable_error(
                "the file is encrypted, and its columns have no field ids or a different structure, so the key of each "
                "new column is uncertain"
            )
    try:
        scheme = find_scheme(source.encryption, [leaf.path for leaf in source.leaves], columns)
    except KeyUnavailable as error:
        raise source.make_unreadable_error(str(error)) from None
    return FileProtection(scheme, leaves, keys)


SourceCheck = Callable[[str, SourceFile], None]
"""A function that raises Unreadable if the rows of the file at a path must not be written to a new file."""


def require_same_scheme(
    get_scheme: Callable[[str], EncryptionScheme | None], leaves: Sequence[Leaf], keys: ParquetKeys
) -> SourceCheck:
    """Return a check that refuses a file whose encryption has changed since its scheme was read.

    The encryption of the new file was chosen by that scheme, and any writer of the table's folder may have replaced
    the file since then.

    Args:
        get_scheme: A function that returns the scheme that was read from the file at a path.
        leaves: The leaf columns of the new file.
        keys: The keys of encrypted files.
    """

    def check(path: str, source: SourceFile) -> None:
        protection = find_protection(source, leaves, keys)
        if (None if protection is None else protection.scheme) != get_scheme(path):
            raise source.make_unreadable_error("the file was replaced while it was read: its encryption has changed")

    return check


def read_protection(
    location: str, storage: Storage, leaves: Sequence[Leaf], keys: ParquetKeys
) -> FileProtection | None:
    """Open a file, and return the encryption of a new file with its rows, or None (`find_protection`).

    Raises:
        Unreadable: The file cannot be read.
    """
    with SourceFile(location, storage, keys=keys) as source:
        return find_protection(source, leaves, keys)
