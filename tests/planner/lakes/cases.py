"""Cases of the campaigns: a random lake, a snapshot of it and filters, all from one seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.planner.lakes.history import write_random_lake
from tests.planner.lakes.kinds import FLOATS
from tests.planner.lakes.lake import DataFile, Lake, LakeSnapshot
from tests.planner.lakes.literal_forms import FORMS
from tests.planner.lakes.predicates import IEEE_FLOAT_ORDER, FloatOrder, Names, draw_filter, matches, to_json
from tests.services.java_planner import PlanRequest


@dataclass(frozen=True)
class ScanCase:
    """One scan of one lake.

    Attributes:
        is_snapshot_omitted: Whether the scan is of the current snapshot, and does not name it.
        uses_names_of_snapshot: Whether the filter has the column names of the snapshot's schema.
        filter: The filter for Seamark's planner.
        java_filter: The same filter in the form of Iceberg Java.
    """

    lake: Lake
    number: int
    snapshot: LakeSnapshot
    is_snapshot_omitted: bool
    uses_names_of_snapshot: bool
    case_sensitive: bool
    filter: Any
    java_filter: Any

    @property
    def snapshot_id(self) -> int | None:
        """The snapshot to plan, or None to plan the current snapshot without naming it."""
        return None if self.is_snapshot_omitted else self.snapshot.id

    @property
    def is_nan_greatest(self) -> bool:
        """Whether NaN is greater than every number for the clients of the plan, as in Spark: in every second case."""
        return self.number % 2 == 1

    @property
    def names(self) -> Names:
        lake = self.lake
        schema = lake.schemas[self.snapshot.schema_id] if self.uses_names_of_snapshot else lake.schema
        return Names(schema, list(lake.schemas.values()), case_sensitive=self.case_sensitive)

    def build_java_request(self) -> PlanRequest:
        names = "snapshot" if self.uses_names_of_snapshot else "current"
        location = self.lake.metadata_location
        return PlanRequest(location, json.dumps(self.java_filter), self.snapshot_id, names, self.case_sensitive)

    def build_unfiltered_request(self) -> PlanRequest:
        """Return a request for the whole snapshot."""
        return PlanRequest(self.lake.metadata_location, "true", self.snapshot.id)

    @property
    def names_infinity(self) -> bool:
        return _is_infinity(self.filter)

    @property
    def compares_zero(self) -> bool:
        """Whether the filter compares a float column with a zero. Clients differ in the result."""
        return _is_zero_compared(self.filter, self.names)

    def match_rows(self, file: DataFile, expression: Any, float_order: FloatOrder = IEEE_FLOAT_ORDER) -> list[bool]:
        """Return, for each row of a file, whether it satisfies an expression with the names of this case."""
        names = self.names
        return [matches(expression, row, names, float_order) for row in self.lake.read_rows(file)]

    def __str__(self) -> str:
        context = f"seed {self.lake.seed} case {self.number}: format version {self.lake.version}, "
        names = "the snapshot's" if self.uses_names_of_snapshot else "current"
        return context + f"snapshot {self.snapshot_id}, {names} names, {self.lake.metadata_location}\n{self.filter}"


def _is_infinity(expression: Any) -> bool:
    if isinstance(expression, dict):
        return any(_is_infinity(child) for child in expression.values())
    if isinstance(expression, list):
        return any(_is_infinity(child) for child in expression)
    return expression in ("Infinity", "-Infinity")


def _is_zero_compared(expression: Any, names: Names) -> bool:
    if not isinstance(expression, dict):
        return False
    if isinstance(expression.get("term"), str):
        literals = expression.get("values", [expression.get("value")])
        return names[expression["term"]].kind in FLOATS and 0.0 in literals
    return any(_is_zero_compared(child, names) for child in expression.values())


def draw_cases(seed: int, folder: Path, count: int) -> Iterator[ScanCase]:
    """Write the random table of `seed` below `folder`, and yield `count` random scans of it."""
    lake = write_random_lake(seed, folder / str(seed))
    rng = random.Random(~seed)
    for number in range(count):
        is_snapshot_omitted = rng.random() < 0.4
        snapshot = lake.current_snapshot if is_snapshot_omitted else rng.choice(list(lake.snapshots.values()))
        uses_names_of_snapshot = not is_snapshot_omitted and rng.random() < 0.25
        schema = lake.schemas[snapshot.schema_id] if uses_names_of_snapshot else lake.schema
        tree = draw_filter(rng, lake, schema)
        yield ScanCase(
            lake=lake,
            number=number,
            snapshot=snapshot,
            is_snapshot_omitted=is_snapshot_omitted,
            uses_names_of_snapshot=uses_names_of_snapshot,
            case_sensitive=rng.random() < 0.8,
            filter=to_json(tree, rng.choice(FORMS)),
            java_filter=to_json(tree, "java"),
        )
