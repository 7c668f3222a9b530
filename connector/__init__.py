"""Contains the clients of the server, which are synchronous, can be pickled, and never import the server."""

if __name__ != "seamark.connector":
    raise ImportError("Import seamark.connector: connector is its folder in the repository")
