"""Decoded manifests, and the index files of a server: their registry, registration, reading and cleaning."""
