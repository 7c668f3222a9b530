"""SQL statements over HTTP, each run by a worker process with the rights of its caller."""
