"""Rewrites manifests: the same files, listed in fewer manifests that each list few partitions."""
