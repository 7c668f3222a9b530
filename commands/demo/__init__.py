"""`seamark demo`, which shows how an unmodified reader profits from the server."""
