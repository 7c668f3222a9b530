"""Clients of the server: synchronous, picklable, never importing the server."""

if __name__ != "seamark.connector":
    raise ImportError("Import seamark.connector: connector is its folder in the repository")
