"""The store's SQL: the schema, reads, operations, and the drivers of SQLite and PostgreSQL."""
