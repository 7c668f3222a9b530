"""Whose rights a view runs with.

Trino runs a view with the rights of the user whom the property `trino.run-as-owner` names, and with the reader's own
where there is none. So whoever may set it may read what that user may read. Engines that act for many users, and
whoever may write the whole catalog, name whom they like. Everybody else names nobody but themselves, and who changes
what a view selects becomes its owner, where it has one: the text then runs with the rights of the one who wrote it.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Mapping

from metaserver.catalog.values import Caller
from metaserver.errors import Forbidden
from metaserver.iceberg.views.view import ViewMetadata, encode_view

OWNER = "owner"
"""A label that Spark and others show; no engine takes rights from it."""
_RUNS_AS = ("run-as", "run_as", "runas", "definer", "security-user", "execute-as")


def names_whose_rights(key: str) -> bool:
    """Whether a view's property of this name says with whose rights it runs."""
    folded = unicodedata.normalize("NFKC", key).strip().casefold()
    if any(part in folded for part in _RUNS_AS):
        return True
    return folded.startswith(("trino.", "presto.")) and (OWNER in folded or folded.endswith(("created-by", ".user")))


def borrows_rights(metadata: ViewMetadata) -> bool:
    """Whether the view runs with the rights of somebody whom its properties name."""
    return any(names_whose_rights(key) for key in metadata.properties)


def fingerprint_of(metadata: ViewMetadata, location: str) -> str:
    """Of all that engines read of a view, in the metadata file at `location`. It is kept in the database, since that
    file lies where the view's writers may write, and could be given another owner, or an owner's view another text."""
    return hashlib.sha256(location.encode() + b"\n" + encode_view(metadata)).hexdigest()


def owned_properties(
    caller: Caller, properties: Mapping[str, str], before: Mapping[str, str], *, rewritten: bool
) -> dict[str, str]:
    """The properties that a view gets, of those asked for. `before` are its own until now; `rewritten`: its text
    changes.

    Forbidden where the caller names somebody else as the one with whose rights the view runs.
    """
    result = dict(properties)
    if caller.names_owners:
        return result
    for key, value in properties.items():
        if names_whose_rights(key):
            if value == caller.who:
                continue
            if value != before.get(key):
                raise Forbidden(
                    f"{caller.who} may not set {key[:100]!r} to another than {caller.who!r}: the view would run with "
                    "that one's rights. The operator names the principals of engines that act for many users in "
                    "trusted_engines"
                )
            if rewritten:
                result[key] = caller.who
        elif key.strip().casefold() == OWNER and value != before.get(key):
            result[key] = caller.who
    return result
