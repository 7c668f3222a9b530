"""Privileges, and the fixed roles, which are sets of privileges.

A privilege includes the privileges that its operations need as well. For example, a commit must first load the table.

| privilege | includes | allows |
|---|---|---|
| browse | | see that an object exists, list it, load its metadata without keys to its files |
| plan | browse | plan scans, explain queries, list files and their statistics, without keys and signatures |
| read | plan | keys and signatures to read, lookups, rows of streams, SQL |
| maintain | plan | indexes, policies of table services, expiration of snapshots, orphan files |
| write | read, maintain | commits, rows of streams, keys and signatures to write, properties |
| create | browse | create namespaces, tables, views and functions in the object; the creator owns them |
| drop | browse | drop the object; the source of a rename |
| manage-grants | browse | grant and revoke rights on the object |

A grant of a privilege also allows the included privileges. A denial of a privilege also denies each privilege that
includes it: a principal that may not browse a table may not do anything with it.

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
"""The bit with which the creator of an object becomes its owner.

The privilege `create` includes it. The fixed roles do not include it, because the objects that a team creates belong to
its namespace.
"""
ALL = (OWN_CREATED << 1) - 1
"""The set of all privileges. A denial with an unknown name denies all of them."""
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
"""The role of a principal on an object that it has created, or of which an admin has made it the owner."""
ROLE_BITS = {"reader": _READER, "writer": _WRITER, "admin": _ADMIN, OWNER: _ADMIN}
"""The privileges of each fixed role."""
ALLOWED = {**ROLE_BITS, **_INCLUDED}
"""The privileges that a grant allows, by the privilege or role in the grant."""
DENIED = {
    denied: sum(BITS[name] for name, included in _INCLUDED.items() if included & BITS[denied])
    | (OWN_CREATED if denied in ("browse", "create") else 0)
    for denied in _INCLUDED
}
"""The privileges that a denial takes away, by the privilege in the denial."""


def list_names(bits: int) -> list[str]:
    """Return the names of the privileges in a set. Leave out privileges that another privilege of the set includes."""
    names = [name for name, bit in BITS.items() if bits & bit]
    return [name for name in names if not any(_INCLUDED[other] & BITS[name] for other in names if other != name)]


def find_smallest_role(bits: int) -> str:
    """Return the first of the roles reader, writer and admin that has all these privileges."""
    return next(name for name, role_bits in ROLE_BITS.items() if not bits & ~role_bits)
