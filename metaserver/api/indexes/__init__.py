"""Index definitions, builds and audits."""
