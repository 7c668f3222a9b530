"""Seamark's server: an Iceberg REST catalog with a timeline."""

if __name__ != "seamark.metaserver":
    raise ImportError("The package is named seamark.metaserver, not metaserver; import seamark.metaserver")
