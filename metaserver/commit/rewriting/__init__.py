"""Rewrites manifests: the same files are listed in fewer manifests, and each manifest lists few partitions."""
