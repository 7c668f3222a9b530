"""Reads the grants of a login, of its groups, and of the roles of which they are members."""

from __future__ import annotations

from collections.abc import Sequence

from seamark.formats.runtime.errors import Forbidden
from seamark.metaserver.access.principal import ROLE_PREFIX
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.port import GROUPS_MAX, PointerStore


async def load_grants(
    store: PointerStore, name: str, groups: tuple[str, ...] = (), stated_grants: Sequence[Grant] = ()
) -> tuple[tuple[Grant, ...], tuple[str, ...]]:
    """Return the grants of a login, and the groups and roles to which it belongs.

    A role may be a member of another role. Each role is read once, so cyclic memberships are harmless.

    Args:
        store: The pointer store of the warehouse.
        name: The principal of the login.
        groups: The principals of the login's groups.
        stated_grants: The grants that the token of the login states.

    Raises:
        Forbidden: The login belongs to too many roles. No role may be left out, because it may contain a denial.
    """
    grants = [*stated_grants, *await store.grants(name)]
    if groups:
        grants += await store.list_grants_of_principals(groups)
    roles: dict[str, None] = {}
    new_roles = _list_roles(grants)
    while new_roles:
        roles.update(dict.fromkeys(new_roles))
        if len(roles) > GROUPS_MAX:
            raise Forbidden(
                f"{name} belongs to more than {GROUPS_MAX} roles; ask an admin to remove it from some roles"
            )
        new_grants = await store.list_grants_of_principals(tuple(new_roles))
        grants += new_grants
        new_roles = [role for role in _list_roles(new_grants) if role not in roles]
    return tuple(grants), (*groups, *roles)


def _list_roles(grants: Sequence[Grant]) -> list[str]:
    return list(dict.fromkeys(grant.role for grant in grants if grant.role.startswith(ROLE_PREFIX)))
