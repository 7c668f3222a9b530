"""Table services: what the server and the clients both know about each."""
