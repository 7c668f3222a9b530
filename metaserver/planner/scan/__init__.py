"""A scan: what a client requests, and which files it has to open."""
