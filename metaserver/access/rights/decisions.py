"""Decides which privileges a list of grants gives on an object. The functions are pure.

A grant on an object counts for the object and for everything in it: the server contains its own warehouse, a warehouse
contains namespaces, and a namespace contains namespaces, tables, views and functions. A denial counts in the same way.
A denial on the object, or on anything that contains it, overrides all grants.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from seamark.metaserver.access.rights.privileges import ALL, ALLOWED, BROWSE, DENIED, MANAGE_GRANTS, READ
from seamark.metaserver.store.model import FUNCTION, NAMESPACE, SERVER, Grant, NamespacePath

SERVER_ADMIN = "admin"
"""The role that, on the server's own warehouse, also gives rights on the server."""


class Securable(NamedTuple):
    """An object on which a principal may have privileges. An empty namespace means the warehouse."""

    namespace: NamespacePath = ()
    kind: str = NAMESPACE
    name: str = ""
    """The name of the table, view or function, or an empty text for other kinds."""

    @property
    def container(self) -> Securable:
        """The namespace of a table, view or function. For other kinds, it is the object itself."""
        return Securable(self.namespace) if self.name else self


WAREHOUSE = Securable()
THE_SERVER = Securable((), SERVER)


def get_securable(grant: Grant) -> Securable:
    """Return the object of a grant."""
    return Securable(grant.namespace, grant.kind, grant.name)


def find_privilege_bits(grants: Iterable[Grant], securable: Securable) -> tuple[int, int]:
    """Return the privileges that the grants allow on an object, and those that they deny on it, as sets of bits.

    A denied privilege is not removed from the first set, so that a refusal can state the reason.
    """
    allowed_bits = denied_bits = 0
    namespace, kind, name = securable
    for grant in grants:
        if kind == SERVER:
            is_relevant = grant.kind == SERVER or (
                # An admin of the server's own warehouse is an admin of the server. Denials on this warehouse apply too.
                grant.kind == NAMESPACE and not grant.namespace and (grant.deny or grant.role == SERVER_ADMIN)
            )
        elif grant.name:
            # A table and a view cannot have the same name, so a grant on a table also counts for a view of this name.
            is_relevant = (
                grant.name == name and grant.namespace == namespace and (grant.kind == FUNCTION) is (kind == FUNCTION)
            )
        else:
            is_relevant = namespace[: len(grant.namespace)] == grant.namespace
        if not is_relevant:
            continue
        if grant.deny:
            denied_bits |= DENIED.get(grant.role, ALL)
        else:
            allowed_bits |= ALLOWED.get(grant.role, 0)
    return allowed_bits, denied_bits


def have_privileges(grants: Iterable[Grant], securable: Securable, bits: int) -> bool:
    """Return whether the grants give all of these privileges on an object. The result for an empty set is False."""
    allowed_bits, denied_bits = find_privilege_bits(grants, securable)
    return bool(bits) and not bits & ~(allowed_bits & ~denied_bits)


def holds_everywhere(grants: Sequence[Grant], bits: int) -> bool:
    """Return whether the grants give all privileges in `bits` on the warehouse, and no denial inside it takes one away.

    If the principal may manage the grants of the warehouse, denials inside the warehouse do not count, because the
    principal may remove them. Otherwise the managers of one namespace could restrict the admins of the warehouse.
    """
    if not have_privileges(grants, WAREHOUSE, bits):
        return False
    return have_privileges(grants, WAREHOUSE, MANAGE_GRANTS) or not any(_denies(grant, bits) for grant in grants)


def holds_throughout(grants: Sequence[Grant], namespace: NamespacePath, bits: int) -> bool:
    """Return whether the grants give all privileges in `bits` on the warehouse and throughout a namespace.

    A denial in another namespace does not count.
    """
    if not have_privileges(grants, WAREHOUSE, bits) or not have_privileges(grants, Securable(namespace), bits):
        return False
    depth = len(namespace)
    # A principal that may manage all grants could remove a denial in the namespace. So such a denial does not count.
    return have_privileges(grants, WAREHOUSE, MANAGE_GRANTS) or not any(
        _denies(grant, bits) and grant.kind != SERVER and grant.namespace[:depth] == namespace for grant in grants
    )


def _denies(grant: Grant, bits: int) -> bool:
    return grant.deny and bool(bits & DENIED.get(grant.role, ALL))


def _list_browsing(grants: Sequence[Grant]) -> list[Grant]:
    """Return the grants that allow browsing their object, without those that a denial overrides."""
    browse_grants = [grant for grant in grants if not grant.deny and ALLOWED.get(grant.role, 0) & BROWSE]
    if not any(grant.deny for grant in grants):  # Skip the comparison, because a login may have a thousand grants.
        return browse_grants
    return [grant for grant in browse_grants if have_privileges(grants, get_securable(grant), BROWSE)]


def can_list_namespace(grants: Sequence[Grant], namespace: NamespacePath) -> bool:
    """Return whether a listing may include the namespace: the grants allow browsing it, or an object in it."""
    if have_privileges(grants, Securable(namespace), BROWSE):
        return True
    depth = len(namespace)
    return any(
        grant.namespace[:depth] == namespace and grant.kind != SERVER
        for grant in _list_browsing([grant for grant in grants if grant.deny or grant.namespace[:depth] == namespace])
    )


def list_visible_children(grants: Sequence[Grant], parent: NamespacePath) -> frozenset[str] | None:
    """Return the names in `parent` that a listing may include. The names need not exist.

    Returns:
        The names. None if the listing may include all names except namespaces that a denial hides.
    """
    if have_privileges(grants, Securable(parent), BROWSE):
        return None
    depth = len(parent)
    return frozenset(
        grant.namespace[depth]
        for grant in _list_browsing(grants)
        if len(grant.namespace) > depth and grant.namespace[:depth] == parent
    )


def has_visible_entry(grants: Sequence[Grant], namespace: NamespacePath) -> bool:
    """Return whether a grant on a table, view or function in the namespace allows browsing it."""
    return any(grant.name and grant.namespace == namespace for grant in _list_browsing(grants))


def list_namespaces_with(grants: Sequence[Grant], bits: int) -> list[NamespacePath]:
    """Return the namespaces on which grants give all privileges in `bits`, and no denial takes one away."""
    bits_by_namespace: dict[NamespacePath, int] = {}
    for grant in grants:
        if not (grant.deny or grant.name):
            bits_by_namespace[grant.namespace] = bits_by_namespace.get(grant.namespace, 0) | ALLOWED.get(grant.role, 0)
    paths = [path for path, allowed_bits in bits_by_namespace.items() if not bits & ~allowed_bits]
    if not any(grant.deny for grant in grants):
        return paths
    return [path for path in paths if have_privileges(grants, Securable(path), bits)]


def select_read_grants(grants: Sequence[Grant]) -> list[Grant]:
    """Return the smallest list of grants and denials of `read` that gives the same rights to read in the warehouse."""
    allowed_securables = {
        _locate_grant(grant) for grant in grants if not grant.deny and ALLOWED.get(grant.role, 0) & READ
    }
    denied_securables = {_locate_grant(grant) for grant in grants if grant.deny and DENIED.get(grant.role, ALL) & READ}
    return [
        Grant("", "read", *securable, deny=deny)
        for securables, deny in ((allowed_securables, False), (denied_securables, True))
        for securable in sorted(securables)
        if not any(outer_securable in securables for outer_securable in list_enclosing_securables(securable))
    ]


def narrow_read_grants(grants: Sequence[Grant]) -> Iterator[tuple[list[Grant], list[Grant]]]:
    """Yield steps that shorten a list of grants and denials of `read`, without allowing more.

    Each step takes away rights only in one namespace: the top-level namespace with the most grants and denials, or the
    deepest namespace below it that contains at least half of them. The steps end when no namespace contains several
    grants or denials.

    Args:
        grants: The result of `select_read_grants`.

    Yields:
        The grants and denials to remove in this step, and the denials to append.
    """
    trees: dict[NamespacePath, list[tuple[int, Grant]]] = {}
    for position, grant in enumerate(grants):
        if _is_below(grant, 1):
            trees.setdefault(grant.namespace[:1], []).append((position, grant))
    # The largest tree is first. Among trees of equal size, it is the tree with the earliest grant.
    heap = [(-len(grants_inside), grants_inside[0][0], root) for root, grants_inside in trees.items()]
    heapq.heapify(heap)
    next_position = len(grants)
    while heap:
        negative_size, _, root = heapq.heappop(heap)
        if negative_size > -2:
            break
        # A step changes only the tree of `root`.
        path, removed_grants_of_path = _find_fullest(root, [grant for _, grant in trees[root]])
        denials = [Grant("", "read", path, deny=True)] if any(grant.deny for grant in removed_grants_of_path) else []
        yield removed_grants_of_path, denials
        removed_grants = set(removed_grants_of_path)
        grants_inside = [(position, grant) for position, grant in trees[root] if grant not in removed_grants]
        grants_inside += [(next_position, grant) for grant in denials if _is_below(grant, 1)]
        next_position += 1
        trees[root] = grants_inside
        if grants_inside:
            heapq.heappush(heap, (-len(grants_inside), grants_inside[0][0], root))


def _find_fullest(path: NamespacePath, grants_inside: list[Grant]) -> tuple[NamespacePath, list[Grant]]:
    """Return the deepest namespace that contains at least half of the grants of its parent, and its grants.

    The search starts at `path`, and descends while a child contains at least half of the grants, and several grants.
    """
    while True:
        depth = len(path) + 1
        counts_by_namespace = Counter(grant.namespace[:depth] for grant in grants_inside if _is_below(grant, depth))
        largest, count = counts_by_namespace.most_common(1)[0] if counts_by_namespace else (path, 0)
        if count < 2 or 2 * count < len(grants_inside):
            return path, grants_inside
        path = largest
        grants_inside = [
            grant for grant in grants_inside if _is_below(grant, depth) and grant.namespace[:depth] == path
        ]


def _is_below(grant: Grant, depth: int) -> bool:
    """Return whether the object of a grant is inside a namespace with `depth` levels."""
    return len(grant.namespace) + bool(grant.name) > depth


def _locate_grant(grant: Grant) -> Securable:
    """Return the object of a grant. A grant on the server applies to everything in the warehouse."""
    return WAREHOUSE if grant.kind == SERVER else get_securable(grant)


def list_enclosing_securables(securable: Securable) -> list[Securable]:
    """Return the warehouse, and then the namespaces that contain an object, from the top level down."""
    if securable.kind == SERVER:
        return []
    depth = len(securable.namespace) + bool(securable.name)
    return [Securable(securable.namespace[:levels]) for levels in range(depth)]
