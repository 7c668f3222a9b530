"""Seamark's server: an Iceberg REST catalog with a timeline."""

if __name__ != "seamark.metaserver":
    raise ImportError("Import seamark.metaserver: metaserver is its folder in the repository")
