"""Runs MERGE, UPDATE, DELETE and INSERT OVERWRITE on the rows that an index locates."""
