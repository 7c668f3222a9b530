"""The query history: which statements read a table, by their shapes, without their literals."""
