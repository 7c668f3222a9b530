"""`make demo`: run the Star Schema Benchmark in Spark in three ways, and show the files, bytes and seconds
of each query.
"""
