"""Index builds, the indexer, audits and their commands."""
