"""Snapshots from changes: manifests, manifest lists and summaries."""
