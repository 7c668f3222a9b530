"""Commits of tables: stock updates and native changes, until they are durable."""
