"""Describes the failure of a job, for the timeline and for the result of a statement."""

from __future__ import annotations

from seamark.connector.arrow.casting import Unwritable
from seamark.connector.client.errors import ClientError
from seamark.connector.parquet.encryption.keys import has_keys
from seamark.formats.iceberg.files.parquet import Unreadable
from seamark.formats.runtime.errors import SeamarkError

FAILURES = (ClientError, SeamarkError, Unreadable, OSError)
"""The errors that a job expects. Their messages describe the failure completely."""
_ERRORS_WITHOUT_VALUES = (*FAILURES, Unwritable, RuntimeError)
"""The errors whose messages quote no values of rows."""


class JobIncomplete(RuntimeError):
    """Raised if a part of a job failed. The remaining work was done."""


class FilesNotIndexed(JobIncomplete):
    """Raised if an index has no entries of some data files. The other files are indexed, and queries use the index."""


def format_error_line(error: Exception, max_characters: int, *, with_class: bool) -> str:
    """Return the error as one line of at most `max_characters` characters.

    A process with keys of encrypted files leaves out the messages of errors from libraries, because they may quote
    values of rows, and all readers of the table can see the line. Such a line always
    begins with the name of the class.

    Args:
        with_class: Whether the line begins with the name of the error's class.
    """
    name = type(error).__name__
    if not isinstance(error, _ERRORS_WITHOUT_VALUES) and has_keys():
        return f"{name}; its text is left out, because it may quote values of encrypted files"
    text = " ".join(str(error).split())
    return (f"{name}: {text}" if with_class else text)[:max_characters] or name
