"""Rows for stream tables: a client's writer, and the files that the server writes."""
