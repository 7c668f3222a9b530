"""DataFrames written by Spark's tasks and committed by its driver."""
