"""Contains the routes of SQL statements. Each statement runs in a worker process with the rights of its caller."""
