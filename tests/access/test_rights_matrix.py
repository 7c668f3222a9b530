"""The matrix of principals, objects and operations. Each decision equals the decision of a model with sets of names."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from typing import NamedTuple

import pytest

from seamark.formats.runtime.clock import SimulatedClock
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.access import worker_tokens
from seamark.metaserver.access.authorizer import RULES, GrantAuthorizer, allows_operation
from seamark.metaserver.access.principal import Principal
from seamark.metaserver.access.rights.decisions import (
    Securable,
    can_list_namespace,
    holds_everywhere,
    list_namespaces_with,
    list_visible_children,
    narrow_read_grants,
    select_read_grants,
)
from seamark.metaserver.access.rights.privileges import CREATE, ROLE_BITS, WRITE
from seamark.metaserver.access.worker_tokens import StatementTokens
from seamark.metaserver.store.model import Grant, NamespacePath
from tests.access.keyrings import make_fixed_keyring
from tests.seeds import examples

PRIVILEGES = ("browse", "plan", "read", "maintain", "write", "create", "drop", "manage-grants")
INCLUDED = {
    "browse": {"browse"},
    "plan": {"plan", "browse"},
    "read": {"read", "plan", "browse"},
    "maintain": {"maintain", "plan", "browse"},
    "write": {"write", "read", "maintain", "plan", "browse"},
    "create": {"create", "browse"},
    "drop": {"drop", "browse"},
    "manage-grants": {"manage-grants", "browse"},
    "reader": {"read", "plan", "browse"},
    "writer": {"write", "read", "maintain", "plan", "browse", "create", "drop"},
    "admin": set(PRIVILEGES),
    "owner": set(PRIVILEGES),
}
"""The privileges that each privilege or role includes, as the documentation states them."""
NEEDED = {
    "loadTable loadView loadFunction tableExists viewExists loadNamespaceMetadata listTimeline listTableTimeline"
    " listDropped listIndexes loadIndex loadIndexBuild loadTableHealth loadTablePolicy listRunningJobs"
    " listRunningTableJobs getEvents loadStream listStreams loadStreamPosition loadStreamTopic": {"browse"},
    "planTableScan fetchPlanningResult cancelPlanning fetchScanTasks reportMetrics listTableMetrics listFiles"
    " listColumnStats loadColumnLayout listPartitions explain explainQuery makePlanTable renewPlanTable"
    " leasePlanSnapshots recordStatementTime": {"plan"},
    "loadCredentials signRequest readRows getRows lookupKeys selectRows readCubeGroups makeCubePlan loadQueryHistory"
    " listQueryHistory adviseTable listIndexBuildFiles runStatement cancelStatement aggregate": {"read"},
    "expireSnapshots removeOrphanFiles rewriteManifests putTablePolicy putIndex dropIndex startIndexBuild"
    " registerIndexFiles finishIndexBuild quarantineIndexFile rebuildIndexRegistry listUnheldFiles recordIndexAudit"
    " pauseStream resumeStream drainStream recordAppliedAdvice applyAdvice takeAdviceStep finishAdviceStep adviseTtl"
    " takeRewriteLease": {"maintain"},
    "updateTable commitTransaction commitChange replaceView updateProperties flushRows appendRows appendRowsToTables": {
        "write"
    },
    "createNamespace createTable createView undrop": {"create"},
    "putNamespace putFunction putTable putView": {"create", "write"},
    "makePlanView": {"create", "read"},
    "dropNamespace dropTable dropView dropFunction unregisterTable": {"drop"},
    "renameTable renameView": {"drop", "write"},
    "purgeDropped": {"drop", "manage-grants"},
    "addGrant removeGrant": {"manage-grants"},
}
"""The privileges that each operation needs on its object."""
NEEDED_THROUGHOUT = {"registerTable registerView importTable importTables importView": {"create", "write"}}
NEEDED_ON_CATALOG = {"listAudit": {"manage-grants"}}
NEEDED_ON_SERVER = {
    "createToken revokeToken listTokens": {"manage-grants"},
    "listReplicas listWarehouses loadWarehouse": {"browse"},
    "createWarehouse": {"create"},
    "putWarehouse": {"create", "write"},
    "dropWarehouse": {"drop"},
}
RIGHTS_AND_SCOPES = {
    operation: (required_rights, scope)
    for scope, table in (
        ("object", NEEDED),
        ("throughout", NEEDED_THROUGHOUT),
        ("catalog", NEEDED_ON_CATALOG),
        ("server", NEEDED_ON_SERVER),
    )
    for operations, required_rights in table.items()
    for operation in operations.split()
}
LISTING_OPERATIONS = ("listTables", "listViews", "listFunctions")
OPERATIONS_WITHOUT_RIGHT = ("getConfig", "metrics", "listGrants", "loadSqlState")
OPERATIONS_FOR_LISTED_NAMESPACES = ("listNamespaces", "namespaceExists")

SERVER = Securable((), "server")
CATALOG = Securable()
OBJECTS: dict[Securable, list[Securable]] = {SERVER: [], CATALOG: [SERVER]}
"""The objects, each with the objects that contain it."""
for _path in (("a",), ("b",), ("a", "x")):
    OBJECTS[Securable(_path)] = [SERVER, CATALOG, *(Securable(_path[:depth]) for depth in range(1, len(_path)))]
for _path, _kind, _name in (
    (("a",), "table", "t"),
    (("a",), "view", "v"),
    (("a",), "function", "t"),
    (("a", "x"), "table", "t"),
    (("b",), "table", "t"),
):
    OBJECTS[Securable(_path, _kind, _name)] = [*OBJECTS[Securable(_path)], Securable(_path)]


class Right(NamedTuple):
    name: str
    securable: Securable
    deny: bool = False

    def as_grant(self) -> Grant:
        return Grant("p", self.name, *self.securable, deny=self.deny)


class RightsModel:
    """The privileges of a principal on each object, as sets of names."""

    def __init__(self, rights: Iterable[Right]) -> None:
        self.rights = list(rights)
        self.privileges = {securable: self._find_privileges(securable) for securable in OBJECTS}

    def _find_privileges(self, securable: Securable) -> set[str]:
        """Return the privileges from the rights on the object and on the objects that contain it.

        The server contains the catalog. Of the rights on the catalog, only `admin` and denials apply to the server.
        """
        allowed_names: set[str] = set()
        denied_names: set[str] = set()
        for right in self.rights:
            is_above = right.securable == securable or right.securable in OBJECTS[securable]
            is_admin_or_denial = right == Right("admin", CATALOG) or (right.deny and right.securable == CATALOG)
            if not is_above and not (securable == SERVER and is_admin_or_denial):
                continue
            if right.deny:
                denied_names |= {privilege for privilege in PRIVILEGES if right.name in INCLUDED[privilege]}
            else:
                allowed_names |= INCLUDED[right.name]
        return allowed_names - denied_names

    def find_denied_in(self, path: NamespacePath) -> set[str]:
        """Return the privileges that are denied on an object in the namespace, or on the namespace."""
        return {
            privilege
            for right in self.rights
            if right.deny and right.securable != SERVER and right.securable.namespace[: len(path)] == path
            for privilege in PRIVILEGES
            if right.name in INCLUDED[privilege]
        }

    def is_listed(self, path: NamespacePath) -> bool:
        """Return True if the principal may browse the namespace or an object in it for which it has a grant."""
        return "browse" in self.privileges[Securable(path)] or any(
            "browse" in self.privileges[right.securable]
            for right in self.rights
            if not right.deny and right.securable != SERVER and right.securable.namespace[: len(path)] == path
        )

    def may(self, operation: str, securable: Securable) -> bool:
        """Return True if the principal's rights permit the operation on the object, computed without the server."""
        if operation in OPERATIONS_WITHOUT_RIGHT:
            return True
        if operation in OPERATIONS_FOR_LISTED_NAMESPACES:
            return not securable.namespace or self.is_listed(securable.namespace)
        if operation in LISTING_OPERATIONS:
            return "browse" in self.privileges[securable] or any(
                "browse" in self.privileges[right.securable]
                for right in self.rights
                if right.securable.name and not right.deny and right.securable.namespace == securable.namespace
            )
        required_rights, scope = RIGHTS_AND_SCOPES[operation]
        if scope == "object":
            return required_rights <= self.privileges[securable]
        if scope == "server":
            return required_rights <= self.privileges[SERVER]
        if not (required_rights <= self.privileges[CATALOG] and required_rights <= self.privileges[securable]):
            return False
        if scope == "catalog" or "manage-grants" in self.privileges[CATALOG]:
            return True
        return not required_rights & self.find_denied_in(securable.namespace)


def make_principals() -> list[list[Right]]:
    """Return the rights of many principals.

    A principal has one right, or an admin's rights and one denial, or up to six random rights and denials.
    """
    single_rights = [[Right(name, securable)] for name in INCLUDED for securable in OBJECTS]
    denial_rights = [
        [Right("admin", parent), Right(name, securable, deny=True)]
        for name, securable in itertools.product(PRIVILEGES, OBJECTS)
        for parent in (SERVER, CATALOG)
    ]
    rng = random.Random(43)
    mixed_rights = [
        [
            Right(rng.choice(PRIVILEGES), rng.choice(list(OBJECTS)), deny=True)
            if rng.random() < 0.3
            else Right(rng.choice(list(INCLUDED)), rng.choice(list(OBJECTS)))
            for _ in range(rng.randint(0, 6))
        ]
        for _ in range(examples(2000, 30))
    ]
    return single_rights + rng.sample(denial_rights, examples(len(denial_rights), 20)) + mixed_rights


PRINCIPALS = make_principals()


def test_each_cell_of_principals_objects_and_operations_equals_the_model() -> None:
    for rights in PRINCIPALS:
        model, grants = RightsModel(rights), [right.as_grant() for right in rights]
        for operation, securable in itertools.product(RULES, OBJECTS):
            if operation in LISTING_OPERATIONS and (securable.name or securable == SERVER):
                continue
            if operation in OPERATIONS_FOR_LISTED_NAMESPACES and securable == SERVER:
                continue
            assert allows_operation(grants, operation, securable) is model.may(operation, securable), (
                rights,
                operation,
                securable,
            )


def test_each_operation_has_its_privileges_in_the_model() -> None:
    assert sorted(
        [*RIGHTS_AND_SCOPES, *LISTING_OPERATIONS, *OPERATIONS_WITHOUT_RIGHT, *OPERATIONS_FOR_LISTED_NAMESPACES]
    ) == sorted(RULES)


def test_listings_return_the_namespaces_that_the_model_allows() -> None:
    for rights in PRINCIPALS:
        model, grants = RightsModel(rights), [right.as_grant() for right in rights]
        for securable in OBJECTS:
            path = securable.namespace
            if securable.name or not path:
                continue
            assert can_list_namespace(grants, path) is model.is_listed(path), (rights, path)
            names = list_visible_children(grants, path[:-1])
            assert (names is None or path[-1] in names) >= model.is_listed(path), (rights, path)


def test_locations_of_a_writer_are_in_namespaces_that_the_model_lets_it_write() -> None:
    required_rights = {"create", "write"}
    for rights in PRINCIPALS:
        model, grants = RightsModel(rights), [right.as_grant() for right in rights]
        for path in list_namespaces_with(grants, CREATE | WRITE):
            assert required_rights <= model.privileges[Securable(path)], (rights, path)
        if holds_everywhere(grants, CREATE | WRITE):
            assert required_rights <= model.privileges[CATALOG], rights
            is_manager = "manage-grants" in model.privileges[CATALOG]
            assert is_manager or all(
                required_rights <= privileges
                for securable, privileges in model.privileges.items()
                if securable != SERVER
            ), rights
    assert list_namespaces_with([Grant("p", "writer", ("a",)), Grant("p", "read")], CREATE | WRITE) == [("a",)]


async def test_listings_contain_exactly_the_entries_that_the_principal_may_load() -> None:
    authorizer = GrantAuthorizer(None)
    entries = [securable for securable in OBJECTS if securable.name]
    for rights in PRINCIPALS:
        principal = Principal("p", tuple(right.as_grant() for right in rights))
        expected = [RightsModel(rights).may("loadTable", entry) for entry in entries]
        assert await authorizer.allows_each(principal, "loadTable", entries) == expected
        for entry, is_allowed in zip(entries, expected, strict=True):
            if authorizer.allows_everywhere(principal, "loadTable", entry.namespace):
                assert is_allowed, (rights, entry)


def test_token_of_a_statement_reads_what_its_caller_may_read_and_nothing_else() -> None:
    for rights in PRINCIPALS:
        grants = [right.as_grant() for right in rights]
        read_grants = select_read_grants(grants)
        assert len(read_grants) <= len(grants)
        for securable in OBJECTS:
            if securable != SERVER:
                assert allows_operation(read_grants, "readRows", securable) is allows_operation(
                    grants, "readRows", securable
                ), (
                    rights,
                    read_grants,
                )


def test_each_narrowing_of_a_statements_grants_removes_rights_in_one_namespace_only() -> None:
    for rights in PRINCIPALS:
        grants = select_read_grants([right.as_grant() for right in rights])
        for removed_grants, denials in narrow_read_grants(grants):
            narrowed_grants = [grant for grant in grants if grant not in removed_grants] + denials
            assert len(narrowed_grants) < len(grants)
            lost_namespaces = []
            for securable in OBJECTS:
                was_allowed, is_allowed = (
                    allows_operation(grants_of_statement, "readRows", securable)
                    for grants_of_statement in (grants, narrowed_grants)
                )
                assert was_allowed or not is_allowed, (rights, narrowed_grants, securable)
                lost_namespaces += [securable.namespace[:1]] if was_allowed and not is_allowed else []
            assert len(set(lost_namespaces)) <= 1, (rights, narrowed_grants)
            grants = narrowed_grants


def narrow_once(grants: list[Grant]) -> list[Grant] | None:
    """Return the grants after the next step of `narrow_read_grants`, or None if there is no step.

    `narrow_read_grants` shortens a list of grants that is too long for a token, without allowing more. A step removes
    the grants and denials in one namespace. If one of them is a denial, the step denies the namespace. This reference
    implementation finds the namespace with loops over all grants.
    """
    levels = {grant: (*grant.namespace, grant.name) if grant.name else grant.namespace for grant in grants}
    path, inner_grants = (), [grant for grant in grants if len(levels[grant]) > 1]
    while True:
        depth = len(path) + 1
        counts: dict[tuple[str, ...], int] = {}
        for grant in inner_grants:
            if len(levels[grant]) > depth:
                counts[levels[grant][:depth]] = counts.get(levels[grant][:depth], 0) + 1
        largest = max(counts, key=counts.__getitem__, default=())
        # The path begins with the namespace that contains the most grants. It gets a further level if this level has at
        # least half of the grants in the path. Each level contains at least two grants.
        if counts.get(largest, 0) < 2 or (path and 2 * counts[largest] < len(inner_grants)):
            break
        path = largest
        inner_grants = [grant for grant in inner_grants if len(levels[grant]) > depth and levels[grant][:depth] == path]
    if not path:
        return None
    denials = [Grant("", "read", path, deny=True)] if any(grant.deny for grant in inner_grants) else []
    return [grant for grant in grants if grant not in inner_grants] + denials


@pytest.mark.parametrize("namespace_count", [5, 1000])
def test_token_for_two_thousand_grants_is_short_or_refused_after_few_signatures(
    namespace_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A token can leave out grants on tables, but not on namespaces. 1,000 namespaces exceed its size limit.
    signed_tokens = []
    compute = worker_tokens._compute_mac
    monkeypatch.setattr(worker_tokens, "_compute_mac", lambda *parts: signed_tokens.append(parts) or compute(*parts))
    grants = [Grant("p", "read", (f"wide-{number:04}",)) for number in range(namespace_count)]
    grants += [
        Grant("p", "read", (f"other-{number % 97}", f"n{number % 7}"), "table", f"t{number}")
        for number in range(2000 - namespace_count)
    ]
    tokens = StatementTokens(make_fixed_keyring(), SimulatedClock(1))
    caller = Principal("p", tuple(grants))
    if namespace_count == 1000:
        with pytest.raises(BadRequest, match="grants on 2,000 objects"):
            tokens.issue(caller, 60)
        assert not signed_tokens
        return
    token = tokens.issue(caller, 60)
    assert len(signed_tokens) <= 3
    assert 5000 < len(token) <= worker_tokens.STATEMENT_CHARACTERS_MAX
    readable_objects = {(grant.namespace, grant.name) for grant in tokens.verify_token(token)[0].grants}
    assert {(grant.namespace, grant.name) for grant in grants[:namespace_count]} <= readable_objects


def test_narrowing_of_grants_equals_a_search_through_all_grants() -> None:
    rng = random.Random(5)
    for _ in range(150):
        rights = set()
        for _ in range(rng.randrange(1, 40)):
            path = tuple(rng.choice("abc") for _ in range(rng.randrange(0, 4)))
            name = rng.choice(["", "t", "u", "v"])
            rights.add(Grant("p", "read", path, "table" if name else "namespace", name, rng.random() < 0.3))
        grants: list[Grant] | None = select_read_grants(sorted(rights, key=str))
        for removed_grants, denials in narrow_read_grants(list(grants)):
            assert grants is not None
            expected = narrow_once(grants)
            grants = [grant for grant in grants if grant not in removed_grants] + denials
            assert grants == expected
        assert narrow_once(grants) is None


def test_denials_in_one_namespace_do_not_prevent_statements_on_other_namespaces() -> None:
    tokens = StatementTokens(make_fixed_keyring(), SimulatedClock(1))
    planted_denials = [Grant("p", "read", ("raw", "mine"), "table", f"t{number}", deny=True) for number in range(500)]
    planted_denials += [Grant("p", "read", ("raw", "mine", f"n{number}"), deny=True) for number in range(500)]
    grants_of_caller = [Grant("p", "reader"), Grant("p", "read", ("raw", "x"), "table", "secret", deny=True)]
    principal, _ = tokens.verify_token(tokens.issue(Principal("p", (*grants_of_caller, *planted_denials)), 60))
    for securable, is_allowed in (
        (Securable(("raw", "mine"), "table", "t7"), False),
        (Securable(("raw", "mine", "n7"), "table", "t"), False),
        (Securable(("raw", "x"), "table", "secret"), False),
        (Securable(("raw", "x"), "table", "t"), True),
        (Securable(("raw",), "table", "t"), True),
        (Securable(("shop",), "table", "t"), True),
    ):
        assert allows_operation(principal.grants, "readRows", securable) is is_allowed, securable


def test_statement_keeps_the_groups_of_its_caller_if_a_policy_server_needs_them() -> None:
    keyring, clock = make_fixed_keyring(), SimulatedClock(1)
    groups = tuple(f"oidc-group:organisation/department-{number:03}/contractors" for number in range(100))
    caller = Principal("p", (Grant("p", "reader"),), "oidc", groups)
    small_principal = Principal("p", (Grant("p", "reader"),), "oidc", groups[:20])
    for needs_groups in (True, False):
        tokens = StatementTokens(keyring, clock, needs_groups=needs_groups)
        assert tokens.verify_token(tokens.issue(small_principal, 60))[0].groups == groups[:20]
    tokens_without_policy = StatementTokens(keyring, clock, needs_groups=False)
    assert tokens_without_policy.verify_token(tokens_without_policy.issue(caller, 60))[0].groups == ()
    with pytest.raises(BadRequest, match="belongs to 100 groups and roles"):
        StatementTokens(keyring, clock).issue(caller, 60)


def test_statement_does_not_load_a_table_that_its_caller_may_not_read() -> None:
    table, neighbor = Securable(("a",), "table", "t"), Securable(("a",), "table", "u")
    for denied_privilege in ("browse", "plan", "read"):
        tokens = StatementTokens(make_fixed_keyring(), SimulatedClock(1))
        caller = Principal("p", (Grant("p", "reader", ("a",)), Grant("p", denied_privilege, *table, deny=True)))
        principal, _ = tokens.verify_token(tokens.issue(caller, 60))
        for operation in ("loadTable", "planTableScan", "loadCredentials"):
            assert not allows_operation(principal.grants, operation, table)
            assert allows_operation(principal.grants, operation, neighbor)


@pytest.mark.parametrize("operation", ["updateTable", "dropTable", "addGrant", "createTable"])
async def test_statement_of_an_owner_may_only_read(operation: str) -> None:
    grant = Grant("p", "owner", ("a",))
    statement = Principal("p", (grant,), bits_max=ROLE_BITS["reader"])
    authorizer = GrantAuthorizer(None)
    assert await authorizer.allows(statement, "readRows", Securable(("a",), "table", "t"))
    assert not await authorizer.allows(statement, operation, Securable(("a",), "table", "t"))
    assert await authorizer.allows_each(statement, operation, [Securable(("a",))]) == [False]
    assert not await authorizer.allows_somewhere(statement, operation)
