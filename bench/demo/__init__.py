"""`make demo`: the Star Schema Benchmark in Spark, three ways, with the files, bytes and seconds of each query."""
