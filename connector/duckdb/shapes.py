"""Rewrites constructs that DuckDB's and Trino's SQL write differently: QUALIFY, lists, VALUES, integer division.

The rewritten statement returns the same rows, and the analysis of Trino's statements can read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sqlglot import exp

from seamark.connector.duckdb.kinds import NameKinds, find_literal_kind, replace_node, to_constant

HIDDEN = "seamark_hidden"
"""The name of a function that hides its arguments from the analysis."""
_QUERIES = (exp.Select, exp.SetOperation, exp.Subquery)


def rewrite_qualify_and_unnamed_columns(tree: exp.Expr) -> None:
    """Rewrite the constructs whose meaning does not depend on the columns of tables.

    These are QUALIFY, which Trino does not have, and the names that DuckDB gives to unnamed columns.
    """
    for node in list(tree.find_all(exp.Select, exp.Values, exp.Unnest)):
        if isinstance(node, exp.Select):
            if node.args.get("qualify") is not None:
                _move_windows(node)
        elif node.expressions and isinstance(node.parent, exp.From | exp.Join):
            _name_columns(node)


def rewrite_conditions(tree: exp.Expr, kinds: NameKinds) -> None:
    """Rewrite the conditions whose meaning depends on the kinds of their columns.

    A condition of DuckDB becomes a condition of Trino with the same meaning. If there is none, its columns are hidden
    from the analysis (`hide`).
    """
    nodes = list(tree.walk())
    node_types = {type(node) for node in nodes}

    def find_nodes(*types: type[exp.Expr]) -> list[exp.Expr]:
        """Return a list of the nodes of these types, so that the tree may be changed while they are visited.

        The tree is walked only if it may have such nodes, because a walk takes milliseconds.
        """
        return list(tree.find_all(*types)) if any(issubclass(node_type, types) for node_type in node_types) else []

    for condition in [node for node in nodes if isinstance(node, exp.In)]:
        elements = read_listed_elements(condition.args.get("query"))
        if elements is not None:
            is_same_condition = _are_constants_of(elements, kinds.find_kind(condition.this))
            column = condition.this.copy()
            new = exp.In(this=column, expressions=elements) if is_same_condition else hide([column])
            replace_node(condition, new)
    for function in find_nodes(exp.ArrayContains, exp.Contains):
        in_condition = _to_in_condition(function, kinds)
        if in_condition is not None:
            replace_node(function, in_condition)
    for case in find_nodes(exp.Case):
        if isinstance(case, exp.Case) and case.this is not None:
            _convert_operand(case, kinds)
    for count_node in find_nodes(exp.CountIf):
        # In DuckDB, the result is 0 if the condition is true for no row, but null if there are no rows at all.
        # Therefore rows that do not meet the condition must not be left out.
        count_node.set("this", hide([count_node.this]))
    for division in find_nodes(exp.IntDiv):
        # Both divisions truncate. DuckDB's `/` divides doubles.
        if kinds.find_kind(division.this) == "integer" and is_whole(division.expression):
            replace_node(division, exp.Div(this=division.this, expression=division.expression, typed=True, safe=False))


def is_same_row_comparison_in_trino(node: exp.In | exp.EQ, kinds: NameKinds) -> bool:
    """Return whether the condition is true for the same rows in DuckDB and in Trino.

    The condition is `(a, b) IN ((1, 2), …)` or `(a, b) = (1, 2)`. DuckDB compares nulls in such rows as values.
    """
    rows = node.expressions if isinstance(node, exp.In) else [node.expression]
    columns = node.this.expressions
    return treats_null_as_false(node) and all(
        isinstance(row, exp.Tuple)
        and len(row.expressions) == len(columns)
        and all(
            _are_constants_of([value], kinds.find_kind(column))
            for column, value in zip(columns, row.expressions, strict=True)
        )
        for row in rows
    )


def read_listed_elements(query: exp.Expr | None) -> list[exp.Expr] | None:
    """Return the elements of `(SELECT unnest([1, 2]))`, or None for another query.

    The query must have no other clause and no other column, so that IN with it equals IN with the elements.
    """
    while isinstance(query, exp.Subquery) and _list_set_arguments(query) == {"this"}:
        query = query.this
    if (
        not isinstance(query, exp.Select)
        or _list_set_arguments(query) != {"expressions"}
        or len(query.expressions) != 1
    ):
        return None
    element = query.expressions[0].unalias()
    if (
        not isinstance(element, exp.Explode)
        or _list_set_arguments(element) != {"this"}
        or not isinstance(element.this, exp.Array)
    ):
        return None
    return list(element.this.expressions)


def list_results(node: exp.Case | exp.If) -> list[exp.Expr]:
    """Return the expressions whose values CASE or IF can have."""
    branches = node.args["ifs"] if isinstance(node, exp.Case) else [node]
    otherwise = node.args.get("default" if isinstance(node, exp.Case) else "false")
    results = [branch.args["true"] for branch in branches]
    return [result.unnest() for result in ([*results, otherwise] if otherwise is not None else results)]


def treats_null_as_false(node: exp.Expr) -> bool:
    """Return whether the statement treats a null result of the condition as false.

    This is true in WHERE, HAVING and ON, below any AND and OR, but not below NOT.
    """
    parent = node.parent
    while isinstance(parent, exp.Paren | exp.And | exp.Or):
        parent = parent.parent
    return isinstance(parent, exp.Where | exp.Having | exp.Join)


def is_whole(node: exp.Expr | None) -> bool:
    return isinstance(node, exp.Literal) and not node.is_string and str(node.this).isdigit()


def hide(expressions: Sequence[exp.Expr]) -> exp.Anonymous:
    """Return a call of an unknown function with these expressions as arguments, which the analysis does not read."""
    return exp.Anonymous(this=HIDDEN, expressions=list(expressions))


def _to_in_condition(function: exp.Expr, kinds: NameKinds) -> exp.In | None:
    """Return `list_contains([1, 2], c)` as `c IN (1, 2)`. Both are true for the same rows.

    The result is None if the list contains a null, because DuckDB can find nulls in a list. It is also None for other
    functions, for elements that are not constants of the column's kind, and where a null result differs from false.
    """
    array, column = function.this, function.args.get("expression")
    if not isinstance(function, exp.ArrayContains | exp.Contains) or not isinstance(array, exp.Array):
        return None
    is_same_condition = _are_constants_of(array.expressions, kinds.find_kind(column)) and treats_null_as_false(function)
    return (
        exp.In(this=column.copy(), expressions=array.expressions) if is_same_condition and column is not None else None
    )


def _are_constants_of(nodes: Sequence[exp.Expr], kind: str | None) -> bool:
    """Return whether all nodes are constants of this kind, and none of them is null."""
    return (
        kind is not None and find_literal_kind(nodes) == kind and not any(isinstance(node, exp.Null) for node in nodes)
    )


def _move_windows(select: exp.Select) -> None:
    """Move the window functions and subqueries of QUALIFY to ORDER BY.

    QUALIFY removes rows after all other clauses, so its condition must not be read as a condition on rows of tables.
    Its window functions and subqueries must still be read, which they are in ORDER BY.
    """
    qualify = select.args["qualify"]
    select.set("qualify", None)
    order = select.args.get("order") or exp.Order(expressions=[])
    order.append("expressions", exp.Ordered(this=hide(list(_find_windows_and_queries(qualify.this)))))
    select.set("order", order)
    parent = select.parent
    if isinstance(parent, exp.SetOperation) and select.arg_key:  # Brackets are needed for ORDER BY.
        parent.set(select.arg_key, exp.Subquery(this=select))


def _find_windows_and_queries(node: exp.Expr) -> Iterator[exp.Expr]:
    if isinstance(node, (exp.Window, *_QUERIES)):
        yield node
        return
    for child in node.iter_expressions():
        yield from _find_windows_and_queries(child)


def _name_columns(rows: exp.Expr) -> None:
    """Give columns without an alias the names that DuckDB gives them: `col0`, `col1` … for VALUES, and `unnest`."""
    first_row = rows.expressions[0]
    if isinstance(rows, exp.Values):
        names = [
            f"col{number}" for number in range(len(first_row.expressions) if isinstance(first_row, exp.Tuple) else 1)
        ]
    elif len(rows.expressions) == 1 and _list_set_arguments(rows) <= {"expressions", "alias"}:
        names = ["unnest"]
    else:
        return
    alias = rows.args.get("alias") or exp.TableAlias(this=exp.to_identifier("seamark_rows"))
    columns = alias.columns
    alias.set("columns", [*columns, *(exp.to_identifier(name, quoted=True) for name in names[len(columns) :])])
    rows.set("alias", alias)


def _convert_operand(case: exp.Case, kinds: NameKinds) -> None:
    """Convert the values in `CASE c WHEN 1 THEN …` to Trino's constants.

    If DuckDB may convert the compared values, the operand becomes the argument of an unknown function, so that the
    analysis derives no condition from it.
    """
    kind, branches = kinds.find_kind(case.this), [branch.this for branch in case.args["ifs"]]
    is_same_condition = kind is not None and all(
        isinstance(branch, exp.Null) or (kind != "double" and to_constant(branch, kind, utc=False) is not None)
        for branch in branches
    )
    if not is_same_condition:
        case.set("this", hide([case.this]))
        return
    for branch in branches:
        replace_node(branch, to_constant(branch, str(kind), utc=False) or branch)


def _list_set_arguments(node: exp.Expr) -> set[str]:
    return {name for name, value in node.args.items() if value}
