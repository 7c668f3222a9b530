"""Tests of rules and scopes. A brute-force model checks the decisions, and every route must have a rule."""

from __future__ import annotations

import itertools

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from seamark.commands.serving.extensions import EXTENSIONS
from seamark.formats.protocol.wire import PLAN_MARK
from seamark.formats.runtime.errors import BadRequest, Forbidden
from seamark.metaserver.access.authorizer import RULES, GrantAuthorizer, Scope, allows_operation, is_audited_change
from seamark.metaserver.access.principal import (
    ANONYMOUS,
    Principal,
    Role,
    check_principal_name,
    check_token_name,
    make_grant,
    parse_path,
    parse_role,
    show_path,
)
from seamark.metaserver.access.rights import decisions
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.api.app import add_routes
from seamark.metaserver.api.http.describe import get_description
from seamark.metaserver.store.model import Grant, NamespacePath

AUTHORIZER = GrantAuthorizer(None)
ANN_OF_A = Principal("ann", (Grant("ann", "admin", ("a",)),))
PATHS: list[NamespacePath] = [path for depth in range(4) for path in itertools.product("ab", repeat=depth)]
ROLES = ["reader", "writer", "admin"]
READER_OPERATIONS = """loadNamespaceMetadata listTables loadTable tableExists loadCredentials reportMetrics signRequest
    listViews loadView viewExists listFunctions loadFunction
    planTableScan fetchPlanningResult cancelPlanning fetchScanTasks
    listDropped listTableMetrics listTimeline listTableTimeline getEvents
    loadStream listStreams loadStreamPosition loadStreamTopic readRows getRows
    loadTableHealth loadTablePolicy listRunningJobs listRunningTableJobs
    listFiles listColumnStats loadColumnLayout listPartitions explain explainQuery
    makePlanTable renewPlanTable leasePlanSnapshots recordStatementTime loadQueryHistory listQueryHistory adviseTable
    listIndexes loadIndex loadIndexBuild listIndexBuildFiles lookupKeys selectRows readCubeGroups makeCubePlan
    runStatement cancelStatement aggregate"""
WRITER_OPERATIONS = """createNamespace dropNamespace updateProperties createTable updateTable dropTable unregisterTable
    expireSnapshots removeOrphanFiles rewriteManifests renameTable createView replaceView dropView renameView
    commitTransaction commitChange undrop putFunction dropFunction
    putNamespace putTable putView putTablePolicy putIndex dropIndex startIndexBuild registerIndexFiles finishIndexBuild
    flushRows pauseStream resumeStream drainStream
    recordAppliedAdvice applyAdvice takeAdviceStep finishAdviceStep
    quarantineIndexFile rebuildIndexRegistry listUnheldFiles recordIndexAudit
    makePlanView adviseTtl takeRewriteLease appendRows appendRowsToTables"""
ADMIN_OPERATIONS = "purgeDropped addGrant removeGrant"
CATALOG_WRITER_OPERATIONS = "registerTable registerView importTable importTables importView"
CATALOG_ADMIN_OPERATIONS = """createToken revokeToken createWarehouse putWarehouse dropWarehouse
    listTokens listAudit listReplicas listWarehouses loadWarehouse"""
LEAST_ROLES = {
    **dict.fromkeys(READER_OPERATIONS.split(), ("reader", False)),
    **dict.fromkeys(WRITER_OPERATIONS.split(), ("writer", False)),
    **dict.fromkeys(ADMIN_OPERATIONS.split(), ("admin", False)),
    **dict.fromkeys(CATALOG_WRITER_OPERATIONS.split(), ("writer", True)),
    **dict.fromkeys(CATALOG_ADMIN_OPERATIONS.split(), ("admin", True)),
}
"""The least role for each operation when there were only three roles, and whether it had to be on the whole catalog."""

grants = st.lists(st.builds(Grant, st.just("p"), st.sampled_from([*ROLES, "root"]), st.sampled_from(PATHS)), max_size=4)


def list_rights(grants: list[Grant]) -> set[tuple[str, NamespacePath]]:
    """Return every (role, namespace) that the grants give, computed without the server.

    A grant applies to its namespace and all namespaces below it. A role includes all weaker roles.
    """
    rights = set()
    for grant in grants:
        for path in PATHS:
            is_inside = len(path) >= len(grant.namespace) and all(
                path[index] == level for index, level in enumerate(grant.namespace)
            )
            if is_inside and grant.role in ROLES:
                rights |= {(role, path) for role in ROLES[: ROLES.index(grant.role) + 1]}
    return rights


@given(grants, st.sampled_from(sorted(RULES)), st.sampled_from(PATHS))
def test_grants_of_the_three_roles_allow_the_operations_of_each_role(
    user_grants: list[Grant], operation: str, namespace: NamespacePath
) -> None:
    rule, model = RULES[operation], list_rights(user_grants)
    if rule.scope is Scope.LOGIN:
        expected = True
    elif rule.scope is Scope.SEEN:
        expected = not namespace or any(
            ("reader", path) in model and path[: len(namespace)] == namespace for path in PATHS
        )
    else:
        role, is_wide = LEAST_ROLES[operation]
        expected = (role, () if is_wide else namespace) in model
    assert allows_operation(user_grants, operation, Securable(namespace)) is expected
    for kind in ("table", "view", "function") if namespace else ():
        assert allows_operation(user_grants, operation, Securable(namespace, kind, "x")) is expected


async def test_refusal_is_an_error_exactly_if_the_operation_is_not_allowed() -> None:
    principal = Principal("p", (Grant("p", "writer", ("a",)),))
    for operation, namespace in itertools.product(RULES, PATHS):
        if await AUTHORIZER.allows(principal, operation, Securable(namespace)):
            await AUTHORIZER.require(principal, operation, Securable(namespace))
        else:
            with pytest.raises(Forbidden):
                await AUTHORIZER.require(principal, operation, Securable(namespace))


@given(grants, st.sampled_from(PATHS))
def test_namespace_is_visible_exactly_if_a_grant_is_on_its_path(
    user_grants: list[Grant], namespace: NamespacePath
) -> None:
    model = list_rights(user_grants)
    expected = any(("reader", path) in model and path[: len(namespace)] == namespace for path in PATHS)
    assert decisions.can_list_namespace(user_grants, namespace) is expected


@given(grants, st.sampled_from(PATHS))
def test_visible_children_equal_the_children_that_pass_a_separate_check(
    user_grants: list[Grant], namespace: NamespacePath
) -> None:
    for parent in (namespace, namespace[:-1], ()):
        names = decisions.list_visible_children(user_grants, parent)
        for name in {"a", "b", "c", "no-grant", *(path[len(parent)] for path in PATHS if len(path) > len(parent))}:
            assert decisions.can_list_namespace(user_grants, (*parent, name)) is (names is None or name in names)


@given(grants, grants, st.sampled_from(sorted(RULES)), st.sampled_from(PATHS))
def test_more_grants_never_allow_less(
    user_grants: list[Grant], extra_grants: list[Grant], operation: str, namespace: NamespacePath
) -> None:
    if allows_operation(user_grants, operation, Securable(namespace)):
        assert allows_operation((*user_grants, *extra_grants), operation, Securable(namespace))


def test_every_route_that_needs_a_login_has_a_rule() -> None:
    app = web.Application()
    add_routes(app, EXTENSIONS)
    descriptions = [get_description(route.handler) for route in app.router.routes()]
    operations = {description.operation for description in descriptions if not description.public}
    assert operations == set(RULES)


async def test_operation_without_a_rule_requires_a_catalog_admin() -> None:
    await AUTHORIZER.require(ANONYMOUS, "newThing", Securable(("a",)))
    principal = Principal("p", (Grant("p", "admin", ("a",)), Grant("p", "writer")))
    with pytest.raises(Forbidden):
        await AUTHORIZER.require(principal, "newThing", Securable(("a",)))
    assert is_audited_change("newThing")


def test_changing_operations_are_distinguished_from_reads() -> None:
    for operation in ("createTable", "updateTable", "dropTable", "purgeDropped", "createToken", "addGrant", "undrop"):
        assert is_audited_change(operation), operation
    for operation in ("loadTable", "listTables", "getConfig", "metrics", "signRequest", "listTokens", "listAudit"):
        assert not is_audited_change(operation), operation


async def test_refusal_names_the_principal_the_right_the_object_and_the_command_that_grants_it() -> None:
    with pytest.raises(Forbidden) as error:
        await AUTHORIZER.require(Principal("ann"), "createTable", Securable(("a b", "c.d")))
    assert error.value.message == (
        r"ann may not createTable in a b.c\.d: it needs the privilege create, as in the role writer, on namespace "
        r"a b.c\.d or one above it. An admin grants it with: seamark grant add ann create --namespace 'a b.c\.d'"
    )
    with pytest.raises(Forbidden, match=r"role admin, on the server.*grant add 'oidc:x y' manage-grants --server$"):
        await AUTHORIZER.require(Principal("oidc:x y"), "createToken", Securable())
    with pytest.raises(Forbidden, match=r"role writer, on the whole catalog.*grant add ann writer$"):
        await AUTHORIZER.require(ANN_OF_A, "registerTable", Securable(("a",)))
    with pytest.raises(Forbidden, match=r"on namespace a or one above.* ann read --namespace a$"):
        await AUTHORIZER.require(Principal("ann"), "readRows", Securable(("a",), "table", "t"))
    denied_principal = Principal("ann", (Grant("ann", "reader"), Grant("ann", "read", ("a",), deny=True)))
    with pytest.raises(Forbidden, match="a grant denies it read there"):
        await AUTHORIZER.require(denied_principal, "readRows", Securable(("a",), "table", "t"))


@pytest.mark.parametrize(
    ("operation", "right"), [("updateTable", "write"), ("dropTable", "drop"), ("putIndex", "maintain")]
)
async def test_refusal_on_a_visible_table_names_the_table_and_grants_only_on_it(operation: str, right: str) -> None:
    bob = Principal("bob", (Grant("bob", "read", ("shop",), kind="table", name="my orders"),))
    with pytest.raises(Forbidden) as error:
        await AUTHORIZER.require(bob, operation, Securable(("shop",), "table", "my orders"))
    assert error.value.message.startswith(f"bob may not {operation} in shop: it needs the privilege {right},")
    assert "on table shop.my orders or a namespace above it." in error.value.message
    assert error.value.message.endswith(f"seamark grant add bob {right} --namespace shop --table 'my orders'")


async def test_refusal_does_not_name_a_hidden_table_the_table_of_a_plan_or_a_table_to_create() -> None:
    reader = Principal("bob", (Grant("bob", "read", ("shop",)),))
    plan_name = f"orders{PLAN_MARK}{'0' * 32}"
    for principal, operation, name, shown_name in (
        (Principal("bob"), "updateTable", "orders", None),
        (reader, "updateTable", "orders", plan_name),
        (reader, "updateTable", plan_name, None),
        (reader, "putTable", "orders", None),
    ):
        with pytest.raises(Forbidden, match=r"on namespace shop or one above it\. .* --namespace shop$") as error:
            await AUTHORIZER.require(principal, operation, Securable(("shop",), "table", name), shown_name)
        assert "orders" not in error.value.message
        assert plan_name not in error.value.message


async def test_refusal_of_a_right_on_any_object_is_a_complete_sentence() -> None:
    with pytest.raises(Forbidden) as error:
        await AUTHORIZER.require_somewhere(Principal("bob"), "createNamespace")
    assert error.value.message == (
        "bob may not createNamespace anywhere: it needs the privilege create, as in the role writer. "
        "An admin grants it with: seamark grant add bob create"
    )


# Names and scopes as text --------------------------------------------------------------------------------------------

namespace_levels = st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1, max_size=8).filter(
    lambda name: name not in (".", "..")  # These are not namespace names.
)


@given(st.lists(namespace_levels, min_size=1, max_size=4).map(tuple))
def test_any_namespace_survives_as_text_of_a_scope(path: NamespacePath) -> None:
    assert parse_path(show_path(path)) == path
    assert parse_role(f"writer:{show_path(path)}") == (Role.WRITER, path)


@pytest.mark.parametrize("text", ["", ".", "a.", ".a", "a..b", "a\\", "a\\b", "\\", "a\x00", "a\x1fb", "x" * 256])
def test_malformed_scope_is_rejected_rather_than_widened(text: str) -> None:
    with pytest.raises(BadRequest):
        parse_path(text)
    with pytest.raises(BadRequest):
        parse_role(f"reader:{text}")


@pytest.mark.parametrize("text", ["", "Reader", "reader ", "root", " admin", "reader;a", "*"])
def test_only_the_three_role_names_are_accepted(text: str) -> None:
    with pytest.raises(BadRequest, match="reader, writer, admin"):
        parse_role(text)


@pytest.mark.parametrize("name", ["oidc:ann", "a:b", "", "anonymous", "-x", "a b", "a\n", "é", "x" * 129, "a/b", "a+b"])
def test_ambiguous_token_names_are_rejected(name: str) -> None:
    with pytest.raises(BadRequest):
        check_token_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "oidc:",
        "oidc:a\nb",
        "service:ann",
        "oidc-group:",
        "oidc-group-group:ann",
        ":ann",
        "9:ann",
        "anonymous",
        "OIDC:ann",
    ],
)
def test_grants_require_a_possible_principal_name(name: str) -> None:
    with pytest.raises(BadRequest):
        make_grant(name, "reader", ())
    for principal_name in (
        "oidc:auth0|5 f:g",
        "corp:ann",
        "oidc-group:engineers",
        "k8s:system:serviceaccount:etl:loader",
    ):
        assert check_principal_name(principal_name) == principal_name
