"""Manifests and manifest lists."""
