"""Tests of the query history: shapes of statements, what is recorded of them, and who may read it."""
