"""Creates snapshots from changes: manifests, manifest lists and summaries."""
