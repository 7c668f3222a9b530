"""The pointer store: the one mutable thing, behind one port with SQLite and PostgreSQL implementations."""
