"""What the failure of a job says to others: it is on the timeline, and an answer to a statement."""

from __future__ import annotations

from seamark.connector.arrow.casting import Unwritable
from seamark.connector.client.errors import ClientError
from seamark.connector.parquet.encryption.keys import has_keys
from seamark.formats.iceberg.files.parquet import Unreadable
from seamark.formats.runtime.errors import SeamarkError

FAILURES = (ClientError, SeamarkError, Unreadable, OSError)
"""Errors that a job expects; each says what it is in its text."""
_OWN = (*FAILURES, Unwritable, RuntimeError)
"""Errors whose texts quote no values of rows."""


def line_of(error: Exception, most: int, *, named: bool) -> str:
    """Return the error on one line of at most `most` characters.

    A process that has keys of encrypted files leaves out the text of an error of a library, because it may quote a
    value of a row, and readers of the table would see it.

    Args:
        named: With the name of its class.
    """
    name = type(error).__name__
    if not isinstance(error, _OWN) and has_keys():
        return f"{name}; its text is left out, because it may quote values of encrypted files"
    text = " ".join(str(error).split())
    return (f"{name}: {text}" if named else text)[:most] or name
