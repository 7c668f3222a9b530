"""Describes the failure of a job for the timeline and for the answer to a statement."""

from __future__ import annotations

from seamark.connector.arrow.casting import Unwritable
from seamark.connector.client.errors import ClientError
from seamark.connector.parquet.encryption.keys import has_keys
from seamark.formats.iceberg.files.parquet import Unreadable
from seamark.formats.runtime.errors import SeamarkError

FAILURES = (ClientError, SeamarkError, Unreadable, OSError)
"""The errors that a job expects; their texts describe the failure."""
_OWN = (*FAILURES, Unwritable, RuntimeError)
"""The errors whose texts quote no values of rows."""


def line_of(error: Exception, most: int, *, named: bool) -> str:
    """Return the error on one line of at most `most` characters.

    A process that has keys of encrypted files leaves out the texts of errors of libraries. These texts may
    quote values of rows, and all readers of the table can see them.

    Args:
        named: Whether the line begins with the name of the error's class.
    """
    name = type(error).__name__
    if not isinstance(error, _OWN) and has_keys():
        return f"{name}; its text is left out, because it may quote values of encrypted files"
    text = " ".join(str(error).split())
    return (f"{name}: {text}" if named else text)[:most] or name
