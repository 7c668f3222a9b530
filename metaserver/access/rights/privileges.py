"""Privileges, and the roles that are fixed sets of privileges.

Each privilege includes others, because it is of no use without them: a commit has to load the table first.

| privilege | includes | allows |
|---|---|---|
| browse | | see that an object exists, list it, load its metadata without keys to its files |
| plan | browse | plan scans, explain queries, list files and their statistics; no keys and no signatures |
| read | plan | keys and signatures to read, lookups, rows of streams, SQL |
| maintain | plan | indexes, policies of table services, expiration of snapshots, orphan files |
| write | read, maintain | commits, rows of streams, keys and signatures to write, properties |
| create | browse | create namespaces, tables, views and functions in the object; the creator owns them |
| drop | browse | drop the object; the source of a rename |
| manage-grants | browse | grant and revoke rights on the object |

A grant of a privilege allows what the privilege includes. A denial of a privilege also denies each privilege that
includes it: who may not browse a table may do nothing with it.

A set of privileges is an integer with one bit for each privilege, because each request checks several sets.
"""

from __future__ import annotations

from enum import StrEnum


class Privilege(StrEnum):
    BROWSE = "browse"
    PLAN = "plan"
    READ = "read"
    MAINTAIN = "maintain"
    WRITE = "write"
    CREATE = "create"
    DROP = "drop"
    MANAGE_GRANTS = "manage-grants"


BROWSE, PLAN, READ, MAINTAIN, WRITE, CREATE, DROP, MANAGE_GRANTS = (1 << number for number in range(8))
OWN_CREATED = 1 << 8
"""The creator of an object becomes its owner.

The privilege `create` includes it. The roles do not: the creations of a team belong to its namespace.
"""
ALL = (OWN_CREATED << 1) - 1
"""Every bit. A denial with an unknown name denies everything."""
BITS = {privilege.value: 1 << number for number, privilege in enumerate(Privilege)}
_INCLUDED = {
    "browse": BROWSE,
    "plan": PLAN | BROWSE,
    "read": READ | PLAN | BROWSE,
    "maintain": MAINTAIN | PLAN | BROWSE,
    "write": WRITE | READ | MAINTAIN | PLAN | BROWSE,
    "create": CREATE | OWN_CREATED | BROWSE,
    "drop": DROP | BROWSE,
    "manage-grants": MANAGE_GRANTS | BROWSE,
}
_READER = READ | PLAN | BROWSE
_WRITER = _READER | WRITE | MAINTAIN | CREATE | DROP
_ADMIN = _WRITER | MANAGE_GRANTS
OWNER = "owner"
"""The role of a principal on an object that it created, or that was given to it."""
ROLE_BITS = {"reader": _READER, "writer": _WRITER, "admin": _ADMIN, OWNER: _ADMIN}
"""The privileges of each fixed role."""
ALLOWED = {**ROLE_BITS, **_INCLUDED}
"""The privileges that a grant allows, by the name in the grant."""
DENIED = {
    denied: sum(BITS[name] for name, included in _INCLUDED.items() if included & BITS[denied])
    | (OWN_CREATED if denied in ("browse", "create") else 0)
    for denied in _INCLUDED
}
"""The privileges that a denial takes, by the name in the grant."""


def list_names(bits: int) -> list[str]:
    """Return the names of the privileges in a set, without those that another privilege of the set includes."""
    names = [name for name, bit in BITS.items() if bits & bit]
    return [name for name in names if not any(_INCLUDED[other] & BITS[name] for other in names if other != name)]


def find_smallest_role(bits: int) -> str:
    """Return the first of the roles reader, writer and admin that has all these privileges."""
    return next(name for name, included in ROLE_BITS.items() if not bits & ~included)
