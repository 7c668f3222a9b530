"""PyIceberg's planner, timed in this process: `table.scan(row_filter=f).plan_files()`, read to the end.

It decodes manifests with its Cython Avro reader on a pool of threads. `python -m bench.planning.pyiceberg_peer METADATA
FILTER` prints each plan as JSON. A plan of a million files takes over a minute.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from typing import Any

import pyiceberg
from pyiceberg.expressions import AlwaysTrue, BooleanExpression
from pyiceberg.table import StaticTable

from bench.planning.plans import KeptFiles, compute_fingerprint


def get_version() -> str:
    return pyiceberg.__version__


class PyIcebergPlanner:
    """PyIceberg's planner for one table, loaded from its metadata file."""

    def __init__(self, metadata_location: str) -> None:
        self._table = StaticTable.from_metadata(metadata_location)

    def plan(self, expression: Any) -> KeptFiles:
        """Plan a filter, and return the kept files and the time.

        Args:
            expression: The filter as JSON values of an Iceberg REST expression. Dates and times are ISO texts.
        """
        parsed_filter = AlwaysTrue() if expression is True else BooleanExpression.model_validate(expression)
        started_s = time.perf_counter()
        tasks = list(self._table.scan(row_filter=parsed_filter).plan_files())
        elapsed_ms = (time.perf_counter() - started_s) * 1000
        files = [task.file for task in tasks]
        size = sum(file.file_size_in_bytes for file in files)
        return KeptFiles(elapsed_ms, len(files), size, compute_fingerprint(file.file_path.encode() for file in files))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.planning.pyiceberg_peer", description=__doc__)
    parser.add_argument("metadata", help="location of the metadata file, file:///…")
    parser.add_argument("filter", nargs="?", default="true", help="a REST expression as JSON")
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    planner = PyIcebergPlanner(arguments.metadata)
    for _ in range(arguments.rounds):
        print(json.dumps(dataclasses.asdict(planner.plan(json.loads(arguments.filter)))), flush=True)


if __name__ == "__main__":
    main()
