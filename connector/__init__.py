"""Contains the clients of the server, which are synchronous, can be pickled, and never import the server."""

if __name__ != "seamark.connector":
    raise ImportError("The package is named seamark.connector, not connector; import seamark.connector")
