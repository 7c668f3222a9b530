"""Estimates of the time of statements, from the times that engines have reported for statements of the same shapes.

A statement takes a fixed time, a time for each byte, and a time for each file. These costs are fitted for each engine
over the shapes of a table. For a shape with reported times, the ratio of the reported to the computed time is known. A
change of the layout does not change this ratio. If no engine has reported a time, the costs are assumptions.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from seamark.metaserver.history.shapes import QueryShape
from seamark.metaserver.store.model import QueryShapeSums

SCAN_BYTES_PER_S, OPEN_S = 200_000_000, 0.005
"""The assumed speed of a scan, and the assumed time to open a file, for engines that report no times."""
_SECONDS_MIN = 1e-9
_PRIOR_STATEMENTS = 0.05
"""The weight of the assumptions in a fit, as a number of statements."""
_STATEMENTS_MAX = 1000
"""The maximum weight of a shape in a fit, as a number of statements, so that no single shape decides the fit."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class EngineCosts:
    """The costs of a statement in an engine: a fixed time, a time for each byte and a time for each file, in seconds.

    The defaults are assumed costs for engines that have reported no times.
    """

    fixed_s: float = 0.0
    byte_s: float = 1 / SCAN_BYTES_PER_S
    file_s: float = OPEN_S

    def estimate(self, files: float, size_bytes: float) -> float:
        """Return the time in seconds of a statement that reads this number of files and bytes."""
        return self.fixed_s + self.byte_s * size_bytes + self.file_s * files


_ASSUMED = EngineCosts()


@dataclass(frozen=True)
class _TimedShape:
    """The mean seconds, files and bytes of statements that differ only in their literals.

    Only statements for which the engine has reported a time count. `fingerprint` is the digest of such a statement
    without its literals.
    """

    fingerprint: str
    statements: int
    seconds: float
    files: float
    bytes: float


@dataclass(frozen=True)
class EngineTimes:
    """The reported times of a table's statements.

    A shape is a statement without its literals, and its fingerprint is a digest of it.

    Attributes:
        costs: The fitted costs of statements, by engine.
        engines: The engine of each shape, by fingerprint.
        ratios: The mean reported time of each shape divided by the time computed from the costs, by fingerprint. The
            ratio accounts for work that the costs do not contain, such as joins and aggregates.
    """

    costs: Mapping[str, EngineCosts] = field(default_factory=dict)
    engines: Mapping[str, str] = field(default_factory=dict)
    ratios: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def from_shapes(shapes: Iterable[QueryShapeSums]) -> EngineTimes:
        """Compute the costs of each engine and the ratio of each shape from the reported times.

        The costs of an engine are fitted to all its shapes. The ratio of a shape is its mean reported time divided by
        the time that these costs predict.
        """
        engines: dict[str, str] = {}
        timed_shapes: defaultdict[str, list[_TimedShape]] = defaultdict(list)
        for sums in shapes:
            shape = QueryShape.parse(sums.shape) if sums.shape else None
            if shape is not None:
                engines[sums.fingerprint] = shape.engine
                if sums.sums.timed:
                    timed_shapes[shape.engine].append(_compute_means(sums))
        costs = {engine: fit_costs(timed_shapes_of_engine) for engine, timed_shapes_of_engine in timed_shapes.items()}
        ratios = {
            timed_shape.fingerprint: timed_shape.seconds
            / max(costs[engine].estimate(timed_shape.files, timed_shape.bytes), _SECONDS_MIN)
            for engine, timed_shapes_of_engine in timed_shapes.items()
            for timed_shape in timed_shapes_of_engine
        }
        return EngineTimes(costs, engines, ratios)

    def estimate(self, fingerprint: str, files: float, size_bytes: float) -> float:
        """Estimate the time in seconds of a statement that reads this number of files and bytes.

        `fingerprint` is the digest of the statement without its literals. For an unknown statement, the estimate uses
        assumed costs.
        """
        costs = self.costs.get(self.engines.get(fingerprint, ""), _ASSUMED)
        return costs.estimate(files, size_bytes) * self.ratios.get(fingerprint, 1.0)


def _compute_means(sums: QueryShapeSums) -> _TimedShape:
    """Return the means of the timed statements of a shape. The mean time is above 0, because a fit divides by it."""
    totals = sums.sums
    return _TimedShape(
        sums.fingerprint,
        totals.timed,
        max(totals.run_us, 1) / 1e6 / totals.timed,
        totals.timed_files / totals.timed,
        totals.timed_bytes / totals.timed,
    )


def fit_costs(shapes: Sequence[_TimedShape]) -> EngineCosts:
    """Return the costs that fit the mean times of shapes with the smallest relative errors.

    The costs are not negative. With few shapes, the fit is close to the assumed costs for a byte and a file, and the
    fixed time explains the rest.
    """
    # Divide each row by its time, so that the errors are relative. A squared error then counts once per statement, up
    # to the maximum weight of a shape.
    weights = np.array([math.sqrt(min(shape.statements, _STATEMENTS_MAX)) / shape.seconds for shape in shapes])
    rows = np.array([[1.0, shape.bytes, shape.files] for shape in shapes])
    times = np.array([shape.seconds for shape in shapes])
    assumed_costs = np.array([0.0, 1 / SCAN_BYTES_PER_S, OPEN_S])
    # Two further rows state that the costs of a byte and of a file equal the assumed costs, with a small weight. So
    # the fit stays close to the assumptions as long as there are few shapes.
    prior_rows = np.diag([0.0, _PRIOR_STATEMENTS / assumed_costs[1], _PRIOR_STATEMENTS / assumed_costs[2]])
    matrix = np.concatenate([rows * weights[:, None], prior_rows])
    target = np.concatenate([times * weights, [0.0, _PRIOR_STATEMENTS, _PRIOR_STATEMENTS]])
    fixed_s, byte_s, file_s = _solve_without_negatives(matrix, target)
    return EngineCosts(fixed_s, byte_s, file_s)


def _solve_without_negatives(matrix: Floats, target: Floats) -> tuple[float, float, float]:
    """Return the solution of a least-squares problem with three unknowns that are not negative.

    All subsets of the unknowns are tried, with 0 for the other unknowns. The best solution without a negative value is
    returned.
    """
    # The columns differ by many powers of ten, so scale them to avoid rounding errors.
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    best_values, best_error = np.zeros(3), math.inf
    for used_columns in ((0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,), (2,)):
        columns = list(used_columns)
        solution = np.linalg.lstsq(matrix[:, columns] / scale[columns], target, rcond=None)[0]
        if (solution < 0).any():
            continue
        values = np.zeros(3)
        values[columns] = solution / scale[columns]
        error = float(((matrix @ values - target) ** 2).sum())
        if error < best_error:
            best_values, best_error = values, error
    return float(best_values[0]), float(best_values[1]), float(best_values[2])
