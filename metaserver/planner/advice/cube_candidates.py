"""Search for cubes that would answer recorded aggregate queries.

A cube answers a query if the grouping keys and the compared columns are dimensions, and the aggregates are measures
(`connector/cubes`). The candidates are one cube for each shape, and one cube with the dimensions of several shapes. A
cube that does not shrink the rows of a file by the factor `ROWS_PER_GROUP_MIN` is not a candidate, because
`seamark index create` refuses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from seamark.formats.index.definitions import IndexDefinition
from seamark.formats.index.keys.measures import ColumnOperand
from seamark.formats.index.kinds.cube import ROWS_PER_GROUP_MIN
from seamark.metaserver.history.shapes import AGGREGATE_FUNCTIONS, Aggregate
from seamark.metaserver.planner.advice.replay import RecordedShape
from seamark.metaserver.planner.advice.row_samples import RowSample

SHAPES_MAX = 10
"""The maximum number of shapes whose cubes are candidates; the most frequent shapes are used."""
DIMENSIONS_MAX = 8
"""The maximum number of dimensions of a candidate."""
_ENGINES = frozenset({"seamark", "duckdb"})
"""The engines that use cubes by default. The Trino proxy and `seamark.spark.sql` use cubes only on request."""
_VALUE_BYTES = 8
_SEED = 23
"""The seed of the generator that draws rows, so that the same sample always gives the same estimate."""


@dataclass(frozen=True)
class CubeCandidate:
    """A cube that would answer statements of some shapes. A shape is a statement without its literals.

    A cube is an index with precomputed aggregates (measures) of each data file, grouped by some columns (dimensions).

    Attributes:
        dimensions: The sorted ids of the dimension columns.
        measures: The measures of the cube.
        fingerprints: The fingerprints of the shapes that the cube answers.
        groups: The estimated number of groups of one data file.
    """

    dimensions: tuple[int, ...]
    measures: tuple[Aggregate, ...]
    fingerprints: frozenset[str]
    groups: float

    @property
    def column_ids(self) -> set[int]:
        return {*self.dimensions, *(measure.column_id for measure in self.measures)} - {0}

    @property
    def entry_bytes(self) -> float:
        """The estimated size of the groups of one data file in bytes. Each measure stores a value and a count."""
        return self.groups * _VALUE_BYTES * (len(self.dimensions) + 2 * len(self.measures))


def find_answered_shapes(shapes: Mapping[str, RecordedShape], cubes: Iterable[IndexDefinition]) -> frozenset[str]:
    """Return the fingerprints of the shapes (statements without their literals) that the cubes of the table answer.

    A cube answers a shape that any cube could answer (`_can_cube_answer`), if the cube has all compared and grouped
    columns as dimensions, and all aggregates as measures. Measures of computed values do not count, because shapes have
    only aggregates of columns.
    """
    fingerprints = set()
    for cube in cubes:
        dimensions = set(cube.column_ids)
        cube_measures = {
            (measure.function, measure.operand.column_id if isinstance(measure.operand, ColumnOperand) else 0)
            for measure in cube.measures
            if measure.operand is None or isinstance(measure.operand, ColumnOperand)
        }
        for fingerprint, recorded_shape in shapes.items():
            aggregates = {(aggregate.function, aggregate.column_id) for aggregate in recorded_shape.shape.aggregates}
            if (
                _can_cube_answer(recorded_shape)
                and dimensions >= _find_dimensions(recorded_shape)
                and cube_measures >= aggregates
            ):
                fingerprints.add(fingerprint)
    return frozenset(fingerprints)


def find_cube_candidates(
    shapes: Mapping[str, RecordedShape], sample: RowSample, rows_per_file: int
) -> list[CubeCandidate]:
    """Return the cubes that shrink the rows of a file by at least the factor `ROWS_PER_GROUP_MIN`.

    Args:
        shapes: The recorded statements without their literals (shapes), by a digest of the shape.
        sample: The sampled rows. A column that is not sampled cannot be a dimension of a candidate.
        rows_per_file: The number of rows of an average file.
    """
    # The candidates are the dimensions of each frequent shape, and a union of dimensions that answers many shapes at
    # once. A shape's dimensions are added to the union only if its groups then stay few enough.
    frequent_shapes = sorted(
        (recorded_shape for recorded_shape in shapes.values() if _can_cube_answer(recorded_shape)),
        key=lambda recorded_shape: (-recorded_shape.statements, recorded_shape.fingerprint),
    )[:SHAPES_MAX]
    dimension_sets: list[frozenset[int]] = []
    union: frozenset[int] = frozenset()
    for recorded_shape in frequent_shapes:
        dimensions = _find_dimensions(recorded_shape)
        dimension_sets.append(dimensions)
        if _estimate_rows_per_group(union | dimensions, sample, rows_per_file) >= ROWS_PER_GROUP_MIN:
            union |= dimensions
    return [
        _make_candidate(dimensions, frequent_shapes, sample, rows_per_file)
        for dimensions in dict.fromkeys([union, *dimension_sets])
        if dimensions and _estimate_rows_per_group(dimensions, sample, rows_per_file) >= ROWS_PER_GROUP_MIN
    ]


def _make_candidate(
    dimensions: frozenset[int], shapes: Sequence[RecordedShape], sample: RowSample, rows_per_file: int
) -> CubeCandidate:
    """Make a cube with these dimensions, and with the aggregates of all statements that it answers.

    The `shapes` are the recorded statements without their literals.
    """
    answered_shapes = [recorded_shape for recorded_shape in shapes if dimensions >= _find_dimensions(recorded_shape)]
    measures = {aggregate for recorded_shape in answered_shapes for aggregate in recorded_shape.shape.aggregates}
    groups = rows_per_file / _estimate_rows_per_group(dimensions, sample, rows_per_file)
    fingerprints = frozenset(recorded_shape.fingerprint for recorded_shape in answered_shapes)
    return CubeCandidate(tuple(sorted(dimensions)), tuple(sorted(measures)), fingerprints, groups)


def _can_cube_answer(recorded_shape: RecordedShape) -> bool:
    """Return whether a cube can answer statements of the shape. A shape is a statement without its literals.

    The engine must be able to use cubes. The statement must only aggregate plain columns of one table, or count rows,
    and compare plain columns.
    """
    shape = recorded_shape.shape
    return (
        shape.engine in _ENGINES
        and not shape.joins
        and bool(shape.aggregates)
        and all(  # The column id is 0 if the argument is no plain column, as in count(*).
            aggregate.function in AGGREGATE_FUNCTIONS and (aggregate.column_id > 0 or aggregate.function == "count")
            for aggregate in shape.aggregates
        )
        and all(term.transform == "identity" for conjunct in shape.conjuncts for term in conjunct)
    )


def _find_dimensions(recorded_shape: RecordedShape) -> frozenset[int]:
    """Return the ids of the columns that the shape compares or groups by."""
    return recorded_shape.shape.compared_columns | frozenset(recorded_shape.shape.grouping)


def _estimate_rows_per_group(dimensions: frozenset[int], sample: RowSample, rows_per_file: int) -> float:
    """Return the estimated number of rows for each group of a file, or 0 if a dimension is not sampled."""
    if not dimensions <= sample.columns.keys() or len(dimensions) > DIMENSIONS_MAX or not sample.rows:
        return 0.0
    rows = min(sample.rows, rows_per_file)
    # A file cannot have more groups than rows, so use only as many sampled rows as a file has.
    picked_rows = np.random.default_rng(_SEED).permutation(sample.rows)[:rows]
    # Each row gets a key: the number of its combination of values in the dimensions.
    keys = np.zeros(rows, dtype=np.int64)
    for column_id in dimensions:
        column = sample.columns[column_id]
        # The keys are numbered again for each column, so they stay small.
        _, keys = np.unique(keys * (len(column.values) + 1) + column.codes[picked_rows], return_inverse=True)
    groups = int(keys.max()) + 1
    # A file with more rows than the sample has more groups, but not more than there are combinations of values.
    combinations = float(np.prod([len(sample.columns[column_id].values) + 1.0 for column_id in dimensions]))
    return rows_per_file / min(combinations, groups * rows_per_file / rows)
