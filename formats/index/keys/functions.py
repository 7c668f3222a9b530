"""SQL functions of a column on which an index can be built, in addition to Iceberg's transforms.

In the code of indexes, only `INDEXED_FUNCTIONS` depends on the function. An entry defines the keys of a column. For a
predicate on the column or on a function of it, the entry also returns the keys that a matching row can have. A function
also has a name and a type in `formats/iceberg/types/functions.py`, and `connector/analysis` finds it in the statements
of engines. This module has no side effects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from seamark.formats.iceberg.expressions.expression import FALSE, TRUE, Bound, Expression, Op, join_by_or
from seamark.formats.iceberg.types.functions import LOWER, UPPER, accepts_values
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.iceberg.types.values import Value
from seamark.formats.index.keys.case_folding import UNKNOWN_CASE, fold_case, fold_column, has_known_case

CASE_KEYS = "folded-16"
"""The name of the form in which folded texts are keys.

Another table of characters needs another name, because its keys differ.
"""
_CASES = (LOWER, UPPER)


@dataclass(frozen=True, slots=True)
class IndexedFunction:
    """A function on which indexes can be built."""

    name: str
    key_form: str
    """The name of the form of the function's keys, which is a part of each definition's id.

    The name must change whenever the key of any value changes, so that no plan reads older index files with newer keys.
    """
    values: Callable[[pa.ChunkedArray], pa.ChunkedArray]
    """A function that returns the indexed values of a column. It raises ValueError if the values are not certain."""
    value: Callable[[str], Value]
    """A function that returns the indexed value for a value of the column or of the function."""
    project: Callable[[Bound, Bound], Expression]
    """A function that returns a condition on the indexed values that all matching rows satisfy.

    The first argument is a predicate on the column. The second argument is any predicate on the indexed values: the
    condition consists of its copies, with other operators and values.
    """

    def supports_type(self, kind: str) -> bool:
        """Return whether the function can index columns of the Iceberg type."""
        return accepts_values(self.name, kind)


def _project_case(predicate: Bound, template: Bound) -> Expression:
    """Return a condition on folded texts. All rows that match the predicate satisfy it.

    `c = 'Ann'`, `lower(c) = 'ann'` and `upper(c) = 'ANN'` give the same condition. The result is TRUE, which excludes
    no row, for other predicates. Texts with characters of unknown case all have the key `UNKNOWN_CASE`. So a predicate
    on the function also accepts this key, because the engine may know the case. A predicate on the column compares
    the complete text, and accepts the key only if the text can have such a character.

    Args:
        predicate: The predicate on the column, or on `lower` or `upper` of the column.
        template: A predicate on the indexed values, whose operator and values are replaced.
    """
    is_on_column, is_on_function = predicate.transform == IDENTITY, predicate.transform in _CASES
    if predicate.kind != "string" or not (is_on_column or is_on_function):
        return TRUE
    texts = [str(value) for value in predicate.values]
    has_unknown_case = _make_equality(template, {UNKNOWN_CASE})
    if predicate.op is Op.STARTS_WITH:
        if not has_known_case(texts[0]):
            return has_unknown_case if is_on_column else TRUE
        # The rest of a stored text can contain a character of unknown case.
        return join_by_or(_replace_predicate(template, Op.STARTS_WITH, fold_case(texts[0])), has_unknown_case)
    if predicate.op not in (Op.EQ, Op.IN):
        return TRUE
    if is_on_column:
        return _make_equality(template, set(map(fold_case, texts)))
    return _make_equality(template, {*map(fold_case, texts), UNKNOWN_CASE}) if all(map(has_known_case, texts)) else TRUE


def _make_equality(template: Bound, values: set[str]) -> Expression:
    """Return the condition that an indexed value is one of these values."""
    return _replace_predicate(template, Op.EQ if len(values) == 1 else Op.IN, *sorted(values)) if values else FALSE


def _replace_predicate(template: Bound, op: Op, *values: str) -> Bound:
    """Return the template with another operator and other values."""
    return Bound(op, template.column_id, template.name, "string", IDENTITY, "string", values)


INDEXED_FUNCTIONS = {
    name: IndexedFunction(name, CASE_KEYS, values=fold_column, value=fold_case, project=_project_case)
    for name in _CASES
}
