"""Finds the positions of table names in a query's text by Spark's parser, and replaces these names.

Each reference receives a marker: an alias inside the alias of the reference (`(t AS marker) AS t`). Spark's analyser
keeps the marker above the relation to which the name refers, also in WITH, subqueries and copied plans. Therefore each
relation of the plan has a known position in the text. A relation without a marker belongs to a view. An option of the
reference cannot be the marker, because Spark uses the options of the first reference for all references to a table.

Only queries have positions, because the text is analysed again with other names. The query may be the whole statement,
or the query whose rows a statement writes (`find_query`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

from seamark.connector.plans.quotes import backquote, quote_name
from seamark.connector.plans.splices import Replacement, splice
from seamark.connector.spark.query.catalyst import Catalyst, Node
from seamark.connector.spark.scala import to_list, to_strings

_MARK = "seamark~place~"
REFERENCES_MAX = 64
_QUERY = frozenset(
    {"Aggregate", "Distinct", "Except", "Filter", "Generate", "GlobalLimit", "Intersect", "Join", "LateralJoin"}
    | {"LocalLimit", "LocalRelation", "Offset", "OneRowRelation", "PipeOperator", "Pivot", "Project"}
    | {"RelationTimeTravel", "Repartition", "RepartitionByExpression", "Sample", "Sort", "SubqueryAlias", "Tail"}
    | {"Union", "UnresolvedHaving", "UnresolvedHint", "UnresolvedInlineTable", "UnresolvedRelation", "Unpivot"}
    | {"UnresolvedSubqueryColumnAliases", "UnresolvedTVFAliases", "UnresolvedTableValuedFunction", "UnresolvedWith"}
    | {"Window", "WithWindowDefinition"}
)
_QUERY_METHODS = {"InsertIntoStatement": "query", "CreateTableAsSelect": "query", "MergeIntoTable": "sourceTable"}
"""The method that returns the query of a statement, by the kind of the statement. The statement writes its rows."""
_TARGET_METHODS = {"InsertIntoStatement": "table", "CreateTableAsSelect": "name", "MergeIntoTable": "targetTable"}
_ALIASES = ("SubqueryAlias", "UnresolvedSubqueryColumnAliases")
_VERSION = re.compile(
    r"""\s+(?:FOR\s+)?(?:SYSTEM_)?VERSION\s+AS\s+OF\s+
    (?:(?P<quote>['"]?)(?P<number>[0-9]{1,19})(?P=quote)(?![\w.])|'(?P<single>[a-z_][^'"\\]*)'|"(?P<double>[a-z_][^'"\\]*)")""",
    re.IGNORECASE | re.VERBOSE | re.ASCII,
)
"""Matches VERSION AS OF with a snapshot id, or with the name of a branch or tag that cannot be a number."""
_ORIGIN = re.compile(r"Origin\([^,]*,[^,]*,Some\(([0-9]+)\),Some\(([0-9]+)\),")
"""Matches the text form of an Origin in Spark, and captures the positions of the first and the last character."""
_PLAIN_NAME = re.compile(r"[a-z_][a-z0-9_]*(\.[a-z_][a-z0-9_]*)*", re.IGNORECASE | re.ASCII)
_BLANKS_AND_COMMENTS = r"(?:\s|--[^\n]*|/\*(?:[^*]|\*(?!/))*\*/)*+"
_NESTED_COMMENT = re.compile(r"/\*(?:[^*/]|\*(?!/)|/(?!\*))*+/\*")
_COMMENT_AT_DOT = re.compile(r"\.\s*+(?:--|/\*)|/\s*+\.|(?<!\s)[^\S\n]*+\n\s*+\.")
"""Matches a comment next to a dot, or the end of a line before a dot.

A match begins only at the start of a run of blanks, which keeps the search fast.
"""
_HIDDEN_NAME = re.compile(rf"\bIDENTIFIER{_BLANKS_AND_COMMENTS}\(|\$\{{", re.IGNORECASE)
"""Matches a name that is the value of an expression, and a variable that Spark replaces in the text."""
_TABLE_STATEMENT = re.compile(r"\bTABLE\s+\Z", re.IGNORECASE)
"""Matches `TABLE t`. Such a table cannot have an alias."""


class UnsupportedQuery(Exception):
    """Raised if the text of a query cannot be changed, so the original text runs. The message is the reason."""


class ReferencePosition(NamedTuple):
    """The position of a table name in the text: the characters [start, end)."""

    start: int
    end: int
    end_with_version: int
    """The end of the name and its version, where options or an alias may begin."""
    alias: str | None
    """The alias to add after a replaced name, or None if the reference already has an alias."""
    snapshot_id: int | None
    """The snapshot id in VERSION AS OF, or None."""
    ref: str | None
    """The branch or tag in VERSION AS OF, or None."""


def is_write(catalyst: Catalyst, statement: Node) -> bool:
    """Return whether the statement writes the rows of a query."""
    return catalyst.find_kind(statement) in _QUERY_METHODS


def find_query(catalyst: Catalyst, statement: Node) -> Node:
    """Return the query of a parsed statement: the statement itself, or the query whose rows it writes."""
    method_name = _QUERY_METHODS.get(catalyst.find_kind(statement))
    return statement if method_name is None else getattr(statement, method_name)()


def find_references(catalyst: Catalyst, text: str, statement: Node) -> list[ReferencePosition]:
    """Return the table references in the query of a parsed statement.

    Raises:
        UnsupportedQuery: The text cannot be rewritten.
    """
    if _MARK in text:
        raise UnsupportedQuery(f"the text contains {_MARK}, which is a reserved name")
    references: list[ReferencePosition] = []
    query = find_query(catalyst, statement)
    with_subqueries = catalyst.has_subqueries(query)
    remaining_nodes: list[tuple[Node, tuple[str, str], Node, frozenset[str]]] = [(query, ("", ""), None, frozenset())]
    while remaining_nodes:
        node, outer_kinds, parent, with_names = remaining_nodes.pop()
        kind = catalyst.find_kind(node)
        if kind not in _QUERY:
            raise UnsupportedQuery(f"the statement cannot be parsed: {kind or 'unknown'}")
        if kind == "UnresolvedRelation":
            reference = _read_reference(catalyst, text, node, outer_kinds, parent, with_names)
            references += [] if reference is None else [reference]
        if kind == "UnresolvedWith":
            with_subqueries = True  # The flag of `query` does not cover subqueries in WITH.
            recursive = bool(node.allowRecursion())
            for pair in to_list(node.cteRelations()):
                name = str(pair._1()).lower()
                remaining_nodes.append(
                    (pair._2(), (kind, outer_kinds[0]), node, with_names | {name} if recursive else with_names)
                )
                with_names |= {name}
        child_nodes = [*catalyst.list_children(node), *(to_list(node.subqueries()) if with_subqueries else ())]
        if kind == "RelationTimeTravel":
            child_nodes.append(node.relation())
        remaining_nodes += [(child, (kind, outer_kinds[0]), node, with_names) for child in child_nodes]
    references = sorted(set(references))
    if len(references) > REFERENCES_MAX:
        raise UnsupportedQuery(f"the query has more than {REFERENCES_MAX} tables")
    if _has_qualified_column(text, references):
        raise UnsupportedQuery("the name of a column includes a schema")
    if is_write(catalyst, statement):
        # Spark compares the name of the table that is written with the names of the tables that are read.
        target = _find_target_name(catalyst, statement)
        read_names = {
            catalyst.parse_names(text[reference.start : reference.end])[-1].lower() for reference in references
        }
        if target is None or target.lower() in read_names:
            raise UnsupportedQuery("the query reads the table that it writes")
    return references


def _has_qualified_column(text: str, references: Sequence[ReferencePosition]) -> bool:
    """Return whether a column may be written as `db.t.c`. If one is, the table names cannot be replaced.

    After `db.t` has been replaced by a name with an alias, Spark might resolve `db.t.c` as a struct field instead: as
    the field `t.c` of a column `db`, or as the field `c` of a column `t` in a relation with the alias `db`.
    """
    text_without_tables = splice(text, [Replacement(reference.start, reference.end, "") for reference in references])
    names = {reference.alias for reference in references if reference.alias is not None}
    forms = {form for name in names for form in (name, backquote(name), quote_name(name))}
    alternatives = "|".join(map(re.escape, sorted(forms)))
    if not names:
        return False
    if _HIDDEN_NAME.search(text_without_tables) or re.search(
        rf"\.{_BLANKS_AND_COMMENTS}(?:{alternatives}){_BLANKS_AND_COMMENTS}\.", text_without_tables, re.IGNORECASE
    ):
        return True
    # A regular expression cannot match nested comments.
    return bool(_NESTED_COMMENT.search(text_without_tables) and _COMMENT_AT_DOT.search(text_without_tables))


def _find_target_name(catalyst: Catalyst, statement: Node) -> str | None:
    """Return the last level of the name of the table that the statement writes, or None."""
    node = getattr(statement, _TARGET_METHODS[catalyst.find_kind(statement)])()
    while catalyst.find_kind(node) in _ALIASES:
        node = node.child()
    match catalyst.find_kind(node):
        case "UnresolvedRelation":
            return to_strings(node.multipartIdentifier())[-1]
        case "UnresolvedIdentifier":
            return to_strings(node.nameParts())[-1]
    return None


def _read_reference(
    catalyst: Catalyst, text: str, node: Node, outer_kinds: tuple[str, str], parent: Node, with_names: frozenset[str]
) -> ReferencePosition | None:
    """Return the position of a table reference.

    Args:
        catalyst: Access to the plan.
        text: The statement.
        node: The reference.
        outer_kinds: The kinds of the two nodes above the reference. A version or an alias is in such a node.
        parent: The node above the reference.
        with_names: The names in WITH that are visible here, in lower case.

    Returns:
        The position, or None if the name cannot be replaced here or its position is uncertain.
    """
    names, origin = tuple(to_strings(node.multipartIdentifier())), _ORIGIN.match(str(node.origin().toString()))
    if origin is None or node.isStreaming() or not node.options().isEmpty():
        return None
    if len(names) == 1 and names[0].lower() in with_names:
        # The query of the name may consist of a table alone, even with a version: `WITH s AS (FROM t VERSION AS OF 1)`.
        return None
    start, end = int(origin[1]), int(origin[2]) + 1
    if not _is_name(catalyst, text[start:end], names) or _TABLE_STATEMENT.search(text, 0, start):
        return None
    clause_end, snapshot_id, ref, parent_kind = end, None, None, outer_kinds[0]
    if parent_kind == "RelationTimeTravel":
        clause, version, parent_kind = _VERSION.match(text, end), parent.version(), outer_kinds[1]
        if clause is None or version.isEmpty():
            return None
        number, ref = clause["number"], clause["single"] or clause["double"]
        if version.get() != (number or ref):
            return None
        clause_end, snapshot_id = clause.end(), None if number is None else int(number)
    if parent_kind == "Sample":
        return None
    return ReferencePosition(start, end, clause_end, None if parent_kind in _ALIASES else names[-1], snapshot_id, ref)


def _is_name(catalyst: Catalyst, text: str, names: tuple[str, ...]) -> bool:
    """Return whether the text is a table name with exactly these levels."""
    if _PLAIN_NAME.fullmatch(text):  # The text must be split as Spark's parser splits it.
        return tuple(text.split(".")) == names
    try:
        return catalyst.parse_names(text) == names
    except (Py4JError, PySparkException):  # The name is not an identifier, but for example IDENTIFIER(…).
        return False


def insert_markers(text: str, references: Sequence[ReferencePosition]) -> str:
    """Add an alias with the number of the reference (the marker) to each reference, as in `(t AS marker) AS t`.

    Spark's analysed plan then shows to which reference each table belongs.
    """
    replacements = []
    for number, reference in enumerate(references):
        replacements.append(Replacement(reference.start, reference.start, "("))
        replacements.append(
            Replacement(
                reference.end_with_version,
                reference.end_with_version,
                f" AS {backquote(f'{_MARK}{number}')}){_write_alias_clause(reference)}",
            )
        )
    return splice(text, replacements)


def parse_marker_number(alias: str) -> int | None:
    """Return the number of a table reference from its marker, or None if the alias is not a marker.

    A marker is an alias that `insert_markers` adds to a table reference, to find the table again in Spark's plan.
    """
    return int(alias.removeprefix(_MARK)) if alias.startswith(_MARK) else None


def replace_names(text: str, names: Mapping[ReferencePosition, tuple[str, ...]]) -> str:
    """Return the text with new names for these references. Each new name includes its catalog.

    If a reference has no alias, its old name is added as an alias, so that columns such as `t.c` are still found.
    """
    replacements = []
    for reference, name in names.items():
        # A plan table has only the snapshot that the reference names with VERSION AS OF.
        replacements.append(Replacement(reference.start, reference.end_with_version, ".".join(map(backquote, name))))
        replacements.append(
            Replacement(reference.end_with_version, reference.end_with_version, _write_alias_clause(reference))
        )
    return splice(text, replacements)


def _write_alias_clause(reference: ReferencePosition) -> str:
    return "" if reference.alias is None else f" AS {backquote(reference.alias)}"
