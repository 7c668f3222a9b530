"""The Star Schema Benchmark (O'Neil, O'Neil, Chen; revision 3, 2009): its data, its 13 queries, and both on Spark."""
