"""Rewrites an aggregate query of DuckDB so that it reads groups of a cube.

DuckDB itself determines the names and types of both results: the original query is bound to an empty relation with
the table's columns, and the new query to an empty relation with groups. If the types differ, the cube is not used.
"""

from __future__ import annotations

import duckdb

from seamark.connector.cubes.dialects import DUCKDB, NotFromCube
from seamark.connector.cubes.statements import CubeTable, translate_statement
from seamark.connector.duckdb.sketch_functions import create_functions
from seamark.connector.duckdb.statements import DuckDBStatement, NamedRelation
from seamark.connector.plans.quotes import quote_name
from seamark.connector.plans.splices import Replacement, splice
from seamark.formats.iceberg.types.schema import ListType, MapType, Schema, StructType, Type

GROUPS = "seamark_cube_groups"
"""The name of the relation that contains the groups."""
_WITHOUT_PUSHDOWN = f"(SELECT * FROM {GROUPS} LIMIT {1 << 62})"  # noqa: S608
"""A clause that prevents the pushdown of filters, because DuckDB cannot push some filters into an Arrow scan."""


class DuckDBCubeQuery:
    """A query that reads groups of a cube.

    Attributes:
        translated: The translated query.
    """

    def __init__(
        self,
        con: duckdb.DuckDBPyConnection,
        statement: DuckDBStatement,
        reference: NamedRelation,
        table: CubeTable,
        *,
        floats: bool,
    ) -> None:
        """Translate a query, and check that its result has the types of the original query.

        DuckDB binds the original and the translated query to empty relations. This gives the names and types of both
        results. The types must be equal.

        Args:
            con: The connection in which the query runs.
            statement: The query.
            reference: The only relation of the query.
            table: The table, with its cubes.
            floats: Whether sums and averages of floats may be used, as in `translate_statement`.

        Raises:
            NotFromCube: The cube cannot answer the query.
            duckdb.Error: DuckDB does not accept the query.
        """
        self.translated = translate_statement(statement.parse_again(), table, DUCKDB, floats=floats)
        original = con.sql(
            _replace_by_empty_relation(statement.text, reference, table.schema), params=statement.parameters
        )
        self._names = original.columns
        if self.translated.has_sketches and not create_functions(con):
            raise NotFromCube("the transaction began before the functions for sketches were created")
        null_columns = ", ".join(f"NULL AS {column}" for column in self.translated.columns)
        new = con.sql(self.translated.write(f"(SELECT {null_columns} LIMIT 0)", None, self._names))
        if new.types != original.types:
            pairs = zip(original.types, new.types, strict=True)
            raise NotFromCube(f"the types differ: {', '.join(f'{old} and {new}' for old, new in pairs if old != new)}")

    def write(self, rows: str | None) -> str:
        """Return the text of the translated query.

        It reads the relation `GROUPS`, which contains the cube's groups. DuckDB pushes no filter into this relation,
        because it cannot push some filters into an Arrow scan.

        Args:
            rows: The name of a table with the rows of files that the cube does not cover, or None.
        """
        return self.translated.write(_WITHOUT_PUSHDOWN, rows, self._names)


def _replace_by_empty_relation(text: str, reference: NamedRelation, schema: Schema) -> str:
    """Return the statement with an empty relation in place of the table.

    The relation has the columns of the table whose types a query over a cube can use. DuckDB can find the types of the
    result of this statement without reading the table.
    """
    columns = ((field.name, _name_type(field.type)) for field in schema.fields)
    null_columns = ", ".join(
        f"CAST(NULL AS {kind}) AS {quote_name(name)}" for name, kind in columns if kind is not None
    )
    replacements = [
        Replacement(reference.start, reference.end, f"(SELECT {null_columns} LIMIT 0){reference.alias_needed or ''}")
    ]
    if reference.version_span is not None:
        replacements.append(Replacement(*reference.version_span, ""))
    return splice(text, replacements)


def _name_type(kind: Type) -> str | None:
    """Return a type in DuckDB's SQL, or None if a query over a cube cannot use the type.

    The type of a struct has only the fields that such a query can use.
    """
    if isinstance(kind, StructType):
        fields = [(field.name, _name_type(field.type)) for field in kind.fields]
        field_types = [f"{quote_name(name)} {inner}" for name, inner in fields if inner is not None]
        return f"STRUCT({', '.join(field_types)})" if field_types else None
    if isinstance(kind, ListType | MapType):
        return None
    try:
        return DUCKDB.name_type(kind)
    except NotFromCube:
        return None
