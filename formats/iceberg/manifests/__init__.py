"""Manifests and manifest lists: codecs and content files."""
