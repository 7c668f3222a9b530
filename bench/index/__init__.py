"""Benchmarks of the indexes: each kind of index is compared with readers that have no index."""
