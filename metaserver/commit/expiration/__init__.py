"""Snapshot expiration: removes old snapshots, and deletes the files that no other snapshot needs."""
