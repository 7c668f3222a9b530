"""Returns the results of Spark tasks to the driver. Each task with a result returns one row of bytes."""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import types as spark_types

RESULT = spark_types.StructType([spark_types.StructField("result", spark_types.BinaryType(), False)])
"""The schema of the frame with the results (`DataFrame.mapInArrow`)."""
_ARROW = pa.schema([pa.field("result", pa.binary(), False)])


def encode_result(result: bytes) -> pa.RecordBatch:
    """Return the batch in which a task returns its result."""
    return pa.RecordBatch.from_arrays([pa.array([result], pa.binary())], schema=_ARROW)


def collect_results(frame: DataFrame) -> list[bytes]:
    """Run the tasks of a frame, and return their results."""
    return [bytes(row.result) for row in frame.collect()]
