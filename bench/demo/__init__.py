"""`make demo`: run the Star Schema Benchmark in Spark and Trino in four ways, and show the files, bytes and seconds
of each query.
"""
