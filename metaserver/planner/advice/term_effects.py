"""The number of files that each conjunct of a filter leaves out, and the index that would help.

If partitions and bounds leave out few files, an index is proposed, unless a sample of the column shows that most files
have a matching row. The explanation of a plan shows these effects. Planning does not use them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from seamark.formats.iceberg.expressions.expression import ORDERED, And, Bound, Expression, Op
from seamark.formats.iceberg.expressions.projection import project
from seamark.formats.iceberg.types.functions import is_function
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.index.definitions import Definitions, IndexDefinition, read_definitions
from seamark.formats.index.kinds.bloom import FALSE_POSITIVE_PROBABILITY
from seamark.formats.index.kinds.kinds import KINDS
from seamark.metaserver.planner.advice.column_samples import FUNCTION_NOT_SAMPLED, NOT_SAMPLED, ColumnSample, Samples
from seamark.metaserver.planner.pruning.file_pruning import narrow_by_partition, narrow_by_stats
from seamark.metaserver.planner.scan.scan_plan import ScanPlan
from seamark.metaserver.planner.view.selection import FileSelection, never_expires

_TERMS_MAX = 16
"""The maximum number of reported conjuncts. For each conjunct, the bounds of all files are read once."""
_HELPED_MAX_FRACTION = 0.5
"""A conjunct that keeps less than this share of the files needs no index."""
_UNINDEXED = ("struct", "list", "map", "variant", "boolean")


class TermEffect(NamedTuple):
    """The effect of one conjunct of the filter.

    Attributes:
        files_left: The number of files of the view that remain after pruning by partition values and bounds.
        has_bounds: Whether any file has bounds of the column. For types that need no bounds, the value is True.
        index_name: The name of an enabled index on the column.
        index_kind: The kind of index that would help.
        index_files: The estimated number of files that a plan would keep with an index, or None if there is
            no estimate.
        index_note: The reason why `index_files` has no estimate, or why no index would help.
    """

    expression: Expression
    column: str | None
    files_in: int
    files_left: int
    has_bounds: bool
    index_name: str | None
    index_kind: str | None
    index_files: int | None
    index_note: str | None = None


def compute_term_effects(scan: ScanPlan, samples: Samples) -> list[TermEffect]:
    """Return the effects of the first `_TERMS_MAX` conjuncts of the filter, in the order of the filter.

    Conjuncts that are not a single predicate, such as disjunctions, are left out.
    """
    parts = scan.bound.children if isinstance(scan.bound, And) else (scan.bound,)
    definitions = read_definitions(scan.metadata)
    return [_measure_effect(scan, part, definitions, samples) for part in parts[:_TERMS_MAX] if isinstance(part, Bound)]


def _measure_effect(scan: ScanPlan, part: Bound, definitions: Definitions, samples: Samples) -> TermEffect:
    """Return the effect of one conjunct, and the index that would help if the conjunct excludes few files.

    No index is suggested if the column has an index, or if the sample shows that most files have a matching row.
    """
    selection = FileSelection.select_all(scan.view)
    files_in = selection.count()
    specs = [spec for spec in scan.metadata.partition_specs if spec.spec_id in scan.view.specs]
    narrow_by_partition(selection, {spec.spec_id: project(part, spec).possible for spec in specs}, never_expires)
    narrow_by_stats(selection, part, never_expires)
    files_left = selection.count()
    index = next((definition.name for definition in _find_indexes_on_column(definitions, part)), None)
    kind = _choose_index_kind(part) if index is None and files_left > max(1, _HELPED_MAX_FRACTION * files_in) else None
    # A sample has the values of the column, not the results of functions.
    sample = samples.get(part.column_id) if part.transform == IDENTITY else FUNCTION_NOT_SAMPLED
    files, note = (None, None) if kind is None else _estimate_with_index(part, kind, files_left, sample)
    if files is not None and files > _HELPED_MAX_FRACTION * files_left:
        kind, note = None, "most files have a matching row, so an index would leave out few files"
    return TermEffect(
        expression=part,
        column=part.name,
        files_in=files_in,
        files_left=files_left,
        # Bounds of these types are not expected, so the user gets no advice about missing bounds.
        has_bounds=part.kind in _UNINDEXED or _has_bounds(scan, part),
        index_name=index,
        index_kind=kind,
        index_files=files,
        index_note=note,
    )


def _estimate_with_index(
    part: Bound, kind: str, files_left: int, sample: ColumnSample | str | None
) -> tuple[int | None, str | None]:
    """Estimate how many of `files_left` files a plan keeps if an index of this kind exists.

    Returns:
        The number of files and None, or None and the reason why there is no estimate.
    """
    if not isinstance(sample, ColumnSample):
        # `sample` may be the reason why there is no sample. The layout estimates already report the exact reason for a
        # column without a function, so the general reason is enough here.
        return None, sample if sample == FUNCTION_NOT_SAMPLED else NOT_SAMPLED
    values = len(part.values) if part.op in (Op.EQ, Op.IN) else None
    hits = sample.estimate_files(part, values)
    if hits is None:
        return None, "too few files of the sample have a matching row"
    # The sample is from the files that all conditions on the column keep. `files_left` counts the files that a
    # single condition keeps.
    hits = min(files_left, round(hits * files_left / max(1, sample.files_left)))
    false_share = min(1.0, FALSE_POSITIVE_PROBABILITY * (values or 1)) if kind == "bloom" else 0.0
    return hits + math.ceil(false_share * (files_left - hits)), None


def _has_bounds(scan: ScanPlan, part: Bound) -> bool:
    entries = scan.view.find_statistics(part.column_id, part.kind).entries
    return any(entry is not None and entry.lower is not None for entry in entries)


def _find_indexes_on_column(definitions: Definitions, part: Bound) -> Iterator[IndexDefinition]:
    """Yield the enabled indexes that can evaluate a predicate. Cubes have aggregates, and are left out."""
    for definition in definitions.enabled:
        if KINDS[definition.kind].aggregates:
            continue
        if any(
            term.column_id == part.column_id and _serves_predicate(term.transform, part) for term in definition.terms
        ):
            yield definition


def _serves_predicate(transform: str, part: Bound) -> bool:
    """Return whether an index on this transform or function of the column can evaluate the predicate.

    Args:
        transform: The transform or function of the index.
        part: A predicate on the same column.
    """
    if is_function(part.transform):  # Indexes on `lower` and on `upper` have the same keys.
        return is_function(transform)
    return transform == part.transform


def _choose_index_kind(part: Bound) -> str | None:
    """Return the kind of index that serves the predicate, or None if no kind does.

    A bloom index is small, but it cannot evaluate ranges. Ranges need a bitmap index.
    """
    if part.kind in _UNINDEXED or not (part.transform == IDENTITY or is_function(part.transform)):
        return None
    if part.op in (Op.EQ, Op.IN):
        return "bloom"
    return "bitmap" if part.op in ORDERED else None
