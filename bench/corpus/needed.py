"""The smallest set of files that gives the rows of a query: a lower bound for every plan.

The rows of all data files are copied into DuckDB's memory together with the number of their file. For each
reference to a table, the benchmark removes first halves of the files and then smaller groups, as long as the query
returns the same rows. The remaining files are sufficient, and each of them is needed. Often no planner can reach
this bound: only a reader of the rows knows which file has the largest value, or that a group has too few rows for
HAVING. The computation does not use Seamark's planning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import duckdb

from seamark.connector.duckdb.statements import DuckDBStatement
from seamark.connector.plans.quotes import quote_name
from seamark.connector.plans.splices import Replacement, splice

_FILE = "number of the file"
_HALVED_GROUP_MIN = 9
"""The number of files from which a group is divided into halves; the files of smaller groups are removed one by one.

In small groups, some files are usually needed, so removing halves gains nothing.
"""


class RowsDiffer(Exception):
    """The query returns different rows from the copies than from the tables."""


def count_rows(con: duckdb.DuckDBPyConnection, text: str) -> Counter[str]:
    """Return the rows of a query as text, with the number of times that each row occurs.

    Sums of floats are rounded, because their last digits depend on the order of the rows.
    """
    return Counter(
        repr(tuple(f"{item:.9g}" if isinstance(item, float) else item for item in row))
        for row in con.execute(text).fetchall()
    )


class TableCopies:
    """In-memory DuckDB copies of the data files in `files`, a list of paths by schema and table name."""

    def __init__(self, files: Mapping[tuple[str, str], Sequence[str]]) -> None:
        self._con = duckdb.connect(config={"threads": 1})  # One thread keeps the order of float sums.
        self._counts = {}
        for (schema, name), paths in files.items():
            self._con.execute(f"CREATE SCHEMA IF NOT EXISTS {quote_name(schema)}")
            self._con.execute(
                f"CREATE TABLE {quote_name(schema)}.{quote_name(name)} AS "
                f"SELECT * EXCLUDE (filename), list_position(?, filename) AS {quote_name(_FILE)} "
                "FROM read_parquet(?, filename=true)",
                [list(paths), list(paths)],
            )
            self._counts[schema, name] = len(paths)

    def close(self) -> None:
        self._con.close()

    def count_needed_files(self, schema: str, text: str, expected: Counter[str]) -> list[int]:
        """Return how many files of each table reference in `text` suffice for the `expected` rows.

        The counts are in the order of the references in the text.
        """
        self._con.execute(f"USE {quote_name(schema)}")
        references = [reference for reference in DuckDBStatement(text).references if reference is not None]
        references.sort(key=lambda reference: reference.start)
        replacements, counts = [], []
        for number, reference in enumerate(references):
            name, kept_table = (quote_name(f"{what} {number}") for what in ("rows", "kept"))
            table = reference.parts[-1].lower()
            count = self._counts[schema, table]
            self._con.execute(f"CREATE OR REPLACE TABLE {kept_table} AS SELECT unnest(range(1, {count + 1})) AS file")
            self._con.execute(
                f"CREATE OR REPLACE VIEW {name} AS SELECT * EXCLUDE ({quote_name(_FILE)}) FROM {quote_name(table)} "
                f"WHERE {quote_name(_FILE)} IN (SELECT file FROM {kept_table})"
            )
            replacements.append(Replacement(reference.start, reference.end, name + (reference.alias_needed or "")))
            counts.append(count)
        query = splice(text, replacements)
        if count_rows(self._con, query) != expected:
            raise RowsDiffer(query)
        return [self._count_needed_of_reference(number, count, query, expected) for number, count in enumerate(counts)]

    def _count_needed_of_reference(self, number: int, count: int, query: str, expected: Counter[str]) -> int:
        kept_table = quote_name(f"kept {number}")

        def is_enough(files: Collection[int]) -> bool:
            self._con.execute(
                f"CREATE OR REPLACE TABLE {kept_table} AS SELECT unnest(?::INTEGER[]) AS file", [sorted(files)]
            )
            return count_rows(self._con, query) == expected

        smallest_set = find_smallest_set(range(1, count + 1), is_enough)
        self._con.execute(
            f"CREATE OR REPLACE TABLE {kept_table} AS SELECT unnest(?::INTEGER[]) AS file", [sorted(smallest_set)]
        )
        return len(smallest_set)


def find_smallest_set(files: Collection[int], is_enough: Callable[[Collection[int]], bool]) -> set[int]:
    """Return a sufficient subset of `files` from which no file can be removed.

    Args:
        files: The numbers of the files.
        is_enough: Returns whether a set of files is sufficient.
    """
    kept_files = set(files)
    ranges_left = [sorted(files)]
    while ranges_left:
        file_range = ranges_left.pop()
        if not file_range:
            continue
        if is_enough(kept_files - set(file_range)):
            kept_files -= set(file_range)
        elif len(file_range) > 1:
            size = len(file_range) // 2 if len(file_range) >= _HALVED_GROUP_MIN else 1
            ranges_left += [file_range[start : start + size] for start in range(0, len(file_range), size)][::-1]
    return kept_files
