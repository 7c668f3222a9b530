"""Decoded manifests, and the index files of a server: registry, registration, reading, cleaning."""
