"""The core that server and clients share: Iceberg's formats, index kinds, and common parts of the protocol."""

if __name__ != "seamark.formats":
    raise ImportError("Import seamark.formats: formats is its folder in the repository")
