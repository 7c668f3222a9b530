"""What Spark's tasks tell the driver: bytes, one row of them from each task that has something to tell."""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import types as spark_types

RESULT = spark_types.StructType([spark_types.StructField("result", spark_types.BinaryType(), False)])
"""Of the frame that such tasks make (`DataFrame.mapInArrow`)."""
_ARROW = pa.schema([pa.field("result", pa.binary(), False)])


def result_of(told: bytes) -> pa.RecordBatch:
    """As a task gives it."""
    return pa.RecordBatch.from_arrays([pa.array([told], pa.binary())], schema=_ARROW)


def told_by(frame: DataFrame) -> list[bytes]:
    """Runs the tasks, and takes what they tell."""
    return [bytes(row.result) for row in frame.collect()]
