"""The pointer store, which contains the catalog's only mutable state: a port, and its implementations on SQLite and
PostgreSQL."""
