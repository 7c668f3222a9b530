"""The owner of a view. The view runs with the owner's rights.

Trino runs a view with the rights of the user in the property `trino.run-as-owner`. Without this property, it runs the
view with the rights of the reader. A principal that may set the property can read everything that this user can read.
Engines that act for many users may name any user. So may principals with write access to the whole catalog. On a server
with several warehouses, only admins of the server may, because the user can have rights in all warehouses. Other
principals may name only themselves. A principal that changes the text of a view with an owner becomes its owner, so
that the text runs with its author's rights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from seamark.formats.iceberg.views.view import ViewMetadata, encode_view
from seamark.formats.protocol.wire import fold_name
from seamark.formats.runtime.errors import Forbidden
from seamark.metaserver.catalog.values import Caller

OWNER = "owner"
"""A property that Spark and other engines display. No engine derives rights from it."""
_RUNS_AS = ("run-as", "run_as", "runas", "definer", "security-user", "execute-as")


def determines_rights(key: str) -> bool:
    """Return whether the view property determines the user with whose rights the view runs."""
    folded_name = fold_name(key)
    if any(part in folded_name for part in _RUNS_AS):
        return True
    return folded_name.startswith(("trino.", "presto.")) and (
        OWNER in folded_name or folded_name.endswith(("created-by", ".user"))
    )


def borrows_rights(metadata: ViewMetadata) -> bool:
    """Return whether the view runs with the rights of a user that its properties name."""
    return any(determines_rights(key) for key in metadata.properties)


def check_author(caller: Caller, metadata: ViewMetadata) -> None:
    """Check that `caller` may write the text of a view that runs with the rights of another user.

    Raises:
        Forbidden: The caller may not write such a text.
    """
    if caller.names_owners:  # A trusted engine, or a principal that may write the whole catalog.
        return
    for key, value in metadata.properties.items():
        if determines_rights(key) and value != caller.principal_name:
            raise Forbidden(
                f"{caller.principal_name} may not write a view text that runs with the rights of {value[:100]!r}. "
                "For engines that act for many users, the operator sets trusted_engines"
            )


def compute_view_fingerprint(metadata: ViewMetadata, location: str) -> str:
    """Return the digest of a view's content and of the location of its metadata file.

    The digest is stored in the database. Otherwise the view's writers could overwrite the file, and change
    the owner, or the text of a view with another owner.
    """
    return hashlib.sha256(location.encode() + b"\n" + encode_view(metadata)).hexdigest()


def protect_owner(
    caller: Caller, properties: Mapping[str, str], old_properties: Mapping[str, str], *, rewritten: bool
) -> dict[str, str]:
    """Return the requested properties of a view, changed so that they give the caller no rights of another user.

    A trusted engine, or a principal that may write the whole catalog, may set any owner. Another caller may only set
    itself as the user with whose rights the view runs, or keep the user while the text stays the same. It cannot set
    another user as the displayed owner either: its own name replaces that user.

    Args:
        caller: The principal that requests the properties.
        properties: The requested properties.
        old_properties: The current properties of the view.
        rewritten: Whether the text of the view changes. If so, the caller becomes the user with whose rights the view
            runs, because otherwise a new text would run with the rights of another user.

    Raises:
        Forbidden: The caller names another user, with whose rights the view would run.
    """
    result = dict(properties)
    if caller.names_owners:
        return result
    for key, value in properties.items():
        if determines_rights(key):
            if value == caller.principal_name:
                continue
            if value != old_properties.get(key):
                raise Forbidden(
                    f"{caller.principal_name} may set {key[:100]!r} only to {caller.principal_name!r}: the view would "
                    "run with the rights of "
                    "another user. For engines that act for many users, the operator sets trusted_engines"
                )
            if rewritten:
                result[key] = caller.principal_name
        elif key.strip().casefold() == OWNER and value != old_properties.get(key):
            result[key] = caller.principal_name
    return result
