"""Rewrites manifests, so that fewer manifests list the same files, and each manifest lists few partitions."""
