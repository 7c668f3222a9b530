"""`seamark serve`: the server, its workers, and the routes that need the connector."""
