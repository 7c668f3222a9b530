"""Table services: the declarations that the server and the clients share."""
