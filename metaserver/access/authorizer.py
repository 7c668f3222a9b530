"""Authorization: decides whether a principal may do an operation in a namespace.

The decision uses a table of operations and the principal's grants. The module does no I/O. A grant is a role on a
namespace and all namespaces below it. A grant on the empty path is for the whole catalog. `reader` <
`writer` < `admin`, and each role includes the previous roles.

| principal | operations |
|---|---|
| any login | read the configuration and the server's metrics, list the namespaces that it has grants on |
| a grant below | list the parents of its namespaces, and see that they exist |
| reader | list, load, probe, plan, explain, query, plan tables; credentials to read; reports; timelines, indexes |
| writer | create, commit, index, drop, rename, undrop; create, change and drop empty namespaces; plan views |
| writer of the whole catalog | register, which points a name at any file of the warehouse, also of other tables |
| admin | purge dropped entries before their retention ends; grant and revoke roles within its namespace |
| admin of the whole catalog | tokens, which belong to no namespace; the audit log; the list of replicas; warehouses |

The catalog is that of one warehouse: a grant in one warehouse is none in another. Tokens, replicas and warehouses
belong to the server, so no principal has a right on them in a further warehouse (`WarehouseAuthorizer`).

A drop needs only a writer, because it can be undone. `purgeRequested` on a drop also needs only a writer, because files
stay until the retention ends. An operation on several places (rename, undrop elsewhere, a transaction on many
tables) needs the role in each place; the caller checks each place. An operation that is not in the table
needs an admin of the whole catalog. So a missing entry denies access and never grants it.
"""

from __future__ import annotations

import shlex
from enum import Enum

import msgspec

from seamark.formats.runtime.errors import Forbidden
from seamark.metaserver.access.principal import RANKS, Principal, Role, show_path
from seamark.metaserver.store.model import NamespacePath


class Scope(Enum):
    NAMESPACE = "a grant on the namespace or above it"
    CATALOG = "a grant on the whole catalog"
    SEEN = "a grant on the namespace, above it or below it"
    LOGIN = "any login"


class Rule(msgspec.Struct, frozen=True):
    role: Role
    scope: Scope = Scope.NAMESPACE
    read_only: bool = False
    """Whether the operation changes nothing. This is always true for operations of the role reader."""
    recorded: bool = False
    """Whether the audit log records the operation although it changes nothing."""


_UNKNOWN = Rule(Role.ADMIN, Scope.CATALOG)


def _make_rules() -> dict[str, Rule]:
    reader = """loadNamespaceMetadata listTables loadTable tableExists loadCredentials reportMetrics signRequest
        listViews loadView viewExists listFunctions loadFunction
        planTableScan fetchPlanningResult cancelPlanning fetchScanTasks
        listDropped listTableMetrics listTimeline listTableTimeline
        loadStream listStreams loadStreamPosition loadStreamTopic readRows getRows
        loadTableHealth loadTablePolicy listRunningJobs listRunningTableJobs
        listFiles listColumnStats loadColumnLayout listPartitions explain explainQuery
        makePlanTable renewPlanTable leasePlanSnapshots
        loadQueryHistory listQueryHistory adviseTable
        listIndexes loadIndex loadIndexBuild listIndexBuildFiles lookupKeys selectRows readCubeGroups
        makeCubePlan"""
    writer = """createNamespace dropNamespace updateProperties createTable updateTable dropTable unregisterTable
        expireSnapshots removeOrphanFiles rewriteManifests renameTable createView replaceView dropView renameView
        commitTransaction commitChange undrop putFunction dropFunction
        putNamespace putTable putView putTablePolicy
        putIndex dropIndex startIndexBuild registerIndexFiles finishIndexBuild
        flushRows pauseStream resumeStream drainStream
        recordAppliedAdvice applyAdvice takeAdviceStep finishAdviceStep
        quarantineIndexFile rebuildIndexRegistry listUnheldFiles recordIndexAudit"""
    admin = "purgeDropped addGrant removeGrant"
    rules = {
        name: Rule(role)
        for role, names in ((Role.READER, reader), (Role.WRITER, writer), (Role.ADMIN, admin))
        for name in names.split()
    }
    for name in ("getConfig", "metrics", "listGrants", "loadSqlState"):
        rules[name] = Rule(Role.READER, Scope.LOGIN)
    for name in ("listNamespaces", "namespaceExists"):
        rules[name] = Rule(Role.READER, Scope.SEEN)
    for name in ("registerTable", "registerView", "importTable", "importView"):
        rules[name] = Rule(Role.WRITER, Scope.CATALOG)
    for name in ("createToken", "revokeToken"):
        rules[name] = Rule(Role.ADMIN, Scope.CATALOG)
    for name in ("runStatement", "cancelStatement", "aggregate"):
        rules[name] = Rule(Role.READER, recorded=True)
    for name in ("makePlanView", "adviseTtl", "takeRewriteLease", "appendRows", "appendRowsToTables"):
        rules[name] = Rule(Role.WRITER, read_only=True)
    for name in ("createWarehouse", "putWarehouse", "dropWarehouse"):
        rules[name] = Rule(Role.ADMIN, Scope.CATALOG)
    for name in ("listTokens", "listAudit", "listReplicas", "listWarehouses", "loadWarehouse"):
        rules[name] = Rule(Role.ADMIN, Scope.CATALOG, read_only=True)
    return rules


SERVER_OPERATIONS = frozenset(
    (
        *("createToken", "revokeToken", "listTokens", "listReplicas"),
        *("createWarehouse", "putWarehouse", "dropWarehouse", "listWarehouses", "loadWarehouse"),
    )
)
"""The operations on what belongs to the server and not to one of its warehouses."""
_WRITES_UNRECORDED = frozenset({"takeRewriteLease", "appendRows", "appendRowsToTables"})
"""The operations of writers that the audit log does not record."""
RULES = _make_rules()
"""The rules by operation id. The ids are those of the Iceberg REST specification and of the OpenAPI document."""


def changes(operation: str) -> bool:
    """Return whether the operation changes something that the audit log records.

    The result is True for unknown operations.
    """
    rule = RULES.get(operation, _UNKNOWN)
    return not rule.read_only and rule.role is not Role.READER


def writes(operation: str) -> bool:
    """Return whether a server with the role read refuses the operation: it changes something, or leads to a change."""
    return changes(operation) or operation in _WRITES_UNRECORDED


def is_recorded(operation: str) -> bool:
    """Return whether the audit log records the operation, with any outcome."""
    return RULES.get(operation, _UNKNOWN).recorded or changes(operation)


class Authorizer:
    """Checks principals and operations. It has no state, so several instances may exist."""

    def require(self, principal: Principal, operation: str, namespace: NamespacePath) -> None:
        """Check that `principal` may do `operation` in `namespace`.

        Raises:
            Forbidden: The principal may not do the operation; the message names the missing grant.
        """
        if self.allows(principal, operation, namespace):
            return
        rule = RULES.get(operation, _UNKNOWN)
        wide = rule.scope is Scope.CATALOG or not namespace
        scope = "the whole catalog" if wide else f"namespace {show_path(namespace)} or one above it"
        command = f"seamark grant add {shlex.quote(principal.name)} {rule.role.value}"
        if not wide:
            command += f" --namespace {shlex.quote(show_path(namespace))}"
        where = f" in {show_path(namespace)}" if namespace else ""
        raise Forbidden(
            f"{principal.name} may not {operation}{where}: it needs the role {rule.role.value} on {scope}. "
            f"An admin grants it with: {command}"
        )

    def require_somewhere(self, principal: Principal, operation: str) -> None:
        """Check that `principal` may do `operation` in at least one namespace.

        Raises:
            Forbidden: The principal may not do the operation in any namespace.
        """
        rule = RULES.get(operation, _UNKNOWN)
        if not any(self.allows(principal, operation, grant.namespace) for grant in principal.grants):
            raise Forbidden(
                f"{principal.name} may not {operation} anywhere: it needs the role {rule.role.value}. "
                f"An admin grants it with: seamark grant add {shlex.quote(principal.name)} {rule.role.value}"
            )

    def allows(self, principal: Principal, operation: str, namespace: NamespacePath) -> bool:
        rule = RULES.get(operation, _UNKNOWN)
        if rule.scope is Scope.LOGIN:
            return True
        if rule.scope is Scope.SEEN:
            # The root is visible to all principals, and its listing is filtered.
            return not namespace or self.visible(principal, namespace)
        return self.holds(principal, rule.role, () if rule.scope is Scope.CATALOG else namespace)

    def holds(self, principal: Principal, role: Role, namespace: NamespacePath) -> bool:
        """Return whether a grant gives at least `role` on `namespace`, directly or on a parent."""
        rank = RANKS[role]
        for grant in principal.grants:  # `any` would create a generator for every request.
            if RANKS.get(grant.role, 0) >= rank and namespace[: len(grant.namespace)] == grant.namespace:
                return True
        return False

    def list_writable_namespaces(self, principal: Principal) -> tuple[NamespacePath, ...] | None:
        """Return the topmost namespaces in which `principal` may write, or None for the whole catalog."""
        if self.holds(principal, Role.WRITER, ()):
            return None
        return tuple(grant.namespace for grant in principal.grants if RANKS.get(grant.role, 0) >= Role.WRITER.rank)

    def list_readable_namespaces(self, principal: Principal) -> list[NamespacePath] | None:
        """Return the namespaces that `principal` may read with all below them, or None for the whole catalog."""
        if self.holds(principal, Role.READER, ()):
            return None
        return list(dict.fromkeys(grant.namespace for grant in principal.grants if grant.role in RANKS))

    def visible_children(self, principal: Principal, parent: NamespacePath) -> frozenset[str] | None:
        """Return the names in `parent` that a listing may include, or None for all names. The names need not exist."""
        depth = len(parent)
        names = set()
        for grant in principal.grants:
            if grant.role not in RANKS:
                continue
            if parent[: len(grant.namespace)] == grant.namespace:
                return None
            if grant.namespace[:depth] == parent:
                names.add(grant.namespace[depth])
        return frozenset(names)

    def visible(self, principal: Principal, namespace: NamespacePath) -> bool:
        """Return whether a listing may include this namespace. It may if a grant on it, above it or below it exists."""
        return any(
            grant.role in RANKS
            and (namespace[: len(grant.namespace)] == grant.namespace or grant.namespace[: len(namespace)] == namespace)
            for grant in principal.grants
        )


class WarehouseAuthorizer(Authorizer):
    """The authorizer of a further warehouse: no principal has a right on tokens, replicas and warehouses there."""

    def require(self, principal: Principal, operation: str, namespace: NamespacePath) -> None:
        if operation in SERVER_OPERATIONS:
            raise Forbidden(f"{operation} concerns the server: send it to the URL of the server, without a warehouse")
        super().require(principal, operation, namespace)

    def allows(self, principal: Principal, operation: str, namespace: NamespacePath) -> bool:
        return operation not in SERVER_OPERATIONS and super().allows(principal, operation, namespace)
