"""Describes the failure of a job for the timeline and for the answer to a statement."""

from __future__ import annotations

from seamark.connector.arrow.casting import Unwritable
from seamark.connector.client.errors import ClientError
from seamark.connector.parquet.encryption.keys import has_keys
from seamark.formats.iceberg.files.parquet import Unreadable
from seamark.formats.runtime.errors import SeamarkError

FAILURES = (ClientError, SeamarkError, Unreadable, OSError)
"""The errors that a job expects; their texts describe the failure."""
_ERRORS_WITHOUT_VALUES = (*FAILURES, Unwritable, RuntimeError)
"""The errors whose texts quote no values of rows."""


def format_error_line(error: Exception, max_characters: int, *, with_class: bool) -> str:
    """Return the error on one line of at most `max_characters` characters.

    A process that has keys of encrypted files leaves out the texts of errors of libraries. These texts may
    quote values of rows, and all readers of the table can see them.

    Args:
        with_class: Whether the line begins with the name of the error's class.
    """
    name = type(error).__name__
    if not isinstance(error, _ERRORS_WITHOUT_VALUES) and has_keys():
        return f"{name}; its text is left out, because it may quote values of encrypted files"
    text = " ".join(str(error).split())
    return (f"{name}: {text}" if with_class else text)[:max_characters] or name
