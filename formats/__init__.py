"""The core that server and clients share: Iceberg's formats, index kinds, and the parts of the protocol that server and
clients need.
"""

if __name__ != "seamark.formats":
    raise ImportError("Import seamark.formats: formats is its folder in the repository")
