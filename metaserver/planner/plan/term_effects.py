"""What each part of a filter does alone, and which index would help a part that partition values and bounds do not.

For people who read the explanation of a plan; no plan uses it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from seamark.metaserver.iceberg.expressions.expression import ORDERED, And, Bound, Expression, Op
from seamark.metaserver.iceberg.expressions.projection import project
from seamark.metaserver.iceberg.types.transforms import IDENTITY
from seamark.metaserver.index.files.definitions import Definitions, IndexDefinition, read_definitions
from seamark.metaserver.index.kinds.bloom import FPP
from seamark.metaserver.planner.pruning.file_pruning import narrow_by_stats
from seamark.metaserver.planner.pruning.partition_pruning import narrow_by_partition
from seamark.metaserver.planner.scan.scan_plan import ScanPlan
from seamark.metaserver.planner.view.selection import Selection, never

_TERMS_MAX = 16
"""Each term reads the bounds of all files once."""
_HELPED = 0.5
"""A part that leaves fewer files than this share needs no index."""
_UNINDEXED = ("struct", "list", "map", "variant", "boolean")


class TermEffect(NamedTuple):
    """`files_left`: what partition values and bounds keep of `files_in`, the files of the view. `has_bounds`: whether
    some file has bounds of the column; True for types that need none. `index_name`: of an enabled index on the column;
    `index_kind`: the kind that would help, and `index_files`, its false positives."""

    expression: Expression
    column: str | None
    files_in: int
    files_left: int
    has_bounds: bool
    index_name: str | None
    index_kind: str | None
    index_files: int | None


def effects_of_terms(scan: ScanPlan) -> list[TermEffect]:
    """One for each of the first parts that all rows must satisfy, in the order of the filter."""
    parts = scan.bound.children if isinstance(scan.bound, And) else (scan.bound,)
    definitions = read_definitions(scan.metadata)
    return [_effect(scan, part, definitions) for part in parts[:_TERMS_MAX] if isinstance(part, Bound)]


def _effect(scan: ScanPlan, part: Bound, definitions: Definitions) -> TermEffect:
    selection = Selection.everything(scan.view)
    files_in = selection.count()
    specs = [spec for spec in scan.metadata.partition_specs if spec.spec_id in scan.view.specs]
    narrow_by_partition(selection, {spec.spec_id: project(part, spec).possible for spec in specs}, never)
    narrow_by_stats(selection, part, never)
    left = selection.count()
    index = next((one.name for one in _on_column(definitions, part)), None)
    kind = _kind_for(part) if index is None and left > max(1, _HELPED * files_in) else None
    return TermEffect(
        expression=part,
        column=part.name,
        files_in=files_in,
        files_left=left,
        has_bounds=part.kind in _UNINDEXED or _has_bounds(scan, part),
        index_name=index,
        index_kind=kind,
        index_files=None if kind is None else math.ceil(FPP * left) if kind == "bloom" else 0,
    )


def _has_bounds(scan: ScanPlan, part: Bound) -> bool:
    entries = scan.view.stats(part.column_id, part.kind).entries
    return any(entry is not None and entry.lower is not None for entry in entries)


def _on_column(definitions: Definitions, part: Bound) -> Iterator[IndexDefinition]:
    for definition in definitions.enabled:
        if any(term.column_id == part.column_id and term.transform == part.transform for term in definition.terms):
            yield definition


def _kind_for(part: Bound) -> str | None:
    if part.transform != IDENTITY or part.kind in _UNINDEXED:
        return None
    if part.op in (Op.EQ, Op.IN):
        return "bloom"
    return "bitmap" if part.op in ORDERED else None
