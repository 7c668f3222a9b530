"""The pointer store: the catalog's only mutable state. It is a port with implementations on SQLite and PostgreSQL."""
