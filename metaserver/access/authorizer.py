"""Authorization: decides whether a principal may do an operation on an object.

Each operation needs privileges on an object (`RULES`). The grants of the principal give privileges on objects and on
everything in them (`rights/decisions.py`). The built-in authorizer reads the
database only if the grants are not sufficient, to determine whether the principal owns the table, view or function.

| privileges | operations |
|---|---|
| any login | read the configuration and the server's metrics, list the namespaces that it may see |
| a grant below | list the parents of its namespaces, and see that they exist |
| browse | list, load, probe; timelines, indexes, policies, state of streams |
| plan | plan, explain, plan tables, files with their statistics, reports of scans |
| read | credentials and signatures to read, lookups, rows, cubes, queries, history of queries |
| maintain | indexes, policies, expiration, orphan files, rewrites of manifests, advice |
| write | commit, rows of streams, properties, signatures to write |
| create | create in a namespace; the destination of a rename; undrop |
| drop | drop; the source of a rename |
| create and write on the whole catalog | register, which points a name at any file of the warehouse |
| manage-grants | grant and revoke; with drop: purge dropped entries before their retention ends |
| manage-grants on the whole catalog | the audit log |
| privileges on the server | tokens, replicas and warehouses |

Each warehouse has its own catalog, and a grant in one warehouse gives no rights in another. Tokens, replicas and
warehouses belong to the server, so no principal has a right on them in a further warehouse (`WarehouseAuthorizer`).

A drop needs only `drop`, because it can be undone. `purgeRequested` on a drop also needs only `drop`, because files
stay until the retention ends. An operation on several objects needs its privileges on each object, and the caller
checks each object. Examples are a rename, an undrop in a different namespace, and a transaction on many tables. An
operation that is not in the table needs an admin of the server. So a missing entry denies access and never grants it.
"""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum

import msgspec

from seamark.formats.protocol.wire import format_path, is_plan_name
from seamark.formats.runtime.errors import Forbidden, NoSuchFunction, NoSuchTable, NoSuchView
from seamark.metaserver.access.principal import Principal, show_path
from seamark.metaserver.access.rights import decisions
from seamark.metaserver.access.rights.decisions import THE_SERVER, WAREHOUSE, Securable
from seamark.metaserver.access.rights.privileges import (
    ALLOWED,
    BROWSE,
    CREATE,
    DROP,
    MAINTAIN,
    MANAGE_GRANTS,
    OWN_CREATED,
    OWNER,
    PLAN,
    READ,
    ROLE_BITS,
    WRITE,
    find_smallest_role,
    list_names,
)
from seamark.metaserver.store.model import FUNCTION, SERVER, TABLE, VIEW, Grant, NamespacePath
from seamark.metaserver.store.port import PointerStore


class Scope(Enum):
    """Where a principal must have the privileges that an operation needs."""

    OBJECT = "the privileges on the object, or on an object that contains it"
    LISTING = "the privileges on the namespace, or on a table, view or function in it"
    CATALOG = "the privileges on the whole catalog and throughout the namespace of the object"
    WAREHOUSE = "the privileges on the whole catalog and on the object"
    SERVER = "the privileges on the server"
    SEEN = "a grant on the namespace, above it or below it"
    LOGIN = "any login"


class Rule(msgspec.Struct, frozen=True):
    bits: int
    """The privileges that the operation needs."""
    scope: Scope = Scope.OBJECT
    audited_as_read: bool = False
    """Whether the audit log does not record the operation as a change, although it needs more than `read`."""
    recorded: bool = False
    """Whether the audit log records the operation, even though it changes nothing."""


_UNKNOWN = Rule(ROLE_BITS["admin"], Scope.SERVER)
_READER = ROLE_BITS["reader"]


def _make_rules() -> dict[str, Rule]:
    """Return the rule of each operation, by operation id. Without a scope, the rule concerns the object (`Scope`)."""
    operations = {
        BROWSE: """loadNamespaceMetadata loadTable tableExists loadView viewExists loadFunction
            listDropped listTimeline listTableTimeline getEvents
            loadStream loadStreamPosition loadStreamTopic listStreams
            loadTableHealth loadTablePolicy listRunningJobs listRunningTableJobs
            listIndexes loadIndex loadIndexBuild""",
        PLAN: """planTableScan fetchPlanningResult cancelPlanning fetchScanTasks reportMetrics listTableMetrics
            listFiles listColumnStats loadColumnLayout listPartitions explain explainQuery
            makePlanTable renewPlanTable leasePlanSnapshots recordStatementTime""",
        READ: """loadCredentials signRequest readRows getRows lookupKeys selectRows readCubeGroups makeCubePlan
            loadQueryHistory listQueryHistory adviseTable listIndexBuildFiles""",
        MAINTAIN: """expireSnapshots removeOrphanFiles rewriteManifests putTablePolicy putIndex dropIndex
            startIndexBuild registerIndexFiles finishIndexBuild quarantineIndexFile rebuildIndexRegistry
            listUnheldFiles recordIndexAudit pauseStream resumeStream drainStream
            recordAppliedAdvice applyAdvice takeAdviceStep finishAdviceStep""",
        WRITE: "updateProperties updateTable commitTransaction commitChange replaceView flushRows",
        CREATE: "createNamespace createTable createView undrop",
        CREATE | WRITE: "putNamespace putFunction putTable putView",
        DROP: "dropNamespace dropTable unregisterTable dropView dropFunction",
        # A table that is moved into a namespace becomes readable for the readers of the namespace.
        DROP | WRITE: "renameTable renameView",
        DROP | MANAGE_GRANTS: "purgeDropped",
        MANAGE_GRANTS: "addGrant removeGrant",
    }
    rules = {name: Rule(bits) for bits, names in operations.items() for name in names.split()}
    for name in ("getConfig", "metrics", "listGrants", "loadSqlState"):
        rules[name] = Rule(BROWSE, Scope.LOGIN)
    for name in ("listNamespaces", "namespaceExists"):
        rules[name] = Rule(BROWSE, Scope.SEEN)
    for name in ("listTables", "listViews", "listFunctions"):
        rules[name] = Rule(BROWSE, Scope.LISTING)
    for name in ("registerTable", "registerView", "importTable", "importTables", "importView"):
        rules[name] = Rule(CREATE | WRITE, Scope.CATALOG)
    for name in ("runStatement", "cancelStatement", "aggregate"):
        rules[name] = Rule(READ, recorded=True)
    # `audited_as_read`: the audit log does not record the operation as a change, although it needs more than `read`.
    for name in ("appendRows", "appendRowsToTables"):
        rules[name] = Rule(WRITE, audited_as_read=True)
    rules["makePlanView"] = Rule(READ | CREATE, audited_as_read=True)
    for name in ("adviseTtl", "takeRewriteLease"):
        rules[name] = Rule(MAINTAIN, audited_as_read=True)
    rules["listAudit"] = Rule(MANAGE_GRANTS, Scope.WAREHOUSE, audited_as_read=True)
    for name in ("createToken", "revokeToken"):
        rules[name] = Rule(MANAGE_GRANTS, Scope.SERVER)
    rules["listTokens"] = Rule(MANAGE_GRANTS, Scope.SERVER, audited_as_read=True)
    for name in ("listReplicas", "listWarehouses", "loadWarehouse"):
        rules[name] = Rule(BROWSE, Scope.SERVER, audited_as_read=True)
    rules["createWarehouse"] = Rule(CREATE, Scope.SERVER)
    rules["putWarehouse"] = Rule(CREATE | WRITE, Scope.SERVER)
    rules["dropWarehouse"] = Rule(DROP, Scope.SERVER)
    return rules


_WRITES_UNRECORDED = frozenset({"takeRewriteLease", "appendRows", "appendRowsToTables"})
"""The operations of writers that the audit log does not record."""
RULES = _make_rules()
"""The rules by operation id. The ids are those of the Iceberg REST specification and of the OpenAPI document."""
SERVER_OPERATIONS = frozenset(name for name, rule in RULES.items() if rule.scope is Scope.SERVER)
"""The operations on objects of the server, such as tokens, as opposed to objects of a warehouse."""
_MISSING = {TABLE: (NoSuchTable, "Table"), VIEW: (NoSuchView, "View"), FUNCTION: (NoSuchFunction, "Function")}


def find_rule(operation: str) -> Rule:
    """Return the rule of an operation. An unknown operation needs an admin of the server."""
    return RULES.get(operation, _UNKNOWN)


def is_audited_change(operation: str) -> bool:
    """Return whether the audit log records the operation as a change.

    These are the operations that need more privileges than the role reader has, except those with `audited_as_read`.
    The result is True for unknown operations.
    """
    rule = find_rule(operation)
    return not rule.audited_as_read and bool(rule.bits & ~_READER)


def needs_writer(operation: str) -> bool:
    """Return whether a server with the role `read` refuses the operation, because it makes or prepares a change."""
    return is_audited_change(operation) or operation in _WRITES_UNRECORDED


def is_recorded(operation: str) -> bool:
    """Return whether the audit log records the operation with every outcome. It records denials of all operations."""
    return find_rule(operation).recorded or is_audited_change(operation)


class Authorizer(ABC):
    """Decides what principals may do. A right is checked before any work for the request begins."""

    @abstractmethod
    async def allows(self, principal: Principal, operation: str, securable: Securable) -> bool:
        """Return whether `principal` may do `operation` on an object."""

    @abstractmethod
    async def allows_each(self, principal: Principal, operation: str, securables: Sequence[Securable]) -> list[bool]:
        """Return for each object whether `principal` may do `operation` on it."""

    @abstractmethod
    async def allows_somewhere(self, principal: Principal, operation: str) -> bool:
        """Return whether `principal` may do `operation` on at least one object.

        The method does not list objects. So the result may also be True if the grants of the principal concern only
        objects that do not exist.
        """

    @abstractmethod
    async def sees(self, principal: Principal, namespaces: Sequence[NamespacePath]) -> list[bool]:
        """Return for each namespace whether `principal` may browse it or an object in it, and so see it in listings."""

    @abstractmethod
    async def explain_refusal(
        self, principal: Principal, operation: str, securable: Securable, *, names_entry: bool = False
    ) -> str:
        """Return a message that says which right is missing, and how an admin grants it.

        Args:
            principal: The principal.
            operation: The id of the operation.
            securable: The object.
            names_entry: Whether the message may name a table, view or function. If False, it names only the namespace.
        """

    @abstractmethod
    def allows_everywhere(self, principal: Principal, operation: str, namespace: NamespacePath) -> bool:
        """Return whether `principal` may certainly do `operation` on every object in a namespace.

        If the result is False, the caller must check each object.
        """

    @abstractmethod
    def list_visible_children(self, principal: Principal, parent: NamespacePath) -> frozenset[str] | None:
        """Return the names in `parent` that a listing may include, or None if the caller must ask `sees`."""

    @abstractmethod
    def list_readable_namespaces(self, principal: Principal) -> list[NamespacePath] | None:
        """Return namespaces outside of which `principal` can read no object, or None for all namespaces."""

    @abstractmethod
    def list_writable_namespaces(self, principal: Principal) -> tuple[NamespacePath, ...] | None:
        """Return the namespaces in whose locations `principal` may place objects. None means the whole warehouse."""

    @abstractmethod
    def list_namespaces_granting_ownership(self, principal: Principal) -> tuple[NamespacePath, ...]:
        """Return the namespaces such that `principal` becomes the owner of the objects that it creates in them."""

    @abstractmethod
    def list_namespaces_for_location_reuse(self, principal: Principal) -> tuple[NamespacePath, ...]:
        """Return the namespaces in which `principal` may create objects at the locations of dropped objects.

        These are namespaces in which the principal may create and write every object. It already has access to the
        files of dropped objects there.
        """

    async def require(
        self, principal: Principal, operation: str, securable: Securable, shown_name: str | None = None
    ) -> None:
        """Check that `principal` may do `operation` on an object.

        Args:
            principal: The principal.
            operation: The id of the operation.
            securable: The object.
            shown_name: The name that the client used for the object, if it differs from the object's name.

        Raises:
            Forbidden: The principal may not do the operation. The message names the missing right.
            NoSuchTable, NoSuchView, NoSuchFunction: The principal sees the namespace, but may not browse the object.
                The answer does not depend on whether the object exists.
        """
        if await self.allows(principal, operation, securable):
            return
        missing = _MISSING.get(securable.kind)
        is_visible = missing is not None and await self.allows(principal, "tableExists", securable)
        if missing is not None and not is_visible:
            error_type, title = missing
            container = securable.container
            if await self.allows(principal, "listTables", container):
                name = format_path(securable.namespace, shown_name or securable.name)
                raise error_type(f"{title} does not exist: {name}")
        # The name of a plan's table would show whether the plan exists.
        names_entry = is_visible and not is_plan_name(shown_name or securable.name)
        raise Forbidden(await self.explain_refusal(principal, operation, securable, names_entry=names_entry))

    async def require_new_name(self, principal: Principal, operation: str, securable: Securable) -> None:
        """Check that `principal` may give an object a name. The caller has checked its right on the namespace.

        Args:
            principal: The principal.
            operation: The id of the operation.
            securable: The object with the new name.

        Raises:
            Forbidden: The principal may not browse or create an object with the name. The answer does not depend on
                whether the object exists.
        """
        _, denied_bits = decisions.find_privilege_bits(principal.grants, securable)
        if denied_bits & (BROWSE | CREATE) or not await self.allows(principal, "tableExists", securable):
            raise Forbidden(
                f"{principal.name} may not {operation} in {show_path(securable.namespace)} with the name "
                f"{securable.name[:100]}: a denial or the policy of the server does not allow it; choose another name"
            )

    async def require_somewhere(self, principal: Principal, operation: str) -> None:
        """Check that `principal` may do `operation` on at least one object.

        Raises:
            Forbidden: The principal may not do the operation anywhere.
        """
        if not await self.allows_somewhere(principal, operation):
            need_text = describe_need(find_rule(operation).bits)
            raise Forbidden(
                f"{principal.name} may not {operation} anywhere: it needs {need_text}. "
                f"An admin grants it with: {format_grant_command(principal, find_rule(operation).bits, WAREHOUSE)}"
            )


def describe_need(bits: int) -> str:
    """Return the privileges that an operation needs, and the smallest role with these privileges, for messages."""
    names = list_names(bits)
    role = find_smallest_role(bits)
    return f"the privilege{'s' if len(names) > 1 else ''} {' and '.join(names)}, as in the role {role}"


def format_grant_command(principal: Principal, bits: int, securable: Securable) -> str:
    """Return the command with which an admin grants a privilege, or the smallest role with several privileges."""
    names = list_names(bits)
    right = names[0] if len(names) == 1 else find_smallest_role(bits)
    command = f"seamark grant add {shlex.quote(principal.name)} {right}"
    if securable.kind == SERVER:
        return f"{command} --server"
    if securable.namespace:
        command += f" --namespace {shlex.quote(show_path(securable.namespace))}"
    return f"{command} --{securable.kind} {shlex.quote(securable.name)}" if securable.name else command


class GrantAuthorizer(Authorizer):
    """The built-in authorizer, which decides by the grants in the database."""

    def __init__(self, store: PointerStore | None) -> None:
        """Create an authorizer.

        Args:
            store: The pointer store of the warehouse, which contains the owners of tables. If it is None, owners have
                no special rights.
        """
        self._store = store

    async def allows(self, principal: Principal, operation: str, securable: Securable) -> bool:
        if find_rule(operation).bits & ~principal.bits_max:
            return False
        grants = principal.grants
        if allows_operation(grants, operation, securable):
            return True
        owner_grants = await self._list_owned(principal, operation, securable)
        return bool(owner_grants) and allows_operation((*grants, *owner_grants), operation, securable)

    async def allows_each(self, principal: Principal, operation: str, securables: Sequence[Securable]) -> list[bool]:
        if find_rule(operation).bits & ~principal.bits_max:
            return [False] * len(securables)
        grants: Sequence[Grant] = principal.grants
        results = [allows_operation(grants, operation, securable) for securable in securables]
        refused_indexes = [index for index, is_allowed in enumerate(results) if not is_allowed]
        refused_indexes = [index for index in refused_indexes if securables[index].name]
        if self._store is None or not refused_indexes or not await self._store.owns_any(principal.names):
            return results
        for namespace in dict.fromkeys(securables[index].namespace for index in refused_indexes):
            owner_grants = await self._store.list_owned(principal.names, namespace, None)
            all_grants = (*grants, *owner_grants)
            for index in refused_indexes:
                if securables[index].namespace == namespace:
                    results[index] = allows_operation(all_grants, operation, securables[index])
        return results

    async def _list_owned(self, principal: Principal, operation: str, securable: Securable) -> list[Grant]:
        """Return the grants by which the principal owns the object.

        For a listing of a namespace, they are the grants by which it owns objects in the namespace.
        """
        rule = find_rule(operation)
        # Owners have rights only on tables, views and functions of a namespace, so other operations need no query.
        if self._store is None or rule.scope not in (Scope.OBJECT, Scope.LISTING) or not securable.namespace:
            return []
        if not securable.name and rule.scope is not Scope.LISTING:
            return []
        return await self._store.list_owned(principal.names, securable.namespace, securable.name or None)

    async def allows_somewhere(self, principal: Principal, operation: str) -> bool:
        grants = principal.grants
        if find_rule(operation).bits & ~principal.bits_max:
            return False
        if any(
            not grant.deny and allows_operation(grants, operation, decisions.get_securable(grant)) for grant in grants
        ):
            return True
        if self._store is None or find_rule(operation).scope is not Scope.OBJECT:
            return False
        return await self._store.owns_any(principal.names)

    async def sees(self, principal: Principal, namespaces: Sequence[NamespacePath]) -> list[bool]:
        return [decisions.can_list_namespace(principal.grants, namespace) for namespace in namespaces]

    async def explain_refusal(
        self, principal: Principal, operation: str, securable: Securable, *, names_entry: bool = False
    ) -> str:
        """Return a message that names either the denial of the operation, or the missing right and how to grant it.

        If `names_entry` is true, the message may name a table, view or function. Otherwise, it names only the
        namespace.
        """
        rule = find_rule(operation)
        # The entry to create need not exist, so a right to create is granted on the namespace.
        names_entry = names_entry and rule.scope is Scope.OBJECT and not rule.bits & CREATE
        granted_securable = securable if names_entry else securable.container
        if rule.scope is Scope.SERVER:
            securable, scope = THE_SERVER, "the server"
            granted_securable = securable
        elif rule.scope in (Scope.CATALOG, Scope.WAREHOUSE) or not securable.namespace:
            securable, scope = WAREHOUSE, "the whole catalog"
            granted_securable = securable
        elif names_entry:
            entry = f"{securable.kind} {show_path((*securable.namespace, securable.name))}"
            scope = f"{entry} or a namespace above it"
        else:
            scope = f"namespace {show_path(securable.namespace)} or one above it"
        place = f" in {show_path(securable.namespace)}" if securable.namespace else ""
        _, denied_bits = decisions.find_privilege_bits(principal.grants, securable)
        if denied_bits & rule.bits:
            names = " and ".join(list_names(denied_bits & rule.bits))
            return f"{principal.name} may not {operation}{place}: a grant denies it {names} there"
        # With the right on the whole catalog, only a denial below the catalog can be the reason.
        if rule.scope is Scope.CATALOG and decisions.have_privileges(principal.grants, WAREHOUSE, rule.bits):
            return f"{principal.name} may not {operation}{place}: an object in the namespace is denied to it"
        return (
            f"{principal.name} may not {operation}{place}: it needs {describe_need(rule.bits)}, on {scope}. "
            f"An admin grants it with: {format_grant_command(principal, rule.bits, granted_securable)}"
        )

    def allows_everywhere(self, principal: Principal, operation: str, namespace: NamespacePath) -> bool:
        grants = principal.grants
        return not any(grant.deny for grant in grants) and allows_operation(grants, operation, Securable(namespace))

    def list_visible_children(self, principal: Principal, parent: NamespacePath) -> frozenset[str] | None:
        return decisions.list_visible_children(principal.grants, parent)

    def list_readable_namespaces(self, principal: Principal) -> list[NamespacePath] | None:
        """Return the namespaces in which a grant lets `principal` read, or None if it may read in all namespaces.

        Denials below these namespaces are not considered, so the caller must still check each object.
        """
        grants = principal.grants
        if decisions.have_privileges(grants, WAREHOUSE, READ):
            return None
        readable = (grant for grant in grants if not grant.deny and ALLOWED.get(grant.role, 0) & READ)
        return list(dict.fromkeys(grant.namespace for grant in readable))

    def list_writable_namespaces(self, principal: Principal) -> tuple[NamespacePath, ...] | None:
        if decisions.holds_everywhere(principal.grants, CREATE | WRITE):
            return None
        return tuple(decisions.list_namespaces_with(principal.grants, CREATE | WRITE))

    def list_namespaces_granting_ownership(self, principal: Principal) -> tuple[NamespacePath, ...]:
        return tuple(decisions.list_namespaces_with(principal.grants, OWN_CREATED))

    def list_namespaces_for_location_reuse(self, principal: Principal) -> tuple[NamespacePath, ...]:
        """Return the namespaces in which `principal` may create objects at the locations of dropped objects."""
        # A denial may concern the dropped object, under its last name or an earlier name.
        if any(grant.deny for grant in principal.grants) and not decisions.have_privileges(
            principal.grants, WAREHOUSE, MANAGE_GRANTS
        ):
            return ()
        # Do not trust ownership: the namespace may have been dropped with tables of others, and created again by its
        # present owner.
        grants = [grant for grant in principal.grants if grant.role != OWNER]
        return tuple(decisions.list_namespaces_with(grants, CREATE | WRITE))


class WarehouseAuthorizer(GrantAuthorizer):
    """The authorizer of a further warehouse of a server.

    It denies operations on tokens, replicas and warehouses, because these belong to the server.
    """

    async def require(
        self, principal: Principal, operation: str, securable: Securable, shown_name: str | None = None
    ) -> None:
        if operation in SERVER_OPERATIONS or securable.kind == SERVER:
            raise Forbidden(f"{operation} concerns the server: send it to the URL of the server, without a warehouse")
        await super().require(principal, operation, securable, shown_name)

    async def allows(self, principal: Principal, operation: str, securable: Securable) -> bool:
        if operation in SERVER_OPERATIONS or securable.kind == SERVER:
            return False
        return await super().allows(principal, operation, securable)


def allows_operation(grants: Sequence[Grant], operation: str, securable: Securable) -> bool:
    """Return whether the grants allow an operation on an object. The function does no I/O."""
    rule = RULES.get(operation, _UNKNOWN)
    scope = rule.scope
    if scope is Scope.OBJECT:
        return decisions.have_privileges(grants, securable, rule.bits)
    if scope is Scope.LOGIN:
        return True
    if scope is Scope.SEEN:
        # The root is visible to all principals, and its listing is filtered.
        return not securable.namespace or decisions.can_list_namespace(grants, securable.namespace)
    if scope is Scope.LISTING:
        return decisions.have_privileges(grants, securable, rule.bits) or decisions.has_visible_entry(
            grants, securable.namespace
        )
    if scope is Scope.SERVER:
        return decisions.have_privileges(grants, THE_SERVER, rule.bits)
    if not decisions.have_privileges(grants, securable, rule.bits):
        return False
    if scope is Scope.WAREHOUSE:
        return decisions.have_privileges(grants, WAREHOUSE, rule.bits)
    # For Scope.CATALOG, no denial inside the namespace may take a privilege away either.
    return decisions.holds_throughout(grants, securable.namespace, rule.bits)
