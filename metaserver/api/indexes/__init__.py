"""Routes of index definitions, builds and audits."""
