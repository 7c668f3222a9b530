"""`seamark sql`, and the worker process of SQL statements."""
