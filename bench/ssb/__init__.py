"""The Star Schema Benchmark (O'Neil, O'Neil, Chen; revision 3, 2009): its data and its 13 queries, also on Spark."""
