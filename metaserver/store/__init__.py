"""The pointer store: the catalog's only mutable state, a port with implementations on SQLite and PostgreSQL."""
