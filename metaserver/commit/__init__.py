"""Commits of tables: updates of engines and changes of writers, until they are durable."""
