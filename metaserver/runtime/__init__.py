"""Shared parts of the running server: the home folder, background work, concurrency, allowed staleness."""
