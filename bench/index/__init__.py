"""Benches of indexes: each kind is compared with readers that have no index."""
