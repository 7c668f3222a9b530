"""Functions of SQL on one column that an index may be built on, besides Iceberg's transforms.

`INDEXED_FUNCTIONS` is the only place that knows them in indexes: an entry says what the keys of a column are, and which
keys a matching row can have for a predicate on the column or on a function of it. A function also has a name and a type
in `formats/iceberg/types/functions.py`, and engines' statements are read in `connector/analysis`. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from seamark.formats.iceberg.expressions.expression import FALSE, TRUE, Bound, Expression, Op, any_of
from seamark.formats.iceberg.types.functions import LOWER, UPPER, takes
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.iceberg.types.values import Value
from seamark.formats.index.keys.case_folding import UNKNOWN_CASE, fold, fold_column, has_known_case

CASE_KEYS = "folded-16"
"""The form of the keys of folded texts. Another table of characters needs another name: keys would differ."""
_CASES = (LOWER, UPPER)


@dataclass(frozen=True, slots=True)
class IndexedFunction:
    """A function that indexes are built on."""

    name: str
    keys: str
    """The name of the form of its keys, a part of each definition's id. It changes whenever the key of any value
    does, so that no plan reads older index files by newer keys."""
    values: Callable[[pa.ChunkedArray], pa.ChunkedArray]
    """The values that are indexed, of a column. ValueError if they are not certain."""
    value: Callable[[str], Value]
    """The value that is indexed, for one value of the column or of the function."""
    project: Callable[[Bound, Bound], Expression]
    """(a predicate on the column, a predicate on the indexed values as a template): a condition on the indexed values
    that each matching row meets."""

    def takes(self, kind: str) -> bool:
        """Return whether columns of the Iceberg type may be indexed by it."""
        return takes(self.name, kind)


def _project_case(predicate: Bound, template: Bound) -> Expression:
    """`c = 'Ann'`, `lower(c) = 'ann'` and `upper(c) = 'ANN'` have one folded text."""
    of_column, of_function = predicate.transform == IDENTITY, predicate.transform in _CASES
    if predicate.kind != "string" or not (of_column or of_function):
        return TRUE
    texts = [str(value) for value in predicate.values]
    unknown = _among(template, {UNKNOWN_CASE})
    if predicate.op is Op.STARTS_WITH:
        if not has_known_case(texts[0]):
            return unknown if of_column else TRUE
        # The rest of a stored text may have a character of unknown case.
        return any_of(_replace_predicate(template, Op.STARTS_WITH, fold(texts[0])), unknown)
    if predicate.op not in (Op.EQ, Op.IN):
        return TRUE
    if of_column:
        return _among(template, set(map(fold, texts)))
    return _among(template, {*map(fold, texts), UNKNOWN_CASE}) if all(map(has_known_case, texts)) else TRUE


def _among(template: Bound, values: set[str]) -> Expression:
    return _replace_predicate(template, Op.EQ if len(values) == 1 else Op.IN, *sorted(values)) if values else FALSE


def _replace_predicate(template: Bound, op: Op, *values: str) -> Bound:
    return Bound(op, template.column_id, template.name, "string", IDENTITY, "string", values)


INDEXED_FUNCTIONS = {
    name: IndexedFunction(name, CASE_KEYS, values=fold_column, value=fold, project=_project_case) for name in _CASES
}
